"""Which rows are to be rotated: a frozen `RotateProblem` made from shapes, dtypes and strides."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError
from .forward import check_place, check_result
from .layout import AXES, FLOATS, Layout, result_layout
from .options import Options
from .rotation import Rotation, make_rotation

ROTATE_ARRAYS = ("x", "cos", "sin", "positions", "out")


@dataclass(frozen=True, slots=True)
class RotateProblem:
    """Rows to rotate, checked.

    `x` and `out` have all axes in the order of kernels, `(*batch, heads, seq, dim)`; `seen` has the arrays of a call, those of
    `ROTATE_ARRAYS`, as the user sees them.
    """

    x: Layout
    out: Layout
    rotation: Rotation
    seen: tuple[Layout | None, ...]
    layout: str
    backend: str

    @property
    def batch(self) -> tuple[int, ...]:
        """The axes before heads."""
        return self.x.shape[:-3]


def make_rotate_problem(
    x: Layout,
    cos: Layout,
    sin: Layout,
    positions: Layout | None,
    out: Layout | None,
    *,
    interleaved: bool,
    layout: str,
    backend: str,
) -> RotateProblem:
    """Check the arguments of `rotate`.

    Raises
    ------
    TypeError, ValueError
        For arguments that no implementation could accept.
    UnsupportedError
        For float64 where kernels compute.
    """
    options = Options(layout=layout, backend=backend)
    order = options.resolve_layout()
    check_rows("x", x, 2, order)
    backend = resolve_backend(options, "x", x)
    order = order if len(x.shape) > 2 else "bhsd"
    full = _with_heads(x.in_order(order))
    if out is None:
        seen_out = result_layout(x, x.shape)
    else:
        check_result("out", out, x.shape, x.dtype, x.device)
        seen_out = out
    rotation = make_rotation(cos, sin, positions, interleaved, name="x", rows=full)
    seen = (x, cos, sin, positions, seen_out)
    return RotateProblem(full, _with_heads(seen_out.in_order(order)), rotation, seen, order, backend)


def check_rows(name: str, rows: Layout, axes: int, order: str) -> None:
    """Refuse what are not rows of floats with at least so many axes."""
    if rows.dtype not in FLOATS:
        raise TypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {rows.dtype}")
    if len(rows.shape) < axes:
        raise ValueError(f"{name}: expected at least {axes} axes, {AXES[order]}, got shape {rows.shape}")
    check_place(name, rows, rows.device, name)


def resolve_backend(options: Options, name: str, rows: Layout) -> str:
    """The backend for an argument of this name, which has to compute its dtype."""
    backend = options.resolve_backend(rows.device)
    if rows.dtype == "float64" and backend != "numpy":
        raise UnsupportedError(
            f"{name}: expected float16, bfloat16 or float32 on backend {backend!r}, got float64, "
            "which only backend 'numpy' computes, from arrays in host memory"
        )
    return backend


def _with_heads(rows: Layout) -> Layout:
    return rows.broadcast_to((1,) * (3 - len(rows.shape)) + rows.shape)
