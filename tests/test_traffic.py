"""What `traffic` counts: the textbook passes by hand, the kernels by their tiles, and what the papers' formulas say of both."""

import doctest
import json
from itertools import pairwise

import numpy
import pytest
from click.testing import CliRunner
from thinned import thinned

from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.cli import main
from cupy_flash.judge.compare import compare
from cupy_flash.measure import traffic
from cupy_flash.measure.traffic import ALGORITHMS, NAIVE, Setting, count, count_kernel, count_naive, make_inputs

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}


def run(*arguments):
    return CliRunner().invoke(main, ["traffic", *map(str, arguments)])


def run_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def is_right(out, setting):
    scores = {"scale": setting.dim**-0.5, "last_key": 0 if setting.causal else None}
    return compare(out, None, *make_inputs(setting), **scores)


# The textbook formula


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_passes_compute_attention(causal):
    setting = Setting(75, dim=24, batch=2, heads=3, dtype="float32", causal=causal)
    out, _ = count_naive(setting)
    assert is_right(out, setting).ok


@pytest.mark.parametrize("dtype, itemsize", ITEMSIZE.items())
def test_the_passes_move_what_a_hand_counts(dtype, itemsize):
    n, d, stacks = 48, 16, 2 * 3
    _, found = count_naive(Setting(n, dim=d, batch=2, heads=3, dtype=dtype))
    square, rows, column = n * n, n * d, n
    # Scores are written four times: products, masked, exponentials, probabilities; and read for each of the six passes behind.
    assert found.written_bytes == stacks * itemsize * (4 * square + 2 * column + rows)
    assert found.read_bytes == stacks * itemsize * (6 * square + 2 * column + 3 * rows)
    assert found.flops == stacks * 4 * square * d
    assert found.memory_bytes == stacks * itemsize * (2 * square + column)
    assert len(NAIVE) == 7


def test_a_causal_mask_saves_the_textbook_formula_nothing():
    full, causal = (count_naive(Setting(64, causal=causal))[1] for causal in (False, True))
    assert (full.read_bytes, full.written_bytes, full.flops) == (causal.read_bytes, causal.written_bytes, causal.flops)


# The kernels


@pytest.mark.parametrize("algorithm", ["v1", "v2"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kernels_that_are_counted_compute_attention(algorithm, causal):
    setting = Setting(150, batch=2, heads=1, dtype="float32", causal=causal)
    out, _ = count_kernel(setting, algorithm)
    assert is_right(out, setting).ok


@pytest.mark.parametrize("seq, arch", [(256, "80"), (512, "80"), (256, "75")])
def test_v2_reads_all_keys_for_each_tile_of_queries(seq, arch):
    setting = Setting(seq, heads=2)
    inputs = make_inputs(setting)
    plan = plan_attention(*inputs, backend="host", return_lse=True, arch=arch)
    found = count(setting, "v2", arch)
    tiles, array = -(-seq // plan.kernel.config.TILE_Q), inputs[0].nbytes
    assert found.read_bytes == array + tiles * 2 * array
    assert found.written_bytes == array + seq * 2 * 4  # the result, and the log-sum-exp in float32
    assert found.flops == 4 * seq**2 * 64 * 2
    assert found.memory_bytes == found.written_bytes
    assert found.chip_elements == plan.kernel.shared_bytes // 2


def test_v1_keeps_a_state_in_device_memory():
    setting = Setting(256)
    inputs = make_inputs(setting)
    plan = plan_attention(*inputs, algorithm="v1", backend="host", return_lse=True)
    found = count(setting, "v1")
    assert found.memory_bytes == plan.result_bytes + plan.workspace_bytes and plan.workspace_bytes >= 256 * 64 * 4
    # For each tile of keys but the first, the state of each row is read again.
    keys = -(-256 // plan.kernel.config.TILE_KV)
    assert found.read_bytes >= (keys - 1) * 256 * 64 * 4 and found.read_bytes > count(setting, "v2").read_bytes


def test_kernels_skip_what_a_causal_mask_hides():
    for algorithm in ("v1", "v2"):
        full, causal = (count(Setting(512, causal=causal), algorithm) for causal in (False, True))
        assert causal.flops < 0.7 * full.flops and causal.moved_bytes < 0.8 * full.moved_bytes


# The formulas


def test_the_formulas_hold_up_to_a_constant_that_settles():
    found = {name: [count(Setting(n), name) for n in (128, 256, 512, 1024)] for name in ALGORITHMS}
    for counts in found.values():
        steps = [abs(b.constant - a.constant) for a, b in pairwise(counts)]
        # What is left falls like 1 / (N + d), whose steps shrink to 2 / 3 at N = 2 d and to a half in the end.
        assert all(later < 0.7 * earlier for earlier, later in pairwise(steps)), steps
    # The textbook formula reads scores six times and writes them four times.
    assert 9.5 < found["naive"][-1].constant < 10
    # v2 reads K and V once for each tile of queries, 2 N^2 d / TILE_Q elements: 2 M / (TILE_Q d) times the formula. Besides, it
    # reads Q and writes the result, N / TILE_Q times less, and the log-sum-exp, which is d times less than those.
    last, plan = found["v2"][-1], plan_attention(*make_inputs(Setting(1024)), backend="host")
    tile = plan.kernel.config.TILE_Q
    assert last.constant == pytest.approx(2 * last.chip_elements / (tile * 64) * (1 + tile / 1024), rel=1 / 64)
    # So the ratio of the two grows with N.
    ratios = [naive.moved_bytes / v2.moved_bytes for naive, v2 in zip(found["naive"], found["v2"])]
    assert all(1 < a < b for a, b in pairwise(ratios))


@pytest.mark.release
@pytest.mark.parametrize("arch", thinned(["90a", "80"]))
def test_documents_cost_their_share(arch):
    """Four of equal length, which are whole tiles of both kernels: each tile of queries reads the keys and values of its own."""
    setting, length = Setting(3072, documents=4), 768
    assert setting.pairs == 4 * length**2 and setting.algorithms == ("naive", "v2")
    out, found = count_kernel(setting, "v2", arch)
    q, k, v = make_inputs(setting)
    asked = {"mask": "d[q_idx] == d[kv_idx]", "arrays": {"d": setting.document}}
    tile = plan_attention(q, k, v, backend="host", arch=arch, **asked).kernel.config.TILE_Q
    assert length % tile == 0
    share = q.nbytes + 3072 // tile * 2 * length * 64 * 2
    assert share <= found.read_bytes <= 1.01 * share
    assert 1 <= found.flops / (4 * 64 * setting.pairs) <= 1.02  # each block of fwd_hopper drops a product
    for first in range(0, 3072, length):
        alone = [x[..., first : first + length, :] for x in (out, q, k, v)]
        assert compare(alone[0], None, *alone[1:], scale=1 / 8).ok


@pytest.mark.release
@pytest.mark.parametrize("arch", thinned(["90a", "80"]))
def test_a_bias_is_read_once_for_each_pair_of_tiles(arch):
    """By each kernel: told from what else forwards read, and of backwards from what elements add that are twice as wide."""
    shape, length = (2, 2), 384  # whole tiles of all these kernels
    rng = numpy.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((*shape, length, 40)).astype(numpy.float16) for _ in range(4))
    whole = rng.standard_normal((*shape, length, length + 1))  # of odd strides, as elsewhere, whose kernels these are
    read, of_forwards = [], []
    for dtype in (numpy.float16, numpy.float32):
        bias = {"bias": whole.astype(dtype)[..., 1:]}
        plan = plan_attention(q, k, v, backend="host", arch=arch, return_lse=True, **bias)
        results, forward = plan.counted(q, k, v, **bias)
        given = (dout, q, k, v, *results)
        plans = [plan_attention_backward(*given, backend="host", arch=arch, wrt=wrt, **bias) for wrt in ((), "bias")]
        alone, both = (plan.counted(*given, **bias)[1].read_bytes for plan in plans)
        read.append((alone, both - alone))
        others = q.nbytes + (k.nbytes + v.nbytes) * (length // plan.kernel.config.TILE_Q)
        of_forwards.append((forward.read_bytes - others) / bias["bias"].itemsize)
    of_backward, of_sums = ((wide - narrow) // 2 for narrow, wide in zip(*read))
    pairs = 4 * length**2
    assert of_backward == of_sums == pairs
    for of_forward in of_forwards:  # of fwd_hopper, a tile in which a maximum was too small is done again
        assert of_forward == pairs if arch == "80" else pairs <= of_forward <= 1.1 * pairs


def test_memory_saved_at_dim_64():
    for seq, percent in ((512, 94), (1024, 97)):
        naive, v2 = (count(Setting(seq), name).memory_bytes for name in ("naive", "v2"))
        assert round(100 * (1 - v2 / naive)) == percent


def test_examples_of_docstrings():
    results = doctest.testmod(traffic)
    assert results.attempted and results.failed == 0


# The command


def test_the_command_prints_both_tables():
    result = run("--seq", "64,128", "--causal")
    assert result.exit_code == 0, result.output
    assert "forward of float16, batch 1, heads 1, dim 64, causal; kernels of sm_80" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[:2] for line in lines if line[1:2] in (["naive"], ["v1"], ["v2"])] == [
        [seq, name] for seq in ("64", "128") for name in ALGORITHMS
    ]
    naive, v2 = (count(Setting(128, causal=True), name) for name in ("naive", "v2"))
    assert f"{naive.memory_bytes / 1000:.1f}" in result.stdout
    assert f"{1 - v2.memory_bytes / naive.memory_bytes:.1%}" in result.stdout.splitlines()[-9]


def test_the_command_counts_documents():
    result = run("--seq", "96", "--documents", 3)
    assert result.exit_code == 0, result.output
    assert "full, 3 documents; kernels of sm_80" in result.stdout and "a TileMask keeps it" in result.stdout
    assert [line.split()[1] for line in result.stdout.splitlines() if line.strip().startswith("96")][:2] == ["naive", "v2"]
    assert "v1" not in result.stdout.split("read, written")[0]


def test_the_command_prints_json():
    report = run_json("--seq", "96", "--heads", 2, "--batch", 3, "--dim", 40, "--dtype", "float32")
    assert report["architecture"] == "80" and [c["algorithm"] for c in report["counts"]] == list(ALGORITHMS)
    for c in report["counts"]:
        setting = Setting(**c["setting"])
        assert setting == Setting(96, 40, 3, 2, "float32", False)
        found = count(setting, c["algorithm"])
        assert (c["read_bytes"], c["written_bytes"], c["flops"]) == (found.read_bytes, found.written_bytes, found.flops)
        assert c["moved_bytes"] == c["read_bytes"] + c["written_bytes"] and c["constant"] == found.constant


def test_the_command_draws_a_figure(tmp_path):
    path = tmp_path / "traffic.png"
    assert run("--seq", "64,128", "--plot", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_sanitized_kernels_do_not_count(monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SANITIZE", "address")
    result = run("--seq", 32)
    assert result.exit_code == 2 and "CUPY_FLASH_HOST_SANITIZE: expected it not to be set" in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--arch", "75", "--dtype", "bfloat16"], "which has no bfloat16"),
        (["--seq", "64,many"], "expected sizes, with commas between them, got 'many'"),
        (["--dim", "300"], "300"),
        (["--plot", "traffic.doc"], "expected a name that ends in .png"),
    ],
)
def test_user_errors_end_with_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]
