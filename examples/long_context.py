"""Train the byte model of `char_lm.py` on texts that are too long for one process: their bytes are divided among several.

    mpiexec -n 4 python -m mpi4py examples/long_context.py
    mpiexec -n 4 python -m mpi4py examples/long_context.py --device cuda --seq 1048576 --memory 0

Each rank has a part of the text and all weights. Only attention needs the other parts: `cupy_flash.distributed` computes it. The
gradients of the weights are added up over the ranks. So the losses are those of one process, which `mpiexec -n 1` shows if it has
the memory: `--memory` is a limit for each process, in MB, that the system keeps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import char_lm
import click
import numpy as np
from char_lm import Array, Model, loss_vjp
from train_char_lm import AdamW, array_module, read_text

from cupy_flash import distributed

MODEL = Model(layers=2, heads=2, dim=64, attention="ranks")


@dataclass(frozen=True)
class Ranks:
    """What a process knows of the others: the communicator of MPI, one that attention takes, and how texts are divided."""

    world: Any  # mpi4py.MPI.Comm
    comm: Any
    scheme: str = "auto"
    order: str = "zigzag"

    def attention_vjp(self, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        """Causal attention of this rank's part of a text, to all of it."""
        return distributed.attention_vjp(q, k, v, comm=self.comm, scheme=self.scheme, order=self.order, causal=True)

    def part(self, x: Array) -> Array:
        """This rank's part of something with an element for each byte, along its last axis."""
        return distributed.shard(x, self.world.rank, self.world.size, order=self.order, axis=-1)

    def total(self, x: np.ndarray) -> np.ndarray:
        """The sum over all ranks."""
        found = np.empty_like(x)
        self.world.Allreduce(x, found)
        return found


def loss_and_gradient(model: Model, ranks: Ranks, weights: Array, text: Array) -> tuple[float, Array]:
    """Return the mean loss of predicting each byte of `text` from those before it, and its gradient, of all ranks."""
    xp, seq = char_lm.namespace(text), len(text) - 1
    tokens, targets, positions = (ranks.part(x) for x in (text[:-1], text[1:], xp.arange(seq)))
    loss, vjp = loss_vjp(model, weights, tokens[None], targets[None], positions)
    share = len(tokens) / seq  # a rank's loss is the mean of its own part
    of_all = ranks.total(np.append(in_host_memory(vjp()), float(loss)) * share)
    return float(of_all[-1]), xp.asarray(of_all[:-1].astype(weights.dtype))


def train(
    model: Model, ranks: Ranks, text: np.ndarray, seq: int, steps: int, xp: ModuleType = np, rate: float = 3e-3
) -> list[float]:
    """Return the loss of each step."""
    char_lm.ATTENTION["ranks"] = ranks.attention_vjp
    weights = xp.asarray(model.initial_weights(0), np.float32)
    optimizer, rng, losses = AdamW(weights), np.random.default_rng(0), []  # the same on all ranks
    for _ in range(steps):
        start = int(rng.integers(0, len(text) - seq - 1))
        loss, gradient = loss_and_gradient(model, ranks, weights, xp.asarray(text[start : start + seq + 1]))
        optimizer.step(gradient, rate)
        losses.append(loss)
    return losses


def in_host_memory(x: Array) -> np.ndarray:
    """Return an array in host memory, where MPI adds."""
    return x if isinstance(x, np.ndarray) else x.get()


def limit_memory(megabytes: int) -> None:
    """Let the system refuse this process more memory than it has now and so much."""
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20,) * 2)


def communicator(world: Any, xp: ModuleType) -> Any:
    """Return what attention sends by: MPI for host memory, NCCL for devices, of which each rank takes one."""
    if xp is np:
        return distributed.mpi(world)
    from cupy.cuda import nccl

    xp.cuda.Device(world.rank % xp.cuda.runtime.getDeviceCount()).use()
    name = world.bcast(nccl.get_unique_id() if world.rank == 0 else None)
    return distributed.nccl(nccl.NcclCommunicator(world.size, name, world.rank), host=world)


SIZE = click.IntRange(min=1)


@click.command(help="Train the byte model on long texts, divided among the processes of mpiexec.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cpu", show_default=True)
@click.option("--scheme", type=click.Choice(["auto", "ulysses", "all_gather", "ring"]), default="auto", show_default=True)
@click.option("--order", type=click.Choice(["contiguous", "zigzag"]), default="zigzag", show_default=True)
@click.option("--seq", type=SIZE, default=8192, show_default=True, help="Bytes of a text.")
@click.option("--steps", type=SIZE, default=3, show_default=True)
@click.option("--memory", type=click.IntRange(min=0), default=120, show_default=True, help="MB that a process may take; 0: any.")
def main(device: str, scheme: str, order: str, seq: int, steps: int, memory: int) -> None:
    from mpi4py import MPI  # the only place that needs it

    world, xp = MPI.COMM_WORLD, array_module(device)
    ranks = Ranks(world, communicator(world, xp), scheme, order)
    text = read_text()[0]
    rows = np.broadcast_to(np.float32(0), (1, MODEL.heads, -(-seq // world.size), MODEL.dim // MODEL.heads))
    plan = distributed.plan_attention(rows, rows, rows, ranks=world.size, scheme=scheme, order=order, causal=True)
    if world.rank == 0:
        click.echo(f"{seq:,} bytes of text on {world.size} ranks; {plan.scheme}: {plan.why}")
    if memory:
        limit_memory(memory)
    begun = time.perf_counter()
    try:
        losses = train(MODEL, ranks, text, seq, steps, xp)
    except MemoryError as error:
        limit = f"rank {world.rank} of {world.size} may take {memory} MB more"
        click.echo(f"{limit}, which is too little for {seq:,} bytes: {error}", err=True)
        world.Abort(1)
    if world.rank == 0:
        click.echo(f"losses {' '.join(f'{loss:.6f}' for loss in losses)}, {(time.perf_counter() - begun) / steps:.2f} s a step")


if __name__ == "__main__":
    main()
