"""Parts of a result are float32, whatever computes them: they are merged or added up as such, and the whole is rounded once."""

from dataclasses import replace

import numpy
import pytest
from ranks import check, run
from thinned import quick, thinned

from cupy_flash import attention
from cupy_flash.call.backward import operands, prepared_backward
from cupy_flash.call.forward import ForwardOperands, prepared
from cupy_flash.distributed.growing import Growing, Results
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.cotangents import make_cotangents

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # of rounding to the nearest
PLACES = [(backend, dtype) for backend in ("numpy", "host") for dtype in UNIT]
ON_NUMPY = PLACES[:2]
STEP = {"float16": 2.0**-25, "bfloat16": 2.0**-134}  # half the distance of the smallest numbers
FULL = Case("bfloat16", 96, 96, dim=16, heads_q=4, heads_kv=2)


@pytest.fixture
def taken(monkeypatch):
    """The dtypes of all parts that are merged with or added to others."""
    found, take = {"out": set(), "gradients": set()}, Growing.take

    def seen(self, part):
        name = "out" if isinstance(self, Results) else "gradients"
        if self._order.places[self._number] != "out":
            found[name] |= {x.dtype.name for x in part}
        return take(self, part)

    monkeypatch.setattr(Growing, "take", seen)
    return found


@pytest.mark.parametrize("ranks", thinned([2, 4]))
@pytest.mark.parametrize("backend, dtype", quick(PLACES, *ON_NUMPY, ("host", "float16"), spread=True))
@pytest.mark.parametrize("scheme", thinned(["ring", "all_gather"]))
def test_parts_are_float32(scheme, backend, dtype, ranks, taken):
    found = run(replace(FULL, dtype=dtype), ranks, scheme, "contiguous", backend=backend)
    assert taken == {"out": {"float32"} if scheme == "ring" else set(), "gradients": {"float32"}}
    assert {x.dtype.name for x in (found.out, *found.gradients)} == {dtype}


def check_rounded_once(found, exact, largest, dtype):
    """A sum in float32 of four parts, none larger than `largest`: each is weighed, added and kept with four roundings at most."""
    assert found.dtype.name == dtype
    bound = UNIT[dtype] * abs(exact) + STEP[dtype] + 16 * 2.0**-24 * largest
    assert (abs(found.astype(numpy.float64) - exact) <= bound).all()


def parts_of(case, backend, ranks):
    """Results, and log-sum-exps, of all queries over the keys of each rank, as one device has them."""
    q, k, v = make_inputs(case)
    options = {"scale": case.options.get("scale"), "backend": backend, "return_lse": True, "float32_results": True}
    keys = [slice(96 * rank // ranks, 96 * (rank + 1) // ranks) for rank in range(ranks)]
    for own in keys:
        given = ForwardOperands(q, k[..., own, :], v[..., own, :], None, None)
        out, lse = prepared(given, options).run(given)
        assert out.dtype == numpy.float32
        yield out.astype(numpy.float64), lse.astype(numpy.float64)


@pytest.mark.parametrize("backend, dtype", quick(PLACES, *ON_NUMPY, ("host", "bfloat16"), spread=True))
def test_a_result_is_rounded_once(backend, dtype):
    """It is that of parts which are merged in float64. If each of them were rounded, it would be off by most of a unit."""
    case = replace(FULL, dtype=dtype)
    found = run(case, 4, "ring", "contiguous", backend=backend, gradients=False)
    outs, lses = map(numpy.array, zip(*parts_of(case, backend, 4)))
    shares = numpy.exp(lses - numpy.logaddexp.reduce(lses))[..., None]
    exact = (shares * outs).sum(axis=0)
    check_rounded_once(found.out, exact, abs(outs).max(), dtype)
    rounded = (shares * outs.astype(found.out.dtype).astype(numpy.float64)).sum(axis=0).astype(found.out.dtype)
    with pytest.raises(AssertionError):
        check_rounded_once(rounded, exact, abs(outs).max(), dtype)


@pytest.mark.parametrize("backend, dtype", quick(PLACES, *ON_NUMPY, ("host", "float16"), spread=True))
@pytest.mark.parametrize("scheme", thinned(["ring", "all_gather"]))
def test_gradients_are_rounded_once(scheme, backend, dtype):
    """They are sums of what each rank's queries and keys leave, in float64."""
    case, ranks = replace(FULL, dtype=dtype), 4
    found = run(case, ranks, scheme, "contiguous", backend=backend)
    (q, k, v), (dout, dlse) = make_inputs(case), make_cotangents(case)
    exact, largest = [numpy.zeros(x.shape) for x in (q, k, v)], [0.0] * 3
    parts = [slice(24 * rank, 24 * (rank + 1)) for rank in range(ranks)]
    whole = [slice(0, 96)]
    for queries in parts:
        for keys in parts if scheme == "ring" else whole:
            rows = [x[..., queries, :] for x in (dout, q, found.out)]
            of_keys = [x[..., keys, :] for x in (k, v)]
            lses = [x[..., queries] for x in (found.lse, dlse)]
            given = operands(rows[0], rows[1], *of_keys, rows[2], *lses, *[None] * 5)
            options = {"scale": case.options.get("scale"), "backend": backend, "float32_results": True}
            gradients = prepared_backward(given, options).run(given)
            for i, (x, own) in enumerate(zip(gradients, (queries, keys, keys))):
                exact[i][..., own, :] += x
                largest[i] = max(largest[i], abs(x).max())
    for x, wanted, most in zip(found.gradients, exact, largest):
        check_rounded_once(x, wanted, most, dtype)


def root_of_squares(x):
    return numpy.sqrt((x**2).mean())


@pytest.mark.parametrize("backend, dtype", quick(PLACES, *ON_NUMPY, ("host", "bfloat16"), spread=True))
def test_four_ranks_are_as_exact_as_one(backend, dtype):
    """Each rounds once. What else there is, of P in 16 bits, four parts have less of: their maxima are nearer."""
    case = replace(FULL, dtype=dtype)
    exact = attention(*(x.astype(numpy.float64) for x in make_inputs(case)))
    found = [run(case, ranks, "ring", "contiguous", backend=backend, gradients=False).out for ranks in (1, 4)]
    one, four = (root_of_squares(x.astype(numpy.float64) - exact) for x in found)
    assert four <= 1.01 * one


ROWS = {"zigzag": {"causal": True}, "window": {"causal": True, "window": (30, None)}, "sinks": {"causal": True, "sinks": 1}}


@pytest.mark.parametrize("name, options", quick(list(ROWS.items()), *list(ROWS.items())[:2], spread=True))
@pytest.mark.parametrize("scheme", thinned(["ring", "all_gather", "ulysses"]))
def test_parts_of_some_rows_on_kernels(scheme, name, options):
    """Where some rows have one part, others several, and gradients of keys come in parts though those of queries do not."""
    case = replace(FULL, **options)
    order = "zigzag" if name == "zigzag" else "contiguous"
    check(case, run(case, 4, scheme, order, "uneven", backend="host"))
