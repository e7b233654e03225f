"""What a launch hands to the driver, seen by a program in the driver's place: parameters, addresses, maps and grids."""

import ctypes
import threading
from types import SimpleNamespace

import numpy
import pytest

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.call.addresses import Memory
from cupy_flash.plan.structs import struct
from cupy_flash.plan.tensor_map import TENSOR_MAP
from cupy_flash.problem.backward import BACKWARD_ARRAYS
from cupy_flash.problem.forward import FORWARD_ARRAYS

pytest.importorskip("cupy")
from cupy_flash.machine import device, driver_map

MULTIPROCESSORS = 5
STREAM = 77
ENCODED = 0xE0  # in the bytes of a map that the driver has encoded
REFUSED = 3 << 30  # an address that it does not take for a map


@pytest.fixture
def launched(monkeypatch):
    """The launches so far: the bytes of the struct that the kernel would get, its address, and the grid."""
    launches = []

    def launch_kernel(function, *numbers):
        *grid, shared_bytes, stream, arguments, extra = numbers
        argument = ctypes.c_uint64.from_address(arguments).value
        launches.append(SimpleNamespace(words=ctypes.string_at(argument, function), argument=argument, grid=grid, stream=stream))
        assert extra == 0 and shared_bytes >= 0

    def encode(place, *described):
        ctypes.memset(place, ENCODED, TENSOR_MAP.itemsize)
        return replace(place, described[2])

    def replace(place, address):
        ctypes.c_uint64.from_address(place.value).value = address
        return 1 if address == REFUSED else 0

    def module(kernel, ordinal):  # what points to a function is here the size of the struct that it takes
        size = struct(kernel.params).itemsize
        return SimpleNamespace(get_function=lambda entry: SimpleNamespace(ptr=size))

    cuda = SimpleNamespace(
        runtime=SimpleNamespace(free=lambda address: None),
        get_current_stream=lambda: SimpleNamespace(ptr=STREAM),
        alloc=lambda size: SimpleNamespace(ptr=1 << 30),
    )
    monkeypatch.setattr(device, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "driver", SimpleNamespace(funcSetAttribute=lambda *_: None, launchKernel=launch_kernel))
    monkeypatch.setattr(device, "_module", module)
    monkeypatch.setattr(device, "_multiprocessors", lambda ordinal: MULTIPROCESSORS)
    monkeypatch.setattr(driver_map, "_driver", lambda: (encode, replace))
    return launches


def execution(queries=1000, **options):
    q = numpy.zeros((2, 3, queries, 64), numpy.float16)
    return plan_attention(q, q, q, backend="host", arch="90a", causal=True, return_lse=True, **options)._execution


def told(launch, name):
    return numpy.frombuffer(launch.words, struct(name))[0]


def test_a_launch_hands_over_the_struct_with_its_addresses(launched):
    on_device = execution(kernel="fwd_v2").on_device
    for addresses in ([1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 0, 0]):
        on_device.launch(addresses)
        params = told(launched[-1], "ForwardParams")
        assert [int(params[name]["data"]) for name in FORWARD_ARRAYS] == addresses
        assert (params["len_q"], params["mask"]["right"], params["q"]["head_stride"]) == (1000, 0, 64_000)
    assert launched[-1].grid == [8 * 3 * 2, 1, 1, 128, 1, 1]


@pytest.mark.parametrize("stream", (0, 91))
def test_all_kernels_are_queued_on_the_stream_that_is_told_or_else_on_the_current_one(launched, stream):
    """Those of a list of tiles: of classification, and one that takes them."""
    for prepared in (execution(), execution(mask="q_idx % 3 != kv_idx")):
        words, memory = [1 << 20] * len(prepared._names), Memory(1 << 30)
        launched.clear()
        prepared.launch(words, memory, None, stream)
        kernels = len(launched)
        prepared.launch(words, memory)
        assert [launch.stream for launch in launched] == [stream] * kernels + [STREAM] * kernels
    assert kernels > 1


def test_the_workspace_has_its_addresses_as_well(launched):
    prepared = execution(kernel="fwd_v1")
    prepared.on_device.launch([1, 2, 3, 4, 5, 0])
    assert prepared.workspace.names == ("state",) and told(launched[-1], "ForwardParams")["state"] == 1 << 30


def test_maps_are_in_the_form_of_the_driver_and_the_rest_is_as_it_was(launched):
    on_device = execution().on_device
    for addresses in ([1 << 20, 2 << 20, 3 << 20, 4 << 20, 5, 0], [1 << 20, 6 << 20, 3 << 20, 7 << 20, 0, 0]):
        on_device.launch(addresses)
        params = told(launched[-1], "HopperForwardParams")
        for name, address in zip(("q", "k", "v", "out"), addresses):
            assert params[f"{name}_map"].tobytes() == address.to_bytes(8, "little") + bytes([ENCODED] * 120)
        assert params["out"]["data"] == addresses[3] and params["out"]["head_stride"] == 64_000
        assert params["lse"]["data"] == addresses[4] and params["lse"]["head_stride"] == 1000
        assert (params["len_q"], params["mask"]["right"], params["run"]) == (1000, 0, 2)
        assert launched[-1].argument % 64 == 0


def test_a_backward_is_told_of_an_array_by_its_address_and_by_its_map(launched):
    """Three launches get the same struct. Of those that are given twice, the map is in the form of the driver."""
    q, lse = numpy.zeros((2, 3, 1000, 64), numpy.float16), numpy.zeros((2, 3, 1000), numpy.float32)
    plan = plan_attention_backward(q, q, q, q, q, lse, backend="host", arch="90a", causal=True)
    mapped = ("q", "k", "v", "dout", "dq", "dk", "dv")
    for start in (1, 21, 1):
        addresses = [place << 20 for place in range(start, start + len(BACKWARD_ARRAYS))]
        launched.clear()
        plan._execution.on_device.launch(addresses)
        entries = [launch for launch in plan.launches if launch.blocks]
        assert [launch.grid[0] for launch in launched] == [launch.blocks for launch in entries]
        assert len(entries) == 2 and launched[0].words == launched[1].words and launched[0].argument % 64 == 0
        params = told(launched[0], "HopperBackwardParams")
        *of_tensors, of_dsinks = addresses
        assert [int(params[name]["data"]) for name in BACKWARD_ARRAYS[:-1]] == of_tensors and params["dsinks"] == of_dsinks
        for name, address in zip(BACKWARD_ARRAYS, addresses):
            if name in mapped:
                assert params[f"{name}_map"].tobytes() == address.to_bytes(8, "little") + bytes([ENCODED] * 120)
        parts = dict(zip(plan.workspace.names, plan.workspace.offsets))
        assert {name: int(params[name]) for name in parts} == {name: (1 << 30) + offset for name, offset in parts.items()}
        assert (params["dq_semaphore"], params["len_q"], params["q"]["head_stride"]) == (0, 1000, 64_000)
        assert params["mask"]["right"] == 0


@pytest.mark.parametrize("kernel, name", [("fwd_v2", "ForwardParams"), ("fwd_hopper", "HopperForwardParams")])
def test_keys_that_no_query_sees_are_left_out_by_the_address(launched, monkeypatch, kernel, name):
    """A window of one query to a head, for heads that share a tile: k and v begin at key 69."""
    q, k = numpy.zeros((2, 6, 1, 64), numpy.float16), numpy.zeros((2, 3, 100, 64), numpy.float16)
    v, out = numpy.zeros((2, 100, 3, 72), numpy.float16).swapaxes(1, 2), numpy.zeros((2, 6, 1, 72), numpy.float16)
    plan = plan_attention(q, k, v, out=out, backend="host", arch="90a", kernel=kernel, window=(30, 0))
    monkeypatch.setattr(plan, "_backend", "cuda")
    monkeypatch.setattr(plan, "_current_device", lambda: plan._device)
    for _ in range(2):
        plan(q, k, v, out=out)
        params = told(launched[-1], name)
        expected = {"q": q, "k": k[:, :, 69:], "v": v[:, :, 69:], "out": out}
        fields = {name: name if name in params.dtype.names else f"{name}_map" for name in expected}
        addresses = {name: int(params[field]["data"]) for name, field in fields.items()}
        assert addresses == {name: x.ctypes.data for name, x in expected.items()}
        assert [params[name] for name in ("heads", "heads_per_kv", "len_q", "len_kv")] == [3, 1, 2, 31]


def test_blocks_that_take_turns_are_as_many_as_the_device_holds(launched):
    of_many, of_one = execution(), execution(queries=1, kernel="fwd_hopper")
    of_many.on_device.launch([1 << 20] * 6)
    of_one.on_device.launch([1 << 20] * 6)
    one_for_each_head = 2 * 3
    threads = [of_many.kernel.threads, of_one.kernel.threads]
    assert [launch.grid for launch in launched] == [[MULTIPROCESSORS, 1, 1, each, 1, 1] for each in threads]
    assert one_for_each_head > MULTIPROCESSORS


def test_addresses_are_written_again_where_the_driver_has_refused_one(launched):
    on_device = execution(queries=777).on_device  # which no other test has launched
    addresses = [place << 20 for place in range(1, 7)]
    on_device.launch(addresses)
    on_device.launch(list(addresses))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=" 0xc0000000 with CUDA error 1"):
            on_device.launch([7 << 20, 8 << 20, REFUSED, 9 << 20, 10, 11])
    on_device.launch(addresses)
    assert len(launched) == 3 and launched[0].words == launched[1].words == launched[2].words


def test_each_thread_has_words_of_its_own(launched):
    on_device = execution().on_device
    on_device.launch([1 << 20] * 6)
    thread = threading.Thread(target=on_device.launch, args=([2 << 20] * 6,))
    thread.start()
    thread.join()
    on_device.launch([1 << 20] * 6)
    here, there, again = launched
    assert here.argument == again.argument != there.argument and here.words == again.words != there.words
