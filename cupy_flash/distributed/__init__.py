"""Attention of sequences that are divided among several devices or processes: context parallelism.

    from cupy_flash import distributed
    out = distributed.attention(q, k, v, comm=comm, causal=True)       # each rank its own rows
"""

from ..errors import CommunicationError
from .adapters import mpi, nccl
from .communicator import Communicator
from .counted import Counted
from .entry import attention, attention_backward, attention_vjp, plan_attention
from .model import Machine
from .plan import DistributedPlan
from .sharding import part_lengths, positions, shard, unshard
from .threads import ThreadCommunicator, on_threads

__all__ = [
    "CommunicationError",
    "Communicator",
    "Counted",
    "DistributedPlan",
    "Machine",
    "ThreadCommunicator",
    "attention",
    "attention_backward",
    "attention_vjp",
    "mpi",
    "nccl",
    "on_threads",
    "part_lengths",
    "plan_attention",
    "positions",
    "shard",
    "unshard",
]
