"""Random malformed calls: a valid call of a public function of which one to three things are broken."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

import cupy_flash

from ...problem.arrays import DTYPES
from ...problem.layout import FLOATS
from ...problem.lengths import LENGTHS
from . import verdict
from .arrays import draw_array
from .draw import Draw
from .objects import draw_object
from .options import UNKNOWN, Value, draw_value

FUNCTIONS = (
    "attention", "attention", "attention", "attention_backward", "attention_backward", "attention_vjp", "vjp", "merge_states",
    "plan_attention", "plan_attention", "plan_attention_backward", "a plan", "a backward plan", "a workspace",
)  # fmt: skip
UNKNOWN_NAMES = (
    "casual", "return_lsa", "block_mask", "attn_mask", "attn_bias", "dropout_p", "cu_seqlens", "softmax_scale", "is_causal",
    "window_size", "Q", "self", "args", "dtype", "stream", "_prepared",
)  # fmt: skip
BACKWARD_ARRAYS = ("dout", "q", "k", "v", "out", "lse", "dlse", "dq", "dk", "dv")
RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks", "workspace")


@dataclass(frozen=True, eq=False)
class Call:
    """A call that is to be made.

    Parameters
    ----------
    function : str
        What is called, one of `FUNCTIONS`.
    target : callable
    arguments : dict of str to object
        By name, in order.
    valid : dict of str to object
        The arguments before anything was broken.
    broken : dict of str to Value
        What was broken, under the name of the argument.
    positional : tuple
        More arguments than the function has.
    ok : bool or None
        Whether it has to be accepted, as in `verdict`.
    names : frozenset of str
        What an error message may begin with.
    """

    function: str
    target: Callable[..., Any]
    arguments: dict[str, Any]
    valid: dict[str, Any]
    broken: dict[str, Value]
    positional: tuple[Any, ...]
    ok: bool | None
    names: frozenset[str]

    def make(self) -> Any:
        """Call the function."""
        return _apply(self.target, self.arguments, self.positional)

    def make_valid(self) -> Any:
        """Call it before anything was broken."""
        return _apply(self.target, self.valid, ())

    def make_twins(self) -> Any:
        """Call it with what Python calls equal to a broken argument, and what has a meaning; None if there is no such thing."""
        twins = {name: value.twin for name, value in self.broken.items() if value.twin is not UNKNOWN}
        return _apply(self.target, self.valid | twins, ()) if twins else None

    @property
    def kinds(self) -> set[str]:
        """What is of note about it: a test requires that each kind is drawn."""
        wrong = {f"{name}: {value.label}" for name, value in self.broken.items()}
        return {self.function, f"ok {self.ok}", f"broken {len(self.broken)}", *wrong}

    def __str__(self) -> str:
        words = []
        for name, value in self.valid.items():
            if name not in self.broken:
                words.append(f"{name}={_shown(value)}")
        words += [f"{name}=<{value.label}>{_shown_array(value.value)}" for name, value in self.broken.items()]
        return f"{self.function}({', '.join(words)})"


def draw_call(seed: int, index: int) -> Call:
    """Call `index` of a seed."""
    draw = Draw("call", seed, index)
    while True:
        call = _draw(draw)
        arrays = {name: x for name, x in call.arguments.items() if issubclass(type(x), numpy.ndarray)}
        if call.ok is False or not verdict.too_large(arrays):  # a valid call of such a size would be computed
            return call


def _draw(draw: Draw) -> Call:
    function = draw.one(FUNCTIONS)
    target, valid, made_with = _valid(draw, function)
    arguments, broken, positional = dict(valid), {}, ()
    for _ in range(draw.one((1, 1, 1, 2, 3))):
        kind = draw.integer(0, 19)
        if kind == 0:
            name = draw.one(list(arguments) or ["q"])
            was_given, was_broken = arguments.pop(name, None), broken.pop(name, None)
            if was_given is not None and was_broken is None:
                broken[name] = Value("left out", UNKNOWN, _left_out(function, name))
        elif kind == 1:
            name = draw.one(UNKNOWN_NAMES)
            arguments[name] = None if draw.chance(0.3) else 1.0
            broken[name] = Value("unknown", arguments[name])
        elif kind == 2:
            positional = (None,) * draw.integer(2, 3)
            broken["too many"] = Value("positional", None)
        else:
            _break_one(draw, function, arguments, broken)
    return Call(
        function,
        target,
        arguments,
        valid,
        broken,
        positional,
        ok=_judge(function, arguments, broken, made_with),
        names=frozenset(_parameters(function)) | frozenset(arguments) | {"workspace"},
    )


def _break_one(draw: Draw, function: str, arguments: dict[str, Any], broken: dict[str, Value]) -> None:
    name = draw.one(list(_parameters(function)))
    if name in _arrays_of(function):
        plain = {other: x for other, x in arguments.items() if verdict.is_plain(x)}
        small = {other: x for other, x in plain.items() if x.size < verdict.TOO_LARGE and x.ndim < 32}
        like = small.get(name, next(iter(small.values()), numpy.zeros((3, 4))))
        if draw.chance(0.1):
            value = Value("None", None, None)
        elif draw.chance(0.35):
            value = draw_object(draw, like)
        else:
            value = draw_array(draw, like, [x for other, x in small.items() if other != name])
    else:
        value = draw_value(draw, name, "backward" in function)
    arguments[name], broken[name] = value.value, value


def _judge(function: str, arguments: dict[str, Any], broken: dict[str, Value], made_with: dict[str, Any]) -> bool | None:
    """Whether the call has to be accepted. A plain array that was put in place of another is judged with the others."""
    verdicts = [True]
    known = _arrays_of(function)
    for name, value in broken.items():
        if name not in known or not (verdict.is_plain(value.value) or (value.value is None and value.ok is None)):
            verdicts.append(value.ok)
    arrays = {name: x for name, x in arguments.items() if name in known}
    # An object that may be taken for an array counts as the array that it replaced, if that can be told: as undecided.
    undecided = [name for name, x in arrays.items() if x is not None and not verdict.is_plain(x)]
    if undecided or False in verdicts:
        return verdict.merged(None, *verdicts)
    options = {name: broken[name].means if name in broken else x for name, x in arguments.items() if name not in known}
    required = [name for name, parameter in _parameters(function).items() if parameter.default is parameter.empty]
    if any(arrays.get(name) is None for name in required):
        return False
    if function in ("attention", "plan_attention", "attention_vjp"):
        verdicts.append(verdict.attention(arrays, options, computes=function != "plan_attention"))
    elif function in ("attention_backward", "plan_attention_backward"):
        verdicts.append(verdict.attention_backward(arrays, options, computes=function == "attention_backward"))
    elif function == "merge_states":
        verdicts.append(verdict.merge_states(arrays, options))
    elif function == "vjp":
        verdicts.append(verdict.attention_backward(made_with | {"dlse": None} | arrays, {}))
    elif function == "a workspace":
        x = arrays.get("x")
        verdicts.append(verdict.is_plain(x) and x.dtype == numpy.uint8 and x.ndim == 1 and x.flags.writeable and None)
    else:
        workspace = arrays.pop("workspace", None)
        verdicts.append(None if workspace is None else verdict.is_plain(workspace) and workspace.dtype == numpy.uint8 and None)
        results = ("out", "lse") if function == "a plan" else ("dq", "dk", "dv", "dsinks")
        verdicts.append(verdict.planned(arrays, made_with, results))
    return verdict.merged(*verdicts)


def _left_out(function: str, name: str) -> bool | None:
    parameter = _parameters(function).get(name)
    return None if parameter is not None and parameter.default is not parameter.empty else False


def _parameters(function: str) -> dict[str, inspect.Parameter]:
    """The parameters of a function by name."""
    target = {
        "vjp": _vjp_like,
        "a plan": cupy_flash.AttentionPlan.__call__,
        "a backward plan": cupy_flash.BackwardPlan.__call__,
        "a workspace": _workspace_like,
    }.get(function) or getattr(cupy_flash, function)
    parameters = dict(inspect.signature(target).parameters)
    parameters.pop("self", None)
    if parameters.pop("states", None):  # of merge_states, which is called with its four arrays by name here
        of_pair = {name: parameters[name].replace(default=inspect.Parameter.empty) for name in _arrays_of(function)}
        parameters |= of_pair
    if parameters.pop("lengths", None):  # what a plan takes besides
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters |= {name: inspect.Parameter(name, keyword, default=None) for name in LENGTHS}
    return parameters


def _vjp_like(dout: Any, dlse: Any = None) -> None: ...


def _workspace_like(x: Any) -> None: ...


def _arrays_of(function: str) -> tuple[str, ...]:
    if function == "merge_states":
        return ("out_a", "lse_a", "out_b", "lse_b")
    return (*BACKWARD_ARRAYS, "sinks", "dsinks", "workspace", "x")


def _apply(target: Callable[..., Any], arguments: dict[str, Any], positional: tuple[Any, ...]) -> Any:
    by_place = []
    named = dict(arguments)
    parameters = inspect.signature(target).parameters.values()
    for parameter in parameters:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.name not in named:
            break
        by_place.append(named.pop(parameter.name))
    return target(*by_place, *positional, **named)


def _valid(draw: Draw, function: str) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """A function, valid arguments, and the arrays that it was made with if it is a plan or a vjp."""
    arrays = _valid_arrays(draw)
    q, k, v, out, lse = (arrays[name] for name in ("q", "k", "v", "out", "lse"))
    options, sinks = _valid_options(draw, q), _valid_sinks(draw, q)
    host = {"backend": "host"} if q.dtype.itemsize == 2 and draw.chance(0.5) else {}
    if function in ("attention", "plan_attention"):
        given = sinks | {name: numpy.full_like(arrays[name], 7) for name in ("out", "lse") if draw.chance(0.3)}
        options |= {"return_lse": True} if draw.chance(0.3) else {}
        options |= host if function == "plan_attention" else {}
        return getattr(cupy_flash, function), {"q": q, "k": k, "v": v, **options, **given}, {}
    if function == "attention_vjp":
        return cupy_flash.attention_vjp, {"q": q, "k": k, "v": v, **options, **sinks}, {}
    if function == "merge_states":
        return cupy_flash.merge_states, {"out_a": out, "lse_a": lse, "out_b": out[...] * 1, "lse_b": lse + 1}, {}
    backward = {name: arrays[name] for name in BACKWARD_ARRAYS[:6]}
    if function in ("attention_backward", "plan_attention_backward"):
        given = {f"d{name}": numpy.full_like(arrays[name], 7) for name in "qkv" if draw.chance(0.3)}
        given |= sinks | ({"dlse": numpy.ones_like(lse)} if draw.chance(0.3) else {})
        given |= {f"d{name}": numpy.full_like(x, 7) for name, x in sinks.items() if draw.chance(0.3)}
        options |= host if function == "plan_attention_backward" else {}
        return getattr(cupy_flash, function), backward | options | given, {}
    if function == "vjp":
        return cupy_flash.attention_vjp(q, k, v)[1], {"dout": arrays["dout"]}, arrays
    if function == "a plan":
        room = numpy.zeros((*out.shape[:-1], 2 * out.shape[-1]), out.dtype)[..., ::2]
        given = draw.one(({}, {}, {"out": numpy.zeros_like(out)}, {"out": room}, {"out": room, "lse": numpy.zeros_like(lse)}))
        given |= sinks
        plan = cupy_flash.plan_attention(q, k, v, **given, **host)
        return plan, {"q": q, "k": k, "v": v, **given}, {"q": q, "k": k, "v": v, **given}
    if function == "a backward plan":
        room = numpy.zeros((*q.shape[:-1], 2 * q.shape[-1]), q.dtype)[..., ::2]
        given = draw.one(({}, {}, {"dlse": numpy.ones_like(lse)}, {"dq": room}))
        given |= sinks
        plan = cupy_flash.plan_attention_backward(**backward, **given, **host)
        return plan, backward | given, backward | given
    plan = cupy_flash.plan_attention_backward(**backward, **({"backend": "host"} if q.dtype.itemsize < 8 else {}))
    room = numpy.zeros(plan.workspace_bytes + 16, numpy.uint8)
    memory = room[-room.ctypes.data % 16 :]
    return (lambda x: plan.checked_workspace(x)), {"x": memory}, {}


def _valid_arrays(draw: Draw) -> dict[str, numpy.ndarray]:
    numbers = draw.numbers()
    dtype = DTYPES[draw.one(FLOATS)]
    heads_kv, group, len_q, len_kv = draw.integer(1, 2), draw.one((1, 1, 3)), draw.integer(1, 6), draw.integer(1, 7)
    dim = draw.one((1, 3, 8, 16))
    dim_v = draw.one((dim, 2, 5))
    batch = draw.one(((), (), (1,), (2,)))
    shapes = ((*batch, heads_kv * group, len_q, dim), (*batch, heads_kv, len_kv, dim), (*batch, heads_kv, len_kv, dim_v))
    if draw.chance(0.3):
        shapes = tuple(shape[-2:] for shape in shapes)
    q, k, v = (numbers.standard_normal(shape).astype(dtype) for shape in shapes)
    out, lse = cupy_flash.attention(q, k, v, return_lse=True)
    return {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": numbers.standard_normal(out.shape).astype(dtype)}


def _valid_options(draw: Draw, q: numpy.ndarray) -> dict[str, Any]:
    options: dict[str, Any] = {}
    usual = {
        "scale": 0.5, "causal": draw.one((True, "top_left", False)), "window": (1, 2), "softcap": 2.0, "backend": "numpy",
        "algorithm": "v2", "precision": draw.one(("tf32", "ieee", None)) if q.dtype == numpy.float32 else None,
    }  # fmt: skip
    for name, value in usual.items():
        if draw.chance(0.25):
            options[name] = value
    return options


def _valid_sinks(draw: Draw, q: numpy.ndarray) -> dict[str, numpy.ndarray]:
    if not draw.chance(0.3):
        return {}
    heads = q.shape[-3] if q.ndim > 2 else 1
    shape = draw.one(((heads,), (1, heads), (2, heads)))
    return {"sinks": draw.numbers().standard_normal(shape).astype(draw.one((q.dtype, verdict.lse_dtype(q.dtype))))}


def _shown(value: Any) -> str:
    return repr(value) if not isinstance(value, numpy.ndarray) else _shown_array(value).strip()


def _shown_array(value: Any) -> str:
    return f" {value.dtype}{value.shape}".replace(", ", ",") if verdict.is_plain(value) else ""
