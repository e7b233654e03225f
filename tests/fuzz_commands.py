"""Command lines made of what is right, what is odd and what is wrong: ``python tests/fuzz_commands.py --seed 7 --count 2000``.

Whatever a command is given, it ends with 0, 1 or 2, without a traceback and without a warning of NumPy's. What would take
minutes is left out: `check` computes with NumPy, and compilers, GPU, figures and the interpreter of kernels are replaced.
"""

import json
import random
import shlex
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import click
from click.testing import CliRunner
from fake_bench import FakeBench, contender

from cupy_flash.cli import bench, compile, main, traffic
from cupy_flash.judge.cases import quick_cases
from cupy_flash.machine import nvrtc
from cupy_flash.measure import plots
from cupy_flash.measure.traffic import Count
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.matrix import every_plan

SANE = ("1", "2", "7", "64", "100", "256")
WILD = (0, 0.05, 0.3)  # how likely a word of a line is odd: some lines are all right
SIZES = ("0", "1", "2", "7", "64", "100", "256", "257", "4096", str(2**31), str(2**32), str(2**45), str(2**63 - 1), str(2**63))
ODD = ("", " ", "-1", "0", "-", "--", "x", "nan", "inf", "-inf", "1e400", "1e-50", "٣", "é", "\udcff", "\n", "\x1b[31m", "%s")
LONG = ("9" * 5000, "x" * 20_000, "1x" * 100 + "1", "0" * 5000, "1," * 3000 + "1", "-" + "9" * 400)
LISTS = ("1", "1,2", "1, -inf,3", "1,,2", ",", "1e308,-1e308", "-inf", "nan", "1,x")


def value_of(random, parameter, folder, wild):
    """A text for an argument or the value of an option."""
    if random.random() < wild:
        return random.choice((*ODD, *LONG, *SIZES, *LISTS))
    sizes = SIZES if random.random() < wild else SANE
    kind = parameter.type
    if isinstance(kind, click.Choice):
        return random.choice(kind.choices)
    if kind.name == "shape":
        return "x".join(random.choice(sizes) for _ in range(random.choice((1, 2, 3, 3, 4, 4, 4, 5))))
    if kind.name == "arch":
        return random.choice((*ARCHITECTURES, "sm_80", "90A"))
    if kind.name == "L:R":
        return f"{random.choice(('', *sizes))}:{random.choice(('', *sizes))}"
    if kind.name == "list":
        return random.choice((*LISTS, *sizes))
    if isinstance(kind, click.Path):
        files = ("x.png", "x.png", "x.png", "x.txt", "no/x.png", ".", "", "x" * 300 + ".png", "file/x.png", "link.png", "file")
        return str(folder / random.choice(files))
    if parameter.name == "names":
        return random.choice((*map(str, quick_cases()[:3]), "float16"))
    return random.choice((*sizes, "0.5", "config.cuh"))


def line(random, folder):
    """The words of one command line."""
    words, command, wild = [], main, random.choice(WILD)
    while isinstance(command, click.Group) and random.random() < 0.98:
        name = random.choice(list(command.commands))
        words.append(name if random.random() >= wild / 5 else random.choice((name[:-1], name.upper(), "help", *ODD)))
        command = command.commands[name]
    if "check" in words:
        words += ["--backend", "numpy", "--dim", "40"]
    optional = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    required = [parameter for parameter in command.params if parameter not in optional]
    for parameter in required + random.sample(optional, random.randint(0, len(optional)) // random.choice((1, 4))):
        if isinstance(parameter, click.Argument):
            words += [value_of(random, parameter, folder, wild) for _ in range(random.choice((1, 1, 1, 2, 3)))]
            continue
        # A snapshot is of true machine code, and renewing it writes into the checkout.
        if parameter.name in ("rounds", "renew", "compare") or ("check" in words and parameter.name in ("backend", "dim", "quick")):
            continue
        for _ in range(random.choice((1, 1, 1, 1, 2))):
            words.append(random.choice((*parameter.opts, *parameter.secondary_opts)))
            if not (parameter.is_flag or parameter.count) or random.random() < wild / 5:
                words.append(value_of(random, parameter, folder, wild))
    if random.random() < wild / 5:
        words.insert(random.randint(0, len(words)), random.choice((*ODD, "-h", "--version", "--nope", "-x")))
    return words


def fault_of(words):
    """What is wrong with how a command line ends, or ''."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = CliRunner().invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}: {result.exception}"
    if result.exit_code not in (0, 1, 2):
        return f"status {result.exit_code}"
    if result.exit_code and not result.stderr and "check" not in words and "doctor" not in words:
        return "an error without a message"
    if max(map(len, result.stderr.splitlines()), default=0) > 2000:
        return "an endless line"
    if "--json" in words and words[0] != "bench" and result.stdout.startswith(("{", "[")):
        json.loads(result.stdout)
    return ""


def counted(setting, algorithm, arch):
    """In the place of an execution: what a count of any setting may be."""
    if setting.seq >= 2**45:
        raise MemoryError
    return Count(algorithm, setting, 1, 1, 1, 1, None if algorithm == "naive" else 1)


def replaced(folder):
    """Everything that would take long, replaced."""
    (folder / "file").touch()
    (folder / "link.png").symlink_to(folder / "nowhere" / "x.png")
    stack = ExitStack()
    stack.enter_context(patch.object(nvrtc, "version", lambda: (12, 9)))
    stack.enter_context(patch.object(nvrtc, "report", lambda plan: nvrtc.Report(1, 0, ())))
    stack.enter_context(patch.object(compile, "every_plan", lambda *given: list(every_plan(*given))[:3]))
    stack.enter_context(patch.object(traffic, "count", counted))
    stack.enter_context(patch.object(plots, "plot_traffic", lambda *_: None))
    stack.enter_context(patch.object(plots, "plot_bench", lambda *_: []))
    machine = FakeBench({"v2": 1e-3, "peer": 2e-3})
    machine.architecture = ARCHITECTURES["90a"]
    stack.enter_context(patch.object(bench, "machine_of", lambda: machine))
    stack.enter_context(patch.object(bench, "contenders", lambda *_: ((contender("v2", ours=True), contender("peer")), ())))
    stack.enter_context(patch.dict("os.environ", CUPY_FLASH_CACHE_DIR=str(folder / "cache")))
    return stack


def faults(seed, count):
    """Yield each command line that ends as none should, with what is wrong."""
    with tempfile.TemporaryDirectory() as name, replaced(Path(name)):
        for number in range(count):
            words = line(random.Random(f"{seed} {number}"), Path(name))
            fault = fault_of(words)
            if fault:
                yield f"{seed} {number}: {shlex.join(words)[:500]!a}: {fault[:500]}"


@click.command()
@click.option("--seed", type=int, default=0, show_default=True, help="Of the command lines.")
@click.option("--count", type=int, default=1000, show_default=True, help="How many command lines.")
def command(seed, count):
    """Try command lines, and print those that end with a traceback."""
    found = list(faults(seed, count))
    click.echo("\n".join([*found, f"{len(found)} of {count} command lines ended as none should"]))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    command()
