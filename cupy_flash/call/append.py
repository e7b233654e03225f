"""New keys and values written into caches: `append_kv` from arguments to launch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy

from ..errors import shown
from ..machine.execution import Execution
from ..machine.operands import Operands
from ..machine.prepared import Prepared, architecture_for, cached
from ..plan.append import append_launches, make_append_plan
from ..plan.kernel import KernelPlan
from ..plan.rotation_params import append_params
from ..plan.workspace import Workspace
from ..problem import arrays
from ..problem.append import APPEND_ARRAYS, APPENDED, AppendProblem, make_append_problem
from .indices import by_value, check_range, of_positions, read_by_host

LENGTH = "length"  # the kernel's name for a number of rows that is told by its value


class AppendPlan(Prepared):
    """An append with everything decided.

    Attributes
    ----------
    problem : AppendProblem
    """

    def __init__(self, problem: AppendProblem, kernel: KernelPlan | None) -> None:
        self.problem = problem
        device = problem.k.device
        execution = None
        if kernel is not None:
            names = (*APPEND_ARRAYS, LENGTH)
            launches, params = append_launches(kernel, problem), append_params(kernel, problem)
            execution = Execution(kernel, launches, params, names, Workspace(), device)
        super().__init__(dict(zip(APPEND_ARRAYS, problem.seen)), (*APPENDED, "q_out"), problem.backend, device, execution)

    def __str__(self) -> str:
        p = self.problem
        cache = f"{p.batch} sequences of {p.capacity} rows" + (f" in {p.page_count} pages of {p.page_size}" if p.pages else "")
        queries = f", with queries of {p.q.shape[1]} heads" if p.q is not None else ""
        return f"append of {p.new} rows of {p.k.dtype} to {cache}{queries}, on backend {self._backend!r}"

    def run(self, given: Operands, length: int | None, known: dict[str, numpy.ndarray]) -> tuple[Any, ...]:
        """Append arrays that are known to have the layouts planned for.

        Parameters
        ----------
        given : Operands
        length : int or None
            Rows that are there, of all batch elements, where there is no array of them.
        known : dict of str to numpy.ndarray
            Integers in host memory.
        """
        p = self.problem
        if length is not None:
            if not 0 <= length <= p.capacity:
                raise ValueError(f"seqlens: expected a length of at least 0 and at most {p.capacity}, got {shown(length)}")
            known = known | {"seqlens": numpy.full(p.batch, length)}
        if not p.is_empty:
            _check_values(p, known)
        *inputs, at_q, at_k, at_v, at_out = given.addresses
        if at_q == at_out and p.seen[-4] == p.seen[-1]:
            at_q = 0  # in place
        if self._interleaved(at_k, at_v):
            self._check_apart([*inputs, at_q, at_k, 0, at_out], None)
            self._check_apart([*inputs, at_q, 0, at_v, at_out], None)
        else:
            self._check_apart([*inputs, at_q, at_k, at_v, at_out], None)
        q_out = self._where_planned(self._compute, given, length or 0, known)
        *_, q, k_cache, v_cache, out = given.arrays
        if q is None:
            return k_cache, v_cache
        return k_cache, v_cache, arrays.give_back(q_out, q, "q") if out is None else out

    def _interleaved(self, at_k: int, at_v: int) -> bool:
        """Whether the caches lie in one array and share no element: `x[:, 0]` and `x[:, 1]`, or `x[..., :d]` and `x[..., d:]`."""
        *_, (low_k, high_k), (low_v, high_v), _ = self._spans
        if at_k + high_k <= at_v + low_v or at_v + high_v <= at_k + low_k:
            return False  # one behind the other
        (first, at), (second, behind) = sorted(zip(self.problem.seen[-3:-1], (at_k, at_v)), key=lambda cache: cache[1])
        apart, rest = divmod(behind - at, first.itemsize)
        if rest or first.strides != second.strides:
            return False
        shape = tuple(map(max, first.shape, second.shape))
        if not replace(first, shape=(2, *shape), strides=(apart, *first.strides)).overlaps_itself:
            return True
        columns, rest = divmod(apart, abs(first.strides[-1]) or 1)
        if rest or first.strides[-1] <= 0 or columns < first.shape[-1]:
            return False
        return not replace(first, shape=(*shape[:-1], columns + second.shape[-1])).overlaps_itself

    def _compute(self, given: Operands, length: int, known: dict[str, numpy.ndarray]) -> Any:
        """Append, and return the rotated queries, in a new array if there is none for them."""
        *views, q_out = given.views
        *addresses, at_out = given.addresses
        if q_out is None and self.problem.q is not None:
            q_out = arrays.empty(self.problem.seen[-1])
            at_out = arrays.pointer(q_out)
        if self._backend == "cuda":
            self._execution.on_device.launch([*addresses, at_out, length])
        elif self._backend == "host":
            self._execution.run_on_host([*views, q_out, length], None)
        elif not self.problem.is_empty:
            self._compute_with_numpy(dict(zip(APPEND_ARRAYS, (*views, q_out))), known)
        return q_out

    def _compute_with_numpy(self, views: dict[str, Any], known: dict[str, numpy.ndarray]) -> None:
        from ..machine.numpy_path.append import append as numpy_append  # late: a GPU does not need it
        from ..machine.numpy_path.rotate import rotated

        p = self.problem
        rows, caches = ([arrays.in_order(views[name], p.layout) for name in names] for names in (("k", "v"), APPENDED))
        lengths, counts = known["seqlens"], _counts(p, known)
        if p.rotation is not None:
            first = known.get("positions", lengths)
            of_rows = first if p.rotation.of_each else first[:, None] + numpy.arange(p.new)
            rows[0] = rotated(rows[0], views["cos"], views["sin"], of_rows, p.rotation.interleaved)
            if p.q is not None:
                q, q_out = (arrays.in_order(views[name], p.layout) for name in ("q", "q_out"))
                q_out[...] = rotated(q, views["cos"], views["sin"], of_rows, p.rotation.interleaved)
        for cache, new in zip(caches, rows):
            numpy_append(cache, new, lengths, counts, known.get("pages"), known.get("cache_batch_idx"))


def _counts(p: AppendProblem, known: dict[str, numpy.ndarray]) -> numpy.ndarray:
    """Rows that each batch element is given."""
    return known["seqlens_new"] if "seqlens_new" in known else numpy.full(p.batch, p.new)


def _check_values(p: AppendProblem, known: dict[str, numpy.ndarray]) -> None:
    """Refuse rows without a place, and positions without angles, as far as the host can read what tells them."""
    new = known.get("seqlens_new")
    if new is not None:
        check_range("seqlens_new", new, 0, p.new + 1, f"numbers of rows, at least 0 and at most {p.new}, those of k")
    of_cache = known.get("cache_batch_idx")
    if of_cache is not None:
        expected = f"rows of the cache below {p.page_count}, or negative numbers, which leave elements out"
        check_range("cache_batch_idx", of_cache, -(2**63), p.page_count, expected)
    if (new is None and p.seqlens_new) or (of_cache is None and p.cache_batch_idx):
        return  # which rows are appended is known on the device alone
    counts = _counts(p, known).astype(numpy.int64)
    asked = (counts > 0) & (of_cache >= 0 if of_cache is not None else True)
    lengths = known.get("seqlens")
    if lengths is not None:
        lengths = lengths.astype(numpy.int64)
        expected = f"lengths of at least 0 that leave room for the new rows in {p.capacity}"
        check_range("seqlens", lengths, 0, p.capacity - counts + 1, expected, asked)
        if "pages" in known:
            first, last = lengths // p.page_size, (lengths + counts - 1) // p.page_size
            columns = numpy.arange(known["pages"].shape[1])
            used = asked[:, None] & (columns >= first[:, None]) & (columns <= last[:, None])
            expected = f"numbers of pages, at least 0 and below {p.page_count}, where rows are appended"
            check_range("pages", known["pages"], 0, p.page_count, expected, used)
    if p.rotation is None:
        return
    ends, positions = p.rotation.ends, known.get("positions")
    if positions is not None and p.rotation.of_each:
        used = asked[:, None] & (numpy.arange(p.new) < counts[:, None])
        check_range("positions", positions, 0, ends, of_positions(ends), used)
    elif positions is not None:
        check_range("positions", positions, 0, ends - counts + 1, of_positions(ends, p.new), asked)
    elif p.rotation.positions is None and lengths is not None:
        expected = f"lengths that leave the new rows at positions below {ends}, the rows of cos"
        check_range("seqlens", lengths, 0, ends - counts + 1, expected, asked)


def append(
    k_cache: Any, v_cache: Any, k: Any, v: Any, seqlens: Any, *, interleaved: bool, layout: str, backend: str, **others: Any
) -> tuple[Any, ...]:
    """What `append_kv` returns; a plan once made for equal layouts is found again."""
    length, seqlens = by_value("seqlens", seqlens)
    by_name = {"k": k, "v": v, "seqlens": seqlens, "k_cache": k_cache, "v_cache": v_cache, **others}
    for name in ("seqlens", *APPENDED):  # which the others may be left out beside
        if by_name[name] is None and (name != "seqlens" or length is None):
            arrays.view(None, name)
    given = Operands(APPEND_ARRAYS, tuple(by_name[name] for name in APPEND_ARRAYS), required=2, results=3)
    *_, device = given.descriptions[0]
    known = read_by_host(APPEND_ARRAYS, given, device)
    options = {"interleaved": interleaved, "layout": layout, "backend": backend}
    return cached(_prepared, tuple(given.descriptions), options).run(given, length, known)


@functools.lru_cache(maxsize=1024)
def _prepared(descriptions: tuple[Any, ...], named: tuple[tuple[str, Any], ...], _types: tuple[type, ...]) -> AppendPlan:
    layouts = {name: d and arrays.layout_of(d, name) for d, name in zip(descriptions, APPEND_ARRAYS)}
    problem = make_append_problem(layouts, **dict(named))
    architecture = architecture_for(problem.backend, problem.k.device)
    return AppendPlan(problem, None if architecture is None else make_append_plan(problem, architecture))
