"""Parts that become one on a device, each time in one pass: CuPy's array code would take one for each operation.

A kernel of CuPy is compiled for each number of parts and their dtypes when it is first needed. Sums are computed in float32. A lane
has four elements that follow each other, where memory allows: it loads 16 bytes of float32 at once, and weighs parts once for all.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from .bits import begins_at, raw

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
FOUR = {"bfloat16": "uint64", "float16": "uint64", "float32": "complex128"}  # what CuPy has of as many bytes as four of them
TYPES = {"bfloat16": "unsigned short", "float16": "float16", "float32": "float"}
# CuPy includes its float16 where it is the dtype of an array, which it is not in fours.
PREAMBLE = "#include <cupy/float16.cuh>\ntemplate <typename T> struct alignas(4 * sizeof(T)) Four { T at[4]; };"


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


def in_fours(inputs: dict[str, str], outs: dict[str, str], text: str) -> str:
    """What a text does, done for each of four elements of inputs and outs, whose dtypes are given by name."""
    given = [(name, f"Four<{TYPES[dtype]}>", TYPES[dtype]) for name, dtype in inputs.items()]
    made = [(name, f"Four<{TYPES[dtype]}>", TYPES[dtype]) for name, dtype in outs.items()]
    begun = [f"const {four} four_{name} = reinterpret_cast<const {four}&>({name});" for name, four, _ in given]
    begun += [f"{four} four_{name};" for name, four, _ in made]
    names = [f"const {one} {name} = four_{name}.at[i];" for name, _, one in given]
    names += [f"{one}& {name} = four_{name}.at[i];" for name, _, one in made]
    ended = [f"reinterpret_cast<{four}&>({name}) = four_{name};" for name, four, _ in made]
    return "\n".join([*begun, "#pragma unroll", "for (int i = 0; i < 4; ++i) {", *names, text, "}", *ended])


@functools.cache
def _merging(names: tuple[str, ...], dtypes: tuple[Any, ...], into: Any, four: bool) -> Any:
    known = tuple(dtype.name for dtype in dtypes)
    text = merged(names, known, into.name)
    return _kernel(
        "merged", dict(zip(names, known)), {"out": into.name}, text, four, tuple(f"float32 lse_{name}" for name in names)
    )


@functools.cache
def _adding(names: tuple[str, ...], dtypes: tuple[Any, ...], into: Any, sums: int, four: bool) -> Any:
    known, inputs, outs, texts = tuple(dtype.name for dtype in dtypes), {}, {}, []
    for i in range(sums):
        own = tuple(f"{name}{i}" for name in names)
        inputs |= dict(zip(own, known))
        outs[f"out{i}"] = into.name
        texts.append(f"{{ {added(own, known, into.name, f'out{i}')} }}")
    return _kernel(f"added_{sums}", inputs, outs, "\n".join(texts), four)


def _kernel(what: str, inputs: dict[str, str], outs: dict[str, str], text: str, four: bool, others: tuple[str, ...] = ()) -> Any:
    import cupy

    kinds = FOUR if four else KINDS
    given, made = ([f"{kinds.get(dtype, dtype)} {name}" for name, dtype in of.items()] for of in (inputs, outs))
    name = "_".join(("cupy_flash", what, *inputs.values(), *outs.values(), *["four"] * four))
    text = in_fours(inputs, outs, text) if four else text
    return cupy.ElementwiseKernel(", ".join([*given, *others]), ", ".join(made), text, name, preamble=PREAMBLE if four else "")


def _elements(arrays: Sequence[Any]) -> tuple[list[Any], bool]:
    """Views in four elements at a time, if rows of all have no others and begin where these may, and whether they are that."""
    four = all(x.size and x.shape[-1] % 4 == 0 and begins_at(x, 4 * x.dtype.itemsize) for x in arrays)
    return [x.view(FOUR[x.dtype.name]) if four else raw(x) for x in arrays], four


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
    views, four = _elements([*(x for x, _ in given), into])
    kernel = _merging(names, tuple([x.dtype for x, _ in given]), into.dtype, four)
    kernel(*views[:-1], *[x[..., None] for x in lses], views[-1])
    _of_lse(names)(*lses, lse)


def add(intos: Sequence[Any], bases: Sequence[Any], parts: Sequence[Sequence[Any]]) -> None:
    """Add at most two parts, and bases if there are any, in this order: to several sums in one pass, if they are of one shape."""
    of_sums = [[*([] if base is None else [base]), *(part[i] for part in parts)] for i, base in enumerate(bases)]
    first, into, names = of_sums[0], intos[0], tuple("abc"[: len(of_sums[0])])
    dtypes = tuple([x.dtype for x in first])
    if all(x.shape == into.shape for x in intos):
        views, four = _elements([*(x for of in of_sums for x in of), *intos])
        _adding(names, dtypes, into.dtype, len(intos), four)(*views)
        return
    for total, of in zip(intos, of_sums):
        views, four = _elements([*of, total])
        _adding(names, dtypes, into.dtype, 1, four)(*views)
