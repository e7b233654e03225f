"""What only a device can show of a forward and of a merge: repeats, streams, graphs, devices, memory."""

import itertools
import threading

import ml_dtypes
import numpy
import pytest

import cupy_flash
from cupy_flash import UnsupportedError, attention, merge_states, plan_attention
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.machine import nvrtc
from cupy_flash.plan.architecture import architecture_of

cupy = pytest.importorskip("cupy")


def judge(case, inputs, result):
    out, lse = result if case.return_lse else (result, None)
    comparison = compare(out, lse, *inputs, precision=case.precision, **case.scores)
    assert comparison.ok, comparison.message


REPEATED = (
    Case("float16", 300, 500, heads_q=4, batch=(2,), causal=True),
    Case("bfloat16", 257, 257, dim=128, heads_q=6, heads_kv=2),
    Case("bfloat16", 300, 5000, dim=128, heads_q=3),  # on sm_90a blocks share query tiles
    Case("float32", 200, 300, dim=128, heads_q=4, causal=True),
)


@pytest.mark.parametrize("kernel", [None, "fwd_v2", "fwd_v1"])
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_thousand_repeats_are_bitwise_equal(case, kernel):
    inputs = make_inputs(case, cupy)
    plan = plan_attention(*inputs, kernel=kernel, **case.options)
    first_out, first_lse = plan(*inputs)
    differences = cupy.zeros((), numpy.int64)
    out, lse = cupy.empty_like(first_out), cupy.empty_like(first_lse)
    for _ in range(1000):
        out.fill(numpy.nan)
        lse.fill(numpy.nan)
        plan(*inputs, out=out, lse=lse)
        differences += (out.view(numpy.uint8) != first_out.view(numpy.uint8)).sum()
        differences += (lse.view(numpy.uint8) != first_lse.view(numpy.uint8)).sum()
    assert int(differences) == 0


@pytest.mark.parametrize("kernel", ["fwd_v2", None])
def test_the_device_and_the_host_execute_one_kernel(kernel):
    """The same plan on both machines: equal up to the order in which a tensor core adds."""
    case = Case("float16", 130, 190, heads_q=2, causal=True)
    q, k, v = make_inputs(case)
    arch = architecture_of(cupy.cuda.Device().compute_capability).name
    on_host = plan_attention(q, k, v, backend="host", arch=arch, kernel=kernel, causal=True)
    on_device = plan_attention(*map(cupy.asarray, (q, k, v)), kernel=kernel, causal=True)
    assert on_host.kernel == on_device.kernel
    difference = on_host(q, k, v).astype("f") - cupy.asnumpy(on_device(*map(cupy.asarray, (q, k, v)))).astype("f")
    assert abs(difference).max() <= 2.0**-10


def test_work_is_queued_on_the_current_stream():
    """A kernel on another stream would not wait for the slow producer of its input."""
    q = cupy.zeros((1, 8, 1024, 64), numpy.float16)
    plan = plan_attention(q, q, q)
    plan(q, q, q)
    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.ones((4096, 4096), numpy.float32)
    with stream:
        for _ in range(20):
            busy = busy @ busy * numpy.float32(1e-4)
        q.fill(1)
        out = plan(q, q, q)
    stream.synchronize()
    assert bool((out == 1).all())


def test_no_synchronisation():
    """Queueing returns while the stream is still busy."""
    q = cupy.ones((1, 16, 8192, 128), numpy.float16)
    out = cupy.empty_like(q)
    plan = plan_attention(q, q, q)
    plan(q, q, q, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            plan(q, q, q, out=out)
        assert not stream.done
    stream.synchronize()


def test_graph_capture_and_replay():
    case = Case("bfloat16", 300, 300, dim=128, heads_q=4, causal=True)
    q, k, v = (cupy.ascontiguousarray(x) for x in make_inputs(case, cupy))
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], numpy.float32)
    options = {"causal": True, "return_lse": True, "out": out, "lse": lse}
    attention(q, k, v, **options)  # compiles: a capture may not
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        attention(q, k, v, **options)
        graph = stream.end_capture()
        for seed in (1, 2):
            for new, old in zip(make_inputs(case, cupy, seed=seed), (q, k, v)):
                old[...] = new
            out.fill(numpy.nan)
            graph.launch(stream)
            stream.synchronize()
            judge(case, (q, k, v), (out, lse))


def test_graph_of_a_call_that_is_given_its_workspace():
    case = Case("bfloat16", 300, 3000, dim=128, heads_q=4)
    q, k, v = (cupy.ascontiguousarray(x) for x in make_inputs(case, cupy))
    out, lse = cupy.empty_like(q), cupy.empty(q.shape[:-1], numpy.float32)
    plan = plan_attention(q, k, v, return_lse=True, out=out, lse=lse)
    workspace = cupy.empty(plan.workspace_bytes, numpy.uint8)
    plan(q, k, v, out=out, lse=lse, workspace=workspace)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        plan(q, k, v, out=out, lse=lse, workspace=workspace)
        graph = stream.end_capture()
        for memory in (out, lse, workspace):
            memory.fill(255)
        graph.launch(stream)
        stream.synchronize()
    judge(case, (q, k, v), (out, lse))


def test_many_threads_share_a_plan():
    case = Case("float16", 200, 200, heads_q=2)
    inputs = [make_inputs(case, cupy, seed=seed) for seed in range(8)]
    plan = plan_attention(*inputs[0], return_lse=True)
    results = [None] * 8

    def work(i):
        for _ in range(50):
            results[i] = plan(*inputs[i])
        cupy.cuda.get_current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for given, result in zip(inputs, results):
        judge(case, given, result)


def test_memory_beyond_the_results_is_not_used():
    """At 65,536 keys a score matrix would be 8 GiB a head; the pool grows by out and lse alone."""
    shape = (1, 4, 65_536, 64)
    q = cupy.ones(shape, ml_dtypes.bfloat16)
    warm = attention(q[:, :, :512], q[:, :, :512], q[:, :, :512], causal=True, return_lse=True)
    cupy.cuda.Device().synchronize()
    del warm
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    used, free = pool.used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    out, lse = attention(q, q, q, causal=True, return_lse=True)
    cupy.cuda.Device().synchronize()
    assert pool.used_bytes() - used == out.nbytes + lse.nbytes
    assert free - cupy.cuda.runtime.memGetInfo()[0] <= out.nbytes + lse.nbytes + (4 << 20)  # blocks of the driver are 2 MiB
    assert float(abs(out.astype("f") - 1).max()) == 0


MERGED = (
    Case("float16", 200, 500, heads_q=6, heads_kv=2, batch=(2,), layout="bshd"),
    Case("bfloat16", 65, 500, dim=128),
    Case("float32", 70, 500, dim=96, dim_v=33, heads_q=2),
)


@pytest.mark.parametrize("split", [0, 1, 64, 333, 499, 500])
@pytest.mark.parametrize("case", MERGED, ids=str)
def test_keys_split_anywhere_merge_to_the_whole(case, split):
    q, k, v = make_inputs(case, cupy)
    parts = [attention(q, k[..., keys, :], v[..., keys, :], return_lse=True) for keys in numpy.s_[:split, split:]]
    judge(case, (q, k, v), merge_states(*parts[0], *parts[1]))


@pytest.mark.parametrize("case", MERGED, ids=str)
def test_keys_in_many_parts_merge_to_the_whole(case):
    q, k, v = make_inputs(case, cupy)
    ends = [0, 1, 70, 70, 333, 500]
    parts = [attention(q, k[..., a:b, :], v[..., a:b, :], return_lse=True) for a, b in itertools.pairwise(ends)]
    judge(case, (q, k, v), merge_states(*parts))
    assert bool((merge_states(parts[0])[0] == parts[0][0]).all())


def test_a_state_over_no_keys_may_hold_anything():
    q, k, v = make_inputs(MERGED[0], cupy)
    out, lse = attention(q, k, v, return_lse=True)
    nothing = cupy.full_like(out, numpy.nan), cupy.full_like(lse, -numpy.inf)
    assert bool((merge_states(*nothing, out, lse)[0] == out).all() and (merge_states(out, lse, *nothing)[0] == out).all())


def test_an_offset_beyond_two_to_the_31_elements():
    rows, dim, heads = 1 << 17, 64, 300  # 2.5e9 elements, 5 GB
    k = cupy.zeros((heads, rows, dim), numpy.float16)
    last = cupy.random.default_rng(0).standard_normal((2, 500, dim), dtype=numpy.float32).astype(numpy.float16)
    k[-1, -500:] = last[0]
    assert (heads * rows - 500) * dim > 2**31
    q = last[1][None]
    out, lse = attention(q, k[-1:, -500:], k[-1:, -500:], return_lse=True)
    judge(Case("float16", 500, 500, batch=()), (q, k[-1:, -500:], k[-1:, -500:]), (out, lse))
    # The same through the head stride: the kernel itself computes the offset.
    many = attention(cupy.broadcast_to(q, (heads, 500, dim)), k[:, -500:], k[:, -500:])
    assert bool((many[-1] == out[0]).all())
    assert bool((many[0] == 0).all())


def test_64k_rows_agree_with_a_sample_of_the_oracle():
    rows, sample = 65_536, 300
    q, k, v = cupy.random.default_rng(0).standard_normal((3, 1, rows, 64), dtype=numpy.float32).astype(numpy.float16)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    judge(
        Case("float16", sample, rows, batch=(), causal=True),
        (q[:, -sample:], k, v),
        (out[:, -sample:], lse[:, -sample:]),
    )


def test_errors_leave_the_context_alive_and_nothing_written():
    q = cupy.ones((2, 4, 32, 64), numpy.float16)
    out = cupy.full(q.shape, 7, numpy.float16)
    for error, arguments in (
        (ValueError, (q, q[..., :32], q)),
        (ValueError, (q, q, cupy.asnumpy(q))),
        (TypeError, (q, q.astype(numpy.float32), q)),
        (UnsupportedError, [q.astype(numpy.float64)] * 3),
    ):
        with pytest.raises(error):
            attention(*arguments, out=out)
    with pytest.raises(ValueError, match="out"):
        attention(q, q, q, out=q)
    assert bool((out == 7).all())
    assert bool((attention(q, q, q) == 1).all())


def test_held_plan_refuses_another_layout():
    q = cupy.ones((2, 4, 32, 64), numpy.float16)
    plan = plan_attention(q, q, q)
    with pytest.raises(ValueError, match="k: expected shape"):
        plan(q, q[:, :, :16], q)
    with pytest.raises(ValueError, match="q: expected strides"):
        plan(q.swapaxes(0, 1).copy().swapaxes(0, 1), q, q)


needs_two_devices = pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two CUDA devices"
)


@needs_two_devices
def test_arrays_of_another_device_are_computed_there():
    case = Case("float16", 150, 150, heads_q=2, causal=True)
    on_host = make_inputs(case)
    with cupy.cuda.Device(1):
        inputs = [cupy.asarray(x) for x in on_host]
        cupy.cuda.Device().synchronize()
    assert cupy.cuda.runtime.getDevice() == 0
    out, lse = attention(*inputs, **case.options)
    assert (out.device.id, lse.device.id, cupy.cuda.runtime.getDevice()) == (1, 1, 0)
    with cupy.cuda.Device(1):
        cupy.cuda.Device().synchronize()
        judge(case, inputs, (out, lse))
    here = [cupy.asarray(x) for x in on_host]
    judge(case, here, attention(*here, **case.options))


@needs_two_devices
def test_arrays_of_two_devices_are_refused():
    q = cupy.ones((2, 30, 64), numpy.float16)
    with cupy.cuda.Device(1):
        k = cupy.ones((2, 30, 64), numpy.float16)
    with pytest.raises(ValueError, match=r"k: expected an array on CUDA device 0 .* got one on CUDA device 1"):
        attention(q, k, q)


def test_public_names_work_on_device_arrays():
    q = cupy.ones((3, 5, 8), numpy.float32)
    assert isinstance(cupy_flash.attention(q, q, q), cupy.ndarray)


def test_what_is_reported_of_a_kernel_is_of_a_compilation():
    """Not of what NVRTC has kept of one before, which it does where there is a driver, without the assembler's log."""
    q, k, v = make_inputs(Case("float16", 130, 190))
    plan = plan_attention(q, k, v, backend="host", arch=architecture_of(cupy.cuda.Device().compute_capability).name).kernel
    first, again = nvrtc.report(plan), nvrtc.report(plan)
    assert first.log and again.log and (again.registers, again.code) == (first.registers, first.code)
