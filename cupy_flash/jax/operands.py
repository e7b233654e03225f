"""What a user gives to attention as arrays of a `Call`: as many axes, and dtypes that the library has."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy

from ..call.tile_mask import TileMask
from ..errors import shown
from ..problem.dropout import make_seed
from ..problem.key_ranges import OWN_NAMES, START, STOP, KeyRanges
from .call import READ

AXES_OF_PAIRS, AXES_OF_HEADS = 4, 2  # a batch axis, and those behind it


def of_batch(q: Any, k: Any, v: Any) -> dict[str, jax.Array]:
    """q, k and v with one batch axis.

    Raises
    ------
    TypeError, ValueError
        If one is no array, or has neither 3 axes nor 4.
    """
    arrays = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        arrays[name] = array = _array(name, x)
        if array.ndim not in (3, 4):
            expected = "expected 3 or 4 axes, ([batch,] seq, heads, dim); map over others with jax.vmap"
            raise ValueError(f"{name}: {expected}, got shape {array.shape}")
    return {name: x if x.ndim == 4 else x[None] for name, x in arrays.items()}


def of_pairs(bias: Any, mask: Any, dtype: Any) -> dict[str, jax.Array]:
    """A bias and a mask that are arrays, with a batch axis and one of heads."""
    given = {name: _array(name, x) for name, x in (("bias", bias), ("mask", mask)) if x is not None}
    for name, x in given.items():
        if x.ndim > AXES_OF_PAIRS:
            raise ValueError(f"{name}: expected at most 4 axes, (batch, heads, seq_q, seq_kv), got shape {x.shape}")
        given[name] = x.reshape(*[1] * (AXES_OF_PAIRS - x.ndim), *x.shape)
    if "bias" in given:
        given["bias"] = _as_scores("bias", given["bias"], dtype)
    return given


def of_heads(alibi_slopes: Any, sinks: Any, dtype: Any) -> dict[str, jax.Array]:
    """Numbers of each head."""
    given = {}
    if alibi_slopes is not None:
        slopes = _as_scores("alibi_slopes", _array("alibi_slopes", alibi_slopes), dtype)
        given["alibi_slopes"] = slopes.reshape(*[1] * (AXES_OF_HEADS - slopes.ndim), *slopes.shape)
    if sinks is not None:
        given["sinks"] = _as_scores("sinks", _array("sinks", sinks), dtype)
    return given


def of_lengths(
    given: dict[str, Any], names: Mapping[str, str], most: Mapping[str, int], sequences: int
) -> dict[str, jax.Array]:
    """Lengths of sequences; as in `jax.nn`, one beyond what there is means all of it, and one below 0 none.

    Parameters
    ----------
    given : dict of str to array or None
        By the names that users have for them.
    names : mapping of str to str
        The names that the library has.
    most : mapping of str to int
    sequences : int
    """
    lengths = {}
    for name, x in given.items():
        if x is None:
            continue
        x = _array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name}: expected integers, got {x.dtype}")
        if x.shape != (sequences,):
            raise ValueError(f"{name}: expected shape ({sequences},), a number for each sequence, got {x.shape}")
        lengths[names[name]] = jnp.clip(x, 0, most[name]).astype(jnp.int32)
    return lengths


def of_reads(arrays: Any, mask: Any) -> dict[str, jax.Array]:
    """What expressions read, and the ends of ranges of keys."""
    if isinstance(mask, TileMask):
        raise TypeError("mask: expected an array, an expression or KeyRanges, got a TileMask, which keeps arrays; pass its mask")
    if arrays is not None and not isinstance(arrays, Mapping):
        raise TypeError(f"arrays: expected None or a dict of arrays by their names, got {shown(arrays)}")
    for name in arrays or ():
        if not isinstance(name, str) or name in OWN_NAMES:
            raise ValueError(f"arrays: expected names that are identifiers, got {shown(name)}")
    given = {READ + name: _array(f"arrays[{name!r}]", x) for name, x in (arrays or {}).items()}
    if isinstance(mask, KeyRanges):
        for name, x in ((START, mask.start), (STOP, mask.stop)):
            end = _array(name, x)
            given[READ + name] = end.reshape(()) if end.size == 1 else end
    return given


def of_seed(seed: Any) -> dict[str, jax.Array]:
    """A seed as two numbers of 64 bits, seed and offset, in words of 32, the lower ones first: without x64 JAX has no wider ones.

    Parameters
    ----------
    seed : int, (int, int), array or None
        Also a key of `jax.random`, old or new, of any of its generators.
    """
    if seed is None:
        return {}
    if isinstance(seed, (tuple, list, numbers.Number)) and not any(isinstance(x, jax.Array) for x in jax.tree.leaves(seed)):
        return {"seed": jnp.asarray(numpy.array(make_seed(seed), numpy.uint64).view(numpy.uint32))}
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        if seed.ndim:
            raise ValueError(f"seed: expected one key, got keys of shape {seed.shape}; map over them with jax.vmap")
        seed = jax.random.key_data(seed)
    words = _array("seed", seed)
    if not jnp.issubdtype(words.dtype, jnp.integer) or words.ndim > 1 or words.size not in (1, 2, 4):
        expected = "an integer, a pair of seed and offset, or a key of jax.random"
        raise TypeError(f"seed: expected {expected}, got {words.dtype} of shape {words.shape}")
    words = words.reshape(-1).astype(jnp.uint32)
    words = words[:2] ^ words[2:] if words.size == 4 else words
    return {"seed": jnp.zeros(4, jnp.uint32).at[: words.size].set(words)}


def varying_alike(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays as if all of them differed along each axis of a mesh along which one does, inside of `jax.shard_map`.

    Its check wants that of operands of one operation. Gradients of those that were alike are summed over these axes by that.
    """
    axes = frozenset().union(*map(_varying, arrays.values()))
    return {name: _vary(x, tuple(sorted(axes - _varying(x)))) for name, x in arrays.items()}


def _varying(x: jax.Array) -> frozenset[str]:
    kind = jax.typeof(x)
    of_manual = getattr(kind, "mat", None)  # of JAX 0.10; before, the type has them itself
    return frozenset(getattr(kind, "vma", ()) if of_manual is None else of_manual.varying)


def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if not axes:
        return x
    return jax.lax.pcast(x, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, axes)


def _array(name: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: expected an array that JAX takes, got {shown(x)}") from error


def _as_scores(name: str, x: jax.Array, dtype: Any) -> jax.Array:
    """What is added to scores, in the dtype of q or in that of scores."""
    if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}: expected numbers, got {x.dtype}")
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return x if x.dtype in (dtype, wide) else x.astype(wide)
