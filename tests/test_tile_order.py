"""Where pairs are masked, blocks add to dq in the order of the lists: each waits for those before it that add to the same tile."""

import re

import numpy
import pytest
from thinned import thinned
from tile_masks import inputs, with_holes

from cupy_flash import attention, plan_attention_backward
from cupy_flash.machine import host, source

# Where each kernel waits, where it adds, and the file that has both.
PLACES = {
    "bwd_v2": ("bwd_v2.cu", re.compile(r"semaphore_wait\([^;]*count_column[^;]*;"), "    add(DqAccum{"),
    "bwd_hopper": ("tile/dq_protocol.cuh", re.compile(r"semaphore_wait\(p[^;]*semaphore_value[^;]*;"), "  add(DqAccum{"),
}
BLOCKS = 4


@pytest.mark.parametrize("left_out", [False, pytest.param(True, marks=pytest.mark.release)])
@pytest.mark.parametrize("kernel", thinned(PLACES))
def test_blocks_add_in_the_order_of_lists(kernel, left_out, monkeypatch, change_kernel):
    """The first blocks are the slowest to add; without the wait, sums have other bits."""
    file, wait, add = PLACES[kernel]
    text = source.files()[file]
    assert wait.search(text) and text.count(add) == 1
    sleep = f"std::this_thread::sleep_for(std::chrono::milliseconds(100 * ({BLOCKS} - block_id() % {BLOCKS})));\n"
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
