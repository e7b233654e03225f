"""How a problem is computed: (`Problem`, `Architecture`) -> `Plan`, a pure function over the tables in `tuning`.

A plan names everything that reaches a compiled kernel, so equal plans share one. Its knobs change speed, never results.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from .architecture import Architecture
from .errors import UnsupportedError
from .layout import Layout
from .problem import Problem
from .tuning import WIDTHS, Row, row_for


@dataclass(frozen=True, slots=True)
class Config:
    """The compile-time constants of a kernel, named as in ``kernels_cu/config.cuh`` and explained there."""

    ARCH: int
    DTYPE: str
    TF32_PASSES: int
    TILE_Q: int
    TILE_KV: int
    WIDTH: int
    WIDTH_V: int
    WARPS: int
    STAGES: int
    MIN_BLOCKS: int
    COPY_BYTES: int
    Q_IN_REGISTERS: bool
    LAZY_RESCALE: bool
    EXPLICIT_SCORES: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A kernel, its constants, and why they were chosen. Prints itself."""

    kernel: str
    architecture: Architecture
    config: Config
    reasons: tuple[str, ...] = field(compare=False)  # two plans of one kernel are equal, however they came about

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.config.WARPS

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; `kernels_cu/fwd_v2.cu` states the same sum as SHARED_BYTES."""
        c = self.config
        itemsize = 4 if c.DTYPE == "FLOAT32" else 2
        queries = c.TILE_Q * max(c.WIDTH, c.WIDTH_V)
        return (queries + c.STAGES * c.TILE_KV * (c.WIDTH + c.WIDTH_V)) * itemsize

    def blocks(self, problem: Problem) -> int:
        """Blocks of the grid: one per query tile, head and batch element."""
        blocks = -(-problem.len_q // self.config.TILE_Q) * problem.heads_q
        for size in problem.batch:
            blocks *= size
        return blocks

    @property
    def name(self) -> str:
        """Kernel, architecture and whatever tells this plan from others, on one line."""
        c = self.config
        words = [self.kernel, str(self.architecture), c.DTYPE.lower(), f"d{c.WIDTH}"]
        words += [f"v{c.WIDTH_V}"] * (c.WIDTH_V != c.WIDTH) + ["tf32"] * (c.TF32_PASSES == 1)
        words += [f"{c.TILE_Q}x{c.TILE_KV}", f"w{c.WARPS}", f"copy{c.COPY_BYTES or 'elements'}"]
        return "-".join(words + ["explicit"] * c.EXPLICIT_SCORES)

    def __str__(self) -> str:
        constants = ", ".join(f"{knob.name}={getattr(self.config, knob.name)}" for knob in fields(self.config))
        lines = [
            f"{self.kernel} for {self.architecture}: {self.threads} threads, {self.shared_bytes} bytes of shared memory",
            f"  {constants}",
            *(f"  {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)


def make_plan(problem: Problem, architecture: Architecture) -> Plan:
    """Choose the kernel for a problem.

    Parameters
    ----------
    problem : Problem
        With backend 'cuda' or 'host'.
    architecture : Architecture

    Returns
    -------
    Plan

    Raises
    ------
    UnsupportedError
        If no kernel for this architecture computes the problem.
    """
    if problem.dtype == "bfloat16" and architecture.number < 80:
        raise UnsupportedError(f"q: expected float16 or float32 on {architecture}, which has no bfloat16, got bfloat16")
    if problem.precision == "tf32" and architecture.number < 80:
        raise UnsupportedError(f"precision: expected None or 'ieee' on {architecture}, which has no tf32, got 'tf32'")
    width, width_v = padded(problem.dim), padded(problem.dim_v)
    copy_bytes, why_copy = copy_size(problem)
    explicit = problem.softcap is not None or problem.scale <= 0
    row = row_for(architecture, problem.dtype, max(width, width_v), problem.len_q, copy_bytes, explicit)
    why_scores = "scores scaled one by one: softcap" if problem.softcap is not None else ""
    why_scores = why_scores or ("scores scaled one by one: scale <= 0" if explicit else "")
    return Plan(
        kernel="fwd_v2",
        architecture=architecture,
        config=configure(row, architecture, problem.dtype, problem.precision, width, width_v, copy_bytes, explicit),
        reasons=tuple(filter(None, (f"tile {row.tile_q}x{row.tile_kv}: {row.why}", why_copy, why_scores))),
    )


def configure(
    row: Row,
    architecture: Architecture,
    dtype: str,
    precision: str,
    width: int,
    width_v: int,
    copy_bytes: int = 16,
    explicit: bool = False,
) -> Config:
    """The constants of a kernel from a row of a tuning table and what the problem adds."""
    return Config(
        ARCH=architecture.number,
        DTYPE=dtype.upper(),
        TF32_PASSES=1 if precision == "tf32" else 3,
        TILE_Q=row.tile_q,
        TILE_KV=row.tile_kv,
        WIDTH=width,
        WIDTH_V=width_v,
        WARPS=row.warps,
        STAGES=row.stages,
        MIN_BLOCKS=row.min_blocks,
        COPY_BYTES=copy_bytes,
        Q_IN_REGISTERS=row.q_in_registers,
        LAZY_RESCALE=row.lazy_rescale,
        EXPLICIT_SCORES=explicit,
    )


def padded(dim: int) -> int:
    """The compiled width that serves a head dim."""
    return next(width for width in WIDTHS if width >= dim)


def copy_size(problem: Problem) -> tuple[int, str]:
    """The most bytes that may move at once: 16, 8, 4, or 0 for single elements; and what keeps it below 16."""
    why = ""
    for size in (16, 8, 4):
        obstacle = next(filter(None, (_obstacle(problem, name, size) for name in ("q", "k", "v", "out"))), None)
        if obstacle is None:
            return size, why and f"copies of {size} bytes: {why}"
        why = why or obstacle
    return 0, f"copies of single elements: {obstacle}"


def _obstacle(problem: Problem, name: str, size: int) -> str | None:
    """Why `name` cannot be moved `size` bytes at a time, or None."""
    layout: Layout = getattr(problem, name)
    *axes, (dim, step) = zip(layout.shape, layout.strides)
    if dim > 1 and step != 1:
        return f"elements of {name} are {step * layout.itemsize} bytes apart"
    if layout.alignment % size:
        return f"{name} starts at a multiple of {layout.alignment} bytes only"
    if dim * layout.itemsize % size:
        return f"rows of {name} have {dim * layout.itemsize} bytes"
    for axis_size, stride in axes:
        if axis_size > 1 and stride * layout.itemsize % size:
            return f"an axis of {name} has a stride of {stride * layout.itemsize} bytes"
    return None
