"""Attention as an operation of JAX's: its types, and what it compiles to."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from .call import Call, result_types, text_of
from .handler import ATTRIBUTE, TARGET, register

attention_p = Primitive("cupy_flash_attention")  # of a `Call`, a forward or its gradients
attention_p.multiple_results = True


def bind(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of a call on arrays in the order of its operands."""
    return attention_p.bind(*arrays, call=call)


def types_of(arrays: Sequence[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes and dtypes of arrays, or of what JAX knows of them while it traces."""
    return tuple((tuple(x.shape), numpy.dtype(x.dtype).name) for x in arrays)


@attention_p.def_abstract_eval
def _types_of_results(*operands: ShapedArray, call: Call) -> list[ShapedArray]:
    return [_like(operands[0], shape, numpy.dtype(dtype)) for shape, dtype in result_types(call, types_of(operands))]


def _like(operand: ShapedArray, shape: tuple[int, ...], dtype: numpy.dtype) -> ShapedArray:
    """The type of a result: it varies along the axes of a mesh that operands vary along, all of them alike."""
    sharding = getattr(operand, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return ShapedArray(shape, dtype)
    return operand.update(shape=shape, dtype=dtype, weak_type=False, sharding=NamedSharding(sharding.mesh, PartitionSpec()))


@attention_p.def_impl
def _outside_of_jit(*arrays: jax.Array, call: Call) -> list[jax.Array]:
    with jax.disable_jit(False):
        return _compiled(call)(*arrays)


@functools.lru_cache(maxsize=1024)  # JAX finds a compiled program by the function that it is of
def _compiled(call: Call) -> Any:
    return jax.jit(functools.partial(attention_p.bind, call=call))


def _lowered_for_host(context: mlir.LoweringRuleContext, *operands: Any, call: Call) -> Any:
    register()
    return jax.ffi.ffi_lowering(TARGET)(context, *operands, **{ATTRIBUTE: text_of(call)})


def _lowered_for_device(context: mlir.LoweringRuleContext, *operands: Any, call: Call) -> Any:
    """The same, with memory for the plan as one result more, which is XLA's to place: so calls can be captured in a CUDA graph."""
    register()
    try:
        from . import on_device  # late, because it needs CuPy
    except ImportError as error:
        raise ImportError('attention on a GPU needs CuPy: pip install "cupy_flash[cuda12]", or cuda13') from error
    types = types_of((*context.avals_in, *context.avals_out))
    workspace = ShapedArray((max(on_device.prepare(call, types, _ordinal()), 1),), numpy.dtype(numpy.uint8))
    context = context.replace(avals_out=[*context.avals_out, workspace])
    text = text_of(call, (*types, *types_of([workspace])))
    *results, _ = jax.ffi.ffi_lowering(TARGET)(context, *operands, **{ATTRIBUTE: text})
    return results


def _ordinal() -> int:
    """The device to plan for. Those of a process are taken to be alike; a launch plans for its own, and says if they are not."""
    return getattr(jax.local_devices(backend="gpu")[0], "local_hardware_id", None) or 0


mlir.register_lowering(attention_p, _lowered_for_host, platform="cpu")
mlir.register_lowering(attention_p, _lowered_for_device, platform="cuda")
