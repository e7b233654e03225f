"""What the tests share: one kernel cache, a clean environment, and the mark of tests that need a GPU."""

import functools
import gc
import math
import os
import subprocess
from contextlib import suppress
from dataclasses import replace

import one_thread  # noqa: F401
import pytest
from hypothesis import settings
from whole_groups import never_split

from cupy_flash import CompileError
from cupy_flash.call import backward, forward
from cupy_flash.machine import host, source
from cupy_flash.machine.toolchain import compiler
from cupy_flash.plan import backward as backward_plan
from cupy_flash.plan import few_tiles, grouping, hopper_splits, pair_bits, rows_between, schedule, short_gradients
from cupy_flash.plan.tuning import HOPPER_BACKWARD, KERNEL_TABLES, MASKS
from cupy_flash.problem import arrays

settings.register_profile("cupy_flash", deadline=None)  # an example may have to wait for a compiler
settings.load_profile("cupy_flash")

SAME = "tile/scope.cuh"  # with what it includes, knows nothing of a kernel
BESSEL = "_GLIBCXX_USE_STD_SPEC_FUNCS"  # functions of <cmath> that no kernel calls, and g++ makes again in each build


def pytest_collection():
    """Tens of thousands of tests are made, none of which goes before all end: nothing is gained by looking for garbage."""
    gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@functools.cache
def gpu_available():
    try:
        import cupy
    except ImportError:
        return False
    return cupy.cuda.is_available()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not gpu_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """A folder of compiled kernels, the same for all workers: the one the environment names, otherwise a new one."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = os.environ.get("CUPY_FLASH_CACHE_DIR", str(folder / "kernels"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUPY_FLASH_CACHE_DIR", folder)
        for name in ("CUPY_FLASH_HOST_SANITIZE", "CUPY_FLASH_HOST_SCHEDULE", "COLUMNS"):
            environment.delenv(name, raising=False)
        yield folder


@pytest.fixture(autouse=True)
def tiles_of_many(request, monkeypatch):
    """Problems of tests are small, and have the tiles of large ones all the same, but in tests marked `few_tiles`."""
    marked = request.node.get_closest_marker("few_tiles") is not None
    plans = forward._prepared, backward._prepared
    if not marked:
        monkeypatch.setattr(few_tiles, "MOST", 0)
        monkeypatch.setattr(short_gradients, "MOST_BLOCKS", 0)
        monkeypatch.setattr(rows_between, "FITS", ())
    else:
        for prepared in plans:
            prepared.cache_clear()
    yield
    if marked:
        for prepared in plans:
            prepared.cache_clear()


@pytest.fixture
def known_machine(kernel_cache, monkeypatch):
    """What executes any kernel comes from the cache of all tests, in a test that has a cache of its own."""
    build = host._machine

    def known(*given):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("CUPY_FLASH_CACHE_DIR", kernel_cache)
            return build(*given)

    monkeypatch.setattr(host, "_machine", known)


@pytest.fixture
def poisoned_results(monkeypatch):
    """What nobody writes to of a result stays NaN."""
    empty = arrays.empty

    def poisoned(layout):
        x = empty(layout)
        x[...] = math.nan
        return x

    monkeypatch.setattr(arrays, "empty", poisoned)


@pytest.fixture
def change_kernel(monkeypatch):
    """A function that puts another text in the place of a kernel file, for the host and until the test ends."""

    def change(file, text):
        monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | {file: text})

    return change


@pytest.fixture(scope="session", autouse=True)
def quick_builds(tmp_path_factory):
    """Kernels for the host are built in half the time, and run more slowly: most of a test is the compiler's time.

    The headers that are the same for all kernels, and what they include of the standard library, are compiled once for each set of
    options, which g++ heeds where all are the same. Builds by commands that tests start do without.
    """
    options = (*host.OPTIONS, "-Og")

    @functools.cache
    def header(flags, texts):
        folder = tmp_path_factory.mktemp("headers")
        for name, text in texts:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        file = folder / "same.hpp"
        file.write_text(f'#include <cstdint>\n#undef {BESSEL}\n#include <thread>\n#include "{SAME}"\n')  # tests let threads sleep
        found = f"-I{folder}"
        with suppress(CompileError):  # there are tests without a compiler
            subprocess.run([*compiler(), *flags, found, "-x", "c++-header", file, "-o", f"{file}.gch"], capture_output=True)
        return found, "-include", str(file)

    def compiled(title, main, flags, texts, objects=None):
        same = {name: texts[name] for name in host.included(texts, SAME)}
        shared = (flag for flag in flags if not flag.startswith("-D") and flag not in ("-shared", "-rdynamic", "-c"))
        others = {name: text for name, text in texts.items() if name not in same}  # of two copies a compiler would read both
        return compiled_without(title, main, [*flags, *header(tuple(shared), tuple(same.items()))], others, objects)

    compiled_without = host.compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "OPTIONS", options)
        patch.setattr(host, "compiled", compiled)
        yield


@pytest.fixture
def planned_anew():
    """Plans of gradients are made in the test, by what it changes, and no other test finds them."""
    backward._prepared.cache_clear()
    yield
    backward._prepared.cache_clear()


@pytest.fixture
def staged(planned_anew, monkeypatch):
    """Every problem gets the tile of long sequences, whose dq goes through shared memory, if it can have it."""
    rows = {"half": tuple(row for row in HOPPER_BACKWARD if row.tma_reduce_dq)}
    monkeypatch.setitem(KERNEL_TABLES, "bwd_hopper", {"90a": rows})


@pytest.fixture
def key_tiles_in_turn(planned_anew, monkeypatch):
    """Blocks take key tiles in turn wherever they can, however few there are."""
    monkeypatch.setattr(backward_plan, "FEWEST_TAKEN", 0)


@pytest.fixture
def made_ahead(planned_anew, monkeypatch):
    """Blocks make statistics of queries of later heads, however few heads and blocks there are, and of whatever lengths."""
    monkeypatch.setattr(backward_plan, "MOST_AHEAD", 9)
    monkeypatch.setattr(backward_plan, "SHORT_IN_ORDER", 0)
    for name in ("RUNNING", "HOPPER_BLOCKS_TOGETHER", "LAST_BLOCKS", "CLEARING_BLOCKS"):
        monkeypatch.setattr(grouping, name, 1)
    never_split(monkeypatch)


@pytest.fixture
def only_row(monkeypatch):
    """A function that makes one row of a tuning table on sm_90a serve every problem that its tile is wide enough for."""

    def choose(kernel, row):
        row = replace(row, max_len_q=None, masks=MASKS)
        monkeypatch.setitem(KERNEL_TABLES, kernel, {"90a": {"half": (row,)}})
        forward._prepared.cache_clear()

    yield choose
    forward._prepared.cache_clear()


@pytest.fixture
def share_of_bits(monkeypatch):
    """A function that sets how much memory bits of pairs may take: infinity, and sm_90a reads them; 0, and it asks masks."""

    def change(share):
        monkeypatch.setattr(pair_bits, "SHARE", share)
        clear()

    def clear():
        for module in (forward, backward):
            module._prepared.cache_clear()

    yield change
    clear()


@pytest.fixture
def shared(monkeypatch):
    """Blocks share the query tiles that whole rounds leave over, however short and different, in any forward that has no window."""
    for module in (schedule, hopper_splits):
        monkeypatch.setattr(module, "LEAST_SPLIT", 1)
        monkeypatch.setattr(module, "COMBINING", 0)
    monkeypatch.setattr(hopper_splits, "EVEN", -math.inf)
    forward._prepared.cache_clear()
    yield
    forward._prepared.cache_clear()


@pytest.fixture
def from_a_list(monkeypatch):
    """Blocks of fwd_hopper take the query tiles of sequences from a list, however few these are."""
    monkeypatch.setattr(hopper_splits, "ROUNDS", 0)
    forward._prepared.cache_clear()
    yield
    forward._prepared.cache_clear()


@pytest.fixture
def shorter_splits(monkeypatch):
    """Blocks of fwd_hopper share the tiles of many queries on as few keys as those of few."""
    monkeypatch.setattr(hopper_splits, "MORE_KEYS", hopper_splits.SPLIT_KEYS)
    forward._prepared.cache_clear()
    yield
    forward._prepared.cache_clear()
