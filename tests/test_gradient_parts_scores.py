"""Float32 gradients in parts where something is asked of scores, where what scores read has gradients, and of one part."""

from dataclasses import replace

import numpy
import pytest
from test_fp16_parts import at_two_dims, of_a_call, scored
from test_gradient_parts import CASES, HOST, KERNEL, asked_of, fresh, judge, operands, rms
from thinned import quick

from cupy_flash import TileMask, attention, attention_vjp, plan_attention, plan_attention_backward

SCORED = (
    "softcap", "a scale below zero", "bias", "bias of keys", "a bias that hides", "alibi", "a table",
    "documents", "documents, causal, softcap", "an array that masks", "ranges",
)  # fmt: skip
NARROW = ("bias and documents",)  # of head dims to 64
OFTEN = [("an array that masks", 100)]  # a bias has gradients below
READ = {"bias": "bias", "alibi": "alibi_slopes", "a table": "table", "bias and documents": "bias"}


def wide(x):
    if isinstance(x, dict):
        return {name: wide(y) for name, y in x.items()}
    return x.astype(numpy.float64) if getattr(x, "dtype", None) == numpy.float32 else x


def asked_for(name, dim, wrt=()):
    """What a backward takes, what is asked, and the true gradients."""
    (q, k, v), asked = scored(name, dim)
    dout = numpy.random.default_rng(5).standard_normal(q.shape, numpy.float32)
    (out, lse), vjp = attention_vjp(*map(wide, (q, k, v)), **wide(asked), return_lse=True, wrt=wrt)
    return [dout, q, k, v, out.astype(numpy.float32), lse.astype(numpy.float32)], asked, vjp(wide(dout))


def by(kernel, given, asked, **options):
    plan = plan_attention_backward(*given, **asked, **HOST, **options, kernel=kernel)
    parts = (1 if "precision" in options else 2) if kernel == KERNEL else 0
    assert (plan.kernel.file, plan.kernel.config.FP16_PARTS) == (kernel, parts)
    return plan(*given, **of_a_call(asked), workspace=numpy.full(plan.workspace_bytes, 255, numpy.uint8))


@pytest.mark.parametrize("name, dim", at_two_dims(SCORED, NARROW, *OFTEN))
def test_as_near_as_bwd_v2(name, dim):
    """A product leaves out 2^-22 of itself, and scores have an error of as much of the largest of their products."""
    given, asked, truth = asked_for(name, dim)
    for own, other, exact in zip(by(KERNEL, given, asked), by("bwd_v2", given, asked), truth):
        assert rms(own - exact) < 3 * rms(other - exact) + 2**-22 * rms(exact)


def read_by(name, gradients):
    if name == "alibi":
        return gradients.dalibi_slopes
    return gradients.darrays["table"] if name == "a table" else gradients.dbias


@pytest.mark.parametrize("name", quick(READ, "bias and documents"))
def test_gradients_of_what_scores_read(name):
    """They are computed behind, from statistics that this backward has left."""
    given, asked, truth = asked_for(name, 64, READ[name])
    found = [by(kernel, given, asked, wrt=READ[name]) for kernel in (KERNEL, "bwd_v2")]
    own, other, exact = (read_by(name, x) for x in (*found, truth))
    assert rms(own - exact) < 3 * rms(other - exact) + 2**-22 * rms(exact)


def test_what_is_not_finite_beside_a_masked_pair_reaches_nothing():
    """Of values that a mask hides from all queries, dP may be anything: dS of such a pair is 0."""
    (q, k, v), asked = scored("documents", 64)
    docs = asked["arrays"]
    shows = asked | {"arrays": docs | {"doc_kv": numpy.where(numpy.arange(210) < 200, docs["doc_kv"], 4)}}  # of no query's document
    out, lse = attention(q, k, v, **shows, return_lse=True)
    given, strange = [numpy.ones_like(out), q, k, v, out, lse], v.copy()
    strange[:, :, 200:] = numpy.nan
    for found, expected in zip(by(KERNEL, [*given[:3], strange, *given[4:]], shows), by("bwd_v2", given, shows)):
        numpy.testing.assert_allclose(found, expected, rtol=0, atol=2**-16)


def test_a_mask_keeps_its_tiles():
    given, asked, _ = asked_for("documents", 64)
    expected, mask = by(KERNEL, given, asked), TileMask(asked["mask"], asked["arrays"])
    plan = plan_attention_backward(*given, mask=mask, **HOST, kernel=KERNEL)
    for _ in range(2):
        for found, x in zip(plan(*given, mask=mask), expected):
            numpy.testing.assert_allclose(found, x, rtol=0, atol=2**-20)


OF_ONE_PART = CASES[21]  # with a softcap and a causal mask


@pytest.mark.parametrize("case", quick([case for case in CASES if case.scores["scale"] < 100], OF_ONE_PART), ids=str)
def test_tf32_is_one_part(case):
    case = replace(case, precision="tf32")
    given, asked = operands(case), asked_of(case)
    of_forward = {name: given[name] for name in ("q", "k", "v", "sinks") if name in given}
    forward = plan_attention(**of_forward, **asked, **HOST, kernel="fwd_v2", return_lse=True)
    given |= dict(zip(("out", "lse"), forward(**of_forward)))  # of scores that have the same errors
    plan = plan_attention_backward(**given, **asked, **HOST, kernel=KERNEL)
    assert (plan.kernel.file, plan.kernel.config.FP16_PARTS) == (KERNEL, 1)
    results = plan(**given | fresh(*(given[name] for name in "qkv")), workspace=numpy.full(plan.workspace_bytes, 255, numpy.uint8))
    judge(case, given, results)


@pytest.mark.parametrize("name", quick(["alibi", "documents", "bias"], "alibi"))
def test_scores_of_one_part(name):
    given, asked, truth = asked_for(name, 64)
    own, other = (by(kernel, given, asked, precision="tf32") for kernel in (KERNEL, "bwd_v2"))
    for x, y, exact in zip(own, other, truth):
        assert rms(x - exact) < 2 * rms(y - exact)
