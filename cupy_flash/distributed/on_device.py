"""Sums of partial results on a device, each in one pass: CuPy's array code would take one for each operation.

What is added may be of 16 bits, sums are float32. A kernel of CuPy is compiled for each dtype when it is first needed.
"""

from __future__ import annotations

import functools
from typing import Any

from .bits import raw

WEIGHTS = """
float top = max(max(old, a), b);
top = isinf(top) && top < 0 ? 0.f : top;
const float of_old = expf(old - top), of_a = expf(a - top), of_b = expf(b - top), total = of_old + of_a + of_b;
const float part = total == 0.f ? 0.f : 1.f / total;
keep = of_old * part, share_a = of_a * part, share_b = of_b * part;
lse = top + logf(total);
"""
# What has weight 0 is left out, whatever it holds.
SUM = "sum = (keep == 0.f ? 0.f : sum * keep) + (share_a == 0.f ? 0.f : {a} * share_a) + (share_b == 0.f ? 0.f : {b} * share_b)"
GRADIENT = {1: "sum += {a}", 2: "sum = sum + {a} + {b}"}
AS_FLOAT = {"bfloat16": "__uint_as_float((unsigned int){name} << 16)"}


@functools.cache
def _weights() -> Any:
    import cupy

    inputs, outputs = "float32 old, float32 a, float32 b", "float32 lse, float32 keep, float32 share_a, float32 share_b"
    return cupy.ElementwiseKernel(inputs, outputs, WEIGHTS, "cupy_flash_weights")


@functools.cache
def _sum(dtype: str) -> Any:
    import cupy

    kind = "uint16" if dtype == "bfloat16" else dtype
    text = SUM.format(**{name: AS_FLOAT.get(dtype, "(float){name}").format(name=name) for name in "ab"})
    inputs = f"{kind} a, {kind} b, float32 keep, float32 share_a, float32 share_b"
    return cupy.ElementwiseKernel(inputs, "float32 sum", text, f"cupy_flash_sum_{dtype}")


@functools.cache
def _gradient(dtype: str, parts: int) -> Any:
    import cupy

    kind = "uint16" if dtype == "bfloat16" else dtype
    a, b = (AS_FLOAT.get(dtype, "(float){name}").format(name=name) for name in "ab")
    inputs = ", ".join(f"{kind} {name}" for name in ("a", "b")[:parts])
    return cupy.ElementwiseKernel(inputs, "float32 sum", GRADIENT[parts].format(a=a, b=b), f"cupy_flash_gradient_{dtype}_{parts}")


def merge(total: Any, lse: Any, parts: list[tuple[Any, Any]]) -> None:
    """Merge one or two results over other keys into a sum in float32, in place."""
    import cupy

    (a, lse_a), *others = parts
    b, lse_b = others[0] if others else (a, cupy.full_like(lse_a, -float("inf")))
    new_lse, keep, share_a, share_b = (cupy.empty(lse.shape, lse.dtype) for _ in range(4))
    _weights()(lse, lse_a, lse_b, new_lse, keep, share_a, share_b)
    lse[...] = new_lse
    _sum(a.dtype.name)(raw(a), raw(b), keep[..., None], share_a[..., None], share_b[..., None], total)


def add(total: Any, parts: list[Any]) -> None:
    """Add one or two parts to a sum in float32, in place, in their order."""
    _gradient(parts[0].dtype.name, len(parts))(*map(raw, parts), total)
