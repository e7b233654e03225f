"""What `doctor` finds and says: each thing that can be absent, told apart."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupy_flash.cli import devices, doctor, main
from cupy_flash.errors import CompileError
from cupy_flash.machine import nvrtc

ROOT = Path(__file__).parents[1]


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def python(code, **environment):
    """Run code in a process of its own, where what this one has imported does not count."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, check=False
    )


def found():
    """The findings by name."""
    return {finding.name: finding for finding in doctor.examine()}


NO_CUPY = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "cupy_backends", "ziglang"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("cupy", "ziglang") else find(name)
from cupy_flash.cli import main
main(["doctor", "--json"])
"""


def test_doctor_without_cupy():
    done = python(NO_CUPY)
    report = json.loads(done.stdout)
    works = {finding["name"]: finding["works"] for finding in report["findings"]}
    values = {finding["name"]: finding["value"] for finding in report["findings"]}
    assert not any(works[name] for name in ("CuPy", "NVRTC", "device 0"))
    assert values["CuPy"] == "not installed"
    assert values["NVRTC"] == values["device 0"] == "not known without CuPy"
    assert "CuPy" not in values["driver"] and "cupy" not in values["driver"]
    assert all(finding["works"] or finding["remedy"] or "not known" in finding["value"] for finding in report["findings"])
    assert report["backends"] == {"cuda": False, "host": works["C++ compiler"], "numpy": True}
    assert done.returncode == (0 if works["C++ compiler"] else 1)


def test_doctor_without_anything_ends_with_1():
    done = python(NO_CUPY, PATH="", CXX="")
    assert done.returncode == 1
    assert json.loads(done.stdout)["backends"] == {"cuda": False, "host": False, "numpy": True}


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_doctor_says_why_a_cache_folder_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path))
    [finding] = [finding for finding in doctor.examine() if finding.name == "cache"]
    assert not finding.works and f"others can write to {tmp_path}, which is mended by: chmod go-w {tmp_path}" in finding.value
    assert "CUPY_FLASH_CACHE_DIR" in finding.remedy


def test_doctor_prints_a_line_for_each_finding():
    result = run("doctor")
    assert "backends that work:" in result.stdout and "NumPy" in result.stdout
    assert result.exit_code == (0 if "host" in result.stdout.splitlines()[-1] or "cuda" in result.stdout.splitlines()[-1] else 1)


def test_without_a_driver_the_driver_is_missing_and_nothing_else(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr(doctor, "DRIVER", "libnowhere.so.1")
    there = found()
    assert there["CuPy"].works and there["NVRTC"].works
    assert (there["driver"].value, there["driver"].remedy) == ("not installed: no libnowhere.so.1", doctor.INSTALL_DRIVER)
    assert (there["device 0"].value, there["device 0"].remedy) == ("not known without driver", "")


def test_without_a_device_the_device_is_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_cupy_version", lambda: "14")
    monkeypatch.setattr(doctor, "_driver_version", lambda: "for CUDA 12.9")
    monkeypatch.setattr(doctor, "devices", list)
    assert found()["device 0"] == doctor.Finding("device 0", False, "none found", doctor.SHOW_DEVICES)


def test_without_nvrtc_it_is_missing(monkeypatch):
    def absent():
        raise CompileError("no libnvrtc")

    monkeypatch.setattr(doctor, "_cupy_version", lambda: "14")
    monkeypatch.setattr(nvrtc, "version", absent)
    assert found()["NVRTC"] == doctor.Finding("NVRTC", False, "no libnvrtc", devices.INSTALL_CUPY)


@pytest.mark.skipif(os.name != "posix" or not shutil.which("gcc"), reason="needs a compiler for C")
@pytest.mark.parametrize("compiler", ["true", "gcc", "nowhere"])
def test_a_compiler_is_one_whose_code_can_be_loaded(compiler, monkeypatch):
    monkeypatch.setenv("CXX", compiler)
    compilation = found()["C++ compiler"]
    assert not compilation.works and compilation.value.startswith("CXX: ") and compilation.remedy
