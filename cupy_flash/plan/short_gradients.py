"""Gradients of short sequences, and of few heads: which are for bwd_v2 or bwd_hopper_wide, or in order without being asked."""

from __future__ import annotations

import math

from ..problem.backward import BackwardProblem
from ..problem.forward import Problem
from .expression_text import Pressure
from .few_rows import MIDDLE, NARROW, NARROWEST, WIDE, masks_alone
from .grouping import BEGINNING, RUNNING
from .makespan import makespan
from .sequences import is_packed, mean_room
from .stored_dbias import dbias_of_pairs
from .tuning import SHORT

BLOCKS = 512  # of bwd_hopper: four for each multiprocessor of an H200
KEYS, WIDE_KEYS = 128, 64  # of such a block, and of one of bwd_hopper_wide,
AS_LONG = 1.19  # times whose steps its own take, as measured on an H200, of
STEP = 64  # queries
MOST_BLOCKS = 2 * RUNNING  # of bwd_hopper: of more, the longest one does not decide
SOONER = 0.95  # times as late as blocks of bwd_hopper, at most, the last of bwd_hopper_wide ends
HEADS = 512  # of all sequences of their own lengths, short ones of which are for bwd_v2
STORED_CAUSAL = {False: 1024, True: 256}  # rows of a sequence, or packed on average, up to which a causal mask leaves order time
LONG_ROWS = 16384  # queries, from which on windows may be twice as wide, as they may of heads up to NARROWEST
AROUND_ROWS = 2048  # queries, from which on windows on both sides of a query may


def why_bwd_v2(problem: BackwardProblem, pressure: Pressure) -> str:
    """Why gradients of few queries, or few keys, are for bwd_v2, or ''; as measured on an H200, where it is 1.0 to 3 times as fast.

    A block of bwd_hopper takes 7 microseconds whatever little it has to do, and a multiprocessor has one of them at a time.

    Parameters
    ----------
    problem : BackwardProblem
    pressure : Pressure
        What is asked for each of its pairs.
    """
    p = problem.forward
    rows, keys, widest = p.len_q, p.len_kv, max(p.dim, p.dim_v)
    heads = p.heads_q * math.prod(p.batch)
    if p.lengths is not None:
        why = "short sequences of their own lengths: a block of bwd_hopper takes longer to begin than to multiply"
        return why * (_only_lengths(problem) and _is_short_of_lengths(p))
    if widest > NARROW or not rows or not keys or not heads:
        return ""
    blocks, narrowest = heads * (-(-keys // KEYS) if keys > SHORT else 2), widest <= NARROWEST  # half a block takes as long as one
    many = blocks >= BLOCKS
    around = p.mask.left is not None and p.mask.right is not None and p.mask.left < 0 < p.mask.right  # three tiles of 128, not two
    of_window = 2 * SHORT + around if narrowest or rows >= (AROUND_ROWS if around else LONG_ROWS) else SHORT
    if blocks >= (BLOCKS if narrowest or around else 2 * BLOCKS) and _is_narrow_window(p, problem, of_window):
        return "a narrow window: a block of bwd_hopper takes longer to begin than to go through the few queries of its keys"
    if masks_alone(p):
        filled = min(rows, keys) > 2 * SHORT and max(rows, keys) <= 3 * SHORT  # two blocks of bwd_hopper, half of whose keys exist
        faster = (max(rows, keys) <= SHORT and (narrowest or many)) or (filled and narrowest and many)
    elif p.scores:
        alone = not p.scores.masks_pairs and p.scores.dropout is None and dbias_of_pairs(problem) is None
        cheap = alone and pressure in (Pressure.TERM, Pressure.BIAS)
        faster = widest <= NARROWEST and rows <= SHORT and keys <= SHORT and many and cheap
    elif rows <= SHORT:
        most = keys if p.softcap is None else 4 * SHORT if narrowest else SHORT
        whole = not narrowest and SHORT < keys <= KEYS  # heads that a block of bwd_hopper takes whole, see `takes_whole_heads`
        faster = keys <= most and not whole and (many or (narrowest and p.softcap is None))
    else:  # heads of at most 128 keys are taken whole; with a softcap that was not measured
        plain = p.softcap is None and KEYS < keys <= 3 * SHORT and rows <= 3 * SHORT
        faster = narrowest and many and (plain or (p.softcap is not None and keys <= SHORT))
    return "short sequences, of queries or keys: a block of bwd_hopper takes longer to begin than to multiply" * faster


def why_wide(problem: BackwardProblem) -> str:
    """Why those of fewer heads, or of wider ones, are for bwd_hopper_wide, or ''; as measured, 1.04 to 1.41 times as fast there."""
    p = problem.forward
    width = max(p.dim, p.dim_v)
    if p.lengths is not None:
        short = MIDDLE < width <= WIDE and _only_lengths(problem) and not is_packed(p, "q") and _longest(p) <= SHORT
        return "short sequences of their own lengths: a block of bwd_hopper owns 128 keys, of bwd_hopper_wide 64" * short
    if width > WIDE:
        return ""
    if 1 <= p.len_q <= SHORT and 1 <= p.len_kv <= SHORT and not p.scores and p.softcap is None:
        return "short sequences: a block of bwd_hopper owns 128 keys, of bwd_hopper_wide 64"
    sooner = width > NARROW and _ends_sooner(problem)
    return "few blocks under a causal mask: the longest of 64 keys ends sooner than of 128" * sooner


def stores_sooner(problem: BackwardProblem, key_tiles: int) -> bool:
    """Whether gradients of sequences of their own lengths are sooner there if their first block stores, which takes an order.

    No sums have to be zero before. As measured on an H200, in 0.88 to 0.98 of the time: where nobody waits, since one block or two
    own the keys, or under a causal mask, which lets blocks begin where nobody has been. Idle warps make statistics of packed
    sequences ahead up to `NARROW`, but not in order.

    Parameters
    ----------
    problem : BackwardProblem
    key_tiles : int
        That a head has room for.
    """
    p = problem.forward
    width, causal = max(p.dim, p.dim_v), p.mask.shape == "causal"
    if not _only_lengths(problem) or p.mask.shape not in ("full", "causal"):
        return False
    packed, between = is_packed(p, "q"), NARROW < width <= WIDE
    few = not packed and (key_tiles == 1 or (key_tiles == 2 and not between))
    return few or (causal and (between or not packed) and _longest(p) <= STORED_CAUSAL[packed])


def _only_lengths(problem: BackwardProblem) -> bool:
    """Whether lengths of sequences, which lie alike on both sides, are all that is asked, in any order: else bits would change."""
    p = problem.forward
    plain = not p.scores and p.softcap is None and p.sinks is None and p.dtype != "float32"
    return plain and not problem.deterministic and is_packed(p, "q") == is_packed(p, "kv") and p.len_q > 0 and p.len_kv > 0


def _longest(p: Problem) -> int:
    """Rows that sequences have room for, of the side that has more; of packed ones on average."""
    return max(mean_room(p, side) for side in ("q", "kv"))


def _is_short_of_lengths(p: Problem) -> bool:
    """Whether sequences of their own lengths are so short that bwd_v2 is faster: by 1.1 to 2.8 times."""
    packed, width, rows = is_packed(p, "q"), max(p.dim, p.dim_v), _longest(p)
    if p.heads_q * (p.lengths.sequences if packed else math.prod(p.batch)) < HEADS:
        return False
    if rows <= SHORT:
        return width <= (NARROW if packed else MIDDLE)
    return not packed and rows <= 2 * SHORT and width <= NARROW


def _ends_sooner(problem: BackwardProblem) -> bool:
    """Whether the last block of bwd_hopper_wide ends sooner, of which there are twice as many.

    Of few blocks, all of which run at once, the longest decides. Under a causal mask that is the one of the first keys, which all
    queries see, and half of its keys take it 0.84 of the time. In any order: in order they would wait for each other more often.
    What pairs a mask leaves to each nobody knows here.
    """
    p = problem.forward
    heads = p.heads_q * math.prod(p.batch)
    blocks = heads * -(-p.len_kv // KEYS)
    if problem.deterministic or p.mask.shape != "causal" or p.scores.masks_pairs or dbias_of_pairs(problem) is not None:
        return False
    if not 0 < blocks <= MOST_BLOCKS or not p.len_q or p.has_wider_results:  # which were not measured
        return False
    ends, sooner = (
        makespan((float(steps) * pace + BEGINNING for steps in p.mask.tiles_of_queries(keys, STEP) for _ in range(heads)), RUNNING)
        for keys, pace in ((KEYS, AS_LONG), (WIDE_KEYS, 1.0))
    )
    return sooner <= SOONER * ends


def _is_narrow_window(p: Problem, problem: BackwardProblem, widest: int) -> bool:
    """Whether queries see so few keys; as measured, 1.0 to 1.6 times as fast by bwd_v2."""
    left, right = p.mask.left, p.mask.right
    asked = bool(p.scores) or p.softcap is not None or p.lengths is not None or problem.deterministic
    return not asked and left is not None and right is not None and right - left < widest
