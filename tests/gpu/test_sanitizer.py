"""compute-sanitizer's four tools on small cases of every kernel that reach every kind of copy, product and mask."""

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("cupy")

CHANGE = """
from cupy_flash.machine import source
texts = dict(source.files())
def change(name, old, new):
    assert old in texts[name], old
    texts[name] = texts[name].replace(old, new)
source.files = lambda: texts
"""
# racecheck does not see that the lanes of a warp have read before one of them arrives for all: a product in between, which they
# start together, is no barrier to it. It gets a text in which each lane arrives for itself, and everything else is as it is.
EACH_LANE_ARRIVES = (
    CHANGE
    + """
change("tile/pipeline.cuh", "  arrive_at<LANES>(pipeline.empty(), at);", "  mbarrier_arrive(pipeline.empty().address);")
change("tile/pipeline.cuh", "init_mbarrier(pipeline.empty(), readers, at);", "init_mbarrier(pipeline.empty(), 32 * readers, at);")
# the same of P that is passed on where dS was
change("bwd_hopper_parts.cu", "arrive_at(block.written);", "mbarrier_arrive(block.written.address);")
change("tile/key_block.cuh", "init_mbarrier(written, 4 * GROUPS", "init_mbarrier(written, (FP16_PARTS ? 32 : 1) * 4 * GROUPS")
# and of a key tile of several that a block takes
ended = "block.ended_of(block.taken.count)"
change("bwd_hopper.cu", f"arrive_at<LANES>({ended});", f"mbarrier_arrive({ended}.address);")
change("tile/key_loads.cuh", "arrive_at<LANES>(block.loaded);", "mbarrier_arrive(block.loaded.address);")
change("tile/key_block.cuh", "init_mbarrier(loaded, 1 + LOADS_KEYS_APART);", "init_mbarrier(loaded, 32 * (1 + LOADS_KEYS_APART));")
change("tile/key_block.cuh", "init_mbarrier(ended, ", "init_mbarrier(ended, PERSISTENT ? 32 * 4 * GROUPS : ")
change("tile/key_block.cuh", "init_mbarrier(counted, PERSISTENT ? 4 ", "init_mbarrier(counted, PERSISTENT ? 32 * 4 ")
# Nor that they have written terms of keys before one arrives for all, behind a barrier of the warp.
change("tile/column_terms.cuh", "  arrive_at(keys.full());", "  mbarrier_arrive(keys.full().address);")
change("fwd_hopper.cu", "PRODUCER_ARRIVALS + (TERM_WARPS > 0)", "PRODUCER_ARRIVALS + 32 * (TERM_WARPS > 0)")
# Nor does it know that what a warp has read before `bar.arrive` comes before what another writes behind `bar.sync`: it reports the
# textbook's two warps, one of which passes values on in a place that the other frees. Here who frees a place waits as well.
freed = "(freed(step, group));                    // without it the other"
change("bwd_hopper_mla.cu", "arrive_two_groups" + freed, "sync_two_groups" + freed)
"""
)
# memcheck takes a block for none of its own cluster, and reports what it sends itself. It gets a text in which lanes copy that.
OWN_BY_LANES = (
    CHANGE
    + """
change("tile/cluster.cuh", "  if (lane < SIZE * PARTS) cp_async_bulk_to_cluster(", '''
  const int own = int(block_id() % SIZE);
  for (int i = 0; i < PARTS; ++i)
    for (int j = lane * 16; j < bytes; j += 32 * 16) store_shared(to + i * apart + j, load_shared<Vector<16>>(from(own, i) + j));
  __syncwarp();
  const u32 own_barrier = barrier.address, own_bytes = PARTS * bytes;
  if (lane == 0) asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(own_barrier), "r"(own_bytes));
  if (lane < SIZE * PARTS && rank != own) cp_async_bulk_to_cluster('''[1:])
"""
)
# Nor does racecheck see that the lanes of a warp have cleared rows behind a sequence before one of them tells of it, as they have
# met there in the machine code (BSYNC). In parts, lanes of other warps read these rows, which it reports of 31 of 32 lanes, and did
# so with sync_warp in between; elsewhere products do, of which it knows nothing.
OF_CLUSTERS = "((2, 64), (4, 128), (8, 64))"
OF_LENGTHS, WITHOUT_LENGTHS = "({}, drops, packed)", "({}, drops)"
# initcheck does not know of memory that TMA has written: where a head has one tile of keys, that is all sums of dq, and elsewhere
# the zeros of later heads. With two tiles, and no zeros for later heads, the launch before makes all sums zero, and TMA adds.
ONE_TILE, TWO_TILES = 'Case("bfloat16", 2100, 70, dim=128)', 'Case("bfloat16", 2100, 140, dim=128)'
NO_ZEROS_AHEAD = """
from cupy_flash.plan import backward
backward.MOST_ROWS_AHEAD = -1
"""
PROGRAM = """
from itertools import product
import cupy
import numpy
cupy.cuda.set_allocator(None)  # a memory pool would hide a step outside
from cupy_flash import append_kv, attention, attention_vjp, merge_states, plan_attention, plan_attention_backward, rotate
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.machine import device
from cupy_flash.plan import backward as backward_plan
from cupy_flash.plan import grouping, hopper_splits

for case in (
    Case("float16", 70, 90, heads_q=2, causal=True),
    Case("float16", 1, 130, dim=128),
    Case("bfloat16", 130, 70, dim=128, window=(20, 20)),
    Case("float16", 50, 60, dim=33, softcap=10.0),
    Case("bfloat16", 40, 50, dim=98),
    Case("float16", 40, 50, dim=256),
    Case("float16", 40, 1500, dim=96, heads_q=2),  # on sm_90a blocks share query tiles
    Case("float32", 70, 60, dim=128, causal=True),
    Case("float32", 40, 50, dim=33, precision="tf32"),
    Case("float16", 5, 0),
):
    inputs = make_inputs(case, cupy)
    for kernel in (None, "fwd_v2"):  # the planner's choice may be another
        plan_attention(*inputs, kernel=kernel, **case.options)(*inputs)
        cupy.cuda.Device().synchronize()

for case in (
    Case("float16", 300, 200, heads_q=2, causal=True),  # two blocks, of four tiles of queries and of one
    Case("float32", 70, 60, dim=33, window=(20, 20)),
):
    attention(*make_inputs(case, cupy), algorithm="v1", **case.options)
    cupy.cuda.Device().synchronize()

def forward(*inputs, **options):
    # By a kernel that stores with instructions: initcheck does not know of memory that TMA has written.
    return plan_attention(*inputs, kernel="fwd_v2", return_lse=True, **options)(*inputs)

def backward(dout, *inputs, **options):
    given = (dout, *inputs, *forward(*inputs, **options))
    for kernel, deterministic in product((None, "bwd_v2"), (False, True)):
        plan_attention_backward(*given, **options, kernel=kernel, deterministic=deterministic)(*given)
        cupy.cuda.Device().synchronize()

for case in (
    Case("float16", 150, 200, heads_q=4, heads_kv=2, causal=True),  # parts of dk and dv are added up afterwards
    Case("bfloat16", 130, 70, dim=128, window=(20, 20)),
    Case("float16", 150, 60),  # one tile of keys, whose block stores dq
    Case("bfloat16", 100, 90, heads_q=4, batch=(40,), causal=True),  # more heads than blocks, some of which take two
    Case("float16", 140, 200, heads_q=2, batch=(128,), causal=True),  # and two tiles of keys of each
    Case("bfloat16", 2100, 70, dim=128),  # so many queries have a tile of their own
    Case("bfloat16", 70, 130, dim=256),
    Case("float16", 50, 60, dim=40, softcap=10.0),
    Case("float16", 50, 60, dim=33, softcap=10.0),
    Case("float32", 70, 60, causal=True),
):
    options = {name: value for name, value in case.options.items() if name != "return_lse"}
    backward(make_cotangents(case, cupy)[0], *make_inputs(case, cupy), **options)

case = Case("float16", 70, 200, heads_q=2, batch=(3,))
q, k, v = make_inputs(case, cupy)
k, v = k[:1], v[:1]  # broadcast: their gradients are sums
backward(make_cotangents(case, cupy)[0], q, k, v)
backward(make_cotangents(case, cupy)[0], q[:1], *make_inputs(case, cupy)[1:])
parts = [forward(q, k[:, :, keys], v[:, :, keys]) for keys in (slice(0, 50), slice(50, 200))]
merge_states(*parts[0], *parts[1])

def normal(*shape, dtype="float16"):
    # By a copy from the host: initcheck does not know of memory that CuPy's kernels have written.
    return cupy.asarray(numpy.random.default_rng(0).standard_normal(shape, numpy.float32).astype(dtype))

ends = cupy.array([0, 70, 70, 135], numpy.int32)  # and rows that no sequence has
packed, drops = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}, {"seed": 7}
in_parts = [(dim, "ieee", told) for dim in (64, 100) for told in ({}, drops, packed)] + [(72, "tf32", {})]
for dim, precision, told in in_parts:
    q, k, v = normal(3, 2, 150, dim, dtype="float32")
    asked = {"causal": True, "precision": precision, **told, "dropout": 0.25 if told is drops else 0.0}
    plan_attention(q, k, v, kernel="fwd_hopper", **asked)(q, k, v, **told)
    given = (q, q, k, v, *plan_attention(q, k, v, kernel="fwd_v2", return_lse=True, **asked)(q, k, v, **told))
    for deterministic in (False, True):
        plan_attention_backward(*given, **asked, kernel="bwd_hopper_parts", deterministic=deterministic)(*given, **told)
    cupy.cuda.Device().synchronize()

for told in ({}, packed):
    (q, k), v = normal(2, 2, 150, 192), normal(2, 150, 128)
    given = (v, q, k, v, *attention(q, k, v, causal=True, return_lse=True, **told))
    for deterministic in (False, True):
        plan_attention_backward(*given, causal=True, **told, kernel="bwd_hopper_mla", deterministic=deterministic)(*given, **told)
cupy.cuda.Device().synchronize()

cos, sin = normal(2, 90, 12, dtype="float32")
pages = cupy.asarray(numpy.arange(12, dtype=numpy.int32).reshape(3, 4)[::-1].copy())
for dtype, dim in (("float16", 64), ("float32", 40), ("float16", 33)):
    k, v = normal(2, 3, 2, 50, dim, dtype=dtype)
    rotate(k, cos, sin, positions=cupy.array([0, 80, -5]), interleaved=dim == 33, out=k)
    caches, lengths, rotary = cupy.zeros((2, 12, 2, 16, dim), dtype), cupy.array([3, 40, 14]), {"cos": cos, "sin": sin}
    append_kv(*caches, k, v, lengths, pages=pages, **rotary)
    append_kv(*caches, k, v, lengths, pages=pages, q=normal(3, 5, 50, dim, dtype=dtype), **rotary)
cupy.cuda.Device().synchronize()

offsets = cupy.array([0, 70, 70, 135, 200, 200])  # and ten rows that no sequence has
q, k, v = normal(3, 2, 210, 64)
for deterministic in (False, True):
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "deterministic": deterministic}
    out, vjp = attention_vjp(q, k[:1], v[:1], causal=True, **packed)
    vjp(cupy.asarray(cupy.asnumpy(out)))
pool = normal(2, 360, 2, 16, 64)
pages = cupy.asarray(numpy.arange(359, -1, -1, dtype=numpy.int32).reshape(2, 180))
queries, told = normal(2, 4, 1, 64), {"pages": pages, "seqlens_kv": cupy.array([2500, 70])}  # three blocks share a tile
plan = plan_attention(queries, *pool, **told)
memory = cupy.empty(plan.workspace_bytes, numpy.uint8)
for part, (name, size) in zip(plan.workspace.offsets, plan.workspace.parts):
    if name == "arrivals":  # which may hold anything: blocks find out, so they read it
        memory[part : part + size].set(numpy.full(size, 7, numpy.uint8))
for _ in range(2):
    plan(queries, *pool, **told, workspace=memory)
attention(normal(2, 4, 130, 64), *pool, **told, causal=True)  # so many queries have pages by TMA, and on sm_90a shared tiles
attention(normal(2, 8, 40, 64), *pool, **told, causal=True)  # which heads share here as well
hopper_splits.ROUNDS = 0  # that was without a list
attention(normal(2, 8, 41, 64), *pool, **told, causal=True)
attention(normal(2, 4, 130, 64), *normal(2, 2, 4, 150, 64), seqlens_q=cupy.array([130, 3]), causal=True)
hopper_splits.ROUNDS = 2
attention(normal(2, 4, 131, 64), *normal(2, 2, 4, 150, 64), seqlens_q=cupy.array([130, 3]), causal=True)  # each tile has a block
attention(normal(8, 70, 64), *pool, **told, cu_seqlens_q=cupy.array([0, 1, 60]), causal=True)  # or query by query

# On sm_90a one block has a unit of the first bias; of the second, several share one, and the third is read by lanes.
q, k, v, dout = (normal(3, heads, rows, 64) for heads, rows in ((4, 150), (2, 200), (2, 200), (4, 150)))
for bias in (normal(4, 150, 200), normal(150, 200), normal(4, 150, 200, dtype="float32")):
    out, lse = plan_attention(q, k, v, bias=bias, causal=True, kernel="fwd_v2", return_lse=True)(q, k, v, bias=bias)
    plan = plan_attention_backward(dout, q, k, v, out, lse, bias=bias, causal=True, wrt="bias")
    plan(dout, q, k, v, out, lse, bias=bias)
    cupy.cuda.Device().synchronize()
attention(normal(2, 8, 9, 64), *normal(2, 2, 2, 300, 64), bias=normal(8, 9, 300), causal=True)  # on sm_90a four heads in a tile

# On sm_90a blocks of a cluster sum up the gradient of a bias that batch elements share.
for elements, dim in ((2, 64), (4, 128), (8, 64)):
    q, k, v, dout = (normal(elements, heads, rows, dim) for heads, rows in ((4, 150), (2, 200), (2, 200), (4, 150)))
    bias = normal(4, 150, 200)
    out, lse = plan_attention(q, k, v, bias=bias, kernel="fwd_v2", return_lse=True)(q, k, v, bias=bias)
    plan = plan_attention_backward(dout, q, k, v, out, lse, bias=bias, wrt="bias")
    assert plan.kernel.config.CLUSTER == elements or plan.kernel.file == "bwd_v2"
    plan(dout, q, k, v, out, lse, bias=bias)
    cupy.cuda.Device().synchronize()

# On sm_90a lanes copy pages of these sizes for many queries, and each warp of fwd_v2 has keys of its own for few.
for size in (48, 1):
    pool = normal(2, 240 // size * 2, 2, size, 64)
    pages = cupy.asarray(numpy.arange(240 // size * 2, dtype=numpy.int32)[::-1].reshape(2, -1).copy())
    for rows in (1, 130):
        attention(normal(2, 4, rows, 64), *pool, pages=pages, seqlens_kv=cupy.array([230, 70]), causal=True)
        cupy.cuda.Device().synchronize()

def both(dim, backward, *, heads=2, seed=None, arrays=None, **asked):
    q, k, v, dout = normal(4, heads, 300, dim)
    given = {"seed": seed, "arrays": arrays}
    plan_attention(q, k, v, **given, **asked)(q, k, v, **given)
    out, lse = plan_attention(q, k, v, kernel="fwd_v2", return_lse=True, **given, **asked)(q, k, v, **given)
    for kernel in (None, "bwd_v2")[: 1 + backward]:
        plan = plan_attention_backward(dout, q, k, v, out, lse, kernel=kernel, **given, **asked)
        plan(dout, q, k, v, out, lse, **given)
        cupy.cuda.Device().synchronize()
    return plan.kernel

for dim in (64, 128, 256):
    both(dim, dim == 64, dropout=0.25, seed=7, causal=True)
documents = cupy.asarray(numpy.arange(300, dtype=numpy.int32) // 77)
both(64, True, mask="doc[q_idx] == doc[kv_idx]", arrays={"doc": documents})  # tiles of a list
# On sm_90a by three blocks that take two key tiles each; the second one of a head is seen by nobody.
kept = device._multiprocessors, backward_plan.FEWEST_TAKEN
device._multiprocessors, backward_plan.FEWEST_TAKEN = lambda number: 3, 0
tiles = cupy.asarray(numpy.arange(300, dtype=numpy.int32) // 128)
both(64, False, mask="doc[q_idx] != doc[kv_idx] and doc[kv_idx] != 1", arrays={"doc": tiles})
device._multiprocessors, backward_plan.FEWEST_TAKEN = kept
# On sm_90a statistics of the last heads by blocks of the first.
kept = grouping.RUNNING, grouping.HOPPER_BLOCKS_TOGETHER
grouping.RUNNING, grouping.HOPPER_BLOCKS_TOGETHER = 0, 1
kernel = both(64, False, heads=8, causal=True)
assert kernel.config.STATS_AHEAD or kernel.file == "bwd_v2"
grouping.RUNNING, grouping.HOPPER_BLOCKS_TOGETHER = kept

q, k, v = normal(3, 2, 210, 64)
def taken_apart(score, bias=None):
    terms = normal(210, dtype="float32")
    given = {"bias": bias, "arrays": {"t": terms if "t[kv_idx]" in score else terms[:2]}}
    asked = {"causal": True, "score": score, **given}
    attention(q, k, v, **asked)
    results = plan_attention(q, k, v, kernel="fwd_v2", return_lse=True, **asked)(q, k, v, **given)
    plan_attention_backward(q, q, k, v, *results, **asked)(q, q, k, v, *results, **given)

taken_apart("score * t[h]")
taken_apart("score + t[kv_idx]")
taken_apart("score + t[h] * (kv_idx - q_idx)")  # of normal numbers: of one head the last keys come first
taken_apart("score + t[kv_idx]", normal(2, 210, 216)[..., :210])  # on sm_90a the bias comes by TMA
cupy.cuda.Device().synchronize()
print("done")
"""


# The barrier between dS being written by some warps and read by all of them is one of a warp.
NO_BARRIER = """
from cupy_flash.machine import source
texts = dict(source.files())
before, told, after = texts["bwd_v2.cu"].partition("// without it dS is read")
code, barrier, space = before.rpartition("sync_block();")
assert told and barrier and space.isspace()
texts["bwd_v2.cu"] = code + "sync_warp();" + space + told + after
source.files = lambda: texts
"""
BACKWARD_ALONE = """
import cupy
import numpy
from cupy_flash import plan_attention, plan_attention_backward
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.cotangents import make_cotangents

case = Case("float32", 70, 60, causal=True)
q, k, v = make_inputs(case, cupy)
given = (make_cotangents(case, cupy)[0], q, k, v, *plan_attention(q, k, v, causal=True, return_lse=True)(q, k, v))
plan_attention_backward(*given, causal=True, kernel="bwd_v2")(*given)
cupy.cuda.Device().synchronize()
print("done")
"""

# A program that notes which kernels it would launch, and launches none; and one that compiles them, several at a time.
PLANS_ALONE = """
import pickle
from cupy_flash.machine import device as of_kernels
planned = []
class Planned:
    def __init__(self, kernel, *of_problem):
        planned.append(kernel)
    def launch(self, *of_call):
        pass
of_kernels.DeviceKernel = Planned
"""
COMPILES = """
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from cupy_flash.machine import nvrtc
with open(PATH, "rb") as file:
    planned = list(dict.fromkeys(pickle.load(file)))
with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
    for _ in pool.map(nvrtc.cubin, planned):
        pass
print("done")
"""

# Which are watched, and not what CuPy launches.
OTHERS = ("fwd_", "fp16_parts", "bwd_hopper", "bwd_scores", "classify", "merge", "rotate", "append")
KERNELS = (*OTHERS, "bwd_v2")


def run(program):
    """Run a program by itself, so that no kernel is compiled while a tool watches."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "done" in done.stdout, (done.stdout + done.stderr)[-3000:]


def compile_ahead(program, changes, path):
    """Compile all kernels of a program, which it would do one after the other: that takes minutes, and a tool seconds."""
    dump = f"with open({str(path)!r}, 'wb') as file:\n    pickle.dump(planned, file)\n"
    run(PLANS_ALONE + program + dump)
    run(f"PATH = {str(path)!r}\n" + changes + COMPILES)


def watch(tool, program, kernels=KERNELS):
    """Run a program under a tool of compute-sanitizer: whether it came to its end with nothing reported, and all that was said."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    options = ["--tool", tool, "--error-exitcode", "9"]
    for name in kernels:
        options += ["--kernel-name", f"kernel_substring={name}"]
    done = subprocess.run([sanitizer, *options, sys.executable, "-c", program], capture_output=True, text=True, timeout=500)
    said = done.stdout + done.stderr
    assert "done" in done.stdout, said[-3000:]
    return done.returncode == 0 and ("0 errors" in done.stdout or "0 hazards" in done.stdout), said


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """What each tool executes, run once without any."""
    plain, raced = PROGRAM, EACH_LANE_ARRIVES + PROGRAM.replace(OF_LENGTHS, WITHOUT_LENGTHS)
    assert ONE_TILE in plain
    initialised, bounded = NO_ZEROS_AHEAD + plain.replace(ONE_TILE, TWO_TILES), OWN_BY_LANES + plain
    for program, changes in ((plain, ""), (initialised, ""), (bounded, OWN_BY_LANES), (raced, EACH_LANE_ARRIVES)):
        compile_ahead(program, changes, tmp_path_factory.mktemp("kernels") / "planned")
        run(program)
    return {"memcheck": bounded, "synccheck": plain, "initcheck": initialised, "racecheck": raced}


@pytest.mark.parametrize("tool", ("memcheck", "initcheck", "synccheck"))
def test_clean(tool, programs):
    clean, said = watch(tool, programs[tool])
    assert clean, said[-3000:]


def test_no_races(programs):
    clean, said = watch("racecheck", programs["racecheck"], OTHERS)
    assert clean, said[-3000:]


@pytest.mark.alone
def test_no_races_of_bwd_v2(programs):
    """Beside other processes racecheck speaks now and then of a race of bwd_v2, float32, that there is none of.

    It says then that warps load dS before others have stored it, and store it before others have loaded it. A barrier of the whole
    block is between the two, in the machine code as well. It said so in 2 of 4 runs beside a whole suite; of that kernel alone in 2
    of 181 beside one, in 1 of 59 beside processes that do nothing but open a context of the device, and in none of 213 beside ones
    that took and freed memory, loaded modules or ran memcheck. With the device for itself it said nothing in 110 runs, of that
    kernel, of all backward cases, and of this program. A barrier that is missing it reports in every run, see below.
    """
    program = programs["racecheck"].replace(OF_CLUSTERS, "()")  # which end in an error where racecheck is there and watches others
    assert program != programs["racecheck"]
    clean, said = watch("racecheck", program, ("bwd_v2",))
    assert clean, said[-3000:]


@pytest.mark.alone
def test_a_missing_barrier_is_noticed_every_time():
    run(BACKWARD_ALONE)
    run(NO_BARRIER + BACKWARD_ALONE)
    clean, said = watch("racecheck", BACKWARD_ALONE)
    assert clean, said[-3000:]
    for _ in range(3):
        clean, said = watch("racecheck", NO_BARRIER + BACKWARD_ALONE)
        assert not clean and "bwd_v2" in said, said[-3000:]
