"""Where pairs are masked, in which order blocks begin, and how they add to dq: in the order of the lists if that has to be one."""

import re

import numpy
import pytest
from tile_masks import inputs, with_holes

from cupy_flash import attention, attention_backward, plan_attention_backward
from cupy_flash.call import backward
from cupy_flash.machine import host, source
from cupy_flash.plan import grouping

# Where each kernel waits, where it adds, and the file that has both.
PLACES = {
    "bwd_v2": ("bwd_v2.cu", re.compile(r"semaphore_wait\([^;]*count_column[^;]*;"), "    add(DqAccum{"),
    "bwd_hopper": ("tile/dq_protocol.cuh", re.compile(r"semaphore_wait\(p[^;]*semaphore_value[^;]*;"), "add_or_store(block, Dq"),
}
BLOCKS = 4


@pytest.mark.release
@pytest.mark.parametrize("left_out", [False, True])
@pytest.mark.parametrize("kernel", PLACES)
def test_blocks_add_in_the_order_of_lists(kernel, left_out, monkeypatch, change_kernel):
    """The first blocks are the slowest to add; without the wait, sums have other bits."""
    file, wait, add = PLACES[kernel]
    text = source.files()[file]
    assert wait.search(text) and text.count(add) == 1
    sleep = f"std::this_thread::sleep_for(std::chrono::milliseconds(50 * ({BLOCKS} - block_id() % {BLOCKS})));\n"
    change_kernel(file, (wait.sub("", text) if left_out else text).replace(add, sleep + add))
    q, k, v, dout = inputs("float16", batch=1, heads=1, heads_kv=1, len_kv=BLOCKS * 128)
    mask = numpy.ones((q.shape[-2], BLOCKS * 128), bool)
    mask[:, :203] = with_holes()
    mask[:64, 256:384] = mask[64:, 384:] = False  # who is before a block differs from one query tile to the next
    given = (dout, q, k, v, *attention(q, k, v, mask=mask, return_lse=True))
    arch = "90a" if kernel == "bwd_hopper" else "80"
    plan = plan_attention_backward(*given, mask=mask, deterministic=True, backend="host", arch=arch, kernel=kernel)
    assert plan.kernel.config.TILE_LIST
    sums = []
    for blocks in (1, BLOCKS):
        monkeypatch.setattr(host.os, "sched_getaffinity", lambda _, blocks=blocks: range(blocks * plan.kernel.config.WARPS))
        memory = numpy.zeros(plan.workspace_bytes, numpy.uint8)
        plan(*given, mask=mask, workspace=memory)
        sums.append(plan.workspace.on_host(memory)["dq_accum"].tobytes())
    assert (sums[0] == sums[1]) is not left_out


@pytest.mark.parametrize("deterministic, reused", [(False, False), (True, False), (False, True)])
def test_the_first_keys_of_all_heads_come_before_others(deterministic, reused, monkeypatch, change_kernel, capfd):
    """Unless blocks wait for others, that add before them, or whose sums they use again: these take heads in groups."""
    monkeypatch.setattr(grouping, "MOST_ROWS_REUSED", 10_000 if reused else 0)
    monkeypatch.setattr(grouping, "HOPPER_BLOCKS_TOGETHER", 1)
    monkeypatch.setattr(grouping, "CLEARING_BLOCKS", 1)
    monkeypatch.setattr(grouping, "LAST_BLOCKS", 1)
    text, begins = source.files()["bwd_hopper.cu"], "  KeyBlock block(p);\n"
    assert text.count(begins) == 1
    says = '  if (warp == 0) std::fprintf(stderr, "%d %u\\n", block.here.tile, block.head);\n'
    change_kernel("bwd_hopper.cu", "#include <cstdio>\n" + text.replace(begins, begins + says))
    q, k, v, dout = inputs("float16", batch=3, heads=4, heads_kv=4, len_kv=300)
    places = numpy.arange(q.shape[-2])[:, None] * 300 // q.shape[-2], numpy.arange(300)
    mask = (places[1] < 20) | (abs(places[0] - places[1]) < 30)
    given = (dout, q, k, v, *attention(q, k, v, mask=mask, return_lse=True))
    options = {"mask": mask, "deterministic": deterministic}
    backward._prepared.cache_clear()
    plan = plan_attention_backward(*given, **options, backend="host", arch="90a", kernel="bwd_hopper")
    backward._prepared.cache_clear()
    assert plan.kernel.config.TILE_LIST and plan.kernel.config.TILE_KV == 128
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(plan.kernel.config.WARPS))  # one block at a time
    capfd.readouterr()
    found = plan(*given, mask=mask)
    order = [tuple(map(int, line.split())) for line in capfd.readouterr().err.splitlines()]
    tiles, heads, group = 3, 12, 4
    assert sorted(order) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    if deterministic or reused:
        assert order == [(t, first + h) for first in range(0, heads, group) for t in range(tiles) for h in range(group)]
    else:
        others = [(t, first + h) for first in range(0, heads, group) for t in range(1, tiles) for h in range(group)]
        assert order == [(0, head) for head in range(heads)] + others
    right = attention_backward(*given, mask=mask, backend="numpy")
    for got, expected in zip(found[:3], right[:3]):
        assert numpy.allclose(got.astype(numpy.float32), expected.astype(numpy.float32), rtol=2.0**-7, atol=2.0**-7)
