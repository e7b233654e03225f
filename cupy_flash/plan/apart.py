"""What becomes of scores taken apart: what a head, a key or a row of a tile has in common is not computed again for each pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial, reduce

from ..problem.expression.simplify import simplified, simplify
from ..problem.expression.tree import SCORE, Apply, Name, Node, walk
from ..problem.mask import Mask
from ..problem.scores import Scores
from .expression_text import ExpressionText, Pressure
from .expressions import BIAS, mask_tree, of_places, value_tree, without_score, written
from .hoisting import hoisted, is_uniform, times_unit
from .linear import Bent, Steps, bent_at, steps_of, without_abs


def apart_text(scores: Scores, mask: Mask, text: ExpressionText, bends: bool, beside_bias: bool = False) -> ExpressionText:
    """The text with a factor of all scores of a head, a term of the key alone or one that is linear in places taken apart.

    Any other is left as it is.

    Parameters
    ----------
    scores : Scores
    mask : Mask
        Pairs that it hides may have any term.
    text : ExpressionText
        That of `expression_text`.
    bends : bool
        Whether a term is taken apart that is linear on either side of a diagonal alone.
    beside_bias : bool, optional
        Whether a term of the key is that is added to a bias.
    """
    value = simplify(value_tree(scores))
    if text.kind == "EXPRESSION":
        return replace(text, kind="SCALED", score="", pressure=_pressure(scores, text)) if _is_scaled(value) else text
    term = simplify(without_abs(without_score(value), mask))
    steps = steps_of(term) if scores.bias is None else None
    if steps is not None:
        return _with_term(scores, mask, text, "PLUS_LINEAR", term, steps)
    bent = bent_at(term) if bends and scores.bias is None else None
    if bent is not None:
        return _with_term(scores, mask, text, "PLUS_LINEAR", bent.before, bent.steps, bent)
    if _is_of_key(term, scores):
        return _with_term(scores, mask, text, "PLUS_COLUMN", term)
    besides = _beside_bias(term, scores) if beside_bias else None
    return text if besides is None else _with_key_term(scores, text, besides)


def _with_term(
    scores: Scores, mask: Mask, text: ExpressionText, kind: str, term: Node, steps: Steps | None = None, bent: Bent | None = None
) -> ExpressionText:
    # Of the term, a row or a key of a tile is asked for one pair, whose places as ints take fewer operations.
    of_steps = (None, None) if steps is None else (steps.per_key, steps.per_query)
    of_bend = (None, None) if bent is None else (bent.bend, bent.diagonal)
    of_pairs = of_places((mask_tree(scores),), max(mask.len_q, mask.len_kv))
    trees, uniforms = hoisted((term, *of_steps, *of_bend, *of_pairs))
    arrays = dict(scores.arrays)
    term, per_key, per_query, bend, diagonal, takes_part = (written(tree, arrays, scores.free_axes) for tree in trees)
    of_head = tuple(written(tree, arrays, scores.free_axes) for tree in uniforms)
    changed = ("UNIFORMS", "BIAS_BY_TWO") if kind == "PLUS_COLUMN" else ("UNIFORMS",)
    constants = {name: value for name, value in text.constants if name not in changed}
    constants |= {"UNIFORMS": str(len(uniforms))} if uniforms else {}
    constants |= {"BENDS": "true"} if bent is not None else {}
    return replace(
        text,
        kind=kind,
        term=term,
        per_key=per_key,
        per_query=per_query,
        bend=bend,
        diagonal=diagonal,
        takes_part=takes_part,
        uniforms=of_head,
        constants=tuple(constants.items()),
        pressure=_pressure(scores, text),
    )


def _with_key_term(scores: Scores, text: ExpressionText, besides: Node) -> ExpressionText:
    trees, uniforms = hoisted((times_unit(BIAS), besides))
    arrays = dict(scores.arrays)
    term, key_term = (written(tree, arrays, scores.free_axes) for tree in trees)
    constants = {name: value for name, value in text.constants if name != "UNIFORMS"} | {"HAS_KEY_TERM": "true"}
    constants |= {"UNIFORMS": str(len(uniforms))} if uniforms else {}
    return replace(
        text,
        term=term,
        key_term=key_term,
        uniforms=tuple(written(tree, arrays, scores.free_axes) for tree in uniforms),
        constants=tuple(constants.items()),
        pressure=Pressure.BIAS,
    )


def _beside_bias(term: Node, scores: Scores) -> Node | None:
    """What is added to the bias in a term, if that is the same for all queries of a head; None of any other."""
    others = [simplified("neg", node) if negated else node for node, negated in _addends(term) if node != BIAS]
    besides = reduce(partial(simplified, "+"), others) if others else None
    return besides if besides is not None and _is_of_key(besides, replace(scores, bias=None)) else None


def _addends(tree: Node, negated: bool = False) -> Iterator[tuple[Node, bool]]:
    """What a sum is made of, and whether it is subtracted."""
    match tree:
        case Apply(op="+" | "-", args=(x, y), kind="float"):
            yield from _addends(x, negated)
            yield from _addends(y, negated != (tree.op == "-"))
        case Apply(op="neg", args=(x,), kind="float"):
            yield from _addends(x, not negated)
        case _:
            yield tree, negated


def _is_scaled(value: Node) -> bool:
    """Whether it is the score times what all pairs of a head have in common."""
    if value == SCORE:
        return True
    match value:
        case Apply(op="neg", args=(x,)):
            return _is_scaled(x)
        case Apply(op="*", args=(x, y)) if is_uniform(x):
            return _is_scaled(y)
        case Apply(op="*" | "/", args=(x, y)) if is_uniform(y):
            return _is_scaled(x)
    return False


def _is_of_key(term: Node, scores: Scores) -> bool:
    """Whether a term is the same for all queries of a head."""
    if scores.bias is not None and scores.bias.strides[-2] != 0:
        return False
    return not any(isinstance(node, Name) and node.name == "q_idx" for node in walk(term))


def _pressure(scores: Scores, text: ExpressionText) -> Pressure:
    return text.pressure if mask_tree(scores) is not None else Pressure.TERM
