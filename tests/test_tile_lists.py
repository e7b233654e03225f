"""Tiles in which nothing is seen are not computed, and pairs of tiles in which all is seen are not asked."""

import math
from dataclasses import replace

import numpy
import pytest
from score_kernels import close, judged, largest_score
from thinned import thinned
from tile_masks import (
    BATCH,
    HEADS,
    LEN_KV,
    LEN_Q,
    NAMES,
    TILE_MASKS,
    array,
    bits_of,
    classified,
    inputs,
    kept,
    operands_of,
    visible,
)
from whole_groups import never_split

from cupy_flash import KeyRanges, TileMask, attention, plan_attention, plan_attention_backward
from cupy_flash.call.backward import BackwardPlan
from cupy_flash.call.forward import AttentionPlan
from cupy_flash.judge.oracle import naive, oracle
from cupy_flash.machine import host
from cupy_flash.plan.classify import rows_of_list
from cupy_flash.plan.kernel import text_of

KERNELS = {"80": ("fwd_v2", "bwd_v2"), "90a": ("fwd_hopper", "bwd_hopper")}
DTYPE = {"80": "bfloat16", "90a": "float16"}  # as in other tests of masks, whose kernels these are


@pytest.fixture(params=thinned(host.SCHEDULES, first=1))
def schedule(request, monkeypatch):
    monkeypatch.setenv("CUPY_FLASH_HOST_SCHEDULE", request.param)
    return request.param


@pytest.mark.parametrize("arch", KERNELS)
@pytest.mark.parametrize("name", thinned(NAMES, keep=16))
def test_results(name, arch, schedule, share_of_bits):
    """Of masks that are asked."""
    share_of_bits(0)
    assert not any(kernel.config.PAIR_BITS for kernel in kernels_of_results(name, arch, schedule))


@pytest.mark.parametrize("name", thinned(NAMES, keep=3))
def test_results_by_bits(name, schedule, share_of_bits):
    share_of_bits(math.inf)
    assert all(kernel.config.PAIR_BITS for kernel in kernels_of_results(name, "90a", schedule))


def kernels_of_results(name, arch, schedule):
    """Of a mask, after what they compute has been judged."""
    options, hand = TILE_MASKS[name]()
    deterministic = schedule == "deferred"
    where = {"backend": "host", "arch": arch}
    kernels = judged(DTYPE[arch], options, hand, where, inputs_given=inputs(DTYPE[arch]), deterministic=deterministic)
    assert tuple(kernel.file for kernel in kernels) == KERNELS[arch]
    assert all(kernel.config.TILE_LIST for kernel in kernels)
    return kernels


# The lists themselves


def of_tiles(pairs, reduce, tile_q, tile_kv):
    """What is true of each tile of pairs."""
    return reduce.reduceat(reduce.reduceat(pairs, range(0, LEN_Q, tile_q), axis=-2), range(0, LEN_KV, tile_kv), axis=-1)


@pytest.mark.parametrize("name", thinned(NAMES, keep=4))
def test_lists_are_those_of_the_mask(name):
    """Of the forward and of a backward in order, bit by bit against the pairs."""
    options, hand = TILE_MASKS[name]()
    q, k, v, dout = inputs(DTYPE["80"])
    both, alone = visible(hand)
    plan = plan_attention(q, k, v, backend="host", **options)
    found = classified(plan, (q, k, v), operands_of(options))["tile_lists"]
    tile = plan.kernel.config.TILE_Q, plan.kernel.config.TILE_KV
    any_seen, all_seen = of_tiles(both, numpy.logical_or, *tile), of_tiles(alone, numpy.logical_and, *tile)
    told = plan._execution._params[0]["scores"]["tiles"]
    apart = int(told["batches"]), int(told["heads"])
    query_tiles, key_tiles = any_seen.shape[-2:]
    lists = bits_of(found.reshape(*apart, query_tiles, 2, -1), key_tiles)
    assert (lists[..., 0, :] == any_seen).all() and (lists[..., 1, :] == all_seen).all()

    out, lse = q, numpy.zeros(q.shape[:-1], numpy.float32)
    backward = plan_attention_backward(dout, q, k, v, out, lse, backend="host", deterministic=True, **options)
    found = classified(backward, (dout, q, k, v, out, lse), operands_of(options))
    tile = backward.kernel.config.TILE_Q, backward.kernel.config.TILE_KV
    any_seen, all_seen = of_tiles(both, numpy.logical_or, *tile), of_tiles(alone, numpy.logical_and, *tile)
    query_tiles, key_tiles = any_seen.shape[-2:]
    lists = bits_of(found["tile_lists"].reshape(*apart, key_tiles, 2, -1), query_tiles)
    assert (lists[..., 0, :] == any_seen.swapaxes(-1, -2)).all() and (lists[..., 1, :] == all_seen.swapaxes(-1, -2)).all()
    assert (bits_of(found["tile_columns"].reshape(*apart, query_tiles, -1), key_tiles) == any_seen).all()


def test_what_the_mask_does_not_tell_apart_is_classified_once():
    expected = {"documents": (1, 1), "windows of heads": (1, HEADS), "limits of batch elements": (BATCH, 1), "stripes": (1, HEADS)}
    expected |= {"blocks": (1, 1), "blocks of heads": (1, HEADS), "blocks of batch elements": (BATCH, 1)}
    expected |= {"blocks of all": (BATCH, HEADS)}
    for name, apart in expected.items():
        options, _ = TILE_MASKS[name]()
        plan = plan_attention(*inputs()[:3], backend="host", **options)
        told = plan._execution._params[0]["scores"]["tiles"]
        assert (told["batches"], told["heads"]) == apart, name
        c = plan.kernel.config
        tiles = -(-LEN_Q // c.TILE_Q) * 2  # a word for each row of bits
        assert plan.workspace.parts == (("tile_lists", 4 * apart[0] * apart[1] * tiles),)
        assert f"before: classify {apart[0] * apart[1] * tiles * 2} blocks" in str(plan)


# What is not computed


def unlisted(plan):
    """The same plan, whose kernel visits all tiles and asks every pair."""
    problem = plan.problem if isinstance(plan, AttentionPlan) else plan.problem.forward
    asks = replace(plan.kernel.config, TILE_LIST=False, PAIR_BITS=False)
    kernel = replace(plan.kernel, config=asks, expressions=text_of(problem))
    return AttentionPlan(plan.problem, kernel, True) if isinstance(plan, AttentionPlan) else BackwardPlan(plan.problem, kernel)


@pytest.mark.release
@pytest.mark.parametrize("name", thinned(["blocks", "blocks of heads", "causal, blocks", "holes"], keep=4))
def test_v2_gives_the_same_bits_as_without_a_list(name):
    """What is left out adds nothing, and no maximum moves."""
    options, _ = TILE_MASKS[name]()
    q, k, v, dout = inputs(DTYPE["80"])
    plan = plan_attention(q, k, v, backend="host", return_lse=True, **options)
    results, expected = (x(q, k, v, **operands_of(options)) for x in (plan, unlisted(plan)))
    for got, right in zip(results, expected):
        assert got.tobytes() == right.tobytes()
    given = dout, q, k, v, *results
    backward = plan_attention_backward(*given, backend="host", deterministic=True, **options)
    for got, right in zip(*(x(*given, **operands_of(options)) for x in (backward, unlisted(backward)))):
        assert (got == right).all()  # of 0, the sign may be another


# Many key tiles, several heads to a block, split keys


@pytest.mark.parametrize("arch", thinned(KERNELS))
def test_lists_of_more_than_a_word(arch):
    """More tiles than bits of a word, of which the first, some in between and the last are seen, or none of a word."""
    len_q, len_kv = 70, 2300
    seen = numpy.zeros((len_q, len_kv), bool)
    seen[:, [0, 5, 2299]] = seen[40:, 1200:1210] = True
    seen[64:] = False
    seen[66, 2100] = True
    for options, hand in (array(seen), array(seen.T.copy())):
        lengths = {"len_q": hand["seen"].shape[0], "len_kv": hand["seen"].shape[1], "batch": 1, "heads": 2, "heads_kv": 1}
        given = inputs(DTYPE[arch], **lengths)
        judged(DTYPE[arch], options, hand, {"backend": "host", "arch": arch}, inputs_given=given, deterministic=True)


@pytest.mark.release
@pytest.mark.parametrize("kernel", thinned(["bwd_hopper", "bwd_v2", "bwd_hopper_wide"], keep=3, first=2))
@pytest.mark.parametrize("name", thinned(["blocks of heads", "blocks", "causal, blocks", "holes"], keep=4))
def test_blocks_that_sum_over_several_heads(name, kernel, schedule, monkeypatch):
    """They go through the list of one head after the other, some of which may be empty."""
    options, hand = TILE_MASKS[name]()
    if name == "blocks of heads":
        hand["seen"][1:3, :, 64:] = False  # which is the array of the options
    arch = "90a" if "hopper" in kernel else "80"
    q, k, v, dout = inputs(DTYPE[arch])
    results = plan_attention(q, k, v, backend="host", arch=arch, return_lse=True, **options)(q, k, v, **operands_of(options))
    given = dout, q, k, v, *results
    plan = plan_attention_backward(*given, backend="host", arch=arch, kernel=kernel, deterministic=True, **options)
    assert plan.kernel.file == kernel and plan.kernel.config.TILE_LIST
    never_split(monkeypatch)  # after the plan, which is found again by other tests
    ordered = BackwardPlan(plan.problem, plan.kernel)
    assert ordered._execution._params["heads_per_block"] == 2
    listed, all_tiles = (x(*given, **operands_of(options)) for x in (ordered, unlisted(ordered)))
    for got, right in zip(listed, all_tiles):
        assert (got == right).all()


@pytest.mark.parametrize("kernel", ["bwd_v2", "bwd_hopper", pytest.param("bwd_hopper_wide", marks=pytest.mark.release)])
def test_what_pairs_hold_that_are_masked_alone_reaches_no_gradient_of_a_score(kernel):
    """dP of such a pair may be anything, and its P is 0: dq and dk of those who do not see each other keep their bits."""
    options, hand = TILE_MASKS["blocks"]()
    arch = "90a" if "hopper" in kernel else "80"
    q, k, v, dout = inputs(DTYPE[arch], batch=1, heads=2, heads_kv=1)
    results = plan_attention(q, k, v, backend="host", arch=arch, return_lse=True, **options)(q, k, v, **operands_of(options))
    where = {"backend": "host", "arch": arch, "kernel": kernel, "deterministic": True}
    plan = plan_attention_backward(dout, q, k, v, *results, **where, **options)
    usual = plan(dout, q, k, v, *results, **operands_of(options))
    query, key = 77, 131
    v[..., key, :], blind = numpy.inf, ~hand["seen"][:, key]
    of_value = plan(dout, q, k, v, *results, **operands_of(options)).dq[..., blind, :]
    assert 0 < blind.sum() < LEN_Q and (of_value == usual.dq[..., blind, :]).all()
    v[..., key, :], unseen = 0, ~hand["seen"][query]
    usual = plan(dout, q, k, v, *results, **operands_of(options))
    dout[..., query, :] = numpy.nan
    of_query = plan(dout, q, k, v, *results, **operands_of(options)).dk[..., unseen, :]
    assert 0 < unseen.sum() < LEN_KV and (of_query == usual.dk[..., unseen, :]).all()


@pytest.mark.parametrize("bits", thinned([True, False]))
@pytest.mark.parametrize("name", thinned(["documents", "holes", "nothing"]))
def test_split_keys(name, bits, schedule, share_of_bits):
    """Ranges of keys are cut before the lists are looked at: some blocks have none that are seen."""
    share_of_bits(math.inf if bits else 0)
    len_kv = 1500
    keys = numpy.arange(len_kv)
    seen = {"documents": keys // 640 == 1, "holes": keys % 700 < 90, "nothing": keys < 0}[name]
    options, hand = array(numpy.broadcast_to(seen, (4, len_kv)).copy())
    q, k, v, _ = inputs("float16", len_q=4, len_kv=len_kv, batch=1)
    plan = plan_attention(q, k, v, backend="host", arch="90a", kernel="fwd_hopper", return_lse=True, **options)
    assert plan.kernel.config.SPLIT_KV and plan.kernel.config.TILE_LIST and bits == plan.kernel.config.PAIR_BITS
    out, lse = plan(q, k, v, **options)
    exact, exact_lse = oracle(q, k, v, scale=1 / 40**0.5, **hand)
    plain, _ = naive(q, k, v, scale=1 / 40**0.5, **hand)
    close(out, exact, plain, 2, 2**-10, largest_score(q, k, hand))
    assert (numpy.isneginf(lse) == numpy.isneginf(exact_lse)).all()


# What is kept


@pytest.mark.parametrize("arch", thinned(KERNELS, first=1))
@pytest.mark.parametrize("name", thinned(["documents", "blocks of heads", "causal, blocks"], keep=3))
def test_what_is_kept_is_what_a_call_finds(name, arch):
    options, _ = TILE_MASKS[name]()
    q, k, v, dout = inputs(DTYPE[arch])
    mask = TileMask(options["mask"], options.get("arrays"))
    others = {of: x for of, x in options.items() if of not in ("mask", "arrays")}
    where = {"backend": "host", "arch": arch}
    plan = plan_attention(q, k, v, return_lse=True, mask=mask, **others, **where)
    results = plan(q, k, v, mask=mask)
    anew = plan_attention(q, k, v, return_lse=True, **options, **where)
    for got, right in zip(results, anew(q, k, v, **operands_of(options))):
        assert got.tobytes() == right.tobytes()
    assert len(mask.found) == 1
    assert {*anew.workspace.parts} - {*plan.workspace.parts} == {(name, x.nbytes) for name, x in kept(mask, 0).items()}
    given = dout, q, k, v, *results
    for deterministic, times in ((True, 2), (False, 3), (True, 3)):
        backward = plan_attention_backward(*given, deterministic=deterministic, mask=mask, **others, **where)
        gradients = backward(*given, mask=mask)
        anew = plan_attention_backward(*given, deterministic=deterministic, **options, **where)
        for got, right in zip(gradients, anew(*given, **operands_of(options))):
            assert deterministic is False or got.tobytes() == right.tobytes()
        assert len(mask.found) == times
    assert ", once for a TileMask, which keeps " in str(plan)


@pytest.mark.parametrize("arch", thinned(KERNELS, first=1))
def test_a_wrong_bit_is_noticed(arch):
    """Each bit decides: of a tile that is left out, the result lacks something; in one that is not asked, it has too much."""
    options, _ = TILE_MASKS["blocks"]()
    q, k, v, _ = inputs(DTYPE[arch], batch=1, heads=2, heads_kv=1)
    mask = TileMask(options["mask"])
    plan = plan_attention(q, k, v, backend="host", arch=arch, mask=mask)
    right = plan(q, k, v, mask=mask)
    c = plan.kernel.config
    listed = rows_of_list(plan.kernel)
    key_tiles, query_tiles = -(-LEN_KV // c.TILE_KV), -(-LEN_Q // listed)
    words = kept(mask, 0)["tile_lists"].view(numpy.uint32)
    words, of_pairs = words[: 2 * query_tiles], words[-(-2 * query_tiles // 32) * 32 :]
    any_seen, all_seen = words.copy().reshape(query_tiles, 2).T
    assert len(of_pairs) == c.PAIR_BITS * query_tiles * listed // 16 * key_tiles * 32 and any(all_seen != any_seen)
    noticed = 0
    for query_tile in range(query_tiles):
        for key_tile in range(key_tiles):
            seen, whole = any_seen[query_tile] >> key_tile & 1, all_seen[query_tile] >> key_tile & 1
            if whole or not seen:
                continue
            rows = slice(query_tile * listed, (query_tile + 1) * listed)
            for row_of_bits in range(2):  # a tile that is seen in part
                words[2 * query_tile + row_of_bits] ^= 1 << key_tile
                wrong = plan(q, k, v, mask=mask)
                words[2 * query_tile + row_of_bits] ^= 1 << key_tile
                assert (wrong[..., rows, :] != right[..., rows, :]).any()
                noticed += 1
            if c.PAIR_BITS:  # of a pair: register 1 of lane 21 is that of the sixth query and the fourth key
                word = (rows.start // 16 * key_tiles + key_tile) * 32 + 21
                of_pairs[word] ^= 2
                wrong = plan(q, k, v, mask=mask)
                of_pairs[word] ^= 2
                other = (wrong != right).any((0, 1, 3))
                assert other[rows.start + 5] and other.sum() == 1
    assert noticed >= 4
    assert (plan(q, k, v, mask=mask) == right).all()


def test_what_a_tile_mask_refuses():
    doc = numpy.zeros(LEN_KV, int)
    with pytest.raises(TypeError, match=r"^mask: expected an array of bool, an expression or a function, got None"):
        TileMask(None)
    with pytest.raises(TypeError, match=r"^mask: expected bool, got float64"):
        TileMask(numpy.zeros((3, 3)))
    with pytest.raises(ValueError, match=r"^arrays\['doc'\]: expected an array that is read by the mask, which does not"):
        TileMask("kv_idx > 3", {"doc": doc})
    with pytest.raises(ValueError, match=r"^arrays\['doc'\]: expected an array that is read by the mask, which does not"):
        TileMask(numpy.ones((3, 3), bool), {"doc": doc})
    with pytest.raises(TypeError, match=r"^arrays: expected None or a dict of arrays by their names, got 3"):
        TileMask("kv_idx > 3", 3)
    mask = TileMask(lambda kv_idx, doc: doc[kv_idx] == 0, {"doc": doc})
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=r"^arrays\['doc'\]: expected the array that the TileMask has by this name, or none"):
        attention(q, k, v, mask=mask, arrays={"doc": doc.copy()})
    plan, without = plan_attention(q, k, v, mask=mask), plan_attention(q, k, v, mask="doc[kv_idx] == 0", arrays={"doc": doc})
    with pytest.raises(ValueError, match=r"^mask: expected a TileMask, as planned, got none"):
        plan(q, k, v, arrays={"doc": doc})
    with pytest.raises(ValueError, match=r"^mask: expected no TileMask, as planned, got one"):
        without(q, k, v, mask=mask)
    with pytest.raises(ValueError, match=r"^mask: expected a TileMask of 'doc\[kv_idx\] == 0', as planned, got one of '"):
        plan(q, k, v, mask=TileMask("kv_idx > 3"))
    assert (plan(q, k, v, mask=mask) == without(q, k, v, arrays={"doc": doc})).all()


# What is counted


def documents(arch):
    """Of each direction: a plan for documents of an eighth of a row, its arguments and mask, and what their share is.

    That is what a batch of the same documents without a mask costs, by the tiles of the mask's kernels.
    """
    number, length, dim = 8, 384, 40  # a multiple of every tile
    rows = number * length
    # The text of other tests.
    doc, text = numpy.repeat(numpy.arange(number, dtype=numpy.int32), length), TILE_MASKS["documents"]()[0]["mask"]
    # One head after the other is what the same kernel does of a mask of all, so tiles are the same.
    mask, every = (TileMask(text, {"doc": x, "doc_kv": x}) for x in (doc, doc[:length]))
    whole = inputs(DTYPE[arch], len_q=rows, len_kv=rows, batch=1, heads=1, heads_kv=1)
    alone = [x.reshape(number, 1, length, dim) for x in whole]
    results, where = [], {"backend": "host", "arch": arch}
    for make in (plan_attention, plan_attention_backward):
        given = [(*x[:3], *y) if not y else (x[3], *x[:3], *y) for x, y in zip((whole, alone), results or ((), ()))]
        options = where if results else where | {"return_lse": True}
        plan, share_plan = (make(*x, mask=m, **options) for x, m in zip(given, (mask, every)))
        assert share_plan.kernel.config == plan.kernel.config
        of_share = share_plan(*given[1], mask=every)
        yield plan, given[0], mask, share_plan.counted(*given[1], mask=every)[1]
        results = [plan(*given[0], mask=mask), of_share]


def cost(moved, share):
    """How many times their share documents cost, in bytes and in products."""
    moved_bytes, share_bytes = (x.read_bytes + x.written_bytes for x in (moved, share))
    return moved_bytes / share_bytes, moved.flops / share.flops


@pytest.mark.release
@pytest.mark.parametrize("arch, bits", [("90a", True), *(pytest.param(arch, False, marks=pytest.mark.release) for arch in KERNELS)])
def test_documents_move_and_compute_their_share(arch, bits, share_of_bits):
    share_of_bits(math.inf if bits else 0)
    for plan, given, mask, share in documents(arch):
        _, once = plan.counted(*given, mask=mask)
        _, moved = plan.counted(*given, mask=mask)
        of_bytes, of_products = cost(moved, share)
        fewer = plan.kernel.config.OWN_LISTS  # than alone, where the rows behind a document's end have its list
        assert of_bytes <= 1.3 and (0.5 < of_products <= 1 if fewer else of_products == 1) and once.flops == moved.flops
        assert once.read_bytes > moved.read_bytes  # that reads the documents as well


@pytest.mark.release
@pytest.mark.parametrize("arch", thinned(KERNELS, first=1))
def test_lists_of_all_tiles_cost_more_than_the_share(arch, share_of_bits):
    """Though only one in eight is such a list. The result stays what it is, so that nothing but what is counted tells."""
    share_of_bits(0)  # of tiles that no list names there are no bits
    found = iter(range(2))
    for plan, given, mask, share in documents(arch):
        results = plan(*given, mask=mask)
        listed = plan.kernel.config.TILE_KV if len(given) == 3 else plan.kernel.config.TILE_Q
        words = -(-given[0].shape[-2] // listed // 32)
        any_seen, all_seen = kept(mask, next(found))["tile_lists"].view(numpy.uint32).reshape(-1, 2, words).swapaxes(0, 1)
        any_seen[::8], all_seen[::8] = numpy.bitwise_or.reduce(any_seen), 0
        dense, moved = plan.counted(*given, mask=mask)
        assert min(cost(moved, share)) > 1.3
        for got, right in zip(dense, results):
            numpy.testing.assert_allclose(got.astype("f4"), right.astype("f4"), rtol=0, atol=2**-6)


@pytest.mark.parametrize("backend", ["host", "numpy"])
def test_ranges_of_keys_are_kept_as_well(backend):
    start = numpy.arange(LEN_Q)[:, None] // 40 * 50
    mask = KeyRanges(start, start + 70)
    kept = TileMask(mask)
    q, k, v, _ = inputs(DTYPE["80"])
    for _ in range(2):
        assert (attention(q, k, v, mask=kept, backend=backend) == attention(q, k, v, mask=mask, backend=backend)).all()
    assert len(kept.found) == (backend == "host") and "TileMask of ranges" in repr(kept)
    plan = plan_attention(q, k, v, mask=kept, backend=backend)
    assert (plan(q, k, v, mask=kept) == attention(q, k, v, mask=mask, backend=backend)).all()
