"""Float32 gradients in parts of float16: keys to which nobody gives much weight lie far below their tile, and keep their bits."""

from itertools import product

import numpy
import pytest
from test_gradient_parts import computed, rms, simple
from thinned import quick, thinned

from cupy_flash.machine.host import SCHEDULES

EXPONENTS = {  # of the weight of each key, beside that of the others of a query
    "each its own": lambda keys: 7 * numpy.arange(keys) % 90,
    "warps of their own": lambda keys: numpy.arange(keys) // 16 % 4 * 30,
    "tiles of their own": lambda keys: numpy.arange(keys) // 64 * 40,
    "a tile as far as float32 goes": lambda keys: numpy.arange(keys) // 64 % 2 * 100 + numpy.arange(keys) % 3 * 5,
    "one key": lambda keys: (numpy.arange(keys) == 21) * 60,
}
ASKED = {}, {"causal": True}, {"window": (20, 5)}, {"deterministic": True}, {"softcap": 60.0}
EACH = [*product(EXPONENTS, (64, 128), ASKED)]  # every third has each of each


def drawn_with_weights(exponents, len_q, dim, seed=0):
    """Queries whose first element is the same, and keys whose first element makes their weights 2^-exponent of others."""
    rng, len_kv = numpy.random.default_rng(seed), len(exponents)
    q, k, v, dout = (rng.standard_normal((1, 1, rows, dim), numpy.float32) for rows in (len_q, len_kv, len_kv, len_q))
    q[..., 0] = numpy.sqrt(dim)
    k[..., 0] = -numpy.log(2) * exponents
    return q, k, v, dout


def errors_of_rows(gradient, true):
    """Of each row, beside the root of the mean square of its own elements."""
    difference = gradient - true
    return numpy.sqrt((difference**2).mean(-1) / (true**2).mean(-1))


@pytest.mark.parametrize("schedule", thinned(SCHEDULES, first=1))
@pytest.mark.parametrize("name, dim, asked", quick(EACH, *EACH[::3], spread=True), ids=str)
def test_each_key_has_the_bits_of_its_own_gradient(name, dim, asked, schedule, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", schedule)
    deterministic = {"deterministic": asked.get("deterministic", False)}
    meaning = {key: value for key, value in asked.items() if key not in deterministic}
    exponents = EXPONENTS[name](150)
    given, true = simple(*drawn_with_weights(exponents, 150, dim), **meaning)
    cut_off = 3 * dim / 16 + 3  # times at 2^-23 of the largest term of a score: steps of three products, and the terms themselves
    of_scores = cut_off * 2**-23 * numpy.log(2) * exponents
    for found, exact in zip(computed(given, meaning, **deterministic)[1:], true[1:], strict=True):
        assert (errors_of_rows(found, exact) < 2**-18 + of_scores).all()


@pytest.mark.parametrize("exponent", [16, 19, 22, 25, 28])
def test_a_row_is_lifted_as_soon_as_it_has_too_few_bits(exponent):
    """All weight is a single key's, so that scores of the others are small and exact: only lse is rounded, by at most 2^-20."""
    others = numpy.arange(100) != 21
    given, true = simple(*drawn_with_weights(exponent * (others - 1.0), 90, 64))
    for found, exact in zip(computed(given, {})[1:], true[1:], strict=True):
        assert (errors_of_rows(found, exact)[..., others] < 2**-19).all()


def test_a_row_is_lifted_by_itself():
    """A key has so little weight that its rows are lifted, and then less: no bit of the other gradients changes."""
    few = (numpy.arange(100) == 21) * 50
    q, k, v, dout = drawn_with_weights(few, 90, 64)
    given, _ = simple(q, k, v, dout)
    gradients = computed(given, {})
    k[0, 0, 21, 0] = -numpy.log(2) * 70  # beside 2^-50, what that adds to sums of others is nothing as well
    others = numpy.arange(100) != 21
    again = computed(given | {"k": k}, {})
    for before, after in zip(gradients[1:], again[1:], strict=True):
        numpy.testing.assert_array_equal(before[..., others, :], after[..., others, :])
        assert 2**-21 < rms(after[..., 21, :]) / rms(before[..., 21, :]) < 2**-19
