"""Which pairs of a tile take part, as bits that are found before, and for which problems a kernel reads them instead of asking.

The bits are those of ``kernels_cu/tile/pair_bits.cuh``: one for each pair, of a mask that tells heads or batch elements apart of
each of these. Only those of tiles in which some pairs take part and others do not are written or read.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..problem.forward import Problem
from ..problem.scores import told_apart
from .expression_text import NOTHING, ExpressionText
from .kernel import taken_apart, text_of

ROWS, LANES = 16, 32  # of the words of a warp
HALF = 2  # bytes of a number
TILE = 128  # the longest side of a tile, to whose multiples both lengths are rounded
# Bits take at most so much of what q, k, v and out take, so that memory is linear in lengths. Of a mask of few heads they would
# take more, and to find them as long as to ask in their place.
SHARE = 0.5
MOST_PAIRS = 2**36  # whose words have numbers of 32 bits, whatever the tiles


def bytes_of_bits(problem: Problem, rows: int, cols: int, by_keys: bool) -> int:
    """Bytes of the words of all matrices, of tiles of so many columns and lists of so many rows, whether these exist or not."""
    height, width = (problem.len_kv, problem.len_q) if by_keys else (problem.len_q, problem.len_kv)
    return _matrices(problem) * (-(-height // rows) * rows // ROWS) * -(-width // cols) * LANES * (4 if cols <= 64 else 8)


def fits(problem: Problem) -> bool:
    """Whether the bits of a mask of pairs take little memory beside the arrays, in both directions."""
    numbers = problem.heads_q * problem.len_q + problem.heads_kv * problem.len_kv  # for each of q and out, k and v
    numbers *= math.prod(problem.batch) * (problem.dim + problem.dim_v)
    pairs = _matrices(problem) * math.prod(-(-length // TILE) * TILE for length in (problem.len_q, problem.len_kv))
    of_byte = 6 if 128 < max(problem.dim, problem.dim_v) <= 192 else 8  # of words of 64 bits for 48 pairs, in tiles of 96 keys
    return pairs <= MOST_PAIRS and pairs / of_byte <= SHARE * HALF * numbers


def _matrices(problem: Problem) -> int:
    return math.prod(told_apart(problem.scores, math.prod(problem.batch), problem.heads_q))


def with_bits(
    problem: Problem, text: ExpressionText, linear: bool = True, bends: bool = False, apart: bool = True
) -> ExpressionText:
    """The text of a kernel for sm_90a, which is told nothing of a mask whose bits it reads; of any other problem the same text.

    What becomes of scores besides is as it would be without the mask.

    Parameters
    ----------
    problem : Problem
    text : ExpressionText
        That of `taken_apart`.
    linear : bool
        Whether there are registers for what a row has of a linear term.
    bends : bool
        As of `taken_apart`.
    apart : bool
        Whether the text is taken apart at all.
    """
    if not text.takes_part or problem.lengths is not None or not fits(problem):
        return text
    rest = replace(problem, scores=replace(problem.scores, mask=None, mask_array=None))
    if not rest.scores.changes_scores:
        return replace(NOTHING, pair_bits=True)
    found = taken_apart(rest, text_of(rest), bends, listed=True) if apart else text_of(rest)
    found = text_of(rest) if found.kind == "PLUS_LINEAR" and not linear else found
    return replace(found, pair_bits=True)


def why_bits(text: ExpressionText) -> str:
    """Why the text of a kernel for sm_90a has bits in place of its mask, or why not; of any other text ''."""
    if text.pair_bits:
        return "which pairs take part is read, a bit for each, found before for all heads and batch elements that share the mask"
    if text.takes_part:
        return "the mask is asked of pairs: bits of all would take more than half of what q, k, v and out do"
    return ""
