"""The online softmax of one row, block by block, with the numbers that `cupy_flash.measure.trace` computes."""

from cupy_flash.measure.trace import exact_softmax, online_softmax

from .svg import Card

SCORES, VALUES, BLOCK = (1, 3, 2, 5, 4, 0), (1, 2, 3, 4, 5, 6), 2


def states() -> str:
    """Draw the state of the row behind each block."""
    card = Card(860, 304, "The online softmax: maximum, sum and output of a row after each block of keys")
    heads = ("block of scores", "maximum so far", "correction", "sum so far", "output so far = o / l")
    symbols = ("s", "m", "exp(m before − m)", "l", "")
    columns = (30, 250, 390, 540, 670)
    for x, head, symbol in zip(columns, heads, symbols):
        card.text(x, 32, head, 13, also="bold")
        card.text(x, 51, symbol, 12, "faint", also="mono")
    steps = list(online_softmax(SCORES, VALUES, BLOCK))
    for i, step in enumerate(steps):
        y = 72 + i * 62
        for j, score in enumerate(step.scores):
            new = score == step.top and step.correction < 1
            card.box(30 + j * 66, y, 60, 36, f"{score:.0f}", "sky" if not new else "sand", 15, "amber" if new else "")
        card.text(columns[1], y + 24, f"{step.top:.0f}", 15, also="bold")
        if i:
            card.text(columns[2], y + 24, f"× {step.correction:.4f}", 15, "amber" if step.correction < 1 else "faint")
        card.text(columns[3], y + 24, f"{step.total:.4f}", 15)
        card.rect(columns[4], y + 10, step.out / max(VALUES) * 110, 16, "blue", radius=3)
        card.text(830, y + 24, f"{step.out:.4f}", 15, anchor="end")
        if i:
            card.arrow(columns[1] + 5, y - 32, columns[1] + 5, y + 6)
            card.arrow(columns[3] + 22, y - 32, columns[3] + 22, y + 6)
    _, exact = exact_softmax(SCORES, VALUES)
    y = 72 + len(steps) * 62
    card.line(30, y - 8, 830, y - 8)
    card.text(30, y + 16, "A larger score makes earlier sums too large; the correction shrinks them.", 13, "faint")
    card.text(830, y + 16, f"{exact:.4f}", 15, anchor="end", also="bold")
    card.text(762, y + 16, "all at once", 13, "faint", "end")
    return str(card)
