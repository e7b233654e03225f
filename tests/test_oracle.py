"""The oracle shares nothing with what it judges: a fault on either side shows."""

import ast
import doctest
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from banded import blocked, blocked_gradients, visible

from cupy_flash.judge import oracle, oracle_gradients
from cupy_flash.judge.cases import Case, make_inputs
from cupy_flash.judge.compare import compare
from cupy_flash.judge.compare_gradients import compare_gradients
from cupy_flash.judge.cotangents import make_cotangents
from cupy_flash.machine.numpy_path import backward
from cupy_flash.machine.numpy_path.merge import merged
from cupy_flash.problem.mask import Mask

BANDS = [(None, None), (None, 2), (None, -3), (-2, 1), (0, 0), (4, None), (-100, 100), (50, 60), (2, 1)]
CASE = Case("float32", 40, 60, heads_q=2, causal=True)


@pytest.mark.parametrize("mask", [oracle.sees, visible], ids=lambda mask: mask.__name__)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (1, 1), (0, 3), (3, 0)])
@pytest.mark.parametrize("band", BANDS)
def test_a_mask_is_the_definition(mask, lengths, band):
    first_key, last_key = band
    seen = mask(*lengths, *band)
    assert seen.shape == lengths and seen.dtype == bool
    for i, j in numpy.ndindex(lengths):
        hidden = (first_key is not None and j < i + first_key) or (last_key is not None and j > i + last_key)
        assert seen[i, j] == (not hidden)


@pytest.mark.parametrize("module, shared", [(oracle, set()), (oracle_gradients, {"Gradients"})], ids=["forward", "backward"])
def test_the_oracle_imports_nothing_that_it_judges(module, shared):
    """`Gradients` holds three arrays and computes nothing."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    ours = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    imported = {alias.name for node in ours for alias in node.names}
    of_the_oracle = {name for name, x in vars(oracle).items() if getattr(x, "__module__", "") == oracle.__name__} | {"Array"}
    assert imported - of_the_oracle == shared


@pytest.fixture
def off_by_one(monkeypatch):
    """Backend 'numpy' hides one key fewer from every row."""

    right = Mask.visible
    monkeypatch.setattr(Mask, "visible", lambda mask, *tile: right(replace(mask, right=mask.right + 1), *tile))


def test_a_wrong_mask_does_not_judge_itself(off_by_one):
    q, k, v = make_inputs(CASE)
    out, lse = blocked(q, k, v, **CASE.scores)
    assert not compare(out, None, q, k, v, **CASE.scores).ok
    assert not compare(oracle.naive(q, k, v, **CASE.scores)[0], lse, q, k, v, **CASE.scores).ok


def test_a_wrong_mask_does_not_judge_its_gradients(request):
    q, k, v = make_inputs(CASE)
    (dout, _), results = make_cotangents(CASE), oracle.naive(q, k, v, **CASE.scores)
    rows = dout, q, k, v
    right = blocked_gradients(*rows, *results, **CASE.scores)
    assert compare_gradients(right, *rows, **CASE.scores).ok
    request.getfixturevalue("off_by_one")
    wrong = blocked_gradients(*rows, *results, **CASE.scores)
    assert not compare_gradients(wrong, *rows, **CASE.scores).ok


@pytest.mark.parametrize("function", [backward.blocked_gradients, merged], ids=lambda function: function.__name__)
def test_examples_of_backend_numpy_run(function):
    [example] = doctest.DocTestFinder(recurse=False).find(function, function.__name__)
    result = doctest.DocTestRunner().run(example)
    assert result.failed == 0 < result.attempted
