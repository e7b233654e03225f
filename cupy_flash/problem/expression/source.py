"""The text of an expression, and how a message points into it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from .operations import Mistake

BLANKS = " \t\r\n\f"
WIDEST = 100  # characters of a line in a message


@dataclass(frozen=True, slots=True)
class Source:
    """A text of the user's. Places in it are indices of characters."""

    option: str
    text: str

    @property
    def blanks(self) -> int:
        """How many blanks precede what Python is given, to which they would be an indent."""
        return len(self.text) - len(self.text.lstrip(BLANKS))

    def place_of(self, node: ast.expr | ast.keyword) -> int:
        """Where a node of Python's starts, whose columns count bytes of UTF-8."""
        begin, end = self._line(node.lineno)
        return begin + len(self.text[begin:end].encode()[: node.col_offset].decode())

    def place_of_error(self, error: SyntaxError) -> int:
        """Where Python gave up, which may be behind the end; its columns count characters from 1 here."""
        begin, end = self._line(error.lineno or 1)
        return min(begin + max((error.offset or 1) - 1, 0), end)

    def refusal(self, mistake: Mistake, place: int) -> ValueError:
        """The error of a mistake, which shows the line and a caret under the place."""
        starts = self._starts(0)
        line = sum(start <= place for start in starts)
        column = place - starts[line - 1]
        where = f"column {column + 1}" if len(starts) == 1 else f"line {line}, column {column + 1}"
        begin = starts[line - 1]
        shown = re.split("[\r\n]", self.text[begin:])[0]
        if len(shown) > WIDEST:
            cut = max(column - WIDEST // 2, 0)
            shown, column = shown[cut : cut + WIDEST], column - cut
        shown = "".join(c if c.isprintable() else " " for c in shown).rstrip()
        message = f"{self.option}: expected {mistake.expected}, got {mistake.got} at {where}{mistake.hint}"
        return ValueError(f"{message}\n  {shown}\n  {' ' * column}^")

    def _starts(self, first: int) -> list[int]:
        """Where the lines start, from a place on; Python ends lines at these and no others."""
        return [first, *(match.end() for match in re.compile("\r\n|\r|\n").finditer(self.text, first))]

    def _line(self, number: int) -> tuple[int, int]:
        """Begin and end of a line of what Python is given."""
        starts = [*self._starts(self.blanks), len(self.text)]
        number = min(number, len(starts) - 1)
        return starts[number - 1], starts[number]
