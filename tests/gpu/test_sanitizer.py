"""compute-sanitizer's four tools on small cases of every kernel that reach every kind of copy, product and mask."""

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("cupy")

PROGRAM = """
import cupy
cupy.cuda.set_allocator(None)  # a memory pool would hide a step outside
from cupy_flash import attention, attention_backward, merge_states, plan_attention
from cupy_flash.cases import Case, make_inputs
from cupy_flash.compare_gradients import make_cotangents

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
    inputs = make_inputs(case, cupy)
    for kernel in (None, "fwd_v2"):  # the planner's choice may be another
        plan_attention(*inputs, kernel=kernel, **case.options)(*inputs)
        cupy.cuda.Device().synchronize()

for case in (
    Case("float16", 300, 200, heads_q=2, causal=True),  # two blocks, of four tiles of queries and of one
    Case("float32", 70, 60, dim=33, window=(20, 20)),
):
    attention(*make_inputs(case, cupy), algorithm="v1", **case.options)
    cupy.cuda.Device().synchronize()

def forward(*inputs, **options):
    # By a kernel that stores with instructions: initcheck does not know of memory that the copy engine has written.
    return plan_attention(*inputs, kernel="fwd_v2", return_lse=True, **options)(*inputs)

for case in (
    Case("float16", 150, 200, heads_q=4, heads_kv=2, causal=True),  # parts of dk and dv are added up afterwards
    Case("bfloat16", 130, 70, dim=128, window=(20, 20)),
    Case("float16", 50, 60, dim=33, softcap=10.0),
    Case("float32", 70, 60, causal=True),
):
    inputs, (dout, _) = make_inputs(case, cupy), make_cotangents(case, cupy)
    options = {name: value for name, value in case.options.items() if name != "return_lse"}
    for deterministic in (False, True):
        attention_backward(dout, *inputs, *forward(*inputs, **options), deterministic=deterministic, **options)
        cupy.cuda.Device().synchronize()

case = Case("float16", 70, 200, heads_q=2, batch=(3,))
q, k, v = make_inputs(case, cupy)
k, v = k[:1], v[:1]  # broadcast: their gradients are sums
attention_backward(make_cotangents(case, cupy)[0], q, k, v, *forward(q, k, v))
parts = [forward(q, k[:, :, keys], v[:, :, keys]) for keys in (slice(0, 50), slice(50, 200))]
merge_states(*parts[0], *parts[1])
cupy.cuda.Device().synchronize()
print("done")
"""


@pytest.mark.parametrize("tool", ("memcheck", "racecheck", "initcheck", "synccheck"))
def test_clean(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    options = ["--tool", tool, "--error-exitcode", "9"]
    for name in ("fwd_", "bwd_", "merge"):  # not what CuPy launches
        options += ["--kernel-name", f"kernel_substring={name}"]
    done = subprocess.run([sanitizer, *options, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "done" in done.stdout, (done.stdout + done.stderr)[-3000:]
    assert "0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-2000:]
