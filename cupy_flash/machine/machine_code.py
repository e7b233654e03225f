"""What a cubin says of its kernels, read without a disassembler: registers, memory, and the sequence of instructions.

A cubin is an ELF file. The machine code of an entry is its section ``.text.ENTRY``, in instructions of 16 bytes, little endian.
Their low 12 bits are operation and form (register, constant or immediate operand), the next four the predicate. Names of
operations and attributes are those of ``nvdisasm``. Instructions were so encoded from sm_75 to sm_120; where a branch goes is
written in another way from sm_90 on.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

SECTION = np.dtype(
    [(name, "<u4") for name in ("name", "type")]
    + [(name, "<u8") for name in ("flags", "address", "offset", "size")]
    + [("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry_size", "<u8")]
)
SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")])
NO_BYTES = 8  # the type of a section that takes no room in the file
# Attributes in .nv.info: a format, a kind and two bytes of value or, in the last format, the size of a value that follows.
SIZED, REGISTERS, FRAME_SIZE = 0x04, 0x2F, 0x11
# Operation and form, and the operation alone.
NOP, BRANCH, UNIFORM_BRANCH, EXIT, RETURN = 0x918, 0x947, 0x547, 0x94D, 0x950
PRODUCTS = (0x03C, 0x1F0)  # HMMA, HGMMA
FFMA_UNIFORM = 0xC23  # with a factor in a uniform register
ALWAYS = 7  # the predicate that is true


@dataclass(frozen=True, slots=True)
class MachineCode:
    """One entry of a cubin.

    Parameters
    ----------
    registers : int
        Of a thread, when the entry starts.
    stack_bytes : int
        Of a thread: what is spilled lies here, and so would a local array.
    shared_bytes : int
        Of a block, besides what it is launched with. From sm_90 on the 1,024 that the system reserves.
    instructions : int
        Without the padding at the end.
    product_loops : tuple of int
        Instructions of each loop with products of tensor cores, outer before inner.
    opcodes : str
        A hash of the operations in their order. Operands do not count: neither which registers, nor offsets of parameters.
    rounds : tuple of int
        Of each of these loops, the fewest instructions that a round takes: without what is branched around, such as the mask of a
        tile that all rows see, or a step that is done again.
    addends : mapping of int to int
        The registers that are added to a product of a lane's number with one of all lanes, such as a score and its scale, and how
        often each is.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: int
    product_loops: tuple[int, ...]
    opcodes: str
    rounds: tuple[int, ...] = field(default=(), compare=False)  # which snapshots do not hold
    addends: Mapping[int, int] = field(default_factory=dict, compare=False)


def read(cubin: bytes) -> dict[str, MachineCode]:
    """What a cubin says of each of its entries, by name.

    Raises
    ------
    ValueError
        For anything but a cubin.
    """
    sections = _sections(cubin)
    attributes = dict(_attributes(sections[".nv.info"], _symbols(sections)))
    found = {}
    for entry in (name.removeprefix(".text.") for name in sections if name.startswith(".text.")):
        words = np.frombuffer(sections[f".text.{entry}"], "<u8").reshape(-1, 2)
        opcodes = words[:, 0] & 0xFFF
        length = int(np.flatnonzero(opcodes != NOP)[-1]) + 1
        loops = _product_loops(words[:length])
        found[entry] = MachineCode(
            registers=attributes[REGISTERS, entry],
            stack_bytes=attributes[FRAME_SIZE, entry],
            shared_bytes=len(sections.get(f".nv.shared.{entry}", b"")),
            instructions=length,
            product_loops=tuple(size for size, _ in loops),
            rounds=tuple(least for _, least in loops),
            addends=Counter((words[:length, 1][opcodes[:length] == FFMA_UNIFORM] & 0xFF).tolist()),
            opcodes=hashlib.sha256(opcodes[:length].astype("<u2").tobytes()).hexdigest()[:12],
        )
    return found


def _sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of an ELF file by name; those that take no room in it as so many zeros."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"cubin: expected an ELF file of 64 bits, got one that starts with {cubin[:5]!r}")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    headers = np.frombuffer(cubin, SECTION, count, start).tolist()
    bodies = [bytes(size) if kind == NO_BYTES else cubin[at : at + size] for _, kind, _, _, at, size, *_ in headers]
    return {_string(bodies[names], header[0]): body for header, body in zip(headers, bodies)}


def _string(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _symbols(sections: dict[str, bytes]) -> list[str]:
    """The name of each symbol."""
    return [_string(sections[".strtab"], at) for at in np.frombuffer(sections[".symtab"], SYMBOL)["name"].tolist()]


def _attributes(info: bytes, symbols: list[str]) -> Iterator[tuple[tuple[int, str], int]]:
    """Kind, entry and value of the attributes that belong to entries."""
    at = 0
    while at < len(info):
        form, kind, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED:
            if size == 8:
                symbol, value = struct.unpack_from("<II", info, at)
                yield (kind, symbols[symbol]), value
            at += size


def _product_loops(words: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Instructions of each loop with products, outer before inner, and the fewest of a round of it.

    A loop is all that lies on a way back to a place that every way into it goes through. So what waits out of line counts, and
    what only lies between, as the compiler put it, does not.
    """
    opcodes, successors = (words[:, 0] & 0xFFF).tolist(), _blocks(words)
    sizes = {start: end - start for start, (end, _) in successors.items()}
    follows = {start: after for start, (_, after) in successors.items()}
    reached = _reached(follows, 0)
    precedes: dict[int, list[int]] = {start: [] for start in reached}
    for start in reached:
        for after in follows[start]:
            precedes[after].append(start)
    loops: dict[int, set[int]] = {}
    for start in reached:
        for head in follows[start]:
            if head <= start and (head == start or start not in _reached(follows, 0, without=head)):
                loops[head] = loops.get(head, {head}) | _reached(precedes, start, without=head)
    with_products = {s for s in reached if any(opcode & 0x1FF in PRODUCTS for opcode in opcodes[s : s + sizes[s]])}
    found = {head: loop for head, loop in loops.items() if loop & with_products}
    return tuple(
        (sum(sizes[start] for start in found[head]), _shortest_round(found[head], head, follows, sizes)) for head in sorted(found)
    )


def _shortest_round(loop: set[int], head: int, follows: dict[int, list[int]], sizes: dict[int, int]) -> int:
    """The fewest instructions of a way from the head of a loop back to it."""
    open_ends, done = [(sizes[head], head)], set()
    while open_ends:
        length, at = heapq.heappop(open_ends)
        if at in done:
            continue
        done.add(at)
        for after in follows[at]:
            if after == head:
                heapq.heappush(open_ends, (length, -1))
            elif after in loop:
                heapq.heappush(open_ends, (length + sizes[after], after))
        if open_ends and open_ends[0][1] == -1:
            return open_ends[0][0]
    raise ValueError(f"loop: expected a way back to instruction {head}, found none")


def _blocks(words: np.ndarray) -> dict[int, tuple[int, list[int]]]:
    """For each stretch of instructions that has one way in and one way out: its start, its end and what may follow."""
    jumps: dict[int, list[int]] = {}
    wide_steps = int(words[-1, 0]) >> 16 & 0xFF  # the last instruction of all branches to itself
    for at in np.flatnonzero(np.isin(words[:, 0] & 0xFFF, (BRANCH, UNIFORM_BRANCH, EXIT, RETURN))).tolist():
        low, high = words[at].tolist()
        targets, surely = [], low >> 12 & 15 == ALWAYS
        if low & 0xFFF in (BRANCH, UNIFORM_BRANCH):
            steps = (low >> 34 | high << 30) & (1 << 48) - 1
            steps -= (steps >> 47) << 48
            if wide_steps:
                steps = steps << 8 | low >> 16 & 0xFF
            targets.append(at + 1 + steps // 4)
            # Nor does it where a second predicate says so, or lanes differ.
            surely = surely and low & 0xFFF == BRANCH and low >> 32 & 3 == 0 and high >> 23 & 15 == ALWAYS
        jumps[at] = targets + [at + 1] * (not surely)
    starts = sorted({0, *(at + 1 for at in jumps), *(target for after in jumps.values() for target in after)} - {len(words)})
    return {start: (end, jumps.get(end - 1, [end])) for start, end in zip(starts, [*starts[1:], len(words)])}


def _reached(follows: dict[int, list[int]], start: int, without: int | None = None) -> set[int]:
    """What can be reached from `start`, `start` included, on ways that do not lead through `without`."""
    found: set[int] = set()
    open_ends = [start]
    while open_ends:
        at = open_ends.pop()
        if at != without and at not in found:
            found.add(at)
            open_ends += follows[at]
    return found
