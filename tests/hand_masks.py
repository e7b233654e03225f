"""Masks as expressions, and what they mean written by hand, as `hand_scores` has scores."""

import numpy
from hand_scores import Example

# Masks


def documents(at, arrays):
    return arrays["doc"][at.q_idx] == arrays["doc_kv"][at.kv_idx]


def prefixes(at, arrays):
    last = numpy.maximum(at.q_idx + at.kv_len - at.q_len, arrays["prefix"][at.b] - 1)
    return at.kv_idx <= last


def only_prefixes(at, arrays):
    return ~(at.kv_idx >= arrays["prefix"][at.b])


def sinks_and_window(at, arrays):
    behind = at.q_idx + at.kv_len - at.q_len - at.kv_idx
    near = (behind >= 0) & (behind < arrays["width"])
    near[:, :2] = True
    return near


def tree(at, arrays):
    words = arrays["ancestors"]
    bits = numpy.unpackbits(words.astype("<u2").view("u1").reshape(len(words), -1), axis=1, bitorder="little")
    return bits[:, : at.kv_len].astype(bool)


def checkerboard(at, arrays):
    return at.q_idx % 2 == at.kv_idx % 2


def windows(at, arrays):
    width = arrays["width"][at.h]
    return (at.kv_idx - at.q_idx <= width) & (at.q_idx - at.kv_idx <= width)


def allowed(at, arrays):
    return arrays["allowed"][at.h, at.kv_idx]


def limits(at, arrays):
    return at.kv_idx < arrays["limit"][at.b, at.q_idx]


def holes(at, arrays):
    return (at.kv_idx < arrays["first"][at.b]) | (at.kv_idx >= arrays["last"][at.b])


def strided(at, arrays):
    return at.kv_idx % (2 + at.h_kv) > 0


def draw_documents(rng, shape, grid):
    return numpy.sort(rng.integers(0, 4, shape))


def draw_keys(rng, shape, grid):
    return rng.integers(0, grid.kv_len + 1, shape)


def draw_limits(rng, shape, grid):
    """The first row of each batch element sees nothing."""
    limits = draw_keys(rng, shape, grid)
    limits[:, :1] = 0
    return limits


def draw_ancestors(rng, shape, grid):
    """Bits of keys: each query is a node of a tree, whose parent comes before it, and sees its ancestors and itself."""
    seen = numpy.zeros((grid.q_len, 16 * shape[1]), bool)
    for i in range(grid.q_len):
        if i:
            seen[i] = seen[rng.integers(0, i)]
        seen[i, min(i, grid.kv_len - 1)] = True
    return (seen.reshape(grid.q_len, shape[1], 16) << numpy.arange(16)).sum(axis=-1)


MASKS = (
    Example(
        "documents",
        "doc[q_idx] == doc_kv[kv_idx]",
        documents,
        {"doc": "q_idx: int", "doc_kv": "kv_idx: int"},
        values={"doc": draw_documents, "doc_kv": draw_documents},
    ),
    Example("only_prefixes", "kv_idx < prefix[b]", only_prefixes, {"prefix": "b: int"}, values={"prefix": draw_keys}),
    Example(
        "prefixes",
        "kv_idx <= q_idx + kv_len - q_len or kv_idx < prefix[b]",
        prefixes,
        {"prefix": "b: int"},
        values={"prefix": draw_keys},
    ),
    Example(
        "sinks_and_window",
        "kv_idx < 2 or 0 <= q_idx + kv_len - q_len - kv_idx < width",
        sinks_and_window,
        {"width": ": int"},
        values={"width": lambda rng, shape, grid: 3},
    ),
    Example(
        "tree",
        "ancestors[q_idx, kv_idx // 16] >> kv_idx % 16 & 1 == 1",
        tree,
        {"ancestors": "q_idx _: int"},
        values={"ancestors": draw_ancestors},
        free=lambda grid: -(-grid.kv_len // 16),
    ),
    Example("checkerboard", "(q_idx + kv_idx) % 2 == 0", checkerboard, {}),
    Example(
        "windows",
        "abs(q_idx - kv_idx) <= width[h]",
        windows,
        {"width": "h: int"},
        values={"width": lambda rng, shape, grid: rng.integers(0, 8, shape)},
    ),
    Example(
        "allowed",
        "allowed[h, kv_idx]",
        allowed,
        {"allowed": "h kv_idx: bool"},
        values={"allowed": lambda rng, shape, grid: rng.random(shape) < 0.6},
    ),
    Example("limits", "kv_idx < limit[b, q_idx]", limits, {"limit": "b q_idx: int"}, values={"limit": draw_limits}),
    Example(
        "holes",
        "not first[b] <= kv_idx < last[b]",
        holes,
        {"first": "b: int", "last": "b: int"},
        values={"first": draw_keys, "last": draw_keys},
    ),
    Example("strided", "kv_idx % (h_kv + 2) != 0", strided, {}),
)
