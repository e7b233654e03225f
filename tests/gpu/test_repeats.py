"""The same bits, a thousand times: results of what is deterministic, on a device that other work keeps busy."""

import numpy
import pytest

from cupy_flash import UnsupportedError, attention, plan_attention, plan_attention_backward

cupy = pytest.importorskip("cupy")

REPEATS = 1000
SHAPE = 2, 4, 700, 64  # several tiles of every kernel, off their edges
TABLE = {"score": "score + table[kv_idx - q_idx + 700] * level[h]", "wrt": ("table", "level")}
ASKED = {
    "plain": {"causal": True},
    "window, softcap": {"window": (100, 30), "softcap": 20.0},
    "alibi": {"alibi_slopes": (4,), "causal": True},
    "bias": {"bias": (4, 700, 700), "wrt": ("bias",)},
    "table": {"arrays": {"table": (1400,), "level": (4,)}, **TABLE},
    "sinks, dropout": {"sinks": (4,), "dropout": 0.2, "seed": 3},
    "documents": {"mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": 700}},
}


def drawn(asked, rng):
    """Options with arrays in place of shapes, and which of them a plan is called with."""
    options = dict(asked)
    for name in ("alibi_slopes", "bias", "sinks"):
        if name in options:
            options[name] = cupy.asarray(rng.standard_normal(options[name], numpy.float32))
    arrays = options.get("arrays", {})
    for name, shape in arrays.items():
        made = numpy.arange(shape, dtype=numpy.int32) // 90 if name == "doc" else rng.standard_normal(shape, numpy.float32)
        options["arrays"] = {**options["arrays"], name: cupy.asarray(made)}
    given = {name: options[name] for name in ("alibi_slopes", "bias", "sinks", "arrays", "seed") if name in options}
    return options, given


def same(results, others):
    """A flag on the device, so that nothing waits for each repeat."""
    flags = [(x.view(numpy.uint8) == y.view(numpy.uint8)).all() for x, y in zip(results, others, strict=True)]
    return cupy.stack(flags).all()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ASKED)
def test_results_have_the_same_bits(name, dtype):
    rng = numpy.random.default_rng(0)
    options, given = drawn(ASKED[name], rng)
    wrt = options.pop("wrt", ())
    dout, q, k, v = (cupy.asarray(rng.standard_normal(SHAPE, numpy.float32).astype(dtype)) for _ in range(4))
    forward = plan_attention(q, k, v, return_lse=True, **options)
    out, lse = forward(q, k, v, **given)
    backward = plan_attention_backward(dout, q, k, v, out, lse, deterministic=True, wrt=wrt, **options)

    def gradients():
        found = backward(dout, q, k, v, out, lse, **given)
        others = [found.dsinks, found.dbias, *found.darrays.values()]
        return [*found, *(x for x in others if x is not None)]

    first, kept = gradients(), []
    for _ in range(REPEATS):
        kept.append(same(forward(q, k, v, **given), (out, lse)) & same(gradients(), first))
    assert int(cupy.stack(kept).sum()) == REPEATS


def test_a_plan_made_with_a_strided_result_is_called_without():
    q, k, v = (cupy.random.standard_normal((2, 3, 200, 64), cupy.float32).astype(cupy.float16) for _ in range(3))
    strided = cupy.empty((2, 200, 3, 64), cupy.float16).swapaxes(1, 2)
    plan = plan_attention(q, k, v, out=strided)
    numpy.testing.assert_array_equal(cupy.asnumpy(plan(q, k, v)), cupy.asnumpy(attention(q, k, v)))
    with pytest.raises((ValueError, UnsupportedError), match="out"):
        plan(q, k, v, out=cupy.empty((2, 3, 200, 32), cupy.float16))
