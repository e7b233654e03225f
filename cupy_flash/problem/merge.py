"""Which two results are to be merged: a frozen `MergeProblem` made from shapes, dtypes and strides."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError
from .forward import check_operand, check_place, lse_dtype_of
from .layout import AXES, FLOATS, HEADS_OF_LSE, Layout, dense_layout, in_order, result_layout
from .options import Options

MERGE_ARRAYS = ("out_a", "lse_a", "out_b", "lse_b", "out", "lse")


@dataclass(frozen=True, slots=True)
class MergeProblem:
    """Two results to merge, checked. The layouts are as the user sees them."""

    out_a: Layout
    lse_a: Layout
    out_b: Layout
    lse_b: Layout
    out: Layout
    lse: Layout
    backend: str

    @property
    def layouts(self) -> dict[str, Layout]:
        """The arrays with all axes that the kernel counts, in order."""
        shape = (1,) * (3 - len(self.out.shape)) + self.out.shape
        return {name: getattr(self, name).broadcast_to(shape if name.startswith("out") else shape[:-1]) for name in MERGE_ARRAYS}


def make_merge_problem(out_a: Layout, lse_a: Layout, out_b: Layout, lse_b: Layout, layout: str, backend: str) -> MergeProblem:
    """Check the arguments of `merge_states`.

    Raises
    ------
    TypeError, ValueError
        For arguments that no implementation could accept.
    UnsupportedError
        For float64 where kernels compute.
    """
    if out_a.dtype not in FLOATS:
        raise TypeError(f"out_a: expected float16, bfloat16, float32 or float64, got {out_a.dtype}")
    options = Options(layout=layout, backend=backend)
    order = options.resolve_layout()
    if len(out_a.shape) < 2:
        raise ValueError(f"out_a: expected at least 2 axes, {AXES[order]}, got shape {out_a.shape}")
    shape, device = out_a.shape, out_a.device
    check_place("out_a", out_a, device, "out_a")
    check_operand("out_b", out_b, shape, out_a.dtype, device, "out_a")
    lse_dtype = lse_dtype_of(out_a.dtype)
    for name, given in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_operand(name, given, shape[:-1], lse_dtype, device, "out_a")
    backend = options.resolve_backend(device)
    if out_a.dtype == "float64" and backend != "numpy":
        raise UnsupportedError(
            f"out_a: expected float16, bfloat16 or float32 on backend {backend!r}, got float64, "
            "which only backend 'numpy' computes, from arrays in host memory"
        )
    # In memory the rows of a head lie together, as `attention` leaves them.
    rows = in_order(shape[:-1], order, HEADS_OF_LSE)
    lse = dense_layout(rows, reversed(range(len(rows))), lse_dtype, device).in_order(order, HEADS_OF_LSE)
    return MergeProblem(out_a, lse_a, out_b, lse_b, result_layout(out_a, shape), lse, backend)
