"""The triangle attention of examples/ against the formulas written out, its gradients against derivatives of those; its protein."""

import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
HEADS, DIM, N = 2, 6, 5
EPS = np.finfo(float).eps


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        import triangle_attention

        yield triangle_attention
        for name in ("triangle_attention", "train_char_lm", "char_lm"):
            del sys.modules[name]


def written_out(z, w):
    """Algorithm 13 of AlphaFold's supplement, one sum after the other; of complex numbers as well, which `abs` would not be."""
    centred = z - z.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["gain"] + w["offset"]
    split = (*z.shape[:2], HEADS, DIM // HEADS)
    q, k, v = (np.einsum("ijc,cd->ijd", y, w[name]).reshape(split) for name in ("query", "key", "value"))
    bias = np.einsum("jkc,ch->jkh", y, w["bias"])
    gate = 1 / (1 + np.exp(-np.einsum("ijc,cd->ijd", y, w["gate"]) - w["gate_offset"]))
    scores = np.einsum("ijhc,ikhc->hijk", q, k) / np.sqrt(DIM / HEADS) + np.moveaxis(bias, -1, 0)[:, None]
    weights = np.exp(scores)
    weights = weights / weights.sum(-1, keepdims=True)
    taken = gate * np.einsum("hijk,ikhc->ijhc", weights, v).reshape(z.shape)
    return np.einsum("ijc,cd->ijd", taken, w["out"]) + w["out_offset"]


@pytest.fixture(scope="module")
def block(example):
    """Vectors of pairs, weights and a gradient of the result, all of float64."""
    rng = np.random.default_rng(0)
    w = {name: rng.standard_normal(shape) for name, shape in example.block_shapes(DIM, HEADS).items()}
    return rng.standard_normal((N, N, DIM)), w, rng.standard_normal((N, N, DIM))


def test_result(example, block):
    z, w, _ = block
    update, _ = example.triangle_attention_vjp(z, w, HEADS)
    np.testing.assert_allclose(update, written_out(z, w), rtol=0, atol=1000 * EPS)


def test_every_element_of_every_gradient(example, block):
    """f(x + ih) has the derivative in its imaginary part, with an error of h**2 and no difference that could cancel."""
    z, w, dupdate = block
    dz, dw = example.triangle_attention_vjp(z, w, HEADS)[1](dupdate)
    assert dw.keys() == w.keys()
    inputs = {"z": z, **w}
    for name, gradient in {"z": dz, **dw}.items():
        expected = np.empty(inputs[name].shape)
        for place in np.ndindex(expected.shape):
            moved = inputs[name].astype(complex)
            moved[place] += 1e-30j
            changed = {**inputs, name: moved}
            expected[place] = (written_out(changed.pop("z"), changed).imag * dupdate).sum() / 1e-30
        assert np.abs(expected).max() > 1e-3, f"{name}: too flat to tell a wrong gradient"
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1000 * EPS * (1 + np.abs(expected).max()), err_msg=name)


def test_the_bias_is_of_the_third_side(example, block):
    """What (i, j) takes from (i, k) depends on (j, k), though that starts elsewhere."""
    z, w, _ = block
    before, _ = example.triangle_attention_vjp(z, w, HEADS)
    changed = z.copy()
    changed[3, 4] += np.arange(DIM)
    after, _ = example.triangle_attention_vjp(changed, w, HEADS)
    moved = np.abs(after - before).max(-1) > 1e-6
    assert moved[3].all() and moved[:, 3].all() and moved.sum() == 2 * N - 1


def test_gradients_of_the_model(example):
    model = example.Model(layers=2, heads=HEADS, dim=DIM)
    rng = np.random.default_rng(1)
    weights = [{name: rng.standard_normal(x.shape) for name, x in group.items()} for group in model.initial_weights(0)]
    features = rng.standard_normal((N, N, len(weights[0]["embed"])))
    ddistances = rng.standard_normal((N, N))
    gradient = example.distances_vjp(model, weights, features)[1](ddistances)
    # A central difference with a step of eps**(1/3) has an error of eps**(2/3), along a vector of length 1.
    step = EPS ** (1 / 3)
    for group, dgroup in zip(weights, gradient):
        assert dgroup.keys() == group.keys()
        for name, x in group.items():
            direction = rng.standard_normal(x.shape)
            direction /= np.linalg.norm(direction)
            values = []
            for sign in (1, -1):
                group[name] = x + sign * step * direction
                values.append((example.distances_vjp(model, weights, features)[0] * ddistances).sum())
            group[name] = x
            slope, found = (values[0] - values[1]) / (2 * step), (dgroup[name] * direction).sum()
            assert abs(found - slope) <= 1000 * EPS ** (2 / 3) * (1 + abs(slope)), name


def test_protein(example):
    """Neighbours in a chain of residues are 3.8 angstroms apart, and each pair of cysteines that a bond joins is close."""
    distances = example.read_distances() * example.LENGTH
    assert distances.shape == (46, 46) and (distances == distances.T).all()
    np.testing.assert_allclose(np.diagonal(distances, 1), 3.8, atol=0.1)
    assert distances[np.triu_indices(46, 2)].min() > 4
    for one, other in ((3, 40), (4, 32), (16, 26)):
        assert distances[one - 1, other - 1] < 6.5


def test_no_hidden_distance_is_told(example):
    distances = example.read_distances()
    hidden = example.some_pairs(np.random.default_rng(0), len(distances), 0.5)
    assert (hidden == hidden.T).all() and 0.4 < hidden.mean() < 0.6
    others = np.where(hidden, distances[::-1], distances)
    np.testing.assert_array_equal(example.features_of(distances, hidden), example.features_of(others, hidden))


def test_command(example):
    result = CliRunner().invoke(example.main, ["--device", "cpu", "--steps", "5"])
    assert result.exit_code == 0, result.output
    by_separation, at_first, at_last = (float(line.split()[0]) for line in result.output.splitlines()[-3:])
    assert at_last < at_first and 2 < by_separation < 4
