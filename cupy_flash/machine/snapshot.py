"""The machine code of every row of the tuning tables, kept in a file, and what differs from it, row by row.

Another compiler makes other code of the same text, so a snapshot is of one version of NVRTC: the one that `pyproject.toml` pins
for the tests.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..errors import CompileError
from ..plan.kernel import KernelPlan
from ..plan.sources import shelf
from . import nvrtc
from .machine_code import MachineCode, read

FILE = "tests/data/machine_code.csv"
KEY = ("plan", "entry")
FIGURES = tuple(figure.name for figure in fields(MachineCode) if figure.compare)

Rows = dict[tuple[str, str], MachineCode]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A row for each entry that a plan launches, by the names of both, and the compiler that made them."""

    compiler: str
    rows: Rows

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """The snapshot in the text of a file."""
        compiler, _, table = text.partition("\n")
        rows = {(record["plan"], record["entry"]): _figures(record) for record in csv.DictReader(io.StringIO(table))}
        return cls(compiler.removeprefix("# NVRTC "), rows)

    def rows_for(self, plan: KernelPlan) -> Rows:
        """The rows of one plan."""
        return {key: code for key, code in self.rows.items() if key[0] == plan.name}

    def __str__(self) -> str:
        """The text of the file: a row on each line, in the order of their names."""
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow((*KEY, *FIGURES))
        writer.writerows((*key, *_words(code)) for key, code in sorted(self.rows.items()))
        return f"# NVRTC {self.compiler}\n{lines.getvalue()}"


def path() -> Path:
    """Where the snapshot is kept; it exists in a checkout only."""
    return shelf().parent / FILE


def committed() -> Snapshot:
    """The snapshot in the checkout; an empty one where the file is missing.

    Raises
    ------
    CompileError
        If it is of another version of NVRTC, whose code cannot be compared, or if the package is not run from a checkout.
    """
    if not path().parent.is_dir():
        raise CompileError(f"{FILE}: expected a checkout, which has this folder, got {path().parents[2]}")
    if not path().exists():
        return Snapshot(nvrtc.build(), {})
    snapshot = Snapshot.parse(path().read_text(encoding="utf-8"))
    if snapshot.compiler != nvrtc.build():
        raise CompileError(
            f"{FILE}: expected NVRTC {snapshot.compiler}, which it is a snapshot of, got {nvrtc.build()}; "
            "to begin anew, pin the new version in pyproject.toml and delete the file"
        )
    return snapshot


def rows_of(plan: KernelPlan, cubin: bytes) -> Rows:
    """The rows of one plan. Shared memory is all that a block has: what it is launched with is added."""
    found = read(cubin)
    entries = plan.entries.items()
    return {(plan.name, entry): replace(found[entry], shared_bytes=found[entry].shared_bytes + size) for entry, size in entries}


def differences(old: Rows, new: Rows) -> list[str]:
    """A line for each row that differs, is gone or is new; a new one with the code of one that is gone is a new name for it."""
    gone = {key: old[key] for key in sorted(old.keys() - new.keys())}
    added = {key: new[key] for key in sorted(new.keys() - old.keys())}
    lines = [f"{_label(key)}: {_change(old[key], new[key])}" for key in sorted(old.keys() & new.keys()) if old[key] != new[key]]
    for key, code in list(added.items()):
        before = next((other for other in gone if gone[other] == code), None)
        if before is not None:
            lines.append(f"{_label(before)}: now {_label(key)}, the same code")
            del gone[before], added[key]
    lines += [f"{_label(key)}: gone" for key in gone]
    return lines + [f"{_label(key)}: new, {_listed(zip(FIGURES, _words(code)))}" for key, code in added.items()]


def _change(old: MachineCode, new: MachineCode) -> str:
    pairs = zip(FIGURES, _words(old), _words(new))
    return _listed((figure, f"{before} -> {after}") for figure, before, after in pairs if before != after)


def _listed(figures: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{figure.replace('_', ' ')} {value}" for figure, value in figures)


def _label(key: tuple[str, str]) -> str:
    plan, entry = key
    return f"{plan} {entry}"


def _words(code: MachineCode) -> tuple[str, ...]:
    """The figures as they are written; those of several loops with spaces between them."""
    values = (getattr(code, figure) for figure in FIGURES)
    return tuple(" ".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values)


def _figures(record: dict[str, str]) -> MachineCode:
    loops, opcodes = tuple(map(int, record["product_loops"].split())), record["opcodes"]
    numbers = {figure: int(record[figure]) for figure in FIGURES if figure not in ("product_loops", "opcodes")}
    return MachineCode(**numbers, product_loops=loops, opcodes=opcodes)
