"""What rotate and append_kv hand to a device, seen by a program in the driver's place, and what they copy there."""

import contextlib
import sys
from types import SimpleNamespace

import numpy
import pytest
from rotary import angles
from test_device import launched, told  # noqa: F401  a fixture

from cupy_flash.call import append, indices, rotate
from cupy_flash.machine.operands import Operands
from cupy_flash.problem.append import APPEND_ARRAYS
from cupy_flash.problem.rotate import ROTATE_ARRAYS

OPTIONS = (("interleaved", False), ("layout", "bhsd"), ("backend", "host"))
CACHES = numpy.zeros((2, 9, 4, 16, 32), numpy.float16)
ROWS = numpy.zeros((2, 3, 4, 40, 32), numpy.float16)
COS, SIN = angles(100, 8)


def as_on_a_device(make, given):
    """The plan of a call, which launches as if it were on a device."""
    plan = make._prepared.__wrapped__(tuple(given.descriptions), OPTIONS, ())
    plan._backend = "cuda"
    return plan


@pytest.mark.parametrize("positions", [None, 31, numpy.array([5, 6, 7])], ids=str)
def test_a_rotation_is_told_addresses_and_its_first_position(launched, positions):  # noqa: F811
    first, array = (positions, None) if isinstance(positions, int) else (None, positions)
    out = numpy.empty_like(ROWS[0])
    given = Operands(ROTATE_ARRAYS, (ROWS[0], COS, SIN, array, out), required=3, results=1)
    assert as_on_a_device(rotate, given).run(given, first, {}) is out
    [launch] = launched
    params = told(launch, "RotateParams")
    assert [int(params[name]["data"]) for name in ROTATE_ARRAYS] == given.addresses
    assert int(params["first_position"]) == (first or 0) and launch.grid == [3 * 5, 1, 1, 128, 1, 1]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seqlens", [7, numpy.array([0, 1, 2])], ids=str)
def test_an_append_is_told_addresses_and_the_length_of_all(launched, seqlens, paged):  # noqa: F811
    length, array = (seqlens, None) if isinstance(seqlens, int) else (None, seqlens)
    by_name = {"k": ROWS[0], "v": ROWS[1], "cos": COS, "sin": SIN, "seqlens": array, "k_cache": CACHES[0], "v_cache": CACHES[1]}
    by_name |= {"pages": numpy.zeros((3, 5), numpy.int32)} if paged else {"cache_batch_idx": numpy.arange(3)}
    if not paged:
        by_name |= {"k": ROWS[0, :, :, :9], "v": ROWS[1, :, :, :9], "seqlens_new": numpy.arange(3)}
    given = Operands(APPEND_ARRAYS, tuple(by_name.get(name) for name in APPEND_ARRAYS), required=2, results=3)
    found = as_on_a_device(append, given).run(given, length, {})
    assert found[0] is by_name["k_cache"] and found[1] is by_name["v_cache"]
    [launch] = launched
    params = told(launch, "AppendParams")
    assert [int(params[name]["data"]) for name in APPEND_ARRAYS] == given.addresses
    assert int(params["length"]) == (length or 0) and launch.grid == [3 * (5 if paged else 2), 1, 1, 128, 1, 1]


def test_integers_in_host_memory_are_copied_to_the_device_of_the_rows(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def current(ordinal):
        entered.append(ordinal)
        yield

    copies = SimpleNamespace(ndarray=object, cuda=SimpleNamespace(Device=current), asarray=numpy.copy)
    monkeypatch.setitem(sys.modules, "cupy", copies)
    lengths, wrong = numpy.array([1, 2, 3]), numpy.array([1.0])
    by_name = {"k": ROWS[0], "v": ROWS[1], "seqlens": lengths, "seqlens_new": wrong}
    given = Operands(APPEND_ARRAYS[:6], tuple(by_name.get(name) for name in APPEND_ARRAYS[:6]), required=2, results=0)
    before = list(given.addresses)
    assert indices.read_by_host(APPEND_ARRAYS[:6], given, None) == {"seqlens": lengths} and given.addresses == before
    known = indices.read_by_host(APPEND_ARRAYS[:6], given, 2)
    assert known["seqlens"] is lengths and list(known) == ["seqlens"] and entered == [2]
    assert given.views[4] is not lengths and given.addresses[4] == given.views[4].ctypes.data != before[4]
    assert [a == b for a, b in zip(given.addresses, before)] == [True, True, True, True, False, True]
