"""Options that take several values with commas between them, such as 512,1024."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import click


class ListType(click.ParamType):
    """Values with commas between them: a tuple, without repetitions where they are chosen from a list.

    Parameters
    ----------
    convert : callable
        Makes a value of its text; raises ValueError for a text that is none.
    expected : str
        What error messages say of a value.
    choices : collection, optional
        The values that there are.
    """

    name = "list"

    def __init__(self, convert: Callable[[str], Any], expected: str, choices: Collection[Any] | None = None) -> None:
        self._convert = convert
        self._expected = expected
        self._choices = choices

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"{self._expected.upper()},..." if self._choices is None else f"[{'|'.join(self._choices)}],..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        values = tuple(self._one(text.strip(), param, ctx) for text in value.split(","))
        return values if self._choices is None else tuple(dict.fromkeys(values))

    def _one(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            value = self._convert(text)
        except ValueError:
            value = None
        if value is None or (self._choices is not None and value not in self._choices):
            which = "" if self._choices is None else f" out of {', '.join(self._choices)}"
            self.fail(f"expected {self._expected}s{which}, with commas between them, got {text!r}", param, ctx)
        return value


def names(*choices: str) -> ListType:
    """Several of these names."""
    return ListType(str, "name", choices)


def size_of(text: str) -> int:
    """The size that a text spells, which an int64 can hold. Raises ValueError for any other text."""
    if not (text.isascii() and text.isdecimal()) or (size := int(text)) >= 2**63:
        raise ValueError(text)
    return size


def _positive(text: str) -> int:
    size = size_of(text)
    if size < 1:
        raise ValueError(text)
    return size


SIZES = ListType(_positive, "size")
NUMBERS = ListType(float, "number")
