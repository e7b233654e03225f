"""What only a device can show of a backward: repeats, streams, graphs, devices, memory."""

import threading

import numpy
import pytest

from cupy_flash import (
    Gradients,
    UnsupportedError,
    attention,
    attention_backward,
    attention_vjp,
    plan_attention,
    plan_attention_backward,
)
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.plan.workspace import ALIGNMENT

cupy = pytest.importorskip("cupy")

in_both_modes = pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "in order"])


def operands(case, seed=0):
    """What a backward takes of a case that returns lse: dout, q, k, v, out, lse and dlse."""
    inputs, (dout, dlse) = make_inputs(case, cupy, seed), make_cotangents(case, cupy, seed)
    return dout, *inputs, *attention(*inputs, **case.options), dlse


def plan_of(case, given, **options):
    *given, dlse = given
    options |= {name: value for name, value in case.options.items() if name != "return_lse"}
    return plan_attention_backward(*given, dlse=dlse, **options)


def run(plan, given, **memory):
    *given, dlse = given
    return plan(*given, dlse=dlse, **memory)


def memory_for(plan, given):
    """Memory for all that a call allocates, full of NaN."""
    memory = {name: cupy.full_like(x, numpy.nan) for name, x in zip(Gradients._fields, given[1:4])}
    return memory | {"workspace": cupy.full(plan.workspace_bytes, 255, numpy.uint8)}


def judge(case, given, gradients):
    dout, q, k, v, _, _, dlse = given
    judged = compare_gradients(gradients, dout, q, k, v, dlse=dlse, precision=case.precision, **case.scores)
    assert judged.ok, judged.message


# Many tiles of keys add to each row of dq.
REPEATED = (
    Case("float16", 700, 900, heads_q=6, heads_kv=2, batch=(2,), causal=True),
    Case("bfloat16", 500, 700, dim=128, heads_q=8, heads_kv=1, window=(300, 100)),
    Case("float16", 500, 700, dim=256, heads_q=2),
    Case("float32", 300, 700, heads_q=4, heads_kv=2, causal=True),
    Case("bfloat16", 2100, 2100, dim=128, heads_q=2),  # so many queries have a tile of their own
    Case("float16", 8200, 8200, heads_q=2, causal=True),  # so many queries have a tile of their own if dq is summed in order
)


@in_both_modes
@pytest.mark.parametrize("kernel", [None, "bwd_v2"])
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_thousand_repeats_are_bitwise_equal(case, kernel, deterministic):
    """Without `deterministic`, only the order in which dq is summed is free."""
    given = operands(case)
    plan = plan_of(case, given, deterministic=deterministic, kernel=kernel)
    memory = memory_for(plan, given)
    first = Gradients(*(x.copy() for x in run(plan, given, **memory)))
    differences = cupy.zeros((), numpy.int64)
    for _ in range(1000):
        for x in memory.values():
            x.view(numpy.uint8).fill(255)
        gradients = run(plan, given, **memory)
        for name in Gradients._fields if deterministic else ("dk", "dv"):
            found, expected = getattr(gradients, name), getattr(first, name)
            differences += (found.view(numpy.uint8) != expected.view(numpy.uint8)).sum()
    assert int(differences) == 0


@in_both_modes
def test_work_is_queued_on_the_current_stream(deterministic):
    """A kernel on another stream would not wait for the slow producer of its input."""
    case = Case("float16", 1000, 1000, heads_q=2, causal=True)
    given = operands(case)
    plan = plan_of(case, given, deterministic=deterministic)
    memory = memory_for(plan, given)
    run(plan, given, **memory)
    dout = given[0].copy()
    given[0].fill(0)
    busy = cupy.ones((4096, 4096), numpy.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            busy = busy @ busy * numpy.float32(1e-4)
        given[0][...] = dout
        gradients = run(plan, given, **memory)
    stream.synchronize()
    judge(case, given, gradients)


@in_both_modes
def test_no_synchronisation(deterministic):
    """Queueing returns while the stream is still busy."""
    x = cupy.ones((16, 8192, 128), numpy.float16)
    given = (x, x, x, x, *attention(x, x, x, return_lse=True), None)
    plan = plan_attention_backward(*given[:-1], deterministic=deterministic)
    memory = memory_for(plan, given)
    run(plan, given, **memory)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(10):
            run(plan, given, **memory)
        assert not stream.done
    stream.synchronize()


@in_both_modes
def test_graph_capture_and_replay(deterministic):
    """A forward and its backward as one graph, replayed on other numbers and with other memory than it was captured with."""
    case = Case("bfloat16", 300, 500, dim=128, heads_q=4, heads_kv=2, causal=True)
    given = operands(case)
    dout, q, k, v, out, lse, dlse = given
    forward = plan_attention(q, k, v, **case.options)
    backward = plan_of(case, given, deterministic=deterministic)
    memory = memory_for(backward, given)
    run(backward, given, **memory)  # loads the kernels: a capture may not
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        forward(q, k, v, out=out, lse=lse)
        run(backward, given, **memory)
        graph = stream.end_capture()
        for seed in (1, 2):
            for new, old in zip((*make_cotangents(case, cupy, seed), *make_inputs(case, cupy, seed)), (dout, dlse, q, k, v)):
                old[...] = new
            for x in (out, lse, *memory.values()):
                x.view(numpy.uint8).fill(255)
            graph.launch(stream)
            stream.synchronize()
            judge(case, given, [memory[name] for name in Gradients._fields])


def test_many_threads_share_a_plan():
    case = Case("float16", 200, 200, heads_q=4, heads_kv=2)
    given = [operands(case, seed) for seed in range(8)]
    plan = plan_of(case, given[0])
    results = [None] * 8

    def work(i):
        for _ in range(50):
            results[i] = run(plan, given[i])
        cupy.cuda.get_current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for arrays, gradients in zip(given, results):
        judge(case, arrays, gradients)


POOL_UNIT = 512  # bytes: CuPy's pool takes whole ones from the driver


def taken(work):
    """What `work` returns, and the bytes it took from a pool that has nothing to reuse."""
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        results = work()
    cupy.cuda.Device().synchronize()
    return results, pool.total_bytes()


@pytest.mark.parametrize("what", ["v1", "backward", "deterministic backward"])
def test_memory_is_results_and_workspace(what):
    """At 65,536 keys a score matrix would be 8 GiB; what is used grows with the rows, and is not used if it is given."""
    rows = 65_536
    x = cupy.random.default_rng(0).standard_normal((1, rows, 64), dtype=numpy.float32).astype(numpy.float16)

    def prepared(x):
        if what == "v1":
            return plan_attention(x, x, x, causal=True, return_lse=True, algorithm="v1"), (x, x, x)
        given = (x, x, x, x, *attention(x, x, x, causal=True, return_lse=True))
        return plan_attention_backward(*given, causal=True, deterministic=what != "backward"), given

    plan, given = prepared(x)
    plan(*given)  # loads the kernels
    results, size = taken(lambda: plan(*given))
    blocks = [*(result.nbytes for result in results), plan.workspace_bytes]
    assert size == sum(-(-block // POOL_UNIT) * POOL_UNIT for block in blocks)
    of_half = prepared(x[:, : rows // 2])[0].workspace_bytes
    assert 0 <= 2 * of_half - plan.workspace_bytes < ALIGNMENT  # all but a few numbers for each head

    places = dict(zip(("out", "lse") if what == "v1" else Gradients._fields, results))
    workspace = cupy.empty(plan.workspace_bytes, numpy.uint8)
    again, size = taken(lambda: plan(*given, **places, workspace=workspace))
    assert size == 0 and all(x is y for x, y in zip(again, results))


@in_both_modes
def test_64k_rows_agree_with_the_oracle(deterministic):
    """The gradient of a result is zero but for the last queries: those of all keys are then sums over these queries alone."""
    rows, sample = 65_536, 100
    dout, q, k, v = cupy.random.default_rng(0).standard_normal((4, 1, rows, 64), dtype=numpy.float32).astype(numpy.float16)
    dout[:, :-sample] = 0
    _, vjp = attention_vjp(q, k, v, causal=True, deterministic=deterministic)
    dq, dk, dv = vjp(dout)
    assert not bool(dq[:, :-sample].any())
    case = Case("float16", sample, rows, batch=(), causal=True)
    judge(case, (dout[:, -sample:], q[:, -sample:], k, v, None, None, None), (dq[:, -sample:], dk, dv))


def test_offsets_beyond_two_to_the_31_elements():
    rows, dim, heads, used = 1 << 17, 64, 300, 500  # 2.5e9 elements, 5 GB
    memory, dk_memory = cupy.zeros((2, heads, rows, dim), numpy.float16)
    k, dk = memory[:, -used:], dk_memory[:, -used:]
    assert k[-1].data.ptr - memory.data.ptr > 2 * 2**31
    numbers = cupy.random.default_rng(0).standard_normal((3, heads, used, dim), dtype=numpy.float32).astype(numpy.float16)
    dout, q, k[...] = numbers
    state = attention(q, k, k, return_lse=True)
    gradients = attention_backward(dout, q, k, k, *state, dk=dk)
    last = [x[-1:] for x in (dout, q, k, k)]
    judge(Case("float16", used, used, batch=()), (*last, None, None, None), [x[-1:] for x in gradients])
    assert int(cupy.count_nonzero(dk_memory[:, :-used])) == 0


def test_errors_leave_nothing_written():
    q = cupy.ones((2, 4, 32, 64), numpy.float16)
    out, lse = attention(q, q, q, return_lse=True)
    memory = {name: cupy.full(q.shape, 7, numpy.float16) for name in Gradients._fields}
    for error, given in (
        (ValueError, (q[..., :32], q, q, q, out, lse)),
        (ValueError, (q, q, q, q, out, cupy.asnumpy(lse))),
        (TypeError, (q, q, q, q, out, lse.astype(numpy.float16))),
        (UnsupportedError, (*[q.astype(numpy.float64)] * 4, out, lse)),
    ):
        with pytest.raises(error):
            attention_backward(*given, **memory)
    with pytest.raises(ValueError, match="dq: expected memory apart from that of dk"):
        attention_backward(q, q, q, q, out, lse, **memory | {"dk": memory["dq"]})
    assert all(bool((x == 7).all()) for x in memory.values())


@pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two CUDA devices"
)
def test_arrays_of_another_device_are_computed_there():
    case = Case("float16", 150, 150, heads_q=2, causal=True)
    with cupy.cuda.Device(1):
        given = operands(case)
        cupy.cuda.Device().synchronize()
    assert cupy.cuda.runtime.getDevice() == 0
    gradients = run(plan_of(case, given), given)
    assert ([x.device.id for x in gradients], cupy.cuda.runtime.getDevice()) == ([1, 1, 1], 0)
    with cupy.cuda.Device(1):
        cupy.cuda.Device().synchronize()
        judge(case, given, gradients)
