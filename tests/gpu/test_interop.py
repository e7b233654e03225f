"""Arrays of other libraries in, results of the same kind out, in place and without a copy."""

import numpy
import pytest

from cupy_flash import attention, attention_vjp
from cupy_flash.judge.cases import Case
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.oracle_gradients import oracle_gradients

cupy = pytest.importorskip("cupy")


def expected(dtype="float16"):
    q = cupy.random.default_rng(0).standard_normal((2, 4, 70, 64), dtype=numpy.float32).astype(dtype)
    return q, attention(q, q, q, causal=True)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_torch(dtype):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    q = torch.randn(2, 4, 70, 64, device="cuda").to(getattr(torch, dtype))
    out, lse = attention(q, q, q, causal=True, return_lse=True)
    assert type(out) is torch.Tensor and out.device == q.device and out.dtype == q.dtype
    truth = torch.nn.functional.scaled_dot_product_attention(q.double(), q.double(), q.double(), is_causal=True)
    rounding = torch.finfo(q.dtype).eps * q.abs().max().item()  # of P and of out by half an eps each, times values that large
    tolerance = 1e-5 if dtype == "float32" else rounding
    assert (out.double() - truth).abs().max().item() <= tolerance
    assert lse.dtype == torch.float32


def test_torch_out_is_written_in_place():
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 4, 70, 64, device="cuda", dtype=torch.float16)
    out = torch.full_like(q, float("nan"))
    assert attention(q, q, q, out=out) is out
    torch.cuda.synchronize()
    assert torch.isfinite(out).all()


def test_gradients_are_those_of_torch_autograd():
    """Both are held against the oracle: ours by the bound of float32, and autograd in float64: four sums of 70 terms."""
    torch = pytest.importorskip("torch")
    case = Case("float32", 70, 70, heads_q=4, batch=(2,), causal=True)
    dout, q, k, v = torch.randn(4, 2, 4, 70, 64, device="cuda")
    dlse = torch.randn(2, 4, 70, device="cuda")
    _, vjp = attention_vjp(q, k, v, **case.options)
    gradients = vjp(dout, dlse)
    assert all(type(x) is torch.Tensor and x.device == q.device and x.dtype == q.dtype for x in gradients)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    unseen = torch.ones(70, 70, dtype=torch.bool, device="cuda").triu(1)
    scores = (exact[0] @ exact[1].mT * case.scores["scale"]).masked_fill(unseen, -torch.inf)
    results = scores.softmax(-1) @ exact[2], scores.logsumexp(-1)
    autograd = torch.autograd.grad(results, exact, (dout.double(), dlse.double()))

    dlse, *arrays = (cupy.from_dlpack(x) for x in (dlse, dout, q, k, v))
    for ours, theirs in zip(oracle_gradients(*arrays, dlse=dlse, **case.scores), autograd):
        assert float(abs(ours - cupy.from_dlpack(theirs)).max()) <= 4 * 70 * 2.0**-53 * float(abs(ours).max())
    judged = compare_gradients([*map(cupy.from_dlpack, gradients)], *arrays, dlse=dlse, **case.scores)
    assert judged.ok, judged.message


def test_jax():
    jax = pytest.importorskip("jax")
    q, truth = expected()
    given = jax.dlpack.from_dlpack(q)
    out = attention(given, given, given, causal=True)
    assert isinstance(out, jax.Array)
    assert numpy.array_equal(numpy.asarray(out), cupy.asnumpy(truth))


def test_numba():
    cuda = pytest.importorskip("numba.cuda")
    q, truth = expected()
    given = cuda.as_cuda_array(q)
    out = attention(given, given, given, causal=True)
    assert type(out) is type(given)
    assert numpy.array_equal(out.copy_to_host(), cupy.asnumpy(truth))


def test_cuda_array_interface_alone():
    class Foreign:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    q, truth = expected()
    out = attention(Foreign(q), Foreign(q), Foreign(q), causal=True)
    assert isinstance(out, cupy.ndarray) and bool((out == truth).all())
