"""What ranks tell each other before a call: that they make the same one, and how many rows each has.

Each sends a digest of its call, 32 bytes, with its numbers of rows. Only where digests differ, or a rank has refused its arguments,
the texts follow, so that every rank raises the same error, which names what differs. Nothing has been sent or written then.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ..call.captured import Captured
from ..errors import CommunicationError
from ..problem.lengths import LENGTHS
from .communicator import Communicator

RECORD = struct.Struct("<?32sqq")  # whether it is well, digest, queries, keys
NO_DIGEST = bytes(32)


@dataclass(frozen=True)
class Said:
    """What a rank says of its call, which has to be the same on all ranks.

    Parameters
    ----------
    text : str
        Lines of what an argument is called and what is said of it.
    """

    text: str

    @functools.cached_property
    def digest(self) -> bytes:
        """32 bytes that tell texts apart."""
        return _digest(self.text.encode())

    def and_of(self, given: Captured) -> Said:
        """The same with contents of arrays, only where they decide who sends what or what is dropped."""
        lines = contents(given, (*LENGTHS, "seed"))
        return Said("\n".join([self.text, *lines])) if lines else self


def said_of(kind: str, inputs: Mapping[str, Any], given: Captured, options: Mapping[str, Any]) -> Said:
    """What is said of a call, without contents of arrays."""
    said = {"function": kind}
    for name, x in inputs.items():
        # Rows are the last axis but one, of which ranks may have other numbers.
        shape = None if x is None else (*x.shape[:-2], "rows", x.shape[-1])
        said[name] = "None" if x is None else f"{x.dtype} of shape {shape}".replace("'", "")
    for name, x in zip(given.names, given.views):
        said[name] = f"{x.dtype} of shape {x.shape}"
    named = {**options, "score": given.options["score"], "mask": given.options["mask"]}
    said |= {name: repr(value) if isinstance(value, str) else str(value) for name, value in named.items()}
    return Said("\n".join(f"{name}={value}" for name, value in said.items()))


def contents(given: Captured, names: Sequence[str]) -> list[str]:
    """Lines for arrays of these names that are in host memory."""
    return [
        f"{name}={x.dtype} of shape {x.shape}, {x.tolist() if x.size <= 16 else 'digest ' + _digest(x.tobytes()).hex()[:16]}"
        for name, x in zip(given.names, given.views) if name in names and isinstance(x, numpy.ndarray)
    ]  # fmt: skip


def agree(
    comm: Communicator, said: Said | None, rows: tuple[int, int], error: Exception | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of queries and of keys of every rank, once all make the same call.

    Parameters
    ----------
    comm : Communicator
    said : Said or None
        What this rank is about to compute; None with an error.
    rows : (int, int)
        Its queries and keys.
    error : Exception or None
        Why this rank refuses, which is raised once the others know.

    Raises
    ------
    ValueError
        If another rank refuses, or makes another call.
    CommunicationError
        If a rank does not answer.
    """
    own = RECORD.pack(error is None, NO_DIGEST if said is None else said.digest, *rows)
    records = comm.gather(own)
    if error is None and all(record == own for record in records):
        return (rows[0],) * len(records), (rows[1],) * len(records)
    if any(len(record) != RECORD.size for record in records):
        raise CommunicationError("comm: expected all ranks to begin the same call, got other messages")
    found = [RECORD.unpack(record) for record in records]
    if all(well for well, *_ in found) and len({digest for _, digest, *_ in found}) == 1:
        return tuple(queries for _, _, queries, _ in found), tuple(keys for *_, keys in found)
    text = f"{type(error).__name__}: {error}" if error is not None or said is None else said.text
    texts = [data.decode() for data in comm.gather(text.encode())]
    if error is not None:
        raise error
    for rank, (well, *_) in enumerate(found):
        if not well:
            raise ValueError(f"comm: expected all ranks to begin, got an error on rank {rank}: {texts[rank]}")
    raise ValueError(_difference([dict(line.partition("=")[::2] for line in text.split("\n")) for text in texts]))


def _difference(said: list[dict[str, str]]) -> str:
    names = dict.fromkeys(name for of_rank in said for name in of_rank)
    for name in names:
        values = [of_rank.get(name, "nothing") for of_rank in said]
        for rank, value in enumerate(values):
            if value != values[0]:
                return f"{name}: expected the same on all ranks, got {values[0]} on rank 0 and {value} on rank {rank}"
    return "comm: expected the same call on all ranks, got others"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
