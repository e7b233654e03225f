"""Which two results are to be merged: a frozen `MergeProblem` made from shapes, dtypes and strides."""

from __future__ import annotations

from collections.abc import Sequence
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


def make_merge_problem(
    out_a: Layout, lse_a: Layout, out_b: Layout, lse_b: Layout, layout: str, backend: str, names: Sequence[str] = MERGE_ARRAYS[:4]
) -> MergeProblem:
    """Check two states for `merge_states`, and say where and how their result lies; errors are those of `check_states`."""
    backend = check_states((out_a, lse_a, out_b, lse_b), names, layout, backend)
    # In memory the rows of a head lie together, as `attention` leaves them.
    order, shape = Options(layout=layout).resolve_layout(), out_a.shape
    rows = in_order(shape[:-1], order, HEADS_OF_LSE)
    lse = dense_layout(rows, reversed(range(len(rows))), lse_a.dtype, out_a.device).in_order(order, HEADS_OF_LSE)
    return MergeProblem(out_a, lse_a, out_b, lse_b, result_layout(out_a, shape), lse, backend)


def check_states(given: Sequence[Layout], names: Sequence[str], layout: str, backend: str) -> str:
    """Check the arguments of `merge_states`, and return the backend that merges them.

    Parameters
    ----------
    given : sequence of Layout
        The out and the lse of one state after the other.
    names : sequence of str
        What error messages call them.
    layout, backend : str

    Raises
    ------
    TypeError, ValueError
        For arguments that no implementation could accept.
    UnsupportedError
        For float64 where kernels compute.
    """
    out, first = given[0], names[0]
    if out.dtype not in FLOATS:
        raise TypeError(f"{first}: expected float16, bfloat16, float32 or float64, got {out.dtype}")
    options = Options(layout=layout, backend=backend)
    order = options.resolve_layout()
    if len(out.shape) < 2:
        raise ValueError(f"{first}: expected at least 2 axes, {AXES[order]}, got shape {out.shape}")
    check_place(first, out, out.device, first)
    for name, other in zip(names[2::2], given[2::2]):
        check_operand(name, other, out.shape, out.dtype, out.device, first)
    for name, lse in zip(names[1::2], given[1::2]):
        check_operand(name, lse, out.shape[:-1], lse_dtype_of(out.dtype), out.device, first)
    backend = options.resolve_backend(out.device)
    if out.dtype == "float64" and backend != "numpy":
        raise UnsupportedError(
            f"{first}: expected float16, bfloat16 or float32 on backend {backend!r}, got float64, "
            "which only backend 'numpy' computes, from arrays in host memory"
        )
    return backend
