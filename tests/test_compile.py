"""The sources as the GPU compiler takes them: every row of every tuning table, and errors that say where."""

import re
import runpy
import subprocess
from dataclasses import asdict, fields, make_dataclass, replace
from itertools import product
from pathlib import Path

import pytest

from cupy_flash import CompileError
from cupy_flash.machine import nvrtc, snapshot, source, toolchain
from cupy_flash.plan.architecture import ARCHITECTURES
from cupy_flash.plan.expression_text import NOTHING
from cupy_flash.plan.kernel import PARAMS, Config, KernelPlan, configure
from cupy_flash.plan.matrix import PLANNED_ALONE, every_plan
from cupy_flash.plan.tuning import HOPPER, SHORT, WIDTHS, row_for, table_for

SM_75, SM_80, SM_90A, SM_120 = (ARCHITECTURES[name] for name in ("75", "80", "90a", "120"))


def plans(*always, release=()):
    """Parametrises a test with plans, each known by its name; others are compiled before a release."""
    plans = [(plan, ()) for some in always for plan in some]
    plans += [(plan, pytest.mark.release) for some in release for plan in some]
    named = {plan.name: pytest.param(plan, marks=marks, id=plan.name) for plan, marks in reversed(plans)}
    return pytest.mark.parametrize("plan", list(reversed(named.values())))


# The tuning tables


MEASURED = SM_90A
SAVED = snapshot.Snapshot.parse(snapshot.path().read_text(encoding="utf-8"))


def each_table(kinds):
    """The plans of each table for the first and the last architecture that has it, and for the one whose figures it names."""
    for kernel, kind in product(PARAMS, kinds):
        owners = {}
        for architecture in ARCHITECTURES.values():
            owners.setdefault(table_for(kernel, architecture, kind), []).append(architecture)
        chosen = {a for of_table in owners.values() for a in of_table if a in (of_table[0], of_table[-1], MEASURED)}
        yield from every_plan([a for a in ARCHITECTURES.values() if a in chosen], [kind], [kernel])


def of_each_kernel(plans):
    """The first one."""
    yield from {plan.file: plan for plan in reversed(list(plans))}.values()


# float16 takes the instructions of bfloat16 with another suffix, and tf32 one product in three of float32's: of these, one
# architecture stands for all, and one for products of warpgroups. Where registers are short, tf32 has spilled and float32 not.
# (`cupy-flash compile` compiles everything, and `--check-snapshot` compares it.)
@plans(
    of_each_kernel(every_plan([SM_90A], ["bfloat16"])),
    release=(
        every_plan([SM_90A], ["bfloat16"]),
        every_plan([SM_80], ["float16", "float32"]),
        each_table(["bfloat16", "float32"]),
        every_plan([SM_75], ["float16"]),
        every_plan([SM_90A], ["float16"], ["bwd_hopper", "bwd_hopper_wide", "bwd_hopper_mla"]),
        every_plan([SM_80], ["tf32"]),
        (plan for plan in every_plan([SM_120], ["tf32"]) if plan.config.WIDTH == 256),
    ),
)
def test_row_compiles_without_spill_or_warning_to_the_code_of_the_snapshot(plan):
    report = nvrtc.report(plan)
    assert (report.spill_bytes, report.warnings) == (0, ())
    if nvrtc.build() == SAVED.compiler:  # another makes other code; `.ci/run` has this one
        assert snapshot.differences(SAVED.rows_for(plan), snapshot.rows_of(plan, report.code)) == []


def other_uses(architecture, dtypes):
    """Plans for what a table serves besides aligned memory and plain scores, at each width."""
    uses = product(("fwd_v2", "bwd_v2"), dtypes, WIDTHS, [(16, True), (0, False)])
    for kernel, dtype, width, (copy_bytes, explicit) in uses:
        row = row_for(kernel, architecture, dtype, width, SHORT + 1, copy_bytes, explicit)
        yield KernelPlan(kernel, architecture, configure(row, architecture, dtype, "ieee", width, width, copy_bytes, explicit), ())


def other_uses_of_hopper():
    """Plans of fwd_hopper for scores that are scaled one by one, and for values that are narrower or wider than keys."""
    widths = [(row.width, row.width_v or row.width, True) for row in HOPPER]
    for width, width_v, explicit in dict.fromkeys([*widths, (64, 128, False), (128, 64, False), (192, 64, False)]):
        row = row_for("fwd_hopper", SM_90A, "bfloat16", max(width, width_v), SHORT + 1, explicit=explicit, width_v=width_v)
        config = configure(row, SM_90A, "bfloat16", "ieee", width, width_v, explicit=explicit)
        yield KernelPlan("fwd_hopper", SM_90A, config, ())


def other_uses_of_hopper_backward():
    """Plans of the backwards for one architecture: scores that are scaled one by one, and once each, copies of single elements."""
    for kernel in ("bwd_hopper", "bwd_hopper_wide"):
        rows = table_for(kernel, SM_90A, "bfloat16")
        for row, copy_bytes, explicit in [(rows[-1], 0, False), *((row, 16, True) for row in rows if not row.plain_scores)]:
            config = configure(row, SM_90A, "bfloat16", "ieee", row.width, row.width, copy_bytes, explicit)
            yield KernelPlan(kernel, SM_90A, config, ())


def heads_together():
    """Plans for tiles with rows of several heads: of fwd_v2 what serves few queries, of fwd_hopper everything."""
    for architecture, width in product((SM_75, SM_80, SM_90A), WIDTHS):
        row = row_for("fwd_v2", architecture, "float16", width, SHORT)
        yield KernelPlan("fwd_v2", architecture, configure(row, architecture, "float16", "ieee", width, width, pack_gqa=True), ())
    for plan in every_plan([SM_90A], ["bfloat16"], ["fwd_hopper"]):
        yield replace(plan, config=replace(plan.config, PACK_GQA=True))


def prefixes(architecture, kinds):
    """Plans for masks with a prefix."""
    for plan in every_plan([architecture], kinds):
        if plan.file not in PLANNED_ALONE:
            yield replace(plan, config=replace(plan.config, MASK="PREFIX"))


def sinks(architecture, dtypes):
    """Plans for softmaxes with sinks: a tile of each row of each table."""
    for kernel, dtype in product(PARAMS, dtypes):
        for row in table_for(kernel, architecture, dtype):
            if not row.without_sinks:
                widths = row.width, row.width_v or row.width
                config = configure(row, architecture, dtype, "ieee", *widths, sinks="SINKS_OF_DTYPE")
                yield KernelPlan(kernel, architecture, config, ())


def smaller_copies():
    """Plans of the kernels that move rows, for rows that cannot be moved 16 bytes at a time."""
    for plan in every_plan([SM_75, SM_80, SM_90A, SM_120], ["float16", "float32"], ["rotate", "append"]):
        for copy_bytes in (8, 4, 0):
            yield replace(plan, config=replace(plan.config, COPY_BYTES=copy_bytes))


def softcaps_where_registers_are_short():
    """Plans of fwd_v2 for scores that are scaled one by one, where the row for plain ones would spill, and of bwd_v2 in order."""
    for architecture, width in product((SM_80, ARCHITECTURES["86"], SM_120), (32, 64, 96)):
        row = row_for("fwd_v2", architecture, "bfloat16", width, SHORT + 1, explicit=True)
        yield KernelPlan("fwd_v2", architecture, configure(row, architecture, "bfloat16", "ieee", width, width, explicit=True), ())
    row = row_for("bwd_v2", SM_90A, "bfloat16", 64, 10_000, explicit=True, in_order=True)
    yield KernelPlan("bwd_v2", SM_90A, configure(row, SM_90A, "bfloat16", "ieee", 64, 64, explicit=True), ())


@plans(
    list(softcaps_where_registers_are_short())[::8],
    list(smaller_copies())[::25],
    release=(
        softcaps_where_registers_are_short(),
        smaller_copies(),
        other_uses_of_hopper(),
        other_uses(SM_90A, ["bfloat16", "float32"]),
        other_uses_of_hopper_backward(),
        heads_together(),
        prefixes(SM_90A, ["bfloat16", "float32"]),
        prefixes(SM_80, ["bfloat16"]),
        sinks(SM_90A, ["bfloat16", "float32"]),
        sinks(SM_80, ["bfloat16"]),
    ),
)
def test_other_use_compiles_without_spill(plan):
    report = nvrtc.report(plan)
    assert report.spill_bytes == 0 and not any("C75" in warning for warning in report.warnings)


def test_rows_fit_shared_memory():
    assert [plan.name for plan in every_plan() if plan.shared_bytes > plan.architecture.shared_bytes] == []


FORWARD_CHANGES = ({}, {"DTYPE": "FLOAT32"}, {"WIDTH": 96, "WIDTH_V": 32}, {"WIDTH": 32, "WIDTH_V": 96})
BACKWARD_CHANGES = ({}, {"DTYPE": "FLOAT32"}, {"STAGES": 1}, {"WIDTH": 128, "WIDTH_V": 128}, {"TILE_Q": 128, "TILE_KV": 64})
OF_128 = {"WIDTH": 128, "WIDTH_V": 128, "DIM": 96, "DIM_V": 96}
STAGED = OF_128 | {"TILE_Q": 80, "TMA_REDUCE_DQ": True}
HOPPER_BACKWARD_CHANGES = ({}, STAGED, {"TILE_Q": 64}, OF_128 | {"TILE_Q": 64}, {"TILE_Q": 128, "STAGES": 1})
OUT_STAYS = {"TMA_STORE_OUT": False}
HOPPER_WIDTHS = ({"DIM_V": 32}, {"WIDTH_V": 128, "DIM_V": 112} | OUT_STAYS)
HOPPER_CHANGES = ({}, {"STAGES_Q": 5} | OUT_STAYS, {"STAGES": 4, "STAGES_V": 1}, *HOPPER_WIDTHS)


@pytest.mark.parametrize(
    "kernel, change",
    [
        *product(["fwd_v2"], (*FORWARD_CHANGES, {"STAGES": 3})),
        *product(["fwd_v1"], FORWARD_CHANGES),
        *product(["fwd_hopper"], (*HOPPER_CHANGES, {"SPLIT_KV": True})),
        *product(["bwd_v2"], BACKWARD_CHANGES),
        *product(["bwd_hopper"], HOPPER_BACKWARD_CHANGES),
        *product(["bwd_hopper_wide"], ({}, {"WIDTH": 256, "WIDTH_V": 256, "DIM": 224, "DIM_V": 224})),
        *product(["bwd_hopper_mla"], ({}, {"ZEROS_AHEAD": True}, {"VARLEN": True})),
    ],
    ids=str,
)
@pytest.mark.release  # whatever is compiled asserts it as well
def test_plan_and_kernel_agree_on_shared_memory(kernel, change, tmp_path):
    plan = next(every_plan([SM_80, SM_90A], ["float16"], [kernel]))
    plan = replace(plan, config=replace(plan.config, **change))
    for name, text in source.source_of(plan).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert source.assertions(plan).count("static_assert") == 1 + sum(size > 0 for size in plan.entries.values())
    flags = ("-std=c++17", "-w", "-fsyntax-only", f"-I{tmp_path}", "-x", "c++")
    command = [*toolchain.compiler(), *flags, tmp_path / f"{plan.file}.cu"]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


def test_every_entry_is_a_kernel_of_its_file():
    for plan in every_plan([SM_80, SM_90A], ["float16"]):
        changes = [{}]
        if plan.file in ("fwd_v2", "fwd_hopper"):  # keys that are whole are not merged, and only lengths have a schedule
            changes = [{"VARLEN": True, "SPLIT_KV": False}, {"VARLEN": False, "SPLIT_KV": True}]
        if plan.file.startswith("bwd"):  # nor is there one of sinks without these
            changes = [{"SINKS": "SINKS_FLOAT32"}]
        plans = [replace(plan, config=replace(plan.config, **change)) for change in changes]
        if plan.file == "bwd_scores_hopper":  # and of a bias alone nothing is gathered
            plans.append(replace(plan, expressions=NOTHING))
        text = source.files()[f"{plan.file}.cu"]
        found = re.findall(r"^KERNEL\(.*?\) (?:IN_CLUSTERS )?(\w+)\(GRID_CONSTANT (\w+) p\)", text, re.MULTILINE)
        told = "WorkParams" if plan.file == "fwd_hopper" else plan.params  # one of two
        assert {(entry, told) for some in plans for entry in some.entries} == set(found)
        for some in plans:  # in the order of the file
            assert list(some.entries) == [name for name, _ in found if name in some.entries]


# The constants

CONSTANT = re.compile(r"(constexpr +\w+ +)(\w+)( = )(\w+)(; *)")


def test_every_field_of_config_is_a_constant_of_the_kernels():
    assert {match[1] for match in CONSTANT.findall(source.files()["config.cuh"])} == {field.name for field in fields(Config)}


@pytest.mark.parametrize(
    "kernel, change, why",
    [
        ("bwd_hopper", OF_128 | {"TILE_Q": 80}, "no row of dQ is left over"),
        ("bwd_hopper_wide", {"TMA_REDUCE_DQ": True}, "no room for dQ"),
    ],
)
def test_sums_are_staged_where_they_must_be_and_can_be(kernel, change, why):
    plan = next(every_plan([SM_90A], ["float16"], [kernel]))
    with pytest.raises(CompileError, match=why):
        nvrtc.compile_plan(replace(plan, config=replace(plan.config, **change)))


@plans(every_plan([SM_75]), every_plan([SM_90A], ["bfloat16"], ["fwd_hopper", "bwd_hopper", "bwd_hopper_wide", "bwd_hopper_mla"]))
def test_config_text_has_the_values_of_the_plan(plan):
    spelled = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in asdict(plan.config).items()}
    assert {match[1]: match[3] for match in CONSTANT.findall(source.config_text(plan.config))} == spelled


def test_config_text_keeps_everything_but_values():
    plan = next(every_plan([SM_80], ["float32"]))
    default, text = source.files()["config.cuh"], source.config_text(plan.config)
    assert CONSTANT.sub(r"\1\2\3;", text) == CONSTANT.sub(r"\1\2\3;", default)
    assert [line.find("//") for line in text.splitlines()] == [line.find("//") for line in default.splitlines()]


def test_constant_that_config_cuh_lacks_is_refused():
    wider = make_dataclass("Wider", ["TILE_Z"], bases=(Config,), frozen=True)
    config = wider(**asdict(next(every_plan()).config), TILE_Z=1)
    with pytest.raises(ValueError, match="TILE_Z"):
        source.config_text(config)


# What the compiler says


@pytest.mark.parametrize("file", ["fwd_v2.cu", "params.cuh", "tile/mask.cuh"])
def test_error_names_file_and_line(file, monkeypatch):
    text = source.files()[file] + "\nnonsense here;\n"
    monkeypatch.setattr(nvrtc, "source_of", lambda plan: source.source_of(plan) | {file: text})
    with pytest.raises(CompileError, match=rf"{file}\({text.count(chr(10))}\): error"):
        nvrtc.compile_plan(next(every_plan([SM_80])))


def test_report_reads_spills_and_serialised_products(monkeypatch):
    log = (  # of a file with two entries
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )
    monkeypatch.setattr(nvrtc, "compile_plan", lambda plan, options: (b"", log))
    report = nvrtc.report(next(every_plan()))
    assert (report.registers, report.spill_bytes, report.warnings) == (255, 20, (log.splitlines()[0],))


@pytest.mark.parametrize("version, may_be_kept", [((12, 8), False), ((12, 9), True), ((13, 0), True)], ids=str)
def test_a_report_is_not_of_what_nvrtc_has_kept(version, may_be_kept, monkeypatch):
    """Where there is a driver it keeps what it compiles, without a log; older ones know no such option."""
    asked = []
    monkeypatch.setattr(nvrtc, "version", lambda: version)
    monkeypatch.setattr(nvrtc, "compile_plan", lambda plan, options: asked.extend(options) or (b"", "Used 9 registers"))
    nvrtc.report(next(every_plan()))
    assert ("--no-cache" in asked) is may_be_kept


def with_a_schedule(plan):
    """Which sequences of their own lengths have, by an entry before the kernel's own."""
    return replace(plan, config=replace(plan.config, VARLEN=True, SPLIT_KV=False))


@plans(
    [make(next(every_plan([SM_80], ["float16"], ["fwd_v2"]))) for make in (replace, with_a_schedule)],
    release=(every_plan([SM_80], ["float16"], ["bwd_v2"]),),
)
def test_entries_of_a_file_are_compiled_at_the_same_time(plan):
    assert (nvrtc.SEVERAL_ENTRIES[0] in nvrtc.options_for(plan)) is (len(plan.entries) > 1)
    assert {entry for entry in plan.entries if f"entry function '{entry}'" in nvrtc.report(plan).log} == set(plan.entries)


def test_every_kernel_is_watched():
    """What a kernel has written that a tool did not watch, it takes for memory that nobody has."""
    watched = runpy.run_path(str(Path(__file__).parent / "gpu" / "test_sanitizer.py"))["KERNELS"]
    kernel = re.compile(r"^KERNEL\([^)]*\) (?:IN_CLUSTERS )?(\w+)\(", re.MULTILINE)
    entries = [entry for text in source.files().values() for entry in kernel.findall(text)]
    assert len(entries) > 20 and [entry for entry in entries if not any(name in entry for name in watched)] == []


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.release)])
@pytest.mark.parametrize(
    "name, file, kernel",
    (
        ("EACH_LANE_ARRIVES", "tile/pipeline.cuh", "fwd_hopper"),
        ("OWN_BY_LANES", "tile/cluster.cuh", "bwd_hopper"),
        ("NO_BARRIER", "bwd_v2.cu", "bwd_v2"),
    ),
)
def test_the_texts_for_compute_sanitizer_are_still_there_and_compile(name, file, kernel, compiles, monkeypatch):
    """GPU tests change a line of the kernels for a tool; where there is no GPU, it is known that the line exists."""
    text = runpy.run_path(str(Path(__file__).parent / "gpu" / "test_sanitizer.py"))[name]
    monkeypatch.setattr(source, "files", source.files)  # to be put back
    before = source.files()[file]
    exec(text, {})
    assert source.files()[file] != before
    assert not compiles or not nvrtc.report(next(every_plan([SM_90A], ["float16"], [kernel]))).fault
