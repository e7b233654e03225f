"""Few rows of queries, as in decoding, and short sequences: which of them are for fwd_v2 where there is fwd_hopper as well."""

from __future__ import annotations

import math

from ..problem.forward import Problem
from .expression_text import Pressure
from .key_warps import ROWS
from .packing import has_packed_scores
from .tuning import SHORT

NARROWEST, NARROW, MIDDLE, WIDE, WIDEST = 32, 64, 96, 128, 192  # head dims
FEW_KEYS = 1 << 17  # of all heads, about a thousand for each multiprocessor; of a head count
SHORTEST = 2048  # at least, since shorter ones have more tiles for as many keys
LITTLE = 3 << 16  # keys of all heads, which multiprocessors do not read at the rate of memory
SCARCE = 1 << 16  # keys of all heads, which are read before a block of fwd_hopper has begun
AT_ONCE, MANY = 128, 512  # heads: whose blocks run at once, and of which some wait long for their turn
LONG = 1 << 16  # keys of a head, that many blocks share
ENOUGH = 4096  # keys of a head, from which those of very few rows are read faster however many heads there are
HALF = ROWS // 2  # of a tile, up to which rows take a warp little time beside what it reads


def why_fwd_v2(problem: Problem, pressure: Pressure) -> str:
    """Why few rows, or short sequences, are for fwd_v2, or ''.

    A warpgroup of fwd_hopper multiplies 64 rows, and waits for what it reads and computes; a warp of fwd_v2 multiplies 16, and a
    multiprocessor has several blocks. Where blocks share a tile, the last one combines what they have, while fwd_hopper has a
    second kernel for that. All is as measured on an H200.

    Parameters
    ----------
    problem : Problem
        As the kernel is told it.
    pressure : Pressure
        What is asked for each of its pairs.
    """
    scores = problem.scores
    if problem.algorithm != "v2" or scores.dropout is not None:
        return ""
    if has_packed_scores(problem):
        return _why_scores(problem, pressure)
    if scores.masks_pairs:
        return _why_mask(problem)
    if _is_short(problem, pressure):
        return "short sequences: a block of fwd_hopper takes longer to begin than to multiply"
    return "few rows: a warpgroup of fwd_hopper multiplies more" * _has_few_rows(problem, pressure)


def _why_mask(problem: Problem) -> str:
    """The same of a mask alone, whose lists of one tile are no shorter than the tile: by 1.08 to 1.8 times."""
    short = max(problem.len_q, problem.len_kv) <= SHORT and max(problem.dim, problem.dim_v) <= NARROW
    return "short sequences, of which a mask hides pairs, not tiles" * (short and problem.len_kv > 0 and masks_alone(problem))


def masks_alone(problem: Problem) -> bool:
    """Whether a mask of pairs is all that is asked of scores."""
    asked = problem.scores.changes_scores or problem.scores.dropout is not None or problem.softcap is not None
    return problem.scores.masks_pairs and not asked and problem.sinks is None


def _is_short(problem: Problem, pressure: Pressure) -> bool:
    """Whether a sequence fills about a tile, of heads so narrow that the tile is soon computed: by 1.01 to 3.8 times.

    Not where TMA brings a bias.
    """
    rows, keys = problem.len_q, problem.len_kv
    if not rows or not keys or not problem.heads_q * math.prod(problem.batch) or problem.scores.bias is not None:
        return False
    if problem.scores and not has_packed_scores(problem):
        return _is_short_with_scores(problem, pressure)
    widest, capped = max(problem.dim, problem.dim_v), problem.softcap is not None
    if rows > SHORT:  # one tile more
        return rows <= keys <= 2 * SHORT and widest <= (NARROW if capped else NARROWEST) and not problem.scores
    if keys <= SHORT:  # up to 16 rows of wider heads have a tile with few keys
        return widest <= (WIDE if capped else MIDDLE if rows > ROWS else NARROW)
    if widest <= NARROWEST:
        return keys <= (8 if capped else 4) * SHORT and not problem.scores
    many = problem.heads_kv * math.prod(problem.batch) > AT_ONCE
    return capped and not problem.scores and keys <= (8 if widest <= NARROW and many else 4) * SHORT and widest <= MIDDLE


def _is_short_with_scores(problem: Problem, pressure: Pressure) -> bool:
    """The same of what is asked for each pair. Of 64 rows and keys, a tile of fwd_hopper is full, and has no others to wait for."""
    rows, keys, widest = problem.len_q, problem.len_kv, max(problem.dim, problem.dim_v)
    if rows > SHORT or widest > MIDDLE:
        return False
    if rows <= SHORT // 2 and keys <= SHORT and (widest <= NARROW or rows > ROWS):
        return True
    return pressure is Pressure.LONG_EXPRESSION and SHORT < keys <= 4 * SHORT and (widest <= NARROW or rows > ROWS)


def _has_few_rows(problem: Problem, pressure: Pressure) -> bool:
    """Whether rows are few enough, and keys many enough, or too few for all multiprocessors to read at the rate of memory."""
    rows, keys, widest = problem.len_q, problem.len_kv, max(problem.dim, problem.dim_v)
    heads = problem.heads_kv * math.prod(problem.batch)
    of_all = heads * keys
    if not 1 <= rows <= ROWS or not of_all or problem.mask.hides_first:
        return False
    if problem.scores.bias is not None and widest <= NARROW:
        return False
    capped = problem.softcap is not None and (widest <= NARROWEST or rows <= HALF or of_all < LITTLE or heads >= MANY)
    long = pressure is Pressure.LONG_EXPRESSION or (capped and widest <= NARROW)
    narrow = widest <= NARROWEST and (rows <= HALF or keys >= ENOUGH)
    very_few = rows == 1 or (rows <= HALF // 2 and MIDDLE < widest <= WIDE)
    if long or narrow or keys >= LONG or (very_few and keys >= ENOUGH):
        return True
    if not problem.scores and _has_few_keys(problem, heads):
        return True
    if rows <= (HALF if widest <= WIDE else HALF // 2):
        return keys >= (SHORTEST if widest <= WIDE else ENOUGH) and of_all <= LITTLE
    return keys >= 4 * SHORTEST and of_all <= LITTLE // 2


def _has_few_keys(problem: Problem, heads: int) -> bool:
    """The same of few keys, as in the first steps of decoding, by 0.97 to 2.4 times: of all heads, or of each however many."""
    rows, keys, widest = problem.len_q, problem.len_kv, max(problem.dim, problem.dim_v)
    scarce, capped, very_few = heads * keys <= SCARCE, problem.softcap is not None, rows <= HALF // 2
    if widest > WIDEST:
        return scarce and very_few and heads <= AT_ONCE
    if widest > WIDE:
        few = scarce and heads <= AT_ONCE and (very_few or capped)
        return few or (very_few and keys <= (8 if capped else 2) * SHORT)
    if rows > HALF:
        beyond = widest > MIDDLE and keys <= (8 if capped else 1) * SHORT
        return beyond or (scarce and capped and (widest > MIDDLE or keys >= SHORTEST // 2))
    most = 8 if capped or (very_few and not NARROW < widest <= MIDDLE) else 1
    return scarce or keys <= most * SHORT


def _why_scores(problem: Problem, pressure: Pressure) -> str:
    """The same of heads that share a tile and have scores of their own; of more than 64 rows, groups hide each other's waits."""
    if problem.scores.masks_pairs:
        return "heads that share a tile have one list of key tiles, which fwd_v2 visits"
    if problem.len_q <= ROWS:
        return "few rows of heads that share a tile, each with scores of its own"
    if _is_short(problem, pressure):
        return "short sequences, each row with scores of its own"
    widest, bias = max(problem.dim, problem.dim_v), problem.scores.bias
    if problem.len_q > SHORT or widest > WIDE:
        return ""
    if bias is not None:
        return "few rows, each with a bias of its own" * (widest > NARROW or bias.dtype == "float32")
    heads = problem.heads_kv * math.prod(problem.batch)
    is_little = heads * max(problem.len_kv, SHORTEST) <= FEW_KEYS
    return "few rows of few keys, of which each score takes long" * (is_little and pressure is Pressure.LONG_EXPRESSION)
