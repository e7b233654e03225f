"""Cases of what is asked for each pair: scores, masks, biases, ALiBi, sinks and dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from typing import Any, TypeVar

from .expressions import MASKS, SCORES
from .operands import BIASES

Case = TypeVar("Case")

OF_PAIRS: tuple[dict[str, Any], ...] = (
    {"score": "gate"},
    {"mask": "documents"},
    {"mask": "array"},
    {"bias": "heads"},
    {"alibi": "batch"},
    {"sinks": 1},
    {"dropout": 0.25},
)


def pair_cases(case: Callable[..., Case]) -> Iterator[Case]:
    """All that is asked for each pair: alone, and two at a time, on tiles that most of them share."""
    shape = {"len_q": 67, "len_kv": 131, "heads_q": 4, "heads_kv": 2, "batch": (2,)}
    f16, bf16, f32, f64 = (partial(case, dtype, **shape) for dtype in ("float16", "bfloat16", "float32", "float64"))
    for kind, score in product((f16, f32, f64), SCORES):
        yield kind(score=score)
    for kind, mask in product((f16, f64), (*MASKS, "array")):
        yield kind(mask=mask)
    for bias in BIASES:
        yield f16(bias=bias)
        yield bf16(bias=bias, bias_dtype="float32", dim=128)
        yield f32(bias=bias, layout="strided_dim")
        yield f64(bias=bias, layout="odd_offset")
    for kind, alibi in product((f16, bf16, f32, f64), ("heads", "batch")):
        yield kind(alibi=alibi, causal=True)
    for kind, p in product((f16, bf16, f32, f64), (0.1, 0.9)):
        yield kind(dropout=p)
    for kind, (one, other) in product((f16, f64), combinations(OF_PAIRS, 2)):
        if not one.keys() & other.keys():
            yield kind(**one, **other)
    everything = {"score": "gate", "mask": "documents", "bias": "batch", "alibi": "heads", "sinks": 2, "dropout": 0.1}
    for kind, dim in product((f16, bf16, f32, f64), (64, 128)):
        yield kind(**everything, dim=dim, causal=True, softcap=5.0)
    for kind, one in product((f16, f64), OF_PAIRS):
        yield kind(**one, causal="top_left", prefix=40)
        yield kind(**one, softcap=5.0)
    for kind in (f16, f64):
        yield kind(score="temperature", bias="full", batch=(2, 1, 2), layout="broadcast")
        yield kind(score="relative", mask="windows", batch=())
    for one in OF_PAIRS:
        yield f16(**one | {"len_q": 9}, causal=True)  # the heads of a group share a tile
        for empty in ({"batch": (0,)}, {"heads_q": 0}, {"len_q": 0}, {"len_kv": 0}):
            yield f16(**{"heads_kv": None, **one, **empty})
