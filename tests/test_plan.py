"""Which kernel a problem gets: tile rows, copy sizes, architectures, and what is refused."""

from itertools import product

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_flash import UnsupportedError, attention, plan_attention
from cupy_flash.plan.architecture import ARCHITECTURES, architecture_named, architecture_of
from cupy_flash.plan.columns import padded
from cupy_flash.plan.tuning import KERNEL_TABLES, SHORT, WIDTHS, row_for


def plan(q, k=None, v=None, **options):
    k = q if k is None else k
    return plan_attention(q, k, k if v is None else v, backend="host", **options).kernel


def array(*shape, dtype=numpy.float16):
    return numpy.zeros(shape, dtype)


@pytest.mark.parametrize(
    "capability, name",
    [("75", "75"), ("80", "80"), ("86", "86"), ("87", "86"), ("89", "89"), ("90", "90a"), ("103", "100"), ("121", "120")],
)
def test_a_device_gets_the_newest_target_it_can_run(capability, name):
    assert architecture_of(capability).name == name


@pytest.mark.parametrize("capability", ("61", "70", "72", "110"))
def test_a_device_without_a_target_is_refused(capability):
    with pytest.raises(UnsupportedError, match=f"got {capability[:-1]}.{capability[-1]}"):
        architecture_of(capability)


def test_architecture_names():
    assert architecture_named("sm_90a") is architecture_named("90") is ARCHITECTURES["90a"]
    with pytest.raises(UnsupportedError, match="'sm_91'"):
        architecture_named("sm_91")


def test_every_width_has_a_row_everywhere():
    choices = product(("fwd_v1", "fwd_v2"), ARCHITECTURES.values(), ("float16", "float32"), WIDTHS, (1, SHORT, SHORT + 1, 10_000))
    for kernel, architecture, dtype, width, len_q in choices:
        row = row_for(kernel, architecture, dtype, width, len_q)
        assert row.width >= width and row.tile_q % (16 * row.warps) == 0 and row.tile_kv % 16 == 0


def test_every_row_has_a_reason():
    tables = [table for kernel in KERNEL_TABLES.values() for architecture in kernel.values() for table in architecture.values()]
    assert len(tables) == 3 * 2 * len(ARCHITECTURES) + 4  # fwd_hopper and the three backwards like it have one each
    assert all(row.why for rows in tables for row in rows)


@given(st.integers(1, 256))
def test_padded_is_the_narrowest_width(dim):
    assert padded(dim) == min(width for width in WIDTHS if width >= dim)


def test_few_queries_get_a_small_tile():
    keys = array(1, 500, 64)
    assert plan(array(1, SHORT, 64), keys).config.TILE_Q < plan(array(1, SHORT + 1, 64), keys).config.TILE_Q


@pytest.mark.parametrize(
    "q, size, why",
    [
        (array(2, 70, 64), 16, ""),
        (array(2, 70, 100), 8, "rows of q have 200 bytes"),
        (array(2, 70, 98), 4, "rows of q have 196 bytes"),
        (array(2, 70, 33), 0, "rows of q have 66 bytes"),
        (array(2, 70, 68)[..., :64], 8, "stride of 136 bytes"),
        (array(2, 70, 128)[..., ::2], 0, "4 bytes apart"),
        (array(2, 64, 70).swapaxes(-1, -2), 0, "140 bytes apart"),
        (array(2 * 70 * 64 + 2)[2:].reshape(2, 70, 64), 4, "starts at a multiple of 4 bytes"),
        (array(2, 70, 33, dtype=numpy.float32), 4, "rows of q have 132 bytes"),
        (array(2, 70, 64)[:, ::-1], 16, ""),
    ],
    ids=lambda x: None if isinstance(x, numpy.ndarray) else str(x),
)
def test_copy_size_follows_the_memory(q, size, why):
    made = plan(q)
    assert size == made.config.COPY_BYTES
    assert why in str(made) and (size < 16) == ("copies of" in str(made))


def test_one_misaligned_array_decides_for_all():
    q = array(2, 70, 64)
    v = array(2 * 70 * 64 + 1)[1:].reshape(2, 70, 64)
    assert plan(q, q, v).config.COPY_BYTES == 0
    assert "v starts at a multiple of 2 bytes" in str(plan(q, q, v))


@pytest.mark.parametrize("options, explicit", [({}, False), ({"softcap": 5.0}, True), ({"scale": 0}, True), ({"scale": -1}, True)])
def test_scores_are_scaled_one_by_one_only_where_they_must(options, explicit):
    assert plan(array(1, 70, 64), **options).config.EXPLICIT_SCORES is explicit


def test_lengths_and_masks_do_not_reach_the_kernel():
    """Problems that differ in what a launch can say share one compiled kernel."""
    one = plan(array(2, 3, 500, 64), causal=True)
    assert one == plan(array(5, 100, 40), array(5, 999, 40), window=(7, None), scale=0.3)
    assert one != plan(array(5, 100, 72))


def test_what_turing_lacks_is_refused():
    q = array(1, 70, 64, dtype=ml_dtypes.bfloat16)
    with pytest.raises(UnsupportedError, match="q: expected float16 or float32 on sm_75"):
        plan(q, arch="75")
    with pytest.raises(UnsupportedError, match=r"precision: .* sm_75"):
        plan(array(1, 70, 64, dtype=numpy.float32), precision="tf32", arch="75")


def test_sizes_beyond_a_grid_are_refused():
    one = array(1, 1, 1, 64)
    with pytest.raises(UnsupportedError, match=r"q: expected fewer than 2\*\*30 rows"):
        plan(numpy.broadcast_to(one, (1, 1, 2**30, 64)), one)
    with pytest.raises(UnsupportedError, match="q: expected fewer than 2147483648 blocks of fwd_v2, got 2147483648"):
        plan(numpy.broadcast_to(one, (2**20, 2**11, 1, 64)))


def test_a_plan_prints_what_it_decided():
    text = str(plan_attention(array(2, 6, 100, 64), array(2, 2, 150, 64), array(2, 2, 150, 64), causal=True, backend="host"))
    for part in ("float16", "6 heads on 2", "100 queries on 150 keys", "keys 0 ... i+50", "workspace 0", "sm_80", "TILE_Q=128"):
        assert part in text


def test_plan_on_numpy_has_no_kernel():
    q = array(1, 5, 8)
    made = plan_attention(q, q, q)
    assert made.kernel is None and "NumPy" in str(made) and made(q, q, q).shape == q.shape


def test_a_held_plan_computes_and_refuses_other_layouts():
    rng = numpy.random.default_rng(0)
    q, k = (rng.standard_normal((2, n, 64)).astype(numpy.float16) for n in (70, 90))
    held = plan_attention(q, k, k, backend="host", return_lse=True)
    out, lse = held(q, k, k)
    assert numpy.array_equal(out, attention(q, k, k, backend="host"))
    into = numpy.full_like(out, numpy.nan)
    assert held(q, k, k, out=into, lse=numpy.empty_like(lse))[0] is into and numpy.array_equal(into, out)
    for name, arguments in {"q": (q[:, ::-1], k, k), "k": (q, k[:, :80], k), "v": (q, k, k.astype("f"))}.items():
        with pytest.raises(ValueError, match=rf"{name}: expected .*, as planned"):
            held(*arguments)
    with pytest.raises(ValueError, match="lse: expected None"):
        plan_attention(q, k, k, backend="host")(q, k, k, lse=lse)
    with pytest.raises(ValueError, match="out: expected memory apart"):
        plan_attention(q, q, q, backend="host")(q, q, q, out=q)


@pytest.mark.parametrize("backend", ["host", "numpy"])
def test_overlap_counts_elements_before_the_first(backend):
    """Element 0 of a reversed result lies behind all others."""
    memory = numpy.zeros(2 * 128 + 1, numpy.float16)
    q, beside, over = (x.reshape(1, 2, 64) for x in (memory[:128], memory[128:-1], memory[127:-2]))
    assert attention(q, q, q, backend=backend, out=beside[:, ::-1]).base is not None
    with pytest.raises(ValueError, match="out: expected memory apart from that of q"):
        attention(q, q, q, backend=backend, out=over[:, ::-1])
