"""Every kernel that the tuning tables can ask for: what `compile` and the tests walk through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .architecture import ARCHITECTURES, Architecture
from .plan import Plan, configure
from .tuning import table_for

# What kernels tell apart by name: the dtype of the arrays and the precision of products.
KINDS = {
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
    "float32": ("float32", "ieee"),
    "tf32": ("float32", "tf32"),
}


def has(architecture: Architecture, kind: str) -> bool:
    """Whether an architecture computes this kind; bfloat16 and TF32 came with sm_80."""
    return kind in ("float16", "float32") or architecture.number >= 80


def every_plan(
    architectures: Iterable[Architecture] = tuple(ARCHITECTURES.values()), kinds: Iterable[str] = tuple(KINDS)
) -> Iterator[Plan]:
    """One plan for each tile in the tuning tables, at its row's own width and with 16-byte copies.

    Parameters
    ----------
    architectures : iterable of Architecture
    kinds : iterable of str
        Keys of `KINDS`. What an architecture does not compute is left out for it.
    """
    kinds = tuple(kinds)
    for architecture in architectures:
        for kind in kinds:
            if has(architecture, kind):
                dtype, precision = KINDS[kind]
                plans = []
                for row in table_for(architecture, dtype):
                    config = configure(row, architecture, dtype, precision, row.width, row.width)
                    plans.append(Plan("fwd_v2", architecture, config, (f"tile {row.tile_q}x{row.tile_kv}: {row.why}",)))
                yield from dict.fromkeys(plans)  # rows for few queries and for small copies may be one tile
