"""The parameter structs of ``kernels_cu/params.cuh`` and ``kernels_cu/row_params.cuh`` as NumPy dtypes, read from these files.

They are written so that this is simple: a field, or several of one type, on a line of its own, and sizes of arrays are numbers
or constants of the files. The size that comes out is asserted where the struct is compiled, see `machine.source`.
"""

from __future__ import annotations

import functools
import re

import numpy

from .sources import shelf
from .tensor_map import TENSOR_MAP

SCALARS = {"int": "i4", "u16": "u2", "u32": "u4", "i64": "i8", "u64": "u8", "float": "f4"}
POINTER = numpy.dtype("u8")
CONSTANT = re.compile(r"^constexpr \w+ (\w+) = (\w+);", re.MULTILINE)
STRUCT = re.compile(r"^struct (?:alignas\((\d+)\) )?(\w+)(?: : ([\w, ]+))? \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
FIELDS = re.compile(r"^  (?:const )?(\w+)(\*?) (\w[\w, ]*)((?:\[\w+\])*);", re.MULTILINE)


FILES = ("params.cuh", "row_params.cuh")


def struct(name: str) -> numpy.dtype:
    """A struct of these files: its fields with their offsets, those of its bases first; fields that are structs are nested."""
    return _structs()[name][0]


@functools.cache
def constants() -> dict[str, int]:
    """The constants of the files, which sizes of arrays are."""
    return {name: int(value, 0) for name, value in CONSTANT.findall(_text())}


@functools.cache
def _text() -> str:
    return "".join((shelf() / name).read_text(encoding="utf-8") for name in FILES)


@functools.cache
def _structs() -> dict[str, tuple[numpy.dtype, int]]:
    """Each struct and its alignment."""
    known = {name: (numpy.dtype(code), numpy.dtype(code).alignment) for name, code in SCALARS.items()}
    for aligned, name, bases, body in STRUCT.findall(_text()):
        known[name] = _laid_out(int(aligned or 1), bases.split(", ") if bases else [], body, constants(), known)
        if name == "TensorMap":  # words to a GPU; to the host, and here, the map in the clear
            known[name] = TENSOR_MAP, known[name][1]
    return known


def _laid_out(
    aligned: int, bases: list[str], body: str, constants: dict[str, int], known: dict[str, tuple[numpy.dtype, int]]
) -> tuple[numpy.dtype, int]:
    """The dtype and the alignment of one struct, laid out as C does."""
    fields: dict[str, tuple[numpy.dtype, int]] = {}
    size = 0
    for base in bases:
        dtype, alignment = known[base]
        size, aligned = -(-size // alignment) * alignment, max(aligned, alignment)
        fields |= {name: (field, size + offset) for name, (field, offset, *_) in dtype.fields.items()}
        size += dtype.itemsize
    for kind, is_pointer, names, sizes in FIELDS.findall(body):
        dtype, alignment = (POINTER, POINTER.alignment) if is_pointer else known[kind]
        shape = tuple(constants[number] if number in constants else int(number) for number in re.findall(r"\w+", sizes))
        for name in names.split(", "):
            size, aligned = -(-size // alignment) * alignment, max(aligned, alignment)
            fields[name] = numpy.dtype((dtype, shape)), size
            size += fields[name][0].itemsize
    formats, offsets = zip(*fields.values())
    layout = {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": -(-size // aligned) * aligned}
    return numpy.dtype(layout), aligned
