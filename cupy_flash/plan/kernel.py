"""What a problem is computed by: a `KernelPlan` and its `Config`, and what all planners ask of a problem.

A plan names everything that reaches a compiled kernel, so equal plans share one. Its knobs change speed, never results.
`forward`, `backward`, `merge`, `rotate` and `append` choose plans: pure functions over the tables in `tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ..errors import UnsupportedError
from ..problem.forward import Problem
from .architecture import Architecture
from .explicit_scores import LARGEST_SCALE, LEAST_SCALE
from .expression_text import NOTHING, ExpressionText, Pressure
from .sequences import knobs_of
from .tensor_map import layouts_of, obstacle
from .tuning import TileConfig, table_for

# The kernel files, and the struct of `kernels_cu/params.cuh` that every entry of a file is launched with.
PARAMS = {
    "fwd_v2": "ForwardParams",
    "fwd_v1": "ForwardParams",
    "fwd_hopper": "HopperForwardParams",
    "bwd_v2": "BackwardParams",
    "bwd_hopper": "HopperBackwardParams",
    "bwd_hopper_wide": "HopperBackwardParams",
    "bwd_hopper_mla": "HopperBackwardParams",
    "bwd_hopper_parts": "HopperBackwardParams",
    "bwd_scores": "ScoreGradientParams",
    "bwd_scores_hopper": "HopperScoreGradientParams",
    "merge": "MergeParams",
    "classify": "ClassifyParams",
    "rotate": "RotateParams",
    "append": "AppendParams",
    "fp16_parts": "Fp16PartsParams",
}
VARLEN_PARAMS = {"fwd_hopper": "HopperVarlenParams"}  # in place of these, for sequences of their own lengths
ADDED_OF_PAIRS = 4 * 32  # sums that a warp adds up where they belong to pairs, as the header has it


@dataclass(frozen=True, slots=True)
class Config:
    """The compile-time constants of a kernel, named as in ``kernels_cu/config.cuh`` and explained there."""

    ARCH: int
    DTYPE: str
    TF32_PASSES: int
    FP16_PARTS: int
    MASK: str
    SINKS: str
    SEVERAL_SINKS: bool
    SCORES: str
    MASKED_PAIRS: bool
    VARLEN: bool
    PAGED: bool
    CACHED: bool
    PIECE: int
    PRODUCER_WARPS: int
    TILE_LIST: bool
    IN_TURN: bool
    OWN_LISTS: bool
    PAIR_BITS: bool
    DROPOUT: bool
    PLACED: bool
    FLOAT32_RESULTS: bool
    ADD_RESULTS: bool
    TILE_Q: int
    TILE_KV: int
    Q_TILES: int
    WIDTH: int
    WIDTH_V: int
    DIM: int
    DIM_V: int
    WARPS: int
    WARPS_KV: int
    STAGES: int
    STAGES_V: int
    STAGES_Q: int
    TMA_STORE_OUT: bool
    STAGED_BIAS: bool
    STORE_DBIAS: bool
    CLUSTER: int
    PINGPONG: bool
    TMA_REDUCE_DQ: bool
    SCALE_SUMS: bool
    PERSISTENT: bool
    WHOLE_HEADS: bool
    ZEROS_AHEAD: bool
    STATS_AHEAD: bool
    FIRST_STORES: bool
    IN_ORDER: bool
    FROM_LAST: bool
    SPLIT_KV: bool
    UNLISTED: bool
    LAST_COMBINES: bool
    PACK_GQA: bool
    INNER_HEADS: int
    MIN_BLOCKS: int
    COPY_BYTES: int
    Q_IN_REGISTERS: bool
    LAZY_RESCALE: bool
    SOFTCAP: bool
    EXPLICIT_SCORES: bool
    ROTATE_Q: bool


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """A kernel file, its constants, and why they were chosen. Prints itself."""

    file: str
    architecture: Architecture
    config: Config
    reasons: tuple[str, ...] = field(compare=False)  # two plans of one kernel are equal, however they came about
    expressions: ExpressionText = NOTHING

    @property
    def params(self) -> str:
        """The struct that every entry is launched with."""
        return (VARLEN_PARAMS if self.config.VARLEN else {}).get(self.file, PARAMS[self.file])

    @property
    def threads(self) -> int:
        """Threads of a block, for every entry."""
        return 32 * self.config.WARPS

    @property
    def entries(self) -> dict[str, int]:
        """The entries of the file in the order of their launches, with the shared memory of a block, as each file states it."""
        c = self.config
        itemsize = 4 if c.DTYPE == "FLOAT32" else 2
        if self.file in ("merge", "rotate", "append"):
            return {self.file: 0}
        if self.file == "fp16_parts":
            return {"fp16_parts": 4 * c.WARPS, "fp16_parts_again": 0}
        if self.file == "classify":
            return {"classify": 4 * 8 * (1 + 16 * c.PAIR_BITS), "classify_columns": 0}  # of 8 tiles, and of their parts
        if self.file == "bwd_v2":
            keys, queries = 2 * c.TILE_KV * c.WIDTH, c.STAGES * 2 * c.TILE_Q * c.WIDTH  # K and V; Q and dO
            main = itemsize * (keys + queries + c.TILE_KV * c.TILE_Q) + c.STAGES * 2 * c.TILE_Q * 4
            post = itemsize * max(c.TILE_Q, c.TILE_KV) * c.WIDTH
            return {"bwd_v2_preprocess": 0, "bwd_v2": main, "bwd_v2_postprocess": post} | self._of_sinks
        if PARAMS[self.file] == "HopperBackwardParams":
            parts, widths = max(c.FP16_PARTS, 1), c.WIDTH + c.WIDTH_V
            ahead = c.WHOLE_HEADS and not c.STAGED_BIAS
            keys, queries = (1 + ahead) * parts * c.TILE_KV * widths, parts * c.STAGES * c.TILE_Q * widths  # K and V; Q and dO
            queries += c.STAGED_BIAS * c.STAGES * c.TILE_Q * c.TILE_KV * self._bias_bytes // itemsize
            stats, sums = c.STAGES * 2 * c.TILE_Q * 4, c.TMA_REDUCE_DQ * c.TILE_Q * c.WIDTH * 4
            barriers = 8 * (12 + 4 * ahead + 4 * c.STAGES + c.TMA_REDUCE_DQ) + c.VARLEN * (8 + 8 + 8 * c.TMA_REDUCE_DQ + 64)
            barriers = -(-barriers // 16) * 16 if c.TILE_LIST or c.PERSISTENT else barriers
            barriers += 16 * c.STAGES * c.TILE_LIST + c.PERSISTENT * (2 * (32 + 16) + 16)  # what is told of tiles
            main = itemsize * (keys + queries + parts * 2 * c.TILE_Q * c.TILE_KV) + stats + sums + barriers
            if c.STATS_AHEAD:  # out and dO of a later head, and barriers
                main = -(-main // 1024) * 1024 + itemsize * 2 * c.TILE_Q * c.WIDTH + 16
            main = -(-main // 16) * 16 + 1024 if c.ZEROS_AHEAD else main
            main += (2 * itemsize * c.TILE_Q * c.TILE_KV + 8 * 5) * (c.CLUSTER > 1)  # slices of dS, and barriers
            if self.file in ("bwd_hopper_wide", "bwd_hopper_mla"):
                main = -(-main // 16) * 16 + itemsize * 2 * c.TILE_Q * c.TILE_KV  # P
            elif self.file == "bwd_hopper_parts":
                main = -(-main // 16) * 16 + 16 * 4 + 32 * c.DROPOUT  # how large dS is, and what pairs are drawn from
            post = itemsize * max(c.TILE_Q, c.TILE_KV) * c.WIDTH
            return {f"{self.file}_preprocess": 0, self.file: main, f"{self.file}_postprocess": post} | self._of_sinks
        if self.file == "bwd_scores":
            tiles, stats = itemsize * 2 * (c.TILE_Q + c.TILE_KV) * c.WIDTH, 2 * c.TILE_Q * 4  # Q, dO, K and V
            folded = c.VARLEN * 4 * c.WARPS * c.TILE_KV  # sums of rows beyond an array
            main, add = c.STAGES * (tiles + stats) + folded, 4 * c.WARPS * (ADDED_OF_PAIRS if self.expressions.of_pairs else 32)
            of_blocks = {"bwd_scores": main, "bwd_scores_add": add, "bwd_scores_gather": add}
            return {"bwd_scores_clear": 0} | of_blocks | {"bwd_scores_store": 0}
        if self.file == "bwd_scores_hopper":
            operands = 128 * -(-c.WIDTH // 64) * (c.TILE_Q + c.TILE_KV)  # in panels of 64 columns
            bias, stats = 128 * c.TILE_Q * -(-c.TILE_KV // 64), (c.STAGES // 2 + 1) * 2 * c.TILE_Q * 4
            biases = c.STAGED_BIAS * (2 if c.WIDTH <= 64 else 1)
            main = c.STAGES * operands + biases * bias + stats + 8 * 2 * (c.STAGES + biases)
            add = {f"{self.file}_add": 4 * c.WARPS * (ADDED_OF_PAIRS if self.expressions.of_pairs else 32)}
            if ("ONE_BIAS", "true") in self.expressions.constants:
                return {self.file: main} | add
            gather = {f"{self.file}_gather": add[f"{self.file}_add"], f"{self.file}_store": 0}
            return {f"{self.file}_clear": 0, self.file: main} | add | gather
        if self.file == "fwd_hopper":
            panels, panels_v = (max(c.FP16_PARTS, 1) * -(-width // 64) for width in (c.WIDTH, c.WIDTH_V))  # 128 bytes a row
            queries = 64 * c.STAGES_Q * panels + c.TMA_STORE_OUT * c.TILE_Q * panels_v  # and out
            keys, values = c.STAGES * c.TILE_KV * panels, c.STAGES_V * c.TILE_KV * panels_v
            told = 4 * (4 if c.OWN_LISTS else int(c.TILE_LIST))  # of each key tile
            work = (48 + 32 * c.VARLEN) * c.STAGES_Q + told * c.STAGES + 8 * (c.VARLEN + c.PAGED)
            biases = c.STAGED_BIAS * c.STAGES * c.TILE_Q * -(-c.TILE_KV * self._bias_bytes // 128)
            tiles, barriers = 128 * (queries + keys + biases + values), 8 * 2 * (c.STAGES + c.STAGES_V + c.STAGES_Q)
            stage, last = 16 * (c.TILE_KV + 1), 32 * max(c.TILE_KV, 64)  # of terms; as an operand the last takes so many bytes
            columns, steps = 128 + stage * c.STAGES, 128 * (1 + self.expressions.bends) * c.STAGES_Q  # ones, and terms of keys
            terms = {"PLUS_COLUMN": (columns, columns - stage + last), "PLUS_LINEAR": (steps + 16 * c.TILE_KV, steps + last)}
            own, end = terms.get(c.SCORES, (4 * c.TILE_KV * c.STAGES * self.expressions.has_key_term, 0))
            main = max(tiles + own + barriers + work, min(tiles + end, self.architecture.shared_bytes) if end else 0)
            return self._schedule | {self.file: main} | ({"fwd_hopper_combine": 0} if c.SPLIT_KV else {})
        queries = c.WARPS_KV * c.TILE_Q * max(c.WIDTH, c.WIDTH_V)
        main = {self.file: itemsize * (queries + c.STAGES * c.TILE_KV * (c.WIDTH + c.WIDTH_V))}
        return self._schedule | main | ({f"{self.file}_combine": 0} if c.SPLIT_KV and not c.LAST_COMBINES else {})

    @property
    def _schedule(self) -> dict[str, int]:
        """The entry of a forward that finds query tiles of sequences, with its bins; few queries whose keys are split have none."""
        c, size = self.config, 4 * 2 * 128
        finds_own = c.UNLISTED or (c.SPLIT_KV and self.file == "fwd_v2")
        return {f"{self.file}_schedule": size} if c.IN_TURN or (c.VARLEN and not finds_own) else {}

    @property
    def _bias_bytes(self) -> int:
        """Of an element of a bias, if there is one."""
        return 4 if ("BiasElement", "float") in self.expressions.constants else 2

    @property
    def _of_sinks(self) -> dict[str, int]:
        """The entry of a backward that makes gradients of sinks, if there are any."""
        return {} if self.config.SINKS == "NO_SINKS" else {f"{self.file}_sinks": 4 * self.config.WARPS}

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, of the entry that has most."""
        return max(self.entries.values())

    @property
    def name(self) -> str:
        """Kernel, architecture and whatever tells this plan from others, on one line."""
        c = self.config
        words = [self.file, str(self.architecture), c.DTYPE.lower(), f"d{c.DIM}"] + [f"v{c.DIM_V}"] * (c.DIM_V != c.DIM)
        words += ["tf32"] * (c.TF32_PASSES == 1) + [f"{c.TILE_Q}x{c.TILE_KV}", f"w{c.WARPS}"]
        words += [f"kv{c.WARPS_KV}"] * (c.WARPS_KV > 1) + [f"q{c.Q_TILES}"] * (c.Q_TILES > 1)
        if self.file == "fwd_hopper":
            words.append(f"q{c.STAGES_Q}k{c.STAGES}v{c.STAGES_V}" + "o" * c.TMA_STORE_OUT + "b" * c.STAGED_BIAS + "p" * c.PINGPONG)
        else:
            words += [f"b{c.MIN_BLOCKS}"] * (c.MIN_BLOCKS > 2) + [f"s{c.STAGES}"] * (self.file == "fwd_v2" and c.STAGES != 2)
            words += [f"copy{c.COPY_BYTES or 'elements'}"] + ["staged"] * (c.STAGED_BIAS and self.file == "bwd_scores_hopper")
        words += ["split"] * c.SPLIT_KV + ["unlisted"] * c.UNLISTED + ["lastcombines"] * c.LAST_COMBINES
        words += ["fromlast"] * c.FROM_LAST + ["inorder"] * c.IN_ORDER
        words += ["packgqa"] * c.PACK_GQA + [f"inner{c.INNER_HEADS}"] * (c.INNER_HEADS > 1) + ["explicit"] * c.EXPLICIT_SCORES
        words += ["first"] * c.FIRST_STORES + [c.SCORES.lower()] * (c.SCORES != "UNCHANGED") + ["maskedpairs"] * c.MASKED_PAIRS
        words += ["tilelist"] * c.TILE_LIST + ["ownlists"] * c.OWN_LISTS + ["inturn"] * c.IN_TURN + ["pairbits"] * c.PAIR_BITS
        words += ["persistent"] * c.PERSISTENT + ["scalesums"] * c.SCALE_SUMS + ["statsahead"] * c.STATS_AHEAD
        words += ["zerosahead"] * c.ZEROS_AHEAD + ["varlen"] * c.VARLEN + ["paged"] * c.PAGED + ["cached"] * c.CACHED
        words += ["rotateq"] * c.ROTATE_Q + [f"pieces{c.PIECE}" if c.PIECE else "copied"] * (c.PAGED and self.file == "fwd_hopper")
        words += [f"producers{c.PRODUCER_WARPS}"] * (c.PRODUCER_WARPS > 1) + ["dropout"] * c.DROPOUT + ["placed"] * c.PLACED
        words += [f"parts{c.FP16_PARTS}"] * (c.FP16_PARTS > 0) + ["float32results"] * c.FLOAT32_RESULTS
        words += ["added"] * c.ADD_RESULTS + ["dbias"] * c.STORE_DBIAS + ["wholeheads"] * c.WHOLE_HEADS
        words += [f"cluster{c.CLUSTER}"] * (c.CLUSTER > 1)
        words += [c.MASK.lower()] * (c.MASK != "BAND") + [c.SINKS.lower()] * (c.SINKS != "NO_SINKS") + ["several"] * c.SEVERAL_SINKS
        return "-".join(words)

    def __str__(self) -> str:
        constants = ", ".join(f"{knob.name}={getattr(self.config, knob.name)}" for knob in fields(self.config))
        lines = [
            f"{self.file} for {self.architecture}: {self.threads} threads, {self.shared_bytes} bytes of shared memory",
            f"  {constants}",
            *(f"  {reason}" for reason in self.reasons),
        ]
        return "\n".join(lines)


def check_kind(architecture: Architecture, name: str, dtype: str, precision: str = "ieee") -> None:
    """Refuse what came with sm_80 only."""
    if dtype == "bfloat16" and architecture.number < 80:
        raise UnsupportedError(f"{name}: expected float16 or float32 on {architecture}, which has no bfloat16, got bfloat16")
    if precision == "tf32" and architecture.number < 80:
        raise UnsupportedError(f"precision: expected None or 'ieee' on {architecture}, which has no tf32, got 'tf32'")


WIDE = 128  # head dims above which two ranges of keys leave a Hopper kernel without registers
APART = ("PLUS_LINEAR", "PLUS_COLUMN", "SCALED")  # kinds of scores of which pairs have parts in common


def kind_of_sinks(problem: Problem) -> str:
    """What a kernel is compiled for: one of `SinkKind` in ``kernels_cu/config.cuh``."""
    if problem.sinks is None:
        return "NO_SINKS"
    return "SINKS_OF_DTYPE" if problem.sinks.dtype == problem.dtype else "SINKS_FLOAT32"


def text_of(problem: Problem) -> ExpressionText:
    """The text of what becomes of scores."""
    if not problem.scores.of_pairs:
        return NOTHING
    from .expressions import expression_text  # late: it takes the language of expressions

    return expression_text(problem.scores, problem.softcap is not None, max(problem.len_q, problem.len_kv))


def taken_apart(problem: Problem, expressions: ExpressionText, bends: bool = False, listed: bool = False) -> ExpressionText:
    """The text of what becomes of scores for a kernel that takes it apart, where not every pair has a part of its own.

    Of scores that are scaled one by one it takes none: there a term is added to each. `bends`: also one that bends at a diagonal.
    `listed`: blocks visit tiles of a list, of which nobody finds terms of keys beside a bias.
    """
    asked = expressions.kind in ("PLUS_TERM", "EXPRESSION")
    if not asked or problem.softcap is not None or not LEAST_SCALE <= problem.scale <= LARGEST_SCALE:
        return expressions
    from .apart import apart_text  # late, as the text

    return apart_text(problem.scores, problem.mask, expressions, bends, beside_bias=not listed and _brings_bias_alone(problem))


def _brings_bias_alone(problem: Problem) -> bool:
    """Whether TMA brings a bias, and nothing else is asked for each pair: then idle warps find terms of keys beside it."""
    scores = problem.scores
    if scores.bias is None or scores.masks_pairs or scores.dropout is not None or problem.lengths is not None:
        return False
    return problem.mask.queries is None and not obstacle(problem.batch, layouts_of(problem), ("bias",))


def rows_of(
    kernel: str, architecture: Architecture, problem: Problem, expressions: ExpressionText = NOTHING
) -> tuple[TileConfig, ...]:
    """The rows of a kernel for a problem: where something is asked for each pair, not those of its table; none if it has none."""
    if not problem.scores:
        return table_for(kernel, architecture, problem.dtype)
    from .pair_tuning import APART_ROWS, STAGED_FLOAT32_ROWS, STAGED_ROWS, pair_rows  # late, as the text

    pressure, dropout = expressions.pressure, problem.scores.dropout
    if pressure in (Pressure.MASK, Pressure.READING_MASK, Pressure.LONG_MASK) and problem.lengths is not None:
        # There are no lists of tiles, so that every pair is asked; of ranges of keys that takes more registers.
        ranges, wide = problem.scores.ranges, max(problem.dim, problem.dim_v) > WIDE
        of_ranges = Pressure.MANY if ranges > 1 and wide else Pressure.SEVERAL
        pressure = of_ranges if ranges > 0 else Pressure.LOOKUPS if dropout is None else pressure
    wide_bias = pressure is Pressure.BIAS and problem.scores.bias.dtype == "float32"
    paged = problem.lengths is not None and problem.lengths.paged
    staged = (expressions.kind, pressure, paged, architecture.name) == ("PLUS_TERM", Pressure.BIAS, False, "90a")
    tables = {} if not staged else STAGED_FLOAT32_ROWS if wide_bias else STAGED_ROWS
    if kernel in tables and not obstacle(problem.batch, layouts_of(problem), ("bias",)):
        return tables[kernel]
    if wide_bias and kernel == "fwd_hopper":
        pressure = Pressure.SEVERAL  # it takes twice the registers of a bias of 16 bits
    bits = expressions.pair_bits
    if expressions.kind in APART and pressure is Pressure.TERM and dropout is None and not (bits and kernel == "bwd_hopper"):
        # Registers of plain rows hold what a row or a head has in common, but of a few.
        of_sums = expressions.kind == "SCALED" and problem.heads_per_kv == 1  # a block multiplies these, not each dS
        return (not of_sums and APART_ROWS.get((kernel, expressions.kind))) or table_for(kernel, architecture, problem.dtype)
    return pair_rows(kernel, architecture.name, problem.dtype, pressure, bits, dropout is not None)


def configure(
    row: TileConfig,
    architecture: Architecture,
    dtype: str,
    precision: str,
    width: int,
    width_v: int,
    copy_bytes: int = 16,
    explicit: bool = False,
    split_kv: bool = False,
    unlisted: bool = False,
    last_combines: bool = False,
    pack_gqa: bool = False,
    mask: str = "BAND",
    sinks: str = "NO_SINKS",
    several_sinks: bool = False,
    problem: Problem | None = None,
    expressions: ExpressionText = NOTHING,
    tile_list: bool = False,
    own_lists: bool = False,
    pair_bits: bool = False,
    in_turn: bool = False,
    from_last: bool = False,
    adds: bool = False,
    store_dbias: bool = False,
    cluster: int = 1,
    persistent: bool = False,
    columns: tuple[int, int] | None = None,
) -> Config:
    """The constants of a kernel: what the problem adds, and of the same name in a row of a tuning table, all others."""
    given = {
        "ARCH": architecture.number,
        "DTYPE": dtype.upper(),
        "TF32_PASSES": 1 if precision == "tf32" else 3,
        "WIDTH": width,
        "WIDTH_V": width_v,
        **dict(zip(("DIM", "DIM_V"), columns or (width, width_v))),
        "COPY_BYTES": copy_bytes,
        "EXPLICIT_SCORES": explicit,
        "FROM_LAST": from_last,
        "SPLIT_KV": split_kv,
        "UNLISTED": unlisted,
        "LAST_COMBINES": last_combines,
        "PACK_GQA": pack_gqa,
        "MASK": mask,
        "SINKS": sinks,
        "SEVERAL_SINKS": several_sinks,
        "SCORES": expressions.kind,
        "MASKED_PAIRS": bool(expressions.takes_part) or expressions.pair_bits,
        **knobs_of(None if problem is None else problem.lengths),
        "TILE_LIST": tile_list,
        "IN_TURN": in_turn,
        "OWN_LISTS": own_lists,
        "PAIR_BITS": expressions.pair_bits or pair_bits,
        "DROPOUT": problem is not None and problem.scores.dropout is not None,
        "PLACED": problem is not None and problem.scores.place is not None,
        "FLOAT32_RESULTS": problem is not None and problem.has_wider_results,
        "ADD_RESULTS": adds,
        "SOFTCAP": problem is None or problem.softcap is not None or (expressions.kind == "UNCHANGED" and not explicit),
        # of a plan
        **dict.fromkeys(("WHOLE_HEADS", "SCALE_SUMS", "ZEROS_AHEAD", "STATS_AHEAD", "FIRST_STORES", "IN_ORDER", "ROTATE_Q"), False),
        **{"STORE_DBIAS": store_dbias, "CLUSTER": cluster, "PERSISTENT": persistent, "INNER_HEADS": 1, "FP16_PARTS": 0},
    }
    return Config(**given, **{knob.name: getattr(row, knob.name.lower()) for knob in fields(Config) if knob.name not in given})
