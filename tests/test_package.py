"""The house rules that a program can check."""

import os
import re
import subprocess
import sys
import zlib
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


def test_gradients_and_caches_are_loaded_when_they_are_asked_for():
    """They take a quarter of the time of the import, and many programs have neither. Names are there all the same."""
    late = "{'call.append', 'call.backward', 'call.merge', 'call.rotate', 'plan.backward', 'plan.grouping', 'problem.backward'}"
    loaded = f"print(sorted({late} & {{name.removeprefix('cupy_flash.') for name in sys.modules}}))"
    program = f"""if True:
        import sys, cupy_flash
        {loaded}
        assert set(cupy_flash.__all__) <= set(dir(cupy_flash))
        from cupy_flash import *
        {loaded}
        assert Gradients(1, 2, 3).dk == 2 and isinstance(BackwardPlan, type)
        try:
            cupy_flash.no_such_name
        except AttributeError as error:
            print(error)
    """
    assert python(program).stdout.splitlines() == [
        "[]",
        "['call.backward', 'plan.backward', 'plan.grouping', 'problem.backward']",
        "module 'cupy_flash' has no attribute 'no_such_name'",
    ]


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


# Memory


def test_memory_of_a_device_comes_from_the_allocator_of_cupy_alone():
    """So that who sets another one, such as that of RMM, has all of it there."""
    files = [file for floor in ("call", "jax", "machine", "problem") for file in (PACKAGE / floor).rglob("*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    taken = re.findall(r"cuda\.alloc\w*|\b\w*[mM]alloc\w*|\w*MemoryPool|cuda\.\w*Memory\(|driver\.\w*[aA]lloc\w*", text)
    assert set(taken) == {"cuda.alloc"}


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


def test_a_wheel_is_smaller_than_a_megabyte():
    """What is in one, compressed as there."""
    files = {*PACKAGE.rglob("*.py"), *(path for path in shelf().rglob("*") if path.is_file())}
    assert 300_000 < sum(len(zlib.compress(path.read_bytes())) for path in files) < 950_000


def test_the_package_is_a_house_of_few_floors():
    """What is new belongs on one of them; `lint-imports` says which."""
    entries = [path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "kernels_cu")]
    assert len(entries) <= 14, sorted(entries)
