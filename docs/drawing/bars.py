"""Rates beside the peers, as groups of bars."""

from tables import OURS, read
from tables import rates as rates_of

from .svg import Card

COLOURS = {OURS: "blue", "cuDNN": "amber", "FlashAttention-4": "grey"}
PANEL, GAP, TALL = 296, 16, 170
TOP, LEFT = 84, 46


def rates(run: str, direction: str) -> str:
    """Draw a run: a row of panels for each mask, a column for each head dim, a group of bars for each sequence length."""
    cells = rates_of(run)
    date = next(row["date"] for row in read("runs") if row["run"] == run)
    dims, masks, seqs = (list(dict.fromkeys(cell[i] for cell in cells)) for i in (1, 2, 3))
    most = -(-max(max(cell.values()) for cell in cells.values()) // 200) * 200
    width, height = LEFT + len(dims) * (PANEL + GAP), TOP + len(masks) * (TALL + 58) - 10
    card = Card(width, height, f"{direction} of attention on one H200, bfloat16: TFLOP/s beside cuDNN and FlashAttention-4")
    card.text(LEFT, 28, f"{direction}, TFLOP/s: more is better", 17, also="bold")
    card.text(width - GAP, 28, f"one H200, bfloat16, 16,384 tokens, {date}", 13, "faint", "end")
    x = LEFT
    for name, colour in COLOURS.items():
        card.rect(x, 41, 12, 12, colour, radius=2)
        card.text(x + 18, 52, name, 13, also="bold" if name == OURS else "")
        x += 34 + 7.6 * len(name)
    for row, mask in enumerate(masks):
        for column, dim in enumerate(dims):
            left, base = LEFT + column * (PANEL + GAP), TOP + row * (TALL + 58) + TALL
            for rate in range(0, most + 1, 200):
                y = base - rate / most * (TALL - 22)
                card.line(left, y, left + PANEL, y)
                if column == 0:
                    card.text(left - 6, y + 4, str(rate), 11, "faint", "end")
            card.text(left, base - TALL + 8, f"dim {dim}, {'causal' if mask == 'causal' else 'no mask'}", 13, also="bold")
            for group, seq in enumerate(seqs):
                _group(card, cells["bfloat16", dim, mask, seq], left + (group + 0.5) * PANEL / len(seqs), base, (TALL - 22) / most)
                card.text(left + (group + 0.5) * PANEL / len(seqs), base + 16, _short(seq), 11, "faint", "middle")
            if row == len(masks) - 1:
                card.text(left + PANEL / 2, base + 34, "sequence length", 11, "faint", "middle")
    return str(card)


def _group(card: Card, cell: dict[str, int], middle: float, base: float, scale: float) -> None:
    wide = PANEL / 6 / (len(COLOURS) + 0.7)
    for place, (name, colour) in enumerate(COLOURS.items()):
        x, tall = middle + (place - len(COLOURS) / 2) * wide, cell[name] * scale
        card.rect(x, base - tall, wide - 1, tall, colour)
        if name == OURS:
            card.text(x + wide / 2, base - tall - 4, str(cell[name]), 10, "blue", "middle", "bold")


def _short(seq: str) -> str:
    return seq if int(seq) < 1024 else f"{int(seq) // 1024}k"
