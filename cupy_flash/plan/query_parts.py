"""Gradients of few keys: queries dealt out in parts, so that there are as many blocks as run at once.

A block of a backward owns a tile of keys and goes through all queries that see one of them. Of many queries on few keys, as
between an image and a text or between points and a few latents, there are fewer blocks than multiprocessors. Where every query
sees every key, parts of the queries are as good as batch elements that share their keys, whose gradients are sums over these.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from ..problem.layout import Layout
from .grouping import RUNNING
from .tensor_map import obstacle

KEYS, WIDE_KEYS, WIDE = 128, 64, 128  # of a block, and of one for head dims above
STEP = 128  # queries that a block goes through at a time
LEAST, ROWS = 256, 64  # queries of a part at least, and what they are multiples of, so that no step is of two parts
BEGINNING = 3  # steps that a block takes to begin and to end
ADDING = 0.75  # steps that it takes to add the gradients of a part


def in_parts(problem: BackwardProblem) -> BackwardProblem:
    """The same gradients with queries in parts, or the problem itself where that gains nothing, or masks tell queries apart.

    Parameters
    ----------
    problem : BackwardProblem

    Returns
    -------
    BackwardProblem
        With a batch axis more, along which keys, values and their gradients have a stride of 0.
    """
    p = problem.forward
    alike = not (p.scores or p.sinks is not None or p.lengths is not None or p.mask.hides_first or p.mask.hides_last)
    if not alike or problem.adds or problem.sums_queries or problem.zero or not p.len_kv:
        return problem
    keys = WIDE_KEYS if max(p.dim, p.dim_v) > WIDE else KEYS
    blocks = -(-p.len_kv // keys) * p.heads_q * math.prod(p.batch)  # heads of a group are dealt out among blocks
    fit = [n for n in range(2, p.len_q // LEAST + 1) if p.len_q % (n * ROWS) == 0] if blocks < RUNNING else []
    parts = min((1, *fit), key=lambda n: _steps(blocks, p.len_q, n))
    return problem if parts == 1 else _with_axis(problem, parts)


def _steps(blocks: int, queries: int, parts: int) -> float:
    """Steps that multiprocessors take, one block after the other; as measured on an H200."""
    rounds, steps = -(-blocks * parts // RUNNING), -(-queries // (parts * STEP))
    return rounds * (steps + BEGINNING) + ADDING * parts * (parts > 1)


def _with_axis(problem: BackwardProblem, parts: int) -> BackwardProblem:
    p = problem.forward
    batch, rows = (*p.batch, parts), p.len_q // parts
    forward: Problem = replace(
        p,
        batch=batch,
        len_q=rows,
        mask=replace(p.mask, len_q=rows),
        **{name: _cut(getattr(p, name), parts) for name in ("q", "out")},
        **{name: _shared(getattr(p, name), parts) for name in ("k", "v")},
        lse=_cut(p.lse, parts, axis=-1),
    )
    changed = replace(
        problem,
        forward=forward,
        dout=_cut(problem.dout, parts),
        dq=_cut(problem.dq, parts),
        dlse=problem.dlse and _cut(problem.dlse, parts, axis=-1),
        dk=_shared(problem.dk, 1),
        dv=_shared(problem.dv, 1),
        parts=parts,
    )
    before, after = (obstacle(x.forward.batch, _layouts(x), ("q", "k", "v", "dout", "dq", "dk", "dv")) for x in (problem, changed))
    return problem if after and not before else changed  # TMA has no axis for it


def _layouts(problem: BackwardProblem) -> dict[str, Layout]:
    return {name: layout for name, layout in problem.layouts.items() if layout is not None}


def _cut(layout: Layout, parts: int, axis: int = -2) -> Layout:
    """An array of queries ``(*batch, heads, rows, ...)`` as ``(*batch, parts, heads, rows of a part, ...)``."""
    heads, at = len(layout.shape) + axis - 1, len(layout.shape) + axis
    rows, stride = layout.shape[at] // parts, layout.strides[at]
    shape = (*layout.shape[:heads], parts, layout.shape[heads], rows, *layout.shape[at + 1 :])
    return replace(layout, shape=shape, strides=(*layout.strides[:heads], rows * stride, *layout.strides[heads:]))


def _shared(layout: Layout, parts: int) -> Layout:
    """An array of keys ``(*batch, heads, rows, dim)``, the same for all parts."""
    shape, strides = ((*axes[:-3], new, *axes[-3:]) for axes, new in ((layout.shape, parts), (layout.strides, 0)))
    return replace(layout, shape=shape, strides=strides)
