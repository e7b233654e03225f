"""A run on the host that somebody wants to end: signals are answered at once, and nothing of it is left. No clock ends a run."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from cupy_flash.machine import source

# Says what happens, line by line. A small problem is computed before a large one and after it.
PROGRAM = """\
import os, sys, tempfile
import numpy
from cupy_flash.machine import host
from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs

def say(*words):
    print(*words, flush=True)

def computation(kernel, arch, seq):
    inputs = make_inputs(Case("float16", seq, seq, heads_q=4))
    options = {"causal": True, "backend": "host", "kernel": kernel, "arch": arch}
    if kernel.startswith("bwd"):
        inputs = (inputs[0], *inputs, inputs[0], numpy.zeros((1, 4, seq), "f4"))
        plan = plan_attention_backward(*inputs, deterministic=True, **options)
    else:
        plan = plan_attention(*inputs, **options)
    return lambda: b"".join(x.tobytes() for x in plan(*inputs))

def threads():
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1

host.OPTIONS += ("-Og",)
small, large = (computation(*sys.argv[1:], seq) for seq in (150, 20_000))
before, threads_before = small(), threads()
PREPARE
say("begins")
try:
    large()
except KeyboardInterrupt:
    say("interrupted")
say("threads left:", max(0, threads() - threads_before), "files left:", len(os.listdir(tempfile.gettempdir())))
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    say("no process left")
RESTORE
say("as before:", small() == before)
"""


def heed_ctrl_c():
    """Of a new process: tests that run in the background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def begun(tmp_path):
    """A function that starts the program, and returns it with an open stdout when the large problem has begun."""
    programs = []

    def start(kernel, arch, prepare="", restore=""):
        text = PROGRAM.replace("PREPARE", prepare).replace("RESTORE", restore)
        environment = os.environ | {"TMPDIR": str(tmp_path)}
        streams = {"stdout": subprocess.PIPE, "text": True, "preexec_fn": heed_ctrl_c}
        program = subprocess.Popen([sys.executable, "-c", text, kernel, arch], **streams, env=environment)
        programs.append(program)
        assert program.stdout.readline() == "begins\n"
        time.sleep(0.5)
        return program

    yield start
    for program in programs:
        program.kill()
        program.wait()


def assert_interrupted(program):
    """The signal is answered within a second, nothing is left, and what is computed then is right."""
    sent = time.monotonic()
    program.send_signal(signal.SIGINT)
    answer = program.stdout.readline()
    waited = time.monotonic() - sent
    assert (answer, waited < 1) == ("interrupted\n", True), waited
    left = "threads left: 0 files left: 0\nno process left\nas before: True\n"
    assert program.stdout.read() == left and program.wait() == 0


KERNELS = (("fwd_v1", "80"), ("fwd_v2", "80"), ("fwd_hopper", "90a"), ("bwd_v2", "80"), ("bwd_hopper", "90a"))
# Whichever kernel it is, the run ends alike.
SOME_KERNELS = [pytest.param(*of, marks=() if of[0] == "fwd_v2" else pytest.mark.release) for of in KERNELS]


@pytest.mark.parametrize("kernel, arch", SOME_KERNELS)
def test_ctrl_c_ends_a_run(kernel, arch, begun):
    assert_interrupted(begun(kernel, arch))


def test_ctrl_c_ends_a_sanitized_program(begun, tmp_path):
    """A program that sleeps stands for one that computes for long."""
    sleeper = tmp_path.parent / f"{tmp_path.name}-sleeper"
    sleeper.write_text("#!/bin/sh\nexec sleep 1000\n")
    sleeper.chmod(0o700)
    code = sleeper.read_bytes()
    prepare = f"os.environ['CUPY_FLASH_HOST_SANITIZE'], build = 'thread', host.build\nhost.build = lambda *_: {code!r}"
    assert_interrupted(begun("fwd_v2", "80", prepare, "host.build = build; del os.environ['CUPY_FLASH_HOST_SANITIZE']"))


def test_no_clock_decides_that_a_run_is_over():
    """A process may be stopped for any time, and then goes on."""
    machine = {name: text for name, text in source.files().items() if name.startswith("tile/host")}
    assert len(machine) >= 2
    assert [name for name, text in machine.items() if re.search(r"_clock\b|seconds\(|\bwake\.wait_", text)] == []
