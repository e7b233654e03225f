"""Values of options, most of them wrong: what each is, whether it has to be accepted, and what it means."""

from __future__ import annotations

import decimal
import fractions
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy

from ...problem.key_ranges import KeyRanges
from ...problem.lengths import LENGTHS
from .draw import Draw

UNKNOWN = "unknown"  # of a meaning: nobody has decided


@dataclass(frozen=True, eq=False)
class Value:
    """A value of an argument.

    Parameters
    ----------
    label : str
        What it is, in words; it may not be able to say so itself.
    value : object
    ok : bool or None
        Whether it has to be accepted; None where either is right.
    means : object
        The plain value that it stands for.
    twin : object
        A value of another type that Python calls equal, and that has a meaning: what is kept for it must not serve this one.
    """

    label: str
    value: Any
    ok: bool | None = False
    means: Any = UNKNOWN
    twin: Any = UNKNOWN


class Hostile:
    """Whatever is asked of it, it raises."""

    def _raise(self, *_: Any) -> Any:
        raise RuntimeError("hostile")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __repr__ = __str__ = __format__ = _raise
    __float__ = __int__ = __index__ = __bool__ = __len__ = __iter__ = __getitem__ = __abs__ = __neg__ = _raise


class HostileStr(Hostile, str):
    """A string with the same manners."""


class HostileFloat(Hostile, float):
    """A number."""


class HostileInt(Hostile, int):
    """An integer."""


class HostileTuple(Hostile, tuple):
    """A pair."""


class Unreadable:
    """An object that cannot be printed."""

    def __repr__(self) -> str:
        raise KeyError("unreadable")


class EqualToAll:
    """An object that says it is whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash(True)


class UnhashableFloat(float):
    """A number that cannot be a key."""

    __hash__ = None


bool_ = type("bool_", (), {})  # called like NumPy's, and is not it
Pair = namedtuple("Pair", "left right")


def _anything() -> list[Value]:
    """What no option takes."""
    return [
        Value("bytes", b"x"),
        Value("an object", object()),
        Value("an empty list", []),
        Value("a dict", {}),
        Value("a set", {1}),
        Value("a function", len),
        Value("a class", int),
        Value("the class of this option", float),
        Value("a generator", (i for i in range(2))),
        Value("Ellipsis", ...),
        Value("NotImplemented", NotImplemented),
        Value("a complex number", 1 + 2j),
        Value("an array of no axes", numpy.array(0.5)),
        Value("an array of one element", numpy.array([1.0])),
        Value("an array", numpy.ones(3)),
        Value("an array of objects", numpy.array([None, "x"], object)),
        Value("a masked number", numpy.ma.masked),
        Value("a date", numpy.datetime64("2020-01-01")),
        Value("a void", numpy.void(b"12")),
        Value("a hostile object", Hostile()),
        Value("a hostile string", HostileStr("hostile")),
        Value("an unreadable object", Unreadable()),
        Value("a list of an unreadable object", [Unreadable()]),
        Value("an object equal to all", EqualToAll()),
        Value("an object of a class called bool_", bool_()),
        Value("a string that is no Unicode", "\udcff"),
        Value("a string with NUL", "auto\0"),
        Value("a long string", "x" * 5000),
        Value("a nested list", [[[]]]),
        Value("an exception", ValueError("x")),
    ]


def _real() -> list[Value]:
    """What a number may be given as, and what not."""
    return [
        Value("None", None, True, None),
        Value("an integer", 2, True, 2.0),
        Value("a float", 0.5, True, 0.5),
        Value("a numpy.float32", numpy.float32(0.5), True, 0.5),
        Value("a numpy.float16", numpy.float16(0.5), True, 0.5),
        Value("a numpy.float64", numpy.float64(0.5), True, 0.5),
        Value("a numpy.int64", numpy.int64(2), True, 2.0),
        Value("a numpy.longdouble", numpy.longdouble(0.5), None, 0.5),
        Value("a Fraction", fractions.Fraction(1, 2), True, 0.5),
        Value("a number that cannot be a key", UnhashableFloat(0.5), True, 0.5),
        Value("a Decimal", decimal.Decimal("0.5"), None, 0.5),
        Value("a Decimal NaN", decimal.Decimal("NaN")),
        Value("a signalling NaN", decimal.Decimal("sNaN")),
        Value("True", True, twin=1.0),
        Value("False", False),
        Value("a numpy.bool", numpy.True_),
        Value("a string", "0.5"),
        Value("NaN", float("nan")),
        Value("infinity", float("inf")),
        Value("minus infinity", float("-inf")),
        Value("a numpy.float32 NaN", numpy.float32("nan")),
        Value("a numpy.float16 infinity", numpy.float16("inf")),
        Value("10**400", 10**400),
        Value("an integer of 5,000 digits", 10**5000),
        Value("a negative integer of 5,000 digits", -(10**5000)),
        Value("a large Fraction", fractions.Fraction(10**400)),
        Value("a longdouble that is no double", numpy.longdouble("1e4000")),
        Value("1e39, which is no float32", 1e39, None),
        Value("1e-46, which float32 does not tell from 0", 1e-46, None),
        Value("1e-320", 1e-320, None),
        Value("a hostile float", HostileFloat(0.5)),
        Value("a complex of no imaginary part", complex(1)),
    ]


def _flag() -> list[Value]:
    return [
        Value("True", True, True, True),
        Value("False", False, True, False),
        Value("a numpy.bool", numpy.True_, True, True),
        Value("1", 1, twin=True),
        Value("0", 0, twin=False),
        Value("1.0", 1.0, twin=True),
        Value("None", None),
        Value("a string", "yes"),
        Value("an array of True", numpy.array(True)),
        Value("numpy.int64(1)", numpy.int64(1), twin=True),
    ]


def _choices(*right: str, none: bool = False) -> list[Value]:
    values = [Value(repr(word), word, None, word) for word in right]
    values += [Value("a numpy.str_", numpy.str_(right[0]), None, right[0])]
    values += [Value("None", None, True, None) if none else Value("None", None)]
    wrong: tuple[Any, ...] = (right[0].upper() + "x", right[0] + " ", "", "none", right[0].encode(), (right[0],), [right[0]], 1.5)
    return values + [Value(repr(word), word) for word in wrong]


def _ends(*ends: Any) -> list[Value]:
    """Windows with a wrong end, on either side."""
    found = []
    for label, end, twin in ends:
        for pair, at in (((end, 2), "left"), ((1, end), "right")):
            own = UNKNOWN if twin is UNKNOWN else tuple(twin if x is end else x for x in pair)
            found.append(Value(f"{label} at its {at}", pair, twin=own))
    return found


def _window() -> list[Value]:
    return [
        Value("None", None, True, None),
        Value("a pair", (1, 2), True, (1, 2)),
        Value("a list", [1, 2], True, (1, 2)),
        Value("open ends", (None, -1), True, (None, None)),
        Value("integers of NumPy", (numpy.int64(1), numpy.uint8(2)), True, (1, 2)),
        Value("a named pair", Pair(1, 2), True, (1, 2)),
        Value("10**400", (10**400, 0), None, (1000, 0)),
        Value("an integer of 5,000 digits", (0, 10**5000), None, (0, 1000)),
        Value("2**63", (2**63, 2**63 - 1), None, (1000, 1000)),
        Value("a negative integer of 5,000 digits", (0, -(10**5000))),
        Value("one end", (1,)),
        Value("three ends", (1, 2, 3)),
        Value("an integer", 5),
        Value("a string", "12"),
        Value("a range", range(2)),
        Value("an array", numpy.array([1, 2]), None, (1, 2)),
        Value("a set", frozenset((1, 2))),
        Value("a dict", {1: 2, 3: 4}),
        Value("-2", (-2, 0)),
        Value("a hostile integer", (HostileInt(1), 2), None, (1, 2)),
        Value("a hostile pair", HostileTuple((1, 2))),
        Value("a nested pair", ((1, 2), 3)),
        *_ends(
            ("True", True, 1),
            ("numpy.True_", numpy.True_, 1),
            ("1.0", 1.0, 1),
            ("a Fraction", fractions.Fraction(1), 1),
            ("a Decimal", decimal.Decimal(1), 1),
            ("a numpy.float64", numpy.float64(1), 1),
            ("False", False, 0),
            ("NaN", float("nan"), UNKNOWN),
            ("infinity", float("inf"), UNKNOWN),
            ("a string", "1", UNKNOWN),
            ("a hostile object", Hostile(), UNKNOWN),
            ("an unreadable object", Unreadable(), UNKNOWN),
            ("an object equal to all", EqualToAll(), 1),
            ("an array", numpy.array(1), UNKNOWN),
            ("a list", [], UNKNOWN),
        ),
    ]


def _prefix() -> list[Value]:
    return [
        Value("an integer", 2, None, 2),  # but not with a left end of a window
        Value("0", 0, True, 0),
        Value("an integer of NumPy", numpy.int64(2), None, 2),
        Value("more than all keys", 10**400, None, 1000),
        Value("a negative number", -1),
        Value("True", True, twin=1),
        Value("2.0", 2.0, twin=2),
        Value("a pair", (1, 2)),
        Value("an array", numpy.array(2), twin=2),
        Value("a hostile integer", HostileInt(2), None, 2),
        Value("a hostile object", Hostile()),
    ]


def _of_scores() -> dict[str, list[Value]]:
    """What comes to scores, in values that are wrong or change nothing: what the others mean, tests of scores judge."""
    nothing, thing = Value("None", None, True, None), Value("an object", object())
    array = Value("an array of integers", numpy.ones(3, numpy.int32))
    return {
        "score": [nothing, thing, Value("no name", "zzz"), Value("half a sum", "score +"), Value("bytes", b"score")],
        "mask": [
            *(nothing, thing, Value("no name", "zzz"), Value("an integer", "q_idx"), array, Value("a string of NUL", "\0")),
            *(Value("all keys", KeyRanges(0, 2**20), None, None), Value("ranges of floats", KeyRanges(0, 1.5))),
            *(Value("ranges of one axis", KeyRanges(numpy.ones(2, int), 3)), Value("ranges of anything", KeyRanges(thing, None))),
        ],
        "arrays": [nothing, thing, Value("a list", [1]), Value("3", 3), Value("no name", {1: 2.0})],
        "bias": [nothing, thing, array, Value("a string", "x"), Value("a hostile object", Hostile())],
        "alibi_slopes": [nothing, thing, array, Value("a string", "x"), Value("True", True)],
        "seed": [
            *(nothing, thing, Value("an integer", 1, None), Value("-1", -1), Value("2**64", 2**64), Value("1.5", 1.5)),
            *(Value("True", True, twin=1), Value("three numbers", (1, 2, 3)), Value("a large offset", (1, 2**32))),
        ],
        "dropout": [
            *(Value("0", 0, True, 0.0), Value("0.0", 0.0, True, 0.0), Value("0.5, which needs a seed", 0.5, None)),
            *(Value("1.0", 1.0), Value("-0.1", -0.1), Value("NaN", float("nan")), Value("True", True), Value("a string", "0")),
        ],
        "wrt": [
            *(Value("()", (), True, ()), thing, Value("True", True), Value("3", 3), Value("what is not there", "zzz")),
            *(Value("a name that is none", ("zzz",)), Value("a tuple of numbers", (1,))),
        ],
    }


def _of_lengths() -> dict[str, list[Value]]:
    """What lengths of sequences may be: wrong for all shapes, or right for some, which tests of lengths judge."""
    nothing, thing = Value("None", None, True, None), Value("an object", object())
    wrong = [
        *(nothing, thing, Value("a string", "3"), Value("a hostile object", Hostile()), Value("floats", numpy.ones(2))),
        *(Value("one uint32", numpy.ones(1, numpy.uint32)), Value("booleans", numpy.ones(2, bool))),
        *(Value("three axes", numpy.ones((1, 1, 1), int)), Value("an array without axes", numpy.array(1))),
        # Of which a plan knows nothing.
        *(Value("negative numbers", numpy.array([-1, -2]), None), Value("numbers of 2**40", numpy.full(2, 2**40), None)),
        Value("many numbers", numpy.full(77, 2), None),
    ]
    lengths = [*wrong, Value("no elements", numpy.ones(0, int)), Value("a length", numpy.ones(1, int), None)]
    offsets = [*wrong, Value("one offset", numpy.zeros(1, int)), Value("offsets that fall", numpy.array([0, 3, 1]), None)]
    offsets += [Value("a first offset of 1", numpy.array([1, 2]), None), Value("offsets", numpy.array([0, 1]), None)]
    pages = [*wrong, Value("pages without seqlens_kv", numpy.zeros((1, 1), int))]
    found = dict.fromkeys(("seqlens_q", "seqlens_kv", "cache_batch_idx"), lengths)
    return found | dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), offsets) | {"pages": pages}


def values_of(option: str, backward: bool) -> list[Value]:
    """What an option may be called with: right and wrong values that are meant for it."""
    if option in ("scale", "softcap"):
        values = _real()
        if option == "softcap":
            values += [Value("0", 0.0), Value("a negative number", -1.5), Value("-0.0", -0.0)]
        return values
    kernels = ("bwd_v2", "bwd_hopper") if backward else ("fwd_v2", "fwd_v1", "fwd_hopper")
    others = {
        "layout": _choices("bhsd"),
        "causal": [*_choices("bottom_right", "top_left"), *_flag()],
        "window": _window(),
        "prefix": _prefix(),
        "precision": _choices("ieee", "tf32", none=True),
        "algorithm": _choices("auto", "v2", "v1"),
        "backend": [*_choices("auto", "numpy"), Value("'cuda' for host memory", "cuda")],
        "arch": [
            *_choices("80", "75", "90a", none=True),
            Value("an integer", 80, None, "80"),
            Value("no architecture", "81"),
            Value("a float", 80.0),
        ],
        "kernel": [*_choices(*kernels, none=True), Value("the other direction's", "fwd_v2" if backward else "bwd_v2")],
    }
    others |= _of_scores() | _of_lengths()
    return others[option] if option in others else _flag()


def draw_value(draw: Draw, option: str, backward: bool) -> Value:
    """A value for an option, most often a wrong one."""
    if draw.chance(0.3) and option not in (*_of_scores(), *LENGTHS):  # of which some take a dict, a function or an array
        return draw.one(_anything())
    return draw.one(values_of(option, backward))
