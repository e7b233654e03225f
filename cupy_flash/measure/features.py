"""What a score may be asked besides plain attention, as problems to measure: each beside dense attention of the same shape.

A `Feature` says it three times: in the options of `attention`, in array code for the oracle, and which pairs it leaves. What peers
are asked is in `feature_peers`. A gate is the share of the rate of dense attention that it should reach, for each pair that a
tile which has to be computed holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy

from ..judge.dropout import keep_scale_of, threshold_of
from ..judge.oracle import HandScore
from ..machine.numpy_path.dropout import keeps
from ..problem.arrays import DTYPES
from ..problem.key_ranges import KeyRanges
from .cells import HIDDEN, TOKENS, Cell

Options = dict[str, Any]
P_DROPPED, SEED, SOFTCAP = 0.1, 7, 50.0
# Keys before a query, and behind it, that it sees besides its own.
WINDOWS = {"window": (1023, 0), "window around": (512, 511)}
# Asked of FlexAttention too.
FLEXIBLE = (
    *("alibi", "alibi unmasked", "softcap", "softcap causal", "column term", "temperature"),
    *("documents", "drawn documents", "prefix", "ranges", *WINDOWS),
)
DOCUMENTS, PREFIX, FIRST_KEYS, NEAR = 8, 1024, 64, 1024


@dataclass(frozen=True)
class FeatureCell(Cell):
    """A problem whose scores have a feature."""

    feature: Feature

    def __str__(self) -> str:
        return f"{self.feature.name}: {super().__str__()}"

    @property
    def plain(self) -> Cell:
        """The same shape and mask without the feature."""
        return Cell(self.direction, self.dtype, self.dim, self.causal, self.seq, self.batch, self.heads)

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, in each head."""
        seen = self.feature.seen
        return super().pairs if seen is None else int(numpy.count_nonzero(seen(self)))


@dataclass(frozen=True)
class Feature:
    """What scores are asked.

    Parameters
    ----------
    name : str
    options : callable
        From a cell and a random generator, of NumPy or CuPy, the options of `attention` but `causal`, with arrays of either.
    told : callable
        From a cell, its options, a slice of batch elements and one that is a head, and NumPy or CuPy, of whose arrays the options
        are: what the oracle is told instead of them, for that head of those batch elements.
    forward, backward : float
        Gates.
    causal : bool
    seen : callable, optional
        From a cell, booleans `(seq, seq)`. By default the mask that `causal` says.
    wrt : tuple of str
        What has a gradient besides q, k and v.
    seqs, dims, heads : tuple of int, int
        Sequence lengths and head dims; heads, by default as many as give `HIDDEN` numbers.
    rows : bool
        Whether a batch has as many elements as a sequence has tokens, as rows of a pair representation have; otherwise it has
        `TOKENS` tokens.
    """

    name: str
    options: Callable[[FeatureCell, Any], Options]
    told: Callable[[FeatureCell, Options, slice, slice, Any], Options]
    forward: float
    backward: float
    causal: bool = False
    seen: Callable[[FeatureCell], numpy.ndarray] | None = None
    wrt: tuple[str, ...] = ()
    seqs: tuple[int, ...] = (4096,)
    dims: tuple[int, ...] = (64, 128)
    heads: int = 0
    rows: bool = field(default=False)

    def gate(self, direction: str) -> float:
        """The share of dense attention's rate that is asked for."""
        return self.forward if direction == "forward" else self.backward

    def cells(self, directions: Iterable[str]) -> Iterator[FeatureCell]:
        """The problems to measure, in bfloat16."""
        for dim in self.dims:
            for seq in self.seqs:
                batch = seq if self.rows else max(1, TOKENS // seq)
                for direction in directions:
                    yield FeatureCell(direction, "bfloat16", dim, self.causal, seq, batch, self.heads or HIDDEN // dim, self)


def _normal(rng: Any, *shape: int) -> Any:
    return rng.standard_normal(shape, numpy.float32)


def documents(cell: Cell) -> numpy.ndarray:
    """The number of the document of each token; all are of one length."""
    return numpy.arange(cell.seq, dtype=numpy.int32) * DOCUMENTS // cell.seq


def drawn_documents(cell: Cell) -> numpy.ndarray:
    """The same of as many documents whose ends are drawn, the same ones each time."""
    ends = numpy.random.default_rng(SEED).choice(cell.seq, DOCUMENTS - 1, replace=False)
    return numpy.searchsorted(numpy.sort(ends), numpy.arange(cell.seq), side="right").astype(numpy.int32)


def _same(of_tokens: Callable[[Cell], numpy.ndarray]) -> Callable[[Cell], numpy.ndarray]:
    def pairs(cell: Cell) -> numpy.ndarray:
        doc = of_tokens(cell)
        return doc[:, None] == doc

    return pairs


def _before_or_prefix(cell: Cell) -> numpy.ndarray:
    i, j = numpy.arange(cell.seq)[:, None], numpy.arange(cell.seq)
    return (j <= i) | (j < PREFIX)


def _ranges(cell: Cell) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The first keys, and those near each query: where two ranges of keys begin and where they end."""
    i = numpy.arange(cell.seq, dtype=numpy.int32)
    start = numpy.stack([0 * i, numpy.maximum(i - NEAR + 1, 0)], axis=-1)
    return start, numpy.stack([numpy.minimum(i + 1, FIRST_KEYS), i + 1], axis=-1)


def _in_ranges(cell: Cell) -> numpy.ndarray:
    (start, stop), j = _ranges(cell), numpy.arange(cell.seq)
    first, near = ((start[:, n, None] <= j) & (j < stop[:, n, None]) for n in range(2))
    return first | near


def _in_window(cell: FeatureCell) -> numpy.ndarray:
    left, right = WINDOWS[cell.feature.name]
    distance = numpy.arange(cell.seq) - numpy.arange(cell.seq)[:, None]
    return (-left <= distance) & (distance <= right)


def _column(cell: FeatureCell, given: Options, batch: slice, heads: slice, xp: Any) -> Options:
    added = given["arrays"]["t"]
    return {"score": _of_any_head(lambda s: s + added.astype(s.dtype), lambda s: s * 0 + 1)}


def _temperature(cell: FeatureCell, given: Options, batch: slice, heads: slice, xp: Any) -> Options:
    factor = given["arrays"]["t"][heads, None, None]
    return {"score": _of_any_head(lambda s: s * factor.astype(s.dtype), lambda s: s * 0 + factor.astype(s.dtype))}


def _of_any_head(value: Callable[[Any], Any], slope: Callable[[Any], Any]) -> HandScore:
    return HandScore(value, slope, part=lambda index: _of_any_head(value, slope))


def _bias(cell: FeatureCell, given: Options, batch: slice, heads: slice, xp: Any) -> Options:
    bias = given["bias"]
    return {"bias": (bias[batch] if bias.ndim == 4 else bias)[..., heads, :, :]}


def _draw_bias(cell: FeatureCell, rng: Any, *leading: int) -> Options:
    return {"bias": _normal(rng, *leading, cell.heads, cell.seq, cell.seq).astype(DTYPES[cell.dtype])}


def _kept(cell: FeatureCell, given: Options, batch: slice, heads: slice, xp: Any) -> Options:
    tokens, threshold = xp.arange(cell.seq), threshold_of(P_DROPPED)
    of_heads = [keeps(threshold, SEED, 0, b * cell.heads + heads.start, tokens, tokens) for b in range(cell.batch)[batch]]
    return {"keep": xp.stack(of_heads)[:, None], "keep_scale": keep_scale_of(P_DROPPED)}


def _of_mask(cell: FeatureCell, given: Options, batch: slice, heads: slice, xp: Any) -> Options:
    return {"seen": xp.asarray(cell.feature.seen(cell))}


def _slopes(cell: FeatureCell, rng: Any) -> Options:
    return {"alibi_slopes": 2.0 ** -numpy.linspace(1, 8, cell.heads, dtype=numpy.float32)}


def _of_slopes(cell: FeatureCell, given: Options, batch: slice, heads: slice, xp: Any) -> Options:
    return {"alibi_slopes": given["alibi_slopes"][heads]}


FEATURES = (
    Feature("alibi", _slopes, _of_slopes, 0.97, 0.97, causal=True),
    Feature("alibi unmasked", _slopes, _of_slopes, 0.97, 0.97, seqs=(1024, 4096)),
    Feature(
        "sinks",
        lambda cell, rng: {"sinks": _normal(rng, cell.heads)},
        lambda cell, given, batch, heads, xp: {"sinks": given["sinks"][heads]},
        0.97,
        0.97,
        causal=True,
    ),
    *(
        Feature(
            name,
            lambda cell, rng: {"softcap": SOFTCAP},
            lambda cell, given, batch, heads, xp: {"softcap": given["softcap"]},
            0.0,
            0.0,
            causal=causal,
            dims=(64, 128, 256),
        )
        for name, causal in (("softcap", False), ("softcap causal", True))
    ),
    Feature(
        "column term",
        lambda cell, rng: {"score": "score + t[kv_idx]", "arrays": {"t": _normal(rng, cell.seq)}},
        _column,
        0.97,
        0.97,
        causal=True,
    ),
    Feature(
        "temperature",
        lambda cell, rng: {"score": "score * t[h]", "arrays": {"t": 1 + 0.1 * _normal(rng, cell.heads)}},
        _temperature,
        0.95,
        0.95,
        causal=True,
    ),
    Feature("bias (1, h, s, s)", _draw_bias, _bias, 0.90, 0.75, wrt=("bias",)),
    Feature("bias (b, h, s, s)", lambda cell, rng: _draw_bias(cell, rng, cell.batch), _bias, 0.90, 0.75, wrt=("bias",)),
    Feature("pair bias", _draw_bias, _bias, 0.0, 0.0, wrt=("bias",), seqs=(256, 512, 1024), dims=(32, 64), heads=4, rows=True),
    *(
        Feature(
            name,
            lambda cell, rng, of_tokens=of_tokens: {"mask": "doc[q_idx] == doc[kv_idx]", "arrays": {"doc": of_tokens(cell)}},
            _of_mask,
            0.90,
            0.90,
            seen=_same(of_tokens),
            seqs=(8192,),
        )
        for name, of_tokens in (("documents", documents), ("drawn documents", drawn_documents))
    ),
    Feature(
        "prefix",
        lambda cell, rng: {"mask": "kv_idx <= q_idx or kv_idx < n", "arrays": {"n": PREFIX}},
        _of_mask,
        0.90,
        0.90,
        seen=_before_or_prefix,
        seqs=(8192,),
    ),
    Feature(
        "ranges",
        lambda cell, rng: {"mask": KeyRanges(*_ranges(cell))},
        _of_mask,
        0.90,
        0.90,
        seen=_in_ranges,
        seqs=(8192,),
    ),
    *(
        Feature(
            name,
            lambda cell, rng: {"window": WINDOWS[cell.feature.name]},
            _of_mask,
            0.90,
            0.90,
            seen=_in_window,
            seqs=(8192,),
            dims=(64, 128, 256),
        )
        for name in WINDOWS
    ),
    Feature("dropout", lambda cell, rng: {"dropout": P_DROPPED, "seed": SEED}, _kept, 0.85, 0.75),
)
