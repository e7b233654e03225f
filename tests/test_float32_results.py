"""Results in float32 of inputs of 16 bits, on the host and as NVRTC compiles them: what is rounded otherwise, to the bit."""

import ml_dtypes
import numpy
import pytest
from thinned import thinned

from cupy_flash import UnsupportedError
from cupy_flash.call.backward import operands, prepared_backward
from cupy_flash.call.captured import captured
from cupy_flash.call.forward import ForwardOperands, prepared
from cupy_flash.machine import machine_code, nvrtc

DTYPES = {"float16": numpy.float16, "bfloat16": ml_dtypes.bfloat16}
KERNELS = [("75", "fwd_v2"), ("80", "fwd_v2"), ("90a", "fwd_hopper"), ("90a", "fwd_v2"), ("100", "fwd_v2"), ("120", "fwd_v2")]
BACKWARD = [
    *(("75", "bwd_v2"), ("80", "bwd_v2"), ("90a", "bwd_hopper"), ("90a", "bwd_v2"), ("90a", "bwd_hopper_wide")),
    *(("100", "bwd_v2"), ("120", "bwd_v2")),
]
LENGTHS = {"cu_seqlens_q": numpy.array([0, 40, 40, 90]), "cu_seqlens_kv": numpy.array([0, 70, 100, 150])}


@pytest.fixture(params=thinned(["eager", "deferred"], first=1))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)


def drawn(dtype, heads_q=2, heads_kv=2, len_q=90, len_kv=150, dim=40, dim_v=None, batch=()):
    rng = numpy.random.default_rng(0)
    shapes = ((*batch, heads_q, len_q, dim), (*batch, heads_kv, len_kv, dim), (*batch, heads_kv, len_kv, dim_v or dim))
    return [rng.standard_normal(shape, dtype=numpy.float32).astype(DTYPES[dtype]) for shape in shapes]


def forward(inputs, wide, sinks=None, given=(None, None), lengths=None, **options):
    others = captured(lengths=lengths or {})
    plan_of = ForwardOperands(*inputs, *given, sinks, others)
    plan = prepared(plan_of, {"backend": "host", "return_lse": True, "float32_results": wide, **options})
    return plan, *plan.run(plan_of)


def backward(inputs, wide, given=(None, None, None), lengths=None, **options):
    q, k, v = inputs
    _, out, lse = forward(inputs, False, lengths=lengths, **{name: x for name, x in options.items() if name == "causal"})
    dout = numpy.random.default_rng(1).standard_normal(out.shape, dtype=numpy.float32).astype(q.dtype)
    gradients = operands(dout, q, k, v, out, lse, None, None, *given, None, others=captured(lengths=lengths or {}))
    options = {"backend": "host", "deterministic": True, "float32_results": wide, **options}
    plan = prepared_backward(gradients, options)
    return plan, plan.run(gradients)


def bits(x):
    return x.view(numpy.uint8)


def check_rounded(wide, narrow):
    """The float32 is what the other one is rounded from, and holds more than that."""
    assert wide.dtype == numpy.float32
    assert (bits(wide.astype(narrow.dtype)) == bits(narrow)).all()
    assert (wide != narrow.astype(numpy.float32)).mean() > 0.5


SHAPES = {
    "elements": {"dim": 37},
    "fours": {"dim": 36},
    "split": {"heads_q": 8, "len_q": 3, "len_kv": 3000, "dim": 64},
    "together": {"heads_q": 8, "len_q": 2, "len_kv": 100, "dim": 64},
    "batch": {"batch": (3,)},
    "groups": {"heads_q": 6, "len_q": 40, "dim": 64},
}
NARROW_VALUES = {"heads_q": 4, "dim": 136, "dim_v": 40}


FORMS = [
    *(("float16", "75", "fwd_v2", shape) for shape in ("elements", "batch")),
    *(("bfloat16", "80", "fwd_v2", shape) for shape in SHAPES),
    *(("float16", "90a", "fwd_hopper", shape) for shape in ("split", "together", "batch")),
]


def rarely(*cases):
    return [pytest.param(*case, marks=pytest.mark.release) for case in cases]


def rarely_each(keep, cases):
    """All but each such one."""
    return [pytest.param(*case, marks=pytest.mark.release) if i % keep else case for i, case in enumerate(cases)]


@pytest.mark.parametrize("dtype, arch, kernel, shape", [*rarely(*FORMS[:9]), FORMS[9], *rarely(*FORMS[10:])])
def test_out_in_float32_is_what_is_rounded_otherwise(dtype, arch, kernel, shape, schedule):
    inputs = drawn(dtype, **SHAPES[shape])
    wide, out, lse = forward(inputs, True, arch=arch, kernel=kernel)
    narrow, rounded, same_lse = forward(inputs, False, arch=arch, kernel=kernel)
    assert wide.kernel.file == kernel and wide.kernel.name.endswith("-float32results")
    assert not narrow.kernel.config.FLOAT32_RESULTS
    check_rounded(out, rounded)
    assert (lse == same_lse).all()


GRADIENTS = [
    *(("bfloat16", "90a", "bwd_hopper", shape) for shape in ("batch", "groups")),
    ("float16", "75", "bwd_v2", "batch"),
    *(("bfloat16", "80", "bwd_v2", shape) for shape in ("elements", "fours", "groups")),
    ("float16", "90a", "bwd_hopper_wide", "groups"),
]


@pytest.mark.parametrize("dtype, arch, kernel, shape", rarely_each(12, GRADIENTS))
def test_gradients_in_float32_are_what_is_rounded_otherwise(dtype, arch, kernel, shape, schedule):
    inputs = drawn(dtype, **SHAPES[shape])
    wide, found = backward(inputs, True, arch=arch, kernel=kernel, causal=True)
    narrow, rounded = backward(inputs, False, arch=arch, kernel=kernel, causal=True)
    assert wide.kernel.file == kernel and wide.kernel.config.FLOAT32_RESULTS and not narrow.kernel.config.FLOAT32_RESULTS
    for x, y in zip(found, rounded):
        check_rounded(x, y)


@pytest.mark.release  # three kernels that take long to build; the next test asks it of bwd_hopper
def test_gradients_of_narrow_values_in_float32(schedule):
    """Where lanes store what TMA does otherwise, and where they are added to what is there."""
    inputs, asked = drawn("bfloat16", **NARROW_VALUES), {"arch": "90a", "kernel": "bwd_hopper_mla", "causal": True}
    wide, found = backward(inputs, True, **asked)
    for x, y in zip(found, backward(inputs, False, **asked)[1]):
        check_rounded(x, y)
    before = [numpy.random.default_rng(2).standard_normal(x.shape, dtype=numpy.float32) for x in inputs]
    given = tuple(x.copy() for x in before)
    adds, _ = backward(inputs, True, given, adds_results=True, **asked)
    assert wide.kernel.config.FLOAT32_RESULTS and adds.kernel.config.ADD_RESULTS
    for x, old, new in zip(given, before, found):
        assert (x == old + new).all()


@pytest.mark.parametrize("dtype, arch, kernel, shape", [("bfloat16", None, None, "groups"), *rarely_each(7, GRADIENTS)])
def test_gradients_are_added_to_what_is_there(dtype, arch, kernel, shape, schedule):
    """Each element once, in float32."""
    inputs = drawn(dtype, **SHAPES[shape])
    options = {"backend": "numpy"} if arch is None else {"arch": arch, "kernel": kernel}
    before = [numpy.random.default_rng(2).standard_normal(x.shape, dtype=numpy.float32) for x in inputs]
    given = tuple(x.copy() for x in before)
    plan, _ = backward(inputs, True, given, causal=True, adds_results=True, **options)
    assert arch is None or plan.kernel.name.endswith("-float32results-added")
    for x, old, new in zip(given, before, backward(inputs, True, causal=True, **options)[1]):
        assert (x == old + new).all()


@pytest.mark.parametrize("arch, kernel", [("80", "bwd_v2"), *rarely(("90a", "bwd_hopper"))])
def test_gradients_of_sequences_are_added_to_what_is_there(arch, kernel, schedule):
    """Also where nothing is added: in rows of no sequence, and in those of one without keys."""
    lengths = {**LENGTHS, "cu_seqlens_kv": numpy.array([0, 0, 100, 150])}
    inputs = drawn("bfloat16", dim=64, len_q=100, len_kv=160)
    given = tuple(numpy.ones(x.shape, numpy.float32) for x in inputs)
    backward(inputs, True, given, lengths=lengths, arch=arch, kernel=kernel, adds_results=True)
    for x, new in zip(given, backward(inputs, True, lengths=lengths, arch=arch, kernel=kernel)[1]):
        assert (x == 1 + new).all()


def test_what_cannot_be_added_to_is_refused():
    inputs = drawn("float16")
    given = tuple(numpy.ones(x.shape, numpy.float32) for x in inputs)
    for wide, places in ((True, (*given[:2], None)), (False, (None, None, None))):
        with pytest.raises(UnsupportedError, match="adds_results: expected gradients in float32"):
            backward(inputs, wide, places, adds_results=True)
    with pytest.raises(UnsupportedError, match="adds_results: expected False"):
        forward(inputs, True, adds_results=True)


@pytest.mark.parametrize("arch, kernels", [("80", ("fwd_v2", "bwd_v2")), *rarely(("90a", ("fwd_hopper", "bwd_hopper")))])
def test_packed_sequences(arch, kernels, schedule):
    """Rows of no sequence, and those of one without keys, are 0 as well."""
    inputs = drawn("bfloat16", dim=64, len_q=100, len_kv=160)
    wide, out, _ = forward(inputs, True, arch=arch, kernel=kernels[0], lengths=LENGTHS)
    _, rounded, _ = forward(inputs, False, arch=arch, kernel=kernels[0], lengths=LENGTHS)
    assert wide.kernel.config.VARLEN
    check_rounded(out[..., :90, :], rounded[..., :90, :])
    assert (out[..., 90:, :] == 0).all()
    _, found = backward(inputs, True, arch=arch, kernel=kernels[1], lengths=LENGTHS)
    _, rounded = backward(inputs, False, arch=arch, kernel=kernels[1], lengths=LENGTHS)
    for x, y in zip(found, rounded):
        assert x.dtype == numpy.float32 and (bits(x.astype(y.dtype)) == bits(y)).all()


@pytest.mark.parametrize("arch", thinned(["80", "90a"]))
def test_gradients_that_are_summed_over_a_batch(arch, schedule):
    """As a kernel behind the others stores them."""
    q, k, v = drawn("float16", batch=(2,))
    found, rounded = (backward((q, k[0], v[0]), wide, arch=arch)[1] for wide in (True, False))
    for x, y in zip(found, rounded):
        check_rounded(x, y)


@pytest.mark.parametrize("arch", thinned(["80", "90a"], first=1))
def test_strided_results_are_written_in_place(arch):
    q, k, v = drawn("float16", dim=64)
    room = numpy.full((q.shape[-2] + 2, q.shape[0], 2 * 64), numpy.nan, numpy.float32)
    out = room[1:-1, :, 64:].swapaxes(0, 1)
    forward((q, k, v), True, arch=arch, given=(out, None))
    check_rounded(out, forward((q, k, v), False, arch=arch)[1])
    assert numpy.isnan(room[0]).all() and numpy.isnan(room[-1]).all() and numpy.isnan(room[:, :, :64]).all()


def test_numpy_rounds_nothing():
    inputs = drawn("bfloat16")
    check_rounded(*(forward(inputs, wide, backend="numpy")[1] for wide in (True, False)))
    for x, y in zip(*(backward(inputs, wide, backend="numpy")[1] for wide in (True, False))):
        check_rounded(x, y)


def test_other_dtypes_stay():
    for dtype in (numpy.float32, numpy.float64):
        inputs = [x.astype(dtype) for x in drawn("float16")]
        plan, out, _ = forward(inputs, True, backend="numpy")
        assert out.dtype == dtype
        assert not plan.problem.has_wider_results


def test_v1_has_no_results_in_float32():
    with pytest.raises(UnsupportedError, match="algorithm: expected 'auto' or 'v2' for results in float32, got 'v1'"):
        forward(drawn("float16"), True, algorithm="v1")


def test_a_result_of_another_dtype_is_refused():
    inputs = drawn("float16")
    with pytest.raises(TypeError, match="out: expected float32, got float16"):
        forward(inputs, True, given=(numpy.empty_like(inputs[0]), None))
    with pytest.raises(TypeError, match="dq: expected float32, got float16"):
        backward(inputs, True, given=(numpy.empty_like(inputs[0]), None, None))


def compiled(plan):
    report = nvrtc.report(plan)
    assert not report.fault, report.fault
    assert all(kernel.stack_bytes == 0 for kernel in machine_code.read(report.code).values())


@pytest.mark.release  # the next test compiles a backward, whose results take more registers
@pytest.mark.parametrize("dim, len_q", [(128, 4096), (64, 4096), (128, 4), (256, 4096)])
@pytest.mark.parametrize("arch, kernel", KERNELS)
def test_forward_kernels_do_not_spill(arch, kernel, dim, len_q):
    inputs = (numpy.zeros((1, heads, rows, dim), numpy.float16) for heads, rows in ((8, len_q), (2, 4096), (2, 4096)))
    options = {"backend": "host", "arch": arch, "kernel": kernel, "causal": len_q > 4, "return_lse": True}
    compiled(prepared(ForwardOperands(*inputs, None, None), {**options, "float32_results": True}).kernel)


@pytest.mark.parametrize("dim, adds", [(128, True), *rarely((64, True), (64, False), (128, False), (256, False), (256, True))])
@pytest.mark.parametrize("arch, kernel", rarely_each(7, BACKWARD))
def test_backward_kernels_do_not_spill(arch, kernel, dim, adds):
    if kernel == "bwd_hopper" and dim > 128:
        return  # there is no tile of it
    x, lse = numpy.zeros((1, 4, 1024, dim), numpy.float16), numpy.zeros((1, 4, 1024), numpy.float32)
    given = operands(x, x, x, x, x, lse, None, None, *[numpy.zeros(x.shape, numpy.float32) for _ in range(3)], None)
    options = {"backend": "host", "arch": arch, "kernel": kernel, "causal": True, "float32_results": True, "adds_results": adds}
    compiled(prepared_backward(given, options).kernel)
