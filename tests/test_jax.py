"""Attention for JAX: what `jax.nn.dot_product_attention` computes, what it has besides, and what it refuses."""

import doctest
import importlib
import subprocess
import sys

import numpy as np
import pytest
from thinned import thinned

import cupy_flash

jax = pytest.importorskip("jax")
jnp = jax.numpy
jax.config.update("jax_disable_most_optimizations", True)  # of what XLA compiles, which takes most of the time here
attention = importlib.import_module("cupy_flash.jax").attention

B, T, S, N, K, H = 2, 13, 17, 6, 3, 16
DRAWN = np.random.default_rng(0)  # by NumPy: JAX would compile for each shape, whenever tests are collected


def normal(*shape):
    return jnp.asarray(DRAWN.standard_normal(shape, np.float32))


Q, DOUT = normal(2, B, T, N, H)
K_, V = normal(2, B, S, K, H)
BIAS = normal(B, 1, T, S)
SEEN = DRAWN.random((1, N, T, S)) < 0.7
SEEN[..., 0] = True
MASK = jnp.asarray(SEEN)
LENGTHS = {
    "query_seq_lengths": jnp.array([5, 13], jnp.int32),
    "key_value_seq_lengths": jnp.array([17, 9], jnp.int32),
}
# Float32 sums of at most 17 products of order 1, in another order; the gradients are sums of those.
ROUNDING = 2e-5


def close(found, expected, tolerance=ROUNDING):
    found, expected = (jax.tree.leaves(x) for x in (found, expected))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    for x, y in zip(found, expected):
        assert np.allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=0, atol=tolerance)


def with_gradients(function, arrays, dout=DOUT):
    """The result of a function of arrays, and its gradients."""

    @jax.jit  # or each operation of the naive one is compiled alone
    def both(*arrays):
        out, vjp = jax.vjp(function, *arrays)
        return out, vjp(dout.astype(out.dtype))

    return both(*arrays)


def windowed(left, right):
    i, j = np.arange(T)[:, None], np.arange(S)
    return jnp.asarray((j >= i - left) & (j <= i + right))[None, None]


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "mask": {"mask": MASK},
    "lengths": {"is_causal": True, **LENGTHS},
    "key lengths": {"key_value_seq_lengths": LENGTHS["key_value_seq_lengths"], "mask": MASK},
}


@pytest.mark.parametrize("options", thinned(CASES.values(), first=1), ids=CASES)
def test_values_and_gradients_are_those_of_jax(options):
    computed = [with_gradients(lambda *x, f=f: f(*x, **options), (Q, K_, V)) for f in (attention, jax.nn.dot_product_attention)]
    close(*computed)


@pytest.mark.parametrize("shape", thinned([(B, 1, T, S), (N, 1, S)], first=1))
def test_bias_and_its_gradient(shape):
    bias = normal(*shape)
    functions = attention, jax.nn.dot_product_attention
    computed = [with_gradients(lambda *x, f=f: f(*x, is_causal=True), (Q, K_, V, bias)) for f in functions]
    close(*computed)


@pytest.mark.parametrize("size, both", [(3, (3, 3)), ((14, 0), (14, 0))])
def test_windows_are_anchored_at_the_first_key(size, both):
    """Of JAX's own option older versions took no notice where there was nothing else."""
    expected = with_gradients(lambda *x: jax.nn.dot_product_attention(*x, mask=windowed(*both)), (Q, K_, V))
    close(with_gradients(lambda *x: attention(*x, local_window_size=size), (Q, K_, V)), expected)
    lengths = {"key_value_seq_lengths": jnp.array([S, S])}
    close(attention(Q, K_, V, local_window_size=size, **lengths), expected[0])


def test_a_window_that_is_open_on_one_side():
    expected = jax.nn.dot_product_attention(Q, K_, V, mask=windowed(S, 2))
    close(attention(Q, K_, V, local_window_size=(None, 2)), expected)


def test_bottom_right():
    i, j = np.arange(T)[:, None], np.arange(S)
    seen = jnp.asarray((j <= i + S - T) & (j >= i + S - T - 3))[None, None]
    expected = jax.nn.dot_product_attention(Q, K_, V, mask=seen)
    close(attention(Q, K_, V, is_causal="bottom_right", local_window_size=3), expected)


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 0.05), pytest.param("float16", 0.005, marks=pytest.mark.release)])
def test_halves(dtype, tolerance):
    """A few roundings of results of order 1, of gradients that are sums of several."""
    arrays = [x.astype(dtype) for x in (Q, K_, V, BIAS)]
    exact = with_gradients(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True), [x.astype(jnp.float32) for x in arrays])
    found = with_gradients(lambda *x: attention(*x, is_causal=True), arrays)
    assert all(x.dtype == dtype for x in jax.tree.leaves(found))
    close(jax.tree.map(lambda x: x.astype(jnp.float32), found), exact, tolerance)


def test_float64():
    """In another process, since it is an option of the whole of JAX."""
    program = """if True:
        import jax, jax.numpy as jnp
        jax.config.update("jax_enable_x64", True)
        jax.config.update("jax_disable_most_optimizations", True)
        from cupy_flash.jax import attention
        q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 9, 2, 8), jnp.float64)
        loss = lambda f: jax.jit(jax.value_and_grad(lambda *x: (f(*x, is_causal=True) ** 2).sum(), (0, 1, 2)))(q, k, v)
        naive = lambda q, k, v, is_causal: jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(
            jnp.tril(jnp.ones((9, 9), bool)), jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5, -jnp.inf)), v)
        for x, y in zip(*map(jax.tree.leaves, (loss(attention), loss(naive)))):
            assert x.dtype == jnp.float64 and abs(x - y).max() < 1e-12
        assert attention(q, k, v, return_residual=True)[1].dtype == jnp.float64
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


def test_without_batch():
    options = {"bias": BIAS[0, 0], "is_causal": True}
    close(attention(Q[0], K_[0], V[0], **options), jax.nn.dot_product_attention(Q[0], K_[0], V[0], **options))
    one = {"key_value_seq_lengths": jnp.array([9])}
    close(attention(Q[0], K_[0], V[0], **one), attention(Q[:1], K_[:1], V[:1], **one)[0])


def test_residual_and_its_gradient():
    def of_scores(q):
        scores = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(K_, N // K, 2)) / H**0.5
        return jax.nn.logsumexp(scores, -1)

    def residual(q):
        return attention(q, K_, V, return_residual=True)[1]

    weights = DOUT[..., 0]
    close(with_gradients(residual, (Q,), weights), with_gradients(of_scores, (Q,), weights))


def test_a_query_that_sees_nothing():
    out, residual = attention(Q, K_, V, mask=jnp.zeros((1, 1, T, S), bool), return_residual=True)
    assert not out.any() and jnp.isneginf(residual).all()
    assert not jax.grad(lambda q: attention(q, K_, V, mask=jnp.zeros((1, 1, T, S), bool)).sum())(Q).any()


def test_lengths_out_of_range_are_cut_as_in_jax():
    given = {"query_seq_lengths": jnp.array([99, -3], jnp.int32), "key_value_seq_lengths": jnp.array([99, 4], jnp.int32)}
    close(attention(Q, K_, V, **given), jax.nn.dot_product_attention(Q, K_, V, **given))


@pytest.mark.parametrize("shape", [(), (0,), (1,)])
def test_empty(shape):
    q, k, v = (jnp.zeros((*shape, *[1] * (1 - len(shape)), 0, 2, 8)) for _ in range(3))
    assert attention(q, k, v).shape == q.shape
    assert jax.grad(lambda q: attention(q, k, v).sum())(q).shape == q.shape


# What the library has besides


def own(**options):
    """The same by the library itself, whose arrays have their heads before the rows."""
    q, k, v = (np.asarray(x).swapaxes(1, 2) for x in (Q, K_, V))
    return jnp.asarray(cupy_flash.attention(q, k, v, **options)).swapaxes(1, 2)


OWN = {
    "prefix": {"prefix": 4, "causal": "top_left"},
    "softcap": {"softcap": 2.0},
    "score": {"score": "score + 0.1 * (kv_idx - q_idx)"},
    "a mask that is an expression": {"mask": "(q_idx + kv_idx) % 3 != 1"},
    "a function": {"mask": lambda q_idx, kv_idx: q_idx >= kv_idx},
    "alibi": {"alibi_slopes": np.linspace(0.1, 1, N, dtype=np.float32)},
    "dropout": {"dropout": 0.5, "seed": (12345678901, 7)},
    "ranges": {"mask": cupy_flash.KeyRanges(np.arange(T)[:, None], np.arange(T)[:, None] + 3)},
    "arrays": {"score": "score * a[h] + c", "arrays": {"a": np.linspace(0, 1, N, dtype=np.float32), "c": 3}},
    "kernels on a CPU": {"backend": "host"},
}


@pytest.mark.parametrize("options", OWN.values(), ids=OWN)
def test_options_of_the_library(options):
    here = {"is_causal" if name == "causal" else name: x for name, x in options.items()}
    found = jax.jit(lambda q, k, v: attention(q, k, v, **here))(Q, K_, V)
    tolerance = ROUNDING if options.get("backend") else 0
    close(found, own(**options), tolerance)


def with_sinks(q, k, v, sinks):
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, N // K, 2)) / H**0.5
    more = jnp.broadcast_to(sinks.reshape(-1, N).T[None, :, None], (*scores.shape[:3], sinks.size // N))
    weights = jax.nn.softmax(jnp.concatenate([scores, more], -1))[..., :S]
    return jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, N // K, 2))


def test_sinks_and_their_gradient():
    sinks = normal(2, N)
    expected = with_gradients(with_sinks, (Q, K_, V, sinks))
    close(with_gradients(lambda q, k, v, sinks: attention(q, k, v, sinks=sinks), (Q, K_, V, sinks)), expected)


def test_learned_arrays():
    table, slopes = normal(T + S, N), jnp.linspace(0.1, 1, N)

    def learned(q, k, v, table, slopes):
        score = "score + table[kv_idx - q_idx + 12, h]"
        return attention(q, k, v, score=score, arrays={"table": table}, alibi_slopes=slopes)

    def naive(q, k, v, table, slopes):
        i, j = jnp.arange(T)[:, None], jnp.arange(S)
        bias = table[j - i + 12].transpose(2, 0, 1) - slopes[:, None, None] * abs(i + S - T - j)
        return jax.nn.dot_product_attention(q, k, v, bias[None])

    arrays = Q, K_, V, table, slopes
    close(with_gradients(learned, arrays), with_gradients(naive, arrays), 1e-4)  # sums of 200 terms


def test_only_gradients_that_are_asked_for_are_computed():
    """The array of pairs that the gradient of a bias is, for one."""
    def loss(q, bias):
        return attention(q, K_, V, bias).sum()

    alone, both = (str(jax.make_jaxpr(jax.grad(loss, of))(Q, BIAS)) for of in (0, (0, 1)))
    assert "wrt=('bias',)" in both and "wrt=('bias',)" not in alone


SEEDS = {"int": 5, "array": jnp.int32(5), "key": jax.random.key(0), "old key": jax.random.PRNGKey(0)}


@pytest.mark.parametrize("name", SEEDS)
def test_seeds(name):
    seed = SEEDS[name]
    found = jax.jit(lambda seed: attention(Q, K_, V, dropout=0.5, seed=seed))(seed)
    other = attention(Q, K_, V, dropout=0.5, seed=6)
    assert jnp.isfinite(found).all() and not jnp.allclose(found, other)
    if "key" not in name:
        close(found, own(dropout=0.5, seed=5), 0)


def test_other_implementations_are_those_of_jax():
    found = attention(Q, K_, V, BIAS, is_causal=True, implementation="xla")
    close(found, jax.nn.dot_product_attention(Q, K_, V, BIAS, is_causal=True))
    with pytest.raises(ValueError, match=r"^softcap: expected None with implementation='xla', which has no such option"):
        attention(Q, K_, V, implementation="xla", softcap=1.0)
    with pytest.raises(ValueError, match=r"^implementation: expected None, 'xla' or 'cudnn', got 'flash'"):
        attention(Q, K_, V, implementation="flash")


# What is refused


REFUSED = {
    "axes": (ValueError, {"q": Q[None]}, r"q: expected 3 or 4 axes, .*got shape \(1, 2, 13, 6, 16\)"),
    "heads": (ValueError, {"q": Q[:, :, :5]}, r"q: expected a multiple of 3 heads \(those of k\), got 5"),
    "dtype": (TypeError, {"k": K_.astype(jnp.bfloat16)}, r"k: expected float32 \(that of q\), got bfloat16"),
    "no array": (TypeError, {"q": "x"}, "q: expected an array that JAX takes, got 'x'"),
    "mask": (TypeError, {"mask": BIAS}, "mask: expected bool, got float32; what is added to scores is bias"),
    "bias": (ValueError, {"bias": BIAS[..., :3]}, "bias: expected a shape of at least 2 axes that broadcasts to"),
    "bias axes": (ValueError, {"bias": BIAS[None]}, "bias: expected at most 4 axes"),
    "causal": (TypeError, {"is_causal": 1}, r"is_causal: expected one of \(False, True, 'bottom_right', 'top_left'\), got 1"),
    "window": (ValueError, {"local_window_size": (1, -1)}, r"local_window_size: expected ends of at least 0, .*got \(1, -1\)"),
    "window ends": (ValueError, {"local_window_size": (1, 2, 3)}, "local_window_size: expected None, a number or a pair"),
    "window of floats": (TypeError, {"local_window_size": 1.5}, "local_window_size: expected None, an integer or a pair"),
    "lengths": (ValueError, {"query_seq_lengths": jnp.ones((3,), int)}, r"query_seq_lengths: expected shape \(2,\), .*got \(3,\)"),
    "lengths dtype": (TypeError, {"key_value_seq_lengths": jnp.ones(2)}, "key_value_seq_lengths: expected integers, got float32"),
    "softcap": (ValueError, {"softcap": -1.0}, "softcap: expected None or a number above 0, got -1.0"),
    "seed": (ValueError, {"seed": 1}, "seed: expected None without dropout"),
    "no seed": (ValueError, {"dropout": 0.1}, "seed: expected an integer"),
    "keys": (ValueError, {"dropout": 0.1, "seed": jax.random.split(jax.random.key(0))}, "seed: expected one key, got keys of"),
    "flag": (TypeError, {"deterministic": 1}, "deterministic: expected True or False, got 1"),
    "residual": (TypeError, {"return_residual": "yes"}, "return_residual: expected True or False, got 'yes'"),
    "algorithm": (TypeError, {"algorithm": []}, r"algorithm: expected one of .* got \[\]"),
    "arrays": (ValueError, {"arrays": {"a": Q}}, r"arrays\['a'\]: expected an array that is read by"),
    "expression": (ValueError, {"score": "score +"}, "score: "),
    "tiles": (TypeError, {"mask": cupy_flash.TileMask("q_idx == kv_idx")}, "mask: expected an array, .* got a TileMask"),
}


@pytest.mark.parametrize("kind, options, message", REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_argument_while_jax_traces(kind, options, message):
    def call():
        return attention(**{"q": Q, "k": K_, "v": V, **options})

    with pytest.raises(kind, match=f"^{message}"):
        jax.eval_shape(call)  # which computes nothing


def test_numbers_that_are_traced_are_refused_by_name():
    with pytest.raises(TypeError, match=r"^scale: expected None or a number, got one that JAX traces"):
        jax.jit(lambda scale: attention(Q, K_, V, scale=scale))(0.5)
    close(attention(Q, K_, V, scale=jnp.float32(0.5)), attention(Q, K_, V, scale=0.5), 0)


# The package


def test_the_example_of_the_docstring():
    tests = doctest.DocTestFinder().find(attention, globs={})
    assert tests[0].examples and all(doctest.DocTestRunner().run(test).failed == 0 for test in tests)


@pytest.mark.parametrize("program, expected", [
    ("import cupy_flash; print('jax' in sys.modules)", "False"),
    ("sys.modules['jax'] = None\ntry: import cupy_flash.jax\nexcept ImportError as e: print(e)", 'pip install "cupy_flash[jax]"'),
    ("import cupy_flash.jax; print('cupy' in sys.modules, 'cupy_flash.jax.on_device' in sys.modules)", "False False"),
])  # fmt: skip
def test_importing(program, expected):
    done = subprocess.run([sys.executable, "-c", f"import sys\n{program}"], capture_output=True, text=True, check=True)
    assert expected in done.stdout
