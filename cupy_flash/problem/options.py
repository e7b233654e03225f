"""The options of `attention`: as the user gives them, and as a `Problem` needs them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy

from ..errors import UnsupportedError, shown
from .dropout import Dropout, Place, make_dropout
from .expression.entry import Expression
from .layout import AXES
from .mask import Mask, band, moving_band
from .scalars import integer, is_bool, real

FORWARD_KERNELS = {"fwd_v1": "v1", "fwd_v2": "v2", "fwd_hopper": "v2"}  # kernel files of the forward, and the algorithm of each
BACKWARD_KERNELS = ("bwd_v2", "bwd_hopper", "bwd_hopper_wide", "bwd_hopper_mla", "bwd_hopper_parts")


class CommonOptions(TypedDict, total=False):
    """What all functions of attention take, those of its gradients included; described at `attention`."""

    layout: str
    scale: float | None
    causal: bool | str
    window: tuple[int | None, int | None] | None
    prefix: int
    softcap: float | None
    dropout: float | None
    precision: str | None
    algorithm: str
    backend: str
    seqlens_q: Any
    seqlens_kv: Any
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    pages: Any
    cache_batch_idx: Any


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `attention` and of its plan as the user gave them; each is checked by the method that resolves it."""

    layout: str = "bhsd"
    scale: float | None = None
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    prefix: int = 0
    softcap: float | None = None
    dropout: float | None = None
    precision: str | None = None
    algorithm: str = "auto"
    backend: str = "auto"
    return_lse: bool = False
    kernel: str | None = None
    score: str | Expression | None = None
    mask: str | Expression | None = None
    operands: tuple[str, ...] = ()  # which arrays there are for scores, see `scores`
    arrays: tuple[str, ...] = ()
    place: Place | None = None  # where the pairs are that dropout numbers, if not from 0 on
    top_left: bool = False  # whether a window without `causal` is anchored there as well, as other libraries have it
    adds_results: bool = False  # whether gradients in float32 are added to what is where they go
    float32_results: bool = False  # whether inputs of 16 bits have results in float32: parts of what is rounded when it is together
    shares_device: bool = False  # whether something else has to run there meanwhile, such as messages between ranks

    def resolve_layout(self) -> str:
        """The order of the axes of all arrays, one of `AXES`."""
        return _choice("layout", self.layout, tuple(AXES))

    def resolve_scale(self, dim: int, dtype: str) -> float:
        """Factor of the scores, as arrays of this dtype are computed with: a float32 unless they are float64."""
        return _stored("scale", 1 / math.sqrt(dim) if self.scale is None else _real("scale", self.scale), dtype)

    def resolve_mask(self, len_q: int, len_kv: int) -> Mask:
        """Which keys each query sees."""
        return band(len_q, len_kv, *self._mask())

    def resolve_moving_mask(self, len_q: int, len_kv: int) -> tuple[Mask, bool]:
        """The same for sequences of at most these lengths, and whether the mask moves with them."""
        return moving_band(len_q, len_kv, *self._mask())

    def _mask(self) -> tuple[bool | str, tuple[int | None, int | None], int, bool]:
        causal = self.causal
        if not is_bool(causal):
            causal = _choice("causal", causal, (False, True, "bottom_right", "top_left"))
        window, prefix = _window(self.window), integer("prefix", self.prefix, "an integer")
        if prefix < 0:
            raise ValueError(f"prefix: expected at least 0, got {shown(prefix)}")
        if prefix and window[0] is not None:
            expected = "prefix: expected 0 with a window that has a left end, since a query would see two intervals of keys"
            raise UnsupportedError(f"{expected}, got {shown(prefix)}")
        return causal, window, prefix, self.top_left

    def resolve_softcap(self, dtype: str) -> float | None:
        """Bound of the tanh that the scores go through, as arrays of this dtype are computed with."""
        if self.softcap is None:
            return None
        softcap = _real("softcap", self.softcap)
        if softcap <= 0:
            raise ValueError(f"softcap: expected None or a number above 0, got {softcap}")
        stored = _stored("softcap", softcap, dtype)
        if stored == 0:
            raise ValueError(f"softcap: expected a number whose float32 is above 0, got {softcap}")
        return stored

    def resolve_dropout(self) -> Dropout | None:
        """How probabilities are dropped, if they are."""
        return None if self.dropout is None else make_dropout(self.dropout)

    def resolve_precision(self, dtype: str) -> str:
        """Either 'ieee' or 'tf32'."""
        if self.precision is None:
            return "ieee"
        precision = _choice("precision", self.precision, (None, "ieee", "tf32"))
        if precision == "tf32" and dtype != "float32":
            raise ValueError(f"precision: expected None or 'ieee' for {dtype}, got 'tf32', which is for float32")
        return precision

    def resolve_algorithm(self) -> str:
        """Either 'v1' or 'v2'; that of the kernel where one is asked for."""
        algorithm = _choice("algorithm", self.algorithm, ("auto", "v1", "v2"))
        if algorithm != "auto":
            return algorithm
        return "v2" if self.kernel is None else FORWARD_KERNELS[_choice("kernel", self.kernel, (None, *FORWARD_KERNELS))]

    def resolve_kernel(self, backend: str) -> str | None:
        """The kernel file asked for, or None, which leaves the choice to the planner."""
        kernel = self._kernel(backend, tuple(FORWARD_KERNELS))
        if kernel is not None and self.resolve_algorithm() != FORWARD_KERNELS[kernel]:
            expected = f"'auto' or {FORWARD_KERNELS[kernel]!r} with kernel {kernel!r}"
            raise ValueError(f"algorithm: expected {expected}, got {self.resolve_algorithm()!r}")
        return kernel

    def resolve_backward_kernel(self, backend: str) -> str | None:
        """The same of a backward."""
        return self._kernel(backend, BACKWARD_KERNELS)

    def _kernel(self, backend: str, kernels: tuple[str, ...]) -> str | None:
        if self.kernel is None:
            return None
        kernel = _choice("kernel", self.kernel, (None, *kernels))
        if backend == "numpy":
            raise ValueError(f"kernel: expected None on backend 'numpy', which has no kernels, got {kernel!r}")
        return kernel

    def resolve_backend(self, device: int | None) -> str:
        """Either 'cuda', 'host' or 'numpy', for arrays on the given CUDA device or, if None, in host memory."""
        backend = _choice("backend", self.backend, ("auto", "cuda", "host", "numpy"))
        if backend == "auto":
            return "numpy" if device is None else "cuda"
        if backend == "cuda" and device is None:
            raise ValueError(
                "backend: expected 'host' or 'numpy' for arrays in host memory, got 'cuda'; "
                "move them to a device with cupy.asarray"
            )
        if backend != "cuda" and device is not None:
            raise ValueError(
                f"backend: expected 'cuda' for arrays on a CUDA device, got {backend!r}; "
                "move them to host memory with cupy.asnumpy"
            )
        return backend

    def resolve_dtype_of_results(self, dtype: str) -> str:
        """The dtype of the result, or of the gradients, of arrays of a dtype."""
        wide = check_flag("float32_results", self.float32_results)
        return "float32" if wide and dtype in ("float16", "bfloat16") else dtype

    def resolve_shares_device(self) -> bool:
        """Whether a forward has to leave multiprocessors to others before it ends."""
        return check_flag("shares_device", self.shares_device)

    def resolve_return_lse(self) -> bool:
        """Whether the caller asks for the lse."""
        return check_flag("return_lse", self.return_lse)


def check_flag(name: str, value: bool) -> bool:
    """An option that is True or False and nothing else."""
    if not is_bool(value):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


def _window(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: expected None or a pair (left, right), got {shown(window)}")
    ends: tuple[int | None, ...] = ()
    with suppress(Exception):  # whatever a class of the caller's raises
        ends = tuple(window)
    if len(ends) != 2:
        raise ValueError(f"window: expected a pair (left, right), got {shown(window)}")
    left, right = map(_window_end, ends)
    return left, right


def _window_end(end: int | None) -> int | None:
    if end is None:
        return None
    number = integer("window", end, "integers or None at its ends")
    if number < -1:
        raise ValueError(f"window: expected ends of at least 0, or -1 or None for unbounded, got {shown(number)}")
    return None if number == -1 else number


def _real(name: str, value: float) -> float:
    number = real(name, value, "None or a real number")
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number that a float holds, got {shown(value)}")
    return number


def _stored(name: str, number: float, dtype: str) -> float:
    if dtype == "float64":
        return number
    with numpy.errstate(over="ignore"):
        stored = float(numpy.float32(number))
    if math.isinf(stored):
        raise ValueError(f"{name}: expected a number whose float32 is finite, got {number}")
    return stored


def _choice(name: str, value: object, choices: tuple[object, ...]) -> str:
    """The word among the choices that is given, as a plain string; choices that are no words have been dealt with."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {choices}, got {shown(value)}")
    for choice in choices:
        if isinstance(choice, str) and str.__eq__(choice, value):
            return choice
    raise ValueError(f"{name}: expected one of {choices}, got {shown(value)}")
