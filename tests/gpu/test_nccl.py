"""Attention on several devices through NCCL, a thread for each: judged as that of one device.

Needs two CUDA devices or more, and `nvidia-nccl` of CuPy's CUDA version.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from ranks import SCHEMES, check, lengths_of, options_of

from cupy_flash import CommunicationError, Gradients, distributed
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.cotangents import make_cotangents

cupy = pytest.importorskip("cupy")
if not cupy.cuda.is_available() or cupy.cuda.runtime.getDeviceCount() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)
nccl = pytest.importorskip("cupy.cuda.nccl")
DEVICES = min(cupy.cuda.runtime.getDeviceCount(), 4)
CAUSAL = Case("float16", 700, 700, dim=64, heads_q=8, heads_kv=2, causal=True)
CASES = {
    "causal": CAUSAL,
    "bfloat16": replace(CAUSAL, dtype="bfloat16", dim=128),
    "full": replace(CAUSAL, causal=False, batch=(2,)),
    "window": replace(CAUSAL, window=(100, None)),
    "softcap": replace(CAUSAL, softcap=20.0, sinks=1),
    "expression": replace(CAUSAL, score="relative"),
    "dropout": replace(CAUSAL, len_q=768, len_kv=768, dropout=0.2),
    "float32": replace(CAUSAL, dtype="float32"),
}


@pytest.fixture(scope="module")
def comms():
    return nccl.NcclCommunicator.initAll(list(range(DEVICES)))


def on_devices(comms, function, timeout=60.0, agrees_on_device=False):
    """Call a function on a thread for each device, with a communicator of NCCL."""

    def rank(host):
        with cupy.cuda.Device(host.rank):
            comm = distributed.nccl(comms[host.rank], host=None if agrees_on_device else host, timeout=timeout)
            try:
                found = function(comm)
                cupy.cuda.get_current_stream().synchronize()
                return found
            finally:
                comm.close()

    return distributed.on_threads(len(comms), rank, timeout=2 * timeout)


def on_this(x):
    if isinstance(x, dict):
        return {name: on_this(value) for name, value in x.items()}
    return cupy.asarray(x) if isinstance(x, numpy.ndarray) and x.ndim else x


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", CASES)
def test_within_the_bounds_of_one_device(comms, name, scheme, order):
    case = CASES[name]
    # Kernels take parts for dropout that begin at multiples of 64 rows.
    lengths, options = lengths_of(case, DEVICES, "even" if case.dropout else "uneven"), options_of(case)
    options.pop("return_lse", None)
    (q, k, v), (dout, dlse) = make_inputs(case), make_cotangents(case)

    def part(comm):
        def own(x, side="q", axis=-2):
            return cupy.asarray(distributed.shard(x, comm.rank, DEVICES, order=order, axis=axis, lengths=lengths[side]))

        inputs = own(q), own(k, "kv"), own(v, "kv")
        shared = {"comm": comm, "scheme": scheme, "order": order, **{name: on_this(x) for name, x in options.items()}}
        (out, lse), vjp = distributed.attention_vjp(*inputs, return_lse=True, **shared)
        found = vjp(own(dout), own(dlse, axis=-1))
        dsinks = None if found.dsinks is None else found.dsinks.get()
        return [x.get() for x in (out, lse, *found)], dsinks

    parts, dsinks = zip(*on_devices(comms, part))
    together = [distributed.unshard(x, order=order, axis=-1 if i == 1 else -2) for i, x in enumerate(zip(*parts))]

    class Found:
        out, lse = together[:2]
        gradients = Gradients(*together[2:], dsinks=dsinks[0])

    check(case, Found)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_repeats_give_the_same_bits(comms, scheme):
    q, k, v = make_inputs(CAUSAL)

    def part(comm):
        own = [cupy.asarray(distributed.shard(x, comm.rank, DEVICES, order="zigzag")) for x in (q, k, v)]
        found = []
        for _ in range(20):
            out, vjp = distributed.attention_vjp(
                *own, comm=comm, scheme=scheme, order="zigzag", causal=True, deterministic=True
            )
            found.append([x.get() for x in (out, *vjp(out))])
        return all(numpy.array_equal(a, b) for again in found[1:] for a, b in zip(found[0], again))

    assert all(on_devices(comms, part))


def test_ranks_agree_through_nccl_itself(comms):
    x = make_inputs(CAUSAL)[0]

    def part(comm):
        own = cupy.asarray(distributed.shard(x, comm.rank, DEVICES))
        return distributed.attention(own, own, own, comm=comm).shape

    assert len(on_devices(comms, part, agrees_on_device=True)) == DEVICES


def test_a_mismatch_is_an_error_on_all(comms):
    x = cupy.ones((4, 64, 64), numpy.float16)

    def part(comm):
        own = cupy.asarray(x)
        with pytest.raises(ValueError, match=r"^causal: expected the same on all ranks"):
            distributed.attention(own, own, own, comm=comm, causal=comm.rank == 0)

    on_devices(comms, part)


def test_a_rank_that_stays_away_is_an_error_within_the_limit():
    """Last of all, because its communicators are aborted."""
    own_comms = nccl.NcclCommunicator.initAll(list(range(DEVICES)))
    begun = time.monotonic()

    def part(comm):
        if comm.rank == 0:  # waits where the two are connected first, or later
            x = cupy.ones((4, 64, 64), numpy.float16)
            with pytest.raises(CommunicationError, match=r"^comm: expected an exchange to end within 5 s"):
                comm.start([(1, x)], [(1, cupy.empty_like(x))])
                while time.monotonic() < begun + 25:
                    time.sleep(0.1)
                    comm._watch.check()

    try:
        on_devices(own_comms, part, timeout=5.0)
    finally:
        for own in own_comms:  # which destroyed as usual would wait for each other
            own.abort()
    assert time.monotonic() - begun < 30
