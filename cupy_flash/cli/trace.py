"""``trace``: the online softmax of one small row, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

import click

from ..measure.trace import Step, exact_softmax, naive_softmax, online_softmax
from .arguments import json_option
from .lists import NUMBERS
from .output import UserError, echo_json, table, terminal_width

ENDS = 8  # blocks, and numbers of a block, that are printed from each end of a long row
FORMULAS = """\
a block with scores s and values v
  m' = max(m, max s)    correction = exp(m - m')
  l' = correction * l + sum exp(s - m')
  o' = correction * o + sum exp(s - m') * v      output so far = o' / l'
two parts a and b of a row, merged
  m  = max(m_a, m_b)
  l  = exp(m_a - m) * l_a + exp(m_b - m) * l_b
  o  = exp(m_a - m) * o_a + exp(m_b - m) * o_b
"""


@click.command()
@click.option("--scores", type=NUMBERS, default="1000,999,998", show_default=True, help="Of the row; -inf for a masked key.")
@click.option("--values", type=NUMBERS, help="One for each score; by default 1, 2, 3 and so on.")
@click.option("--block", type=click.IntRange(min=1), default=2, show_default=True, help="Scores in a block.")
@json_option
def trace(scores: tuple[float, ...], values: tuple[float, ...] | None, block: int, as_json: bool) -> None:
    """Show a row's softmax, block by block.

    The running maximum m, the running sum l, the correction that mends the sums of the blocks before, and the output so far;
    beside them the exact softmax, and the plain exp that overflows where this does not. Of a long row the ends are printed, with
    --json all of it.

    \b
    Examples:
      cupy-flash trace
      cupy-flash trace --scores 1,-inf,3,2 --values 4,5,6,7 --block 1
    """
    values = values or tuple(map(float, range(1, len(scores) + 1)))
    try:
        steps = list(online_softmax(scores, values, block))
    except ValueError as error:
        raise UserError(str(error)) from error
    exact, naive = exact_softmax(scores, values), naive_softmax(scores, values)
    if as_json:
        echo_json(
            {
                "scores": scores,
                "values": values,
                "steps": [asdict(step) | {"out": step.out, "lse": step.lse} for step in steps],
                "exact": {"weights": exact[0].tolist(), "out": exact[1]},
                "naive": {"exponentials": naive[0].tolist(), "out": naive[1]},
            }
        )
        return
    click.echo(FORMULAS)
    _print_steps(steps, scores, values)
    last = steps[-1]
    click.echo(f"\nonline  output {last.out:.6g}, log-sum-exp {last.lse:.6g}")
    click.echo(f"exact   output {exact[1]:.6g}, weights {_listed(exact[0])}")
    click.echo(f"naive   output {naive[1]:.6g}, exp(score) {_listed(naive[0])}")


def _print_steps(steps: list[Step], scores: tuple[float, ...], values: tuple[float, ...]) -> None:
    ends = list(accumulate(len(step.scores) for step in steps))
    rows = [_row(step, exact_softmax(scores[:end], values[:end])[1]) for step, end in _ends(list(zip(steps, ends)))]
    header = ("scores s", "m'", "correction", "exp(s - m')", "l'", "o'", "output so far", "exact")
    heading, *lines = table(header, rows, "<>><>>>>", terminal_width())
    if len(rows) < len(steps):
        lines.insert(ENDS, f"… {len(steps) - len(rows):,} blocks, which --json prints as well")
    click.echo("\n".join((heading, *lines)))


def _row(step: Step, exact: float) -> tuple[str, ...]:
    correction, *figures = (f"{figure:.6g}" for figure in (step.correction, step.total, step.acc, step.out, exact))
    return (_listed(step.scores), f"{step.top:g}", correction, _listed(step.weights), *figures)


def _listed(numbers: Sequence[float]) -> str:
    texts = [f"{number:.4g}" for number in _ends(numbers)]
    if len(texts) < len(numbers):
        texts.insert(ENDS, "…")
    return ", ".join(texts)


def _ends(items: Sequence[Any]) -> Sequence[Any]:
    """All items, or the first and the last of many."""
    return items if len(items) <= 2 * ENDS else [*items[:ENDS], *items[-ENDS:]]
