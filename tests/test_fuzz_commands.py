"""Odd command lines end as all others do. More of them, with another seed: ``python tests/fuzz_commands.py``."""

from fuzz_commands import faults


def test_odd_command_lines_end_without_a_traceback():
    assert list(faults("tests", 150)) == []
