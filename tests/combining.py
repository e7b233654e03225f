"""Who combines the splits of few queries: the same plan with the other one of the two."""

from dataclasses import replace

import numpy

from cupy_flash.call.forward import AttentionPlan

MARK = 0xFFE9B3D16A57C5 << 8  # of a counter that nobody has arrived at, see kernels_cu/tile/arrivals.cuh


def combined(plan, by_last):
    """The plan by whose kernel the last block combines, or a kernel of its own does."""
    assert plan.kernel.config.SPLIT_KV
    return AttentionPlan(plan.problem, replace(plan.kernel, config=replace(plan.kernel.config, LAST_COMBINES=by_last)), True)


def counters(plan, workspace):
    """The counters of all query tiles in a workspace in host memory."""
    start = plan.workspace.offsets[plan.workspace.names.index("arrivals")]
    return workspace[start : start + dict(plan.workspace.parts)["arrivals"]].view(numpy.uint64)
