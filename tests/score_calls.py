"""Calls of attention with all that scores may go through, as users make them, and the oracle's judgement on their results."""

import contextlib
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy
import pytest
from hand_masks import MASKS
from hand_scores import SCORES, Grid

from cupy_flash import KeyRanges, attention_vjp, dropout_mask
from cupy_flash.judge.compare import distance, finite
from cupy_flash.judge.oracle import HandScore, accumulator, capped_scores, dropped, naive, oracle, repeat_heads, seen_pairs
from cupy_flash.judge.oracle_gradients import gradients_of, naive_gradients, oracle_gradients, pairs_of
from cupy_flash.machine.numpy_path import backward, forward

NAMED = {example.name: example for example in SCORES + MASKS}
SWAP = {"q": -3, "k": -3, "v": -3, "out": -3, "lse": -2}  # the axis of heads, which 'bshd' exchanges with the next


@dataclass
class Call:
    """Attention of random inputs, its options, and what the oracle is told instead of them.

    Attributes
    ----------
    grid
        The pairs.
    dtype
        Of q, k and v.
    dim, dim_v, seed
    options
        Of `attention`: `score`, `mask` and so on are added by methods.
    told
        Of the oracle, likewise.
    broadcast
        Whether no input has all batch axes.
    """

    grid: Grid
    dtype: Any = "float64"
    dim: int = 5
    dim_v: int = 3
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    broadcast: bool = False
    flat: bool = False  # 2-D inputs: no axis of heads, which is one

    def __post_init__(self) -> None:
        wide = numpy.float64 if self.dtype == "float64" else numpy.float32
        self.told["scale"] = float(wide(self.told.get("scale", 1 / self.dim**0.5)))
        *batch, heads, len_q, len_kv = self.grid.shape
        of = [tuple(n if not self.broadcast or axis % 3 != i % 2 else 1 for axis, n in enumerate(batch)) for i in range(3)]
        heads_kv = self.grid.sizes["h_kv"]
        self.q = self.normal(*of[0], heads, len_q, self.dim)
        self.k = self.normal(*of[1], heads_kv, len_kv, self.dim)
        self.v = self.normal(*of[2], heads_kv, len_kv, self.dim_v)
        whole = numpy.broadcast_shapes(*of)
        assert whole == tuple(batch), (of, batch)

    def normal(self, *shape: int, dtype: Any = None) -> numpy.ndarray:
        """Other numbers in each call."""
        self.seed += 1
        return numpy.random.default_rng([self.seed, 77]).standard_normal(shape).astype(dtype or self.dtype)

    def expression(self, name: str, text: Any = None) -> "Call":
        """A score or a mask of `hand_scores`, by its text or by what is given in its place."""
        example = NAMED[name]
        arrays = {of: x for of, (_, x) in example.arrays(self.grid, self.seed).items()}
        self.options.setdefault("arrays", {}).update(arrays)
        self.options["score" if example.slope else "mask"] = text or example.text
        self.told["score" if example.slope else "seen"] = example.hand(self.grid, arrays)
        return self

    def both(self, **options: Any) -> "Call":
        """Options that the oracle has under the same name."""
        self.options |= options
        self.told |= options
        return self

    def mask(self, seen: numpy.ndarray) -> "Call":
        """Booleans as mask."""
        self.options["mask"] = self.told["seen"] = seen
        return self

    def ranges(self, start: Any, stop: Any) -> "Call":
        """Ranges as mask."""
        self.options["mask"], self.told["seen"] = KeyRanges(start, stop), seen_in_ranges(self.grid, start, stop)
        return self

    def band(self, causal: Any = False, window: Any = None, prefix: int = 0) -> "Call":
        """The masks of intervals."""
        self.options |= {"causal": causal, "window": window, "prefix": prefix}
        left, right = (None if end == -1 else end for end in window or (None, None))
        shift = 0 if causal == "top_left" else self.grid.kv_len - self.grid.q_len
        self.told["first_key"] = None if left is None else shift - left
        self.told["last_key"] = shift if causal else None if right is None else shift + right
        self.told["prefix"] = prefix
        return self

    def dropout(self, p: float, seed: Any, number: tuple[int, int] | None = None) -> "Call":
        """Dropout by a seed in any form; `number` is seed and offset, where the form is an array."""
        self.options |= {"dropout": p, "seed": seed}
        self.told["keep"] = dropout_mask(self.grid.shape, p, seed if number is None else number)
        self.told["keep_scale"] = 2**15 / (2**15 - min(round(p * 2**15), 2**15 - 1))
        return self

    @property
    def wrt(self) -> tuple[str, ...]:
        """All that has a gradient."""
        score = self.told.get("score")
        return (*(name for name in ("bias", "alibi_slopes") if name in self.options), *(score.arrays if score else ()))

    def inputs(self) -> list[numpy.ndarray]:
        """q, k and v as they are given."""
        given = [self.ordered(x, name) for x, name in zip((self.q, self.k, self.v), "qkv")]
        return [x[0] for x in given] if self.flat else given

    def ordered(self, x: numpy.ndarray, name: str) -> numpy.ndarray:
        """From the oracle's order of the axes to that of the call, or back."""
        return x.swapaxes(SWAP[name], SWAP[name] + 1) if self.options.get("layout") == "bshd" else x

    def run(self, wrt: tuple[str, ...] | None = None) -> tuple[numpy.ndarray, numpy.ndarray, Any]:
        """Result, log-sum-exp and gradients, in the order of the user."""
        (out, lse), vjp = attention_vjp(*self.inputs(), return_lse=True, wrt=self.wrt if wrt is None else wrt, **self.options)
        dout, dlse = self.cotangents()
        dout, dlse = self.ordered(dout, "out"), self.ordered(dlse, "lse")
        return out, lse, vjp(dout[0], dlse[0]) if self.flat else vjp(dout, dlse)

    def cotangents(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        rows, rng = self.grid.shape[:-1], numpy.random.default_rng(5)
        dout = rng.standard_normal((*rows, self.dim_v)).astype(self.dtype)
        return dout, rng.standard_normal(rows).astype(accumulator(dout.dtype))

    def check(self, wrt: tuple[str, ...] | None = None) -> None:
        """Judge result, log-sum-exp and gradients, those of `wrt`, by default of all that has one."""
        out, lse, grads = self.run(wrt)
        wrt = self.wrt if wrt is None else wrt
        if self.flat:
            out, lse, grads = out[None], lse[None], grads._replace(**{of: getattr(grads, of)[None] for of in grads._fields})
        got = {"out": self.ordered(out, "out"), "lse": self.ordered(lse, "lse")}
        got |= {f"d{name}": self.ordered(x, name) for name, x in zip("qkv", grads)}
        of_options = {"dsinks": grads.dsinks, "dbias": grads.dbias, "dalibi_slopes": grads.dalibi_slopes}
        got |= {name: x for name, x in of_options.items() if x is not None} | grads.darrays
        dout, dlse = self.cotangents()
        bounds = bounds_of(dout, self.q, self.k, self.v, dlse, self.told)
        names = {"bias", "alibi_slopes"} & set(wrt)
        expected = {"out", "lse", "dq", "dk", "dv", *(f"d{name}" for name in names), *(set(wrt) - names)}
        assert got.keys() == expected | ({"dsinks"} if "sinks" in self.options else set())
        given = {"dsinks": "sinks", "dbias": "bias", "dalibi_slopes": "alibi_slopes"}
        for name, x in got.items():
            truth, allowed = bounds[name]
            like = None if name in ("out", "lse", "dq", "dk", "dv") else self.options[given[name]] if name in given else None
            like = self.options["arrays"][name] if like is None and name in grads.darrays else like
            dtype = accumulator(self.q.dtype) if name == "lse" else self.dtype if like is None else numpy.asarray(like).dtype
            assert x.shape == truth.shape and x.dtype == dtype, (name, x.shape, truth.shape, x.dtype, dtype)
            error = distance(x, truth).max(initial=0)
            own = half_ulp(x.dtype) * finite(truth).max(initial=0)
            assert error <= allowed + own, f"{name}: error {error:.2e}, allowed {allowed:.2e} and {own:.2e} for rounding"


def half_ulp(dtype: Any) -> float:
    """Half a unit in the last place of 1."""
    return float(ml_dtypes.finfo(dtype).eps) / 2


@numpy.errstate(all="ignore")
def bounds_of(dout: Any, q: Any, k: Any, v: Any, dlse: Any, told: dict[str, Any]) -> dict[str, tuple[numpy.ndarray, float]]:
    """What each result has to be, and how far from it all of it may be.

    That is twice the error of `naive`, three times for gradients, and what single roundings may come to where naive happens to be
    exact: a share `r` of the sum whose terms are the magnitudes. The score, through all its steps, errs by `of_score` roundings of
    the largest of them, and its P by as much of itself. Gradients have besides the rounding of P, out and dS to the dtype of q.
    """
    wide = accumulator(q.dtype)
    u = half_ulp(wide)
    exact = [x.astype(numpy.float64) for x in (dout, q, k, v)]
    _, q8, k8, v8 = exact
    truth_out, truth_lse = oracle(q, k, v, **told)
    plain_out, plain_lse = naive(q, k, v, **told)
    truth, plain = oracle_gradients(dout, q, k, v, dlse=dlse, **told), naive_gradients(dout, q, k, v, dlse=dlse, **told)
    pairs = pairs_of(*exact, dlse, told)
    seen = numpy.broadcast_to(seen_pairs(pairs.p, told), pairs.p.shape)
    s, score = capped_scores(q8, k8, told["scale"], told.get("softcap")), told.get("score")
    rows, keys = (finite((x**2).sum(axis=-1) ** 0.5) for x in (q8, repeat_heads(k8, q8)))
    raw = abs(told["scale"]) * rows[..., None] * keys[..., None, :]
    slope = 1 if pairs.slope is None else finite(pairs.slope)
    steps = [raw * numpy.maximum(slope, 1), s, s if score is None else score.value(s)]
    steps += [told[name] for name in ("bias",) if told.get(name) is not None]
    if told.get("alibi_slopes") is not None:
        steps.append(told["alibi_slopes"][..., None, None] * float(max(s.shape[-2:])))
    largest = max(numpy.where(seen, finite(x.astype(numpy.float64)), 0).max(initial=0) for x in steps)
    of_sinks = 0.0 if told.get("sinks") is None else finite(told["sinks"].astype(numpy.float64)).max(initial=0)
    of_score = (24 + q.shape[-1]) * (largest + of_sinks + finite(truth_lse).max(initial=0) + 1)
    r = (of_score + s.shape[-1]) * u
    sizes = dropped(finite(pairs.p), told) @ repeat_heads(finite(v8), q8)
    bounds = {
        "out": (truth_out, 2 * worst(plain_out, truth_out) + r * sizes.max(initial=0)),
        "lse": (truth_lse, 2 * worst(plain_lse, truth_lse) + r),
    }

    r += 4 * half_ulp(q.dtype)
    size_dout, size_v = finite(exact[0]), finite(v8)
    dp = dropped(size_dout @ repeat_heads(size_v, q8).swapaxes(-1, -2), told)
    p = finite(pairs.p)
    delta = (dropped(p, told) * dp).sum(axis=-1) + (0 if dlse is None else abs(dlse))
    dlogits = numpy.where(seen, p * (dp + delta[..., None]), 0)
    of_sizes = told if score is None else told | {"score": magnitudes(score)}
    whole = pairs._replace(p=p, dp=dp, delta=-delta, ds=dlogits * slope, dlogits=dlogits)
    sizes = gradients_of(whole, size_dout, finite(q8), finite(k8), size_v, of_sizes)
    names = ("dq", "dk", "dv", "dsinks", "dbias", "dalibi_slopes")
    judged = {name: [getattr(x, name) for x in (truth, plain, sizes)] for name in names}
    judged |= {name: [x.darrays[name] for x in (truth, plain, sizes)] for name in truth.darrays}
    for name, (true, rounded, size) in judged.items():
        if true is not None:
            bounds[name] = true, 3 * worst(rounded, true) + r * finite(size).max(initial=0)
    return bounds


def magnitudes(score: HandScore) -> HandScore:
    """A score whose derivatives by its arrays are magnitudes."""

    def size(partial: Any) -> Any:
        return lambda s: abs(partial(s))

    return HandScore(score.value, score.slope, {name: (size(partial), add) for name, (partial, add) in score.arrays.items()})


def worst(plain: numpy.ndarray, truth: numpy.ndarray) -> float:
    """The largest error, where both are finite."""
    with numpy.errstate(invalid="ignore"):
        return float(finite(plain.astype(numpy.float64) - truth).max(initial=0))


@contextlib.contextmanager
def blocks(block_q: int, block_kv: int) -> Any:
    """Tiles of another size on NumPy, so that a small problem has several."""
    functions = [f.__wrapped__ for f in (forward.blocked, backward.blocked_gradients)]
    usual = [f.__kwdefaults__ for f in functions]
    for f, defaults in zip(functions, usual):
        f.__kwdefaults__ = defaults | {"block_q": block_q, "block_kv": block_kv}
    try:
        yield
    finally:
        for f, defaults in zip(functions, usual):
            f.__kwdefaults__ = defaults


def seen_in_ranges(grid: Grid, start: Any, stop: Any) -> numpy.ndarray:
    """Which keys lie in the ranges of each query, key by key."""
    start, stop = numpy.broadcast_arrays(start, stop)
    start, stop = (numpy.broadcast_to(x, (*grid.shape[:-1], (start.shape or (1,))[-1])) for x in (start, stop))
    seen = numpy.zeros(grid.shape, bool)
    for place in numpy.ndindex(start.shape):
        for key in range(max(start[place], 0), min(stop[place], grid.kv_len)):
            seen[(*place[:-1], key)] = True
    return seen


# What tests of calls share

BFLOAT16 = ml_dtypes.bfloat16
GRID = Grid.of((2,), 6, 2, 13, 21)
TALL = Grid.of((2, 3), 3, 1, 21, 13)
SMALL = Grid.of((2,), 4, 2, 4, 5)
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32", "float16", BFLOAT16], ids=lambda x: numpy.dtype(x).name)


def normal(*shape, seed=0, dtype="float64"):
    return numpy.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def truths(*shape, rate=0.6, seed=0):
    return numpy.random.default_rng([seed, *shape]).random(shape) < rate


def ends(*shape, keys, seed=0):
    """Ends of ranges, some of them beyond the keys."""
    return numpy.random.default_rng([seed, *shape]).integers(-2, keys + 3, shape)


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def strided(x):
    """The same elements at strides that are negative, exchanged or have gaps."""
    place = numpy.full([2 * n for n in x.shape[::-1]], 99).astype(x.dtype)
    view = place.T[tuple(slice(None, None, -2) for _ in x.shape)]
    view[...] = x
    return view
