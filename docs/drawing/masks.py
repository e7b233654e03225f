"""Masks, as the library has them: whom each query sees, and what that makes of tiles."""

import numpy

import cupy_flash
from cupy_flash.problem.options import Options

from .svg import Card

KINDS = (
    ("no mask", {}, 8, 8),
    ("causal=True", {"causal": True}, 8, 8),
    ("causal=True", {"causal": True}, 5, 8),
    ('causal="top_left"', {"causal": "top_left"}, 5, 8),
    ("window=(3, 0)", {"window": (3, 0)}, 8, 8),
    ("window=(2, 2)", {"window": (2, 2)}, 8, 8),
    ("window=(None, 2)", {"window": (None, 2)}, 8, 8),
    ("causal, prefix=4", {"causal": True, "prefix": 4}, 8, 8),
)
CELL, WIDE, TALL = 18, 214, 216

PARENTS = (-1, 0, 0, 1, 1, 2)  # of the drafts behind four tokens of text
EXPRESSIONS = (  # each is a line of a recipe in guide/scores.md: what it is called there, the options, queries and keys
    ("causal", {"mask": "kv_idx <= q_idx"}, 10, 10),
    ("prefix LM", {"mask": "kv_idx <= q_idx or kv_idx < prefix[b]", "arrays": {"prefix": numpy.array([4])}}, 10, 10),
    (
        "documents, causal",
        {"causal": True, "mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": numpy.repeat([0, 1, 2], [3, 5, 2])}},
        10,
        10,
    ),
    (
        "window and sink tokens, causal",
        {"causal": True, "mask": "kv_idx < first or q_idx - kv_idx < width", "arrays": {"first": 2, "width": 3}},
        10,
        10,
    ),
    ("tree of drafts", {"mask": "kv_idx < text or ancestors[q_idx] >> max(kv_idx - text, 0) & 1 == 1"}, 6, 10),
)
RANGES = (  # as of the recipes in guide/masks.md: what each is called, the ranges of the queries, and the keys
    ("documents", [[(0, 3)]] * 3 + [[(3, 8)]] * 5 + [[(8, 10)]] * 2, 10),
    ("prefix LM", [[(0, max(i + 1, 4))] for i in range(10)], 10),
    ("sinks and window", [[(0, min(i + 1, 2)), (max(i - 2, 0), i + 1)] for i in range(10)], 10),
    ("tree of drafts", [[(0, 5)], [(0, 6)], [(0, 5), (6, 7)], [(0, 6), (7, 8)], [(0, 6), (8, 9)], [(0, 5), (6, 7), (9, 10)]], 10),
)


def seen_by(len_q: int, len_kv: int, options: dict) -> numpy.ndarray:
    """Whether each query sees each key."""
    return Options(**options).resolve_mask(len_q, len_kv).visible(0, len_q, 0, len_kv)


def kinds() -> str:
    """Draw each kind of mask, for as many queries as keys and for fewer."""
    card = Card(4 * WIDE, 2 * TALL + 38, "Which keys each query sees, by mask")
    card.rect(24, 16, 13, 13, "blue")
    card.text(43, 27, "seen", 13)
    card.rect(92, 16, 13, 13, "empty")
    card.text(111, 27, "not seen", 13)
    card.text(4 * WIDE - 10, 27, "a row is a query, a column a key", 13, "faint", "end")
    for i, (name, options, len_q, len_kv) in enumerate(KINDS):
        x, y = 24 + i % 4 * WIDE, 66 + i // 4 * TALL
        card.text(x, y - 12, name, 13, also="mono")
        _cells(card, seen_by(len_q, len_kv, options), x, y, CELL)
        card.text(x, y + len_q * CELL + 14, f"{len_q} queries, {len_kv} keys", 11, "faint")
    return str(card)


def _cells(card: Card, seen: numpy.ndarray, x: float, y: float, cell: float) -> None:
    for colour, chosen in (("empty", ~seen), ("blue", seen)):
        card.squares([(x + column * cell, y + row * cell) for row, column in numpy.argwhere(chosen)], cell - 1.5, colour)


def expressions() -> str:
    """Draw the masks of some expressions, and the tree that one of them has the ancestors of."""
    ancestors: list[int] = []
    for i, parent in enumerate(PARENTS):
        ancestors.append((ancestors[parent] if parent >= 0 else 0) | 1 << i)
    of_tree = {"arrays": {"ancestors": numpy.array(ancestors), "text": 4}}
    wide, tall = 282, 254
    card = Card(3 * wide + 20, 2 * tall + 30, "Which keys each query sees, by expression")
    card.rect(24, 16, 13, 13, "blue")
    card.text(43, 27, "seen", 13)
    card.text(3 * wide + 10, 27, "a row is a query, a column a key", 13, "faint", "end")
    for i, (name, options, len_q, len_kv) in enumerate(EXPRESSIONS):
        x, y = 24 + i % 3 * wide, 86 + i // 3 * tall
        card.text(x, y - 28, name, 13, also="bold")
        lines = [options["mask"]]
        if len(lines[0]) > 42:  # breaks in front of an operator
            cut = lines[0].index(" or ") + 1
            lines = [lines[0][:cut].strip(), lines[0][cut:]]
        for line, text in enumerate(lines):
            card.text(x, y - 11 + 15 * line, text, 11, also="mono")
        y += 15 * (len(lines) - 1)
        _cells(card, weighted_by(len_q, len_kv, {**options, **(of_tree if name.startswith("tree") else {})}), x, y, CELL)
    x, y = 24 + 2 * wide, 86 + tall
    card.text(x, y - 28, "its drafts, behind 4 tokens of text", 13, also="bold")
    _tree(card, x + 40, y)
    return str(card)


def weighted_by(len_q: int, len_kv: int, options: dict) -> numpy.ndarray:
    """Whether each query gives weight to each key: what attention makes of values that tell the keys apart."""
    q, k = numpy.zeros((len_q, 1), numpy.float32), numpy.zeros((len_kv, 1), numpy.float32)
    return cupy_flash.attention(q, k, numpy.eye(len_kv, dtype=numpy.float32), **options) > 0


def key_ranges() -> str:
    """Draw masks that are ranges of keys, with the ranges behind each row."""
    wide = 310
    card = Card(2 * wide + 10, 538, "Masks that are ranges of keys, with the ranges of each query")
    card.rect(24, 16, 13, 13, "blue")
    card.text(43, 27, "seen", 13)
    card.text(2 * wide, 27, "a row is a query, a column a key; behind it start:stop of its ranges", 13, "faint", "end")
    for i, (name, ranges, len_kv) in enumerate(RANGES):
        x, y = 24 + i % 2 * wide, 78 + i // 2 * 238
        card.text(x, y - 12, name, 13, also="bold")
        most = max(map(len, ranges))
        start, stop = numpy.array([own + [(0, 0)] * (most - len(own)) for own in ranges]).transpose(2, 0, 1)
        mask = cupy_flash.KeyRanges(start, stop)
        _cells(card, weighted_by(len(ranges), len_kv, {"mask": mask}), x, y, CELL)
        for row, own in enumerate(ranges):
            text = "  ".join(f"{first}:{last}" for first, last in own)
            card.text(x + len_kv * CELL + 8, y + (row + 0.72) * CELL, text, 11, "faint", also="mono")
    return str(card)


def _tree(card: Card, x: float, y: float) -> None:
    """Draw the drafts, each to the right of its parent."""
    rows = (1.5, 0.75, 2.5, 0, 1.5, 2.5)
    depths: list[int] = []
    for parent in PARENTS:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    places = [(x + 80 * depth, y + 20 + 44 * row) for depth, row in zip(depths, rows)]
    card.line(places[0][0] - 40, places[0][1], *places[0], "grey", 1.5)
    for parent, place in zip(PARENTS, places):
        if parent >= 0:
            card.line(*places[parent], *place, "grey", 1.5)
    for i, (left, top) in enumerate(places):
        card.rect(left - 13, top - 13, 26, 26, "sky", "blue", radius=13)
        card.text(left, top + 4.5, str(i), 13, anchor="middle")


def tiles() -> str:
    """Draw what a causal mask and a window make of tiles of four queries and four keys."""
    size, tile, cell = 24, 4, 11
    card = Card(760, 372, "Which tiles a kernel computes under a mask, and in which it looks at single scores")
    legend = (("blue", "every score counts: computed without a mask"), ("amber", "the mask's edge: computed, then masked"))
    for i, (name, options) in enumerate((("causal=True", {"causal": True}), ("window=(8, 0)", {"window": (8, 0)}))):
        x, y = 44 + i * 356, 44
        card.text(x, y - 14, name, 13, also="mono")
        seen = seen_by(size, size, options)
        blocks = seen.reshape(size // tile, tile, size // tile, tile)
        some, every = (numpy.kron(a, numpy.ones((tile, tile), bool)) for a in (blocks.any((1, 3)), blocks.all((1, 3))))
        colours = {"empty": ~some, "sand": some & ~seen, "amber": seen & ~every, "blue": every}
        for colour, chosen in colours.items():
            card.squares([(x + column * cell, y + row * cell) for row, column in numpy.argwhere(chosen)], cell - 0.5, colour)
        for line in range(0, size + 1, tile):
            card.line(x, y + line * cell, x + size * cell, y + line * cell, "ink", 0.7)
            card.line(x + line * cell, y, x + line * cell, y + size * cell, "ink", 0.7)
    for i, (colour, words) in enumerate((*legend, ("empty", "seen by no row of the tile: not loaded, not computed"))):
        card.rect(44 + i % 2 * 356, 326 + i // 2 * 22, 12, 12, colour, radius=2)
        card.text(62 + i % 2 * 356, 337 + i // 2 * 22, words, 13)
    return str(card)
