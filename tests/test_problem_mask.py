"""What is asked of a mask against the definition, pair by pair."""

from dataclasses import replace

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_flash import UnsupportedError, attention
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.forward import make_forward_plan
from cupy_flash.problem.forward import make_problem
from cupy_flash.problem.layout import dense_layout
from cupy_flash.problem.mask import UNBOUNDED, Mask
from cupy_flash.problem.options import Options

X = numpy.ones((2, 5, 4), "float32")
lengths = st.integers(1, 30)
many = settings(max_examples=150, deadline=None)


@st.composite
def masks(draw):
    """Masks as options and head packing make them: an interval for each query, both of whose ends rise."""
    len_q, len_kv = draw(lengths), draw(lengths)
    left = draw(st.none() | st.integers(-40, 40))
    right = draw(st.none() | st.integers(-40 if left is None else left, 40))
    prefix = draw(st.integers(0, 40)) if left is None else 0
    mask = Mask(len_q, len_kv, left, right, prefix)
    heads = draw(st.integers(1, 3))
    return mask if heads == 1 else replace(mask, len_q=heads * len_q, queries=len_q)


def seen_by(mask):
    """Which row sees which key, from the definition."""
    seen = numpy.zeros((mask.len_q, mask.len_kv), bool)
    for row, key in numpy.ndindex(seen.shape):
        query = row if mask.queries is None else row % mask.queries
        near = (mask.left is None or query + mask.left <= key) and (mask.right is None or key <= query + mask.right)
        seen[row, key] = near or key < mask.prefix
    return seen


def interval(keys):
    found = numpy.flatnonzero(keys)
    return (int(found[0]), int(found[-1]) + 1) if found.size else None


@many
@given(masks(), st.data())
def test_what_rows_see(mask, data):
    seen = seen_by(mask)
    assert numpy.array_equal(mask.visible(0, mask.len_q, 0, mask.len_kv), seen)
    row = data.draw(st.integers(0, mask.len_q - 1))
    rows, col = data.draw(st.integers(1, mask.len_q - row)), data.draw(st.integers(0, mask.len_kv - 1))
    assert numpy.array_equal(mask.visible(row, rows, col, mask.len_kv - col), seen[row : row + rows, col:])
    if mask.queries is not None and rows > 1:  # they may be any query
        row, rows = 0, mask.queries
    (begin, end), any_sees = mask.some(row, rows), seen[row : row + rows].any(0)
    assert interval(any_sees) == (begin, end) if any_sees.any() else begin >= end
    (begin, end), all_see = mask.all(row, rows), seen[row : row + rows].all(0)
    assert interval(all_see) == (begin, end) if all_see.any() else begin >= end


@many
@given(masks())
def test_what_is_hidden(mask):
    seen = seen_by(mask)
    assert mask.pairs == seen.sum()
    begins, ends = ([mask.some(row, 1)[i] for row in range(mask.len_q)] for i in range(2))
    assert mask.hides_first is any(begin > 0 for begin in begins)
    assert mask.hides_last is any(end < mask.len_kv for end in ends)
    assert (mask.shape == "full") is bool(seen.all())


@many
@given(masks())
def test_simplified_is_the_same_mask(mask):
    simple = mask.simplified()
    assert numpy.array_equal(seen_by(simple), seen_by(mask)) and simple.shape == mask.shape
    assert (simple.kind == "PREFIX") is (simple.prefix > 0) and simple.simplified() == simple
    if simple.shape == "full":
        assert simple == Mask(mask.len_q, mask.len_kv, queries=mask.queries)
    for field, nothing in (("left", None), ("right", None), ("prefix", 0)):  # what is left hides or shows a pair
        if getattr(simple, field) != nothing and seen_by(mask).any(0).all():
            assert not numpy.array_equal(seen_by(replace(simple, **{field: nothing})), seen_by(mask))


@many
@given(masks())
def test_a_cut_mask_is_that_of_the_keys_that_are_left(mask):
    first, stop = mask.some(0, mask.len_q)
    if first < stop:
        assert numpy.array_equal(seen_by(mask.cut(first, stop)), seen_by(mask)[:, first:stop])


@many
@given(masks(), st.integers(1, 12), st.integers(1, 12))
def test_tiles_of_keys_are_those_that_a_row_sees(mask, tile_q, tile_kv):
    if mask.queries is not None:
        mask = replace(mask, queries=None, len_q=mask.queries)
    seen = seen_by(mask)
    for tile, visited in enumerate(mask.tiles_of_keys(tile_q, tile_kv)):
        found = interval(seen[tile * tile_q : (tile + 1) * tile_q].any(0))
        assert visited == (1 if found is None else (found[1] - 1) // tile_kv - found[0] // tile_kv + 1)


@many
@given(masks(), st.integers(1, 12), st.integers(1, 12))
def test_tiles_of_queries_are_those_that_see_a_key(mask, tile_kv, tile_q):
    mask = replace(mask, queries=None, prefix=0)
    seen = seen_by(mask)
    tiles = mask.tiles_of_queries(tile_kv, tile_q)
    assert len(tiles) == -(-mask.len_kv // tile_kv)
    for tile, visiting in enumerate(tiles):
        found = interval(seen[:, tile * tile_kv : (tile + 1) * tile_kv].any(1))
        assert visiting == (1 if found is None else (found[1] - 1) // tile_q - found[0] // tile_q + 1)


def test_all_queries_see_a_prefix():
    assert Mask(100, 100, None, 0, prefix=30).tiles_of_queries(20, 10).tolist() == [10, 10, 6, 4, 2]


def test_a_kernel_is_told_numbers_that_fit():
    assert Mask(5, 7).told == {"left": -UNBOUNDED, "right": UNBOUNDED, "prefix": 0}
    assert Mask(5, 7, -3, 2).told == {"left": -3, "right": 2, "prefix": 0}
    assert Mask(5, 7, None, 0, 4).told == {"left": -UNBOUNDED, "right": 0, "prefix": 4}


# prefix, as an option


def planned(len_q, len_kv, **options):
    q, k = (dense_layout((2, n, 64), (2, 1, 0), "float16", None) for n in (len_q, len_kv))
    return make_problem(q, k, k, Options(backend="host", **options))


@pytest.mark.parametrize(
    "options, kind",
    [
        ({"causal": True, "prefix": 30}, "PREFIX"),
        ({"window": (None, 3), "prefix": 30}, "PREFIX"),
        ({"causal": True, "prefix": 100}, "BAND"),  # all keys
        ({"causal": True, "prefix": 1}, "BAND"),  # which the first query sees anyway
        ({"prefix": 30}, "BAND"),  # nothing is hidden
        ({"causal": True}, "BAND"),
    ],
    ids=str,
)
def test_only_a_prefix_that_shows_something_costs_something(options, kind):
    problem = planned(100, 100, **options)
    for architecture in ("80", "90a"):
        assert kind == make_forward_plan(problem, ARCHITECTURES[architecture]).config.MASK


@pytest.mark.parametrize("value", [True, 2.0, "2", None, (1, 2), numpy.array(2)], ids=str)
def test_a_prefix_is_an_integer(value):
    with pytest.raises(TypeError, match="prefix: expected an integer, got"):
        attention(X, X, X, prefix=value)


def test_a_prefix_below_0_is_refused():
    with pytest.raises(ValueError, match="prefix: expected at least 0, got -1"):
        attention(X, X, X, prefix=-1)


def test_a_prefix_before_a_window_is_refused():
    """A query would see two intervals."""
    with pytest.raises(UnsupportedError, match=r"prefix: expected 0 with a window that has a left end, .*, got 2"):
        attention(X, X, X, prefix=2, window=(1, 0))
    attention(X, X, X, prefix=0, window=(1, 0))
    attention(X, X, X, prefix=2, window=(-1, 0))
