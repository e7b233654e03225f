"""From a Python function to a tree: it is called once, with stand-ins that note what is done to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import NoReturn

import numpy

from ...errors import shown
from .operations import Mistake, apply, limited, literal
from .tree import Node
from .vocabulary import Declaration, Vocabulary, bare, read

UFUNCS = {
    **{name: name for name in ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sin", "cos", "floor")},
    "absolute": "abs",
    "fabs": "abs",
    "minimum": "min",
    "maximum": "max",
    "fmin": "min",
    "fmax": "max",
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "power": "**",
    "negative": "neg",
    "positive": "pos",
    "less": "<",
    "less_equal": "<=",
    "greater": ">",
    "greater_equal": ">=",
    "equal": "==",
    "not_equal": "!=",
    "logical_and": "and",
    "logical_or": "or",
    "logical_not": "not",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
    "invert": "~",
    "left_shift": "<<",
    "right_shift": ">>",
}


class WrongType(TypeError):
    """A `Mistake` in what Python calls a type."""


def trace(function: Callable[..., object], declarations: Iterable[Declaration], option: str) -> Node:
    """The tree of a function.

    Parameters
    ----------
    function : callable
        Its parameters are names of the language and of declared arrays, any of them in any order; others need a default. What it
        returns is the expression. What it raises is not caught.
    declarations, option
        As `parse` takes them.
    """
    vocabulary = Vocabulary.of(option, declarations)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise TypeError(f"{option}: expected a function whose parameters have names, got {shown(function)}") from None
    try:
        bound = inspect.BoundArguments(signature, _arguments(signature, vocabulary))
        bound.apply_defaults()
        result = function(*bound.args, **bound.kwargs)
        if not isinstance(result, (Traced, bool, int, float, numpy.generic)):
            raise WrongType(f"expected a function that returns an expression, got one that returns {shown(result)}")
        return vocabulary.finish(_tree(result))
    except Mistake as mistake:
        raise ValueError(f"{option}: {mistake}") from mistake
    except WrongType as mistake:
        raise TypeError(f"{option}: {mistake}") from mistake


def _arguments(signature: inspect.Signature, vocabulary: Vocabulary) -> dict[str, Traced | TracedArray]:
    arguments: dict[str, Traced | TracedArray] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise Mistake("a function whose parameters have names", f"'{parameter}'")
        try:
            meaning = vocabulary.meaning(name)
        except Mistake:
            if parameter.default is parameter.empty:
                raise
        else:
            arguments[name] = TracedArray(meaning) if isinstance(meaning, Declaration) else Traced(meaning)
    return arguments


def _tree(value: object) -> Node:
    """The tree of an argument of an operation: of a stand-in, or of a number."""
    if isinstance(value, Traced):
        return value.tree
    if isinstance(value, TracedArray):
        raise bare(value.declaration)
    if isinstance(value, numpy.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, (bool, numpy.bool_)):
        return literal(bool(value))
    if isinstance(value, Integral):
        return literal(int(value))
    if isinstance(value, Real):
        return literal(float(value))
    raise WrongType(f"expected numbers, parameters and what is made of them, got {shown(value)}")


def _traced(op: str, *args: object) -> Traced:
    return Traced(limited(apply(op, *map(_tree, args))))


def _unary(op: str) -> Callable[[object], Traced]:
    return lambda self: _traced(op, self)


def _binary(op: str) -> Callable[[object, object], Traced]:
    return lambda self, other: _traced(op, self, other)


def _reflected(op: str) -> Callable[[object, object], Traced]:
    return lambda self, other: _traced(op, other, self)


class Traced:
    """A stand-in for the value of an expression."""

    __slots__ = ("tree",)

    def __init__(self, tree: Node):
        self.tree = tree

    __add__, __radd__ = _binary("+"), _reflected("+")
    __sub__, __rsub__ = _binary("-"), _reflected("-")
    __mul__, __rmul__ = _binary("*"), _reflected("*")
    __truediv__, __rtruediv__ = _binary("/"), _reflected("/")
    __floordiv__, __rfloordiv__ = _binary("//"), _reflected("//")
    __mod__, __rmod__ = _binary("%"), _reflected("%")
    __pow__, __rpow__ = _binary("**"), _reflected("**")
    __and__, __rand__ = _binary("&"), _reflected("&")
    __or__, __ror__ = _binary("|"), _reflected("|")
    __xor__, __rxor__ = _binary("^"), _reflected("^")
    __lshift__, __rlshift__ = _binary("<<"), _reflected("<<")
    __rshift__, __rrshift__ = _binary(">>"), _reflected(">>")
    __lt__, __le__, __gt__, __ge__ = _binary("<"), _binary("<="), _binary(">"), _binary(">=")
    __eq__, __ne__ = _binary("=="), _binary("!=")  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]
    __neg__, __pos__, __abs__, __invert__ = _unary("neg"), _unary("pos"), _unary("abs"), _unary("~")

    def __bool__(self) -> bool:
        raise WrongType(
            "expected numpy.where(c, a, b) for 'if', & | ~ for 'and', 'or', 'not', numpy.minimum and numpy.maximum for min() and "
            "max(), and (a <= b) & (b < c) for a <= b < c, got bool() of an expression"
        )

    def __array__(self, *_: object, **options: object) -> NoReturn:
        raise WrongType(
            "expected parameters for the arrays that a function reads, whose values are given as arrays={'t': t}, got an array or "
            "a list from outside"
        )

    __index__ = __array__  # lists ask for one, and NumPy for an array

    def __float__(self) -> NoReturn:
        raise WrongType("expected numpy.exp for math.exp, and so on, and float_() for float(), got float() of an expression")

    def __int__(self) -> NoReturn:
        raise WrongType("expected int_() for int(), got int() of an expression")

    def __repr__(self) -> str:
        return f"<{self.tree}>"

    def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: object, **options: object) -> Traced:
        if method != "__call__" or options or ufunc.__name__ not in UFUNCS:
            raise WrongType(f"expected one of the functions of the language, got numpy.{ufunc.__name__}")
        return _traced(UFUNCS[ufunc.__name__], *inputs)

    def __array_function__(self, function: Callable[..., object], types: object, args: tuple, options: dict) -> Traced:
        if options or function not in (numpy.where, numpy.clip):
            raise WrongType(f"expected one of the functions of the language, got numpy.{function.__name__}")
        return _traced(function.__name__, *args)


class TracedArray:
    """A stand-in for a declared array, of which indices make an element."""

    __slots__ = ("declaration",)
    __iter__ = None  # Python would try indices from 0 on

    def __init__(self, declaration: Declaration):
        self.declaration = declaration

    def __getitem__(self, indices: object) -> Traced:
        indices = indices if isinstance(indices, tuple) else (indices,)
        return Traced(limited(read(self.declaration, [_tree(index) for index in indices])))

    def __repr__(self) -> str:
        return self.declaration.name


# The functions of the language for what is traced, besides `abs`, which Python has. Names of its types have an underscore.


def where(condition: object, then: object, otherwise: object) -> Traced:
    """One of two values."""
    return _traced("where", condition, then, otherwise)


def minimum(*values: object) -> Traced:
    """The least of two or more values."""
    return _traced("min", *values)


def maximum(*values: object) -> Traced:
    """The greatest of two or more values."""
    return _traced("max", *values)


def clip(value: object, low: object, high: object) -> Traced:
    """A value within bounds."""
    return _traced("clip", value, low, high)


def float_(value: object) -> Traced:
    """A value as a float."""
    return _traced("float", value)


def int_(value: object) -> Traced:
    """A value as an int, towards zero."""
    return _traced("int", value)


exp, exp2, log, log2 = _unary("exp"), _unary("exp2"), _unary("log"), _unary("log2")
sqrt, rsqrt = _unary("sqrt"), _unary("rsqrt")
tanh, sigmoid = _unary("tanh"), _unary("sigmoid")
sin, cos, floor = _unary("sin"), _unary("cos"), _unary("floor")
