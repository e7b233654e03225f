"""Who computes the problems of `features` on a GPU: this project, dense attention beside it, and what PyTorch has."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy

from ..api.backward import plan_attention_backward
from ..api.forward import plan_attention
from ..call.tile_mask import TileMask
from ..judge.compare import compare
from ..judge.compare_gradients import compare_gradients
from ..problem.backward import Gradients
from ..problem.key_ranges import KeyRanges
from .bench import Array, Contender, Run, Verdict
from .cells import Cell
from .features import FLEXIBLE, P_DROPPED, PREFIX, SOFTCAP, WINDOWS, FeatureCell, Options
from .peers import NEEDS, fa4_run, is_installed, torch_run, unwritten, workspace_of
from .peers import contenders as of_plain
from .stopwatch import GpuBench

MANY = 256  # batch elements, of more of which the gradient of what they share is not judged
SDPA = {"torch-cudnn": "CUDNN_ATTENTION", "torch-efficient": "EFFICIENT_ATTENTION", "torch-flash2": "FLASH_ATTENTION"}


@dataclass(frozen=True)
class Inputs:
    """What contenders of a cell are given: q, k, v and for the backward dout, and the options of the feature, on the device."""

    arrays: tuple[Array, ...]
    options: Options


class FeatureBench(GpuBench):
    """The current CUDA device as the `Bench` of `bench.measure`, for cells with a feature."""

    def make_inputs(self, cell: FeatureCell) -> Inputs:
        """Standard normal q, k, v and dout, and what the feature draws."""
        drawn = cell.feature.options(cell, self._cupy.random.default_rng(0))
        return Inputs(super().make_inputs(cell), {name: self._on_device(x) for name, x in drawn.items()})

    def _on_device(self, x: Any) -> Any:
        if isinstance(x, numpy.ndarray):
            return self._cupy.asarray(x)
        if isinstance(x, dict):
            return {name: self._on_device(of) for name, of in x.items()}
        return KeyRanges(*map(self._on_device, (x.start, x.stop))) if isinstance(x, KeyRanges) else x

    def judge(self, cell: Cell, inputs: Inputs, results: tuple[Array, ...]) -> Verdict:
        """Whether results are right: the first head of the first batch element and the last one of the last.

        A gradient of what batch elements share is judged with all of them, unless they are so many that it takes minutes.
        """
        if not isinstance(cell, FeatureCell):
            return super().judge(cell, inputs.arrays, results)
        try:
            for first in (True, False):
                wrong = self._wrong(cell, inputs, results, first)
                if wrong:
                    return Verdict(False, wrong)
        finally:
            self._cupy.get_default_memory_pool().free_all_blocks()
        return Verdict()

    def _wrong(self, cell: FeatureCell, inputs: Inputs, results: tuple[Array, ...], first: bool) -> str:
        head = slice(0, 1) if first else slice(cell.heads - 1, cell.heads)
        dbias, dsinks = (getattr(results, name, None) for name in ("dbias", "dsinks"))
        shared = (dsinks is not None or (dbias is not None and dbias.ndim == 3)) and cell.batch <= MANY
        batch = slice(None) if shared else slice(0, 1) if first else slice(cell.batch - 1, cell.batch)
        told = {"scale": cell.dim**-0.5, "last_key": 0 if cell.causal else None}
        told |= cell.feature.told(cell, inputs.options, batch, head, self._cupy)
        q, k, v, *dout = (x[batch, head] for x in inputs.arrays)
        if not dout:
            judged = compare(results[0][batch, head], None, q, k, v, **told)
            return "" if judged.ok else f"wrong result: {judged.message}"
        own, wrt = {}, {}
        if dsinks is not None and shared:
            own["dsinks"] = dsinks[head]
        if dbias is not None and (shared or dbias.ndim == 4):
            own["dbias"] = (dbias[batch] if dbias.ndim == 4 else dbias)[..., head, :, :]
            wrt = {"bias": told["bias"]}
        judged = compare_gradients(Gradients(*(x[batch, head] for x in results[:3]), **own), *dout, q, k, v, wrt=wrt, **told)
        return "" if judged.ok else f"wrong gradient: {judged.message}"


def contenders(cell: FeatureCell, flex: Collection[str] = FLEXIBLE) -> tuple[Contender, ...]:
    """Those of a cell: 'v2', this project; 'dense', the same without the feature; 'kept' with tiles found once; and peers."""
    feature = cell.feature
    (dense,), _ = of_plain(("v2",), ())
    there = [
        Contender("v2", partial(_own, False), True),
        replace(dense, name="dense", prepare=lambda c, i: dense.prepare(c.plain, i.arrays), solves=lambda c: c.plain),
    ]
    if feature.seen is not None and feature.name not in WINDOWS:
        there.append(Contender("kept", partial(_own, True), True))
    if feature.name in flex:
        there.append(Contender("flex", _flex))
    if "bias" in feature.name:
        there += [Contender(name, partial(_sdpa_with_bias, SDPA[name])) for name in ("torch-cudnn", "torch-efficient")]
    if feature.name == "dropout":
        there.append(Contender("torch-flash2", _sdpa_with_dropout, solves=lambda cell: None))
    if feature.name in ("softcap", "softcap causal") and is_installed(NEEDS["fa4"]):
        there.append(Contender("fa4", _fa4_softcap))
    if feature.name in ("alibi", "alibi unmasked"):
        there.append(Contender("flash2-alibi", _flash2_alibi, directions=("forward",)))
    return tuple(there)


def plans_of(cell: FeatureCell, inputs: Inputs, kept: bool = False) -> tuple[Any, Any, Options]:
    """The forward's plan of this project, that of the backward or None, and what both are called with."""
    options, (q, k, v, *dout) = dict(inputs.options), inputs.arrays
    if kept:
        options["mask"] = TileMask(options["mask"], options.pop("arrays", None))
    given = {name: options[name] for name in ("arrays", "bias", "alibi_slopes", "sinks", "mask", "seed") if name in options}
    if isinstance(options.get("mask"), str):
        del given["mask"]
    plan = plan_attention(q, k, v, causal=cell.causal, return_lse=bool(dout), out=unwritten(q), **options)
    if not dout:
        return plan, None, given
    results = (*dout, q, k, v, unwritten(q), plan(q, k, v, **given)[1])
    backward = plan_attention_backward(*results, causal=cell.causal, wrt=cell.feature.wrt, **options)
    return plan, backward, given


def _own(kept: bool, cell: FeatureCell, inputs: Inputs) -> Run:
    q, k, v, *dout = inputs.arrays
    plan, backward, given = plans_of(cell, inputs, kept)
    if not dout:
        launch = partial(plan, q, k, v, out=unwritten(q), workspace=workspace_of(plan), **given)
        launch()  # what is kept is found
        return Run(launch, lambda out: (out,))
    results = {f"d{name}": unwritten(x) for name, x in zip("qkv", (q, k, v))}
    arguments = (*dout, q, k, v, *plan(q, k, v, **given))
    launch = partial(backward, *arguments, workspace=workspace_of(backward), **given, **results)
    launch()
    return Run(launch, lambda gradients: gradients)


def _tensor(x: Any) -> Any:
    import torch

    return torch.from_dlpack(x)


def _sdpa_with_bias(backend: str, cell: FeatureCell, inputs: Inputs) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def forward(q: Any, k: Any, v: Any, bias: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(cell.batch, -1, -1, -1))

    return torch_run(forward, inputs.arrays, more=(_tensor(inputs.options["bias"]).clone(),))


def _sdpa_with_dropout(cell: FeatureCell, inputs: Inputs) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def forward(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, dropout_p=P_DROPPED)

    return torch_run(forward, inputs.arrays)


def _flash2_alibi(cell: FeatureCell, inputs: Inputs) -> Run:
    """FlashAttention-2 as PyTorch has it, whose ALiBi is not in the public function."""
    import torch

    slopes = _tensor(inputs.options["alibi_slopes"])

    def forward(q: Any, k: Any, v: Any) -> Any:
        call = torch.ops.aten._flash_attention_forward
        return call(q, k, v, None, None, cell.seq, cell.seq, 0.0, cell.causal, False, alibi_slopes=slopes)[0]

    return torch_run(forward, inputs.arrays, lambda x: x.transpose(1, 2))


def _fa4_softcap(cell: FeatureCell, inputs: Inputs) -> Run:
    return fa4_run(cell, inputs.arrays, softcap=SOFTCAP)


def _flex_alibi(options: Options) -> Callable[..., Any]:
    slopes = _tensor(options["alibi_slopes"])
    return lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()


def _flex_softcap(options: Options) -> Callable[..., Any]:
    import torch

    return lambda score, b, h, i, j: SOFTCAP * torch.tanh(score / SOFTCAP)


def _flex_column(options: Options) -> Callable[..., Any]:
    added = _tensor(options["arrays"]["t"])
    return lambda score, b, h, i, j: score + added[j]


def _flex_temperature(options: Options) -> Callable[..., Any]:
    factor = _tensor(options["arrays"]["t"])
    return lambda score, b, h, i, j: score * factor[h]


def _flex_documents(options: Options) -> Callable[..., Any]:
    doc = _tensor(options["arrays"]["doc"])
    return lambda b, h, i, j: doc[i] == doc[j]


def _flex_prefix(options: Options) -> Callable[..., Any]:
    return lambda b, h, i, j: (j <= i) | (j < PREFIX)


def _flex_ranges(options: Options) -> Callable[..., Any]:
    start, stop = (_tensor(x) for x in (options["mask"].start, options["mask"].stop))

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ((start[i, 0] <= j) & (j < stop[i, 0])) | ((start[i, 1] <= j) & (j < stop[i, 1]))

    return seen


def _flex_window(options: Options) -> Callable[..., Any]:
    left, right = options["window"]
    return lambda b, h, i, j: (i - j <= left) & (j - i <= right)


FLEX = {
    "alibi": _flex_alibi,
    "alibi unmasked": _flex_alibi,
    "softcap": _flex_softcap,
    "softcap causal": _flex_softcap,
    "column term": _flex_column,
    "temperature": _flex_temperature,
    "documents": _flex_documents,
    "drawn documents": _flex_documents,
    "prefix": _flex_prefix,
    "ranges": _flex_ranges,
    **dict.fromkeys(WINDOWS, _flex_window),
}


def _flex(cell: FeatureCell, inputs: Inputs) -> Run:
    """FlexAttention of PyTorch, compiled; its block mask is made before and not counted."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    asked, score, blocks = FLEX[cell.feature.name](inputs.options), None, None
    if cell.feature.seen is not None:
        blocks = create_block_mask(asked, None, None, cell.seq, cell.seq)
    else:
        score = asked
        if cell.causal:
            blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, cell.seq, cell.seq)
    torch._dynamo.reset()  # a compiler that has seen many functions falls back
    compiled = torch.compile(flex_attention, dynamic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch_run(lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=blocks), inputs.arrays)
