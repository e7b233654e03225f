"""Parameters of a test of which some are for a release, because each costs a kernel of its own and asks what others ask."""

import pytest


def thinned(values, keep=2, first=0):
    """The values, of which each `keep`-th from `first` on stays and the others get the mark `release`, if they have no marks.

    A tuple is one value: of several arguments, give `pytest.param`.
    """
    return [
        value if i % keep == first or hasattr(value, "marks") else pytest.param(value, marks=pytest.mark.release)
        for i, value in enumerate(values)
    ]


def quick(values, *kept, spread=False):
    """The values, of which those that are named stay and the others get the mark `release`.

    Tuples are one value each, and with `spread` those of several arguments.
    """
    assert all(value in values for value in kept)
    return [
        value if value in kept else pytest.param(*(value if spread else (value,)), marks=pytest.mark.release) for value in values
    ]
