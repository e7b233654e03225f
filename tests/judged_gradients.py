"""Gradients as a correct kernel makes them, right or spoilt, and the bound's judgement on them."""

import math

import numpy
from banded import blocked, blocked_gradients

from cupy_flash.judge.cases import make_inputs
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.judge.oracle import repeat_heads, round_to_tf32, sees
from cupy_flash.judge.oracle_gradients import gradients_of, pairs_of, summed_to
from cupy_flash.problem.backward import Gradients


def inputs_of(case, seed=0):
    """`dout, q, k, v`, and `dlse`."""
    dout, dlse = make_cotangents(case, seed=seed)
    return (dout, *make_inputs(case, seed=seed)), dlse


def judge(case, grads, inputs=None, dlse=None):
    if inputs is None:
        inputs, dlse = inputs_of(case)
    return compare_gradients(grads, *inputs, dlse=dlse, precision=case.precision, **case.meaning())


def share(judgement):
    if not judgement.error:
        return 0.0
    return judgement.error / judgement.allowed if judgement.allowed else math.inf


def right(case, *, forward=None, **changes):
    """Correct gradients, or of another question; `forward` changes what the forward hands over."""
    (dout, q, k, v), dlse = inputs_of(case)
    handed = dict(zip(("out", "lse"), blocked(q, k, v, **case.scores), strict=True)) | {"dlse": dlse}
    return blocked_gradients(dout, q, k, v, **(forward or (lambda x: x))(handed), **(case.scores | changes))


def from_pairs(case, change):
    """Gradients in the case's dtype from P and dS in float64, which `change` has spoilt."""
    (dout, q, k, v), dlse = inputs_of(case)
    exact = [x.astype("f8") for x in (dout, q, k, v)]
    pairs = pairs_of(*exact, dlse, case.scores)
    p, ds = pairs.p.copy(), pairs.ds.copy()
    changed = change(pairs._replace(p=p, ds=ds)) or pairs._replace(p=p, ds=ds)
    return Gradients(*(x.astype(q.dtype) for x in gradients_of(changed, *exact, case.scores)))


# A kernel, as tensor cores compute: sums of 8 products at a time, cut to float32


def cut(x):
    return (x.view("u8") & ~numpy.uint64((1 << 29) - 1)).view("f8")


def tensor_cores(a, b, passes, step=8):
    """a @ b in float32, each addition cut towards zero."""
    if passes == 3:
        (a, a_low), (b, b_low) = ((round_to_tf32(x), cut_tf32(x - round_to_tf32(x))) for x in (a, b))
        factors = [(a, b_low), (a_low, b), (a, b)]
    else:
        factors = [(a, b)]
    total = numpy.zeros((*numpy.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    for i in range(0, a.shape[-1], step):
        for left, right in factors:
            total = cut(total + left[..., i : i + step].astype("f8") @ right[..., i : i + step, :].astype("f8"))
    return total.astype("f4")


def cut_tf32(x):
    return (numpy.ascontiguousarray(x).view("u4") & numpy.uint32(0xFFFFE000)).view("f4")


def kernel(case, inputs, dlse, sinks=None, delta_of_sinks=lambda delta, dlse: delta):
    """Forward and backward as kernels do them: everything kept in memory in the dtype, sums in float32, base 2."""
    dtype = inputs[0].dtype
    passes = 3 if case.dtype == "float32" and case.precision == "ieee" else 1
    scale, softcap = numpy.float32(case.scores["scale"]), case.softcap

    def stored(x):
        return x.astype(dtype).astype("f4")

    def product(a, b):
        return tensor_cores(*(map(round_to_tf32, (a, b)) if case.precision == "tf32" else (a, b)), passes)

    dout, q, k, v = (x.astype("f4") for x in inputs)
    k_each, v_each = repeat_heads(k, q), repeat_heads(v, q)
    seen = sees(case.len_q, case.len_kv, *(case.scores[name] for name in ("first_key", "last_key", "prefix")))
    s = product(q, k_each.swapaxes(-1, -2)) * scale
    slope = 1
    if softcap:
        bent = numpy.tanh(s / numpy.float32(softcap))
        s, slope = numpy.float32(softcap) * bent, 1 - bent * bent
    s = numpy.where(seen, s * numpy.float32(math.log2(math.e)), -numpy.inf).astype("f4")
    top = s.max(axis=-1, keepdims=True)
    if sinks is not None:
        logits = sinks.astype("f4").reshape(-1, sinks.shape[-1]).T[:, None] * numpy.float32(math.log2(math.e))
        top = numpy.maximum(top, logits.max(axis=-1, keepdims=True))
    top = numpy.where(numpy.isinf(top), numpy.float32(0), top)
    p = numpy.exp2(s - top)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + numpy.exp2(logits - top).sum(axis=-1, keepdims=True)
    out = stored(product(stored(p), v_each) / numpy.where(total == 0, numpy.float32(1), total))
    with numpy.errstate(divide="ignore"):
        lse = ((top + numpy.log2(total)) * numpy.float32(math.log(2)))[..., 0]

    delta = (dout * out).sum(axis=-1) - dlse
    nothing = numpy.isinf(lse)
    shift = numpy.where(nothing, numpy.float32(0), lse * numpy.float32(math.log2(math.e)))[..., None]
    p = numpy.exp2(s - shift)
    ds = stored(stored(p * slope) * (product(dout, v_each.swapaxes(-1, -2)) - delta[..., None]))
    dq = sum(product(ds[..., j : j + 32], k_each[..., j : j + 32, :]) for j in range(0, case.len_kv, 32)) * scale
    dk = product(ds.swapaxes(-1, -2), q) * scale
    dv = product(stored(p).swapaxes(-1, -2), dout)
    dsinks = None
    if sinks is not None:
        of_rows = -numpy.exp2(logits - shift) * delta_of_sinks(delta, dlse)[..., None]
        assert of_rows.dtype == "f4"
        dsinks = of_rows.sum(axis=-2).sum(axis=tuple(range(of_rows.ndim - 3))).T.reshape(sinks.shape).astype(sinks.dtype)
    gradients = (summed_to(x.shape, dx).astype(dtype) for x, dx in zip(inputs[1:], (dq, dk, dv), strict=True))
    return Gradients(*gradients, dsinks=dsinks)
