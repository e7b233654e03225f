"""Run a rank behind a process that outlives it: `python mpi_shield.py PROGRAM TASK SCHEME FOLDER`.

MPICH's mpiexec ends the others of a rank that is gone, or lets them be, whichever of its sockets it looks at first, even when it
is told to let them be. So it is kept from seeing it: the rank is a child in a session of its own, which signals to its parent's
group do not reach, and the parent holds what mpiexec watches until the others have left word in the folder.
"""

import subprocess
import sys
import time
from pathlib import Path

LONGEST = 25  # seconds


def main() -> int:
    *_, folder = sys.argv
    done = subprocess.run([sys.executable, *sys.argv[1:]], close_fds=False, start_new_session=True)
    end = time.monotonic() + LONGEST
    while done.returncode < 0 and len(list(Path(folder).iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    return abs(done.returncode)


if __name__ == "__main__":
    sys.exit(main())
