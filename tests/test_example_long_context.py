"""The example that trains on long texts: its losses are those of one process, whose memory would not do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MPIEXEC = Path(sys.executable).parent / "mpiexec"


def losses_of(ranks, *arguments):
    """Run the example; what it printed as losses, or what it said on its end."""
    command = [MPIEXEC, "-n", ranks, sys.executable, "-m", "mpi4py", ROOT / "examples" / "long_context.py", *arguments]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, env=environment)
    found = re.search(r"losses ([\d. ]+),", done.stdout)
    return [float(loss) for loss in found[1].split()] if found else done.stdout + done.stderr


def test_losses_are_those_of_one_process():
    one, several = (losses_of(n, "--seq", 300, "--steps", 2, "--memory", 0) for n in (1, 3))
    assert several == pytest.approx(one, abs=2e-5)
    assert one[1] < one[0]


@pytest.mark.release
def test_four_processes_have_the_memory_that_one_has_not():
    refused = losses_of(1, "--steps", 1)
    assert "rank 0 of 1 may take 120 MB more, which is too little for 8,192 bytes" in refused
    [of_four], [of_one] = losses_of(4, "--steps", 1), losses_of(1, "--steps", 1, "--memory", 0)
    assert of_four == pytest.approx(of_one, abs=2e-5)
