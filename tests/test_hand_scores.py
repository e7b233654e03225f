"""The handwritten scores and masks against the texts they stand for, as the language reads these."""

import numpy
import pytest
from hand_masks import MASKS
from hand_scores import SCORES, Grid

from cupy_flash.problem.expression.derivative import derivative, slope_kind
from cupy_flash.problem.expression.entry import mask_expression, score_expression
from cupy_flash.problem.expression.evaluate import evaluate
from cupy_flash.problem.expression.reads import AXES, axes_of, reads
from cupy_flash.problem.expression.tree import SCORE
from cupy_flash.problem.expression.vocabulary import Declaration

GRIDS = [Grid.of((3,), 4, 2, 13, 21), Grid.of((2, 2), 6, 2, 21, 13), Grid.of((), 3, 3, 1, 40)]
KINDS = {"f": "float", "i": "int", "b": "bool"}

on_grids = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: str(grid.shape))


def made(example, grid):
    """What the text means, and its arrays."""
    declared = example.arrays(grid)
    arrays = {name: array for name, (_, array) in declared.items()}
    declarations = [Declaration(name, KINDS[x.dtype.kind], x.ndim) for name, x in arrays.items()]
    return (score_expression if example.slope else mask_expression)(example.text, declarations).tree, arrays


def same(got, expected, shape):
    numpy.testing.assert_allclose(*(numpy.broadcast_to(x, shape) for x in (got, expected)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("example", SCORES + MASKS, ids=str)
def test_axes_are_those_of_the_text(example):
    tree, arrays = made(example, GRIDS[0])
    declared = example.arrays(GRIDS[0])
    assert {read.name: axes_of(read) for read in reads(tree)} == {name: axes for name, (axes, _) in declared.items()}
    for axes, array in declared.values():
        assert [n for axis, n in zip(axes, array.shape, strict=True) if axis] == [GRIDS[0].sizes[axis] for axis in axes if axis]
        assert {axis for axis in axes if axis} <= set(AXES)
    assert all(numpy.array_equal(array, example.arrays(GRIDS[0])[name][1]) for name, array in arrays.items())


@on_grids
@pytest.mark.parametrize("example", SCORES, ids=str)
def test_a_score_and_its_derivatives_are_those_of_the_text(example, grid):
    tree, arrays = made(example, grid)
    s = 2 * numpy.random.default_rng(1).standard_normal(grid.shape)
    score = example.hand(grid, arrays)

    def value(tree):
        return evaluate(tree, grid.names | {"score": s}, arrays, "float64")

    assert slope_kind(tree) == example.slope
    same(score.value(s), value(tree), s.shape)
    same(score.slope(s), value(derivative(tree, SCORE)), s.shape)
    floats = [read for read in reads(tree) if read.kind == "float"]
    assert score.arrays.keys() == {read.name for read in floats}
    for read in floats:
        partial, summed = score.arrays[read.name]
        same(partial(s), value(derivative(tree, read)), s.shape)
        total, indices = numpy.zeros(arrays[read.name].shape), [value(index) for index in read.args]
        for at in numpy.ndindex(s.shape):
            places = (numpy.broadcast_to(index, s.shape)[at] for index in indices)
            total[tuple(min(max(i, 0), n - 1) for i, n in zip(places, total.shape, strict=True))] += s[at]
        same(summed(s), total, total.shape)
    assert score.value(s.astype("float32")).dtype == "float32"


@on_grids
@pytest.mark.parametrize("example", MASKS, ids=str)
def test_a_mask_is_that_of_the_text(example, grid):
    tree, arrays = made(example, grid)
    seen, expected = example.hand(grid, arrays), evaluate(tree, grid.names, arrays, "float64")
    assert seen.dtype == bool
    assert numpy.array_equal(*(numpy.broadcast_to(x, grid.shape) for x in (seen, expected)))
    assert grid.q_len == 1 or (seen.any() and not seen.all())


def test_a_part_of_a_grid_has_the_coordinates_of_the_whole():
    grid, parts = Grid.of((2, 3), 4, 2, 5, 7), (slice(1, 2), slice(1, 3), slice(2, 4))
    part = grid.at(*parts)
    assert part.shape == (1, 2, 2, 5, 7)
    for name in AXES:
        whole, some = numpy.broadcast_to(getattr(grid, name), grid.shape), numpy.broadcast_to(getattr(part, name), part.shape)
        assert numpy.array_equal(whole[parts], some)
