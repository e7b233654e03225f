"""Every kernel that the tuning tables can ask for: what `compile` and the tests walk through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from .append import append_plan
from .architecture import ARCHITECTURES, Architecture
from .fp16_parts import ALL_ROWS, MOST_DIMS, MOST_PARTS, parts_plan
from .gradient_parts import GRADIENT_ROWS
from .gradient_parts import KERNEL as GRADIENTS_IN_PARTS
from .grouping import HOPPER_KERNELS, has_idle_warps
from .kernel import PARAMS, KernelPlan, configure
from .merge import merge_plan
from .read_hopper import FILE as HOPPER
from .read_hopper import rows_for, text_of_rows
from .rotate import rotate_plan
from .tuning import SHORT, TileConfig, table_for

# What kernels tell apart by name: the dtype of the arrays and the precision of products.
KINDS = {
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
    "float32": ("float32", "ieee"),
    "tf32": ("float32", "tf32"),
}

# Kernels without a table: one plan serves each dtype.
PLANNED_ALONE = {"merge": merge_plan, "rotate": rotate_plan, "append": append_plan}
IN_PARTS = ("fp16_parts", GRADIENTS_IN_PARTS)  # of float32 alone


def has(architecture: Architecture, kind: str) -> bool:
    """Whether an architecture computes this kind; bfloat16 and TF32 came with sm_80."""
    return kind in ("float16", "float32") or architecture.number >= 80


def every_plan(
    architectures: Iterable[Architecture] = tuple(ARCHITECTURES.values()),
    kinds: Iterable[str] = tuple(KINDS),
    kernels: Iterable[str] = tuple(PARAMS),
) -> Iterator[KernelPlan]:
    """One plan for each tile in the tuning tables, at its row's own width and with 16-byte copies; of three kernels some more.

    Parameters
    ----------
    architectures : iterable of Architecture
    kinds : iterable of str
        Keys of `KINDS`. What an architecture does not compute is left out for it.
    kernels : iterable of str
        Keys of `kernel.PARAMS`: names of kernel files. A tile of fwd_hopper has a second plan, by which blocks share query tiles,
        one of the Hopper backwards those of `_ahead_plans`, and append has one for queries.
    """
    kinds, kernels = tuple(kinds), tuple(kernels)
    for architecture, kind, kernel in product(architectures, kinds, kernels):
        if not has(architecture, kind):
            continue
        dtype, precision = KINDS[kind]
        if kernel in IN_PARTS or (kernel == "fwd_hopper" and dtype == "float32"):
            yield from _plans_in_parts(kernel, architecture, precision) if architecture.name == "90a" and dtype == "float32" else ()
        elif kernel not in PLANNED_ALONE:
            # Rows for few queries and for small copies may be one tile.
            rows = (rows_for if kernel == HOPPER else partial(table_for, kernel))(architecture, dtype)
            plans = list(dict.fromkeys(_row_plan(kernel, architecture, dtype, precision, row) for row in rows))
            yield from plans
            if kernel in HOPPER_KERNELS:
                yield from _ahead_plans(plans)
            if kernel == "fwd_hopper":
                yield from (replace(plan, config=replace(plan.config, SPLIT_KV=True)) for plan in plans)
        elif precision == "ieee":
            yield PLANNED_ALONE[kernel](architecture, dtype)
            if kernel == "append":
                yield append_plan(architecture, dtype, rotate_q=True)


def _plans_in_parts(kernel: str, architecture: Architecture, precision: str) -> Iterator[KernelPlan]:
    """Float32 by products of float16: what makes the parts, or the forward or the backward of these."""
    parts = 1 if precision == "tf32" else MOST_PARTS
    if kernel == "fp16_parts":
        yield parts_plan(architecture, parts)
        return
    if kernel == GRADIENTS_IN_PARTS:
        plans = [_row_plan(kernel, architecture, "float16", "ieee", row) for row in GRADIENT_ROWS[parts]]
        plans = [replace(plan, config=replace(plan.config, FP16_PARTS=parts, FLOAT32_RESULTS=True)) for plan in plans]
        yield from plans
        yield from _ahead_plans(plans)
        return
    rows = ALL_ROWS if parts == MOST_PARTS else table_for(kernel, architecture, "float16")
    rows = [replace(row, tma_store_out=False) for row in rows if row.width <= MOST_DIMS[precision][0] and row.max_len_q != SHORT]
    for plan in dict.fromkeys(_row_plan(kernel, architecture, "float16", "ieee", row) for row in rows):
        for split in (False, True):
            yield replace(plan, config=replace(plan.config, SPLIT_KV=split, FP16_PARTS=parts, FLOAT32_RESULTS=True))


def _ahead_plans(plans: Iterable[KernelPlan]) -> Iterator[KernelPlan]:
    """By which blocks take whole heads, or make zeros for later ones, and where warps are idle, statistics with and without."""
    for plan in plans:
        stats = plan.file == "bwd_hopper" and has_idle_warps(plan.config)
        made = [{"STATS_AHEAD": True}] * stats
        made += [{"ZEROS_AHEAD": True, "STATS_AHEAD": stats}, {"FIRST_STORES": True}]
        made += [{"PERSISTENT": True, "WHOLE_HEADS": True}] * (plan.file == "bwd_hopper" and not plan.config.TMA_REDUCE_DQ)
        in_order = {"STATS_AHEAD": True, "IN_ORDER": True}
        made += [in_order | way for way in ({}, {"ZEROS_AHEAD": True}, {"FIRST_STORES": True})] * stats
        yield from (replace(plan, config=replace(plan.config, **knobs)) for knobs in made)


def _row_plan(kernel: str, architecture: Architecture, dtype: str, precision: str, row: TileConfig) -> KernelPlan:
    width_v = row.width_v or row.width
    if kernel == HOPPER:  # which is compiled for a bias alone
        text = text_of_rows(dtype)
        config = configure(row, architecture, dtype, precision, row.width, width_v, expressions=text)
        return KernelPlan(kernel, architecture, config, (row.reason,), text)
    config = configure(row, architecture, dtype, precision, row.width, width_v)
    return KernelPlan(kernel, architecture, config, (row.reason,))
