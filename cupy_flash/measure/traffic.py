"""How many bytes attention moves through device memory: the argument of the FlashAttention papers, counted.

Of the kernels, bytes and operations are counted while the host executes them: what their copies and stores move between device
memory and the chip, and the multiplications and additions of their matrix products. The textbook formula is executed as the list
of passes in `NAIVE`, as array libraries do it: each pass reads its operands once and writes its result once. That flatters it,
because a matrix product on a GPU reads its operands again for every tile of the result.

The papers say of N queries and keys of dim d and a chip that holds M elements: the formula moves Theta(N d + N^2) elements, and a
kernel that keeps scores on the chip Theta(N^2 d^2 / M) of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy

from ..api.forward import plan_attention
from ..call.tile_mask import TileMask
from ..judge.oracle import sees
from ..machine.host import HostOptions
from ..problem.arrays import DTYPES

ALGORITHMS = ("naive", "v1", "v2")


@dataclass(frozen=True)
class Setting:
    """Attention of as many queries as keys.

    Parameters
    ----------
    seq, dim : int
        N and d in the formulas.
    batch, heads : int
    dtype : str
        Of the inputs, and of what the textbook formula stores.
    causal : bool
    documents : int
        Of equal length, as far as that goes, one behind the other: a query sees keys of its own only. v1 has no such mask.
    """

    seq: int
    dim: int = 64
    batch: int = 1
    heads: int = 1
    dtype: str = "float16"
    causal: bool = False
    documents: int = 1

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Those of `ALGORITHMS` that compute it."""
        return ALGORITHMS if self.documents == 1 else tuple(name for name in ALGORITHMS if name != "v1")

    @property
    def document(self) -> numpy.ndarray:
        """Of each place, the document that it is in."""
        return numpy.arange(self.seq) * self.documents // self.seq

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    @property
    def pairs(self) -> int:
        """Queries and keys that see each other, over all heads and batch elements."""
        lengths = numpy.bincount(self.document, minlength=1).astype(object)
        each = sum(n * (n + 1) // 2 if self.causal else n**2 for n in lengths)
        return int(each) * self.heads * self.batch


@dataclass(frozen=True)
class Count:
    """What one algorithm did.

    Parameters
    ----------
    algorithm : {'naive', 'v1', 'v2'}
    setting : Setting
    read_bytes, written_bytes : int
        Between device memory and the chip.
    flops : int
        Of matrix products; kernels compute whole tiles, masked pairs included.
    memory_bytes : int
        The most device memory in use at once besides the inputs.
    chip_elements : int or None
        M: elements of shared memory that a block has. None for the textbook formula, which keeps nothing on the chip.
    """

    algorithm: str
    setting: Setting
    read_bytes: int
    written_bytes: int
    flops: int
    memory_bytes: int
    chip_elements: int | None = None

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.moved_bytes

    @property
    def formula(self) -> float:
        """Elements that the papers' formula gives, without its constant."""
        s = self.setting
        if self.chip_elements is None:
            return (s.seq * s.dim + s.seq**2) * s.heads * s.batch
        return s.pairs * s.dim**2 / self.chip_elements

    @property
    def constant(self) -> float:
        """Elements moved for each that the formula gives: it tends to a constant where the formula holds."""
        return self.moved_bytes / self.setting.itemsize / self.formula


@dataclass(frozen=True)
class Pass:
    """One operation of an array library.

    Parameters
    ----------
    result : str
        Name of the array it writes.
    operands : tuple of str
        Names of the arrays it reads.
    compute : callable
        The operation: from the setting and the operands in float32.
    product : bool
        Whether it is a matrix product, whose inner extent is the last axis of its first operand.
    """

    result: str
    operands: tuple[str, ...]
    compute: Callable[..., numpy.ndarray]
    product: bool = False


def _scale_and_mask(setting: Setting, scores: numpy.ndarray) -> numpy.ndarray:
    seen = sees(setting.seq, setting.seq, last_key=0 if setting.causal else None)
    seen &= setting.document[:, None] == setting.document
    return numpy.where(seen, scores / math.sqrt(setting.dim), -numpy.inf)


NAIVE = (
    Pass("scores", ("q", "k"), lambda _, q, k: q @ k.swapaxes(-1, -2), product=True),
    Pass("masked", ("scores",), _scale_and_mask),
    Pass("maxima", ("masked",), lambda _, s: s.max(axis=-1, keepdims=True)),
    Pass("exponentials", ("masked", "maxima"), lambda _, s, m: numpy.exp(s - m)),
    Pass("sums", ("exponentials",), lambda _, e: e.sum(axis=-1, keepdims=True)),
    Pass("probabilities", ("exponentials", "sums"), lambda _, e, total: e / total),
    Pass("out", ("probabilities", "v"), lambda _, p, v: p @ v, product=True),
)


def make_inputs(setting: Setting, seed: int = 0) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Standard normal q, k and v, each (batch, heads, seq, dim)."""
    shape = (3, setting.batch, setting.heads, setting.seq, setting.dim)
    q, k, v = numpy.random.default_rng(seed).standard_normal(shape, numpy.float32).astype(DTYPES[setting.dtype])
    return q, k, v


def count(setting: Setting, algorithm: str, arch: str | None = None) -> Count:
    """Execute an algorithm and count.

    Parameters
    ----------
    setting : Setting
    algorithm : {'naive', 'v1', 'v2'}
    arch : str, optional
        Whose kernels the host executes, as in `plan_attention`.

    Returns
    -------
    Count

    Raises
    ------
    UnsupportedError
        If no kernel computes the problem.
    CompileError
        If the kernel does not compile, or there is no compiler.
    ValueError
        If ``CUPY_FLASH_HOST_SANITIZE`` is set: sanitized kernels run in a process of their own and do not count.

    Examples
    --------
    >>> count(Setting(seq=256), "naive").written_bytes  # q @ k.T and 3 passes of its size, 2 columns and the result
    558080
    """
    return count_naive(setting)[1] if algorithm == "naive" else count_kernel(setting, algorithm, arch)[1]


def count_naive(setting: Setting) -> tuple[numpy.ndarray, Count]:
    """The result of the passes in `NAIVE`, and what they moved. An array is kept until the last pass that reads it is done."""
    inputs = dict(zip("qkv", make_inputs(setting)))
    kept: dict[str, numpy.ndarray] = {}
    read = written = flops = memory = 0
    for number, step in enumerate(NAIVE):
        operands = [inputs[name] if name in inputs else kept[name] for name in step.operands]
        result = step.compute(setting, *(x.astype(numpy.float32) for x in operands)).astype(DTYPES[setting.dtype])
        kept[step.result] = result
        read += sum(x.nbytes for x in operands)
        written += result.nbytes
        flops += 2 * result.size * operands[0].shape[-1] if step.product else 0
        memory = max(memory, sum(x.nbytes for x in kept.values()))
        still_read = {name for later in NAIVE[number + 1 :] for name in later.operands}
        kept = {name: x for name, x in kept.items() if name in still_read}
    return result, Count("naive", setting, read, written, flops, memory)


def count_kernel(setting: Setting, algorithm: str, arch: str | None = None) -> tuple[numpy.ndarray, Count]:
    """The result of a kernel that the host executes, and what it moved.

    Where documents have tiles in which nothing is seen, these are found before: that a `TileMask` keeps, and it does not count.
    """
    if HostOptions.from_environment().sanitize:
        raise ValueError("CUPY_FLASH_HOST_SANITIZE: expected it not to be set, since sanitized kernels do not count")
    inputs = make_inputs(setting)
    options = {"causal": setting.causal, "algorithm": algorithm, "backend": "host", "arch": arch, "return_lse": True}
    masks = {}
    if setting.documents > 1:
        masks["mask"] = TileMask("document[q_idx] == document[kv_idx]", {"document": setting.document})
    plan = plan_attention(*inputs, **options, **masks)
    if masks:
        plan(*inputs, **masks)
    (out, _), traffic = plan.counted(*inputs, **masks)
    memory = plan.result_bytes + plan.workspace_bytes
    chip_elements = plan.kernel.shared_bytes // setting.itemsize
    numbers = (traffic.read_bytes, traffic.written_bytes, traffic.flops, memory, chip_elements)
    return out, Count(algorithm, setting, *numbers)
