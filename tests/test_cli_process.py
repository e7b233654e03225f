"""How commands end, what they need, and how they speak to terminals, files and pipes: each in a process of its own."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from thinned import thinned

from cupy_flash.cli import main

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals, pipes and terminals are those of POSIX")
ROOT = Path(__file__).parents[1]
CHECK = ("check", "--backend", "numpy", "--dim", "40")
WORKING = ["source", "8x100x64", "--file", "config.cuh"], [*CHECK, "--json"], ["trace"], ["cache", "list"]
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cupy", "cupy_backends", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Absent())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("cupy", "matplotlib") else find(name)
from cupy_flash.cli import main
main(prog_name="cupy-flash")
"""


def environment(**changes):
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "TERM")}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm"} | changes


def command(*arguments):
    return [sys.executable, "-m", "cupy_flash", *map(str, arguments)]


def shell(line, **changes):
    """What a line of bash ends with; $CF stands for the command."""
    line = f"CF='{shlex.join(command())}'; {line}"
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment(**changes), cwd=ROOT)


def on_terminal(*arguments, columns=80, **changes):
    """What a command prints on a terminal of so many columns, and its status."""
    leader, follower = pty.openpty()
    code = f"import fcntl, struct, termios; fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 24, {columns}, 0, 0))"
    program = f"{code}; import sys; from cupy_flash.cli import main; main({list(arguments)!r})"
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    process = subprocess.Popen([sys.executable, "-c", program], **streams, env=environment(**changes), cwd=ROOT)
    os.close(follower)
    text = b""
    while True:
        try:
            block = os.read(leader, 65536)
        except OSError:  # the other end has closed
            break
        if not block:
            break
        text += block
    os.close(leader)
    return text.decode(), process.wait()


# What is needed


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["plan", "8x100x64"], 0, ""),
        pytest.param(["plan", "8x100x64", "--backward", "--arch", "90a"], 0, "", marks=pytest.mark.release),
        (["compile"], 1, 'install them with: pip install "cupy-cuda12x[ctk]" (or cupy-cuda13x)'),
        (["bench"], 1, 'bench needs CuPy: pip install "cupy-cuda12x[ctk]"'),
        (["bench", "--plot", "x.png"], 1, "--plot needs Matplotlib: pip install matplotlib"),
        (["check", "--backend", "cuda"], 1, 'backend cuda needs CuPy: pip install "cupy-cuda12x[ctk]"'),
        *(pytest.param(works, 0, "", marks=pytest.mark.release) for works in WORKING),
    ],
    ids=str,
)
def test_without_cupy_a_command_works_or_says_how_to_get_it(arguments, status, message):
    done = subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, env=environment())
    assert done.returncode == status, done.stderr
    errors = [line for line in done.stderr.splitlines() if " of " not in line or "Error" in line]
    assert len(errors) == (1 if status else 0) and message in done.stderr


# How it ends


LINES = ("source 8x64x64", "--help", "plan --help", "trace")


@pytest.mark.parametrize("asked", thinned(product(LINES, ("", "1")), keep=6), ids="-".join)
def test_where_the_reader_has_gone_a_command_ends_quietly(asked):
    line, unbuffered = asked
    done = shell(f"$CF {line} | true; exit ${{PIPESTATUS[0]}}", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("asked", thinned(product(("plan 8x64x64", "--help", "trace --json"), ("", "1")), keep=6), ids="-".join)
def test_where_the_output_cannot_be_written_a_command_says_so(asked):
    line, unbuffered = asked
    done = shell(f"$CF {line} > /dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")
    assert shell(f"$CF {line} > /dev/full 2>&1", PYTHONUNBUFFERED=unbuffered).returncode == 1


@pytest.mark.release
def test_closed_streams_change_nothing_else():
    for line, status in (("plan 8x64x64", 0), ("plan", 2), (shlex.join(CHECK), 0)):
        done = shell(f"$CF {line} >&- 2>&-")
        assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


def heed_ctrl_c():
    """Of a new process: tests that run in the background inherit that SIGINT is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("arguments", thinned([("check", "--backend", "host", "--quick"), ("compile", "--arch", "80")]), ids=str)
def test_ctrl_c_while_threads_compile_ends_with_130(arguments, tmp_path):
    if arguments[0] == "compile":
        pytest.importorskip("cupy")
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    changes = environment(CUPY_FLASH_CACHE_DIR=str(tmp_path), PYTHONUNBUFFERED="1")
    process = subprocess.Popen(command(*arguments), **streams, env=changes, cwd=ROOT, preexec_fn=heed_ctrl_c)
    first = process.stderr.readline()
    assert "0 of " in first
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and out == ""
    assert "Aborted!" in err and "Traceback" not in err and "Exception" not in err


# Terminals, files and pipes


def test_a_table_fits_the_terminal():
    text, status = on_terminal(*CHECK, columns=60)
    rows = [line for line in re.sub(r"\r|\x1b\[\??\w+", "\n", text).splitlines() if "ward" in line]
    assert status == 0 and len(rows) == 4
    assert all(len(row) <= 60 and "…" in row for row in rows)
    wide, _ = on_terminal(*CHECK, columns=60, COLUMNS="200")
    assert "float16-h7x1-q61-k97-d40-top_left" in wide and "…" not in wide


def test_in_a_pipe_a_table_is_whole_and_plain_and_progress_is_lines():
    done = subprocess.run(command(*CHECK), capture_output=True, text=True, env=environment())
    assert done.stderr == "running cases: 0 of 2\nrunning cases: 2 of 2\n"
    assert "float16-h7x1-q61-k97-d40-top_left" in done.stdout and "\x1b" not in done.stdout + done.stderr
    done = subprocess.run(command(*CHECK), capture_output=True, text=True, env=environment(COLUMNS="60"))
    assert max(map(len, done.stdout.splitlines())) <= 60


COLOUR = re.compile(r"\x1b\[\d+m")


@pytest.mark.release
def test_colours_and_bars_are_for_terminals_that_want_them():
    text, _ = on_terminal("doctor", CXX="false")
    assert COLOUR.search(text), "a compiler that does not work is coloured"
    assert not COLOUR.search(on_terminal("doctor", CXX="false", NO_COLOR="1")[0])
    text, _ = on_terminal(*CHECK, TERM="dumb")
    assert "\x1b" not in text and "\r" not in text.replace("\r\n", "") and "running cases: 2 of 2" in text


@pytest.mark.release
def test_whatever_the_encoding_lacks_is_escaped():
    no_text = {"CUPY_FLASH_CACHE_DIR": os.fsdecode(b"/tmp/\xff"), "PYTHONIOENCODING": "utf-8:strict"}
    for changes in ({"PYTHONIOENCODING": "ascii", "COLUMNS": "60"}, no_text):
        for arguments in (CHECK, ("cache", "dir"), ("trace", "--scores", ",".join("1" * 100))):
            done = subprocess.run(command(*arguments), capture_output=True, env=environment(**changes))
            assert done.returncode == 0, done.stderr


def test_python_m_is_the_command():
    done = subprocess.run(command("plan"), capture_output=True, text=True, env=environment())
    assert done.returncode == 2 and "Usage: python -m cupy_flash plan" in done.stderr
    assert subprocess.run(command("--version"), capture_output=True, env=environment()).returncode == 0


# Help


def test_help_is_a_command_as_well():
    for arguments in (["help"], ["help", "plan"], ["help", "cache", "list"]):
        result = CliRunner().invoke(main, arguments, prog_name="cupy-flash")
        assert result.exit_code == 0
        assert result.stdout == CliRunner().invoke(main, [*arguments[1:], "--help"], prog_name="cupy-flash").stdout
    result = CliRunner().invoke(main, ["plam"])
    assert result.exit_code == 2 and "Did you mean 'plan'?" in result.stderr


@pytest.mark.parametrize("name", [name for name in main.commands if name != "cache"])
def test_every_command_has_examples_that_parse(name):
    examples = re.findall(rf"^ +cupy-flash {name}\b(.*)$", main.commands[name].help, re.MULTILINE)
    assert examples
    for example in examples:
        main.commands[name].make_context(name, shlex.split(example)).close()


def test_an_error_is_json_as_well_where_json_was_asked_for():
    result = CliRunner().invoke(main, ["plan", "8x64", "--dtype", "float64", "--json"])
    assert result.exit_code == 2 and "Traceback" not in result.stderr
    assert f"Error: {json.loads(result.stdout)['error']}" == result.stderr.splitlines()[-1]


def test_a_long_argument_does_not_make_a_long_message():
    result = CliRunner().invoke(main, ["plan", "x" * 100_000])
    assert result.exit_code == 2 and len(result.stderr) < 2000 and result.stderr.endswith("x'\n")


def test_out_of_standalone_mode_errors_are_the_callers():
    with pytest.raises(click.NoSuchOption):
        main.main(["plan", "--nope"], standalone_mode=False)
