"""The problems that `check`, the tests and the benchmarks share.

A `Case` is one call of `attention`: shapes, dtype, options, the kind of numbers and how they lie in memory. Its name
says all of that and is unique, so a failure can be repeated by name. `quick_cases` touches every feature and is small
enough for kernels executed on a CPU; `full_cases` is systematic and holds the quick ones.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from types import ModuleType
from typing import Any, Literal, get_args

import numpy

from .expressions import MASKS, SCORES
from .layouts import GUARD, Layout, place
from .operands import dtype_named, meaning_of, operands_of
from .pair_cases import pair_cases

__all__ = ["GUARD", "Case", "Layout", "Values", "case_named", "full_cases", "make_inputs", "make_sinks", "place", "quick_cases"]

Values = Literal["normal", "offset", "large", "one_hot", "constant"]
HEAVY_FLOPS = 30e6  # the kernels run at about 1 GFLOP/s on a CPU


@dataclass(frozen=True)
class Case:
    """One attention problem.

    Attributes
    ----------
    dtype
        "float16", "bfloat16", "float32" or "float64".
    batch
        The leading axes; none, one or several.
    values
        "normal": standard normal. "offset": normal around 0.5. "large": scores spread to about +-1000, so that the
        softmax picks single keys. "one_hot": query i matches exactly the keys j with j = i modulo dim, so that a result
        is an average of whole V rows. "constant": one number per array, so that every P in a row is equal.
    layout
        "contiguous". "bshd": stored (batch, seq, heads, dim). "sliced": cut from a larger array along seq and dim.
        "strided_dim": every second element. "transposed": seq is the innermost axis. "negative": reversed along seq.
        "broadcast": k and v are one batch element seen with stride 0. "odd_offset": starts one element off alignment.
    sinks
        How many logits a head has besides those of its keys.
    sinks_dtype
        Of the array of these: "float32" unless given, "float64" for float64.
    score
        An expression, by its name in `expressions.SCORES`.
    mask
        Likewise of `expressions.MASKS`, or "array": booleans for each batch element, of which one row in seven sees nothing.
    bias
        Which axes it has, by a name of `operands.BIASES`: "full", "heads" (one for all batch elements), "batch" (one for all
        heads), "keys" (one for all heads and queries) or "pairs".
    bias_dtype
        Unless given that of q.
    alibi
        "heads": a slope for each of them. "batch": for each of them in each batch element.
    dropout
        The probability.
    """

    dtype: str
    len_q: int
    len_kv: int
    dim: int = 64
    dim_v: int | None = None
    heads_q: int = 1
    heads_kv: int | None = None
    batch: tuple[int, ...] = (1,)
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    prefix: int = 0
    softcap: float | None = None
    scale: float | None = None
    precision: Literal["ieee", "tf32"] = "ieee"
    return_lse: bool = True
    values: Values = "normal"
    layout: Layout = "contiguous"
    sinks: int = 0
    sinks_dtype: str | None = None
    score: str | None = None
    mask: str | None = None
    bias: str | None = None
    bias_dtype: str | None = None
    alibi: Literal["heads", "batch"] | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        # What attention() itself would assume: spelt out here, two equal cases are equal and have one name.
        of_sinks = "float64" if self.dtype == "float64" else "float32"
        defaults = {"dim_v": self.dim, "heads_kv": self.heads_q, "sinks_dtype": of_sinks, "bias_dtype": self.dtype}
        for field, default in defaults.items():
            if getattr(self, field) is None:
                object.__setattr__(self, field, default)

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """A slug that differs wherever two cases differ; features at their default are left out."""
        wide = "float64" if self.dtype == "float64" else "float32"
        heads = f"{self.heads_q}x{self.heads_kv}" if self.heads_kv != self.heads_q else f"{self.heads_q}"
        parts = [
            "tf32" if self.precision == "tf32" else self.dtype,
            "b" + ("x".join(map(str, self.batch)) or "none") if self.batch != (1,) else "",
            f"h{heads}-q{self.len_q}-k{self.len_kv}-d{self.dim}",
            f"v{self.dim_v}" if self.dim_v != self.dim else "",
            {False: "", True: "causal"}.get(self.causal, str(self.causal)),
            "window={}:{}".format(*self.window).replace("None", "") if self.window else "",
            f"prefix={self.prefix}" if self.prefix else "",
            f"softcap={self.softcap}" if self.softcap is not None else "",
            f"scale={self.scale}" if self.scale is not None else "",
            self.values if self.values != "normal" else "",
            self.layout if self.layout != "contiguous" else "",
            f"sinks={self.sinks}" + (f":{self.sinks_dtype}" if self.sinks_dtype != wide else "") if self.sinks else "",
            f"score={self.score}" if self.score else "",
            f"mask={self.mask}" if self.mask else "",
            f"bias={self.bias}" + (f":{self.bias_dtype}" if self.bias_dtype != self.dtype else "") if self.bias else "",
            f"alibi={self.alibi}" if self.alibi else "",
            f"dropout={self.dropout}" if self.dropout else "",
            "" if self.return_lse else "no_lse",
        ]
        return "-".join(filter(None, parts))

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for `attention`, those at their default left out; `arrays` has those that are arrays."""
        defaults = {"causal": False, "window": None, "prefix": 0, "softcap": None, "scale": None, "return_lse": False}
        given = {option: getattr(self, option) for option in defaults}
        options = {option: value for option, value in given.items() if value != defaults[option]}
        options |= {"precision": "tf32"} if self.precision == "tf32" else {}
        options |= {"score": SCORES[self.score].text} if self.score else {}
        options |= {"mask": MASKS[self.mask].text} if self.mask in MASKS else {}
        return options | ({"dropout": self.dropout} if self.dropout else {})

    @property
    def scores(self) -> dict[str, Any]:
        """The keyword arguments for the functions of `oracle` that are no arrays: the true scale, and the mask as one band."""
        anchor = 0 if self.causal == "top_left" else self.len_kv - self.len_q
        left, right = self.window or (None, None)
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return {
            "scale": 1 / math.sqrt(self.dim) if self.scale is None else self.scale,
            "first_key": None if left is None else anchor - left,
            "last_key": None if right is None else anchor + right,
            "prefix": self.prefix,
            "softcap": self.softcap,
        }

    def arrays(self, xp: ModuleType = numpy, seed: int = 0) -> dict[str, Any]:
        """The keyword arguments for `attention` beside `options`: arrays of `xp`, and a seed."""
        return operands_of(self, xp, seed)

    def meaning(self, xp: ModuleType = numpy, seed: int = 0) -> dict[str, Any]:
        """The keyword arguments for `oracle`: `scores`, and what `options` and `arrays` say of other things."""
        return self.scores | meaning_of(self, xp, seed)

    @property
    def of_pairs(self) -> bool:
        """Whether something is asked for each pair: an expression, a mask, a bias, ALiBi or dropout."""
        return any((self.score, self.mask, self.bias, self.alibi, self.dropout))

    @property
    def flops(self) -> int:
        """Multiplications and additions of the pairs that take part."""
        first, last, prefix = (self.scores[name] for name in ("first_key", "last_key", "prefix"))
        rows = numpy.arange(self.len_q)
        begin = numpy.maximum(0, rows + first) if first is not None else 0
        end = numpy.minimum(self.len_kv, numpy.maximum(rows + last + 1, prefix)) if last is not None else self.len_kv
        pairs = int(numpy.broadcast_to(numpy.maximum(0, end - begin), rows.shape).sum())
        return 2 * (self.dim + self.dim_v) * pairs * self.heads_q * math.prod(self.batch)

    @property
    def heavy(self) -> bool:
        """Whether the case is for a GPU only."""
        return self.flops > HEAVY_FLOPS


def make_inputs(case: Case, xp: ModuleType = numpy, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return `(q, k, v)` of `case` as arrays of `xp`, the same for the same case and seed.

    They are views into larger buffers full of NaN: what is read around or between their elements shows in the result.
    """
    rng = numpy.random.default_rng([seed, zlib.crc32(case.name.encode())])
    dtype = dtype_named(case.dtype)
    q, k, v = (place(x.astype(dtype), case.layout, xp) for x in _numbers(case, rng))
    if case.layout == "broadcast":
        k, v = (xp.broadcast_to(x, case.batch + x.shape[-3:]) for x in (k, v))
    return q, k, v


def make_sinks(case: Case, xp: ModuleType = numpy, seed: int = 0) -> Any:
    """Return the sinks of `case`, `(heads_q,)` for one and `(n, heads_q)` for several, or None.

    They are the same for the same case and seed, and normal with standard deviation 2. Of three or more each head has one of -inf,
    which has no share in anything. NaN lies around them, in layout "strided_dim" between them as well; in layout "odd_offset" they
    start off alignment.

    Examples
    --------
    >>> from cupy_flash.judge.cases import Case, make_sinks
    >>> make_sinks(Case("float16", 5, 7, heads_q=4, sinks=3, sinks_dtype="float16")).shape
    (3, 4)
    >>> make_sinks(Case("float16", 5, 7, heads_q=4)) is None
    True
    """
    return operands_of(case, xp, seed).get("sinks")


def case_named(name: str) -> Case:
    """Return the case of `full_cases` with this name."""
    for case in full_cases():
        if case.name == name:
            return case
    raise ValueError(f"no case is named {name!r}; cases.full_cases() lists them")


def quick_cases() -> tuple[Case, ...]:
    """Return the cases that between them touch every feature, ordered so that equal specialisations are neighbours."""
    f16, bf16, f32 = partial(Case, "float16"), partial(Case, "bfloat16"), partial(Case, "float32")
    return (
        # float16, dim 64, 16-byte copies: one compiled kernel carries most features.
        f16(128, 128, heads_q=2),  # whole tiles only
        f16(67, 131, heads_q=6, heads_kv=2, batch=(2,), causal=True),
        f16(61, 97, dim=40, heads_q=7, heads_kv=1, causal="top_left"),
        f16(129, 97, causal=True),  # more queries than keys: the first 32 rows see nothing
        f16(1, 257, heads_q=2, batch=(3,)),
        f16(1, 137, heads_q=6, heads_kv=2, batch=(2,), window=(50, 0)),  # the heads of a group share a tile
        f16(9, 137, heads_q=6, heads_kv=2, batch=(2,), causal=True),  # these too
        f16(113, 113, causal=True, window=(24, None), values="one_hot"),
        f16(90, 70, window=(16, 8), values="offset"),
        f16(131, 150, heads_q=2, causal=True, prefix=70),
        f16(140, 90, causal=True, prefix=33),  # the first rows see the prefix only
        f16(50, 77, heads_q=4, heads_kv=2, batch=(2,), layout="bshd"),
        f16(37, 53, heads_q=2, batch=(2, 3), layout="sliced"),
        f16(65, 130, heads_q=2, batch=(), causal=True, layout="negative"),
        f16(40, 41, heads_q=2, batch=(3,), causal=True, layout="broadcast"),
        # The same, but scores that do not go straight from scale to exponential.
        f16(83, 109, softcap=30.0, values="large", causal=True),
        f16(75, 99, softcap=1e5),  # far above the scores, which have to come through it unharmed
        f16(47, 79, scale=-0.25, heads_q=2),
        # The same, copied element by element.
        f16(71, 59, dim=33, causal=True),
        f16(59, 71, layout="strided_dim"),
        f16(59, 71, layout="transposed"),
        f16(59, 71, layout="odd_offset", causal=True),
        # Other widths.
        f16(17, 1, dim=1),
        f16(101, 67, dim=80, heads_q=2),
        f16(43, 89, dim=96, dim_v=80, causal=True),
        bf16(100, 150, dim=128, heads_q=2, causal=True, return_lse=False),
        bf16(64, 97, dim=98, values="constant"),  # rows of 196 bytes: 4-byte copies
        bf16(73, 65, dim=192, dim_v=128, causal=True),
        bf16(49, 63, dim=256, heads_q=2),
        # Other precisions.
        f32(79, 103, heads_q=2, causal=True),
        f32(31, 47, dim=33, values="large"),
        f32(79, 103, precision="tf32"),
        f32(75, 1, softcap=50.0, scale=1e-3),  # the log-sum-exp is the score, which is small
        Case("float64", 45, 61, dim=40, heads_q=3, heads_kv=1, causal=True),
        # Sinks.
        f16(67, 131, heads_q=6, heads_kv=2, batch=(2,), causal=True, sinks=1),
        bf16(9, 137, dim=128, heads_q=6, heads_kv=2, causal=True, sinks=2, sinks_dtype="bfloat16"),  # heads share a tile
        f32(79, 60, heads_q=2, window=(8, 4), sinks=1),  # the first rows see nothing else
        # Of pairs: an expression that bends a score, all that is added and masks, and dropout, on as few kernels.
        f16(67, 131, heads_q=4, heads_kv=2, batch=(2,), causal=True, score="gate", mask="holes", alibi="heads", sinks=1),
        f16(73, 90, heads_q=2, batch=(2,), window=(50, 20), mask="array", bias="batch", bias_dtype="float32", dropout=0.2),
        Case("float64", 45, 61, heads_q=6, heads_kv=2, score="decay", mask="prefixes", bias="keys", alibi="batch", dropout=0.1),
        # Nothing to launch.
        f16(5, 0),
        f16(0, 5),
        f16(5, 5, batch=(0,)),
    )


@cache
def full_cases() -> tuple[Case, ...]:
    """Return the quick cases, then one feature varied at a time, then those too heavy for a CPU."""
    return tuple(dict.fromkeys((*quick_cases(), *_systematic())))


def _systematic() -> Iterator[Case]:
    f16, bf16, f32, f64 = (partial(Case, dtype) for dtype in ("float16", "bfloat16", "float32", "float64"))
    tf32 = partial(f32, precision="tf32")

    edges = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 193, 255, 257)  # around every tile size
    for i, (len_q, len_kv) in enumerate(zip(edges, reversed(edges), strict=True)):
        yield f16(len_q, len_kv, causal=i % 2 == 0)

    for kind, dim in product((f16, bf16), (1, 8, 33, 40, 72, 80, 96, 100, 128, 160, 192, 256)):
        yield kind(61, 83, dim=dim, heads_q=2, causal=True)
    for kind, dim in product((f32, tf32, f64), (1, 8, 33, 64, 96, 128, 256)):
        yield kind(61, 83, dim=dim, heads_q=2, causal=True)
    for kind, (dim, dim_v) in product((f16, f32), ((64, 128), (128, 64), (192, 128), (40, 72), (96, 1), (33, 256))):
        yield kind(61, 83, dim=dim, dim_v=dim_v)

    windows = (None, (0, 0), (16, 0), (5, 9), (None, 3), (30, None), (200, 200))
    for causal, window, lengths in product((False, True, "top_left"), windows, ((70, 110), (110, 70))):
        yield f16(*lengths, causal=causal, window=window)
    for prefix, lengths in product((1, 16, 63, 64, 65, 100, 109, 110, 300), ((70, 110), (110, 70), (200, 300))):
        yield f16(*lengths, causal=True, prefix=prefix)
    for kind, dim in product((f16, bf16, f32), (64, 128, 192, 256)):
        yield kind(150, 200, dim=dim, heads_q=4, heads_kv=2, batch=(2,), causal=True, prefix=77)
    yield f16(70, 110, window=(None, 3), prefix=50)
    yield f16(20, 110, heads_q=6, heads_kv=2, causal=True, prefix=99)  # the heads of a group share a tile
    yield f16(20, 110, heads_q=6, heads_kv=2, causal="top_left", prefix=40, softcap=5.0)

    for heads_q, heads_kv in ((6, 2), (7, 1), (21, 3), (8, 1), (5, 5)):
        yield f16(45, 77, heads_q=heads_q, heads_kv=heads_kv, batch=(2,), causal=True)
        yield bf16(1, 200, heads_q=heads_q, heads_kv=heads_kv, dim=128)
    for kind, layout in product((f16, f32), ("bshd", "negative", "broadcast")):
        yield kind(1, 171, dim=72, heads_q=24, heads_kv=3, batch=(2,), window=(99, 0), softcap=30.0, layout=layout)
    for batch in ((), (3,), (2, 1, 3)):
        yield f16(33, 65, heads_q=2, batch=batch)

    for kind, layout in product((f16, f32), get_args(Layout)):
        yield kind(67, 93, heads_q=4, heads_kv=2, batch=(2,), causal=True, layout=layout)
    for kind, values in product((f16, bf16, f32, tf32), get_args(Values)):
        yield kind(75, 99, values=values)
    for len_q, dim in product((40, 140), (64, 128, 192, 256)):  # P of a later tile of keys is too large for the maximum so far
        yield bf16(len_q, 300, dim=dim, values="large")
    for kind, softcap in product((f16, f32), (1.0, 30.0)):
        yield kind(75, 99, softcap=softcap, values="large")
        yield kind(75, 99, softcap=softcap, scale=-0.5)
    for kind in (f16, f32):  # softcaps far from the scores
        yield kind(75, 1, softcap=50.0, scale=1e-3)
        yield kind(75, 99, softcap=1e-3)
        yield kind(75, 99, softcap=1e3, scale=1e-3)
        yield kind(75, 99, softcap=1e5)
    for kind, scale in product((f16, f32), (-0.25, 0.0, 1e-3, 1.5)):
        yield kind(75, 99, scale=scale, causal=True)

    for kind, dim in product((f16, bf16, f32, tf32, f64), (64, 128, 192, 256)):
        yield kind(61, 83, dim=dim, heads_q=4, heads_kv=2, causal=True, sinks=1)
    for kind, dtype in ((f16, "float16"), (bf16, "bfloat16"), (f32, "float32"), (f64, "float64")):
        yield kind(75, 99, heads_q=3, batch=(2,), sinks=3, sinks_dtype=dtype)
        yield kind(40, 30, heads_q=2, causal=True, sinks=2, sinks_dtype=dtype)  # ten rows see nothing
        yield kind(140, 150, heads_q=2, sinks=1, sinks_dtype=dtype, values="large", window=(1, 0))  # far above half the rows
        yield kind(5, 0, heads_q=2, sinks=2, sinks_dtype=dtype)
    for kind in (f16, f32):
        yield kind(75, 99, heads_q=2, softcap=5.0, causal=True, sinks=1)
        yield kind(75, 99, heads_q=2, scale=-0.25, sinks=2)
        yield kind(110, 90, heads_q=2, causal=True, prefix=33, sinks=1)
        yield kind(67, 93, heads_q=4, heads_kv=2, batch=(3,), sinks=2, layout="broadcast")
        yield kind(67, 93, heads_q=4, batch=(2,), causal=True, sinks=2, layout="strided_dim")
        yield kind(67, 93, heads_q=4, batch=(2,), causal=True, sinks=1, layout="odd_offset")
    for kind, n in product((f16, bf16), (1, 3)):  # few queries and many keys: blocks share a tile
        yield kind(1, 5000, dim=128, heads_q=4, heads_kv=2, sinks=n)
        yield kind(5, 5000, heads_q=4, heads_kv=1, causal=True, sinks=n)
    for empty in ({"batch": (0,)}, {"heads_q": 0}, {"len_q": 0}):
        yield f16(**{"len_q": 5, "len_kv": 7, "sinks": 1, **empty})
    yield from pair_cases(Case)
    for empty in ({"batch": (0,)}, {"batch": (2, 0)}, {"heads_q": 0}, {"len_q": 0}, {"len_kv": 0}):
        yield f16(**{"len_q": 5, "len_kv": 7, "causal": True, **empty})
    yield f16(1024, 1024, heads_q=2, causal=True)
    yield f16(2003, 1999)
    yield f16(777, 1553, heads_q=6, heads_kv=2, causal=True, window=(300, None))
    yield f16(1, 50021, heads_q=32, heads_kv=4, dim=128)
    yield bf16(6, 5000, heads_q=8, heads_kv=1, dim=128, causal=True)
    yield bf16(30, 5000, heads_q=8, heads_kv=2, dim=128, window=(4100, 20))
    yield bf16(1409, 1409, dim=128, causal=True)
    yield bf16(500, 500, dim=128, heads_q=4, batch=(2,), layout="bshd")
    yield bf16(900, 1000, dim=256, causal=True)
    yield bf16(1000, 1000, dim=192, dim_v=128, causal=True)
    yield bf16(200, 210, dim=192, dim_v=128, heads_q=34, causal=True)  # more blocks of 64 keys than run at once on sm_90a
    yield f32(1000, 1100, dim=128, causal=True)
    yield tf32(1000, 1100, dim=128, causal=True)


def _numbers(case: Case, rng: numpy.random.Generator) -> list[numpy.ndarray]:
    """Return q, k and v in float64; k and v with batch axes of 1 where the layout will broadcast them."""
    batch_kv = (1,) * len(case.batch) if case.layout == "broadcast" else case.batch
    shapes = (
        (*case.batch, case.heads_q, case.len_q, case.dim),
        (*batch_kv, case.heads_kv, case.len_kv, case.dim),
        (*batch_kv, case.heads_kv, case.len_kv, case.dim_v),
    )
    if case.values == "constant":
        return [numpy.full(shape, number) for shape, number in zip(shapes, (0.5, 0.75, 1.5), strict=True)]
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    scale = case.scores["scale"]
    if case.values == "offset":
        q, k, v = (x + 0.5 for x in (q, k, v))
    elif case.values == "large":
        spread = math.sqrt(300 / (abs(scale) * math.sqrt(case.dim)))  # 1000 is then a little over 3 sigma
        q, k = q * spread, k * spread
    elif case.values == "one_hot":
        # A margin of 40 between a match and the rest: e^-40 is nothing here.
        q = numpy.broadcast_to(numpy.eye(case.dim)[numpy.arange(case.len_q) % case.dim] * (40 / scale), q.shape)
        k = numpy.broadcast_to(numpy.eye(case.dim)[numpy.arange(case.len_kv) % case.dim], k.shape)
    return [q, k, v]
