"""Blocks of bwd_hopper that take key tiles in turn: on the host two blocks share all of them."""

import functools
import math

import numpy
import pytest
from thinned import quick, thinned
from tile_masks import NAMES, TILE_MASKS, inputs

from cupy_flash import attention, plan_attention_backward
from cupy_flash.plan.backward import FEWEST_TAKEN
from cupy_flash.plan.grouping import make_grouping

HOST = {"backend": "host", "arch": "90a"}


def judged(plan, given, formula, **arrays):
    for got, right in zip(plan(*given, **arrays), formula(*given, **arrays)):
        assert numpy.isfinite(got).all() and abs(got - right.astype("f4")).max() <= 2**-8 * max(1, abs(right).max())


@pytest.mark.parametrize("name", thinned(NAMES, keep=9))
def test_masks(name, share_of_bits, key_tiles_in_turn):
    share_of_bits(math.inf)
    options, _ = TILE_MASKS[name]()
    q, k, v, dout = inputs("float16", dim=40)
    out, lse = attention(q, k, v, return_lse=True, **options)
    plans = (plan_attention_backward(dout, q, k, v, out, lse, **where, **options) for where in (HOST, {"backend": "numpy"}))
    arrays = {"mask": options["mask"]} if isinstance(options["mask"], numpy.ndarray) else {"arrays": options.get("arrays")}
    plan, formula = plans
    assert plan.kernel.config.PERSISTENT
    judged(plan, (dout, q, k, v, out, lse), formula, **{name: x for name, x in arrays.items() if x is not None})


@pytest.mark.parametrize("dropout", quick([None, 0.25], 0.25))  # masks above are without
@pytest.mark.parametrize("schedule", quick(["eager", "deferred"], "deferred"))
@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4, 600, 64), (3, 2, 600, 64)),  # heads of a group, in one block; two tiles of keys that nobody sees, between others
        pytest.param(((1, 2, 600, 64), (3, 2, 600, 64)), marks=pytest.mark.release),  # dq of sums
        pytest.param(((3, 4, 600, 64), (1, 2, 600, 64)), marks=pytest.mark.release),  # dk and dv
    ],
)
def test_several_for_each_block(shapes, schedule, dropout, share_of_bits, key_tiles_in_turn, monkeypatch):
    share_of_bits(math.inf)
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    rng = numpy.random.default_rng(0)
    q, k, v = (rng.standard_normal(shapes[i], numpy.float32).astype("f2") for i in (0, 1, 1))
    documents = numpy.repeat(numpy.arange(6), [100, 20, 300, 30, 149, 1]).astype(numpy.int32)  # the third one is masked
    given = {"doc": documents}
    seed = {"seed": (5, 6)} if dropout else {}
    options = {"mask": "doc[q_idx] == doc[kv_idx] and doc[kv_idx] != 2", "arrays": given, "dropout": dropout, **seed}
    out, lse = attention(q, k, v, return_lse=True, **options)
    dout = rng.standard_normal(out.shape, numpy.float32).astype("f2")
    plan, formula = (plan_attention_backward(dout, q, k, v, out, lse, **where, **options) for where in (HOST, {"backend": "numpy"}))
    assert plan.kernel.config.PERSISTENT and plan.kernel.config.DROPOUT is bool(dropout)
    assert plan.launches[1].on(2).blocks - plan.launches[1].behind == 2 < plan.launches[1].blocks
    memory = numpy.full(plan.workspace_bytes, 0x7F, numpy.uint8)  # which may hold anything
    plan(dout, q, k, v, out, lse, arrays=given, workspace=memory, **seed)
    judged(functools.partial(plan, workspace=memory), (dout, q, k, v, out, lse), formula, arrays=given, **seed)


def plan_of(heads, dim, deterministic=False):
    """Of documents of 300 tokens: three key tiles of 128 for each head."""
    q, lse = numpy.zeros((heads, 300, dim), "f2"), numpy.zeros((heads, 300), "f4")
    given = {"mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": numpy.zeros(300, numpy.int32)}}
    return plan_attention_backward(q, q, q, q, q, lse, deterministic=deterministic, **HOST, **given)


@pytest.mark.parametrize("dim, deterministic, taken", [(40, False, True), (64, False, True), (64, True, False), (72, False, False)])
def test_where_a_mask_is_bits(dim, deterministic, taken):
    """As many blocks as multiprocessors, or fewer if there are fewer key tiles; others behind them finish all heads."""
    made = plan_of(300, dim, deterministic)
    grouping, main, text = make_grouping(made.kernel, made.problem), made.launches[1], str(made)
    assert made.kernel.config.PAIR_BITS and grouping.owners == 900
    assert taken == made.kernel.config.PERSISTENT
    assert ("next_tile" in made.workspace.names) == ("take key tiles in turn" in text) == taken
    if not taken:
        assert (main.blocks, main.per_multiprocessor, main.behind) == (900 + grouping.finishing, None, 0)
        return
    behind = 300 * 2  # of 12 warps, each of which has 16 rows
    assert (grouping.last_heads, grouping.accum_heads, grouping.finishing) == (0, 300, behind)
    assert (main.blocks, main.per_multiprocessor, main.behind) == (900, 1, behind)
    assert main.on(132).blocks == 132 + behind and main.on(10**6).blocks == 900 + behind
    assert f"900 blocks, at most 1 a multiprocessor, one tile after the other, and {behind} behind them" in text
    assert not plan_of(FEWEST_TAKEN // 3 - 1, dim).kernel.config.PERSISTENT
    assert plan_of(FEWEST_TAKEN // 3, dim).kernel.config.PERSISTENT
    assert plan_of(0, dim).launches[1].on(132).blocks == 0
