"""Masks, and dropout, beside what scores become, and by which kernels for sm_90a: for tests on the host and on a device."""

from itertools import product

import numpy
from dropout_beside import BATCH, DIMS, ENDS, HEADS, HEADS_KV, LEN_KV, LEN_Q, SEED, P
from hand_scores import SCORES, Grid
from score_kernels import DTYPES

from cupy_flash import dropout_mask

PAIRS = (BATCH, HEADS, LEN_Q, LEN_KV)
GRID = Grid.of((BATCH,), HEADS, HEADS_KV, LEN_Q, LEN_KV)
BIASES = {"bias of pairs": (BATCH, HEADS), "bias of heads": (HEADS,)}
NAMED = {example.name: example for example in SCORES}
TERMS = ("alibi", *BIASES, "relative", "columns", "temperature", "gate")  # linear, staged, read, of keys, a factor, an expression
MASKS = ("padding", "documents", "array", "none")  # the last one with dropout
# Each term with each mask, in both with and without dropout, and so that dims and ends go round.
CASES = [
    (DIMS[(i + i // 4) % 4], list(ENDS)[i % 3], term, mask, dropout)
    for i, (term, mask, dropout) in enumerate(product(TERMS, MASKS, (False, True)))
    if dropout or mask != "none"
]
CASES.append((DIMS[1], "full", "bias of pairs", "documents", False))  # tiles of its gradient that no block visits
QUICK = [case for case in CASES if case[2:] == ("relative", "array", True)]  # for a bias see test_staged_bias.py


TWO = [(DIMS[i], pair) for i in (1, 3) for pair in ("alibi and a bias", "a bias and a softcap", "a table and a softcap")]


def problem(case):
    """Options, what they mean, and what else has a gradient."""
    (_, dtype), ends, term, mask, dropout = case
    options, hand = (dict(x) for x in ENDS[ends])
    arrays, wrt = {}, ()
    rng = numpy.random.default_rng(4)
    if term == "alibi":
        options["alibi_slopes"] = hand["alibi_slopes"] = rng.uniform(0.01, 0.2, HEADS).astype(numpy.float32)
    elif term in BIASES:
        bias = rng.standard_normal((*BIASES[term], LEN_Q, LEN_KV))
        bias = numpy.where(rng.random(bias.shape) < 0.05, -numpy.inf, bias).astype(DTYPES[dtype])
        options["bias"], hand["bias"], wrt = bias, bias.astype(numpy.float64), ("bias",)
    else:
        arrays |= {name: x for name, (_, x) in NAMED[term].arrays(GRID).items()}
        options["score"], hand["score"] = NAMED[term].text, NAMED[term].hand(GRID, arrays)
    if mask == "padding":
        arrays["n"] = numpy.array([LEN_KV - 7, 130], numpy.int32)
        options["mask"] = "kv_idx < n[b]"
        hand["seen"] = numpy.broadcast_to(GRID.kv_idx < arrays["n"][:, None, None, None], PAIRS)
    elif mask == "documents":
        keys = (numpy.arange(LEN_KV) // 150).astype(numpy.int32)
        arrays |= {"of_q": keys[:LEN_Q], "of_kv": keys}
        options["mask"] = "of_q[q_idx] == of_kv[kv_idx]"
        hand["seen"] = keys[:LEN_Q, None] == keys
    elif mask == "array":
        options["mask"] = hand["seen"] = rng.random((LEN_Q, LEN_KV)) < 0.7
    if term in BIASES and mask != "none":  # where no pair takes part that shares the element
        left = numpy.broadcast_to(hand["seen"], PAIRS)
        options["bias"][~(left if term == "bias of pairs" else left.any(axis=0))] = numpy.nan
    if dropout:
        options |= {"dropout": P, "seed": SEED}
        hand |= {"keep": dropout_mask(PAIRS, P, SEED), "keep_scale": 1 / (1 - P)}
    return options | ({"arrays": arrays} if arrays else {}), hand, wrt


def two_things(case):
    """The same of two things that scores go through."""
    (_, dtype), pair = case
    rng, options, hand = numpy.random.default_rng(4), {}, {}
    if "bias" in pair:
        options["bias"] = rng.standard_normal((HEADS, LEN_Q, LEN_KV)).astype(DTYPES[dtype])
        hand["bias"] = options["bias"].astype(numpy.float64)
    if "alibi" in pair:
        options["alibi_slopes"] = hand["alibi_slopes"] = rng.uniform(0.01, 0.2, HEADS).astype(numpy.float32)
    if "softcap" in pair:
        options["softcap"] = hand["softcap"] = 5.0
    if "table" in pair:
        arrays = {name: x for name, (_, x) in NAMED["relative"].arrays(GRID).items()}
        options |= {"score": NAMED["relative"].text, "arrays": arrays}
        hand["score"] = NAMED["relative"].hand(GRID, arrays)
    return options, hand


def is_hopper(kernel):
    return "hopper" in kernel.file
