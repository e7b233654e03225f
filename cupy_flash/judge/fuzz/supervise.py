"""Running a range in a process of its own, and going on behind what ends or stops that process."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SECONDS = {"calls": 30, "problems": 120, "pairs": 120, "lengths": 120}  # for one of them, on a machine that has other things to do
SECONDS_TO_PREPARE = 3600
LAST_LINES = 12  # of what a process wrote before it died
WORKER = (sys.executable, "-X", "faulthandler", "-m", f"{__package__}.worker")


@dataclass(frozen=True)
class Failure:
    """What went wrong, and the number that repeats it."""

    index: int
    what: str


def supervise(
    kind: str, seed: int, start: int, count: int, seconds: float | None = None, worker: Sequence[str] = WORKER
) -> Iterator[Failure | int]:
    """Run a range; yields each failure, and the number of each that was begun.

    Parameters
    ----------
    kind : {'calls', 'problems', 'pairs', 'lengths'}
    seed, start, count : int
    seconds : float, optional
        How long one may take.
    worker : sequence of str
        The command that runs a range, as `worker` does.
    """
    stop = start + count
    while start < stop:
        at = start
        command = [*worker, kind, *map(str, (seed, start, stop - start))]
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            limit = seconds or SECONDS[kind]
            lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            threading.Thread(target=_read, args=(process, lines), daemon=True).start()
            try:
                while (line := lines.get(timeout=limit)) is not None:
                    said = json.loads(line)
                    limit = SECONDS_TO_PREPARE if "preparing" in said else seconds or SECONDS[kind]
                    if "failed" in said:
                        yield Failure(said["failed"], said["what"])
                    elif "at" in said:
                        at = said["at"]
                        yield at
            except queue.Empty:
                process.send_signal(signal.SIGABRT)  # which prints where it is
                process.wait()
                yield Failure(at, f"still running after {limit:g} seconds\n{_last_lines(errors)}")
            else:
                if process.wait() == 0:
                    return
                ended = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
                yield Failure(at, f"the process ended with {ended}\n{_last_lines(errors)}")
            finally:
                process.kill()
                process.wait()
        start = at + 1


def _read(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _last_lines(errors: tempfile._TemporaryFileWrapper[str]) -> str:
    errors.seek(0)
    return "".join(f"  {line}" for line in errors.readlines()[:LAST_LINES]).rstrip()
