"""What `bench-scores` measures, without a GPU: each feature is computed as its oracle says, and shares follow from times."""

import types

import numpy
import pytest
from thinned import thinned

from cupy_flash import plan_attention
from cupy_flash.cli.bench_scores import computed_pairs, record_of
from cupy_flash.measure import feature_runs, features
from cupy_flash.measure.bench import CellResult, Measurement
from cupy_flash.measure.feature_runs import FLEX, FeatureBench, Inputs, contenders
from cupy_flash.measure.features import FEATURES, FLEXIBLE, WINDOWS, FeatureCell

NAMED = {feature.name: feature for feature in FEATURES}
MASKS = [name for name, feature in NAMED.items() if feature.seen and name not in WINDOWS]


class OnTheHost(FeatureBench):
    """A `FeatureBench` whose device is NumPy."""

    def __init__(self):
        pool = types.SimpleNamespace(free_all_blocks=lambda: None)
        self._cupy = types.SimpleNamespace(asarray=numpy.asarray, arange=numpy.arange, stack=numpy.stack)
        self._cupy.get_default_memory_pool = lambda: pool

    def make_inputs(self, cell):
        rng = numpy.random.default_rng(1)
        arrays = tuple(rng.standard_normal(cell.shape).astype("float16") for _ in range(3 + (cell.direction == "backward")))
        return Inputs(arrays, cell.feature.options(cell, numpy.random.default_rng(0)))


def small(name, direction):
    feature = NAMED[name]
    return FeatureCell(direction, "float16", 32, feature.causal, 96, 3, 2, feature)


@pytest.fixture(autouse=True)
def without_a_device(monkeypatch):
    monkeypatch.setattr(feature_runs, "unwritten", lambda like: numpy.full_like(like, numpy.nan))
    monkeypatch.setattr(feature_runs, "workspace_of", lambda plan: None)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", NAMED)
def test_a_feature_is_computed_as_its_oracle_says(name, direction, monkeypatch):
    for window, keys in {"window": (20, 0), "window around": (10, 9)}.items():  # narrower than so few tokens
        monkeypatch.setitem(WINDOWS, window, keys)
    cell, bench = small(name, direction), OnTheHost()
    inputs = bench.make_inputs(cell)
    ours = [contender for contender in contenders(cell) if contender.ours and contender.name != "dense"]
    assert [contender.name for contender in ours] == ["v2", "kept"] if name in MASKS else ["v2"]
    for contender in ours:
        run = contender.prepare(cell, inputs)
        results = run.arrays(run.launch())
        assert bench.judge(cell, inputs, results).ok
        first = results[0].copy()
        results[0][0, 0, 5, 7] += 1
        assert not bench.judge(cell, inputs, results).ok
        results[0][...] = first


@pytest.mark.parametrize("name", NAMED)
def test_dense_attention_is_judged_as_such(name):
    cell = small(name, "forward")
    dense = next(contender for contender in contenders(cell) if contender.name == "dense")
    assert dense.solves(cell) == cell.plain and not isinstance(cell.plain, FeatureCell)
    assert cell.plain.shape == cell.shape and cell.plain.pairs >= cell.pairs


def test_what_is_random_is_not_judged():
    cell = small("dropout", "forward")
    peers = {contender.name: contender for contender in contenders(cell)}
    assert peers["torch-flash2"].solves(cell) is None


@pytest.mark.parametrize("name", thinned([*MASKS, *WINDOWS], keep=len(MASKS) + len(WINDOWS)))
def test_pairs_that_are_computed_are_whole_tiles_of_those_seen(name):
    for cell in NAMED[name].cells(("forward", "backward")):
        if cell.dim == 128:
            computed = computed_pairs(cell, "90a")
            assert cell.pairs <= computed < computed_pairs(cell.plain, "90a") == cell.seq**2


def test_pairs_are_counted_by_consumers_that_have_lists_of_their_own():
    """Of two ranges the near one moves with each query: fewer pairs by 64 queries than by the 192 of a tile."""
    for dim in (64, 128):
        [cell] = (cell for cell in NAMED["ranges"].cells(("forward",)) if cell.dim == dim)
        near, first = features.NEAR // 64, features.FIRST_KEYS // 64
        tiles = sum(min(tile + 1, near + 1) + min(max(tile - near, 0), first) for tile in range(cell.seq // 64))
        assert computed_pairs(cell, "90a") == tiles * 64 * 64


@pytest.mark.parametrize("dim", thinned([64, 128, 256], keep=3))
def test_pairs_of_windows_are_counted_by_warpgroups_of_the_forward_and_tiles_of_the_backward(dim):
    """Of 64 queries those tiles count that any of them sees, from the first key of the first query to the last one's own."""
    forward, backward = (cell for cell in NAMED["window"].cells(("forward", "backward")) if cell.dim == dim)
    q = numpy.empty(forward.shape, "f2")
    tile = plan_attention(q, q, q, backend="host", arch="90a", window=WINDOWS["window"]).kernel.config.TILE_KV
    first = numpy.arange(0, forward.seq, 64)
    tiles = (first + 63) // tile - numpy.maximum(first - 1023, 0) // tile + 1
    assert computed_pairs(forward, "90a") == tiles.sum() * 64 * tile
    assert computed_pairs(backward, "90a") > forward.pairs


def test_flex_attention_is_asked_for_what_has_a_function():
    assert set(FLEX) == set(FLEXIBLE) <= set(NAMED)
    for name in NAMED:
        asked = [contender.name for contender in contenders(small(name, "forward"))]
        assert ("flex" in asked) == (name in FLEX)
        assert "flex" not in [contender.name for contender in contenders(small(name, "forward"), flex=())]


def test_a_share_is_of_the_rate_for_each_computed_pair():
    cell = next(cell for cell in NAMED["documents"].cells(("forward",)) if cell.dim == 128)
    times = {"v2": 2.0, "kept": 1.0, "dense": 8.0}
    found = tuple(Measurement(name, seconds, seconds, seconds, 5) for name, seconds in times.items())
    record = record_of(CellResult(cell, found), "90a")
    part = computed_pairs(cell, "90a") / cell.seq**2
    assert record["share"] == pytest.approx({"v2": 4 * part, "kept": 8 * part})
    assert record["pairs"] == cell.seq**2 // 8 and record["gate"] == 0.90
