"""Few queries of several heads on their keys, as in decoding, and masks of them."""

import numpy
from score_kernels import DTYPES

from cupy_flash.plan.split import SPLIT_KEYS

BATCH, HEADS, HEADS_KV, DIM = 2, 6, 2, 40
LENGTHS = [(1, 93), (7, 93), (3, 2 * SPLIT_KEYS + 37)]


def inputs(dtype, len_q, len_kv, heads=HEADS, dim=DIM):
    rng = numpy.random.default_rng(0)
    shapes = (heads, len_q), (HEADS_KV, len_kv), (HEADS_KV, len_kv), (heads, len_q)
    return [rng.standard_normal((BATCH, *shape, dim)).astype(DTYPES[dtype]) for shape in shapes]


MASKS = {  # of one or several queries, and keys; some tiles of keys are seen by nobody
    "of batch elements": lambda q_idx, kv_idx: (kv_idx < numpy.array([40, 80]).reshape(2, 1, 1, 1)) | (kv_idx > 900),
    "of queries": lambda q_idx, kv_idx: (kv_idx + 5 * q_idx) % 7 < 4,
    "of nothing": lambda q_idx, kv_idx: kv_idx + q_idx < 0,
}
WITH = {"alone": (), "causal": ("last_key",), "alibi": ("alibi_slopes",), "sinks": ("sinks",), "softcap": ("softcap",)}


def masked(name, besides, len_q, len_kv):
    """Options with such a mask, and what they mean."""
    seen = numpy.broadcast_to(MASKS[name](*numpy.ogrid[:len_q, :len_kv]), (BATCH, 1, len_q, len_kv)).copy()
    rng = numpy.random.default_rng(2)
    hand = {"alibi_slopes": rng.uniform(0.01, 0.2, (BATCH, HEADS)).astype(numpy.float32), "softcap": 3.0}
    hand |= {"sinks": rng.standard_normal(HEADS).astype(numpy.float32), "last_key": len_kv - len_q}
    hand = {name: hand[name] for name in WITH[besides]}
    options = {"causal": True} if besides == "causal" else hand
    return options | {"mask": seen}, hand | {"seen": seen}
