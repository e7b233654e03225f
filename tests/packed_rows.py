"""Problems whose heads share tiles of fwd_hopper and have scores of their own, and how results are judged."""

import math
from dataclasses import dataclass

import numpy
from hand_scores import Grid
from score_kernels import DTYPES, close, given, largest_score, placed

from cupy_flash import plan_attention
from cupy_flash.judge.oracle import naive, oracle

BATCH, HEADS, HEADS_KV = 2, 6, 2


@dataclass(frozen=True)
class Packed:
    """Three heads of a group with so many queries each: rows off every tile edge, heads that end within a tile and a warp."""

    len_q: int
    len_kv: int
    dim: int
    dtype: str
    tile_q: int
    split: bool = False

    def __str__(self):
        return "-".join(map(str, (self.len_q, self.len_kv, self.dim, self.dtype)))

    @property
    def pairs(self):
        return (BATCH, HEADS, self.len_q, self.len_kv)


CASES = (
    Packed(7, 94, 40, "float16", 64),
    Packed(21, 301, 128, "bfloat16", 64),
    Packed(38, 210, 64, "bfloat16", 128),
    Packed(50, 150, 104, "float16", 128),
    Packed(11, 203, 256, "bfloat16", 64),
    Packed(30, 94, 200, "float16", 128),
    Packed(60, 170, 56, "float16", 256),
    Packed(8, 1510, 64, "bfloat16", 64, split=True),
)


def inputs(case, seed=0):
    rng = numpy.random.default_rng(seed)
    shapes = (HEADS, case.len_q), (HEADS_KV, case.len_kv), (HEADS_KV, case.len_kv)
    return [rng.standard_normal((BATCH, *shape, case.dim)).astype(DTYPES[case.dtype]) for shape in shapes]


def expression(example, case):
    """Options with such a score, and what they mean."""
    arrays, score = given(example, Grid.of((BATCH,), HEADS, HEADS_KV, case.len_q, case.len_kv))
    return {"score": example.text, "arrays": arrays}, {"score": score}


def slopes():
    return numpy.random.default_rng(1).uniform(0.01, 0.2, (BATCH, HEADS)).astype(numpy.float32)


def linear(case):
    """With a window, of which each row sees another part, and sinks."""
    sinks = numpy.random.default_rng(2).standard_normal(HEADS).astype(numpy.float32)
    last = case.len_kv - case.len_q
    hand = {"alibi_slopes": slopes(), "sinks": sinks, "first_key": last - 50, "last_key": last}
    return {"alibi_slopes": slopes(), "sinks": sinks, "window": (50, 0)}, hand


def capped(case):
    return ({"alibi_slopes": slopes(), "softcap": 3.0},) * 2


def bias(case, dtype=None, shape=None, large=False, **options):
    """Of each pair, in the dtype of the queries or another. `large`: very low in whole rows and columns, as masks are written."""
    values = 2 * numpy.random.default_rng(3).standard_normal(case.pairs if shape is None else (*shape, *case.pairs[2:]))
    values[..., 5:7] = -numpy.inf
    if large:
        values[..., ::3, :] = values[..., 20:60] = -3e4 if DTYPES[dtype or case.dtype].name == "float16" else -1e30
    return ({"bias": values.astype(DTYPES[dtype or case.dtype])} | options,) * 2


def causal_bias(case):
    options, _ = bias(case)
    return options | {"causal": True}, options | {"last_key": case.len_kv - case.len_q}


KINDS = {
    "linear": linear,
    "capped": capped,
    "bias": bias,
    "causal bias": causal_bias,
    "bias of float32": lambda case: bias(case, "float32"),
    "bias of heads": lambda case: bias(case, shape=(HEADS,)),
    "bias of elements": lambda case: bias(case, shape=(BATCH, 1)),
    "large bias": lambda case: bias(case, large=True),
    "bias, capped": lambda case: bias(case, softcap=3.0),
}


def is_packed(kernel):
    return kernel.file == "fwd_hopper" and kernel.config.PACK_GQA and kernel.config.SCORES in ("PLUS_TERM", "EXPRESSION")


def judged(case, options, hand, where, place=lambda x: x, fetch=lambda x: x):
    """The forward by fwd_hopper, within twice the error of the textbook's formula."""
    q, k, v = inputs(case)
    options = {name: placed(x, place) for name, x in options.items()}
    operands = {name: x for name, x in options.items() if name in ("arrays", "bias", "alibi_slopes", "sinks")}
    plan = plan_attention(*map(place, (q, k, v)), kernel="fwd_hopper", return_lse=True, **where, **options)
    c = plan.kernel.config
    tile_q = max(case.tile_q, 128) if "bias" in options and (case.dim > 64 or options["bias"].dtype == "float32") else case.tile_q
    assert is_packed(plan.kernel) and c.SPLIT_KV is case.split
    assert tile_q == c.TILE_Q or ("bias" in options and case.tile_q == 256 and c.TILE_Q == 128)
    out, lse = map(fetch, plan(*map(place, (q, k, v)), **operands))
    scale = 1 / math.sqrt(case.dim)
    exact, exact_lse = oracle(q, k, v, scale=scale, **hand)
    plain, _ = naive(q, k, v, scale=scale, **hand)
    largest = largest_score(q, k, hand)
    close(out, exact, plain, 2, 2.0 ** (-7 if case.dtype == "bfloat16" else -10), largest)
    assert (numpy.isneginf(lse) == numpy.isneginf(exact_lse)).all()
    seen = ~numpy.isneginf(exact_lse)
    assert abs(lse[seen] - exact_lse[seen]).max(initial=0) <= 8 * 2**-24 * largest
