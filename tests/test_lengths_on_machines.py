"""What a device is asked about sequences of several lengths, asked of NumPy: that it is judged right, and that faults are found."""

import ml_dtypes
import numpy
import pytest
from lengths_on_machines import (
    Decoding,
    Machine,
    backward,
    drawn,
    expression,
    few_queries,
    forward,
    judge,
    replayed,
    rooms_with,
    some_sequences,
    wrong,
)
from ragged import assert_same_bits

NUMPY = Machine(options={"backend": "numpy"})
LENS = (0, 1, 64, 65, 127, 37)


def test_random_problems():
    numbers = drawn(2, 0, 22)
    assert len(numbers) > 15 and [found for i in numbers if (found := wrong(NUMPY, 2, i))] == []


@pytest.mark.parametrize("kinds", [("packed", "packed"), ("roomy", "pages"), ("padded", "cache"), ("packed", "padded")])
def test_forwards(kinds):
    ragged = some_sequences(LENS, ml_dtypes.bfloat16)
    text, arrays = expression("relative", ragged)
    rooms = rooms_with(ragged, *kinds)
    judge(ragged, forward(NUMPY, ragged, rooms, causal=True, softcap=5.0), causal=True, softcap=5.0)
    found = forward(NUMPY, ragged, rooms, score=text, arrays=arrays, window=(9, None))
    judge(ragged, found, score="relative", arrays=arrays, window=(9, None))
    with pytest.raises(AssertionError, match="sequence"):
        judge(ragged, found, score="relative", arrays=arrays, window=(8, None))
    assert_same_bits(forward(NUMPY, ragged.some(3), rooms_with(ragged.some(3), *kinds)), forward(NUMPY, ragged, rooms)[3:4])


def test_backwards():
    ragged = some_sequences(LENS, "float32")
    rooms = rooms_with(ragged, "packed", "padded")
    found = backward(NUMPY, ragged, rooms, causal=True)
    judge(ragged, found, causal=True)
    with pytest.raises(AssertionError, match="sequence"):
        judge(ragged, found, causal="top_left", window=(5, None))


def test_a_graph_that_is_replayed():
    for replay, fresh in replayed(NUMPY, "float16", ((70, 3, 65), (1, 0, 140, 7), ()), 160, 5):
        assert all((x == y).all() for x, y in zip(replay, fresh))
        assert not replay[0][:, 148:].any()


def test_decoding():
    decoding = Decoding(NUMPY, "float16", (0, 17, 100), capacity=256)
    decoding.draw()
    launch = NUMPY.capture(decoding.step)
    decoding.judge()
    decoding.draw()
    decoding.lengths[1] = 3
    launch()
    decoding.judge()
    assert decoding.lengths.tolist() == [2, 4, 102]
    decoding.out[1] *= 1.1
    with pytest.raises(AssertionError, match="sequence 1 of 4 keys"):
        decoding.judge()


@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_few_queries(page_size):
    few_queries(NUMPY, "float16", (2500, 0, 1), 2600, page_size, 2700, dim=16)


def test_bits_do_not_depend_on_pages():
    found = [few_queries(NUMPY, numpy.float32, (2100, 5), 2200, size, 2200, dim=16)[1:] for size in (None, 3, 64)]
    assert all((x == y).all() for other in found[1:] for x, y in zip(found[0], other))
