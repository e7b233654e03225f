"""The contenders of `bench-lengths`: this project's calls for packed rows, caches and pages, and what PyTorch and others have.

All of them get the same rows, (all rows, heads, dim), and give back their results so. Where a cell decodes, calls of a contender
are captured in a graph, on several caches in turn if one is small, and the graph is what is timed.

A call with lengths is batch-invariant: what else is in the batch changes no bit of a sequence's result, nor of its gradients where
they are summed in order. `DENSE` is the call without lengths, which promises no such thing and may divide work as suits the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy

from ..api.append import append_kv
from ..api.backward import plan_attention_backward
from ..api.forward import attention, plan_attention
from ..errors import UnsupportedError
from .bench import Array, Contender, Failure, Run
from .lengths import LengthsCell, caches_of, offsets_of
from .lengths_machine import Graph, captured, l2_bytes
from .peers import NEEDS, is_installed, torch_run, unwritten, workspace_of

PEERS = ("torch-flash2", "torch-cudnn", "fa4")
DENSE, IN_ORDER = "dense", "packed, in order"
Inputs = tuple[Array, ...]
Prepare = Callable[[LengthsCell, Inputs], Run]


def contenders(
    cell: LengthsCell, peers: Iterable[str] = PEERS, report: Callable[[str, Graph], None] = lambda name, graph: None
) -> tuple[tuple[Contender, ...], tuple[Failure, ...]]:
    """Those of a cell, and why others are not there.

    Parameters
    ----------
    cell : LengthsCell
    peers : iterable of str
        Out of `PEERS`.
    report : callable
        Is told what the graph of a contender has in it, by its name.
    """
    own: dict[str, Prepare] = {}
    if cell.row == "packed":
        own["packed"] = _packed
        own |= {IN_ORDER: partial(_packed, deterministic=True)} if cell.direction == "backward" else {}
    else:
        own["contiguous"] = _contiguous
        own |= {f"pages of {size}": partial(_paged, size) for size in cell.page_sizes}
    if cell.row == "step":
        own = {f"pages of {size}": partial(_paged, size) for size in cell.page_sizes}
        own |= {"append, attend": partial(_step, cell.page_sizes[0])}
    own |= {DENSE: _dense} if cell.alike and cell.row in ("packed", "decode") else {}
    there = [Contender(name, partial(_graphed, prepare, partial(report, name)), True) for name, prepare in own.items()]
    missing = []
    compared = cell.row == "decode" or (cell.row == "packed" and not cell.alike)
    for name in peers if compared else ():
        if not is_installed(NEEDS[name]):
            missing.append(Failure(name, f"there is no module {NEEDS[name]}"))
        else:
            there.append(Contender(name, partial(_graphed, OF_PEERS[name], partial(report, name))))
    return tuple(there), tuple(missing)


def batch_invariant(cell: LengthsCell, name: str) -> bool:
    """Whether a contender of this project promises that nothing else in the batch changes a sequence's bits."""
    return name != DENSE and (cell.direction == "forward" or name == IN_ORDER)


def _graphed(prepare: Prepare, report: Callable[[Graph], None], cell: LengthsCell, inputs: Inputs) -> Run:
    if not cell.decodes:
        return prepare(cell, inputs)
    more = (_on_caches_of_its_own(inputs) for _ in range(1, caches_of(cell, l2_bytes())))
    return captured([prepare(cell, own) for own in (inputs, *more)], report)


def _on_caches_of_its_own(inputs: Inputs) -> Inputs:
    q, *caches = inputs
    return (q, *(_bits(x).copy().view(x.dtype) for x in caches))


# Of this project


def _numbers(values: Iterable[int]) -> Array:
    import cupy

    return cupy.asarray(numpy.array(list(values), numpy.int32))


def _packed(cell: LengthsCell, inputs: Inputs, deterministic: bool = False) -> Run:
    given = {"cu_seqlens_q": _numbers(offsets_of(cell.lens_q)), "cu_seqlens_kv": _numbers(offsets_of(cell.lens_kv))}
    return _planned(cell, inputs, given, lambda x: x, deterministic)


def _dense(cell: LengthsCell, inputs: Inputs) -> Run:
    """The call without lengths, of sequences that are all alike."""
    inputs = tuple(x.reshape(len(cell.lens_q), -1, *x.shape[1:]) for x in inputs)
    return _planned(cell, inputs, {}, lambda x: x.reshape(-1, *x.shape[2:]))


def _contiguous(cell: LengthsCell, inputs: Inputs) -> Run:
    """Keys of all sequences in caches just as long; where lengths differ, one behind the other."""
    q, k, v = inputs
    if cell.alike:
        k, v = (x.reshape(len(cell.lens_kv), -1, *x.shape[1:]) for x in (k, v))
        return _on_cache(cell, q, k, v, {"seqlens_kv": _numbers(cell.lens_kv)})
    return _on_cache(cell, q, k, v, {"cu_seqlens_kv": _numbers(offsets_of(cell.lens_kv))})


def _paged(size: int, cell: LengthsCell, inputs: Inputs) -> Run:
    q, k, v = inputs
    table, places = pages_of(cell.lens_kv, size)
    pools = [_pooled(x, size, places) for x in (k, v)]
    return _on_cache(cell, q, *pools, {"seqlens_kv": _numbers(cell.lens_kv), "pages": _array(table)})


def pages_of(lens: tuple[int, ...], size: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Pages in random order: the table of all sequences, and where each of their rows lies among the rows of all pages."""
    used = [-(-n // size) for n in lens]
    shuffled = numpy.random.default_rng(0).permutation(sum(used)).astype(numpy.int32)
    table, places, first = numpy.zeros((len(lens), max(used)), numpy.int32), [], 0
    for row, n, count in zip(table, lens, used):
        row[:count] = shuffled[first : first + count]
        first += count
        key = numpy.arange(n)
        places.append(row[key // size].astype(numpy.int64) * size + key % size)
    return table, numpy.concatenate(places)


def _pooled(x: Array, size: int, places: numpy.ndarray) -> Array:
    """Rows in a pool of pages, of which what nobody has is NaN."""
    import cupy

    pool = unwritten(cupy.empty((len(numpy.unique(places // size)), size, *x.shape[1:]), x.dtype))
    _bits(pool)[_array(places)] = _bits(x)
    return pool


def _bits(x: Array) -> Array:
    """Rows of heads of half-precision numbers, as integers, which any library moves about."""
    return x.reshape(-1, *x.shape[-2:]).view(numpy.uint16)


def _array(x: numpy.ndarray) -> Array:
    import cupy

    return cupy.asarray(x)


def _on_cache(cell: LengthsCell, q: Array, k: Array, v: Array, given: dict[str, Array]) -> Run:
    """Queries of equal number, (batch, seq, heads, dim), and keys wherever they are."""
    q = q.reshape(len(cell.lens_q), -1, *q.shape[1:])
    return _planned(cell, (q, k, v), given, lambda x: x.reshape(-1, *x.shape[2:]))


def _planned(
    cell: LengthsCell, inputs: Inputs, given: dict[str, Array], rows: Callable[[Array], Array], deterministic: bool = False
) -> Run:
    """A plan with all that it writes to; `rows` makes packed rows of a result."""
    q, k, v, *dout = inputs
    options = {"causal": cell.causal, "layout": "bshd", **given}
    if not dout:
        out = unwritten(q)
        plan = plan_attention(q, k, v, out=out, **options)
        launch = partial(plan, q, k, v, out=out, workspace=workspace_of(plan), **given)
        return Run(launch, lambda out: (rows(out),))
    arguments = (*dout, q, k, v, *attention(q, k, v, **options, return_lse=True))
    results = dict(zip(("dq", "dk", "dv"), map(unwritten, (q, k, v))))
    plan = plan_attention_backward(*arguments, **options, **results, deterministic=deterministic)
    return Run(partial(plan, *arguments, workspace=workspace_of(plan), **results, **given), lambda found: tuple(map(rows, found)))


def _step(size: int, cell: LengthsCell, inputs: Inputs) -> Run:
    """What a layer of a decoder does: queries and the last key are rotated, by no angle, as the key and its value are appended."""
    import cupy

    q, k, v = inputs
    count, ends = len(cell.lens_kv), numpy.array(offsets_of(cell.lens_kv)[1:]) - 1
    new = [_bits(x)[_array(ends)].view(x.dtype)[:, None] for x in (k, v)]  # (batch, 1, heads, dim)
    table, places = pages_of(cell.lens_kv, size)
    pools = [_pooled(x, size, places) for x in (k, v)]
    for pool in pools:  # what is appended is not there yet
        _bits(pool)[_array(places[ends])] = 0xFFFF  # NaN
    pages, before, behind = _array(table), _numbers(n - 1 for n in cell.lens_kv), _numbers(cell.lens_kv)
    cos, sin = (f((max(cell.lens_kv), cell.dim // 2), numpy.float32) for f in (cupy.ones, cupy.zeros))
    q = q.reshape(count, 1, *q.shape[1:])
    rotated = cupy.empty_like(q)
    attend = _on_cache(cell, rotated.reshape(count, *q.shape[2:]), *pools, {"seqlens_kv": behind, "pages": pages})

    def launch() -> Any:
        append_kv(*pools, *new, before, q=q, q_out=rotated, pages=pages, cos=cos, sin=sin, layout="bshd")
        return attend.launch()

    return Run(launch, attend.arrays)


# Peers


def _torch_flash2(cell: LengthsCell, inputs: Inputs) -> Run:
    """FlashAttention-2 of PyTorch, as its `varlen_attn` calls it; of caches that are all alike by way of SDPA."""
    import torch

    if cell.decodes and cell.alike:
        return _sdpa("FLASH_ATTENTION", cell, inputs)
    told = (*_torch_offsets(cell), max(cell.lens_q), max(cell.lens_kv), 0.0, cell.causal, False)
    return torch_run(lambda q, k, v: torch.ops.aten._flash_attention_forward(q, k, v, *told)[0], inputs, lambda x: x)


def _torch_cudnn(cell: LengthsCell, inputs: Inputs) -> Run:
    """cuDNN through PyTorch: caches that are all alike, or nested tensors."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if cell.alike:
        return _sdpa("CUDNN_ATTENTION", cell, inputs)
    if cell.decodes:
        raise NotImplementedError("caches of several lengths have no call of cuDNN in PyTorch")
    if cell.direction == "backward":  # not timed and marked as others are, because runs that had it ended with an illegal address
        got = "one 3.1 away on an H200 (PyTorch 2.11, cuDNN 9.19)"
        raise UnsupportedError(f"gradients of nested tensors: expected a dq within 0.002 of float64's, got {got}")
    offsets, longest = _torch_offsets(cell)[0], max(cell.lens_q)

    def nested(x: Any) -> Any:
        return torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=min(cell.lens_q), max_seqlen=longest).transpose(1, 2)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(*map(nested, (q, k, v)), is_causal=cell.causal).transpose(1, 2).values()

    return torch_run(forward, inputs, lambda x: x)


def _sdpa(backend: str, cell: LengthsCell, inputs: Inputs) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def batched(x: Any) -> Any:
        return x.view(len(cell.lens_q), -1, *x.shape[1:]).transpose(1, 2)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = scaled_dot_product_attention(*map(batched, (q, k, v)), is_causal=cell.causal, enable_gqa=True)
        return out.transpose(1, 2).reshape(q.shape)

    return torch_run(forward, inputs, lambda x: x)


def _fa4(cell: LengthsCell, inputs: Inputs) -> Run:
    from flash_attn.cute.interface import flash_attn_varlen_func

    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    told = dict(zip(names, (*_torch_offsets(cell), max(cell.lens_q), max(cell.lens_kv))))

    def forward(q: Any, k: Any, v: Any) -> Any:
        result = flash_attn_varlen_func(q, k, v, causal=cell.causal, **told)
        return result[0] if isinstance(result, tuple) else result

    return torch_run(forward, inputs, lambda x: x)


def _torch_offsets(cell: LengthsCell) -> tuple[Any, Any]:
    import torch

    return tuple(torch.from_dlpack(_numbers(offsets_of(lens))) for lens in (cell.lens_q, cell.lens_kv))


OF_PEERS: dict[str, Prepare] = {"torch-flash2": _torch_flash2, "torch-cudnn": _torch_cudnn, "fa4": _fa4}
