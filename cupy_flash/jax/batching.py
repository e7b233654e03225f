"""What `jax.vmap` makes of attention: one call with a batch axis more, in place of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from ..problem.lengths import LENGTHS
from .call import READ, Call, problem_of
from .primitive import attention_p, bind, types_of

OF_RESULTS = ("dout", "out", "lse", "dlse")  # which have every batch axis in full
OF_SCORES = ("bias", "mask", "alibi_slopes")


def batched(arrays: Sequence[jax.Array], axes: Sequence[int | None], *, call: Call) -> tuple[list[jax.Array], list[int]]:
    """The rule of JAX's for `attention_p`: results, and which axis of each is the new one.

    An axis of a batch is put in front of those that there are, of size 1 for an operand that all elements share: it is not copied.
    Where a call has no such axis, elements are computed one after the other.

    Notes
    -----
    Which probabilities are dropped depends on the place in the batch. With a seed for each element the first one serves all of
    them, who drop others each by their place, as JAX's own generators 'rbg' and 'unsafe_rbg' do under `vmap`.
    """
    size = next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)
    fronted = {
        name: x if axis is None else jnp.moveaxis(x, axis, 0) for name, x, axis in zip(call.operands, arrays, axes)
    }
    mapped = {name for name, axis in zip(call.operands, axes) if axis is not None}
    if _one_by_one(call, fronted, mapped):
        found = _looped(call, fronted, mapped)
    elif any(name in call.operands for name in LENGTHS):
        found = _as_more_sequences(call, fronted, mapped, size)
    else:
        found = _with_another_axis(call, fronted, mapped, size)
    return found, [0] * len(found)


def _one_by_one(call: Call, arrays: dict[str, jax.Array], mapped: set[str]) -> bool:
    """Whether elements differ in what has no batch axes: sinks, what expressions read, and which element of the batch they are."""
    if "sinks" in mapped or any(name.startswith(READ) for name in mapped):
        return True
    if any(name.startswith(READ) for name in call.sources) or ("seed" in call.operands and "seed" not in mapped):
        return True
    if call.wrt and any(name in call.operands for name in LENGTHS):
        return True
    if not any(value for name, value in call.options if name in ("score", "mask")) and not call.reads:
        return False
    from ..problem.expression.tree import Name, walk

    types = types_of([x[0] if name in mapped else x for name, x in arrays.items()])
    scores = problem_of(call, types).scores
    trees = [expression.tree for expression in (scores.score, scores.mask) if expression is not None]
    return any(isinstance(node, Name) and node.name == "b" for tree in trees for node in walk(tree))


def _looped(call: Call, arrays: dict[str, jax.Array], mapped: set[str]) -> list[jax.Array]:
    shared = {name: x for name, x in arrays.items() if name not in mapped}

    def one(own: dict[str, jax.Array]) -> list[jax.Array]:
        every = shared | own
        return list(bind(call, [every[name] for name in call.operands]))

    return jax.lax.map(one, {name: arrays[name] for name in mapped})


def _with_another_axis(call: Call, arrays: dict[str, jax.Array], mapped: set[str], size: int) -> list[jax.Array]:
    whole = {"q"} if not {"q", "k", "v"} & mapped else set()  # from which the call learns how many there are
    given = []
    for name, x in arrays.items():
        if name == "seed":
            x = x[0] if name in mapped else x
        elif name not in mapped and name != "sinks" and not name.startswith(READ):
            x = jnp.broadcast_to(x, (size if name in whole or name in OF_RESULTS else 1, *x.shape))
        given.append(x)
    return bind(replace(call, mapped=call.mapped + 1), given)


def _as_more_sequences(call: Call, arrays: dict[str, jax.Array], mapped: set[str], size: int) -> list[jax.Array]:
    """With lengths there is one batch axis, of sequences, of which there are so many times more now."""
    sequences = arrays["q"].shape[1 if "q" in mapped else 0]
    given = []
    for name, x in arrays.items():
        own = x.shape[1:] if name in mapped else x.shape
        if name == "seed":
            x = x[0]
        elif name != "sinks" and not name.startswith(READ) and (name in mapped or own[0] == sequences or name not in OF_SCORES):
            x = x if name in mapped else x[None]
            x = jnp.broadcast_to(x, (size, sequences, *own[1:])).reshape(size * sequences, *own[1:])
        given.append(x)
    return [x.reshape(size, sequences, *x.shape[1:]) for x in bind(call, given)]


def register() -> Any:
    """Tell JAX the rule."""
    batching.primitive_batchers[attention_p] = batched


register()
