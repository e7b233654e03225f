"""``doctor``: what works on this machine, and what to do about the rest.

Every probe is guarded: whatever goes wrong in one is its finding, and the others still run.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass

import click
import numpy

from .. import __version__
from ..machine import cache, nvrtc, toolchain
from ..plan.sources import files, shelf
from .arguments import json_option
from .devices import INSTALL_CUPY, Device, cupy_installed, devices
from .output import echo_json, table

INSTALL_DRIVER = "install NVIDIA's driver: sudo ubuntu-drivers install, or https://www.nvidia.com/drivers"
DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
SHOW_DEVICES = "nvidia-smi -L must list a device; in a container: docker run --gpus all"


@dataclass(frozen=True)
class Finding:
    """What a probe found; `remedy` says what mends it if it does not work."""

    name: str
    works: bool
    value: str
    remedy: str = ""


@click.command()
@json_option
@click.pass_context
def doctor(context: click.Context, as_json: bool) -> None:
    """Say what works here and what mends the rest.

    Exits with 0 if a backend besides numpy works, and with 1 otherwise.

    \b
    Examples:
      cupy-flash doctor
      cupy-flash doctor --json
    """
    findings = examine()
    working = {finding.name for finding in findings if finding.works}
    backends = {
        "cuda": {"CuPy", "NVRTC", "driver", "device 0"} <= working,
        "host": "C++ compiler" in working,
        "numpy": True,
    }
    if as_json:
        echo_json({"backends": backends, "findings": [asdict(finding) for finding in findings]})
    else:
        lines = table(("", "", ""), [("ok" if f.works else "no", f.name, f.value) for f in findings], "<<<")[1:]
        for line, finding in zip(lines, findings):
            click.secho(line, fg=None if finding.works else "yellow")
            if finding.remedy:
                click.echo(f"      -> {finding.remedy}")
        click.echo("\nbackends that work: " + ", ".join(name for name, works in backends.items() if works))
    context.exit(0 if backends["cuda"] or backends["host"] else 1)


def examine() -> list[Finding]:
    """What all probes found."""
    findings = [
        _probe("cupy_flash", _kernel_sources, "pip install --force-reinstall cupy-flash"),
        _probe("Python", lambda: f"{platform.python_version()} on {platform.platform()}"),
        _probe("NumPy", lambda: numpy.__version__),
    ]
    cupy = _probe("CuPy", _cupy_version, INSTALL_CUPY)
    driver = _probe("driver", _driver_version, INSTALL_DRIVER)
    findings += [cupy, _probe("NVRTC", _nvrtc_version, INSTALL_CUPY) if cupy.works else _unknown("NVRTC", cupy), driver]
    findings += _device_findings(cupy, driver)
    findings.append(_probe("cache", _cache_folder, "export CUPY_FLASH_CACHE_DIR=<a folder of your own>"))
    findings.append(_probe("C++ compiler", _compiler, "apt install g++, dnf install gcc-c++, or pip install ziglang"))
    return findings


def _device_findings(*needed: Finding) -> list[Finding]:
    for finding in needed:
        if not finding.works:
            return [_unknown("device 0", finding)]
    try:
        found = devices()
    except Exception as error:
        return [Finding("device 0", False, _line(error), SHOW_DEVICES)]
    if not found:
        return [Finding("device 0", False, "none found", SHOW_DEVICES)]
    return [_probe(f"device {ordinal}", lambda device=device: _described(device)) for ordinal, device in enumerate(found)]


def _unknown(name: str, cause: Finding) -> Finding:
    """What cannot be looked for before something else works: that is to be mended, and this has no remedy of its own."""
    return Finding(name, False, f"not known without {cause.name}")


def _probe(name: str, look: Callable[[], str], remedy: str = "") -> Finding:
    try:
        return Finding(name, True, look())
    except Exception as error:
        return Finding(name, False, _line(error), remedy)


def _line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _kernel_sources() -> str:
    if not files():
        raise FileNotFoundError(f"{__version__}, without kernel sources in {shelf()}")
    return f"{__version__}, {len(files())} kernel sources in {shelf()}"


def _cupy_version() -> str:
    if not cupy_installed():
        raise ImportError("not installed")
    import cupy

    return cupy.__version__


def _nvrtc_version() -> str:
    return "{}.{}".format(*nvrtc.version())


def _driver_version() -> str:
    """Asks the driver itself, which is there or not whatever becomes of CuPy."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        raise RuntimeError(f"not installed: no {DRIVER}") from None
    version = ctypes.c_int()
    if error := driver.cuDriverGetVersion(ctypes.byref(version)):
        raise RuntimeError(f"{DRIVER} answers with CUDA error {error}")
    return f"for CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def _described(device: Device) -> str:
    major, minor = device.capability[:-1], device.capability[-1]
    return f"{device.name}, compute capability {major}.{minor}, kernels for {device.architecture}"


def _cache_folder() -> str:
    folder = cache.trusted_folder()
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written; compiled kernels last as long as a process")
    return f"{folder}, {len(cache.entries())} kernels"


def _compiler() -> str:
    toolchain.prove()
    return f"{' '.join(toolchain.compiler())}: {toolchain.compiler_version()}"
