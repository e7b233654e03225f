"""By which angles rows are rotated: a frozen `Rotation` made from shapes, dtypes and strides of what tells them."""

from __future__ import annotations

from dataclasses import dataclass

from .forward import check_place
from .layout import Layout
from .options import check_flag

INDEX_DTYPES = ("int32", "int64")  # of positions, lengths and numbers of pages


@dataclass(frozen=True, slots=True)
class Rotation:
    """Which elements of rows are rotated in pairs, and where the angles are.

    Parameters
    ----------
    cos, sin : Layout
        (positions, pairs).
    positions : Layout or None
        Seen as (*batch) or (*batch, rows): of the first row of each batch element, or of each row. None: told otherwise.
    of_each : bool
        Whether positions are those of each row.
    interleaved : bool
        Whether partners are neighbours, and not `pairs` elements apart.
    """

    cos: Layout
    sin: Layout
    positions: Layout | None
    of_each: bool
    interleaved: bool

    @property
    def ends(self) -> int:
        """Positions that there are angles of."""
        return self.cos.shape[0]

    @property
    def pairs(self) -> int:
        """Pairs of elements of a row that are rotated."""
        return self.cos.shape[1]


def make_rotation(
    cos: Layout,
    sin: Layout,
    positions: Layout | None,
    interleaved: bool,
    *,
    name: str,
    rows: Layout,
) -> Rotation:
    """Check what tells angles.

    Parameters
    ----------
    cos, sin, positions, interleaved
        As the user gave them.
    name : str
        What messages call the array whose rows are rotated.
    rows : Layout
        It, with all axes, `(*batch, heads, seq, dim)`.

    Raises
    ------
    TypeError, ValueError
    """
    *batch, _, seq, dim = rows.shape
    dtypes = tuple(dict.fromkeys(("float32", rows.dtype)))
    for label, angles in (("cos", cos), ("sin", sin)):
        if angles.dtype not in dtypes:
            raise TypeError(f"{label}: expected {' or '.join(dtypes)}, got {angles.dtype}")
        if len(angles.shape) != 2:
            raise ValueError(f"{label}: expected 2 axes, (positions, rotary_dim / 2), got shape {angles.shape}")
        check_place(label, angles, rows.device, name)
    if sin.dtype != cos.dtype:
        raise TypeError(f"sin: expected {cos.dtype} (that of cos), got {sin.dtype}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected shape {cos.shape} (that of cos), got {sin.shape}")
    if 2 * cos.shape[1] > dim:
        raise ValueError(f"cos: expected at most {dim // 2} columns, one for two elements of a row of {name}, got {cos.shape[1]}")
    if cos.shape[0] == 0 and 0 not in rows.shape:
        raise ValueError("cos: expected at least 1 row, got 0")
    of_each = positions is not None and len(positions.shape) == len(batch) + 1
    if positions is not None:
        positions = _check_positions(positions, tuple(batch), seq, rows.device, name)
    return Rotation(cos, sin, positions, of_each, check_flag("interleaved", interleaved))


def check_indices(label: str, layout: Layout, shape: tuple[int, ...], device: int | None, like: str) -> None:
    """Refuse what are not integers of this shape in the memory of the argument `like`."""
    _check_integers(label, layout)
    if layout.shape != shape:
        raise ValueError(f"{label}: expected shape {shape}, got {layout.shape}")
    check_place(label, layout, device, like)


def _check_positions(positions: Layout, batch: tuple[int, ...], seq: int, device: int | None, like: str) -> Layout:
    """Positions of each row, or of first rows, which have an axis less; axes of size 1 are broadcast."""
    _check_integers("positions", positions)
    found, of_rows = positions.shape, (*batch, seq)
    shape = of_rows if len(found) == len(of_rows) else batch
    if len(found) != len(shape) or any(size not in (1, wanted) for size, wanted in zip(found, shape)):
        hint = "; positions[None] are those of every batch element" if len(batch) == 1 and found == (seq,) else ""
        raise ValueError(f"positions: expected shape {batch} for first rows or {of_rows} for each row, got {found}{hint}")
    check_place("positions", positions, device, like)
    return positions.broadcast_to(shape)


def _check_integers(label: str, layout: Layout) -> None:
    if layout.dtype not in INDEX_DTYPES:
        raise TypeError(f"{label}: expected {' or '.join(INDEX_DTYPES)}, got {layout.dtype}")
