"""The order in which parts become a result: each is in it once, whatever rows they have, and with as little memory as is said."""

import numpy
import pytest

from cupy_flash.distributed.growing import Growing
from cupy_flash.distributed.merging import Merge, order_of

FRONT, BACK, ALL = (0, 4), (4, 8), (0, 8)


def test_one_part_of_each_row_is_written_where_the_result_goes():
    order = order_of([FRONT, BACK], 8, [True] * 2, narrow=True)
    assert order.places == ("out", "out")
    assert order.after == ((), ())
    assert not order.sums
    assert order.waiting == 0
    assert order.alone == 4


def test_of_two_parts_the_first_is_the_sum():
    """As in a ring of two: nothing is rounded before both are there. Where the result is as wide, it is the sum."""
    order = order_of([FRONT, BACK, BACK], 8, [True] * 3, narrow=True)
    assert order.places == ("out", "sum", "")
    assert order.after == ((), (), (Merge(BACK, (2,), "sum", "out"),))
    assert order.sums
    assert order.waiting == 4
    wide = order_of([FRONT, BACK, BACK], 8, [True] * 3, narrow=False)
    assert wide.places == ("out", "out", "")
    assert wide.after == ((), (), (Merge(BACK, (2,), "out", "out"),))
    assert not wide.sums


def test_more_parts_are_merged_by_twos():
    order = order_of([ALL, ALL, BACK, BACK, BACK], 8, [True] * 5, narrow=True)
    assert order.places == ("sum", "", "", "", "")
    assert order.after[2] == (Merge(FRONT, (1,), "sum", "out"), Merge(BACK, (1, 2), "sum", "sum"))
    assert order.after[4] == (Merge(BACK, (3, 4), "sum", "out"),)
    assert order.waiting == 12
    assert not order_of([ALL] * 5, 8, [True] * 5, narrow=False).sums


def test_rows_of_a_part_that_are_alone_are_rounded_in_the_end():
    order = order_of([ALL, BACK], 8, [True] * 2, narrow=True)
    assert order.places == ("sum", "")
    assert order.after == ((), (Merge(FRONT, (), "sum", "out"), Merge(BACK, (1,), "sum", "out")))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("narrow", [False, True])
def test_any_parts_add_up(narrow, seed):
    rng = numpy.random.default_rng(seed)
    count = int(rng.integers(0, 7))
    rows = [tuple(sorted(rng.choice(13, 2, replace=False).tolist())) for _ in range(count)]
    parts = [rng.integers(-8, 9, (2, stop - first, 3)).astype(numpy.float32) for first, stop in rows]
    wanted = numpy.zeros((2, 12, 3), numpy.float32)
    for (first, stop), part in zip(rows, parts):
        wanted[:, first:stop] += part
    order = order_of(rows, 12, rng.random(count) < 0.7, narrow)
    out = numpy.full(wanted.shape, numpy.nan, numpy.float16 if narrow else numpy.float32)
    total, most = Growing((out,), order, "float32"), 0
    if order.sums:
        total._sums[0].fill(numpy.nan)
    for part in parts:
        [room] = total.room()
        if room is not None:
            assert numpy.isnan(room).all()  # nothing is overwritten
            room[...] = part
        total.take((part,))
        most = max(most, sum(x.shape[-2] for x, in total._waiting.values()))
    assert (out == wanted).all()
    assert most <= order.waiting
