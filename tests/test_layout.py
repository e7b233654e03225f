"""Layouts against NumPy: what memory they reach, and the memory order of results."""

import itertools
import math

import numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from cupy_flash.problem.layout import Layout, result_layout


def layout_of(array):
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Layout(array.shape, strides, array.dtype.name, 16, None)


@st.composite
def views(draw, min_size=1):
    """Arrays as slicing, transposing, reversing and broadcasting make them; each element holds its own offset."""
    ndim = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(min_size, 4), min_size=ndim, max_size=ndim))
    array = numpy.arange(math.prod(sizes), dtype="float32").reshape(sizes).transpose(draw(st.permutations(range(ndim))))
    steps = draw(st.lists(st.sampled_from([1, 2, -1]), min_size=ndim, max_size=ndim))
    array = array[tuple(slice(None, None, step) for step in steps)]
    repeated = draw(st.lists(st.booleans(), min_size=ndim, max_size=ndim)) if draw(st.booleans()) else [False] * ndim
    return as_strided(array, strides=tuple(0 if r else s for r, s in zip(repeated, array.strides)))


@given(views(min_size=0))
def test_extent_is_the_range_of_offsets(array):
    layout = layout_of(array)
    if array.size == 0:
        assert layout.extent == (0, 0)
        return
    offsets = [sum(map(int.__mul__, index, layout.strides)) for index in itertools.product(*map(range, array.shape))]
    assert layout.extent == (min(offsets), max(offsets) + 1)
    assert layout.nbytes == array.nbytes


@given(views(min_size=0))
def test_overlaps_itself_when_an_element_has_two_indices(array):
    assert layout_of(array).overlaps_itself == (len(numpy.unique(array)) < array.size)


@given(views())
def test_result_order_is_that_of_numpy(array):
    result = result_layout(layout_of(array), array.shape)
    expected = layout_of(numpy.negative(array)).strides
    ordered = [axis for axis, size in enumerate(array.shape) if size > 1]
    assert [result.strides[axis] for axis in ordered] == [expected[axis] for axis in ordered]
    assert not result.overlaps_itself
    assert result.extent == (0, array.size)
