"""Ranks that are processes of MPI."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from thinned import quick

from cupy_flash.distributed import over_mpi

PROGRAM = Path(__file__).parent / "mpi_program.py"
SHIELD = Path(__file__).parent / "mpi_shield.py"
MPIEXEC = Path(sys.executable).parent / "mpiexec"
LIMIT = 30  # seconds in which a failure has to be an error everywhere


def mpiexec(ranks, *arguments, shielded=False):
    """Run the program on so many ranks; shielded, mpiexec does not see one that is gone."""
    program = [SHIELD, PROGRAM] if shielded else [PROGRAM]
    command = [str(MPIEXEC), "-n", str(ranks), sys.executable, *map(str, program), *arguments]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * LIMIT, env=environment)
    return done, time.monotonic() - begun


def test_mpi_is_installed():
    """The extra `test` brings both: without them what follows would be skipped unseen."""
    assert MPIEXEC.exists()
    __import__("mpi4py")


def test_large_messages_are_sent_in_parts_that_mpi_can_count(monkeypatch):
    monkeypatch.setattr(over_mpi, "LARGEST", 10)
    x = numpy.arange(12, dtype=numpy.int16).reshape(3, 4)
    parts = over_mpi._parts(x)
    assert [part.size for part in parts] == [10, 10, 4]
    assert b"".join(part.tobytes() for part in parts) == x.tobytes()
    parts[2][...] = 0  # they are the array's own memory
    assert x[2].tolist() == [8, 9, 0, 0]


RUNS = [(2, "ring"), (3, "ulysses"), (4, "all_gather")]


@pytest.mark.parametrize("ranks, scheme", quick(RUNS, RUNS[1], spread=True))
def test_processes_compute_what_one_does(ranks, scheme):
    done, _ = mpiexec(ranks, "right", scheme)
    assert done.stdout.split() == ["well"] * ranks, done.stderr


@pytest.mark.release
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("scheme", ["ring", "ulysses", "all_gather"])
@pytest.mark.parametrize("task", ["right", "narrow", "refused"])
def test_processes_do_all_of_it(task, scheme, ranks):
    done, _ = mpiexec(ranks, task, scheme)
    assert done.stdout.split() == ["well"] * ranks, done.stderr


def test_bfloat16_travels():
    done, _ = mpiexec(2, "narrow", "ulysses")
    assert done.stdout.split() == ["well"] * 2, done.stderr


def test_what_differs_is_an_error_on_every_rank():
    done, seconds = mpiexec(3, "refused", "ring")
    assert done.stdout.split() == ["well"] * 3, done.stderr
    assert seconds < LIMIT


def test_a_killed_rank_is_an_error_on_every_rank(tmp_path):
    """Where mpiexec does not end the others, they notice by themselves."""
    done, seconds = mpiexec(3, "killed", "ring", str(tmp_path), shielded=True)
    said = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert len(said) == 2, done.stdout + done.stderr
    assert all(text.startswith("comm: expected") for text in said), said
    assert done.returncode != 0
    assert seconds < LIMIT


@pytest.mark.release
def test_mpiexec_ends_the_others_of_a_killed_rank(tmp_path):
    done, seconds = mpiexec(3, "killed", "ring", str(tmp_path))
    assert "well" not in done.stdout
    assert done.returncode != 0
    assert seconds < LIMIT


@pytest.mark.release
def test_a_rank_that_never_comes_is_an_error_on_the_others(tmp_path):
    done, seconds = mpiexec(3, "late", "all_gather", str(tmp_path), shielded=True)
    said = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert len(said) == 2, done.stdout + done.stderr
    assert all(text.startswith("comm: expected an answer within 2 s") for text in said), said
    assert seconds < LIMIT
