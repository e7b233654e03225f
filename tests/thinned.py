"""Parameters of a test of which some are for a release, because each costs a kernel of its own and asks what others ask."""

import pytest


def thinned(values, keep=2):
    """The values, of which each `keep`-th stays and the others get the mark `release`."""
    return [value if i % keep == 0 else pytest.param(value, marks=pytest.mark.release) for i, value in enumerate(values)]
