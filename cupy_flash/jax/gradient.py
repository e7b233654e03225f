"""Attention that JAX differentiates: what its forward keeps, and the gradients of it all."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from . import batching  # noqa: F401, which is a rule for what is called here
from .call import READ, Call, problem_of
from .primitive import bind, types_of

Arrays = dict[str, jax.Array]  # the operands of a call, by their names


@functools.partial(jax.tree_util.register_dataclass, data_fields=["arrays", "out", "lse"], meta_fields=["differentiated"])
@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward.

    Parameters
    ----------
    arrays : dict of str to array
    out, lse : array
    differentiated : tuple of str
        The operands that gradients are asked for.
    """

    arrays: Arrays
    out: jax.Array
    lse: jax.Array
    differentiated: tuple[str, ...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: Call, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """The result of a forward call, and its log-sum-exp."""
    out, lse = bind(call, [arrays[name] for name in call.operands])
    return out, lse


def _forward(call: Call, primals: dict[str, Any]) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    arrays = {name: primal.value for name, primal in primals.items()}
    out, lse = attend(call, arrays)
    differentiated = tuple(name for name in call.operands if primals[name].perturbed)
    return (out, lse), Saved(arrays, out, lse, differentiated)


def _backward(call: Call, saved: Saved, cotangents: tuple[Any, Any]) -> tuple[dict[str, jax.Array | None]]:
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
    dout = jnp.zeros_like(saved.out) if dout is None else dout
    gradients: dict[str, jax.Array | None] = dict.fromkeys(saved.arrays)
    differentiated = set(saved.differentiated)
    if "sinks" in differentiated:
        gradients["sinks"] = _of_sinks(saved, dout, dlse)
        differentiated.remove("sinks")
    if differentiated:
        wrt = tuple(name for name in _with_gradient(call, saved.arrays) if _operand(call, name) in differentiated)
        of_backward = call.of_backward(wrt, dlse is not None)
        arrays = saved.arrays | {"dout": dout, "out": saved.out, "lse": saved.lse, "dlse": dlse}
        found = bind(of_backward, [arrays[name] for name in of_backward.operands])
        gradients |= {name: x for name, x in zip(of_backward.sources, found) if name in differentiated}
    return (gradients,)


attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _with_gradient(call: Call, arrays: Arrays) -> tuple[str, ...]:
    """What `attention_backward` has gradients of beside q, k and v."""
    return problem_of(call, types_of([arrays[name] for name in call.operands])).scores.gradients


def _operand(call: Call, name: str) -> str:
    return READ + name if name in call.reads else name


def _of_sinks(saved: Saved, dout: jax.Array, dlse: jax.Array | None) -> jax.Array:
    """The gradient with respect to sinks, which is a sum over all rows of a head of the weight that a sink has in each.

    The other gradients do not see sinks but through the log-sum-exp. So it is computed here, where it has the batch axes of `vmap`.
    """
    sinks = saved.arrays["sinks"]
    wide = saved.lse.dtype
    change = (dout.astype(wide) * saved.out.astype(wide)).sum(-1)  # of the log-sum-exp, through the result
    change = -change if dlse is None else dlse - change
    rows = jnp.where(jnp.isneginf(saved.lse), jnp.inf, saved.lse)  # rows that see nothing, of which a sink has no part
    weights = jnp.exp(sinks.astype(wide).reshape(-1, *[1] * (rows.ndim - 1), sinks.shape[-1]) - rows)
    return (weights * change).sum(tuple(range(1, rows.ndim))).reshape(sinks.shape).astype(sinks.dtype)
