"""One source, two machines."""

from .svg import Card


def two_machines() -> str:
    """Draw what a warp operation is on a GPU and on a CPU."""
    card = Card(860, 372, "One kernel source: on a GPU a warp is 32 lanes, on a CPU it is a thread with a loop over 32")
    card.rect(290, 20, 280, 84, "empty", "rule", 6)
    card.text(430, 44, "one source", 15, anchor="middle", also="bold")
    card.text(312, 70, "for_lane(l)", 13, also="mono")
    card.text(336, 90, "s.at(l, r) *= scale;", 13, also="mono")
    for x, to, name in ((150, "gpu", "NVRTC"), (710, "cpu", "a C++17 compiler")):
        edge = 290 if to == "gpu" else 570
        card.line(edge, 62, x, 62, "faint", 1.5)
        card.arrow(x, 62, x, 126)
        card.text((edge + x) / 2, 54, name, 12, "faint", "middle")
    _gpu(card)
    _cpu(card)
    return str(card)


def _gpu(card: Card) -> None:
    card.rect(20, 132, 400, 224, "empty", "rule", 6)
    card.text(36, 158, "GPU: a warp is 32 lanes", 15, also="bold")
    for lane in range(8):
        name = str(lane) if lane < 6 else "…" if lane == 6 else "31"
        x = 36 + lane * 46
        card.text(x + 20, 182, name, 11, "faint", "middle")
        for r in range(3):
            card.rect(x, 190 + r * 22, 40, 19, "sky", "blue", 2)
    words = (
        "The operation runs once in each lane.",
        "A fragment is what one lane holds of it.",
        "Products, copies and barriers are instructions.",
        "backend='cuda'",
    )
    _words(card, 36, words)


def _cpu(card: Card) -> None:
    card.rect(440, 132, 400, 224, "empty", "rule", 6)
    card.text(456, 158, "CPU: a warp is one thread", 15, also="bold")
    card.text(456, 182, "registers [32 lanes] of the one thread, NaN at first", 11, "faint")
    for lane in range(32):
        for r in range(3):
            card.rect(456 + lane * 11.5, 190 + r * 22, 10, 19, "mint", "green", 1)
    words = (
        "The operation runs once, in a loop over 32.",
        "A fragment holds the registers of all lanes.",
        "Products, copies and barriers are C++ functions.",
        "backend='host'",
    )
    _words(card, 456, words)


def _words(card: Card, x: float, words: tuple[str, ...]) -> None:
    for i, line in enumerate(words):
        last = i == len(words) - 1
        card.text(x, 278 + i * 21, line, 13, "blue" if last else "ink", also="mono" if last else "")
