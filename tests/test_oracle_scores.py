"""What comes to attention between its scores and its softmax, and behind that, in the oracle: against loops and differences."""

import itertools
import math

import numpy
import pytest
from hand_masks import MASKS
from hand_scores import SCORES, Grid

from cupy_flash.judge.oracle import HandScore, naive, oracle, probabilities, seen_pairs
from cupy_flash.judge.oracle_gradients import gradients_of, naive_gradients, oracle_gradients, pairs_of

pytestmark = pytest.mark.filterwarnings("error")

GRID = Grid.of((2,), 4, 2, 4, 5)
BROADCAST = Grid.of((2, 3), 2, 1, 5, 4)
NAMED = {example.name: example for example in SCORES + MASKS}


def normal(*shape, seed=0):
    return numpy.random.default_rng([seed, *shape]).standard_normal(shape)


def inputs_of(grid):
    """`(q, k, v)`: of several batch axes, none of the three has all."""
    heads_q, heads_kv = grid.sizes["h"], grid.sizes["h_kv"]
    batch = grid.shape[:-3]
    of_q, of_k, of_v = (batch,) * 3 if len(batch) == 1 else ((batch[0], 1), batch[1:], (1, 1))
    rows = (of_q, heads_q, grid.q_len, 3), (of_k, heads_kv, grid.kv_len, 3), (of_v, heads_kv, grid.kv_len, 2)
    return [normal(*batch, *others, seed=i) for i, (batch, *others) in enumerate(rows)]


# One row after the other


class Clipped:
    """An array as expressions read it, for Python."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, indices):
        indices = indices if isinstance(indices, tuple) else (indices,)
        return self.array[tuple(min(max(i, 0), n - 1) for i, n in zip(indices, self.array.shape, strict=True))].item()


PYTHON = {
    **{"__builtins__": {}, "exp": math.exp, "tanh": math.tanh, "abs": abs, "min": min, "max": max},
    "where": lambda c, a, b: a if c else b,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


def by_rows(q, k, v, grid, options):
    """`(out, lse)` of one row after the other, from the definition; expressions are texts, evaluated by Python."""
    arrays = {name: Clipped(x) if x.ndim else x.item() for name, x in options.get("arrays", {}).items()}
    texts = {option: compile(options[option], option, "eval") for option in ("text", "mask") if option in options}
    shape, group = grid.shape, q.shape[-3] // k.shape[-3]
    q, k, v = (numpy.broadcast_to(x, shape[:-3] + x.shape[-3:]) for x in (q, k, v))
    bias, seen, keep = (numpy.broadcast_to(options.get(x, y), shape) for x, y in (("bias", 0), ("seen", True), ("keep", True)))
    slopes = numpy.broadcast_to(options.get("alibi_slopes", 0), shape[:-2])
    sinks = numpy.reshape(options.get("sinks", numpy.zeros((0, shape[-3]))), (-1, shape[-3]))
    out, lse = numpy.zeros((*shape[:-1], v.shape[-1])), numpy.full(shape[:-1], -math.inf)
    for at in numpy.ndindex(shape[:-1]):
        *element, head, i = at
        source = (*element, head // group)
        b = int(numpy.ravel_multi_index(element, shape[:-3])) if element else 0
        names = {"b": b, "h": head, "h_kv": head // group, "q_idx": i, "q_len": shape[-2], "kv_len": shape[-1]}
        weights = {}
        for j in range(shape[-1]):
            names["kv_idx"] = j
            if not options.get("first_key", -99) <= j - i <= options.get("last_key", 99) or not seen[(*at, j)]:
                continue
            if "mask" in texts and not eval(texts["mask"], {**PYTHON, **arrays, **names}):
                continue
            s = options["scale"] * (q[at] * k[source][j]).sum().item()
            if "softcap" in options:
                s = options["softcap"] * math.tanh(s / options["softcap"])
            if "text" in texts:
                s = eval(texts["text"], {**PYTHON, **arrays, **names, "score": s})
            weights[j] = math.exp(s + bias[(*at, j)] - slopes[at[:-1]] * abs(i + shape[-1] - shape[-2] - j))
        total = sum(weights.values()) + numpy.exp(sinks[:, head]).sum()
        if total:
            lse[at] = math.log(total)
            for j, weight in weights.items():
                out[at] += options.get("keep_scale", 1.0) * weight / total * v[source][j] * keep[(*at, j)]
    return out, lse


def scores_of(options, grid):
    """The options of the oracle for those of `by_rows`, of which texts have become arrays."""
    scores = {name: x for name, x in options.items() if name not in ("text", "mask", "arrays")}
    if "text" in options:
        hand = next(example.hand for example in SCORES if example.text == options["text"])
        scores["score"] = hand(grid, options["arrays"])
    if "mask" in options:
        hand = next(example.hand for example in MASKS if example.text == options["mask"])
        scores["seen"] = hand(grid, options["arrays"])
    return scores


def written(name, grid):
    """An expression as an option of `by_rows`, with its arrays."""
    example = NAMED[name]
    arrays = {of: x.astype("f8") if x.dtype.kind == "f" else x for of, (_, x) in example.arrays(grid).items()}
    return {"text" if example.slope else "mask": example.text, "arrays": arrays}


def with_holes(shape, rate, seed):
    x = normal(*shape, seed=seed)
    x[numpy.random.default_rng(seed).random(shape) < rate] = -numpy.inf
    return x


def truths(shape, rate, seed):
    return numpy.random.default_rng(seed).random(shape) < rate


OPTIONS = {
    "softcap": lambda grid: {"softcap": 0.9},
    "sinks": lambda grid: {"sinks": normal(2, grid.shape[-3], seed=5)},
    "band": lambda grid: {"first_key": -1, "last_key": 2},
    "score": lambda grid: written("gate", grid),
    "bias": lambda grid: {"bias": normal(grid.shape[-3], 1, grid.shape[-1], seed=6)},
    "bias with -inf": lambda grid: {"bias": with_holes((*grid.shape[:-3], 1, *grid.shape[-2:]), 0.6, 7)},
    "alibi_slopes": lambda grid: {"alibi_slopes": normal(grid.shape[-3], seed=8)},
    "alibi_slopes of a batch": lambda grid: {"alibi_slopes": normal(*grid.shape[:-2], seed=9)},
    "seen": lambda grid: {"seen": truths(grid.shape[-2:], 0.6, 10)},
    "seen of heads": lambda grid: {"seen": truths((*grid.shape[:-2], 1, grid.shape[-1]), 0.6, 11)},
    "keep": lambda grid: {"keep": truths(grid.shape, 0.7, 12), "keep_scale": 1 / 0.7},
}
ALONE = [(name,) for name in OPTIONS]
TOGETHER = [pair for pair in itertools.combinations(OPTIONS, 2) if pair[0].split()[0] != pair[1].split()[0]]
ALL = ("softcap", "sinks", "score", "bias", "alibi_slopes of a batch", "seen of heads", "keep")

on_grids = pytest.mark.parametrize("grid", [GRID, BROADCAST], ids=lambda grid: str(grid.shape))


def options_of(names, grid):
    return {"scale": 0.6} | {name: x for of in names for name, x in OPTIONS[of](grid).items()}


def agree(got, expected):
    for a, b in zip(got, expected, strict=True):
        numpy.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@on_grids
@pytest.mark.parametrize("names", [(), *ALONE, *TOGETHER, ALL], ids=" and ".join)
def test_options_are_their_definition(names, grid):
    qkv, options = inputs_of(grid), options_of(names, grid)
    scores = scores_of(options, grid)
    expected = by_rows(*qkv, grid, options)
    agree(oracle(*qkv, **scores), expected)
    agree(naive(*qkv, **scores), expected)
    p, lse = probabilities(*qkv[:2], **scores)
    agree([lse], expected[1:])
    assert (numpy.broadcast_to(seen_pairs(p, scores), p.shape) | (p == 0)).all()


@pytest.mark.parametrize("name", NAMED)
def test_expressions_are_their_definition(name):
    qkv, options = inputs_of(GRID), {"scale": 0.6} | written(name, GRID)
    agree(oracle(*qkv, **scores_of(options, GRID)), by_rows(*qkv, GRID, options))


# Differences


def check_differences(grid, options):
    """Compare each gradient with central differences of a loss, at some elements."""
    qkv, base = inputs_of(grid), scores_of(options, grid)
    out, lse = oracle(*qkv, **base)
    dout, dlse, finite = normal(*out.shape, seed=3), normal(*lse.shape, seed=4), numpy.isfinite(lse)

    def loss(q, k, v, changed):
        out, lse = oracle(q, k, v, **scores_of(changed, grid))
        return (dout * out).sum() + (dlse * lse)[finite].sum()

    def moved(place, sign, step):
        if place[0] == "qkv":
            return [x + sign * step if i == place[1] else x for i, x in enumerate(qkv)], options
        if place[0] == "arrays":
            return qkv, options | {"arrays": options["arrays"] | {place[1]: options["arrays"][place[1]] + sign * step}}
        return qkv, options | {place[0]: options[place[0]] + sign * step}

    grads = oracle_gradients(dout, *qkv, dlse=dlse, **base)
    places = {("qkv", i): (qkv[i], gradient) for i, gradient in enumerate(grads)}
    own = [name for name in ("sinks", "bias", "alibi_slopes") if name in options]
    places |= {(name,): (options[name], getattr(grads, f"d{name}")) for name in own}
    places |= {("arrays", name): (options["arrays"][name], gradient) for name, gradient in grads.darrays.items()}
    for place, (x, gradient) in places.items():
        assert (gradient.shape, gradient.dtype) == (x.shape, "float64"), place
        assert (gradient[numpy.isinf(x)] == 0).all()
        for at in list(numpy.ndindex(x.shape))[:: max(1, x.size // 7)]:
            step = numpy.zeros_like(x)
            step[at] = 1e-5
            above, below = (loss(*inputs, changed) for inputs, changed in (moved(place, sign, step) for sign in (1, -1)))
            assert abs((above - below) / 2e-5 - gradient[at]) < 3e-8, (place, at)
    pairs = pairs_of(dout, *qkv, dlse, base)
    agree([pairs.ds], [pairs.dlogits * (1 if pairs.slope is None else pairs.slope)])
    naive = naive_gradients(dout, *qkv, dlse=dlse, **base)
    agree(naive, grads)
    for name in ("dsinks", "dbias", "dalibi_slopes"):
        assert (getattr(naive, name) is None) == (getattr(grads, name) is None) == (name[1:] not in options)
    agree([naive.darrays[name] for name in grads.darrays], grads.darrays.values())


@pytest.mark.parametrize("names", [*ALONE, *TOGETHER], ids=" and ".join)
def test_gradients_are_differences(names):
    check_differences(GRID, options_of(names, GRID))


@pytest.mark.parametrize("names", [*ALONE, ALL], ids=" and ".join)
def test_gradients_of_what_is_broadcast_are_differences(names):
    check_differences(BROADCAST, options_of(names, BROADCAST))


@pytest.mark.parametrize("name", NAMED)
def test_gradients_of_expressions_are_differences(name):
    check_differences(GRID, {"scale": 0.6, "softcap": 3.0} | written(name, GRID))


def test_every_shape_of_a_bias_gets_its_gradient():
    (dout, *qkv), grads = (normal(2, 4, 4, 2, seed=3), *inputs_of(GRID)), {}
    for shape in itertools.product((1, 2), (1, 4), (1, 4), (1, 5)):
        bias = numpy.broadcast_to(normal(1), shape)  # the same number, so that all are one problem
        grads[shape] = oracle_gradients(dout, *qkv, scale=0.6, bias=bias).dbias
        assert grads[shape].shape == shape
    for shape, dbias in grads.items():
        axes = tuple(i for i, n in enumerate(shape) if n == 1)
        numpy.testing.assert_allclose(dbias, grads[GRID.shape].sum(axis=axes, keepdims=True), atol=1e-12)
    numpy.testing.assert_allclose(oracle_gradients(dout, *qkv, scale=0.6, bias=normal(5)).dbias.shape, (5,))


# Rows that see nothing, NaN and infinity


def hidden_rows(of):
    """A mask that hides all keys from the first row of every head, or from head 1 of element 0, and key 2 from all."""
    seen = numpy.ones(GRID.shape, bool)
    seen[..., 2] = False
    if of == "rows":
        seen[..., 0, :] = False
    else:
        seen[0, 1] = False
    return seen


@pytest.mark.parametrize("of", ["rows", "head"])
@pytest.mark.parametrize("spoilt", [numpy.nan, numpy.inf], ids=str)
@pytest.mark.parametrize("names", [(), ("softcap",), ("score",), ("bias", "alibi_slopes of a batch"), ("keep",)], ids=" and ".join)
def test_what_is_masked_reaches_nobody(names, spoilt, of):
    options = options_of(names, GRID) | {"seen": hidden_rows(of)}
    scores, qkv = scores_of(options, GRID), inputs_of(GRID)
    dout, dlse = normal(2, 4, 4, 2, seed=3), normal(2, 4, 4, seed=4)
    nothing = ~options["seen"].any(axis=-1)
    expected, grads = oracle(*qkv, **scores), oracle_gradients(dout, *qkv, dlse=dlse, **scores)
    assert (expected[0][nothing] == 0).all() and (expected[1][nothing] == -numpy.inf).all() and (grads.dq[nothing] == 0).all()
    for array in qkv[1:]:
        array[..., 2, :] = spoilt
    qkv[0][nothing] = spoilt
    dout[nothing] = dlse[nothing] = spoilt
    if "bias" in options:
        options["bias"] = numpy.where(options["seen"], options["bias"], spoilt)
        assert spoilt in options["bias"] or numpy.isnan(options["bias"]).any()
        scores = scores_of(options, GRID)
    agree(oracle(*qkv, **scores), expected)
    got = oracle_gradients(dout, *qkv, dlse=dlse, **scores)
    agree(got, grads)
    assert (got.dk[..., 2, :] == 0).all() and (got.dv[..., 2, :] == 0).all()
    agree(got.darrays.values(), grads.darrays.values())
    if "bias" in options:
        assert (got.dbias[~options["seen"]] == 0).all()
        agree([got.dbias.sum(axis=(0, 2)), got.dalibi_slopes], [grads.dbias[:, 0], grads.dalibi_slopes])


def test_what_some_heads_see_reaches_these_alone():
    """The values of key 2 are NaN, and seen by head 1 of element 0 only."""
    seen = numpy.ones((2, 4, 1, 5), bool)
    seen[..., 2] = False
    qkv = inputs_of(GRID)
    expected, _ = oracle(*qkv, scale=0.6, seen=seen)
    seen[0, 1, 0, 2] = True
    qkv[2][0, 0, 2] = numpy.nan
    out, lse = oracle(*qkv, scale=0.6, seen=seen)
    assert numpy.isnan(out[0, 1]).all() and numpy.isfinite(lse).all()
    out[0, 1] = expected[0, 1]
    agree([out], [expected])


def test_a_row_of_nothing_but_infinite_bias_is_one_that_sees_nothing():
    bias = numpy.zeros((4, 5))
    bias[1] = -numpy.inf
    qkv = inputs_of(GRID)
    dout, dlse = normal(2, 4, 4, 2, seed=3), normal(2, 4, 4, seed=4)
    out, lse = oracle(*qkv, scale=0.6, bias=bias)
    grads = oracle_gradients(dout, *qkv, dlse=dlse, scale=0.6, bias=bias)
    assert (out[..., 1, :] == 0).all() and (lse[..., 1] == -numpy.inf).all()
    assert (grads.dq[..., 1, :] == 0).all() and (grads.dbias[1] == 0).all() and grads.dbias[0].all()
    assert all(numpy.isfinite(x).all() for x in (*grads, grads.dbias))


def test_a_dropped_pair_has_no_weight_and_is_seen():
    keep = numpy.ones(GRID.shape, bool)
    keep[..., 2] = False
    qkv = inputs_of(GRID)
    dout, (out, lse) = normal(2, 4, 4, 2, seed=3), oracle(*qkv, scale=0.6)
    thinned, same = oracle(*qkv, scale=0.6, keep=keep, keep_scale=2.0)
    p, _ = probabilities(*qkv[:2], scale=0.6, keep=keep, keep_scale=2.0)
    values = numpy.repeat(qkv[2], 2, axis=-3)
    agree([thinned, same, p.sum(axis=-1)], [2 * (out - p[..., 2, None] * values[..., 2, None, :]), lse, numpy.ones(lse.shape)])
    assert (oracle_gradients(dout, *qkv, scale=0.6, keep=keep, keep_scale=2.0).dv[..., 2, :] == 0).all()
    qkv[2][..., 2, :] = numpy.nan
    assert numpy.isnan(oracle(*qkv, scale=0.6, keep=keep, keep_scale=2.0)[0]).all()


# Precision


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_naive_stays_in_the_precision_of_its_inputs(dtype):
    """Whatever the options are given in, and whatever a score makes; gradients have the dtype of what they belong to."""
    qkv = [x.astype(dtype) for x in inputs_of(GRID)]
    options = options_of(ALL, GRID)
    scores = scores_of(options, GRID) | {"sinks": options["sinks"].astype("f2")}
    score = scores["score"]

    def wide(function):
        return lambda s: function(s).astype("f8")

    arrays = {name: (wide(partial), summed) for name, (partial, summed) in score.arrays.items()}
    scores["score"] = HandScore(wide(score.value), wide(score.slope), arrays)
    dout = normal(2, 4, 4, 2, seed=3).astype(dtype)
    out, lse = naive(*qkv, **scores)
    assert (out.dtype, lse.dtype) == (dtype, "float32")
    grads, exact = naive_gradients(dout, *qkv, **scores), oracle_gradients(dout, *qkv, **scores)
    assert {x.dtype.name for x in grads} == {dtype}
    assert (grads.dbias.dtype, grads.dalibi_slopes.dtype, grads.dsinks.dtype) == ("f8", "f8", "f2")
    inputs = [x.astype("f4") for x in (dout, *qkv)]
    pairs = pairs_of(*inputs, None, scores)
    whole = gradients_of(pairs, *inputs, scores)
    assert {x.dtype.name for x in (*pairs, *whole, whole.dbias, whole.dalibi_slopes, *whole.darrays.values())} == {"float32"}
    named = [*zip(grads, exact), (grads.dbias, exact.dbias), (grads.dalibi_slopes, exact.dalibi_slopes)]
    for got, truth in [*named, *((grads.darrays[name], x) for name, x in exact.darrays.items())]:
        numpy.testing.assert_allclose(got, truth, atol=2e-2 if dtype == "float16" else 2e-3)
        assert truth.dtype == "float64"
