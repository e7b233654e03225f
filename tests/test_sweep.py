"""`bench --sweep` without a GPU: which tiles a cell has, what follows from their times, and what the command writes."""

import json
import math
from dataclasses import dataclass, replace

import pytest
from click.testing import CliRunner

from cupy_flash import UnsupportedError
from cupy_flash.cli import bench as command
from cupy_flash.cli import main
from cupy_flash.cli import sweep as output
from cupy_flash.errors import CompileError
from cupy_flash.machine import nvrtc
from cupy_flash.machine.nvrtc import Report
from cupy_flash.measure import sweep
from cupy_flash.measure.bench import Measurement, Run, Verdict
from cupy_flash.measure.cells import Cell
from cupy_flash.measure.sweep import Swept, candidates, fault_of
from cupy_flash.plan import tuning
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.columns import padded
from cupy_flash.plan.fp16_parts import ALL_ROWS, MOST_DIMS
from cupy_flash.plan.tuning import HOPPER_CANDIDATES, TileConfig, candidates_for, table_for

SM_90A = ARCHITECTURES["90a"]
TWO = {"warps": 12, "stages_q": 4, "min_blocks": 1}
TABLE = (
    TileConfig(64, 64, 64, "few", warps=8, min_blocks=1, max_len_q=1024),
    TileConfig(64, 128, 96, "causal", **TWO, masks=("causal",)),
    TileConfig(128, 128, 96, "dense", warps=12, min_blocks=1),
)
MORE = (
    TileConfig(64, 128, 128, "more", **TWO),
    TileConfig(128, 128, 32, "more", **TWO),
    TileConfig(128, 128, 256, "too much", **TWO, stages=5),
)


def cell_of(dim=64, seq=1000, causal=False, dtype="bfloat16"):
    return Cell("forward", dtype, dim, causal, seq, 2, 3)


# The candidates


@pytest.mark.parametrize("arch, kernel", [("75", "fwd_v2"), ("80", "fwd_v2"), ("90a", "fwd_v2"), ("90a", "fwd_hopper")])
@pytest.mark.parametrize("dim", [20, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_candidates_are_all_tiles_that_fit(arch, kernel, dim, dtype):
    if kernel == "fwd_hopper" and (dim > MOST_DIMS["ieee"][1] if dtype == "float32" else dim * 2 % 16):
        with pytest.raises(UnsupportedError, match="kernel: "):
            candidates(cell_of(dim, dtype=dtype), ARCHITECTURES[arch], kernel)
        return
    found = candidates(cell_of(dim, dtype=dtype), ARCHITECTURES[arch], kernel)
    assert len({c.name for c in found}) == len({c.plan for c in found}) == len(found)
    assert sum(c.chosen for c in found) == 1
    assert all(c.plan.file == kernel and c.plan.shared_bytes <= ARCHITECTURES[arch].shared_bytes for c in found)
    # Whatever serves a wider head serves a narrower one: its tile takes less memory there.
    knobs = ("tile_q", "tile_kv", "warps", "stages", "stages_v", "stages_q", "tma_store_out", "pingpong")
    knobs += ("min_blocks", "q_in_registers", "lazy_rescale")
    table = ALL_ROWS if (kernel, dtype) == ("fwd_hopper", "float32") else table_for(kernel, ARCHITECTURES[arch], dtype)
    rows = [row for row in table if row.serves(padded(dim), padded(dim))]
    there = [tuple(getattr(c.plan.config, knob.upper()) for knob in knobs) for c in found]
    assert rows and {tuple(getattr(row, knob) for knob in knobs) for row in rows} <= set(there)


def test_what_the_table_has_not_is_measured_besides():
    assert candidates_for("fwd_hopper", SM_90A, "bfloat16")[-len(HOPPER_CANDIDATES) :] == HOPPER_CANDIDATES
    assert candidates_for("fwd_hopper", SM_90A, "float32") == ()
    assert candidates_for("fwd_v2", SM_90A, "float32") == table_for("fwd_v2", SM_90A, "float32")
    known = {replace(row, why="") for row in table_for("fwd_hopper", SM_90A, "bfloat16")}
    for row in HOPPER_CANDIDATES:
        assert row.tile_q == 64 * (row.warps // 4 - 1) and row.tile_kv % 16 == 0 and row.tile_kv <= 256
        assert replace(row, why="") not in known
        names = {c.name.split()[0] for c in candidates(cell_of(row.width), SM_90A)}
        assert f"{row.tile_q}x{row.tile_kv}" in names  # it fits at its own width


@pytest.fixture
def small_table(monkeypatch):
    monkeypatch.setitem(tuning.KERNEL_TABLES, "fwd_hopper", {"90a": {"half": TABLE}})
    monkeypatch.setitem(tuning.CANDIDATE_TABLES, "fwd_hopper", {"90a": {"half": MORE}})


@pytest.mark.parametrize(
    "cell, chosen",
    [
        (cell_of(), "64x64"),
        (cell_of(seq=2000), "128x96 STAGES_Q=2"),
        (cell_of(seq=2000, causal=True), "128x96 STAGES_Q=4"),
    ],
    ids=str,
)
def test_conditions_decide_what_is_chosen_and_not_what_is_there(small_table, cell, chosen):
    found = candidates(cell, SM_90A)
    assert [c.name for c in found] == ["64x64", "128x96 STAGES_Q=4", "128x96 STAGES_Q=2", "128x128", "128x32"]
    assert [c.name for c in found if c.chosen] == [chosen]


def test_narrow_tiles_do_not_serve_wide_heads(small_table):
    assert [c.name for c in candidates(cell_of(96), SM_90A)] == ["128x96", "128x32"]


def test_the_kernel_is_the_planners_or_the_one_asked_for():
    for kernel, found in ((None, "fwd_hopper"), ("fwd_hopper", "fwd_hopper"), ("fwd_v2", "fwd_v2")):
        assert {c.plan.file for c in candidates(cell_of(), SM_90A, kernel)} == {found}
    assert {c.plan.file for c in candidates(cell_of(dtype="float32"), SM_90A)} == {"fwd_hopper"}
    assert {c.plan.file for c in candidates(cell_of(256, dtype="float32"), SM_90A)} == {"fwd_v2"}


@pytest.mark.parametrize(
    "report, fault",
    [
        (Report(200, 0, ("warning: unused",)), ""),
        (Report(255, 8, ()), "spills registers"),
        (Report(200, 0, ("(C7510) Potential Performance Loss: wgmma",)), "serialises wgmma"),
        (CompileError("fwd_hopper: no"), "does not compile"),
    ],
)
def test_what_the_compiler_spoils(monkeypatch, report, fault):
    def reported(plan):
        if isinstance(report, Exception):
            raise report
        return report

    built = []
    monkeypatch.setattr(nvrtc, "report", reported)
    monkeypatch.setattr(nvrtc, "cubin", built.append)
    [plan, *_] = [c.plan for c in candidates(cell_of(), SM_90A)]
    assert fault_of(plan) == fault and built == ([] if fault else [plan])


# What follows


def swept(chosen="a", spread=0.0, **seconds):
    measurements = (Measurement(name, s, s * (1 - spread / 2), s * (1 + spread / 2), 9) for name, s in seconds.items())
    return Swept(cell_of(), tuple(measurements), chosen=chosen)


def test_the_fastest_beside_the_choice():
    found = swept(a=1.1, b=1.0, c=2.0)
    assert found.fastest.contender == "b" and math.isclose(found.ratio, 1.1) and found.spread == 0 and found.beaten
    assert swept("b", a=1.1, b=1.0).ratio == 1 and not swept("b", a=1.1, b=1.0).beaten


@pytest.mark.parametrize("spread, beaten", [(0.04, True), (0.06, False)])
def test_a_choice_is_beaten_by_more_than_the_spread(spread, beaten):
    found = swept(a=1.05, b=1.0, spread=spread)
    assert math.isclose(found.spread, spread) and found.beaten is beaten


def test_the_spread_is_of_the_two_compared():
    wide = Measurement("c", 2.0, 1.0, 3.0, 9)
    found = swept(a=1.05, b=1.0, spread=0.01)
    found = replace(found, measurements=(*found.measurements, wide))
    assert math.isclose(found.spread, 0.01) and found.beaten


@pytest.mark.parametrize("found", [swept(b=1.0), swept()], ids=["without the choice", "without any"])
def test_nothing_is_compared_with_a_choice_that_was_not_measured(found):
    assert found.ratio is None and found.spread is None and not found.beaten


# The command


@dataclass
class FakeBench:
    """A machine on which a launch of a tile takes a time that is known, with a spread of 2 %."""

    seconds: dict
    wrong: tuple = ()
    device = "a fake"
    versions = {"cupy": "0"}  # noqa: RUF012
    architecture = SM_90A

    def make_inputs(self, cell):
        return ()

    def judge(self, cell, inputs, results):
        return Verdict(results[0] not in self.wrong, "off by 1" if results[0] in self.wrong else "")

    def time(self, run, launches):
        return [self.seconds[run.launch()] * (0.99, 1.0, 1.01)[i % 3] for i in range(launches)]

    def matmul_rate(self, dtype):
        return 1e15

    def clear(self):
        pass


@pytest.fixture
def fake(monkeypatch, small_table):
    """Times by tile and slots of Q. The compiler spoils one tile."""
    bench = FakeBench({(64, 4): 1.05e-3, (64, 2): 1.2e-3, (96, 4): 1e-3, (96, 2): 1.1e-3, (128, 4): 2e-3})

    def ready(plan, cell, inputs):
        return Run(lambda: (plan.config.TILE_KV, plan.config.STAGES_Q), lambda result: (result,))

    monkeypatch.setattr(command, "machine_of", lambda: bench)
    monkeypatch.setattr(sweep, "planned_run", ready)
    monkeypatch.setattr(output, "fault_of", lambda plan: "spills registers" if plan.config.TILE_KV == 32 else "")
    return bench


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


CELLS = ("forward", "--sweep", "--dim", 64, "--dtype", "bfloat16", "--mask", "full,causal", "--seq", "1024,4096")


def test_the_command_prints_rates_choices_and_where_they_are_beaten(fake):
    result = run(*CELLS)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    full = lines.index("fwd_hopper, bfloat16, dim 64, full: TFLOP/s by sequence length, * behind the table's choice")
    rate = 4 * 64 * 1024**2 * 32 * 16 / 1e12
    assert [line.split() for line in lines[full + 2 : full + 8]] == [
        ["tile", "1024", "4096"],
        ["64x64", f"{rate / 1.2e-3:.0f}*", f"{rate * 4 / 1.2e-3:.0f}"],
        ["128x96", "STAGES_Q=4", f"{rate / 1e-3:.0f}", f"{rate * 4 / 1e-3:.0f}"],
        ["128x96", "STAGES_Q=2", f"{rate / 1.1e-3:.0f}", f"{rate * 4 / 1.1e-3:.0f}*"],
        ["128x128", f"{rate / 2e-3:.1f}", f"{rate * 4 / 2e-3:.0f}"],
        ["128x32", "spills", "registers"],
    ]
    [row] = [line.split() for line in lines if line.split()[:4] == ["bfloat16", "64", "full", "1024"]]
    assert row[4:] == ["64x64", f"{rate / 1.2e-3:.0f}", "128x96", "STAGES_Q=4", f"{rate / 1e-3:.0f}", "1.200", "2.0%"]
    beaten = lines.index("the table's choice is beaten by more than the spread in 3 of 4 cells")
    assert lines[beaten + 1 :] == [
        "forward bfloat16 16x32x1024x64 full: 128x96 STAGES_Q=4 is 1.200 times as fast as 64x64, spread 2.0%",
        "forward bfloat16 4x32x4096x64 full: 128x96 STAGES_Q=4 is 1.100 times as fast as 128x96 STAGES_Q=2, spread 2.0%",
        "forward bfloat16 16x32x1024x64 causal: 128x96 STAGES_Q=4 is 1.200 times as fast as 64x64, spread 2.0%",
    ]


def test_the_command_writes_json(fake, tmp_path):
    path = tmp_path / "found.json"
    assert run(*CELLS, "--json", path).exit_code == 0
    report = json.loads(path.read_text())
    assert report["contenders"] == report["comparisons"] == [] and len(report["cells"]) == 4
    cell = report["cells"][0]
    assert [m["contender"] for m in cell["measurements"]] == ["64x64", "128x96 STAGES_Q=4", "128x96 STAGES_Q=2", "128x128"]
    assert (cell["kernel"], cell["chosen"], cell["fastest"]) == ("fwd_hopper", "64x64", "128x96 STAGES_Q=4") and cell["beaten"]
    assert math.isclose(cell["ratio"], 1.2) and math.isclose(cell["spread"], 0.02)
    assert cell["faults"] == {"128x32": "spills registers"} and cell["failures"] == []
    assert [cell["chosen"] for cell in report["cells"]] == ["64x64", "128x96 STAGES_Q=2", "64x64", "128x96 STAGES_Q=4"]


def test_a_wrong_tile_ends_the_command_with_1_and_a_spoilt_one_does_not(fake):
    fake.wrong = ((96, 4),)
    result = run(*CELLS)
    assert result.exit_code == 1 and "128x96 STAGES_Q=4: failed in 4 cells: ArithmeticError: off by 1" in result.stdout
    assert "beaten by more than the spread in 2 of 4 cells" in result.stdout  # by the second fastest


def test_a_choice_that_was_not_measured_is_named_without_a_rate(fake):
    fake.wrong = ((64, 2),)
    result = run(*CELLS[:-2], "--seq", 1024)
    [row] = [line.split() for line in result.stdout.splitlines() if line.split()[:4] == ["bfloat16", "64", "full", "1024"]]
    assert result.exit_code == 1 and row[4:7] == ["64x64", "128x96", "STAGES_Q=4"] and len(row) == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--sweep",), "--sweep: expected the direction forward, as in bench forward --sweep, got both"),
        (("backward", "--sweep"), "--sweep: expected the direction forward, as in bench forward --sweep, got backward"),
        (("forward", "--sweep", "--peers", "none"), "--sweep and --peers exclude each other"),
        (("forward", "--sweep", "--algorithm", "v2"), "--sweep and --algorithm exclude each other"),
        (("forward", "--sweep", "--deterministic"), "--sweep and --deterministic exclude each other"),
        (("forward", "--sweep", "--plot", "found.png"), "--sweep and --plot exclude each other"),
        (("forward", "--sweep", "--kernel", "fwd_v2,fwd_hopper"), "--sweep: expected one --kernel at most, got fwd_v2, fwd_hopper"),
        (("forward", "--sweep", "--dim", 257), "--sweep: "),
        (
            ("forward", "--sweep", "--kernel", "fwd_hopper", "--dtype", "float32", "--dim", 256),
            "--sweep: kernel: expected fwd_v1 or fwd_v2 for float32 on sm_90a, got 'fwd_hopper': head dims above 192",
        ),
    ],
)
def test_user_errors_end_with_2(fake, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [(), ("--kernel", "fwd_v2")], ids=["the planner's", "fwd_v2"])
def test_a_sweep_on_a_gpu(tmp_path, kernel):
    path = tmp_path / "found.json"
    effort = ("--rounds", 2, "--seconds", 0.01, "--json", path)
    result = run("forward", "--sweep", "--seq", 1000, "--dim", 128, "--dtype", "float16", *kernel, *effort)
    assert result.exit_code == 0, result.output
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 2
    for cell in cells:
        seconds = {m["contender"]: m["seconds"] for m in cell["measurements"]}
        assert len(seconds) > 1 and cell["failures"] == [] and cell["fastest"] == min(seconds, key=seconds.get)
        assert cell["ratio"] == seconds[cell["chosen"]] / seconds[cell["fastest"]]
