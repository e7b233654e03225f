"""The options of `attention`: as the user gives them, and as a `Problem` needs them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

import numpy

FORWARD_KERNELS = {"fwd_v1": "v1", "fwd_v2": "v2", "fwd_hopper": "v2"}  # kernel files of the forward, and the algorithm of each
BACKWARD_KERNELS = ("bwd_v2", "bwd_hopper", "bwd_hopper_wide")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `attention` and of its plan as the user gave them; each is checked by the method that resolves it."""

    scale: float | None = None
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    precision: str | None = None
    algorithm: str = "auto"
    backend: str = "auto"
    return_lse: bool = False
    kernel: str | None = None

    def resolve_scale(self, dim: int, dtype: str) -> float:
        """Factor of the scores, as arrays of this dtype are computed with: a float32 unless they are float64."""
        return _stored("scale", 1 / math.sqrt(dim) if self.scale is None else _real("scale", self.scale), dtype)

    def resolve_key_range(self, len_q: int, len_kv: int) -> tuple[int | None, int | None]:
        """Causality, window and anchor as the `first_key` and `last_key` of a `Problem`."""
        if not _is_bool(self.causal):
            _check_choice("causal", self.causal, (False, True, "bottom_right", "top_left"))
        left, right = _window(self.window)
        if self.causal:
            right = 0
        shift = 0 if self.causal == "top_left" else len_kv - len_q
        # The last row has the highest first key, the first row the lowest last key: a bound that excludes nothing
        # there excludes nothing at all.
        first_key = None if left is None or len_q - 1 + shift - left <= 0 else shift - left
        last_key = None if right is None or shift + right >= len_kv - 1 else shift + right
        return first_key, last_key

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

    def resolve_precision(self, dtype: str) -> str:
        """Either 'ieee' or 'tf32'."""
        if self.precision is None:
            return "ieee"
        _check_choice("precision", self.precision, (None, "ieee", "tf32"))
        if self.precision == "tf32" and dtype != "float32":
            raise ValueError(f"precision: expected None or 'ieee' for {dtype}, got 'tf32', which is for float32")
        return self.precision

    def resolve_algorithm(self) -> str:
        """Either 'v1' or 'v2'; that of the kernel where one is asked for."""
        _check_choice("algorithm", self.algorithm, ("auto", "v1", "v2"))
        return FORWARD_KERNELS.get(self.kernel, "v2") if self.algorithm == "auto" else self.algorithm

    def resolve_kernel(self, backend: str) -> str | None:
        """The kernel file asked for, or None, which leaves the choice to the planner."""
        if self.kernel is None:
            return None
        _check_choice("kernel", self.kernel, (None, *FORWARD_KERNELS))
        if backend == "numpy":
            raise ValueError(f"kernel: expected None on backend 'numpy', which has no kernels, got {self.kernel!r}")
        algorithm = FORWARD_KERNELS[self.kernel]
        if self.algorithm not in ("auto", algorithm):
            raise ValueError(f"algorithm: expected 'auto' or {algorithm!r} with kernel {self.kernel!r}, got {self.algorithm!r}")
        return self.kernel

    def resolve_backward_kernel(self, backend: str) -> str | None:
        """The same of a backward."""
        if self.kernel is None:
            return None
        _check_choice("kernel", self.kernel, (None, *BACKWARD_KERNELS))
        if backend == "numpy":
            raise ValueError(f"kernel: expected None on backend 'numpy', which has no kernels, got {self.kernel!r}")
        return self.kernel

    def resolve_backend(self, device: int | None) -> str:
        """Either 'cuda', 'host' or 'numpy', for arrays on the given CUDA device or, if None, in host memory."""
        _check_choice("backend", self.backend, ("auto", "cuda", "host", "numpy"))
        if self.backend == "auto":
            return "numpy" if device is None else "cuda"
        if self.backend == "cuda" and device is None:
            raise ValueError(
                "backend: expected 'host' or 'numpy' for arrays in host memory, got 'cuda'; "
                "move them to a device with cupy.asarray"
            )
        if self.backend != "cuda" and device is not None:
            raise ValueError(
                f"backend: expected 'cuda' for arrays on a CUDA device, got {self.backend!r}; "
                "move them to host memory with cupy.asnumpy"
            )
        return self.backend

    def resolve_return_lse(self) -> bool:
        """Whether the caller asks for the lse."""
        return check_flag("return_lse", self.return_lse)


def check_flag(name: str, value: bool) -> bool:
    """An option that is True or False and nothing else."""
    if not _is_bool(value):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def _window(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: expected None or a pair (left, right), got {window!r}")
    if len(window) != 2:
        raise ValueError(f"window: expected a pair (left, right), got {window!r}")
    left, right = map(_window_end, window)
    return left, right


def _window_end(end: int | None) -> int | None:
    if end is None:
        return None
    if isinstance(end, bool) or not isinstance(end, Integral):
        raise TypeError(f"window: expected integers or None at its ends, got {end!r}")
    if end < -1:
        raise ValueError(f"window: expected ends of at least 0, or -1 or None for unbounded, got {end}")
    return None if end == -1 else int(end)


def _real(name: str, value: float) -> float:
    # An array of one element is not a number here: reading it from a device would wait for the device.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected None or a real number, got {value!r}")
    try:
        number = float(value)
    except OverflowError as error:  # an integer of any length, which may be too long to print
        raise ValueError(f"{name}: expected a number of at most 1.8e308, got a larger one") from error
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {number}")
    return number


def _stored(name: str, number: float, dtype: str) -> float:
    if dtype == "float64":
        return number
    with numpy.errstate(over="ignore"):
        stored = float(numpy.float32(number))
    if math.isinf(stored):
        raise ValueError(f"{name}: expected a number whose float32 is finite, got {number}")
    return stored


def _is_bool(value: object) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # Python's, and NumPy's under either of its names


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected one of {choices}, got {value!r}")
    if value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")
