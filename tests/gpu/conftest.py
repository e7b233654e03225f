"""Every test in this folder needs a CUDA device; of a suite in several processes, some have it for themselves."""

import fcntl
import os
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def lock_file(name):
    return open(Path(tempfile.gettempdir(), f"cupy_flash-tests-{os.getuid()}-{name}.lock"), "w")


@pytest.fixture(scope="session")
def compiling():
    """To be entered by one of these processes at a time: those that wait find in the cache what it has compiled."""

    @contextmanager
    def alone():
        with lock_file("compiling") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    return alone


@pytest.fixture(autouse=True)
def device_for_itself(request):
    """A test marked `alone` runs while no other of these processes does; while it waits for that, none begins another."""
    alone = request.node.get_closest_marker("alone") is not None
    with ExitStack() as held:
        gate, device = (held.enter_context(lock_file(name)) for name in ("gate", "device"))
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(device, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        yield
