"""Gradients of short sequences of their own lengths, with NaN beyond every length, by any backend beside NumPy."""

import numpy

from cupy_flash import attention, plan_attention_backward

V2, CAUSAL = "bwd_v2", {"causal": True}
# Room for rows, or the longest packed sequence; head dim, sequences, heads, whether they are packed, options.
RIGHT = [(50, 40, 64, 8, False, {}), (64, 128, 8, 2, False, {}), (150, 64, 2, 4, False, CAUSAL), (300, 128, 2, 2, False, CAUSAL)]
RIGHT += [(120, 128, 3, 2, False, {}), (40, 64, 64, 8, True, CAUSAL), (200, 96, 4, 2, True, CAUSAL), (90, 256, 3, 2, False, {})]


def check(case, where, place=lambda x: x, fetch=lambda x: x):
    rows, dim, elements, heads, packed, options = case
    rng = numpy.random.default_rng(6)
    lens = rng.integers(0, rows + 1, elements).astype("i4")
    lens[:2] = rows, 0
    ends = numpy.concatenate(([0], numpy.cumsum(lens))).astype("i4")
    names = ("cu_seqlens_q", "cu_seqlens_kv") if packed else ("seqlens_q", "seqlens_kv")
    given = dict.fromkeys(names, ends if packed else lens)
    shape = (heads, ends[-1] + 9, dim) if packed else (elements, heads, rows, dim)
    q, k, v, dout = (rng.standard_normal(shape).astype("f2") for _ in range(4))
    exists = numpy.arange(shape[-2]) < (ends[-1] if packed else lens[:, None, None])
    hidden = numpy.broadcast_to(~exists, shape[:-1])
    for x in (q, k, v, dout):
        x[hidden] = numpy.nan
    out, lse = attention(q, k, v, return_lse=True, backend="numpy", **options, **given)
    out[hidden], lse[hidden] = numpy.nan, numpy.nan
    arrays = dout, q, k, v, out, lse
    right = plan_attention_backward(*arrays, backend="numpy", **options, **given)(*arrays, **given)
    there, lengths = [place(x) for x in arrays], {name: place(x) for name, x in given.items()}
    plan = plan_attention_backward(*there, **options, **where, **lengths)
    for_v2 = rows <= 64 and dim <= 64
    assert (plan.kernel.file == V2, plan.kernel.config.FIRST_STORES) == (for_v2, not for_v2)
    for got, expected in zip(map(fetch, plan(*there, **lengths)[:3]), right[:3]):
        assert (got[hidden] == 0).all()
        assert abs(got.astype("f4") - expected.astype("f4")).max() <= 2**-8 * abs(expected).max()
