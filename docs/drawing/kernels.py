"""How kernels walk through a problem: tiles, and who does what when."""

from .svg import Card


def tiling() -> str:
    """Draw one query tile of a head, and the key tiles that pass by it."""
    card = Card(860, 400, "A block keeps a tile of queries on the chip while tiles of keys and values pass by")
    card.text(24, 30, "device memory", 13, "faint", also="bold")
    card.text(24, 58, "Q", 15, also="bold")
    for i in range(5):
        card.box(24, 68 + i * 48, 92, 44, "Q tile i" if i == 2 else "", "sky" if i == 2 else "empty", edge="blue" if i == 2 else "rule")
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
    for ends in ((118, 190, 200, 190), (298, 190, 330, 190), (395, 114, 395, 154), (458, 190, 496, 190), (565, 270, 565, 226)):
        card.arrow(*ends)

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
    card.text(24, 380, "A block reads its Q once, each K and V that it sees once, and writes out once. Scores exist a tile at a time.", 13)
    return str(card)


LANES = {"producer": 0, "warpgroup 1": 1, "warpgroup 2": 2, "tensor cores": 3}
UNIT, LEFT, ROW = 78, 118, 58
STEPS = 2


def ping_pong() -> str:
    """Draw two steps of two warpgroups that take the tensor cores by turns, as `fwd_hopper.cu` orders them."""
    card = Card(880, 352, "Ping-pong: while one warpgroup computes its softmax, the other one's products run on the tensor cores")
    for name, row in LANES.items():
        y = 22 + row * ROW
        card.text(LEFT - 10, y + 24, name, 12.5, anchor="end", also="bold")
        card.line(LEFT, y + 42, 868, y + 42)
    bars = []
    for step in range(STEPS):
        for group, (light, strong) in enumerate((("sky", "blue"), ("mint", "green"))):
            start = step * 4 + group * 2
            names = (f"Q K{step + 1}ᵀ", f"P{step} V{step}")
            bars += [("tensor cores", start + i, 1, name, light, strong) for i, name in enumerate(names)]
            end = min(start + 4, 9.5)
            bars.append((f"warpgroup {group + 1}", start + 1, end - start - 1, f"softmax of S{step + 1}, then rescale O", light, strong))
            bars.append((f"warpgroup {group + 1}", start, 1, "wait for S", "empty", "rule"))
        bars.append(("producer", step * 4, 1.9, f"load K{step + 2}", "sand", "amber"))
        bars.append(("producer", step * 4 + 2, 1.9, f"load V{step + 1}", "sand", "amber"))
    for lane, start, length, text, colour, edge in bars:
        y = 22 + LANES[lane] * ROW
        card.box(LEFT + start * UNIT, y, length * UNIT - 4, 38, text, colour, 11.5, edge)
    card.arrow(LEFT, 272, 868, 272)
    card.text(868, 290, "time, not to scale", 12, "faint", "end")
    card.text(24, 316, "The tensor cores have no gap: the products of one warpgroup run while the other computes exponentials.", 13)
    card.text(24, 336, "Within a warpgroup, too, the softmax of a step runs beneath the product P V of the step before.", 13)
    return str(card)
