"""How kernels walk through a problem: tiles, and who does what when."""

from .svg import Card


def tiling() -> str:
    """Draw one query tile of a head, and the key tiles that pass by it."""
    card = Card(860, 400, "A block keeps a tile of queries on the chip while tiles of keys and values pass by")
    card.text(24, 30, "device memory", 13, "faint", also="bold")
    card.text(24, 58, "Q", 15, also="bold")
    for i in range(5):
        text, colour, edge = ("Q tile i", "sky", "blue") if i == 2 else ("", "empty", "rule")
        card.box(24, 68 + i * 48, 92, 44, text, colour, edge=edge)
    card.text(24, 330, "one block of threads", 12, "faint")
    card.text(24, 346, "for each tile of Q", 12, "faint")

    card.rect(176, 14, 472, 332, "empty", "rule", 8)
    card.text(192, 38, "on the chip", 13, "faint", also="bold")
    card.box(204, 158, 92, 64, "Q tile i", "sky", edge="blue")
    card.text(250, 240, "stays", 12, "faint", "middle")
    card.box(334, 68, 122, 44, "K tile j", "sand", edge="amber")
    card.box(334, 158, 122, 64, "S = Q Kᵀ\nP = exp(S − m)", "mint", edge="green")
    card.text(395, 240, "never leave the chip", 12, "green", "middle")
    card.box(500, 158, 130, 64, "O = c O + P V\nm and l", "sky", edge="blue")
    card.text(511, 148, "stay", 12, "faint", "middle")
    card.box(500, 272, 130, 44, "V tile j", "sand", edge="amber")
    for x0, x1 in ((118, 200), (298, 330), (458, 496)):
        card.arrow(x0, 190, x1, 190)
    card.arrow(395, 114, 395, 154)
    card.arrow(565, 270, 565, 226)

    for name, y, to in (("K", 68, 458), ("V", 272, 632)):
        card.text(704, y - 10, name, 15, also="bold")
        for j, number in enumerate(("j−1", "j", "j+1")):
            here = number == "j"
            card.box(704 + j * 46, y, 42, 44, number, "sand" if here else "empty", 12, "amber" if here else "rule")
        card.arrow(700, y + 22, to, y + 22)
    card.text(704, 130, "tile after tile passes by", 12, "faint")
    card.arrow(632, 190, 696, 190)
    card.text(704, 186, "out = O / l", 13, also="bold")
    card.text(704, 205, "lse = m + log l", 13, also="bold")
    card.text(704, 222, "once, at the end", 12, "faint")
    card.text(24, 380, "Q, K and V are read once by a block, and out is written once. Scores exist a tile at a time.", 13)
    return str(card)


LANES = ("producer", "warpgroup 1", "warpgroup 2", "tensor cores")
LEFT, TOP, ROW, UNIT = 118, 22, 58, 78  # a unit is the time of one product


def ping_pong() -> str:
    """Draw two steps of two warpgroups that take the tensor cores by turns, as `fwd_hopper.cu` orders them."""
    card = Card(880, 352, "Ping-pong: the products of one warpgroup run while the other computes its softmax")
    for row, name in enumerate(LANES):
        y = TOP + row * ROW
        card.text(LEFT - 10, y + 24, name, 12.5, anchor="end", also="bold")
        card.line(LEFT, y + 42, 868, y + 42)

    def bar(row: int, start: float, units: float, text: str, colour: str, edge: str) -> None:
        card.box(LEFT + start * UNIT, TOP + row * ROW, units * UNIT - 4, 38, text, colour, 11.5, edge)

    for step in (1, 2):
        begin = (step - 1) * 4
        bar(0, begin, 2, f"load K{step + 1}", "sand", "amber")
        bar(0, begin + 2, 2, f"load V{step}", "sand", "amber")
        for group, colours in ((1, ("sky", "blue")), (2, ("mint", "green"))):
            start = begin + 2 * (group - 1)
            units = min(3, 8.5 - start)  # the last one would leave the picture
            bar(group, start, 1, "wait for S", "empty", "rule")
            bar(group, start + 1, units, f"softmax of S{step}, then rescale O", *colours)
            bar(3, start, 1, f"Q K{step}ᵀ", *colours)
            bar(3, start + 1, 1, f"P{step - 1} V{step - 1}", *colours)
    card.arrow(LEFT, 272, 868, 272)
    card.text(868, 290, "time, not to scale", 12, "faint", "end")
    aim = "The aim is no gap on the tensor cores: one warpgroup's products run while the other computes exponentials."
    card.text(24, 316, aim, 13)
    card.text(24, 336, "Within a warpgroup, too, the softmax of a step runs beneath the product P V of the step before.", 13)
    return str(card)
