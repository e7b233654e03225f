"""What each kernel is run with where its barriers are left out one at a time: shapes and constants in which it needs them all."""

from dataclasses import dataclass, replace

import numpy

from cupy_flash.judge.cases import Case


@dataclass(frozen=True)
class Setting:
    """What a kernel computes here, with these constants, and of a backward, whether dq is summed in order and who finishes it."""

    case: Case
    constants: dict[str, object]
    deterministic: bool = False
    last_blocks: int = 0  # see `plan.grouping.make_grouping`
    seen: numpy.ndarray | None = None  # a mask of pairs
    offsets: tuple[list[int], list[int]] | None = None  # of sequences of queries and of keys
    kernel: str | None = None  # of `classify`, what it is launched before
    ahead: bool = False  # groups of one head, after which is there what blocks make for later heads

    def but(self, deterministic=False, **constants):
        return replace(self, constants=self.constants | constants, deterministic=deterministic)


# Many small tiles of keys, and a causal mask, so that the warps of a block see different ones and drift apart.
CASE = Case("float16", 40, 75, dim=32, heads_q=2, causal=True)
TWO_STAGES = Setting(CASE, {"TILE_Q": 32, "TILE_KV": 16, "WARPS": 2, "STAGES": 2, "Q_IN_REGISTERS": True})
TWO_PAIRS = Setting(CASE, {"TILE_Q": 32, "TILE_KV": 32, "WARPS": 4, "STAGES": 2})
# More tiles than blocks, so that a block takes several in turn, and two warpgroups besides the one that loads.
HOPPER_CASE = Case("float16", 150, 75, dim=32, heads_q=3, causal=True)
TWO_STAGES_EACH = {"TILE_Q": 128, "TILE_KV": 16, "WARPS": 12, "STAGES": 2, "STAGES_V": 2, "STAGES_Q": 4, "TMA_STORE_OUT": True}
TWO_GROUPS = Setting(HOPPER_CASE, TWO_STAGES_EACH)
# Two heads to a block, more blocks than one to a head, more tiles of queries than stages, and more rows of dq than leave at once.
HOPPER_BACKWARD_CASE = Case("float16", 150, 200, dim=32, heads_q=2, heads_kv=1, causal=True)
MORE_HEADS = Case("float16", 150, 330, dim=32, heads_q=6, heads_kv=3)
OWN_KEYS = Setting(HOPPER_BACKWARD_CASE, {"TILE_Q": 64, "TILE_KV": 128, "WARPS": 12, "STAGES": 2, "WIDTH": 64, "WIDTH_V": 64})
STAGED = OWN_KEYS.but(TILE_Q=80, TMA_REDUCE_DQ=True, WIDTH=128, WIDTH_V=128, DIM=80, DIM_V=80)
ONE_GRADIENT = Setting(HOPPER_BACKWARD_CASE, {"WIDTH": 128, "WIDTH_V": 128})


# Sequences with tiles of several lengths, more than a block has threads, and rows of none.
OFFSETS = [*range(80), 120], [*range(0, 3 * 80, 3), 300]
SEQUENCES = replace(TWO_STAGES, case=Case("float16", 130, 310, dim=32, heads_q=2), offsets=OFFSETS)

# The same with work tiles of several lengths for each block, whose keys end within a tile.
FEW_OFFSETS = [0, 20, 20, 85, 120], [0, 75, 80, 190, 300]

# Of many tiles of keys some: others for each tile of queries.
SOME_TILES, SOME_OF_MORE_KEYS = (numpy.add.outer(numpy.arange(150) // 20, numpy.arange(n) // 10) % 3 > 0 for n in (75, 200))
NOT_THE_SECOND = (numpy.add.outer(numpy.arange(150) // 20, numpy.arange(330) // 10) % 3 > 0) & (numpy.arange(330) // 128 != 1)
# And of 64 queries each fewer than of 128: some in between, several in a row, the last ones.
OF_CONSUMERS = numpy.array([[1, 0, 0, 1, 0], [1, 1, 1, 0, 1], [0, 1, 0, 0, 0]], bool)
TILES_OF_64 = OF_CONSUMERS[numpy.arange(150) // 64][:, numpy.arange(75) // 16]


def settings_of(kernel):
    """Settings that between them reach every call of a kernel."""
    if kernel == "classify":
        lists = replace(TWO_STAGES, seen=SOME_TILES[:40], kernel="fwd_v2")
        return {"lists": lists, "bits": replace(TWO_GROUPS, seen=SOME_TILES, kernel="fwd_hopper")}
    if kernel == "fwd_hopper":
        pingpong = TWO_GROUPS.but(PINGPONG=True)  # and one of them needs fewer tiles
        leaps = replace(TWO_GROUPS, case=replace(HOPPER_CASE, values="large"))  # of the maximum, in later tiles of keys
        split = replace(TWO_GROUPS.but(SPLIT_KV=True), case=replace(HOPPER_CASE, len_q=100))  # three tiles on two blocks
        lanes_store = TWO_GROUPS.but(STAGES_Q=3, TMA_STORE_OUT=False)
        sequences = {"sequences": replace(lanes_store, case=SEQUENCES.case, offsets=FEW_OFFSETS)}
        settings = sequences | {"two stages": TWO_GROUPS, "leaps": leaps}
        settings |= {"one stage": lanes_store.but(STAGES=1, STAGES_V=1, STAGES_Q=2)}
        settings |= {"ping-pong": pingpong, "ping-pong, far apart": pingpong.but(STAGES=1, STAGES_V=1)}
        own_lists = replace(pingpong.but(OWN_LISTS=True), case=replace(HOPPER_CASE, causal=False), seen=TILES_OF_64)
        settings |= {"lists": replace(TWO_GROUPS, seen=SOME_TILES), "lists of consumers": own_lists}
        settings |= {"lists of consumers, one stage": own_lists.but(STAGES=1, STAGES_V=1, PINGPONG=False)}
        settings |= {"lists, in turn": replace(TWO_GROUPS.but(IN_TURN=True), seen=SOME_TILES)}
        settings |= {"three groups, four stages": TWO_GROUPS.but(TILE_Q=192, WARPS=16)}
        four = lanes_store.but(TILE_Q=256, WARPS=20, STAGES_Q=5, PINGPONG=True)
        settings |= {"sequences, four groups": replace(four, case=SEQUENCES.case, offsets=FEW_OFFSETS)}
        return settings | {"three stages": lanes_store, "one key tile": lanes_store.but(TILE_KV=80), "split": split}
    if kernel == "bwd_hopper":
        wide = OWN_KEYS.but(True, TILE_Q=128, STAGES=1, WIDTH=128, WIDTH_V=128, DIM=80, DIM_V=80, FIRST_STORES=False)
        staged = {"staged": replace(STAGED, last_blocks=1), "staged, in order": STAGED.but(True, FIRST_STORES=False)}
        staged |= {"staged, first stores": STAGED.but(True, FIRST_STORES=True)}
        staged |= {"first stores": OWN_KEYS.but(True, FIRST_STORES=True)}
        stored = replace(OWN_KEYS, case=replace(HOPPER_BACKWARD_CASE, bias="full"))  # with its gradient
        shared = replace(OWN_KEYS, case=replace(HOPPER_BACKWARD_CASE, len_q=300, bias="heads", batch=(2,)))
        case = Case("float16", 200, 310, dim=32, heads_q=2, heads_kv=1)  # one sequence has more tiles of queries than stages
        sequences = replace(OWN_KEYS, case=case, offsets=([0, 20, 20, 170, 190], [0, 75, 80, 230, 300]))
        settings = {"two stages": OWN_KEYS, "one stage, wide, in order": wide} | staged | {"stored": stored, "cluster": shared}
        lists = replace(OWN_KEYS, seen=SOME_OF_MORE_KEYS)
        # Several key tiles for each block, one in between seen by nobody.
        persistent = replace(lists.but(PERSISTENT=True), case=MORE_HEADS, seen=NOT_THE_SECOND)
        ahead = replace(OWN_KEYS.but(STATS_AHEAD=True), case=replace(MORE_HEADS, len_q=330), ahead=True)
        zeros = replace(STAGED.but(ZEROS_AHEAD=True), case=MORE_HEADS, ahead=True)
        whole = replace(OWN_KEYS.but(PERSISTENT=True, WHOLE_HEADS=True), case=MORE_HEADS)
        settings |= {"sequences": sequences, "lists": lists, "persistent": persistent, "whole heads": whole}
        both = replace(sequences.but(STATS_AHEAD=True, ZEROS_AHEAD=True), case=replace(case, heads_q=6, heads_kv=3), ahead=True)
        settings |= {"sequences ahead": both}
        return settings | {"statistics ahead": ahead, "zeros ahead": zeros}
    if kernel == "bwd_hopper_wide":
        lists = replace(ONE_GRADIENT, seen=SOME_OF_MORE_KEYS)
        zeros = replace(ONE_GRADIENT.but(ZEROS_AHEAD=True), case=MORE_HEADS, ahead=True)
        in_order = ONE_GRADIENT.but(True, FIRST_STORES=False)
        return {"any order": replace(ONE_GRADIENT, last_blocks=1), "in order": in_order, "lists": lists, "zeros ahead": zeros}
    if kernel == "bwd_hopper_mla":
        case = replace(HOPPER_BACKWARD_CASE, dim=136, dim_v=40)
        setting, more = Setting(case, {}), replace(MORE_HEADS, dim=136, dim_v=40)
        sequences = replace(setting, offsets=([0, 20, 20, 130, 150], [0, 75, 80, 190, 200]))
        zeros = replace(setting.but(ZEROS_AHEAD=True), case=more, ahead=True)
        settings = {"any order": replace(setting, last_blocks=1), "in order": setting.but(True, FIRST_STORES=False)}
        return settings | {"sequences": sequences, "zeros ahead": zeros}
    if kernel == "bwd_hopper_parts":
        parts, more = Setting(replace(HOPPER_BACKWARD_CASE, dtype="float32"), {}), replace(MORE_HEADS, dtype="float32")
        wide = replace(parts, case=replace(parts.case, dim=80), last_blocks=1)
        lists, in_order = replace(parts, seen=SOME_OF_MORE_KEYS), parts.but(True, FIRST_STORES=False)
        zeros = replace(parts.but(ZEROS_AHEAD=True), case=more, ahead=True)
        settings = {"any order": parts, "wide": wide, "wide, lists": replace(wide, seen=SOME_OF_MORE_KEYS)}
        return settings | {"in order": in_order, "lists": lists, "zeros ahead": zeros}
    if kernel == "bwd_scores":
        setting = Setting(CASE, {"TILE_Q": 32, "TILE_KV": 16, "WARPS": 2, "STAGES": 2})
        return {"two stages": setting, "one stage": setting.but(STAGES=1), "stores": setting.but(COPY_BYTES=0)}
    if kernel == "bwd_scores_hopper":
        setting = Setting(replace(HOPPER_BACKWARD_CASE, batch=(3,), bias="heads"), {"TILE_Q": 128, "TILE_KV": 64, "STAGES": 2})
        parts = replace(setting, case=replace(setting.case, heads_q=1, bias="pairs"))  # few units, which blocks share
        # Of keys, with several tiles to a unit, and an odd number of steps, or turns that nobody waits for would go unnoticed.
        walks = replace(setting, case=replace(setting.case, bias=None, batch=(), heads_q=1))
        return {"stores": setting, "parts": parts, "registers": setting.but(STAGED_BIAS=False), "walks": walks}
    setting = TWO_PAIRS if kernel.startswith("bwd") else TWO_STAGES
    if kernel == "fwd_v2":
        splits = replace(setting.but(SPLIT_KV=True, LAST_COMBINES=True), case=Case("float16", 60, 1030, dim=32))
        own_keys = replace(setting.but(TILE_Q=16, TILE_KV=32, WARPS_KV=2), case=replace(CASE, len_q=12))
        of_warps = {"keys of warps": own_keys, "keys of warps, stores": own_keys.but(COPY_BYTES=0)}
        no_tile = replace(own_keys.but(Q_IN_REGISTERS=False), seen=numpy.zeros((12, 75), bool))
        of_warps |= {"keys of warps, none seen": no_tile}
        return {"sequences": SEQUENCES, "splits": splits} | _stages(setting) | of_warps
    sinks = {"sinks": replace(TWO_PAIRS.but(SINKS="SINKS_FLOAT32"), case=replace(CASE, sinks=1))}
    return (sinks if kernel.startswith("bwd") else {}) | _stages(setting)


def _stages(setting):
    return {
        "two stages": setting,
        "one stage": setting.but(STAGES=1),
        "stores": setting.but(COPY_BYTES=0),  # in place of copies: lanes see each other's after a barrier
    }


def diagonal(offsets):
    """Which pairs are of one sequence."""
    queries, keys = (numpy.repeat(numpy.arange(len(x) - 1), numpy.diff(x)) for x in offsets)
    return queries[:, None] == keys
