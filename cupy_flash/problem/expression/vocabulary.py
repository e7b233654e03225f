"""The names that an expression may use, those of the user's arrays included."""

from __future__ import annotations

import keyword
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ...errors import shown
from .operations import ARTICLE, FUNCTIONS, Mistake, convert, limited
from .tree import NAMES, Literal, Name, Node, Read

CONSTANTS = {"inf": math.inf}
OPTIONS = ("bias", "mask", "alibi_slopes", "sinks")  # arrays of attention that a user may expect to be names


@dataclass(frozen=True, slots=True)
class Declaration:
    """An array that an expression may read.

    Parameters
    ----------
    name : str
        An identifier that means nothing else.
    kind : str
        'float', 'int' or 'bool': what its elements are read as.
    ndim : int
        How many indices it takes; 0 for a scalar, which is used bare.
    """

    name: str
    kind: str
    ndim: int

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str):
            raise TypeError(f"arrays: expected names that are strings, got {shown(name)}")
        # Python reads a name as its normal form, so another would never be found.
        if not name.isidentifier() or keyword.iskeyword(name) or unicodedata.normalize("NFKC", name) != name:
            raise ValueError(f"arrays: expected names that are identifiers, got {shown(name)}")
        if name in NAMES or name in FUNCTIONS or name in CONSTANTS:
            raise ValueError(f"arrays: expected names that mean nothing else in an expression, got {shown(name)}")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What each name means in an expression of an option, which is 'score' or 'mask'."""

    option: str
    declared: dict[str, Declaration]

    @classmethod
    def of(cls, option: str, declarations: Iterable[Declaration]) -> Vocabulary:
        """That of an option and some declarations."""
        return cls(option, {declaration.name: declaration for declaration in declarations})

    def meaning(self, name: str, is_indexed: bool = False) -> Node | Declaration:
        """The node of a name, or the declaration if it is an array that needs indices."""
        if name in NAMES and not (name == "score" and self.option == "mask"):
            return Name(name)
        if name in CONSTANTS:
            return Literal(CONSTANTS[name])
        declaration = self.declared.get(name)
        if declaration is None:
            names = [*(known for known in NAMES if known != "score" or self.option == "score"), *CONSTANTS, *self.declared]
            candidates = [known for known, x in self.declared.items() if x.ndim] if is_indexed else names
            close = get_close_matches(name, candidates, n=1, cutoff=0.7)  # slope is not meant to be score
            raise Mistake(f"one of {', '.join(names)}", shown(name), _meant(name, close))
        return declaration if declaration.ndim else Read(name, (), declaration.kind)

    def finish(self, tree: Node) -> Node:
        """The tree as the option needs it: a float for a score, a bool for a mask."""
        if self.option == "score":
            tree = convert(tree, "float")
        elif tree.kind != "bool":
            raise Mistake("a bool, which says whether a query sees a key", ARTICLE[tree.kind], "a comparison makes one")
        return limited(tree)


def read(declaration: Declaration, indices: Sequence[Node]) -> Read:
    """The node of an element of an array."""
    if len(indices) != declaration.ndim:
        raise bare(declaration, str(len(indices)))
    for place, index in enumerate(indices):
        if index.kind == "float":
            raise Mistake(f"an int as an index of '{declaration.name}'", "a float", "int() makes one", place)
    return Read(declaration.name, tuple(convert(index, "int") for index in indices), declaration.kind)


def bare(declaration: Declaration, got: str = "none") -> Mistake:
    """What to raise where an array has another number of indices than axes."""
    ndim = declaration.ndim
    return Mistake(f"{ndim} {'index' if ndim == 1 else 'indices'} of '{declaration.name}'", got)


def unknown_function(name: str) -> Mistake:
    """What to raise for the name of a function that is none."""
    close = get_close_matches(name, FUNCTIONS, n=1)
    return Mistake(f"one of {', '.join(FUNCTIONS)}", shown(name), f"did you mean '{close[0]}'?" if close else "")


def _meant(name: str, close: Sequence[str]) -> str:
    """What a name may have been meant to be, by the names that are close to it."""
    if close:
        return f"did you mean '{close[0]}'?"
    if name in OPTIONS:
        return f"an expression reads what is in arrays, not the option {name}="
    return f"what else it reads is given as arrays={{{shown(name)}: ...}}"
