"""Where the rows of sequences lie: padded, packed and in pages."""

from .svg import Card

LENGTHS = (7, 3, 5)
COLOURS = ("blue", "amber", "green")
CELL, LEFT = 20, 150
PAGE_SIZE, PAGES = 2, ((4, 9, 1, 6), (2, 7), (8, 0, 5))  # and those that each sequence has


def layouts() -> str:
    """Draw the rows of three sequences in memory, in each of three ways."""
    card = Card(700, 352, "Three sequences in memory: padded, packed and in pages")
    card.text(24, 27, "a square is a row of q, k or v, a colour a sequence", 13)
    card.rect(524, 16, 13, 13, "empty")
    card.text(543, 27, "not read", 13)

    most = max(LENGTHS)
    card.text(24, 78, "padded", 13, also="bold")
    for i, (length, colour) in enumerate(zip(LENGTHS, COLOURS)):
        _rows(card, LEFT, 50 + i * (CELL + 6), [colour] * length + ["empty"] * (most - length))
        card.text(LEFT + most * CELL + 14, 64 + i * (CELL + 6), str(length), 13, "faint", also="mono")
    card.text(LEFT + most * CELL + 44, 78, "seqlens_q, seqlens_kv", 13, also="mono")

    y, offsets = 156, [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    card.text(24, y + 15, "packed", 13, also="bold")
    packed = [colour for length, colour in zip(LENGTHS, COLOURS) for _ in range(length)]
    _rows(card, LEFT, y, [*packed, "empty", "empty"])
    for offset in offsets:
        card.line(LEFT + offset * CELL - 1, y - 5, LEFT + offset * CELL - 1, y + CELL + 4, "ink", 1.2)
        card.text(LEFT + offset * CELL, y + CELL + 19, str(offset), 13, "faint", "middle", also="mono")
    card.text(LEFT + 17 * CELL + 20, y + 15, "cu_seqlens_q, _kv", 13, also="mono")

    y = 238
    card.text(24, y + 15, "in pages", 13, also="bold")
    owner = {page: i for i, own in enumerate(PAGES) for page in own}
    for page in range(10):
        x = LEFT + page * (PAGE_SIZE * CELL + 10)
        colours = ["empty"] * PAGE_SIZE
        if page in owner:
            i = owner[page]
            used = LENGTHS[i] - PAGES[i].index(page) * PAGE_SIZE
            colours = [COLOURS[i] if row < used else "empty" for row in range(PAGE_SIZE)]
        _rows(card, x, y, colours)
        card.text(x + PAGE_SIZE * CELL / 2, y + CELL + 15, str(page), 13, "faint", "middle", also="mono")
    card.text(24, y + 74, "pages", 13, also="mono")
    for i, own in enumerate(PAGES):
        x = LEFT + i * 180
        card.rect(x, y + 63, 13, 13, COLOURS[i])
        card.text(x + 20, y + 74, " ".join(map(str, own)), 13, also="mono")
        card.text(x + 20, y + 94, f"seqlens_kv {LENGTHS[i]}", 11, "faint", also="mono")
    return str(card)


def _rows(card: Card, x: float, y: float, colours: list[str]) -> None:
    for colour in dict.fromkeys(colours):
        card.squares([(x + i * CELL, y) for i, own in enumerate(colours) if own == colour], CELL - 1.5, colour)
