"""compute-sanitizer's four tools on small cases that reach every kind of copy, product and mask."""

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("cupy")

PROGRAM = """
import cupy, numpy
cupy.cuda.set_allocator(None)  # a memory pool would hide a step outside
from cupy_flash import attention
from cupy_flash.cases import Case, make_inputs
for case in (
    Case("float16", 70, 90, heads_q=2, causal=True),
    Case("float16", 1, 130, dim=128),
    Case("bfloat16", 130, 70, dim=128, window=(20, 20)),
    Case("float16", 50, 60, dim=33, softcap=10.0),
    Case("bfloat16", 40, 50, dim=98),
    Case("float16", 40, 50, dim=256),
    Case("float32", 70, 60, dim=128, causal=True),
    Case("float32", 40, 50, dim=33, precision="tf32"),
    Case("float16", 5, 0),
):
    inputs = [cupy.ascontiguousarray(x) for x in make_inputs(case, cupy)]
    attention(*inputs, **case.options)
    cupy.cuda.Device().synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ("memcheck", "racecheck", "initcheck", "synccheck"))
def test_clean(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    options = ["--tool", tool, "--error-exitcode", "9", "--kernel-name", "kernel_substring=fwd_"]
    done = subprocess.run([sanitizer, *options, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "done" in done.stdout, (done.stdout + done.stderr)[-3000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-2000:]
