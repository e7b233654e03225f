"""The house rules that a program can check."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupy_flash
from cupy_flash.machine import source
from cupy_flash.plan.sources import shelf

PACKAGE = Path(cupy_flash.__file__).parent


def python(program, *options):
    environment = {name: x for name, x in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}  # a user's, see `one_thread`
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent, env=environment)
    assert done.returncode == 0, done.stderr
    return done


# Importing


def test_import_works_without_cupy():
    program = "import sys; sys.modules['cupy'] = None; import cupy_flash; print(cupy_flash.__all__)"
    assert python(program).stdout == f"{cupy_flash.__all__}\n"


def test_import_loads_no_gpu_library_and_makes_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "kernels"))
    program = "import sys, cupy_flash; print({'cupy', 'cupy_backends', 'torch', 'numba', 'jax'} & sys.modules.keys())"
    assert python(program).stdout == "set()\n"
    assert list(tmp_path.iterdir()) == []


def test_import_takes_no_longer_than_that_of_numpy():
    """In the best of several, because other work on the machine slows down whichever of the two it hits."""
    program = """if True:
        from time import perf_counter
        start = perf_counter()
        import numpy, ml_dtypes
        middle = perf_counter()
        import cupy_flash
        print((perf_counter() - middle) / (middle - start))
    """
    assert any(float(python(program).stdout) <= 1 for _ in range(10))


# Files

ALGORITHMS = sorted(file for file in source.files() if file.endswith(".cu"))
LANE_LEVEL = r"threadIdx|blockIdx|lane|\basm\b|__shfl\w*|__sync\w*|__CUDACC\w*|ON_GPU|^ *# *(?:if|elif|else|endif)\w*"


@pytest.mark.parametrize("file", ALGORITHMS)
def test_algorithm_has_no_code_of_a_lane_or_of_one_machine(file):
    """That belongs in tile/. Comments may speak of lanes."""
    code = re.sub("//.*", "", source.files()[file])
    assert re.findall(LANE_LEVEL, code, re.MULTILINE) == []


@pytest.mark.parametrize("file", ALGORITHMS)
def test_algorithm_explains_each_barrier(file):
    """The line of a barrier or a wait says what breaks without it."""
    lines = source.files()[file].splitlines()
    barriers = [
        i
        for i, line in enumerate(lines)
        if re.search(r"\b(sync|arrive|wait|fence|producer|consumer)_\w+(<.*>)?\(", line.partition("//")[0])
    ]
    assert [lines[i] for i in barriers if "//" not in lines[i]] == []


LINES = {path: path.read_text(encoding="utf-8").count("\n") for path in (*PACKAGE.rglob("*.py"), *shelf().rglob("*.c*"))}


@pytest.mark.parametrize("path", LINES, ids=lambda path: path.name)
def test_no_file_is_longer_than_400_lines(path):
    assert LINES[path] <= 400


@pytest.mark.parametrize("file", [file for file in ALGORITHMS if file.startswith(("fwd", "bwd"))])
def test_algorithm_is_long_enough_to_be_read_alone(file):
    assert LINES[shelf() / file] >= 80


def test_the_package_is_a_house_of_few_floors():
    """What is new belongs on one of them; `lint-imports` says which."""
    entries = [path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "kernels_cu")]
    assert len(entries) <= 14, sorted(entries)
