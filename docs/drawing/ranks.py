"""How ranks share attention: which rows each has, and what each scheme sends."""

from itertools import pairwise

from cupy_flash.distributed import part_lengths, positions

from .svg import Card

RANKS, ROWS = 4, 16
COLOURS = ("blue", "amber", "green", "grey")
LIGHT = ("sky", "sand", "mint", "empty")
CELL = 14


def orders() -> str:
    """Draw the pairs that each rank computes of a causal problem, its queries in either order."""
    card = Card(700, 330, "Queries of four ranks in contiguous and in zigzag order, and the keys that they see")
    lengths = part_lengths(ROWS, RANKS)
    for panel, order in enumerate(("contiguous", "zigzag")):
        left, top = 40 + panel * 330, 64
        card.text(left, 30, f'order="{order}"', 13, also="mono")
        card.text(left, 50, "keys go to the right, queries down", 11, "faint")
        owner = {int(row): rank for rank in range(RANKS) for row in positions(lengths, rank, order=order)}
        for rank in range(RANKS):
            seen = [(left + key * CELL, top + row * CELL) for row in range(ROWS) for key in range(row + 1) if owner[row] == rank]
            card.squares(seen, CELL - 2, COLOURS[rank])
            pairs = sum(row + 1 for row in range(ROWS) if owner[row] == rank)
            y = top + 20 + rank * 46
            card.rect(left + 236, y, 13, 13, COLOURS[rank])
            card.text(left + 256, y + 11, f"rank {rank}", 12)
            card.text(left + 256, y + 27, f"{pairs} pairs", 11, "faint")
        hidden = [(left + key * CELL, top + row * CELL) for row in range(ROWS) for key in range(row + 1, ROWS)]
        card.squares(hidden, CELL - 2, "empty")
    return str(card)


def schemes() -> str:
    """Draw what a rank has before and while it computes, in each scheme."""
    card = Card(700, 400, "Ulysses, all-gather and ring on four ranks: what each has when it computes")
    for panel, draw in enumerate((_ulysses, _all_gather, _ring)):
        draw(card, 24 + panel * 228)
    return str(card)


def _head(card: Card, left: float, name: str, lines: tuple[str, ...]) -> None:
    card.text(left, 30, f'"{name}"', 14, also="mono")
    for i, line in enumerate(lines):
        card.text(left, 50 + 16 * i, line, 11, "faint")


def _ulysses(card: Card, left: float) -> None:
    _head(card, left, "ulysses", ("heads and rows change places,", "then each rank has all rows", "of one head in four"))
    for when, top in (("rows of all heads", 116), ("all rows of some heads", 264)):
        card.text(left, top - 8, when, 11, "faint")
        for rank in range(RANKS):
            for head in range(RANKS):
                colour = COLOURS[rank] if top < 200 else COLOURS[head]
                card.rect(left + rank * 46, top + head * 22, 44, 20, colour, radius=2)
    card.text(left + 92, 228, "every rank to every rank", 11, "faint", "middle")
    card.arrow(left + 174, 216, left + 174, 248)
    card.text(left, 372, "rows to the right, heads down,", 11, "faint")
    card.text(left, 388, "a colour is a rank", 11, "faint")


def _all_gather(card: Card, left: float) -> None:
    _head(card, left, "all_gather", ("each rank gets the keys that", "its rows see, and computes", "with all of them at once"))
    for rank in range(RANKS):
        y = 116 + rank * 66
        card.box(left, y, 52, 44, f"q {rank}", COLOURS[rank], 12)
        for source in range(RANKS):
            seen = source <= rank
            card.rect(left + 62 + source * 34, y, 32, 44, COLOURS[source] if seen else "empty", radius=2)
            card.text(left + 78 + source * 34, y + 27, f"k{source}" if seen else "", 11, anchor="middle")
    card.text(left, 388, "causal: keys behind are not sent", 11, "faint")


def _ring(card: Card, left: float) -> None:
    _head(card, left, "ring", ("keys go on to the next rank", "while each computes with", "those that it has"))
    for rank in range(RANKS):
        y = 116 + rank * 66
        card.box(left, y, 52, 44, f"q {rank}", COLOURS[rank], 12)
        for step in range(2):
            source = (rank - step) % RANKS
            colours = COLOURS if step == 0 else LIGHT
            card.box(left + 66 + step * 74, y, 60, 44, f"k{source}\n{('at hand', 'arrives')[step]}", colours[source], 10)
    for above, below in pairwise(range(RANKS)):
        card.arrow(left + 96, 116 + above * 66 + 46, left + 96, 116 + below * 66 - 4)
    card.text(left, 388, "the last rank's go to the first one", 11, "faint")
