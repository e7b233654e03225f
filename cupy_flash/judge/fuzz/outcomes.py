"""What may come of a malformed call: one error that names the argument and nothing written, or a result that is right."""

from __future__ import annotations

import re
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

import cupy_flash

from ...problem.arrays import view
from ...problem.backward import Gradients
from ...problem.lengths import LENGTHS
from ..cases import Case
from ..compare import compare
from ..compare_gradients import compare_gradients
from . import verdict
from .calls import RESULTS, Call, draw_call
from .options import UNKNOWN

ALLOWED = (TypeError, ValueError, cupy_flash.UnsupportedError)
MOST_BYTES = 200e6
OF_PYTHON = re.compile(
    r"[\w.<>]+\(\) (got an unexpected keyword argument|got multiple values for|missing \d+ required|takes \d+ positional|"
    r"takes from \d+ to \d+ positional|got some positional-only)"
)


@dataclass(frozen=True)
class Outcome:
    """What came of a call: its result, or the error's class and message; what is wrong with that; and an error shown with it."""

    result: Any
    error: str
    wrong: str
    chained: str

    @property
    def same(self) -> tuple[bool, str]:
        """What has to be the same each time."""
        return not self.error, self.error


def run(seed: int, index: int) -> str | None:
    """Make call `index` of a seed: what is wrong, in words, or None."""
    call = draw_call(seed, index)
    wrong = judge(call)
    return wrong and f"{wrong}\n  {call}"


def judge(call: Call) -> str | None:
    """Make a call four times, between them its valid sibling and its twin: what is wrong, in words, or None."""
    first = outcome(call, call.make)
    if first.wrong:
        return first.wrong
    if first.error and call.ok is True:
        return f"a valid call was refused: {first.error}"
    if not first.error and call.ok is False:
        return "accepted"
    for what, between in (("once more", None), ("after a valid call", call.make_valid), ("after an equal call", call.make_twins)):
        if between is not None:
            valid = outcome(call, between)
            if valid.error and between == call.make_valid:
                return f"the call that nothing was broken in was refused: {valid.error}"
        again = outcome(call, call.make)
        if again.wrong or again.same != first.same:
            return f"{what} otherwise: {again.wrong or again.error or 'accepted'}; at first: {first.error or 'accepted'}"
    return (first.chained or None) if first.error else _wrong_result(call, first.result)


def outcome(call: Call, make: Callable[[], Any]) -> Outcome:
    """Make one call and see what it leaves behind."""
    arrays = {name: x for name, x in call.arguments.items() if type(x) is numpy.ndarray and x.nbytes < MOST_BYTES}
    before = {name: x.tobytes() for name, x in arrays.items()}
    result, raised = None, None
    started = tracemalloc.is_tracing()
    if not started:
        tracemalloc.start(1)
    tracemalloc.reset_peak()
    base = tracemalloc.get_traced_memory()[0]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = make()
        except Exception as error:
            raised = error
    peak = tracemalloc.get_traced_memory()[1] - base
    if not started:
        tracemalloc.stop()
    text, wrong, chained = ("", "", "") if raised is None else (*_read(call, raised), _chained(raised))
    written = [name for name, x in arrays.items() if x.tobytes() != before[name] and (raised is not None or name not in RESULTS)]
    if written:
        wrong = wrong or f"{written[0]}: written{', and then ' + text if text else ''}"
    if warned:
        wrong = wrong or f"{warned[0].category.__name__}: {warned[0].message}"
    if peak > MOST_BYTES:
        wrong = wrong or f"{peak / 1e6:.0f} MB allocated; {text}"
    return Outcome(result, text, wrong, chained and f"two tracebacks: {text}; the other one: {chained}")


def _read(call: Call, error: Exception) -> tuple[str, str]:
    """An error in words, and what is wrong with it."""
    kind = type(error).__name__
    try:
        message = str(error)
    except Exception as second:
        return kind, f"{kind} whose message raises {type(second).__name__}"
    text = f"{kind}: {message[:300]}"
    if type(error) not in ALLOWED:
        return text, f"wrong kind of error: {text}"
    named = message.partition(":")[0].partition(".")[0]  # of mask.start the argument is mask
    if named not in call.names and not OF_PYTHON.match(message):
        return text, f"no argument named: {text}"
    return text, ""


def _chained(error: Exception) -> str:
    """The class of an error whose traceback is printed with this one's, or ''."""
    other = error.__cause__ if error.__suppress_context__ else error.__context__
    return "" if other is None else type(other).__name__


def _wrong_result(call: Call, result: Any) -> str | None:
    """Judge a result against the oracle, where it is a result and what it was computed from is known."""
    options = {name: call.broken[name].means if name in call.broken else x for name, x in call.arguments.items()}
    arrays = [call.arguments.get(name) for name in "qkv"]
    if call.function not in ("attention", "attention_backward") or not all(map(verdict.is_plain, arrays)):
        return None
    if any(options.get(name) is UNKNOWN for name in ("causal", "window", "prefix", "scale", "softcap", "precision")):
        return None
    if any(call.arguments.get(name) is not None for name in LENGTHS):  # what these mean, tests of lengths judge
        return None
    q, k, v = (x if x.ndim > 2 else x[None] for x in arrays)
    if 0 in q.shape + k.shape + v.shape or max(q.ndim, k.ndim, v.ndim) > 16:
        return None
    case = Case(
        q.dtype.name, q.shape[-2], k.shape[-2], q.shape[-1], causal=options.get("causal", False),
        window=options.get("window") and tuple(None if end == -1 else end for end in options["window"]),
        prefix=options.get("prefix", 0), softcap=options.get("softcap"), scale=options.get("scale"),
    )  # fmt: skip
    scores = case.scores | {"precision": options.get("precision") or "ieee"}
    sinks = call.arguments.get("sinks")
    if sinks is not None and not verdict.is_plain(sinks):
        return None
    scores |= {} if sinks is None else {"sinks": sinks}
    if call.function == "attention":
        out, lse = result if options.get("return_lse") is True else (result, None)
        out, lse = (None if x is None else view(x, "result") for x in (out, lse))
        two = max(x.ndim for x in arrays) == 2
        judged = compare(*((x[None] if two and x is not None else x) for x in (out, lse)), q, k, v, **scores)
        return None if judged.ok else f"wrong result: {judged.message}"
    of_results = {"scale", "causal", "window", "prefix", "softcap", "precision", "q", "k", "v"}
    if (of_results | {"dout", "out", "lse", "dlse"}) & call.broken.keys():
        return None  # out and lse are those of another problem then
    dout, dlse = call.arguments["dout"], call.arguments.get("dlse")
    dout, dlse = dout if dout.ndim > 2 else dout[None], dlse
    dlse = dlse if dlse is None else dlse.reshape(dout.shape[:-1])
    defaults = {name for name in ("scale", "causal", "window", "prefix", "softcap") if name in call.arguments}
    if defaults or sinks is not None:  # out and lse were made without
        return None
    result = [view(x, "result") for x in result]  # an array of another kind that the caller has brought, too
    gradients = Gradients(*(x if x.ndim > 2 else x[None] for x in result))
    judged = compare_gradients(gradients, dout, q, k, v, dlse=dlse, **scores)
    return None if judged.ok else f"wrong gradients: {judged.message}"
