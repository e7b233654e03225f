"""Make what the pages show from what is committed: tables and bars from `docs/data`, drawings from the library itself.

`python docs/make.py` writes them, `python docs/make.py --check` names what is no longer what it would write, and fails.
`python docs/make.py --timeline found.json` first puts in `docs/data` what `bench-distributed --timeline --json` has noted.
"""

import sys
from pathlib import Path

import forecasts
from drawing import bars, kernels, machines, masks, ranks, sequences, softmax, timeline
from tables import FOLDER, filled

PICTURES = FOLDER / "pictures"
DRAWINGS = {
    "benchmark-forward": lambda: bars.rates("forward", "Forward"),
    "benchmark-backward": lambda: bars.rates("backward", "Backward"),
    "masks": masks.kinds,
    "mask-expressions": masks.expressions,
    "key-ranges": masks.key_ranges,
    "tiles": masks.tiles,
    "tiling": kernels.tiling,
    "ping-pong": kernels.ping_pong,
    "online-softmax": softmax.states,
    "two-machines": machines.two_machines,
    "sequences": sequences.layouts,
    "ranks-orders": ranks.orders,
    "ranks-schemes": ranks.schemes,
    "ranks-timeline": timeline.ranks,
}


def made() -> dict[Path, str]:
    """The text of every file that this command writes."""
    page = FOLDER / "benchmarks.md"
    files = {page: filled(page.read_text(encoding="utf-8"))}
    guide = FOLDER / "guide" / "distributed.md"
    files[guide] = filled(guide.read_text(encoding="utf-8"), forecasts.TABLES)
    return files | {PICTURES / f"{name}.svg": draw() for name, draw in DRAWINGS.items()}


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--timeline"]:
        found = timeline.data(Path(arguments[1]).read_text(encoding="utf-8"))
        (FOLDER / "data" / "timeline.csv").write_text(found, encoding="utf-8")
    files = made()
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if arguments == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(FOLDER.parent)} is not what `python docs/make.py` writes")
        return int(bool(stale))
    for path in stale:
        path.write_text(files[path], encoding="utf-8")
        print(path.relative_to(FOLDER.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
