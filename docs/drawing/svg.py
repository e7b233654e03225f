"""Words of SVG: a card with shapes on it that can be read on light and on dark pages.

Text is text, so files are small, can be searched, and are the same bytes wherever they are made. The card has a ground of its own,
which follows the reader's colour scheme together with everything on it.
"""

from html import escape

# name: on light ground, on dark ground
COLOURS = {
    "ground": ("#ffffff", "#14181e"),
    "ink": ("#1f2328", "#e6e9ee"),
    "faint": ("#59636e", "#9aa4b0"),
    "rule": ("#d5dae0", "#333b45"),
    "empty": ("#eef1f4", "#232a33"),
    "blue": ("#0072b2", "#3d9bd6"),
    "sky": ("#bfe0f5", "#1d4b66"),
    "amber": ("#e69f00", "#e0a63a"),
    "sand": ("#fbe6b8", "#5c4412"),
    "green": ("#009e73", "#2fb08a"),
    "mint": ("#bfe8da", "#155243"),
    "grey": ("#a3acb6", "#77818d"),
}


def _style(ground: int) -> str:
    rules = [f".{name}{{fill:{pair[ground]}}}.on-{name}{{stroke:{pair[ground]}}}" for name, pair in COLOURS.items()]
    return "".join(rules)


STYLE = (
    'text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}'
    ".mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}.bold{font-weight:600}"
    f".open{{fill:none}}{_style(0)}@media(prefers-color-scheme:dark){{{_style(1)}}}"
)


def number(x: float) -> str:
    """With at most one decimal."""
    return f"{x:.1f}".removesuffix(".0")


class Card:
    """A picture: call its methods from back to front, then `str` of it.

    Parameters
    ----------
    width, height : float
    title : str
        What it shows, for whoever does not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.size = (width, height)
        self.title = title
        self.marks: list[str] = []
        self.rect(0, 0, width, height, "ground", radius=8)

    def rect(self, x: float, y: float, width: float, height: float, colour: str, edge: str = "", radius: float = 0) -> None:
        """A rectangle filled with a colour, with an edge of another one."""
        numbers = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        round_ = f' rx="{number(radius)}"' if radius else ""
        self.marks.append(f'<rect class="{_classes(colour, edge)}" {numbers}{round_}/>')

    def squares(self, corners: list[tuple[float, float]], side: float, colour: str) -> None:
        """Many squares of one size and colour, as a single mark."""
        step = f"h{number(side)}v{number(side)}h{number(-side)}z"
        path = "".join(f"M{number(x)} {number(y)}{step}" for x, y in corners)
        self.marks.append(f'<path class="{colour}" d="{path}"/>')

    def text(
        self, x: float, y: float, text: str, size: float = 13, colour: str = "ink", anchor: str = "start", also: str = ""
    ) -> None:
        """One line of text whose baseline is at y."""
        place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}"'
        self.marks.append(f'<text class="{" ".join(filter(None, (colour, also)))}" {place}>{escape(text)}</text>')

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str = "rule", width: float = 1) -> None:
        """A straight line."""
        ends = f'x1="{number(x0)}" y1="{number(y0)}" x2="{number(x1)}" y2="{number(y1)}"'
        self.marks.append(f'<line class="on-{colour}" {ends} stroke-width="{number(width)}"/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float, colour: str = "faint") -> None:
        """A straight line along an axis, with a head at its end."""
        self.line(x0, y0, x1, y1, colour, 1.5)
        along = (5 if x1 > x0 else -5 if x1 < x0 else 0, 5 if y1 > y0 else -5 if y1 < y0 else 0)
        ax, ay = x1 - along[0], y1 - along[1]
        dx, dy = along[1] * 0.8, along[0] * 0.8
        d = f"M{number(ax + dx)} {number(ay + dy)}L{number(x1)} {number(y1)}L{number(ax - dx)} {number(ay - dy)}"
        self.marks.append(f'<path class="open on-{colour}" stroke-width="1.5" d="{d}"/>')

    def box(
        self, x: float, y: float, width: float, height: float, text: str, colour: str, size: float = 13, edge: str = ""
    ) -> None:
        """A rectangle with text in its middle, one line for each of its lines."""
        self.rect(x, y, width, height, colour, edge, radius=4)
        lines = text.split("\n")
        top = y + height / 2 + size * 0.35 - (len(lines) - 1) * size * 0.65
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + i * size * 1.3, line, size, anchor="middle")

    def __str__(self) -> str:
        width, height = map(number, self.size)
        box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", f"<style>{STYLE}</style>", *self.marks, "</svg>", ""])


def _classes(colour: str, edge: str) -> str:
    return f"{colour} on-{edge}" if edge else colour
