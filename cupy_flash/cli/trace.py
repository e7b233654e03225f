"""``trace``: the online softmax of one small row, block by block."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate

import click

from ..trace import Step, exact_softmax, naive_softmax, online_softmax
from .arguments import json_option
from .lists import NUMBERS
from .output import UserError, echo_json, table, terminal_width

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
    beside them the exact softmax, and the plain exp that overflows where this does not.
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
    rows = []
    for step, end in zip(steps, accumulate(len(step.scores) for step in steps)):
        _, exact = exact_softmax(scores[:end], values[:end])
        figures = (step.correction, step.total, step.acc, step.out, exact)
        correction, total, acc, out, exact = (f"{figure:.6g}" for figure in figures)
        rows.append((_listed(step.scores), f"{step.top:g}", correction, _listed(step.weights), total, acc, out, exact))
    header = ("scores s", "m'", "correction", "exp(s - m')", "l'", "o'", "output so far", "exact")
    for line in table(header, rows, "<>><>>>>", terminal_width()):
        click.echo(line)


def _listed(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)
