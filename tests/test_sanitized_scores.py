"""Sanitizers have nothing to say of kernels with scores, masks, lists of tiles and sums of what scores read."""

from itertools import product

import numpy
import pytest

from cupy_flash import KeyRanges, attention, attention_backward, plan_attention, plan_attention_backward
from cupy_flash.machine import host

BATCH, HEADS, LEN_Q, LEN_KV, DIM = 2, 2, 75, 93, 40  # off every tile edge; arrays of a sanitized run end where the caller's do
RNG = numpy.random.default_rng(0)
DOCUMENTS = numpy.arange(LEN_Q)[:, None] // 30 * 30
TABLE = "score + t[kv_idx - q_idx + 40, h] + u[q_idx * kv_idx]"


def normal(*shape):
    return RNG.standard_normal(shape).astype(numpy.float32)


HALVES = normal(BATCH, HEADS, LEN_Q, 96).astype("float16")
LENGTHS = {"seqlens_q": numpy.array([LEN_Q, 20]), "seqlens_kv": numpy.array([33, 96])}
ASKED = {  # options, and of what gradients are asked for
    "bias, ranges": ({"bias": normal(HEADS, LEN_Q, LEN_KV), "mask": KeyRanges(DOCUMENTS, DOCUMENTS + 35)}, "bias"),
    "tables": ({"score": TABLE, "arrays": {"t": normal(60, HEADS), "u": normal(50)}}, ("t", "u")),
    "keys": ({"score": "score + t[kv_idx, h]", "arrays": {"t": normal(LEN_KV, HEADS)}}, ()),
    "mask": ({"mask": RNG.random((BATCH, 1, LEN_Q, LEN_KV)) < 0.1, "causal": True}, ()),
    "bias of 16 bits, ranges": ({"bias": HALVES[0], "mask": KeyRanges(DOCUMENTS, DOCUMENTS + 35)}, "bias"),
    "bias of 32 bits, ranges": ({"bias": normal(HEADS, LEN_Q, 96), "mask": KeyRanges(DOCUMENTS, DOCUMENTS + 35)}, "bias"),
    "bias of pairs, lengths": ({"bias": HALVES, **LENGTHS}, "bias"),
    "alibi, dropout": ({"alibi_slopes": abs(normal(HEADS)), "dropout": 0.2, "seed": 3}, "alibi_slopes"),
}
SETTINGS = list(product(host.SANITIZERS, ("80", "90a"), ASKED))


@pytest.mark.release
@pytest.mark.parametrize("tool, arch, asked", SETTINGS)
def test_sanitizers_find_nothing(tool, arch, asked, monkeypatch):
    options, wrt = ASKED[asked]
    q, dout = (RNG.standard_normal((BATCH, HEADS, LEN_Q, DIM)).astype(numpy.float16) for _ in range(2))
    len_kv = options["bias"].shape[-1] if "bias" in options else LEN_KV  # of a multiple of 16 bytes, TMA brings a bias
    k, v = (RNG.standard_normal((BATCH, 1, len_kv, DIM)).astype(numpy.float16) for _ in range(2))
    results = attention(q, k, v, return_lse=True, **options)
    given = (dout, q, k, v, *results)
    expected = attention_backward(*given, wrt=wrt, **options)
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", tool)
    where = {"backend": "host", "arch": arch}
    forward = plan_attention(q, k, v, return_lse=True, **where, **options)
    backward = plan_attention_backward(*given, deterministic="u" not in wrt, wrt=wrt, **where, **options)
    assert forward.kernel.config.TILE_LIST == backward.kernel.config.TILE_LIST == ("mask" in options)
    staged = arch == "90a" and "bias" in options and len_kv % 4 == 0
    assert forward.kernel.config.STAGED_BIAS is backward.kernel.config.STAGED_BIAS is staged
    assert len(backward.kernels) == 1 + len((wrt,) if isinstance(wrt, str) else wrt) - backward.kernel.config.STORE_DBIAS
    operands = {name: x for name, x in options.items() if name not in ("score", "dropout", "causal")}
    got, computed = backward(*given, **operands), forward(q, k, v, **operands)
    pairs = [*zip(computed, results), *zip(got, expected), (got.dbias, expected.dbias), (got.dalibi_slopes, expected.dalibi_slopes)]
    pairs += [(got.darrays[name], expected.darrays[name]) for name in expected.darrays]
    for x, y in pairs:
        if y is not None:
            finite = numpy.isfinite(y)
            assert (finite == numpy.isfinite(x)).all()
            assert abs(x[finite].astype(float) - y[finite]).max() <= 2**-7 * abs(y[finite].astype(float)).max()
