"""The arrays of a call that say where sequences lie, and those that its scores and masks read, beside those of every attention."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import numpy

from ..errors import shown
from ..problem import arrays as array_views
from ..problem.dropout import make_seed
from ..problem.expression.entry import Expression, mask_expression, score_expression
from ..problem.key_ranges import FIRST, OWN_NAMES, START, STOP, KeyRanges
from ..problem.layout import ITEMSIZE, Layout
from ..problem.lengths import LENGTHS
from ..problem.scores import OPERANDS, declared, label
from .tile_mask import TileMask, operand

BITS_OF_SEED = 64
LENGTHS_BY_NAME = frozenset(LENGTHS)
LOOKED_AT = frozenset(("seed", START, STOP))  # of which it matters what they are besides arrays
LEAST, GREATEST = -(2**31), 2**31 - 1  # of an int of kernels


class Captured:
    """What a call gives besides, in order: those of `LENGTHS` and of `OPERANDS` that there are, then what expressions read.

    Attributes
    ----------
    names : tuple of str
        What messages call them.
    given : tuple of array
        As the user gave them.
    views : tuple of numpy.ndarray or cupy.ndarray
    descriptions : tuple
    addresses : list of int
        0 of what is told by its value: a scalar, and the seed, in host memory.
    words : list of int
        What kernels are told, by the names of `plan.params.names_of_scores`: addresses and values.
    lengths_in_host_memory : dict of str to numpy.ndarray
        Those of `LENGTHS` whose numbers can be looked at without waiting for a device.
    found : dict or None
        What a `TileMask` has found of its tiles.
    score, mask : Expression or None
        Those of the call.
    """

    __slots__ = (
        "_of_names",
        "addresses",
        "descriptions",
        "found",
        "given",
        "lengths_in_host_memory",
        "mask",
        "names",
        "score",
        "views",
        "words",
    )

    def __init__(
        self, operands: dict[str, Any], arrays: dict[str, Any], score: Any, mask: Any, kept: TileMask | None = None
    ) -> None:
        self.names, self._of_names = _named(tuple(operands), tuple(arrays))
        self.given = (*operands.values(), *arrays.values())
        views, descriptions, addresses, words = [], [], [], []
        self.lengths_in_host_memory = {}
        kind, describe = array_views.kind_on_devices(), array_views.describe
        for name, x in zip(self.names, self.given):  # one loop: a call takes few microseconds
            view = x if type(x) is kind and name not in LOOKED_AT else _view(x, name)
            if type(view) is not kind and isinstance(view, numpy.ndarray):
                if name in LENGTHS_BY_NAME:
                    self.lengths_in_host_memory[name] = view
                elif _is_value(name, view):
                    # Where one lies that is told by its value is nothing that a plan depends on.
                    views.append(view)
                    descriptions.append((view.shape, (view.itemsize,) * view.ndim, view.dtype, 0, None))
                    addresses.append(0)
                    words += _value(name, view)
                    continue
            description, at = describe(view)
            views.append(view)
            descriptions.append(description)
            addresses.append(at)
            words.append(at)
        self.views, self.descriptions, self.addresses, self.words = tuple(views), tuple(descriptions), addresses, words
        if callable(score) or callable(mask):  # traced anew in each call: what a function reads may have changed
            layouts = {name: array_views.layout_of(d, label(name)) for name, d in zip(arrays, self.descriptions[len(operands) :])}
            score, mask = _traced(score_expression, score, layouts), _traced(mask_expression, mask, layouts)
        self.score, self.mask = score, mask
        self.found = None if kept is None else kept.found

    @property
    def options(self) -> dict[str, Any]:
        """What the plan of a call depends on: its expressions, and which of the views is what."""
        options = {**self._of_names, "score": self.score, "mask": self.mask}
        return options if self.found is None else {**options, "keeps_tiles": True}

    @property
    def on_host(self) -> list[numpy.ndarray | int]:
        """The same where kernels are executed on the host: arrays, and of values what kernels are told."""
        operands = zip(self.names, self.views)
        return [x for name, view in operands for x in (_value(name, view) if _is_value(name, view) else [view])]

    def on_device(self) -> tuple[list[int], list[Any]]:
        """What kernels on the current device are told, and the arrays that were copied there: lengths in host memory."""
        host = self.lengths_in_host_memory
        if not host:
            return self.words, []
        import cupy  # late: who has arrays on a device has it

        copied = {name: cupy.asarray(x) for name, x in host.items()}
        words = list(self.words)  # of lengths each has one, and they come first
        for i, name in enumerate(self.names[: len(words)]):
            if name in copied:
                words[i] = array_views.pointer(copied[name])
        if FIRST in self.names and "cu_seqlens_q" in copied:
            words[self._place_of_word(FIRST)] = array_views.pointer(copied["cu_seqlens_q"])
        return words, list(copied.values())

    def _place_of_word(self, name: str) -> int:
        """Which of the words an array has; a seed that is a value has two."""
        before = self.names[: self.names.index(name)]
        return sum(len(_value(other, view)) if _is_value(other, view) else 1 for other, view in zip(before, self.views))


@functools.lru_cache(maxsize=1024)
def _named(operands: tuple[str, ...], arrays: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What messages call them, and what the options of a plan say of them."""
    return (*operands, *map(label, arrays)), {"operands": operands, "arrays": arrays}


NOTHING = Captured({}, {}, None, None)


def captured(
    *,
    score: Any = None,
    mask: Any = None,
    arrays: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    seed: Any = None,
    lengths: dict[str, Any] | None = None,
) -> Captured:
    """What a call gives to scores and masks, and the lengths of its sequences.

    Raises
    ------
    TypeError, ValueError
        If an argument is not of the kind that it has to be, or a function is no expression.
    """
    if not lengths and score is mask is arrays is bias is alibi_slopes is seed is None:
        return NOTHING
    kept = mask if isinstance(mask, TileMask) else None
    if kept is not None:
        mask, arrays = kept.mask, _with_those_of(kept, arrays)
    if arrays is not None:
        _check_names(arrays)
    if isinstance(mask, KeyRanges):
        arrays = {**(arrays or {}), START: mask.start, STOP: mask.stop}
        mask = None
        if lengths and "cu_seqlens_q" in lengths:  # where the rows of each sequence begin that ranges are of
            arrays[FIRST] = lengths["cu_seqlens_q"]
    array_of_mask = None
    if not (mask is None or isinstance(mask, (str, Expression)) or callable(mask)):
        array_of_mask, mask = mask, None
    operands = lengths or {}
    if not bias is array_of_mask is alibi_slopes is seed is None:
        operands = dict(operands)
        for name, x in zip(OPERANDS, (bias, array_of_mask, alibi_slopes, seed)):
            if x is not None:
                operands[name] = x
    named = arrays or {}
    if len(named) > 1:
        named = dict(sorted(named.items(), key=_name))  # in one order, however a dict was made
    return Captured(operands, named, score, mask, kept)


_name = operator.itemgetter(0)


def _check_names(arrays: Any) -> None:
    """Refuse what expressions cannot read by name."""
    if type(arrays) is not dict and not isinstance(arrays, Mapping):
        raise TypeError(f"arrays: expected None or a dict of arrays by their names, got {shown(arrays)}")
    for name in arrays:
        if not isinstance(name, str):
            raise TypeError(f"arrays: expected names that are strings, got {shown(name)}")
        if name in OWN_NAMES:
            raise ValueError(f"arrays: expected names that are identifiers, got {shown(name)}")


def all_lengths(given: dict[str, Any]) -> dict[str, Any]:
    """What a plan is called with besides the arguments that it names, which has to be lengths of sequences."""
    if not given.keys() <= LENGTHS_BY_NAME:
        name = next(name for name in given if name not in LENGTHS_BY_NAME)
        raise TypeError(f"{name}: expected an argument of a plan; beside those that it names there are {', '.join(LENGTHS)}")
    return {name: given[name] for name in LENGTHS if name in given and given[name] is not None}


def taken_lengths(options: dict[str, Any]) -> dict[str, Any]:
    """Those of `LENGTHS` that a call gives, taken out of its options, in their order."""
    if LENGTHS_BY_NAME.isdisjoint(options):
        return {}
    return {name: x for name in LENGTHS if name in options and (x := options.pop(name)) is not None}


def _with_those_of(kept: TileMask, arrays: Any) -> Any:
    """The arrays of a call, and those that its mask has brought."""
    if not kept.arrays or (arrays is not None and not isinstance(arrays, Mapping)):
        return arrays
    for name, x in kept.arrays.items():
        if arrays and name in arrays and arrays[name] is not x:
            raise ValueError(f"{label(name)}: expected the array that the TileMask has by this name, or none, got another one")
    return {**kept.arrays, **(arrays or {})}


def layouts_of(descriptions: tuple[Any, ...], operands: tuple[str, ...], arrays: tuple[str, ...]) -> tuple[dict[str, Layout], ...]:
    """The layouts of operands and of arrays, by their names, from the descriptions of both."""
    layouts = [array_views.layout_of(d, name) for d, name in zip(descriptions, (*operands, *map(label, arrays)))]
    return dict(zip(operands, layouts)), dict(zip(arrays, layouts[len(operands) :]))


def _traced(make: Callable[..., Expression], given: Any, layouts: dict[str, Layout]) -> Any:
    return make(given, declared(layouts)) if callable(given) else given


def _view(x: Any, name: str) -> array_views.Array:
    if name == "seed":
        return _seed(x)
    view = operand(x, name)
    return _end_of_ranges(view, name) if name in (START, STOP) else view


def _end_of_ranges(view: array_views.Array, name: str) -> array_views.Array:
    """An end of ranges; a single one has no axes. Numbers on a device cannot be checked without waiting for them."""
    if isinstance(view, numpy.ndarray) and view.dtype.kind in "iu" and view.size and not numpy.can_cast(view.dtype, numpy.int32):
        least, greatest = int(view.min()), int(view.max())
        if least < LEAST or greatest > GREATEST:
            raise ValueError(f"{name}: expected integers of 32 bits, got {least if least < LEAST else greatest}")
    return view.reshape(()) if view.size == 1 else view


def _seed(x: Any) -> array_views.Array:
    """Seed and offset as two numbers of 64 bits. Those on a device cannot be checked without waiting for them."""
    if isinstance(x, (numpy.ndarray, tuple, list, Number)):
        if type(x) is numpy.ndarray and x.dtype == numpy.uint64 and x.shape == (2,):
            make_seed(x.tolist())
            return x
        return numpy.array(make_seed(x), numpy.uint64)
    view = array_views.view(x, "seed")
    if view.dtype != numpy.uint64 or view.shape != (2,):
        raise TypeError(f"seed: expected an array of uint64 of shape (2,), seed and offset, got {view.dtype} of shape {view.shape}")
    return view


def _value(name: str, view: numpy.ndarray) -> list[int]:
    """What a kernel is told of an operand that is a value: a number of 32 bits, or a seed's two of 64."""
    if name == "seed":
        return [int(number) for number in view]
    if view.dtype.name not in ITEMSIZE:
        return [0]  # which is refused when it is planned
    if view.dtype.kind in "biu":
        return [int(view) & 0xFFFFFFFF]
    with numpy.errstate(over="ignore"):  # infinity is what float32 has for it
        return [int(view.astype(numpy.float32).view(numpy.uint32))]


def _is_value(name: str, view: array_views.Array) -> bool:
    return isinstance(view, numpy.ndarray) and (name == "seed" or view.shape == ())
