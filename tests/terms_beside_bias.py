"""Terms of the key beside a bias: what they are, and what comes of them by hand."""

import numpy
from score_kernels import DTYPES, judged

from cupy_flash import plan_attention, plan_attention_backward

HEADS, HEADS_KV, LEN_Q, LEN_KV = 4, 2, 141, 203  # off every tile edge, and an odd number of keys
RNG = numpy.random.default_rng(5)
OF_KEYS = RNG.standard_normal((2, LEN_KV)).astype(numpy.float32) * 3
TERMS = {
    "any": OF_KEYS,
    "some masked": numpy.where(RNG.random((2, LEN_KV)) < 0.3, numpy.float32("-inf"), OF_KEYS),
    "padded": numpy.where(numpy.arange(LEN_KV) < [[150], [64]], OF_KEYS, numpy.float32(-1e9)),
    "rising": OF_KEYS + 40 * (numpy.arange(LEN_KV) >= 130).astype(numpy.float32),
}
TERMS["padded from the left"] = TERMS["padded"][:, ::-1].copy()
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"window": (40, 0)}}
SHAPES = {"float16, 40": ("float16", 40), "bfloat16, 64": ("bfloat16", 64), "bfloat16, 128": ("bfloat16", 128)}
SHAPES |= {"float16, 160": ("float16", 160), "bfloat16, 256": ("bfloat16", 256)}
BIASES = {"heads": ((1, HEADS), None), "all": ((2, HEADS), None), "float32": ((1, HEADS), "float32")}


def inputs(dtype, dim, len_q=LEN_Q, len_kv=LEN_KV):
    rng = numpy.random.default_rng(3)
    shapes = (HEADS, len_q), (HEADS_KV, len_kv), (HEADS_KV, len_kv), (HEADS, len_q)
    return [rng.standard_normal((2, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


def bias_of(shape, dtype, len_q=LEN_Q, len_kv=LEN_KV):
    """With rows that TMA finds; what lies between them is NaN."""
    whole = numpy.full((*shape, len_q, -(-len_kv // 8) * 8), numpy.nan).astype(DTYPES[dtype])
    bias = whole[..., :len_kv]
    bias[...] = numpy.random.default_rng(9).standard_normal(bias.shape).astype(bias.dtype)
    return bias


def check(shape, mask, bias, t, where, place=lambda x: x, fetch=lambda x: x, len_kv=LEN_KV):
    """Both directions, and that both kernels have the term of a key apart; the plans of both kernels."""
    (dtype, dim), of_mask, (of_bias, wide) = SHAPES[shape], MASKS[mask], BIASES[bias]
    last_key = len_kv - LEN_Q
    hand_mask = {"last_key": last_key} if of_mask else {}
    hand_mask |= {"first_key": last_key - 40} if mask == "window" else {}
    bias = bias_of(of_bias, wide or dtype, len_kv=len_kv)
    hand = {"bias": bias.astype(float) + t.astype(float)[:, None, None], **hand_mask}
    options = {"bias": bias, "score": "score + t[b, kv_idx]", "arrays": {"t": t}, **of_mask}
    given = inputs(dtype, dim, len_kv=len_kv)
    given[3][sees_padding_alone(t, hand_mask)] = 0  # such a row has no gradients
    kernels = judged(dtype, options, hand, where, place, fetch, inputs_given=given)
    assert kernels[0].file == "fwd_hopper" and kernels[1].file in ("bwd_hopper", "bwd_hopper_wide")
    assert all(kernel.expressions.has_key_term and kernel.config.SCORES == "PLUS_TERM" for kernel in kernels)
    assert kernels[0].config.STAGED_BIAS
    return kernels


def sees_padding_alone(t, mask):
    """Of each batch element, head and query, whether all keys that it sees have a term that leaves float32 no bits for scores."""
    queries, keys = numpy.arange(LEN_Q)[:, None], numpy.arange(t.shape[-1])
    seen = (keys <= queries + mask.get("last_key", t.shape[-1])) & (keys >= queries + mask.get("first_key", -LEN_Q))
    alone = (~seen | (t[:, None] < -1e8)).all(axis=-1)
    return numpy.broadcast_to(alone[:, None], (len(t), HEADS, LEN_Q))


def check_shared_bias(shape, bias, t, where, place=lambda x: x, fetch=lambda x: x, blocks=1):
    """The gradient of a bias that batch elements share, whose terms are their own, summed up by so many blocks of a cluster."""
    dtype, dim = SHAPES[shape]
    q, k, v, dout = inputs(dtype, dim, len_kv=bias.shape[-1])
    options = {"bias": place(bias), "score": "score + t[b, kv_idx]", "arrays": {"t": place(t)}}
    there, operands = [place(x) for x in (q, k, v)], {name: options[name] for name in ("bias", "arrays")}
    results = plan_attention(*there, return_lse=True, **options, **where)(*there, **operands)
    plan = plan_attention_backward(place(dout), *there, *results, wrt="bias", **options, **where)
    got = fetch(plan(place(dout), *there, *results, **operands).dbias)
    behind = plan.kernels[1:]
    assert (f"cluster{blocks}" in plan.kernel.name) is (blocks > 1)
    assert [kernel.file for kernel in behind] == ["bwd_scores_hopper"] * (blocks == 1)
    assert all(kernel.expressions.has_key_term for kernel in plan.kernels)
    assert all(("ONE_BIAS", "true") in kernel.expressions.constants for kernel in behind)

    wide_k, wide_v = (numpy.repeat(x.astype(float), HEADS // HEADS_KV, axis=1) for x in (k, v))
    s = q.astype(float) @ wide_k.swapaxes(-1, -2) * dim**-0.5 + bias.astype(float) + t.astype(float)[:, None, None]
    p = numpy.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = dout.astype(float) @ wide_v.swapaxes(-1, -2)
    right = (p * (dp - (p * dp).sum(axis=-1, keepdims=True))).sum(axis=0, keepdims=True)
    assert got.shape == bias.shape and got.dtype == bias.dtype
    assert abs(got.astype(float) - right).max() <= (2**-6 if dtype == "bfloat16" else 2**-9) * abs(right).max()
    assert (got.astype(float)[right == 0] == 0).all() and (right == 0).any()
