"""Gradients of attention against differences of a loss, in float64: through every expression, operator and function."""

import numpy
import pytest
from hand_scores import SCORES, Grid

from cupy_flash import attention, attention_vjp
from cupy_flash.problem.expression.operations import FUNCTIONS

GRID = Grid.of((2,), 4, 2, 9, 11)
STEP = 1e-6

# For each operator and function a score in which it has a slope, of the score and of t[h], which is between 0.2 and 0.8.
OPERATORS = {
    "+": "score + t[h]",
    "-": "score - t[h]",
    "neg": "-score * -t[h]",
    "*": "score * t[h]",
    "/": "(score + t[h]) / (t[h] + 2 + abs(score))",
    "//": "score + score // 0.3 + t[h] // 0.3",
    "%": "(score + t[h]) % 1.7",
    "% of it": "(q_idx + 5) % (t[h] + 0.713) + score",
    "**": "(abs(score) + t[h]) ** 2.5",
    "** of ints": "score ** 3 + (t[h] + 1) ** -2",
    "** of it": "(t[h] + 1) ** score + 2 ** (score * t[h])",
    "if": "score * t[h] if score > t[h] else 0.5 * score - t[h]",
    "and": "score * t[h] if score > 0 and kv_idx > 2 or q_idx < kv_idx else score",
    "where": "where(score < t[h], score * score, t[h] * score)",
    "min": "min(score, t[h], 0.9 - 0.1 * score)",
    "max": "max(score, t[h], -0.9 * score)",
    "clip": "clip(score, t[h] - 1, t[h]) + 0.1 * score",
    "abs": "abs(score) + abs(score - t[h])",
    "floor": "score + floor(2 * score) * t[h]",
    "float": "float(kv_idx) * t[h] / 10 + score",
    "int": "score * t[h] + int(score * 3) * t[h]",
    **{name: f"{name}(score) + {name}(t[h] * score + 0.1)" for name in ("tanh", "sigmoid", "sin", "cos", "exp", "exp2")},
    **{name: f"{name}(abs(score) + 0.3) + {name}(t[h] + score ** 2)" for name in ("log", "log2", "sqrt", "rsqrt")},
}


def agree(q, k, v, options, wrt):
    """All gradients, each in a random direction."""
    rng = numpy.random.default_rng(1)
    dout, dlse = rng.standard_normal((*q.shape[:-1], v.shape[-1])), rng.standard_normal(q.shape[:-1])
    _, vjp = attention_vjp(q, k, v, return_lse=True, wrt=wrt, **options)
    grads = vjp(dout, dlse)
    inputs = {"q": q, "k": k, "v": v} | {name: options[name] for name in ("bias", "alibi_slopes", "sinks") if name in options}
    inputs |= {name: options["arrays"][name] for name in wrt if name in options.get("arrays", {})}

    def loss(name, x):
        changed = options | ({name: x} if name in options else {})
        if name in options.get("arrays", {}):
            changed["arrays"] = options["arrays"] | {name: x}
        given = [x if name == of else inputs[of] for of in "qkv"]
        out, lse = attention(*given, return_lse=True, **changed)
        return (out * dout).sum() + (lse * dlse).sum()

    for name, x in inputs.items():
        direction = numpy.asarray(rng.standard_normal(x.shape))
        difference = (loss(name, x + STEP * direction) - loss(name, x - STEP * direction)) / (2 * STEP)
        gradient = grads.darrays[name] if name in grads.darrays else getattr(grads, f"d{name}")
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        assert abs((gradient * direction).sum() - difference) <= 1e-6 * max(1, abs(difference), abs(gradient).sum()), name


def inputs():
    rng = numpy.random.default_rng(0)
    return [rng.standard_normal((2, heads, length, 5)) for heads, length in ((4, 9), (2, 11), (2, 11))]


@pytest.mark.parametrize("example", SCORES, ids=str)
def test_scores(example):
    arrays = {name: x.astype(float) if x.dtype.kind == "f" else x for name, (_, x) in example.arrays(GRID).items()}
    wrt = tuple(name for name, x in arrays.items() if x.dtype.kind == "f")
    agree(*inputs(), {"score": example.text, "arrays": arrays}, wrt)


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_and_functions(operator):
    agree(*inputs(), {"score": OPERATORS[operator], "arrays": {"t": numpy.array([0.2, 0.37, 0.59, 0.8])}}, ("t",))


def test_every_function_is_asked():
    assert sorted(FUNCTIONS.keys() - OPERATORS.keys()) == []


def test_everything_at_once():
    rng = numpy.random.default_rng(2)
    options = {"score": OPERATORS["tanh"], "arrays": {"t": rng.uniform(0.2, 0.8, 4)}, "bias": rng.standard_normal((4, 9, 11))}
    options |= {"alibi_slopes": rng.uniform(0, 1, (2, 4)), "mask": rng.random((2, 1, 9, 11)) < 0.8, "sinks": rng.standard_normal(4)}
    options |= {"dropout": 0.3, "seed": (5, 6), "softcap": 3.0, "causal": True}
    agree(*inputs(), options, ("bias", "alibi_slopes", "t"))
