"""What the pages on moving here say is so: calls of both columns agree, each argument is named, options that differ are noticed.

The left column is evaluated with `elsewhere`, which says what the other libraries document, or with JAX; the right one with this
library. All of it is float64, so that what is allowed is rounding.
"""

import ast
import functools
import inspect
import re
from pathlib import Path

import elsewhere
import numpy as np
import pytest

import cupy_flash

PAGES = Path(__file__).resolve().parent.parent / "docs/moving"
ROW = re.compile(r"^\| `(\w+\([^`]*)` \| `(\w+\([^`]*)` \|$", re.MULTILINE)


def text_of(page):
    return (PAGES / page).read_text(encoding="utf-8")


def normal(*shape, seed=0):
    return np.random.default_rng([*shape, seed]).standard_normal(shape)


def of_flash_attn():
    q, k, v = normal(2, 7, 4, 16), *normal(2, 2, 11, 2, 16)
    cu_q, cu_k = np.array([0, 4, 7]), np.array([0, 9, 15])
    k_pages, v_pages = normal(2, 8, 4, 2, 16)
    table = np.array([[5, 0, 7], [2, 4, 1]])
    return {
        "q": q, "k": k, "v": v, "slopes": np.array([0.5, 0.25, 0.125, 0.0625]), "qkv": normal(2, 7, 3, 4, 16),
        "kv": normal(2, 11, 2, 2, 16), "rows_q": normal(7, 4, 16), "rows_k": normal(15, 2, 16), "rows_v": normal(15, 2, 16, seed=1),
        "rows_qkv": normal(7, 3, 4, 16), "rows_kv": normal(15, 2, 2, 16), "cu_q": cu_q, "cu_k": cu_k, "most_q": 4, "most_k": 9,
        "k_pages": k_pages, "v_pages": v_pages, "table": table, "k_cache": normal(5, 12, 2, 16)[:2],
        "v_cache": normal(5, 12, 2, 16, seed=1)[:2], "lengths": np.array([11, 8]), "which": np.array([1, 0]),
        "left": np.array([3, 1]),
    }  # fmt: skip


def of_xformers():
    n_q, n_k, page = np.array([4, 3]), np.array([9, 6]), 4
    q, k, v = normal(2, 7, 4, 16), *normal(2, 2, 11, 4, 16)
    k5, v5 = (np.broadcast_to(x[:, :, :, None], (2, 11, 2, 2, 16)) for x in normal(2, 2, 11, 2, 16))
    padded_rows_k, padded_rows_v = normal(2, 1, 24, 4, 16)
    paged_rows_k, paged_rows_v = normal(2, 1, 32, 4, 16)
    return {
        "q": q, "k": k, "v": v, "bias": normal(2, 4, 7, 11), "q1": normal(2, 7, 16), "k1": normal(2, 11, 16),
        "v1": normal(2, 11, 16, seed=1), "q5": normal(2, 7, 2, 2, 16), "k5": k5, "v5": v5, "rows_q": normal(1, 7, 4, 16),
        "rows_k": normal(1, 15, 4, 16), "rows_v": normal(1, 15, 4, 16, seed=1), "n_q": n_q, "n_k": n_k, "cu_q": np.array([0, 4, 7]),
        "cu_k": np.array([0, 9, 15]), "padded_rows_k": padded_rows_k, "padded_rows_v": padded_rows_v,
        "padded_k": padded_rows_k[0].reshape(2, 12, 4, 16), "padded_v": padded_rows_v[0].reshape(2, 12, 4, 16),
        "first": np.array([0, 13, 24]), "paged_rows_k": paged_rows_k, "paged_rows_v": paged_rows_v,
        "k_pages": paged_rows_k[0].reshape(8, page, 4, 16), "v_pages": paged_rows_v[0].reshape(8, page, 4, 16),
        "table": np.array([[5, 0, 7], [2, 4, 1]]), "left": np.array([2, 1]),
    }  # fmt: skip


def of_cudnn():
    q, k, v = normal(2, 4, 7, 16), *normal(2, 2, 2, 11, 16)
    lengths = (np.array(n, np.int32).reshape(2, 1, 1, 1) for n in ([7, 4], [11, 6], [7, 7]))
    k_pages, v_pages = normal(2, 8, 2, 4, 16)
    return {
        "q": q, "k": k, "v": v, "bias": normal(1, 4, 7, 11), "slopes": elsewhere.alibi_slopes_of(4),
        **dict(zip(("n_q", "n_kv", "all_q"), lengths)), "k_pages": k_pages, "v_pages": v_pages,
        "table": np.array([[5, 0, 7], [2, 4, 1]], np.int32).reshape(2, 1, 3, 1), "sink": normal(1, 4, 1, 1),
    }  # fmt: skip


def of_tiles():
    """What a mask of tiles of 128 by 128 needs: some of them."""
    bits = np.random.default_rng(0).integers(0, 256, (1, 2, 2, 2), np.uint8)
    bits[..., 0] |= 1  # every query sees something
    return {"q": normal(1, 2, 200, 8), "k": normal(1, 2, 1100, 8), "v": normal(1, 2, 1100, 8, seed=1), "bits": bits}


def of_jax():
    rng = np.random.default_rng(0)
    mask = rng.random((2, 1, 7, 11)) < 0.5
    mask[..., 0] = True
    arrays = {"q": normal(2, 7, 4, 16), "k": normal(2, 11, 2, 16), "v": normal(2, 11, 2, 16, seed=1), "bias": normal(2, 4, 7, 11)}
    return {name: x.astype(np.float32) for name, x in arrays.items()} | {
        "mask": mask, "n_q": np.array([7, 4], np.int32), "n_kv": np.array([11, 6], np.int32),
    }  # fmt: skip


OF = {"flash-attn.md": of_flash_attn, "xformers.md": of_xformers, "cudnn.md": of_cudnn, "jax-nn.md": of_jax}
CALLS = [pytest.param(page, *row, id=f"{page}-{i}") for page in OF for i, row in enumerate(ROW.findall(text_of(page)))]


@functools.cache
def namespaces(page, of):
    """What the columns are evaluated with: theirs, and ours."""
    arrays = of() | {"np": np}
    if page != "jax-nn.md":
        return vars(elsewhere) | arrays, vars(cupy_flash) | arrays
    jax = pytest.importorskip("jax")
    return vars(jax.nn) | arrays, vars(cupy_flash) | arrays


def columns(page, theirs, ours):
    given, here = namespaces(page, of_tiles if "block_mask" in theirs else OF[page])
    if page == "jax-nn.md" and "layout=" not in ours:
        import cupy_flash.jax

        here = here | {"attention": cupy_flash.jax.attention}
    return np.asarray(eval(theirs, dict(given))), lambda text: np.asarray(eval(text, dict(here)))


def agree(page, x, y):
    return x.shape == y.shape and np.allclose(x, y, rtol=0, atol=2e-6 if page == "jax-nn.md" else 1e-12)


@pytest.mark.parametrize("page, theirs, ours", CALLS)
def test_calls_of_both_columns_agree(page, theirs, ours):
    expected, here = columns(page, theirs, ours)
    assert np.isfinite(expected).all() and agree(page, expected, here(ours))


def without_one(text):
    """The call without each of its keywords."""
    for i in range(len(next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call) and n.keywords).keywords)):
        tree = ast.parse(text)
        call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.keywords)
        name = call.keywords.pop(i).arg
        yield name, ast.unparse(tree)


@pytest.mark.parametrize("page, theirs, ours", [call for call in CALLS if "=" in call.values[2]])
def test_each_option_is_needed(page, theirs, ours):
    """Arrays are such that a call without one of its options would not agree."""
    expected, here = columns(page, theirs, ours)
    for name, text in without_one(ours):
        try:
            found = here(text)
        except (TypeError, ValueError, IndexError, cupy_flash.UnsupportedError):
            continue
        assert not agree(page, expected, found), name


def test_pages_have_calls():
    numbers = {page: len(ROW.findall(text_of(page))) for page in OF}
    assert numbers == {"flash-attn.md": 17, "xformers.md": 26, "cudnn.md": 15, "jax-nn.md": 16}


# Arguments


THEIRS = [(page, f) for page, functions in {
    "flash-attn.md": [f for name, f in vars(elsewhere).items() if name.startswith("flash_attn")],
    "xformers.md": [elsewhere.memory_efficient_attention], "cudnn.md": [elsewhere.sdpa],
}.items() for f in functions]  # fmt: skip


@pytest.mark.parametrize("page, function", THEIRS, ids=lambda x: getattr(x, "__name__", x))
def test_each_argument_is_named(page, function):
    assert [name for name in inspect.signature(function).parameters if f"`{name}`" not in text_of(page)] == []


def test_each_argument_of_jax_is_named():
    jax = pytest.importorskip("jax")
    names = inspect.signature(jax.nn.dot_product_attention).parameters
    assert [name for name in names if f"`{name}`" not in text_of("jax-nn.md")] == []


def test_each_mask_of_xformers_is_named():
    masks = [name for name, x in vars(elsewhere).items() if re.search("Mask", name) and callable(x)]
    assert len(masks) == 20 and [name for name in masks if f"attn_bias={name}(" not in text_of("xformers.md")] == []


# What no table of calls says


def test_a_query_that_sees_nothing():
    """flash-attn: 0 and +inf; cuDNN: 0. Here 0 and -inf."""
    q, k, v = normal(1, 5, 2, 8), *normal(2, 1, 2, 2, 8)
    out, lse, _ = elsewhere.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    ours, our_lse = cupy_flash.attention(q, k, v, layout="bshd", causal=True, return_lse=True)
    assert np.allclose(out, ours) and not ours[:, :3].any()
    assert np.array_equal(lse == np.inf, our_lse.swapaxes(1, 2) == -np.inf) and (lse == np.inf).sum() == 6
    assert not elsewhere.sdpa(*(x.swapaxes(1, 2) for x in (q, k, v)), use_causal_mask_bottom_right=True)[:, :, :3].any()


@pytest.mark.parametrize("rows, options", [(1, {"causal": True}), (3, {"causal": True}), (3, {})])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("paged", [False, True])
def test_a_step_of_decoding(rows, options, interleaved, paged):
    given = of_flash_attn()
    caches = [given[name].copy() for name in (("k_pages", "v_pages") if paged else ("k_cache", "v_cache"))]
    pages = given["table"] if paged else None
    q, k, v = normal(2, rows, 4, 16), *normal(2, 2, rows, 2, 16)
    lengths = np.array([8, 0])
    angles = np.outer(np.arange(12), 10000.0 ** (-np.arange(4) / 4))
    cos, sin = np.cos(angles), np.sin(angles)

    theirs = [x.copy() for x in caches]
    expected = elsewhere.flash_attn_with_kvcache(
        q, *theirs, k, v, cos, sin, cache_seqlens=lengths, block_table=pages, rotary_interleaved=interleaved, **options
    )
    rotary = {"cos": cos, "sin": sin, "interleaved": interleaved, "layout": "bshd"}
    if options:
        *_, q = cupy_flash.append_kv(*caches, k, v, lengths, q=q, pages=pages, **rotary)
    else:  # all queries are at one position
        q = cupy_flash.rotate(q, positions=np.repeat(lengths[:, None], rows, 1), **rotary)
        cupy_flash.append_kv(*caches, k, v, lengths, pages=pages, **rotary)
    out = cupy_flash.attention(q, *caches, seqlens_kv=lengths + rows, pages=pages, layout="bshd", **options)
    assert np.allclose(out, expected, rtol=0, atol=1e-12)
    assert all(np.allclose(x, y, rtol=0, atol=1e-12) for x, y in zip(caches, theirs))


def test_gradients_of_a_packed_array_are_not_written_into_one():
    qkv = normal(2, 5, 3, 2, 8)
    parts, into = ([x[:, :, i] for i in range(3)] for x in (qkv, np.empty_like(qkv)))
    out, lse = cupy_flash.attention(*parts, layout="bshd", return_lse=True)
    with pytest.raises(ValueError, match=r"^dq: expected memory apart from that of dk"):
        cupy_flash.attention_backward(out, *parts, out, lse, layout="bshd", **dict(zip(("dq", "dk", "dv"), into)))


def test_merged_parts():
    given = of_xformers()
    q, k, v = (given[name] for name in "qkv")
    keys = slice(0, 4), slice(4, 11)
    parts = [elsewhere.memory_efficient_attention_partial(q, k[:, part], v[:, part]) for part in keys]
    expected, lse = elsewhere.merge_attentions(*zip(*parts))
    ours = [cupy_flash.attention(q, k[:, part], v[:, part], layout="bshd", return_lse=True) for part in keys]
    out, our_lse = cupy_flash.merge_states(*ours, layout="bshd")
    assert np.allclose(out, expected, rtol=0, atol=1e-12) and np.allclose(our_lse.swapaxes(1, 2), lse, rtol=0, atol=1e-12)


def test_slopes_of_alibi_where_lengths_are_equal():
    """What cuDNN adds and what `alibi_slopes` subtracts are then the same below the diagonal, log-sum-exps included."""
    q, k, v = normal(3, 1, 8, 9, 16)
    expected, stats = elsewhere.sdpa(q, k, v, attn_scale=0.25, use_causal_mask=True, use_alibi_mask=True, generate_stats=True)
    slopes = 2.0 ** -np.arange(1, 9)
    out, lse = cupy_flash.attention(q, k, v, scale=0.25, causal=True, alibi_slopes=slopes, return_lse=True)
    assert np.array_equal(slopes, elsewhere.alibi_slopes_of(8))
    assert np.allclose(out, expected, rtol=0, atol=1e-12) and np.allclose(lse, stats[..., 0], rtol=0, atol=1e-12)
