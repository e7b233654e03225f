"""What calls with scores, masks, biases, dropout and their arrays are refused with: one error that names the argument."""

import sys
from decimal import Decimal
from fractions import Fraction

import ml_dtypes
import numpy
import pytest

from cupy_flash import attention, attention_backward, attention_vjp, plan_attention, plan_attention_backward

X, K = numpy.ones((2, 3, 8, 16), numpy.float32), numpy.ones((2, 3, 6, 16), numpy.float32)
ARRAY = "expected a NumPy or CuPy array or one with DLPack or the CUDA array interface, got "
LIST = "list; numpy.asarray makes an array of one$"
KNOWN = "b, h, h_kv, q_idx, kv_idx, q_len, kv_len"
NONE = (TypeError, ValueError)
T, U = r"arrays\['t'\]: expected", r"arrays\['u'\]: expected"


def ones(*shape, dtype="float32"):
    return numpy.ones(shape, dtype)


class Nameless:
    def __repr__(self):
        raise RuntimeError("no")


class Subclass(numpy.ndarray):
    pass


def reading(x, text="t[h]"):
    return {"score": text, "arrays": {"t": x}}


def named(name):
    return {"score": "score", "arrays": {name: 1.0}}


def dropping(seed, p=0.5):
    return {"dropout": p, "seed": seed}


def broken(score):
    raise KeyError("mine")


SCALARS = [
    1j,
    Fraction(1, 3),
    Decimal(1),
    2**70,
    numpy.array("x"),
    numpy.array((1, 2), "i4,i4"),
    numpy.array(None),
    numpy.longdouble(1),
]
PAIRS = r"a shape of at least 2 axes that broadcasts to \(2, 3, 8, 6\), got "
NUMBER = "dropout: expected a number of at least 0 and below 1, got "
UNUSED = "seed: expected None without dropout, got one; with dropout=0.0, which drops nothing, it may be given$"
SEED, OFFSET = (
    r"seed: expected an integer or a pair \(seed, offset\), got ",
    r"seed: expected an offset of at least 0 and below 2\*\*32, got ",
)
OPTION = r"\(an expression reads what is in arrays, not the option"
WIDTH, CAST = "; scores are computed in float32, pass ", r"astype\('float32'\)$"
WRONG = [
    # Texts and functions
    ({"score": "score + t[h]"}, ValueError, f"score: expected one of {KNOWN}, score, inf, got 't' at column 9"),
    ({"score": "score + bias[q_idx, kv_idx]", "bias": ones(8, 6)}, ValueError, rf".* got 'bias' at column 9 {OPTION} bias=\)\n"),
    ({"score": "sinks[h]"}, ValueError, rf"score: .* got 'sinks' at column 1 {OPTION} sinks=\)\n"),
    ({"score": lambda h, alibi_slopes: alibi_slopes[h]}, ValueError, rf"score: .* got 'alibi_slopes' {OPTION} alibi_slopes=\)$"),
    ({"score": "masks + mask", "arrays": {"masks": 1}}, ValueError, r"score: .* got 'mask' at column 9 \(did you mean 'masks'\?\)"),
    ({"score": "scor"}, ValueError, r"score: expected one of .*did you mean 'score'\?"),
    ({"score": ""}, ValueError, "score: expected an expression in Python's syntax"),
    ({"score": "h < 1 and 2"}, ValueError, "score: expected a bool for 'and', got an int at column 11"),
    ({"score": 1}, TypeError, "score: expected an expression or a function, got 1$"),
    ({"score": b"score"}, TypeError, "score: expected an expression or a function, got b'score'$"),
    ({"score": ["score"]}, TypeError, r"score: expected an expression or a function, got \['score'\]$"),
    ({"score": ones(3)}, TypeError, r"score: expected an expression or a function, got array\("),
    ({"score": Nameless()}, TypeError, "score: expected an expression or a function, got a value of type Nameless that cannot be "),
    ({"score": lambda score: None}, TypeError, "score: expected a function that returns an expression, got one that returns None"),
    ({"score": lambda scor: 1}, ValueError, f"score: expected one of {KNOWN}, score, inf, got 'scor'"),
    ({"score": lambda score: score if score > 0 else 0}, TypeError, r"score: expected numpy.where\(c, a, b\) for 'if'"),
    ({"score": lambda score: score + "a"}, TypeError, "score: expected numbers, parameters and what is made of them, got 'a'"),
    ({"score": Nameless}, TypeError, "score: expected a function that returns an expression, got one that returns a value "),
    ({"score": len}, ValueError, f"score: expected one of {KNOWN}, score, inf, got 'obj'"),
    ({"score": print}, ValueError, r"score: expected a function whose parameters have names, got '\*args'"),
    ({"mask": "score > 0"}, ValueError, f"mask: expected one of {KNOWN}, inf, got 'score' at column 1"),
    ({"mask": lambda score: score > 0}, ValueError, f"mask: expected one of {KNOWN}, inf, got 'score'"),
    ({"mask": "h"}, ValueError, "mask: expected a bool, which says whether a query sees a key, got an int"),
    ({"mask": lambda h: h / 2}, ValueError, "mask: expected a bool, which says whether a query sees a key, got a float"),
    # Masks
    ({"mask": ones(8, 6)}, TypeError, "mask: expected bool, got float32; what is added to scores is bias$"),
    ({"mask": ones(8, 6, dtype=int)}, TypeError, "mask: expected bool, got int64$"),
    ({"mask": 1}, TypeError, "mask: expected bool, got int64$"),
    ({"mask": True}, ValueError, f"mask: expected {PAIRS}\\(\\)$"),
    ({"mask": ones(6, dtype=bool)}, ValueError, f"mask: expected {PAIRS}\\(6,\\)$"),
    ({"mask": ones(5, 6, dtype=bool)}, ValueError, f"mask: expected {PAIRS}\\(5, 6\\)$"),
    ({"mask": ones(8, 0, dtype=bool)}, ValueError, f"mask: expected {PAIRS}\\(8, 0\\)$"),
    ({"mask": ones(6, 8, dtype=bool).T[:, :3]}, ValueError, f"mask: expected {PAIRS}\\(8, 3\\)$"),
    ({"mask": ones(1, 2, 3, 8, 6, dtype=bool)}, ValueError, f"mask: expected {PAIRS}\\(1, 2, 3, 8, 6\\)$"),
    ({"mask": [[True]]}, TypeError, f"mask: {ARRAY}{LIST}"),
    ({"mask": Nameless()}, TypeError, f"mask: {ARRAY}Nameless$"),
    ({"mask": ones(8, 6, dtype=bool).view(Subclass)}, TypeError, "mask: expected a numpy.ndarray, got its subclass Subclass"),
    # Biases and slopes
    ({"bias": 1.0}, TypeError, "bias: expected float32, got float64$"),
    ({"bias": ones(8, 6, dtype="f8")}, TypeError, f"bias: expected float32, got float64{WIDTH}bias.{CAST}"),
    ({"bias": ones(8, 6, dtype="f2")}, TypeError, f"bias: expected float32, got float16{WIDTH}bias.{CAST}"),
    ({"alibi_slopes": ones(3, dtype="f8")}, TypeError, f"alibi_slopes: expected float32, got float64{WIDTH}alibi_slopes.{CAST}"),
    ({"sinks": ones(3, dtype="f8")}, TypeError, f"sinks: expected float32, got float64{WIDTH}sinks.{CAST}"),
    ({"bias": ones(8, 6, dtype=">f4")}, TypeError, "bias: expected float32, got >f4$"),
    ({"bias": ones(8, 6, dtype=int)}, TypeError, "bias: expected float32, got int64$"),
    ({"bias": ones(8, 6, dtype=bool)}, TypeError, "bias: expected float32, got bool$"),
    ({"bias": ones(6)}, ValueError, f"bias: expected {PAIRS}\\(6,\\)$"),
    ({"bias": ones(8, 5)}, ValueError, f"bias: expected {PAIRS}\\(8, 5\\)$"),
    ({"bias": ones(2, 8, 6)}, ValueError, f"bias: expected {PAIRS}\\(2, 8, 6\\)$"),
    ({"bias": ones(1, 1, 1, 8, 6)}, ValueError, f"bias: expected {PAIRS}\\(1, 1, 1, 8, 6\\)$"),
    ({"bias": [[0.0]]}, TypeError, f"bias: {ARRAY}{LIST}"),
    ({"bias": "score"}, TypeError, f"bias: {ARRAY}str$"),
    ({"bias": lambda h: h}, TypeError, f"bias: {ARRAY}function$"),
    ({"bias": ones(8, 6).view(Subclass)}, TypeError, "bias: expected a numpy.ndarray, got its subclass Subclass"),
    ({"bias": ones(193, dtype="u1")[1:].view("f4").reshape(8, 6)}, ValueError, "bias: expected an address divisible by its "),
    ({"alibi_slopes": ones(2)}, ValueError, r"alibi_slopes: expected a shape of .* broadcasts to \(2, 3\), got \(2,\)$"),
    ({"alibi_slopes": ones(3, 2)}, ValueError, r"alibi_slopes: expected a shape of .* broadcasts to \(2, 3\), got \(3, 2\)$"),
    ({"alibi_slopes": ones(1, 2, 3)}, ValueError, r"alibi_slopes: expected a shape of .* got \(1, 2, 3\)$"),
    ({"alibi_slopes": numpy.float32(1)}, ValueError, r"alibi_slopes: expected a shape of .* got \(\)$"),
    ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes: expected float32, got float64$"),
    ({"alibi_slopes": True}, TypeError, "alibi_slopes: expected float32, got bool$"),
    ({"alibi_slopes": ones(3, dtype=int)}, TypeError, "alibi_slopes: expected float32, got int64$"),
    ({"alibi_slopes": [1.0, 2.0, 3.0]}, TypeError, f"alibi_slopes: {ARRAY}{LIST}"),
    *[
        ({name: x}, TypeError, f"{name}: expected float32, got ")
        for name in ("bias", "alibi_slopes")
        for x in (1j, numpy.array("x"), 1e300)
    ],
    # Arrays
    *[({"arrays": x}, TypeError, "arrays: expected None or a dict of arrays by their names, got ") for x in ([], 1, "t", ones(3))],
    ({"arrays": {"t": ones(3)}}, ValueError, rf"{T} an array that is read by a score or a mask, of "),
    ({"arrays": {"t": ones(3)}, "bias": ones(8, 6)}, ValueError, rf"{T} an array that is read by a score or a mask"),
    (reading(ones(3), "score"), ValueError, rf"{T} an array that is read by the score or the mask, which "),
    ({"score": "t[h]", "arrays": {"t": ones(3), "u": ones(3)}}, ValueError, rf"{U} an array that is read"),
    ({"score": lambda t, h: t[h], "arrays": {"t": ones(3), "u": 1}}, ValueError, rf"{U} an array that is read"),
    (reading(ones(3), "t"), ValueError, "score: expected 1 index of 't', got none at column 1"),
    (reading(ones(3), "t[h, h]"), ValueError, "score: expected 1 index of 't', got 2 at column 1"),
    (reading(1.0, "t[h]"), ValueError, r"score: expected the name of an array before '\[', got 't'"),
    (reading(ones(3), "t[score]"), ValueError, "score: expected an int as an index of 't', got a float at column 3"),
    (reading(ones(3), "t[t[h]]"), ValueError, "score: expected an int as an index of 't', got a float at column 3"),
    (reading(ones(4)), ValueError, rf"{T} 3 elements along axis 0, which is indexed by 'h', got shape \(4,\)"),
    (reading(ones(1)), ValueError, rf"{T} 3 elements along axis 0, which is indexed by 'h', got shape \(1,\)"),
    (reading(ones(2), "t[h_kv]"), ValueError, rf"{T} 3 elements along axis 0, which is indexed by 'h_kv'"),
    (reading(ones(3), "t[b]"), ValueError, rf"{T} 2 elements along axis 0, which is indexed by 'b'"),
    (reading(ones(2, 8), "t[b, kv_idx]"), ValueError, rf"{T} 6 elements along axis 1, .* got shape \(2, 8\)"),
    (reading(ones(6), "t[q_idx] + t[kv_idx]"), ValueError, rf"{T} 8 elements along axis 0, .* by 'q_idx'"),
    (reading(ones(4), lambda t, h: t[h]), ValueError, rf"{T} 3 elements along axis 0, which is indexed by 'h'"),
    ({"mask": "t[h] > 0", "arrays": {"t": ones(4)}}, ValueError, rf"{T} 3 elements along axis 0"),
    *[
        (reading(x), TypeError, rf"{T} floats, integers or bools, got ")
        for x in (*(ones(3).astype(kind) for kind in ("c8", ">f4", ">i4", "O", "U3", "S1", "g")), numpy.zeros(3, "M8[s]"))
    ],
    *[(reading(x, "t"), TypeError, rf"{T} floats, integers or bools") for x in SCALARS],
    *[(reading(x), TypeError, rf"{T} a NumPy or CuPy array or one") for x in ([1.0] * 3, None, "x", (1,), Nameless())],
    (reading([1.0] * 3), TypeError, rf"arrays\['t'\]: {ARRAY}{LIST}"),
    (reading(ones(3).view(Subclass)), TypeError, rf"{T} a numpy.ndarray, got its subclass Subclass"),
    (reading(numpy.zeros(3, [("a", "f4"), ("b", "i1")])["a"]), ValueError, rf"{T} strides that are multiples of 4"),
    *[
        (named(x), ValueError, "arrays: expected names that are identifiers, got ")
        for x in ("", "1t", "a b", "a.b", "if", "\ufb01", "t\n")
    ],
    *[
        (named(x), ValueError, "arrays: expected names that mean nothing else")
        for x in ("score", "h", "kv_len", "where", "inf", "int")
    ],
    *[(named(x), TypeError, "arrays: expected names that are strings, got ") for x in (1, None, ("t",), b"t", Nameless())],
    # Dropout
    ({"dropout": 0.5}, ValueError, "seed: expected an integer, or a pair of seed and offset, with dropout, got None$"),
    *[(dropping(1, p), ValueError, NUMBER) for p in (1, 1.0, 1.5, -0.1, float("nan"), float("inf"), -float("inf"), 10**400)],
    *[(dropping(1, p), TypeError, NUMBER) for p in ("0.5", True, 0.5j, numpy.array(0.5), ones(1), [0.5], Nameless())],
    *[
        (dropping(x), ValueError, r"seed: expected a seed of at least 0 and below 2\*\*64, got ")
        for x in (-1, 2**64, (-1, 0), 10**5000)
    ],
    *[(dropping(x), ValueError, OFFSET) for x in ((1, -1), (1, 2**32))],
    (dropping(numpy.array([1, 2**32], "u8")), ValueError, f"{OFFSET}4294967296$"),
    *[(dropping(x), ValueError, SEED) for x in ((), (1,), (1, 2, 3), [1])],
    *[(dropping(x), TypeError, SEED) for x in (1.0, True, 1j, numpy.float32(1), Fraction(1, 2))],
    *[
        (dropping(ones(*shape, dtype=kind)), TypeError, SEED)
        for shape, kind in (((2,), "i8"), ((2,), "u4"), ((1,), "u8"), ((), "u8"))
    ],
    *[
        (dropping(x), TypeError, r"seed: expected integers in the pair \(seed, offset\), got ")
        for x in ((1.0, 2), (None, 1), (1, True))
    ],
    *[(dropping(x), TypeError, f"seed: {ARRAY}") for x in ("1", b"12", {}, Nameless(), {1, 2})],
    ({"seed": -1}, ValueError, "seed: expected a seed of at least 0"),  # even where nothing needs one
    *[(options, ValueError, UNUSED) for options in ({"seed": 5}, dropping((1, 2), None), {"seed": 1, "bias": ones(8, 6)})],
]


def ids(x):
    return ",".join(x) if isinstance(x, dict) else ""


@pytest.mark.parametrize("options, kind, message", WRONG, ids=ids)
def test_refusals(options, kind, message):
    results = numpy.full_like(X, 7), numpy.full(X.shape[:-1], 7, numpy.float32)
    calls = [
        lambda: attention(X, K, K, out=results[0], lse=results[1], **options),
        lambda: plan_attention(X, K, K, **options),
        lambda: attention_vjp(X, K, K, **options),
        lambda: attention_backward(X, X, K, K, X, results[1], dq=results[0], **options),
        lambda: plan_attention_backward(X, X, K, K, X, results[1], **options),
    ]
    for call in (calls[0], *calls):  # the second time as the first
        with pytest.raises(kind, match=f"^{message}") as caught:
            call()
        assert isinstance(caught.value, NONE)
    assert all((x == 7).all() for x in results)


@pytest.mark.parametrize("function", ["attention", "plan_attention", "attention_vjp"])
def test_what_a_function_of_the_user_raises_is_the_users(function):
    with pytest.raises(KeyError, match="mine"):
        {"attention": attention, "plan_attention": plan_attention, "attention_vjp": attention_vjp}[function](X, K, K, score=broken)


@pytest.mark.parametrize("dtype", ["float16", "float64", ml_dtypes.bfloat16], ids=lambda x: numpy.dtype(x).name)
def test_dtypes_of_biases_and_slopes_follow_q(dtype):
    q, k, name = X.astype(dtype), K.astype(dtype), numpy.dtype(dtype).name
    expected = dict.fromkeys((name, "float64" if name == "float64" else "float32"))
    for own in ("float16", "float32", "float64", ml_dtypes.bfloat16):
        for option, x in (("bias", ones(8, 6).astype(own)), ("alibi_slopes", ones(3).astype(own))):
            if numpy.dtype(own).name in expected:
                attention(q, k, k, **{option: x})
            else:
                with pytest.raises(TypeError, match=f"^{option}: expected {' or '.join(expected)}, got {x.dtype.name}; scores are"):
                    attention(q, k, k, **{option: x})


def test_results_lie_apart_from_what_scores_read():
    memory = ones(1000)
    out, bias, t = memory[:768].reshape(X.shape), memory[:48].reshape(8, 6), memory[5:8]
    for options, name in (({"bias": bias}, "bias"), (reading(t), r"arrays\['t'\]"), ({"alibi_slopes": t}, "alibi_slopes")):
        with pytest.raises(ValueError, match=f"^out: expected memory apart from that of {name} "):
            attention(X, K, K, out=out, **options)
        with pytest.raises(ValueError, match=f"^dq: expected memory apart from that of {name} "):
            attention_backward(X, X, K, K, X, ones(2, 3, 8), dq=out, **options)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from that of mask "):
        attention(X, K, K, out=out, mask=memory[:12].view(bool).reshape(8, 6))
    attention(X, K, K, out=out, score="score + t", arrays={"t": memory[3:4].reshape(())})  # a scalar is read before


# Gradients

BOTH = {"score": "score * t[h] + c + n[h]", "mask": "m[h] > 0 or on", "bias": ones(8, 6)}
BOTH["arrays"] = {"t": ones(3), "c": 0.5, "n": ones(3, dtype=int), "m": ones(3), "on": True}
MASKED, UNASKED = "which only the mask reads; a mask has no gradient", "whose gradient is there without being asked for"
NONE_OF_IT = "which has no gradient"
NOT_THERE = [
    *((wrt, "") for wrt in ("", "x", ["t", "x"], ("bias", "BIAS"))),
    *(("q", UNASKED), ("sinks", UNASKED), ("score", NONE_OF_IT), ("mask", NONE_OF_IT), ("seed", NONE_OF_IT)),
    *(("m", MASKED), (("t", "m"), MASKED), ("alibi_slopes", "which was not given")),
    *(("n", "which is of int64; only floats have a gradient"), ("on", "which is of bool; only floats have a gradient")),
]


@pytest.mark.parametrize("wrt, why", NOT_THERE, ids=str)
def test_gradients_of_what_is_not_there(wrt, why):
    for function, arguments in ((attention_vjp, (X, K, K)), (attention_backward, (X, X, K, K, X, ones(2, 3, 8)))):
        with pytest.raises(ValueError, match=r"^wrt: expected names of t, c, bias, got '") as caught:
            function(*arguments, **BOTH, wrt=wrt)
        name = repr(wrt if isinstance(wrt, str) else wrt[-1])
        assert str(caught.value).endswith(f", got {name} ({why})" if why else f", got {name}")


@pytest.mark.parametrize("wrt", [None, 1, {"t"}, b"t", ("t", 1), ones(1), Nameless(), {"t": 1}])
def test_names_of_gradients_are_words(wrt):
    for function, arguments in ((attention_vjp, (X, K, K)), (plan_attention_backward, (X, X, K, K, X, ones(2, 3, 8)))):
        with pytest.raises(TypeError, match=r"^wrt: expected a name or a tuple of names, got "):
            function(*arguments, **BOTH, wrt=wrt)


def test_gradients_of_nothing():
    for options in ({}, {"mask": "h > 0"}, {"dropout": 0.5, "seed": 1}, {"score": "score + h"}):
        with pytest.raises(ValueError, match=r"^wrt: expected no name, since no score .* got 'bias' \(which was not given\)$"):
            attention_vjp(X, K, K, wrt="bias", **options)
        assert attention_vjp(X, K, K, wrt=[], **options)
    with pytest.raises(TypeError, match=r"^wrt: expected an option of attention; there are q, "):
        attention(X, K, K, wrt="bias", bias=ones(8, 6))


# Plans

GIVEN = {"bias": ones(8, 6), "seed": 1, "arrays": {"t": ones(3), "c": 0.5}}
PLANNED = GIVEN | {"score": "score * t[h] + c", "mask": "q_idx >= 0", "dropout": 0.5}


def with_arrays(**arrays):
    return GIVEN | {"arrays": {name: x for name, x in (GIVEN["arrays"] | arrays).items() if x is not None}}


OF_PLANS = [
    ({}, r"bias: expected an array, as planned, got None"),
    (GIVEN | {"bias": None}, "bias: expected an array, as planned, got None"),
    (GIVEN | {"seed": None}, "seed: expected an array, as planned, got None"),
    (GIVEN | {"arrays": None}, r"arrays\['c'\]: expected an array, as planned, got None"),
    (GIVEN | {"arrays": {}}, r"arrays\['c'\]: expected an array, as planned, got None"),
    (with_arrays(t=None), rf"{T} an array, as planned, got None"),
    (with_arrays(u=ones(3)), rf"{U} None, the plan was made without it, got an array"),
    (with_arrays(t=ones(4)), rf"{T} shape \(3,\), as planned, got \(4,\)"),
    (with_arrays(t=ones(6)[::2]), rf"{T} strides \(1,\), as planned, got \(2,\)"),
    (with_arrays(t=ones(3, dtype="f8")), rf"{T} dtype float32, as planned, got float64"),
    (with_arrays(c=1), r"arrays\['c'\]: expected dtype float64, as planned, got int64"),
    (with_arrays(c=numpy.float32(1)), r"arrays\['c'\]: expected dtype float64, as planned, got float32"),
    (with_arrays(c=ones(1, dtype="f8")), r"arrays\['c'\]: expected shape \(\), as planned, got \(1,\)"),
    (with_arrays(t=ones(13, dtype="u1")[1:].view("f4")), rf"{T} an address divisible by 16, as planned"),
    (GIVEN | {"bias": ones(3, 8, 6)}, r"bias: expected shape \(8, 6\), as planned, got \(3, 8, 6\)"),
    (GIVEN | {"bias": ones(6, 8).T}, r"bias: expected strides \(6, 1\), as planned, got \(1, 8\)"),
    (GIVEN | {"alibi_slopes": ones(3)}, "alibi_slopes: expected None, the plan was made without it, got an array"),
    (GIVEN | {"mask": ones(8, 6, dtype=bool)}, "mask: expected None, the plan was made without it, got an array"),
    (GIVEN | {"seed": -1}, "seed: expected a seed of at least 0"),
]


@pytest.mark.parametrize("given, message", OF_PLANS, ids=[message[:40] for _, message in OF_PLANS])
def test_plans_of_other_arrays(given, message):
    out, lse = attention(X, K, K, **PLANNED, return_lse=True)
    plan, backward = plan_attention(X, K, K, **PLANNED), plan_attention_backward(X, X, K, K, out, lse, **PLANNED, wrt="t")
    with pytest.raises(ValueError, match=f"^{message}"):
        plan(X, K, K, **given)
    with pytest.raises(ValueError, match=f"^{message}"):
        backward(X, X, K, K, out, lse, **given)
    plan(X, K, K, **GIVEN), backward(X, X, K, K, out, lse, **GIVEN)


@pytest.mark.parametrize("option", [{"score": "score"}, {"dropout": 0.5}, {"wrt": "t"}, {"causal": True}], ids=ids)
def test_plans_take_no_options(option):
    with pytest.raises(TypeError, match=f"^{next(iter(option))}: expected an argument of a plan; beside"):
        plan_attention(X, K, K, **PLANNED)(X, K, K, **GIVEN, **option)


@pytest.mark.parametrize("mask", ["q_idx >= 1", "zzz", lambda h: h > 0], ids=["other", "none", "function"])
def test_plans_take_no_other_expression(mask):
    with pytest.raises(NONE, match=r"^mask: "):
        plan_attention(X, K, K, **PLANNED)(X, K, K, **GIVEN, mask=mask)


# Data, and what is no error


def test_nan_and_infinity_in_arrays_are_data():
    for value in (numpy.nan, numpy.inf, -numpy.inf):
        x = numpy.full((3, 1, 1), value, numpy.float32)
        results = [
            attention(X, K, K, bias=x),
            attention(X, K, K, alibi_slopes=x[:, 0, 0]),
            attention(X, K, K, score="score + t[h] * (1 + q_idx)", arrays={"t": x[:, 0, 0]}),
            attention(X, K, K, score="score + c", arrays={"c": value}),
        ]
        assert all(out.shape == X.shape for out in results)
        assert not numpy.isnan(value) or all(numpy.isnan(out).all() for out in results)


def test_without_cupy(monkeypatch):
    """Nothing of this needs it, and it is not asked for."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    options = PLANNED | {"alibi_slopes": ones(3)}
    out, vjp = attention_vjp(X, K, K, **options, wrt=("t", "c", "bias", "alibi_slopes"))
    grads = vjp(out)
    assert type(grads.dbias) is type(grads.dalibi_slopes) is type(grads.darrays["t"]) is numpy.ndarray
    with pytest.raises(ValueError, match=r"^backend: expected 'host' or 'numpy' for arrays in host memory, got 'cuda'"):
        attention(X, K, K, **options, backend="cuda")
