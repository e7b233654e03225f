"""The values of an expression, with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy
from numpy.typing import ArrayLike, DTypeLike

from .tree import Apply, Literal, Name, Node, Read, fold

FUNCTIONS: dict[str, Callable[..., numpy.ndarray]] = {
    "+": numpy.add,
    "-": numpy.subtract,
    "*": numpy.multiply,
    "/": numpy.divide,
    "//": numpy.floor_divide,
    "%": numpy.remainder,
    "**": lambda base, power: numpy.power(base, power.astype(base.dtype)),
    "neg": numpy.negative,
    "abs": numpy.abs,
    "min": numpy.fmin,
    "max": numpy.fmax,
    "<": numpy.less,
    "<=": numpy.less_equal,
    "==": numpy.equal,
    "!=": numpy.not_equal,
    "and": numpy.logical_and,
    "or": numpy.logical_or,
    "not": numpy.logical_not,
    "&": numpy.bitwise_and,
    "|": numpy.bitwise_or,
    "^": numpy.bitwise_xor,
    "~": numpy.invert,
    "<<": numpy.left_shift,
    ">>": numpy.right_shift,
    "where": numpy.where,
    "exp": numpy.exp,
    "exp2": numpy.exp2,
    "log": numpy.log,
    "log2": numpy.log2,
    "sqrt": numpy.sqrt,
    "rsqrt": lambda x: 1 / numpy.sqrt(x),
    "tanh": numpy.tanh,
    "sigmoid": lambda x: 1 / (1 + numpy.exp(-x)),
    "sin": numpy.sin,
    "cos": numpy.cos,
    "floor": numpy.floor,
}


def evaluate(tree: Node, values: Mapping[str, ArrayLike], arrays: Mapping[str, ArrayLike], dtype: DTypeLike) -> numpy.ndarray:
    """The values of a tree, element by element.

    Both branches of a condition are evaluated. So an index out of range is no error, for a condition may hide what is read there:
    it is clipped into range, a negative one to 0, and of an array without elements 0 is read. A ``min`` or ``max`` of a number and
    NaN is the number, as of `fmin`. An int divided by 0 is 0.

    Parameters
    ----------
    tree : Node
        What to evaluate.
    values : mapping
        Of the names that it uses, arrays that broadcast against each other.
    arrays : mapping
        Of the declared arrays that it reads.
    dtype : dtype
        Of floats. An int has 64 bits.

    Returns
    -------
    array
        Of the shape that these values broadcast to.
    """
    of_kind = {"float": numpy.dtype(dtype), "int": numpy.dtype("int64"), "bool": numpy.dtype("bool")}

    def value(node: Node, args: list[numpy.ndarray]) -> numpy.ndarray:
        match node:
            case Literal():
                made = node.value
            case Name():
                made = values[node.name]
            case Read():
                made = _element(numpy.asarray(arrays[node.name]), args)
            case Apply(op="float" | "int"):
                made = numpy.trunc(args[0]) if node.op == "int" and args[0].dtype.kind == "f" else args[0]
            case Apply():
                made = FUNCTIONS[node.op](*args)
        return numpy.asarray(made).astype(of_kind[node.kind], copy=False)

    with numpy.errstate(all="ignore"):
        return fold(tree, value)


def _element(array: numpy.ndarray, indices: list[numpy.ndarray]) -> numpy.ndarray:
    if not indices:
        return array
    if array.size == 0:
        return numpy.zeros(numpy.broadcast_shapes(*(index.shape for index in indices)), array.dtype)
    return array[tuple(index.clip(0, extent - 1) for index, extent in zip(indices, array.shape))]
