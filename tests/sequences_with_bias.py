"""Padded sequences with a bias, judged one by one: for tests on the host and on a device."""

import math
from itertools import product

import ml_dtypes
import numpy
from score_kernels import DTYPES, close, largest_score

from cupy_flash import dropout_mask, plan_attention, plan_attention_backward
from cupy_flash.judge.oracle import naive, oracle
from cupy_flash.judge.oracle_gradients import naive_gradients, oracle_gradients

HEADS, HEADS_KV, ROOM_Q, ROOM_KV = 4, 2, 301, 424  # off every tile edge, and whole chunks of 16 bytes
LENS = ((301, 130), (1, 65), (0, 17), (130, 424), (64, 64), (5, 0))  # beside tile edges, without queries, without keys
DIMS = ((40, "float16"), (128, "bfloat16"), (160, "float16"), (256, "bfloat16"))
BIASES = {"of pairs": (len(LENS), HEADS), "of heads": (HEADS,), "of heads, float32": (HEADS,)}
ENDS = ("full", "causal", "window")  # of what each query sees
CASES = [(*case, i // 3 % 2 == 1) for i, case in enumerate(product(DIMS, ENDS, BIASES))]  # the last one is whether there is dropout
QUICK = [(DIMS[0], "causal", "of pairs", True)]
P, SEED = 0.25, 7


def judged(case, where, place=lambda x: x, fetch=lambda x: x):
    """Both directions by kernels, each sequence within some times the error of the textbook's formula; the plans of both kernels.

    What a bias has for pairs that no sequence has is poison.
    """
    (dim, dtype), ends, shape, dropout = case
    rng, kind, scale = numpy.random.default_rng(3), DTYPES[dtype], 1 / math.sqrt(case[0][0])
    drawn = [rng.standard_normal((heads, n, dim)).astype(kind) for m in LENS for heads, n in of_sequence(m)]
    parts = [drawn[i : i + 4] for i in range(0, len(drawn), 4)]  # q, k, v and dout of each sequence
    q, k, v, dout = (padded([part[i] for part in parts], room) for i, room in enumerate((ROOM_Q, ROOM_KV, ROOM_KV, ROOM_Q)))
    bias = rng.standard_normal((*BIASES[shape], ROOM_Q, ROOM_KV)).astype("float32" if "float32" in shape else kind)
    bias[..., :100:7, 11] = -numpy.inf
    if shape == "of pairs":
        for own, (n, m) in zip(bias, LENS):
            own[:, n:], own[:, :, m:] = numpy.nan, numpy.nan
    lengths = {f"seqlens_{of}": numpy.array([pair[i] for pair in LENS], numpy.int32) for i, of in enumerate(("q", "kv"))}
    operands = {name: place(x) for name, x in (lengths | {"bias": bias}).items()}
    options = {"full": {}, "causal": {"causal": True}, "window": {"window": (70, 10)}}[ends] | where
    options |= {"dropout": P} if dropout else {}
    operands |= {"seed": SEED} if dropout else {}
    keep = dropout_mask((len(LENS), HEADS, ROOM_Q, ROOM_KV), P, SEED)
    there = [place(x) for x in (q, k, v)]
    plan = plan_attention(*there, return_lse=True, **options, **operands)
    out, lse = plan(*there, **operands)
    given = place(dout), *there, out, lse
    backward = plan_attention_backward(*given, wrt="bias", **options, **operands)
    memory = place(numpy.full(backward.workspace_bytes, 255, numpy.uint8))  # NaN
    gradients = backward(*given, **operands, workspace=memory)
    results = [fetch(x) for x in (out, lse, gradients.dq, gradients.dk, gradients.dv)]
    dbias, unit = fetch(gradients.dbias).astype(float), float(ml_dtypes.finfo(kind).eps)
    exact_sum, plain_sum = numpy.zeros_like(dbias), numpy.zeros_like(dbias)
    largest = 0.0
    for i, ((n, m), (own_q, own_k, own_v, own_dout)) in enumerate(zip(LENS, parts)):
        own = [x[i, :, :end] for x, end in zip(results, (n, n, n, m, m))]
        assert not any(x[i, :, end:].any() for x, end in zip((results[0], *results[2:]), (n, n, m, m)))
        if n == 0 or m == 0:
            assert not any(x.any() for x in (own[0], *own[2:]))
            continue
        of = (bias[i] if shape == "of pairs" else bias)[:, :n, :m].astype(numpy.float64)
        seen = {"full": {}, "causal": {"last_key": m - n}, "window": {"first_key": m - n - 70, "last_key": m - n + 10}}
        hand = {"bias": of, "scale": scale} | seen[ends]
        hand |= {"keep": keep[i, :, :n, :m], "keep_scale": 1 / (1 - P)} if dropout else {}
        inputs = own_q, own_k, own_v
        exact, exact_lse = oracle(*inputs, **hand)
        plain, _ = naive(*inputs, **hand)
        largest = max(largest, largest_score(own_q, own_k, hand))
        close(own[0], exact, plain, 2, unit, largest)
        seen = ~numpy.isneginf(exact_lse)
        assert (numpy.isneginf(own[1]) == ~seen).all()
        assert abs(own[1][seen] - exact_lse[seen]).max(initial=0) <= 8 * 2**-24 * largest
        exacts, plains = oracle_gradients(own_dout, *inputs, **hand), naive_gradients(own_dout, *inputs, **hand)
        for got, right, plainly in zip(own[2:], exacts, plains):
            close(got, right, plainly, 3, unit, largest)
        for total, x in ((exact_sum, exacts), (plain_sum, plains)):
            (total[i] if shape == "of pairs" else total)[:, :n, :m] += x.dbias
    close(dbias, exact_sum, plain_sum, 3, unit, largest, abs(exact_sum).max())
    if shape == "of pairs":
        assert not any(own[:, n:].any() or own[:, :, m:].any() for own, (n, m) in zip(dbias, LENS))
    return plan.kernel, backward


def of_sequence(lens):
    """Heads and rows of q, k, v and dout."""
    n, m = lens
    return (HEADS, n), (HEADS_KV, m), (HEADS_KV, m), (HEADS, n)


def padded(rows, room):
    """All sequences in one array, with poison behind them."""
    whole = numpy.full((len(rows), len(rows[0]), room, rows[0].shape[-1]), numpy.nan, rows[0].dtype)
    for into, x in zip(whole, rows):
        into[:, : x.shape[1]] = x
    return whole
