"""What the command `bench` prints, writes and refuses."""

import importlib.util
import json
import math

import pytest
from click.testing import CliRunner
from fake_bench import FakeBench, contender

from cupy_flash.cli import bench as command
from cupy_flash.cli import main
from cupy_flash.measure.bench import Failure
from cupy_flash.measure.cells import DIRECTIONS
from cupy_flash.measure.peers import ALGORITHMS, KERNELS


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


@pytest.fixture
def fake(monkeypatch):
    """A machine and contenders for the command: v2 takes half of the time that the peer takes."""
    bench = FakeBench({"v2": 1e-3, "peer": 2e-3})
    there, missing = (contender("v2", ours=True), contender("peer")), (Failure("fa4", "there is no module flash_attn.cute"),)
    monkeypatch.setattr(command, "machine_of", lambda: bench)
    monkeypatch.setattr(command, "contenders", lambda *_: (there, missing))
    return bench


def test_the_command_prints_rates_and_comparisons(fake):
    result = run("forward", "--seq", "1024,4096", "--dim", 64, "--dtype", "float16", "--mask", "full", "--rounds", 2)
    assert result.exit_code == 0, result.output
    rate = 4 * 64 * 1024**2 * 32 * 16 / 1e-3 / 1e12
    [row] = [line for line in result.stdout.splitlines() if line.split()[:4] == ["float16", "64", "full", "1024"]]
    assert row.split()[4:] == [f"{rate:.0f}", f"{rate / 2:.1f}", "(2.00)", f"{rate / 1000:.0%}", "0.0%"]
    assert "1000 TFLOP/s in float16" in result.stdout
    assert "forward  v2  peer              2.00   2.00  2.00      2" in result.stdout
    assert "fa4: there is no module flash_attn.cute" in result.stdout


def test_values_may_be_narrower_than_keys(fake, tmp_path):
    asked = ("--seq", 1024, "--dim", 192, "--dim-v", 128, "--dtype", "bfloat16", "--mask", "full")
    result = run("backward", *asked, "--json", tmp_path / "found.json")
    assert result.exit_code == 0, result.output
    rate = 2 * (3 * 192 + 2 * 128) * 1024**2 * 10 * 16 / 1e-3 / 1e12
    [row] = [line for line in result.stdout.splitlines() if line.split()[:4] == ["bfloat16", "192/128", "full", "1024"]]
    assert row.split()[4] == f"{rate:.0f}"
    [cell] = json.loads((tmp_path / "found.json").read_text())["cells"]
    assert (cell["dim"], cell["dim_v"]) == (192, 128)


def test_the_command_hands_kernels_on(fake, monkeypatch):
    asked = []
    contenders = command.contenders
    monkeypatch.setattr(command, "contenders", lambda *arguments: asked.append(arguments) or contenders(*arguments))
    cell = ("--seq", 1024, "--dim", 64, "--dtype", "float16", "--mask", "full", "--peers", "none")
    for direction, *kernels in (
        ("forward",),
        ("forward", "fwd_hopper"),
        ("forward", "fwd_v2", "fwd_hopper"),
        ("backward", "bwd_v2", "bwd_hopper"),
        ("both", "bwd_hopper", "fwd_v2"),
    ):
        option = ("--kernel", ",".join(kernels)) if kernels else ()
        assert run(direction, *cell, *option).exit_code == 0
        assert asked.pop() == (ALGORITHMS, [], False, tuple(kernels))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("forward", "--kernel", "fwd_v1"), f"expected names out of {', '.join(KERNELS)}, with commas between them, got 'fwd_v1'"),
        (("forward", "--kernel", "fwd_v2", "--algorithm", "v1"), "--kernel is for v2, and --algorithm leaves v1 only"),
        (("forward", "--kernel", "fwd_v2,bwd_v2"), "--kernel: bwd_v2 computes the backward, which is not measured"),
        (("backward", "--kernel", "fwd_hopper"), "--kernel: fwd_hopper computes the forward, which is not measured"),
    ],
)
def test_kernels_that_compute_nothing_are_refused(fake, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]


def test_the_command_writes_json_and_a_figure(fake, tmp_path):
    path = tmp_path / "found.json"
    result = run("both", "--seq", 1024, "--dim", 128, "--dtype", "bfloat16", "--json", path, "--plot", tmp_path / "found.png")
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["device"] == "a fake" and report["matmul_tflops"] == {"bfloat16": 1000.0}
    assert report["contenders"] == [{"name": "v2", "ours": True}, {"name": "peer", "ours": False}]
    assert [(c["direction"], c["causal"]) for c in report["cells"]] == [(d, m) for d in DIRECTIONS for m in (False, True)]
    for cell in report["cells"]:
        assert cell["failures"] == [] and (cell["batch"], cell["heads"], cell["seq"], cell["dim"]) == (16, 16, 1024, 128)
        for measured in cell["measurements"]:
            assert math.isclose(measured["tflops"], cell["flops"] / measured["seconds"] / 1e12)
    assert [(c["direction"], c["mean"]) for c in report["comparisons"]] == [(d, pytest.approx(2)) for d in DIRECTIONS]
    assert {file.name for file in tmp_path.glob("*.png")} == {"found-forward-bfloat16.png", "found-backward-bfloat16.png"}


def test_the_file_has_each_cell_before_the_next_is_measured(fake, tmp_path):
    path = tmp_path / "found.json"
    lengths = []

    def clear():
        lengths.append(len(json.loads(path.read_text())["cells"]))

    fake.clear = clear
    assert run("forward", "--seq", "512,1024", "--dim", 64, "--dtype", "float16", "--mask", "full", "--json", path).exit_code == 0
    assert lengths == [1, 2]


def test_a_kernel_of_ours_that_fails_ends_the_command_with_1(fake):
    fake.wrong = ("v2",)
    result = run("backward", "--seq", 1024, "--dim", 64, "--dtype", "float16")
    assert result.exit_code == 1 and "v2: failed in 2 cells: ArithmeticError: off by 1" in result.stdout


def test_a_product_that_cupy_does_not_have_is_reported(fake):
    def refuse(dtype):
        raise TypeError(f"no {dtype} here")

    fake.matmul_rate = refuse
    result = run("forward", "--seq", 1024, "--dim", 64, "--dtype", "bfloat16", "--mask", "full")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("a fake\n") and "cuBLAS in bfloat16: TypeError: no bfloat16 here" in result.stdout
    assert "(2.00)" in result.stdout


def test_a_peer_that_is_wrong_is_marked(fake):
    fake.wrong = ("peer",)
    result = run("forward", "--seq", 1024, "--dim", 64, "--dtype", "float16", "--mask", "full")
    assert result.exit_code == 0
    assert "(2.00)!" in result.stdout and "! peer: forward float16 16x32x1024x64 full: off by 1" in result.stdout


def test_without_a_gpu_the_command_says_so(monkeypatch):
    def none():
        raise RuntimeError("no driver")

    monkeypatch.setattr(command, "cupy_installed", lambda: True)

    for devices in (none, list):
        monkeypatch.setattr(command, "devices", devices)
        result = run()
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1] == "Error: bench needs a CUDA device; the command doctor says what is missing"


def test_a_figure_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("--plot", tmp_path / "found.png")
    assert result.exit_code == 1 and "--plot needs Matplotlib: pip install matplotlib" in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sideways"], "sideways"),
        (["--suite", "long"], "long"),
        (["--peers", "fa4,fa5"], "expected names out of naive,"),
        (["--seq", "0"], "expected sizes, with commas between them, got '0'"),
        (["--plot", "found.txt"], "expected a name that ends in .png, .pdf or .svg, got 'found.txt'"),
        (["--json", "nowhere/found.json"], "can be written, got 'nowhere/found.json': No such file or directory"),
        (["--plot", "nowhere/found.png"], "can be written, got 'nowhere/found.png': No such file or directory"),
        (["--plot", "/proc/found.png"], "expected a file that can be written, got '/proc/found.png'"),
        (["--plot", "x" * 300 + ".png"], "File name too long"),
        (["--json", "."], "'.' is a directory"),
        (["--seq", "9" * 30], "expected sizes, with commas between them, got '999"),
    ],
)
def test_user_errors_end_with_2(fake, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]
    assert fake.turns == []


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    path = tmp_path / "found.json"
    effort = ("--rounds", 2, "--seconds", 0.01, "--json", path)
    result = run("both", "--seq", "512,1000", "--dim", 64, "--dtype", "float16", *effort)
    assert result.exit_code == 0, result.output
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 8
    for cell in cells:
        seconds = {m["contender"]: m["seconds"] for m in cell["measurements"]}
        assert seconds["v2"] < seconds["naive"]
        assert all(m["low"] <= m["seconds"] <= m["high"] for m in cell["measurements"])
