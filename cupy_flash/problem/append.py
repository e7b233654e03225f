"""Which rows are to be appended to which caches: a frozen `AppendProblem` made from shapes, dtypes and strides."""

from __future__ import annotations

from dataclasses import dataclass

from .forward import check_operand
from .layout import AXES, Layout, in_order, result_layout
from .options import Options, check_flag
from .rotate import check_rows, resolve_backend
from .rotation import Rotation, check_indices, make_rotation

APPEND_ARRAYS = (
    "k", "v", "cos", "sin", "seqlens", "seqlens_new", "positions", "pages", "cache_batch_idx", "q", "k_cache", "v_cache", "q_out",
)  # fmt: skip
APPENDED = ("k_cache", "v_cache")


@dataclass(frozen=True, slots=True)
class AppendProblem:
    """New rows and the caches that they are written into, checked.

    The rows are `(batch, heads, seq, dim)`, and the caches `(pages, heads, page size, dim)`, in the order of kernels; without a
    table of pages each sequence is a page of its own. The queries of the new rows, if there are any, have their own number of heads
    and become `q_out`. `seen` has the arrays of a call, those of `APPEND_ARRAYS`, as the user sees them.
    """

    k: Layout
    v: Layout
    k_cache: Layout
    v_cache: Layout
    q: Layout | None
    q_out: Layout | None
    rotation: Rotation | None
    seqlens: Layout | None
    seqlens_new: Layout | None
    pages: Layout | None
    cache_batch_idx: Layout | None
    seen: tuple[Layout | None, ...]
    layout: str
    backend: str

    @property
    def batch(self) -> int:
        """Batch elements that are appended to."""
        return self.k.shape[0]

    @property
    def new(self) -> int:
        """Rows of each of them, of which `seqlens_new` may say that some are none."""
        return self.k.shape[2]

    @property
    def page_count(self) -> int:
        """Pages that there are, of all sequences."""
        return self.k_cache.shape[0]

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.k_cache.shape[2]

    @property
    def capacity(self) -> int:
        """Rows that a sequence has places for."""
        return self.page_size * (1 if self.pages is None else self.pages.shape[1])

    @property
    def is_empty(self) -> bool:
        """Whether there are no rows, neither new ones nor queries."""
        heads = self.k.shape[1] + (0 if self.q is None else self.q.shape[1])
        return 0 in (self.batch, heads, self.new)


def make_append_problem(given: dict[str, Layout | None], *, interleaved: bool, layout: str, backend: str) -> AppendProblem:
    """Check the arguments of `append_kv`.

    Parameters
    ----------
    given : dict of str to Layout or None
        Those of `APPEND_ARRAYS`; `seqlens` is None where it is one number for all.
    interleaved, layout, backend
        As the user gave them.

    Raises
    ------
    TypeError, ValueError
        For arguments that no implementation could accept.
    UnsupportedError
        For float64 where kernels compute.
    """
    options = Options(layout=layout, backend=backend)
    order = options.resolve_layout()
    names = ("k", "v", *APPENDED, *(name for name in ("q", "q_out") if given[name] is not None))
    rows = {name: given[name] for name in names}
    pages, cache_batch_idx = given["pages"], given["cache_batch_idx"]
    for name, layout_of in rows.items():
        check_rows(name, layout_of, 4, order)
        if len(layout_of.shape) != 4:
            first = "batch" if name not in APPENDED or pages is None else "pages"
            raise ValueError(f"{name}: expected 4 axes, {AXES[order].replace('...', first)}, got shape {layout_of.shape}")
    dtype, device = rows["k"].dtype, rows["k"].device
    backend = resolve_backend(options, "k", rows["k"])
    batch, heads, new, dim = rows["k"].in_order(order).shape
    dim_v = rows["v"].shape[-1]
    page_count, _, page_size, _ = rows["k_cache"].in_order(order).shape
    if pages is None and cache_batch_idx is None:
        page_count = batch
    expected = {"v": (batch, heads, new, dim_v)}
    expected |= {name: (page_count, heads, page_size, width) for name, width in zip(APPENDED, (dim, dim_v))}
    if "q" in rows:
        of_queries = (batch, rows["q"].in_order(order).shape[1], new, dim)
        expected |= {"q": of_queries, "q_out": of_queries}
        rows.setdefault("q_out", result_layout(rows["q"], rows["q"].shape))
    elif "q_out" in rows:
        raise ValueError("q_out: expected None without q, got an array")
    for name, shape in expected.items():
        check_operand(name, rows[name], in_order(shape, order), dtype, device, "k")
    for name in (*APPENDED, *(["q_out"] if "q" in rows else [])):
        if rows[name].overlaps_itself:
            strides, shape = rows[name].strides, rows[name].shape
            raise ValueError(f"{name}: expected elements apart from each other, got strides {strides} for {shape}")
    for name in ("seqlens", "seqlens_new", "cache_batch_idx"):
        if given[name] is not None:
            check_indices(name, given[name], (batch,), device, "k")
    if pages is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: expected None with pages, which say where each sequence is, got an array")
        if page_size == 0:
            raise ValueError(f"k_cache: expected pages of at least 1 row, got shape {rows['k_cache'].shape}")
        if len(pages.shape) != 2:
            raise ValueError(f"pages: expected 2 axes, (batch, pages of a sequence), got shape {pages.shape}")
        check_indices("pages", pages, (batch, pages.shape[1]), device, "k")
    rotation = None
    if given["cos"] is None and given["q"] is not None:
        raise ValueError("q: expected None without cos, since queries are only rotated and are in no cache, got an array")
    if given["cos"] is None:
        for name in ("sin", "positions"):
            if given[name] is not None:
                raise ValueError(f"{name}: expected None without cos, got an array")
        if check_flag("interleaved", interleaved):
            raise ValueError("interleaved: expected False without cos, got True")
    elif given["sin"] is None:
        raise ValueError("sin: expected an array with cos, got None")
    else:
        angles = (given[name] for name in ("cos", "sin", "positions"))
        of_either = max((rows[name].in_order(order) for name in ("k", "q") if name in rows), key=lambda of: of.shape[1])
        rotation = make_rotation(*angles, interleaved, name="k", rows=of_either)
    return AppendProblem(
        **dict.fromkeys(("q", "q_out")) | {name: layout_of.in_order(order) for name, layout_of in rows.items()},
        rotation=rotation,
        seqlens=given["seqlens"],
        seqlens_new=given["seqlens_new"],
        pages=pages,
        cache_batch_idx=cache_batch_idx,
        seen=tuple((given | rows)[name] for name in APPEND_ARRAYS),
        layout=order,
        backend=backend,
    )
