"""The command line: help, exit codes, what programs read, and that a wrong kernel is found."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import cupy_flash
from cupy_flash.cli import compile, main
from cupy_flash.cli.output import echo_json, table
from cupy_flash.errors import CompileError
from cupy_flash.judge import check
from cupy_flash.judge.cases import quick_cases
from cupy_flash.judge.check import select_computations
from cupy_flash.machine import cache, nvrtc, source
from cupy_flash.machine.nvrtc import Report
from cupy_flash.plan import read_hopper
from cupy_flash.plan.architecture import ARCHITECTURES, architecture_named
from cupy_flash.plan.fp16_parts import ALL_ROWS, MOST_DIMS
from cupy_flash.plan.gradient_parts import GRADIENT_ROWS
from cupy_flash.plan.matrix import KINDS, PLANNED_ALONE, every_plan, has
from cupy_flash.plan.tuning import KERNEL_TABLES, MASKS, SHORT

ROOT = Path(__file__).parents[1]
MASKED_CASE = "float16-h7x1-q61-k97-d40-top_left"


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def run_json(*arguments):
    result = run(*arguments, "--json")
    return json.loads(result.stdout), result.exit_code


def python(code, **environment):
    """Run code in a process of its own, where what this one has imported does not count."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, check=False
    )


def every_command(command=main, path=()):
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from every_command(child, (*path, name))


@pytest.mark.parametrize("path, command", [pytest.param(*found, id=" ".join(found[0]) or "main") for found in every_command()])
def test_every_command_and_option_has_help(path, command):
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert command.help and command.help.splitlines()[0].endswith(".")
    assert command.get_short_help_str(limit=60).endswith((".", "PyTorch")), "too long for the list of commands"
    for option in command.params:
        assert isinstance(option, click.Argument) or option.help, option.name


def test_version():
    assert cupy_flash.__version__ in run("--version").stdout


def test_help_imports_no_cupy():
    done = python(
        "import sys; from cupy_flash.cli import main; main(['--help'], standalone_mode=False); print('cupy' in sys.modules)"
    )
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_the_command_of_a_checkout_works_from_anywhere(tmp_path):
    command = [sys.executable, ROOT / "cli.py", "plan"]
    done = subprocess.run([*command, "8x100x64", "--arch", "90"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "fwd_hopper for sm_90a" in done.stdout
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"Usage: python {ROOT / 'cli.py'} plan" in done.stderr


@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_plan_for_every_architecture(architecture, dtype):
    plan, code = run_json("plan", "2x16x1024x96", "--causal", "--arch", architecture.name, "--dtype", dtype)
    assert code == 0
    assert plan["architecture"] == architecture.name and plan["config"]["ARCH"] == architecture.number
    assert plan["config"]["WIDTH"] == 96 and plan["problem"]["mask"]["right"] == 0
    assert plan["shared_bytes"] <= architecture.shared_bytes
    in_parts = architecture.name == "90a" and dtype == "float32"  # q, k and v as numbers of float16
    assert (plan["workspace_bytes"] > 0) == in_parts and plan["config"]["FP16_PARTS"] == 2 * in_parts
    assert plan["result_bytes"] == 2 * 16 * 1024 * 96 * (2 if dtype == "float16" else 4)


def test_plan_reads_shapes_and_options():
    shapes = ("6x50x64", "2x70x64", "2x70x40")
    options = ("--window", "8:", "--top-left", "--softcap", "30", "--scale", "-0.5", "--precision", "tf32", "--dtype", "float32")
    plan, code = run_json("plan", *shapes, *options, "--arch", "80")
    problem = plan["problem"]
    assert code == 0
    assert (problem["heads_q"], problem["heads_kv"], problem["len_q"], problem["len_kv"], problem["dim_v"]) == (6, 2, 50, 70, 40)
    assert (problem["mask"]["left"], problem["mask"]["right"], problem["scale"], problem["softcap"]) == (-8, 0, -0.5, 30.0)
    assert plan["config"]["TF32_PASSES"] == 1 and plan["config"]["EXPLICIT_SCORES"]
    assert any("softcap" in reason for reason in plan["reasons"])
    text = run("plan", *shapes, *options, "--arch", "80").stdout
    assert "6 heads on 2" in text and "EXPLICIT_SCORES=True" in text


def test_plan_of_the_backward():
    shapes = ("2x16x1024x96", "2x4x1024x96", "2x4x1024x64")
    plan, code = run_json("plan", *shapes, "--backward", "--deterministic", "--arch", "90a")
    assert code == 0 and plan["kernel"] == "bwd_hopper" and plan["config"]["WIDTH"] == plan["config"]["WIDTH_V"] == 128
    assert [launch["entry"] for launch in plan["launches"]] == ["bwd_hopper_preprocess", "bwd_hopper", "bwd_hopper_postprocess"]
    assert set(plan["workspace"]) == {"stats", "dq_accum", "dk_accum", "dv_accum", "dq_semaphore", "dq_progress"}
    assert plan["result_bytes"] == 2 * 2 * 1024 * (16 * 96 + 4 * 96 + 4 * 64)
    text = run("plan", *shapes, "--backward", "--arch", "90a").stdout
    assert f"stats {plan['workspace']['stats']}, " in text and "dq_semaphore" not in text


def test_plan_of_v1():
    plan, code = run_json("plan", "16x1000x128", "--algorithm", "v1", "--arch", "90a")
    tiles = -(-1000 // plan["config"]["TILE_Q"])
    assert code == 0 and plan["kernel"] == "fwd_v1" and plan["config"]["Q_TILES"] > 1
    assert [launch["blocks"] for launch in plan["launches"]] == [16 * -(-tiles // plan["config"]["Q_TILES"])]
    assert plan["workspace"] == {"state": 4 * 16 * tiles * plan["config"]["TILE_Q"] * (128 + 2)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan"], "SHAPE"),
        (["plan", "2xax3"], "got '2xax3'"),
        (["plan", "1x1x1x" + "9" * 5000], "expected sizes below 2^63 with an x between them"),
        (["plan", f"1x1x1x{2**63}"], "expected sizes below 2^63 with an x between them"),
        (["plan", f"{2**32}x0x64x64"], f"q: expected fewer than 2**31 batch elements, got {2**32}"),
        (["plan", f"0x{2**32}x64x64"], f"q: expected fewer than 2**31 heads, got {2**32}"),
        (["plan", "-1x64"], "No such option"),
        (["plan", "--", "-1x64"], "got '-1x64'"),
        (["compile", "--arch", "80", "--kernel", "fwd_hopper"], "nothing to compile: the tuning tables have no row for sm_80, fwd"),
        (["check", "--backend", "numpy", "--dim", "0"], "0 is not in the range"),
        (["traffic", "--seq", str(2**63)], "expected sizes, with commas between them"),
        (["plan", "2x3", "4x5"], "one shape for all of q, k, v, or three, got 2"),
        (["plan", "8x64x64", "--arch", "61"], "got '61'"),
        (["plan", "8x64x64", "--window", "1"], "got '1'"),
        (["plan", "8x64x64", "--window", "-3:0"], "window: expected ends"),
        (["plan", "8x64x64", "--softcap", "-1"], "softcap: expected"),
        (["plan", "8x64x300"], "got 300"),
        (["plan", "5x64x64", "2x64x64", "2x64x64"], "q: expected a multiple of 2 heads"),
        (["plan", "8x64x64", "--dtype", "float64"], "float64"),
        (["source", "8x64x64", "--dtype", "bfloat16", "--arch", "75"], "no bfloat16"),
        (["source", "8x64x64", "--file", "nope.cuh"], "config.cuh"),
        (["check", "--backend", "numpy", "--arch", "80"], "--arch is for backend host"),
        (["check", "--backend", "numpy", "--dim", "7"], "nothing to run"),
        (["check", "--backend", "host", "--dtype", "float64"], "only backend 'numpy' computes float64"),
        (["check", "--backend", "numpy", "--case", MASKED_CASE, "--dim", "40"], "--case names the cases"),
        (["check", "--backend", "numpy", "--case", MASKED_CASE + "s"], f"did you mean {MASKED_CASE}?"),
        (["check", "--backend", "numpy", "--algorithm", "v1"], "on backend numpy there is no forward or backward by v1"),
        (["check", "--backend", "numpy", "--direction", "backward", "--algorithm", "v1"], "there is no backward by v1"),
        (["compile", "--arch", "80", "--all"], "exclude each other"),
        (["plan", "8x64x64", "--deterministic"], "--deterministic is an option of --backward"),
        (["plan", "8x64x256", "--backward", "--dtype", "float32", "--arch", "75"], "for bwd_v2 on sm_75, whose 64 KB"),
        (["plan", "8x64x64", "--backward", "--algorithm", "v1"], "'v1', which is a forward only"),
    ],
)
def test_user_errors_end_with_2_and_say_what_was_wrong(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_source_is_the_text_that_is_compiled():
    [plan] = [p for p in every_plan([ARCHITECTURES["80"]], ["bfloat16"], ["fwd_v2"]) if p.config.WIDTH == 192]
    arguments = ("8x1024x192", "--dtype", "bfloat16", "--arch", "80")
    files = source.source_of(plan)
    assert run("source", *arguments).stdout == "".join(f"// ---- {name} ----\n{text}\n" for name, text in files.items())
    assert next(iter(files)) == "fwd_v2.cu"
    for name, text in files.items():
        assert run("source", *arguments, "--file", name).stdout == text
    assert "ARCH = 80;" in files["config.cuh"] and "WIDTH = 192;" in files["config.cuh"]


def test_check_on_numpy_judges_every_quick_case():
    report, code = run_json("check", "--backend", "numpy", "--quick")
    assert code == 0
    assert report["failed"] == 0 and report["skipped"] == [] and report["passed"] == len(report["results"])
    assert {result["plan"] for result in report["results"]} == {"numpy"}
    judged = {(result["case"], result["computation"]) for result in report["results"]}
    assert judged == set(product(map(str, quick_cases()), ("forward v2", "backward v2")))


def test_check_on_the_host_says_what_it_skips():
    result = run("check", "--backend", "host", "--dim", 40)
    assert result.exit_code == 0, result.output
    assert "4 passed, 0 failed, 4 skipped (only backend 'numpy' computes float64) on backend host (sm_80)" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith(MASKED_CASE)]
    found = [(line.split()[1:3], line.split()[-4].split("-")[0], line.split()[-1]) for line in rows]
    kernels = {"forward v2": "fwd_v2", "forward v1": "fwd_v1", "backward v2": "bwd_v2", "backward v2 deterministic": "bwd_v2"}
    assert found == [(computed.split()[:2], kernel, "ok") for computed, kernel in kernels.items()]


def test_check_finds_a_kernel_that_does_not_mask(change_kernel):
    line = "s.at(l, s.reg(i, bit0 + bit)) = masked;"
    text = source.files()["tile/mask.cuh"]
    assert line in text
    change_kernel("tile/mask.cuh", text.replace(line, "{}"))
    result = run("check", "--backend", "host", "--arch", "80", "--dim", 40, "--algorithm", "v2")
    assert result.exit_code == 1
    assert "FAILS in row" in result.stdout and "0 passed, 3 failed" in result.stdout
    for direction in ("forward", "backward"):
        repeats = f"cupy-flash check --backend host --arch 80 --direction {direction} --algorithm v2 --case {MASKED_CASE}"
        assert f"\n  {repeats}\n" in result.stdout


def test_check_shows_the_compilers_log(change_kernel):
    change_kernel("tile/mask.cuh", "#error this is no mask")
    result = run("check", "--backend", "host", "--direction", "forward", "--algorithm", "v2", "--case", MASKED_CASE)
    assert result.exit_code == 1
    assert "CompileError" in result.stdout and "this is no mask" in result.stdout


def test_an_exception_is_the_result_of_its_case(monkeypatch):
    def refuse(*_, **__):
        raise ZeroDivisionError("no reason")

    monkeypatch.setattr(check, "plan_attention", refuse)
    report, code = run_json("check", "--backend", "numpy", "--case", MASKED_CASE)
    assert code == 1 and report["failed"] == len(report["results"]) == 2
    for result in report["results"]:
        assert result["error"] == "ZeroDivisionError: no reason" and result["comparison"] is None


@pytest.mark.gpu
def test_check_on_a_gpu():
    report, code = run_json("check", "--quick")
    assert code == 0 and report["backend"] == "cuda" and report["failed"] == 0
    computations = select_computations("cuda", architecture=architecture_named(report["architecture"]))
    assert {result["computation"] for result in report["results"]} == set(map(str, computations))
    assert not any("--full" in skip["reason"] for skip in report["skipped"])  # a GPU's compiler is fast enough for all of v1


def used_in_parts(row):
    return row.width <= MOST_DIMS["tf32"][0] and row.max_len_q != SHORT


def test_the_matrix_has_every_row():
    plans = list(every_plan())
    # A row may serve for two reasons, few queries and small copies say: that is one kernel.
    any_use = {"why": "", "max_len_q": None, "min_copy": 0, "in_order_from": None, "masks": MASKS}
    any_use |= {"plain_scores": False, "without_lengths": False, "without_sinks": False}
    rows = {
        (kernel, a.name, kind, replace(row, **any_use))
        for kernel, tables in KERNEL_TABLES.items()
        for a in ARCHITECTURES.values()
        for kind in KINDS
        if has(a, kind)
        for row in tables.get(a.name, {}).get("float32" if "32" in kind else "half", ())
    }
    of_pairs = [row for kind in ("float16", "bfloat16") for row in read_hopper.rows_for(ARCHITECTURES["90a"], kind)]
    kinds = [(a, kind) for a in ARCHITECTURES.values() for kind in KINDS if has(a, kind) and kind != "tf32"]
    alone = list(product(PLANNED_ALONE, kinds))
    shared = [row for row in rows if row[0] == "fwd_hopper"]  # a second time, with query tiles that blocks share
    zeros = [row for row in rows if row[0] in ("bwd_hopper", "bwd_hopper_wide", "bwd_hopper_mla")]  # with zeros by an idle warp
    ahead = [row for row in zeros if row[0] == "bwd_hopper" and not row[3].tma_reduce_dq]  # with statistics too, or these alone;
    whole = ahead  # and where blocks take whole heads
    in_order = 3 * ahead  # both a second time, in order, and where the first block to add stores
    queries = [kind for kernel, kind in alone if kernel == "append"]  # a second time, with queries beside keys
    first = zeros  # the same without statistics
    halves = filter(used_in_parts, KERNEL_TABLES["fwd_hopper"]["90a"]["half"])
    # float32 in one part or two, whole and shared; and what makes the parts
    of_parts = [{replace(row, **any_use, tma_store_out=False) for row in rows} for rows in (halves, ALL_ROWS)]
    of_parts = [row for rows in of_parts for row in rows]
    # gradients of one part or two, likewise with zeros by an idle warp, and where the first block to add stores
    gradients = [row for rows in GRADIENT_ROWS.values() for row in rows]
    every = (rows, shared, zeros, ahead, whole, first, in_order, alone, queries, of_pairs, 2 * of_parts, range(2), 3 * gradients)
    assert len(plans) == len({plan.name for plan in plans}) == sum(map(len, every))
    assert sum(plan.config.ROTATE_Q for plan in plans) == len(queries) > 0
    assert sum(plan.config.SPLIT_KV for plan in plans) == len(shared) + len(of_parts) > len(of_parts) > 0
    assert sum(plan.config.WHOLE_HEADS for plan in plans) == len(whole) > 0
    assert sum(plan.config.IN_ORDER for plan in plans) == len(in_order) > 0
    assert sum(plan.config.STATS_AHEAD for plan in plans) == 2 * len(ahead) + len(in_order)
    assert sum(plan.config.ZEROS_AHEAD for plan in plans) == len(zeros) + len(ahead) + len(gradients) > 2 * len(ahead)
    assert sum(plan.config.FIRST_STORES for plan in plans) == len(first) + len(ahead) + len(gradients)
    assert not any(p.architecture.number == 75 and (p.config.DTYPE == "BFLOAT16" or p.config.TF32_PASSES == 1) for p in plans)


def test_compile_reports_what_the_assembler_says(monkeypatch):
    pytest.importorskip("cupy")
    monkeypatch.setattr(compile, "every_plan", lambda *arguments: list(every_plan(*arguments))[:1])  # all take minutes
    report, code = run_json("compile", "--arch", "75", "--dtype", "float16", "--ptxas")
    [kernel] = report["kernels"]
    assert code == 0 and kernel["fault"] == "" and kernel["architecture"] == "75" and kernel["shared_bytes"] > 0
    assert f"Used {kernel['report']['registers']} registers" in kernel["log"] and "\0" not in kernel["log"]


@pytest.mark.parametrize(
    "report, fault",
    [
        (Report(200, 0, ()), ""),
        (Report(200, 0, ("warning: unused",)), ""),
        (Report(255, 8, ()), "spills registers"),
        (Report(200, 0, ("(C7510) Potential Performance Loss: wgmma",)), "serialises wgmma"),
        (CompileError("fwd_v2: no\nlog"), "does not compile"),
    ],
)
def test_compile_ends_with_1_on_a_fault(monkeypatch, report, fault):
    def reported(plan):
        if isinstance(report, Exception):
            raise report
        return report

    monkeypatch.setattr(nvrtc, "version", lambda: (12, 9))
    monkeypatch.setattr(nvrtc, "report", reported)
    result = run("compile", "--arch", "90a", "--arch", "80", "--dtype", "tf32", "--kernel", "fwd_v2", "--jobs", 1)
    assert result.exit_code == (1 if fault else 0)
    rows = sum(len(KERNEL_TABLES["fwd_v2"][arch]["float32"]) for arch in ("90a", "80"))
    assert f"{rows} kernels by NVRTC 12.9, {rows if fault else 0} with a fault" in result.stdout
    assert all(line.endswith(fault or "ok") for line in result.stdout.splitlines() if line.startswith("fwd_v2"))


def test_cache_clears_its_own_files_only(tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path / "kernels"))
    assert run("cache", "dir").stdout == f"{tmp_path / 'kernels'}\n"
    assert run_json("cache", "list") == ([], 0)
    cache.write(f"fwd_v2-sm_80-{'0' * 32}.cubin", b"code")
    [ours] = (tmp_path / "kernels").iterdir()
    (tmp_path / "kernels" / "libother.so").write_bytes(b"")
    [entry], _ = run_json("cache", "list")
    assert entry["name"] == ours.name and entry["bytes"] == ours.stat().st_size and entry["age_seconds"] < 60
    assert "1 file, 0 kB" in run("cache", "list").stdout
    assert "deleted 1 file from" in run("cache", "clear").stdout
    assert [file.name for file in (tmp_path / "kernels").iterdir()] == ["libother.so"]


def test_a_table_fits_its_width():
    rows = [("a-case-with-a-very-long-name", "7.0", "ok"), ("short", "10.0", "FAILED")]
    header, first, _ = table(("case", "error", "verdict"), rows, "<><")
    assert first == "a-case-with-a-very-long-name    7.0  ok" and header.index("error") == first.index("7.0") - 2
    narrow = table(("case", "error", "verdict"), rows, "<><", width=30)
    assert max(map(len, narrow)) <= 30
    assert "…" in narrow[1] and narrow[1].startswith("a-case") and narrow[2].startswith("short ")


def test_json_has_no_infinity(capsys):
    echo_json({"error": float("inf"), "row": (1, float("nan"))})
    assert json.loads(capsys.readouterr().out) == {"error": None, "row": [1, None]}
