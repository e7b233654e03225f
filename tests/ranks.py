"""A shared case on several ranks that are threads, put together again and judged as that of one device."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy

from cupy_flash import Gradients, distributed
from cupy_flash.judge.cases import make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents

SCHEMES = ("ulysses", "all_gather", "ring")
ORDERS = ("contiguous", "zigzag")


@dataclass
class Together:
    """What ranks have computed: of all rows, and of each rank what it counted."""

    out: Any
    lse: Any
    gradients: Gradients | None = None
    counted: list[Any] = field(default_factory=list)
    of_all: list[Gradients] = field(default_factory=list)


def uneven(total, ranks):
    """Lengths of parts that differ, one of which is 0 if there are three or more."""
    ends = [0, *(total * (i + 1) ** 2 // ranks**2 for i in range(ranks))]
    lengths = [b - a for a, b in pairwise(ends)]
    if ranks > 2:
        lengths[-1], lengths[1] = lengths[-1] + lengths[1], 0
    return tuple(lengths)


def lengths_of(case, ranks, divided):
    make = uneven if divided == "uneven" else distributed.part_lengths
    return {"q": make(case.len_q, ranks), "kv": make(case.len_kv, ranks)}


def options_of(case, wrt=()):
    return {**case.options, **case.arrays(), **({"wrt": wrt} if wrt else {})}


def run(case, ranks, scheme, order, divided="even", backend="auto", gradients=True, wrt=(), timeout=60.0):
    """Compute a case on ranks."""
    lengths = lengths_of(case, ranks, divided)
    options = {**options_of(case), "backend": backend}
    options.pop("return_lse", None)
    (q, k, v), (dout, dlse) = make_inputs(case), make_cotangents(case)

    def part(comm):
        comm = distributed.Counted(comm)

        def own(x, side="q", axis=-2):
            return distributed.shard(x, comm.rank, ranks, order=order, axis=axis, lengths=lengths[side])

        shared = {"comm": comm, "scheme": scheme, "order": order, **options}
        inputs = own(q), own(k, "kv"), own(v, "kv")
        if not gradients:
            return *distributed.attention(*inputs, return_lse=True, **shared), None, comm
        (out, lse), vjp = distributed.attention_vjp(*inputs, return_lse=True, wrt=wrt, **shared)
        return out, lse, vjp(own(dout), own(dlse, axis=-1)), comm

    outs, lses, grads, counted = zip(*distributed.on_threads(ranks, part, timeout=timeout))
    together = Together(distributed.unshard(outs, order=order), distributed.unshard(lses, order=order, axis=-1))
    together.counted = list(counted)
    if gradients:
        parts = [distributed.unshard([g[i] for g in grads], order=order) for i in range(3)]
        first = grads[0]
        shared = {"dsinks": first.dsinks, "dalibi_slopes": first.dalibi_slopes, "darrays": first.darrays}
        together.gradients = Gradients(*parts, **shared)
        together.of_all = list(grads)
    return together


def check(case, found, wrt=()):
    """Judge what was computed by the bounds of one device."""
    (q, k, v), (dout, dlse), meaning = make_inputs(case), make_cotangents(case), case.meaning()
    forward = compare(found.out, found.lse, q, k, v, precision=case.precision, **meaning)
    assert forward.ok, forward.message
    if found.gradients is not None:
        given = case.arrays()
        named = {name: given[name] if name in given else given["arrays"][name] for name in wrt}
        judged = compare_gradients(
            found.gradients, dout, q, k, v, dlse=dlse, precision=case.precision, wrt=named or None, **meaning
        )
        assert judged.ok, judged.message


def same_bits(a, b):
    """Whether results are the same bits, of all there are."""
    pairs = [(a.out, b.out), (a.lse, b.lse), *zip(a.gradients or (), b.gradients or ())]
    return all(numpy.array_equal(x.view(numpy.uint8), y.view(numpy.uint8)) for x, y in pairs)
