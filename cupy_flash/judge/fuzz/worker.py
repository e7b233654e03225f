"""A process that runs a range and says what it is at, so that whoever started it knows what a crash or a hang belongs to.

``python -m cupy_flash.judge.fuzz.worker KIND SEED START COUNT`` prints one line of JSON before each number, and one for each
failure.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys

from . import judging, outcomes, running_lengths

MOST_BYTES = 8 << 30  # of memory of its own; then allocating fails, before the machine gives in
BATCH = 200  # problems whose kernels are compiled together


def main(kind: str, seed: int, start: int, count: int) -> None:
    """Run the numbers from `start` on."""
    run, prepare = functools.partial(judging.run, kind=kind), functools.partial(judging.prepare, kind=kind)
    if kind == "lengths":
        run, prepare = running_lengths.run, running_lengths.prepare
    elif kind == "calls":
        run = outcomes.run
    _limit_memory()
    for index in range(start, start + count):
        if kind != "calls" and (index - start) % BATCH == 0:
            _say(preparing=index)
            prepare(seed, range(index, min(index + BATCH, start + count)))
        _say(at=index)
        wrong = run(seed, index)
        if wrong:
            _say(failed=index, what=wrong)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # where the system cannot, nothing is limited
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, hard))


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
