"""No batch elements, heads, queries or keys: results of the right shape, zeros, with any two options and their gradients."""

import itertools

import numpy
import pytest

from cupy_flash import KeyRanges, TileMask, attention_vjp

SHAPES = {"batch": (0, 4, 2, 5, 6), "heads": (2, 0, 0, 5, 6), "queries": (2, 4, 2, 0, 6), "keys": (2, 4, 2, 5, 0)}
SHAPES |= {"both": (2, 4, 2, 0, 0)}


def asked(heads, len_q, len_kv):
    """Options by name; `wrt` names all that has a gradient."""
    seen = numpy.ones((len_q, len_kv), bool)
    ranges = KeyRanges(numpy.zeros((len_q, 2), int), numpy.ones((len_q, 2), int))
    arrays = {"t": numpy.ones(heads), "u": numpy.ones(len_kv), "w": numpy.ones(7), "c": 2.0}
    return {
        "score": {"score": "score * t[h] + u[kv_idx] + w[q_idx * kv_idx] * c", "arrays": arrays, "wrt": ("t", "u", "w", "c")},
        "bias": {"bias": numpy.ones((heads, len_q, len_kv), numpy.float32), "wrt": ("bias",)},
        "one bias": {"bias": numpy.ones((1, 1), numpy.float32), "wrt": ("bias",)},
        "alibi": {"alibi_slopes": numpy.ones(heads, numpy.float32), "wrt": ("alibi_slopes",)},
        "array": {"mask": seen},
        "kept array": {"mask": TileMask(seen)},
        "text": {"mask": "kv_idx % 2 == b"},
        "kept text": {"mask": TileMask("kv_idx % 2 == h")},
        "ranges": {"mask": ranges},
        "kept ranges": {"mask": TileMask(ranges)},
        "dropout": {"dropout": 0.3, "seed": (1, 2)},
        "sinks": {"sinks": numpy.ones(heads, numpy.float32)},
        "window": {"causal": True, "window": (3, None)},
    }


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend, empty", [*(("numpy", name) for name in SHAPES), ("host", "batch"), ("host", "heads")])
def test_any_two_options(backend, empty):
    batch, heads, heads_kv, len_q, len_kv = SHAPES[empty]
    q, k = numpy.ones((batch, heads, len_q, 8), numpy.float32), numpy.ones((batch, heads_kv, len_kv, 8), numpy.float32)
    for one, other in itertools.combinations(asked(heads, len_q, len_kv).values(), 2):
        if one.keys() & other.keys() - {"wrt"}:
            continue
        options = one | other | {"wrt": one.get("wrt", ()) + other.get("wrt", ())}
        (out, lse), vjp = attention_vjp(q, k, k, return_lse=True, backend=backend, **options)
        assert out.shape == q.shape and not out.any() and lse.shape == q.shape[:-1]
        grads = vjp(numpy.ones_like(out))
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape] and not any(x.any() for x in grads)
        assert set(grads.darrays) == set(options["wrt"]) - {"bias", "alibi_slopes"}
        others = [x for x in (grads.dbias, grads.dalibi_slopes, grads.dsinks, *grads.darrays.values()) if x is not None]
        assert len(others) == len(options["wrt"]) + ("sinks" in options) and not any(x.any() for x in others)
