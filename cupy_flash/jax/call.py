"""One computation of a program: a frozen `Call`, which arrays there are and with which options, and its text.

The text is what a compiled program keeps. It says everything, so that a program that was compiled in another process, and comes
from JAX's cache or from `jax.export`, needs nothing else.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..problem.backward import BACKWARD_ARRAYS
from ..problem.forward import FORWARD_ARRAYS, Problem, make_problem
from ..problem.layout import Layout, dense_layout
from ..problem.lengths import LENGTHS
from ..problem.options import Options
from ..problem.scores import OPERANDS

READ = "arrays."  # before the name of what expressions read
Typed = tuple[tuple[int, ...], str]  # shape and dtype


@dataclass(frozen=True, slots=True)
class Call:
    """What is computed of which arrays.

    Parameters
    ----------
    operands : tuple of str
        What each array is, by the names of `cupy_flash.attention` or `attention_backward`, and with `READ` before those that
        expressions read. They have the layout 'bshd' and as many batch axes as each other, of which some may have size 1; those
        without batch axes in that library have none here.
    options : tuple of (str, object)
        Of the library.
    backward : bool
        Whether it is the gradients.
    wrt : tuple of str
        What else gradients are asked for.
    mapped : int
        How many of the batch axes, the first ones, are of `vmap`. A gradient has these in full, and is not summed over them.
    """

    operands: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()
    backward: bool = False
    wrt: tuple[str, ...] = ()
    mapped: int = 0

    @property
    def sources(self) -> tuple[str, ...]:
        """The operands that gradients are of, in the order of the results."""
        reads = self.reads  # a name that an operand has as well is that of what is read, as in `attention_backward`
        return ("q", "k", "v", *(READ + name if name in reads else name for name in self.wrt)) if self.backward else ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of what expressions read."""
        return tuple(name.removeprefix(READ) for name in self.operands if name.startswith(READ))

    @property
    def of_plan(self) -> dict[str, Any]:
        """The options that a plan is made with."""
        options = dict(self.options)
        deterministic = options.pop("deterministic", False)
        if self.backward:
            return options | {"deterministic": deterministic, "wrt": self.wrt}
        return options | {"return_lse": True}

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names that a plan has for arrays, in its order: those of every call, lengths, operands of scores, and reads."""
        own = BACKWARD_ARRAYS if self.backward else FORWARD_ARRAYS
        others = (name for name in (*LENGTHS, *OPERANDS) if name in self.operands)
        return (*own, *others, *(READ + name for name in sorted(self.reads)))

    def of_backward(self, wrt: Iterable[str], dlse: bool) -> Call:
        """The call of the gradients of this one, of which there is one algorithm. Sinks do not take part in it, see `gradient`."""
        results = ("out", "lse", "dlse") if dlse else ("out", "lse")
        operands = tuple(name for name in self.operands if name != "sinks")
        options = tuple((name, x) for name, x in self.options if name != "algorithm")
        return Call(("dout", *results, *operands), options, True, tuple(wrt))


@functools.lru_cache(maxsize=1024)
def text_of(call: Call, types: tuple[Typed, ...] = ()) -> str:
    """What `read_call` and `read_types` read; types are those of operands and results, for who does not look at them in a call."""
    return json.dumps([call.operands, dict(call.options), call.backward, call.wrt, call.mapped, types])


def read_call(text: str) -> Call:
    """The call of a text."""
    operands, options, backward, wrt, mapped, _ = json.loads(text)
    of_lists = ((name, tuple(x) if isinstance(x, list) else x) for name, x in options.items())
    return Call(tuple(operands), tuple(of_lists), backward, tuple(wrt), mapped)


def read_types(text: str) -> tuple[Typed, ...]:
    """The types of a text."""
    return tuple((tuple(shape), dtype) for shape, dtype in json.loads(text)[-1])


@functools.lru_cache(maxsize=1024)
def problem_of(call: Call, types: tuple[Typed, ...]) -> Problem:
    """The attention of a call, checked, for arrays of these types in host memory.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`.
    """
    layouts = {name: _layout(name, *typed) for name, typed in zip(call.operands, types)}
    operands = {name: layouts[name] for name in (*LENGTHS, *OPERANDS) if name in layouts}
    arrays = {name: layouts[READ + name] for name in sorted(call.reads)}
    options = {name: x for name, x in call.options if name != "deterministic"}
    asked = Options(**options, operands=tuple(operands), arrays=tuple(arrays), return_lse=True)
    return make_problem(*map(layouts.get, ("q", "k", "v")), asked, sinks=layouts.get("sinks"), operands=operands, arrays=arrays)


@functools.lru_cache(maxsize=1024)
def result_types(call: Call, types: tuple[Typed, ...]) -> tuple[Typed, ...]:
    """Shapes and dtypes of the results of a call on arrays of these types.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`.
    """
    problem = problem_of(call, types)
    if not call.backward:
        return tuple((x.shape, x.dtype) for x in problem.seen[3:5])
    given = dict(zip(call.operands, types))
    mapped = problem.batch[: call.mapped]
    found = []
    for name in call.sources:
        shape, dtype = given[name]
        found.append((shape if name.startswith(READ) else (*mapped, *shape[len(mapped) :]), dtype))
    return tuple(found)


def _layout(name: str, shape: tuple[int, ...], dtype: str) -> Layout:
    if name == "seed":
        shape, dtype = (2,), "uint64"
    return dense_layout(shape, reversed(range(len(shape))), dtype, None)
