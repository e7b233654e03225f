"""``doctor``: what works on this machine, and what to do about the rest.

Every probe is guarded: whatever goes wrong in one is its finding, and the others still run.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass

import click
import numpy

from .. import __version__, cache, nvrtc, toolchain
from ..source import files, shelf
from .arguments import json_option
from .devices import Device, devices
from .output import echo_json, table

INSTALL_CUPY = 'pip install "cupy-flash[cuda12]", or cupy-flash[cuda13] with a driver for CUDA 13'
INSTALL_DRIVER = "install NVIDIA's driver: sudo ubuntu-drivers install, or https://www.nvidia.com/drivers"
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
        _probe("CuPy", _cupy_version, INSTALL_CUPY),
        _probe("NVRTC", lambda: "{}.{}".format(*nvrtc.version()), INSTALL_CUPY),
        _probe("driver", _driver_version, INSTALL_DRIVER),
    ]
    try:
        found = devices()
    except Exception as error:
        findings.append(Finding("device 0", False, _line(error), SHOW_DEVICES))
    else:
        for ordinal, device in enumerate(found):
            findings.append(_probe(f"device {ordinal}", lambda device=device: _described(device)))
        if not found:
            findings.append(Finding("device 0", False, "none found", SHOW_DEVICES))
    findings.append(_probe("cache", _cache_folder, "export CUPY_FLASH_CACHE_DIR=<a folder of your own>"))
    findings.append(_probe("C++ compiler", _compiler, "apt install g++, dnf install gcc-c++, or pip install ziglang"))
    return findings


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
    import cupy

    return cupy.__version__


def _driver_version() -> str:
    from cupy.cuda import runtime

    version = runtime.driverGetVersion()
    if not version:
        raise RuntimeError("not installed")
    return f"for CUDA {version // 1000}.{version % 1000 // 10}"


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
