"""What becomes of scores besides scale, softcap, the mask of one interval and sinks: a frozen `Scores`.

The order is: scale, softcap, score expression, bias, ALiBi, masks, softmax with sinks, dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError, shown
from .dropout import Dropout, Place
from .expression.entry import Expression, mask_expression, score_expression
from .key_ranges import FIRST, OWN_NAMES, START, STOP, check_ranges, expression_of, squeezed
from .layout import FLOATS, INTEGERS, Layout
from .lengths import Lengths

if TYPE_CHECKING:
    from .expression.tree import Read
    from .expression.vocabulary import Declaration

OPERANDS = ("bias", "mask", "alibi_slopes", "seed")  # arrays that have an option of their own


@dataclass(frozen=True, slots=True)
class Scores:
    """What becomes of scores. Nothing, by default.

    Parameters
    ----------
    score, mask : Expression or None
        Of the pairs of a query and a key.
    bias : Layout or None
        What is added, seen as `(*batch, heads, len_q, len_kv)`.
    mask_array : Layout or None
        Which pairs take part, seen so.
    alibi_slopes : Layout or None
        Seen as `(*batch, heads)`.
    arrays : tuple of (str, Layout)
        What the expressions read. A scalar has no axes; one in host memory is told by its value.
    dropout : Dropout or None
    operands : tuple of str
        Those of `OPERANDS` that a call has.
    seed_on_device : bool
        Whether the seed is read where it is when a kernel runs, and not told by its value.
    free_axes : tuple of str
        The coordinates of which an axis of an array that one of them indexes may have any number: places in packed sequences.
    place : Place or None
        Where the pairs are that dropout numbers; None is from 0 on.
    """

    score: Expression | None = None
    mask: Expression | None = None
    bias: Layout | None = None
    mask_array: Layout | None = None
    alibi_slopes: Layout | None = None
    arrays: tuple[tuple[str, Layout], ...] = ()
    dropout: Dropout | None = None
    operands: tuple[str, ...] = ()
    seed_on_device: bool = False
    free_axes: tuple[str, ...] = ()
    place: Place | None = None

    def __bool__(self) -> bool:
        return any(x is not None for x in (self.score, self.mask, self.bias, self.mask_array, self.alibi_slopes, self.dropout))

    def with_softcap_apart(self) -> tuple[float | None, Scores]:
        """The softcap that the expression is, and the scores without it; None beside other terms, with which it is no faster."""
        if self.score is None or self.bias is not None or self.alibi_slopes is not None:
            return None, self
        from .expression.capped import softcap_of  # late, as in `entry`

        softcap = softcap_of(self.score.tree)
        return softcap, self if softcap is None else replace(self, score=None)

    def __str__(self) -> str:
        from .expression.derivative import derivative  # late, as in `entry`
        from .expression.tree import SCORE

        lines = [f"score: {self.score}", f"  its derivative: {derivative(self.score.tree, SCORE)}"] if self.score else []
        lines += [f"  with respect to {read}: {derivative(self.score.tree, read)}" for read in self.differentiable]
        lines += [f"mask: {self.mask}"] if self.mask else []
        named = ("bias", self.bias), ("mask", self.mask_array), ("alibi_slopes", self.alibi_slopes)
        lines += [f"{name}: {layout.dtype}, shape {layout.shape}, strides {layout.strides}" for name, layout in named if layout]
        lines += [str(self.dropout)] if self.dropout else []
        return "\n".join(lines)

    @property
    def layouts(self) -> dict[str, Layout]:
        """The arrays that have the batch axes of the problem, by the names that kernels have for them."""
        found = {"bias": self.bias, "pair_mask": self.mask_array, "alibi_slopes": self.alibi_slopes}
        return {name: layout for name, layout in found.items() if layout is not None}

    @property
    def changes_scores(self) -> bool:
        """Whether there is anything but masks and dropout."""
        return any(x is not None for x in (self.score, self.bias, self.alibi_slopes))

    @property
    def only_alibi(self) -> bool:
        """Whether nothing else changes scores. It lowers none of the keys that are near, so no row has large scores alone."""
        return self.alibi_slopes is not None and self.score is None and self.bias is None

    @property
    def masks_pairs(self) -> bool:
        """Whether pairs are masked one by one."""
        return self.mask is not None or self.mask_array is not None

    @property
    def ranges(self) -> int:
        """How many ranges of keys the mask has for each query; 0 if it is no `KeyRanges`."""
        if self.mask is None or START not in self.captured:
            return 0
        from .expression.tree import Read, walk  # late, as in `entry`

        return sum(isinstance(node, Read) and node.name == START for node in walk(self.mask.tree))

    @property
    def of_pairs(self) -> bool:
        """Whether anything is asked for each pair before the softmax."""
        return self.changes_scores or self.masks_pairs

    @property
    def captured(self) -> tuple[str, ...]:
        """The names of what expressions read."""
        return tuple(name for name, _ in self.arrays)

    @property
    def names(self) -> tuple[str, ...]:
        """What messages call the arrays of a call that scores read, in order."""
        return (*self.operands, *map(label, self.captured))

    @property
    def differentiable(self) -> tuple[Read, ...]:
        """The reads of the score that have a gradient: those of floats."""
        if self.score is None:
            return ()
        from .expression.reads import reads

        return tuple(read for read in reads(self.score.tree) if read.kind == "float")

    @property
    def gradients(self) -> tuple[str, ...]:
        """What has a gradient, by the names that options and arrays have. A name that both have is that of the array."""
        names = dict.fromkeys(read.name for read in self.differentiable)
        own = ("bias", self.bias), ("alibi_slopes", self.alibi_slopes)
        return (*names, *(name for name, layout in own if layout is not None and name not in self.captured))


def kind_of(name: str, dtype: str) -> str:
    """The kind of the elements of an array that expressions read."""
    if dtype == "bool":
        return "bool"
    if dtype in INTEGERS:
        return "int"
    if dtype in FLOATS:
        return "float"
    raise TypeError(f"{label(name)}: expected floats, integers or bools, got {dtype}")


def label(name: str) -> str:
    """What messages call an array of expressions, or one of those of ranges."""
    return name if name in OWN_NAMES else f"arrays[{name!r}]"


def make_scores(
    *,
    score: str | Expression | None,
    mask: str | Expression | None,
    operands: dict[str, Layout],
    arrays: dict[str, Layout],
    dropout: Dropout | None,
    dtype: str,
    batch: tuple[int, ...],
    heads_q: int,
    heads_kv: int,
    len_q: int,
    len_kv: int,
    device: int | None,
    lengths: Lengths | None = None,
    place: Place | None = None,
) -> Scores:
    """Check what was given for scores.

    Parameters
    ----------
    score, mask : str or Expression or None
        As given, or traced.
    operands : dict of str to Layout
        Those of `OPERANDS` that are arrays.
    arrays : dict of str to Layout
        What expressions read, and of a mask that is ranges, `START` and `STOP`, and `FIRST` if queries are packed.
    dropout : Dropout or None
    dtype : str
        Of q.
    batch, heads_q, heads_kv, len_q, len_kv
        Of the problem.
    device : int or None
        Where its arrays are.
    lengths : Lengths or None
        Those of sequences, where these differ.
    place : Place or None
        Where the pairs are that dropout numbers.

    Returns
    -------
    Scores

    Raises
    ------
    TypeError, ValueError
    """
    declarations = declared(arrays)
    score = as_expression(score_expression, score, declarations)
    mask = as_expression(mask_expression, mask, declarations)
    ranges = {name: arrays[name] for name in (START, STOP) if name in arrays}
    if ranges:
        packed = lengths is not None and lengths.packed_q
        of_rows = () if packed else batch
        check_ranges(ranges, of_rows, heads_q, len_q)
        mask = expression_of(ranges, of_rows, packed)
        arrays = arrays | {name: squeezed(layout) for name, layout in ranges.items()}
        if packed:  # without where the last one ends
            arrays[FIRST] = replace(arrays[FIRST], shape=batch)
    expressions = [expression for expression in (score, mask) if expression is not None]
    used = {declaration.name for expression in expressions for declaration in expression.declarations}
    for name in arrays:
        if name not in used and name not in OWN_NAMES:
            where = "the score or the mask, which do not" if expressions else "a score or a mask, of which there is none"
            raise ValueError(f"{label(name)}: expected an array that is read by {where}")
    for name, layout in arrays.items():
        if name != FIRST:  # as lengths it may be in host memory, and is copied
            _check_device(label(name), layout, device)
    sizes = {"b": _product(batch), "h": heads_q, "h_kv": heads_kv, "q_idx": len_q, "kv_idx": len_kv}
    free = _free_axes(lengths, operands)
    for expression in expressions:
        _check_axes(expression, arrays, {name: size for name, size in sizes.items() if name not in free})
    pairs, of_heads = (*batch, heads_q, len_q, len_kv), (*batch, heads_q)
    wide = "float64" if dtype == "float64" else "float32"
    floats = tuple(dict.fromkeys((dtype, wide)))
    return Scores(
        score=score,
        mask=mask,
        bias=_broadcast("bias", operands.get("bias"), floats, pairs, device, least=2),
        mask_array=_broadcast("mask", operands.get("mask"), ("bool",), pairs, device, least=2),
        alibi_slopes=_broadcast("alibi_slopes", operands.get("alibi_slopes"), floats, of_heads, device, least=1),
        arrays=tuple(arrays.items()),
        dropout=dropout,
        operands=tuple(operands),
        seed_on_device="seed" in operands and operands["seed"].device is not None,
        free_axes=free,
        place=place if dropout else None,
    )


def _free_axes(lengths: Lengths | None, operands: dict[str, Layout]) -> tuple[str, ...]:
    """The coordinates of which no axis of an array can be told the number: places in packed sequences.

    Raises
    ------
    UnsupportedError
        If an array has an element for each pair of them.
    """
    if lengths is None or not (lengths.packed_q or lengths.packed_kv):
        return ()
    for name in ("bias", "mask"):
        if name in operands:
            expected = "an expression" if name == "mask" else "None, or a score that reads an array,"
            raise UnsupportedError(f"{name}: expected {expected} with packed sequences, got an array of pairs")
    return (*("q_idx",) * lengths.packed_q, *("kv_idx",) * lengths.packed_kv)


def declared(arrays: dict[str, Layout]) -> list[Declaration]:
    """What the user's expressions are told of arrays."""
    if not arrays:
        return []
    from .expression.vocabulary import Declaration

    own = [(name, layout) for name, layout in arrays.items() if name not in OWN_NAMES]
    return [Declaration(name, kind_of(name, layout.dtype), len(layout.shape)) for name, layout in own]


def as_expression(make: Callable[..., Expression], given: Any, declarations: list[Declaration]) -> Expression | None:
    """An expression as given, or read by one of the functions that read it."""
    return given if given is None or isinstance(given, Expression) else make(given, declarations)


def _check_axes(expression: Expression, arrays: dict[str, Layout], sizes: dict[str, int]) -> None:
    """An axis that is indexed by a coordinate alone has an element for each of its values."""
    from .expression.reads import axes_of, reads

    for read in reads(expression.tree):
        for axis, coordinate in enumerate(axes_of(read)):
            found = arrays[read.name].shape[axis]
            if coordinate in sizes and found != sizes[coordinate]:
                raise ValueError(
                    f"{label(read.name)}: expected {sizes[coordinate]} elements along axis {axis}, which is indexed by "
                    f"'{coordinate}', got shape {arrays[read.name].shape}"
                )


def _broadcast(
    name: str, layout: Layout | None, dtypes: tuple[str, ...], shape: tuple[int, ...], device: int | None, least: int
) -> Layout | None:
    if layout is None:
        return None
    check_dtype(name, layout, dtypes)
    own, full = layout.shape, shape[len(shape) - len(layout.shape) :]
    fits = least <= len(own) <= len(shape) and all(size in (1, wanted) for size, wanted in zip(own, full))
    if not fits:
        raise ValueError(f"{name}: expected a shape of at least {least} axes that broadcasts to {shape}, got {own}")
    _check_device(name, layout, device)
    return layout.broadcast_to(shape)


def check_dtype(name: str, layout: Layout, dtypes: tuple[str, ...]) -> None:
    """Refuse what is of none of these dtypes, the last of which is that of scores."""
    if layout.dtype in dtypes:
        return
    *_, wide = dtypes
    hint = ""
    if layout.dtype in FLOATS and layout.shape:
        of_bools = wide == "bool"
        hint = "; what is added to scores is bias" if of_bools else f"; scores are computed in {wide}, pass {name}.astype('{wide}')"
    raise TypeError(f"{name}: expected {' or '.join(dtypes)}, got {layout.dtype}{hint}")


def _check_device(name: str, layout: Layout, device: int | None) -> None:
    if layout.device != device and not (layout.device is None and layout.shape == ()):
        places = ["in host memory" if place is None else f"on CUDA device {place}" for place in (device, layout.device)]
        raise ValueError(f"{name}: expected an array {places[0]} (like q), got one {places[1]}")
    if layout.alignment < layout.itemsize:
        expected = f"an address divisible by its item size {layout.itemsize}"
        raise ValueError(f"{name}: expected {expected}, got one divisible by {layout.alignment} only")


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def check_wrt(wrt: Any, scores: Scores) -> tuple[str, ...]:
    """Names of what gradients are asked for, beside q, k, v and sinks."""
    names = (wrt,) if isinstance(wrt, str) else wrt
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"wrt: expected a name or a tuple of names, got {shown(wrt)}")
    for name in names:
        if name not in scores.gradients:
            expected = f"names of {', '.join(scores.gradients)}" if scores.gradients else "no name, since no score reads a float"
            reason = _without_gradient(name, scores)
            raise ValueError(f"wrt: expected {expected}, got {shown(name)}{reason and f' ({reason})'}")
    return tuple(dict.fromkeys(names))


def _without_gradient(name: str, scores: Scores) -> str:
    """Why `wrt` cannot name this, or '' if it is nothing of the call's."""
    layout = dict(scores.arrays).get(name)
    if layout is not None and kind_of(name, layout.dtype) != "float":
        return f"which is of {layout.dtype}; only floats have a gradient"
    if layout is not None:
        return "which only the mask reads; a mask has no gradient"
    if name in ("q", "k", "v", "sinks"):
        return "whose gradient is there without being asked for"
    if name in ("bias", "alibi_slopes"):
        return "which was not given"
    return "which has no gradient" if name in ("score", "mask", "seed", "dropout") else ""


def told_apart(scores: Scores, batches: int, heads: int) -> tuple[int, int]:
    """For how many batch elements and heads a mask of pairs may differ: for all, or 1 where it does not tell them apart."""
    axes: set[str] = set()
    if scores.mask is not None:
        from .expression.tree import Name, walk  # late, as in `entry`

        axes = {node.name for node in walk(scores.mask.tree) if isinstance(node, Name)}
    by_batch, by_head = "b" in axes, bool(axes & {"h", "h_kv"})
    if scores.mask_array is not None:
        x = scores.mask_array
        *of_batch, of_head, _, _ = [size > 1 and step != 0 for size, step in zip(x.shape, x.strides)]
        by_batch, by_head = by_batch or any(of_batch), by_head or of_head
    return batches if by_batch else min(batches, 1), heads if by_head else min(heads, 1)
