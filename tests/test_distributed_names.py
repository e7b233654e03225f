"""What `cupy_flash.distributed` offers: examples that run, a page that describes all of it, and nothing imported too early."""

import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_flash import distributed

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = [getattr(distributed, name) for name in distributed.__all__]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda thing: thing.__name__)
def test_examples_run(thing):
    tests = doctest.DocTestFinder().find(thing, globs={})
    if inspect.isfunction(thing):
        assert any(test.examples for test in tests)
    assert all(doctest.DocTestRunner().run(test).failed == 0 for test in tests)


def test_every_name_is_on_its_page():
    page = (ROOT / "docs/api-distributed.md").read_text(encoding="utf-8")
    described = re.findall(r"^\.\. auto(?:function|class):: (\w+)", page, re.MULTILINE)
    elsewhere = {"CommunicationError", "ThreadCommunicator"}  # among the errors of all, and what `on_threads` makes
    assert {*described} | elsewhere == {*distributed.__all__}


def test_importing_it_needs_no_mpi_and_no_cupy():
    code = "import sys, cupy_flash.distributed; sys.exit(any(name in sys.modules for name in ('cupy', 'mpi4py')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_options_are_those_of_one_device():
    """Each option of `cupy_flash.attention` is there, or refused by name."""
    import cupy_flash

    own = set(inspect.signature(distributed.attention).parameters)
    missing = set(inspect.signature(cupy_flash.attention).parameters) - own
    assert missing == {"bias", "out", "lse"}
