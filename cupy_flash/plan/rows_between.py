"""Tiles of fwd_hopper for head dims and lengths between those that its table is for; as measured on an H200.

Rows of the table are the best for head dims of 64, 128, 192 and 256 and for many queries, or for powers of two of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..problem.forward import Problem
from ..problem.layout import Layout
from .columns import PANEL
from .expression_text import NOTHING, ExpressionText
from .few_tiles import rows_that_hold
from .sequences import UNBOUNDED, row_length
from .tuning import NARROW, PINGPONG, THREE, THREE_GROUPS, THREE_NARROW, TWO, TWO_GROUPS, TileConfig

FULL_OR_CAUSAL = ("full", "causal")
FITS = "192 queries leave fewer rows of the last tile empty"
FITS_TWO = "256 queries would leave half of a tile empty"
STRADDLING = "rows of keys straddle what memory delivers at once, so that more queries have to share them"
WIDER_KEYS = "narrower sums leave registers to wider key tiles"
WIDEST = 128  # columns of these rows
SECTOR = 16  # elements that memory delivers at once, of 16 bits
SHORTEST = 257  # queries: up to 256 mostly fill tiles of 128
PLAIN = {"without_lengths": True, "masks": FULL_OR_CAUSAL}
OF_TWO = {**TWO, **PLAIN, "pingpong": True}
OF_64 = {**NARROW, **PLAIN, "plain_scores": True}
OF_96 = {"warps": 16, "stages_q": 4, "tma_store_out": True, "min_blocks": 1, "plain_scores": True, **PLAIN}


@dataclass(frozen=True, slots=True)
class Between:
    """A row, and which problems it is tried for before those of the table."""

    above: int  # head dims, up to the row's `width`
    row: TileConfig
    first: int = SHORTEST  # queries, up to the row's `max_len_q`
    straddling: bool = False  # only where rows of keys do not begin at multiples of a sector

    def serves(self, problem: Problem) -> bool:
        """Whether a problem is as wide and as long as this is for."""
        wide = self.above < max(problem.dim, problem.dim_v) <= self.row.width
        long = self.first <= row_length(problem) <= (self.row.max_len_q or UNBOUNDED)
        fits = self.row.width < WIDEST or not problem.has_wider_results  # in float32 they would spill
        return wide and long and fits and (not self.straddling or _straddles(problem.k) or _straddles(problem.v))


BETWEEN = (
    Between(0, TileConfig(64, 128, 128, f"{TWO_GROUPS}{PINGPONG}; {FITS_TWO}", **OF_TWO, max_len_q=128), first=65),
    Between(0, TileConfig(64, 192, 128, f"{THREE_GROUPS}; {FITS}", **THREE, **PLAIN, pingpong=True, max_len_q=384)),
    Between(0, TileConfig(64, 192, 128, f"{THREE_GROUPS}; {FITS}", **THREE, **PLAIN, pingpong=True, max_len_q=576), first=513),
    Between(64, TileConfig(96, 192, 64, f"{THREE_NARROW}; {FITS}", **OF_64, pingpong=True, max_len_q=192), first=129),
    Between(64, TileConfig(96, 192, 64, f"{THREE_NARROW}; {FITS}", **OF_64, pingpong=True, max_len_q=384)),
    Between(64, TileConfig(96, 192, 64, f"{THREE_NARROW}; {STRADDLING}", **OF_64, pingpong=True), straddling=True),
    Between(64, TileConfig(80, 192, 64, f"{THREE_NARROW}; {STRADDLING}", **OF_64, pingpong=True, max_len_q=2048)),
    Between(64, TileConfig(96, 192, 96, f"{THREE_GROUPS}; {WIDER_KEYS}", **OF_96, pingpong=True), first=1025),
    Between(96, TileConfig(128, 192, 64, f"{THREE_NARROW}; {FITS}", **OF_64, max_len_q=192), first=129),
    Between(96, TileConfig(128, 192, 64, f"{THREE_NARROW}; {FITS}", **OF_64, max_len_q=384)),
    Between(96, TileConfig(128, 192, 64, f"{THREE_NARROW}; {STRADDLING}", **OF_64), straddling=True),
    Between(96, TileConfig(112, 192, 64, f"{THREE_NARROW}; {STRADDLING}", **OF_64), first=1025),
)


def _straddles(keys: Layout) -> bool:
    return any(stride % SECTOR for stride, size in zip(keys.strides[:-1], keys.shape) if size > 1)


@dataclass(frozen=True, slots=True)
class Fit:
    """Of how many queries a tile leaves the fewest rows empty, where something is asked of pairs."""

    above: int  # head dims, up to
    widest: int
    first: int  # queries, up to
    last: int
    tile_q: tuple[int, ...]  # the first of these that there is
    most_keys: int = WIDEST  # of a tile

    def serves(self, problem: Problem) -> bool:
        """Whether a problem is as wide and as long as this is for."""
        return self.above < max(problem.dim, problem.dim_v) <= self.widest and self.first <= problem.len_q <= self.last


FITTING = "so many queries leave fewer rows of its last tile empty"
FITS = (
    Fit(0, PANEL, 65, 128, (128,)),
    Fit(0, PANEL, 129, 192, (192,), most_keys=64),  # wider key tiles compute more pairs that do not exist than rows
    Fit(0, PANEL, 193, 256, (256, 128)),
    Fit(0, PANEL, 257, 384, (192,)),
    Fit(0, PANEL, 513, 576, (192,)),
    Fit(PANEL, WIDEST, 65, 128, (128,)),
    Fit(PANEL, WIDEST, 129, 192, (192,)),
    Fit(PANEL, WIDEST, 193, 256, (128,)),
    Fit(PANEL, WIDEST, 257, 384, (192,)),
)
LONGEST_MASKED = 256  # queries: of more, a mask leaves narrow tiles less to do than lists to go through


def rows_between(
    problem: Problem, table: tuple[TileConfig, ...] = (), expressions: ExpressionText = NOTHING, explicit: bool = False
) -> tuple[TileConfig, ...]:
    """The rows that come before those of the table, where heads have tiles of their own.

    Where something is asked of pairs it is the one that so many queries fill, if there is; as measured of 100 to 640 queries,
    causal and without a mask.

    Parameters
    ----------
    problem : Problem
        As the kernel is told it.
    table : tuple of TileConfig, optional
        The rows for what is asked.
    expressions : ExpressionText, optional
    explicit : bool, optional
        Whether scores are scaled one by one.
    """
    if problem.mask.queries is not None:
        return ()
    if not problem.scores:
        return tuple(between.row for between in BETWEEN if between.serves(problem))
    fit = next((fit for fit in FITS if fit.serves(problem)), None)
    masked = problem.scores.masks_pairs and problem.scores.bias is None
    other = problem.lengths is not None or problem.has_wider_results or problem.mask.shape not in FULL_OR_CAUSAL
    if not fit or other or (masked and problem.len_q > LONGEST_MASKED):
        return ()
    widest = max(problem.dim, problem.dim_v)
    if expressions.kind == "PLUS_COLUMN" and widest > PANEL:  # shared memory has no room for terms beside three groups
        return ()
    rows = [row for row in (*rows_that_hold(problem, table, expressions, 0), *table) if row.serves(widest, problem.dim_v)]
    narrowest = min((row.width for row in rows), default=0)
    for tile_q in fit.tile_q:
        for row in rows:
            fits = row.width == narrowest and row.tile_q == tile_q and row.tile_kv <= fit.most_keys
            held = not (explicit and row.plain_scores) and not (problem.sinks and row.without_sinks)
            if fits and held and problem.mask.shape in row.masks:
                return (replace(row, why=FITTING, max_len_q=None),)
    return ()
