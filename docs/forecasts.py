"""The tables of `guide/distributed.md`, from plans for devices that are not there: their own numbers, and what the model says."""

import numpy
from ml_dtypes import bfloat16
from tables import markdown

from cupy_flash.distributed import DistributedPlan, plan_attention

SCHEMES = ("ulysses", "all_gather", "ring")
HEADS, HEADS_KV, DIM = 64, 8, 128
SIZES = {1 << 16: "64k", 1 << 18: "256k", 1 << 20: "1M", 1 << 22: "4M", 1 << 23: "8M"}


def _plan(tokens: int, ranks: int, scheme: str, order: str = "zigzag") -> DistributedPlan:
    # Arrays that take no memory; backend 'host' is for how kernels compute.
    q, kv = (numpy.broadcast_to(numpy.zeros((), bfloat16), (heads, tokens // ranks, DIM)) for heads in (HEADS, HEADS_KV))
    return plan_attention(q, kv, kv, ranks=ranks, scheme=scheme, order=order, causal=True, backend="host")


def _gigabytes(number: float) -> str:
    return f"{number / 2**30:.2f}" if number < 10 * 2**30 else f"{number / 2**30:.0f}"


def _most(plan: DistributedPlan, backward: bool) -> str:
    most = max((plan.memory(rank, backward=backward) for rank in range(plan.ranks)), key=lambda memory: memory.total)
    return f"{_gigabytes(most.keys)} + {_gigabytes(most.partial)}"


def memory() -> str:
    """What a rank needs, in GiB: inputs and results, and besides them each scheme for others' rows, and for partial results."""
    lines = []
    for tokens, ranks in ((1 << 16, 8), (1 << 18, 8), (1 << 20, 8), (1 << 22, 8), (1 << 23, 64)):
        rows = 2 * tokens // ranks * DIM  # bytes of a head
        own = [(2 * HEADS + 2 * HEADS_KV) * rows, (4 * HEADS + 4 * HEADS_KV) * rows]
        plans = [_plan(tokens, ranks, scheme) for scheme in SCHEMES]
        for backward, name in enumerate(("forward", "backward")):
            besides = [_most(plan, bool(backward)) for plan in plans]
            lines.append([f"{SIZES[tokens]} on {ranks}", name, _gigabytes(own[backward]), *besides])
    return markdown(["tokens, ranks", "", "inputs, results", *(f"`{scheme}`" for scheme in SCHEMES)], lines)


def times() -> str:
    """The share of one device's rate that the model says, and of bytes sent."""
    lines = []
    for tokens, ranks in ((1 << 16, 8), (1 << 20, 8), (1 << 20, 64), (1 << 23, 64)):
        for scheme in SCHEMES:
            plan = _plan(tokens, ranks, scheme)
            both = [found.efficiency for found in (plan.forward, plan.backward)]
            sent = [_gigabytes(max(plan.sent(rank, backward=way) for rank in range(ranks))) for way in (False, True)]
            lines.append([f"{SIZES[tokens]} on {ranks}", f"`{scheme}`", *(f"{share:.2f}" for share in both), *sent])
    head = ["tokens, ranks", "scheme", "forward", "backward", "GiB sent, forward", "backward"]
    return markdown(head, lines)


TABLES = {"ranks-memory": memory, "ranks-times": times}
