"""Parts that become one on a device, each time in one pass: CuPy's array code would take one for each operation.

A kernel of CuPy is compiled for each number of parts and their dtypes when it is first needed. Sums are computed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from .bits import raw

# What has weight 0 is left out, whatever it holds.
WEIGHED = "(of_{name} == 0.f ? 0.f : {x} * (of_{name} * part))"
AS_FLOAT = {"bfloat16": "__uint_as_float((unsigned int){name} << 16)", "float16": "(float){name}", "float32": "{name}"}
# To bfloat16 as to the nearest, to the even one of two.
ROUNDED = {
    "bfloat16": """
const unsigned int bits = __float_as_uint(value);
{out} = isnan(value) ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
""",
    "float16": "{out} = (float16)value;",
    "float32": "{out} = value;",
}
KINDS = {"bfloat16": "uint16"}


def weights(names: tuple[str, ...]) -> str:
    """The weights of what has these log-sum-exps, `lse_` and its name, as text."""
    lines = ["float top = lse_" + names[0] + ";"]
    lines += [f"top = max(top, lse_{name});" for name in names[1:]]
    lines += ["top = isinf(top) && top < 0 ? 0.f : top;"]
    lines += [f"const float of_{name} = expf(lse_{name} - top);" for name in names]
    return "\n".join([*lines, f"const float total = {' + '.join(f'of_{name}' for name in names)};"])


def merged(names: tuple[str, ...], dtypes: tuple[str, ...], into: str) -> str:
    """What of results of these dtypes is one of another dtype, as text."""
    terms = [WEIGHED.format(name=name, x=AS_FLOAT[dtype].format(name=name)) for name, dtype in zip(names, dtypes)]
    lines = [weights(names), "const float part = total == 0.f ? 0.f : 1.f / total;", f"const float value = {' + '.join(terms)};"]
    return "\n".join([*lines, ROUNDED[into].format(out="out")])


def added(names: tuple[str, ...], dtypes: tuple[str, ...], into: str, out: str = "out") -> str:
    """The sum, as text."""
    terms = [AS_FLOAT[dtype].format(name=name) for name, dtype in zip(names, dtypes)]
    return f"const float value = {' + '.join(terms)};\n{ROUNDED[into].format(out=out)}"


@functools.cache
def _merging(names: tuple[str, ...], dtypes: tuple[Any, ...], into: Any) -> Any:
    import cupy

    known = tuple(dtype.name for dtype in dtypes)
    inputs = [*_declared(names, known), *(f"float32 lse_{name}" for name in names)]
    [result] = _declared(("out",), (into.name,))
    return cupy.ElementwiseKernel(", ".join(inputs), result, merged(names, known, into.name), _named("merged", known, into.name))


@functools.cache
def _adding(names: tuple[str, ...], dtypes: tuple[Any, ...], into: Any, sums: int) -> Any:
    import cupy

    known, inputs, outs, texts = tuple(dtype.name for dtype in dtypes), [], [], []
    for i in range(sums):
        own = tuple(f"{name}{i}" for name in names)
        inputs += _declared(own, known)
        outs += _declared((f"out{i}",), (into.name,))
        texts.append(f"{{ {added(own, known, into.name, f'out{i}')} }}")
    return cupy.ElementwiseKernel(", ".join(inputs), ", ".join(outs), "\n".join(texts), _named(f"added_{sums}", known, into.name))


def _declared(names: tuple[str, ...], dtypes: tuple[str, ...]) -> list[str]:
    return [f"{KINDS.get(dtype, dtype)} {name}" for name, dtype in zip(names, dtypes)]


def _named(what: str, dtypes: tuple[str, ...], into: str) -> str:
    return "_".join(("cupy_flash", what, *dtypes, into))


@functools.cache
def _of_lse(names: tuple[str, ...]) -> Any:
    import cupy

    inputs = ", ".join(f"float32 lse_{name}" for name in names)
    text = f"{weights(names)}\nlse = top + logf(total);"
    return cupy.ElementwiseKernel(inputs, "float32 lse", text, f"cupy_flash_lse_{len(names)}")


def merge(into: Any, base: Any, lse: Any, parts: list[tuple[Any, Any]]) -> None:
    """Merge at most two results over other keys, and `base` if there is any, whose log-sum-exp `lse` has, which is overwritten."""
    if not parts:
        add([into], [base], [])
        return
    given = [*([] if base is None else [(base, lse)]), *parts]
    names = tuple("abc"[: len(given)])
    lses = [x for _, x in given]
    kernel = _merging(names, tuple([x.dtype for x, _ in given]), into.dtype)
    kernel(*[raw(x) for x, _ in given], *[x[..., None] for x in lses], raw(into))
    _of_lse(names)(*lses, lse)


def add(intos: Sequence[Any], bases: Sequence[Any], parts: Sequence[Sequence[Any]]) -> None:
    """Add at most two parts, and bases if there are any, in this order: to several sums in one pass, if they are of one shape."""
    of_sums = [[*([] if base is None else [base]), *(part[i] for part in parts)] for i, base in enumerate(bases)]
    first, into, names = of_sums[0], intos[0], tuple("abc"[: len(of_sums[0])])
    dtypes = tuple([x.dtype for x in first])
    if all(x.shape == into.shape for x in intos):
        kernel = _adding(names, dtypes, into.dtype, len(intos))
        kernel(*[raw(x) for of in of_sums for x in of], *map(raw, intos))
        return
    kernel = _adding(names, dtypes, into.dtype, 1)
    for total, of in zip(intos, of_sums):
        kernel(*map(raw, of), raw(total))
