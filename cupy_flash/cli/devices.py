"""The CUDA devices of this machine, as far as CuPy can see them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from ..plan.architecture import Architecture, architecture_of

INSTALL_CUPY = 'pip install "cupy-cuda12x[ctk]", or "cupy-cuda13x[ctk]" with a driver for CUDA 13'


@dataclass(frozen=True)
class Device:
    """One GPU; `capability` is its compute capability without the dot."""

    name: str
    capability: str

    @property
    def architecture(self) -> Architecture:
        """What is compiled for it. Raises UnsupportedError if nothing is."""
        return architecture_of(self.capability)


def devices() -> list[Device]:
    """All devices. Raises what CuPy raises if it is missing or finds no driver."""
    import cupy
    from cupy.cuda import runtime

    return [
        Device(runtime.getDeviceProperties(ordinal)["name"].decode(), cupy.cuda.Device(ordinal).compute_capability)
        for ordinal in range(runtime.getDeviceCount())
    ]


def cupy_installed() -> bool:
    """Whether there is a CuPy to import; it may still fail to load."""
    return importlib.util.find_spec("cupy") is not None


def own_architecture() -> Architecture | None:
    """What is compiled for the device that CuPy uses unless told otherwise; None without a device that is served."""
    try:
        return devices()[0].architecture
    except Exception:  # no CuPy, no driver, a device too old: `doctor` tells them apart, here they are all the same
        return None
