"""A machine for `cupy_flash.measure.bench` on which times are known, and contenders that compute nothing."""

from dataclasses import dataclass, field, replace

from cupy_flash.measure.bench import WARM_UP, Contender, Run, Verdict
from cupy_flash.measure.cells import DIRECTIONS, Suite

CELLS = Suite(("float16",), (64,), (512, 1024)).cells(DIRECTIONS)
FORWARD = CELLS[0]


@dataclass
class FakeBench:
    """A machine on which a launch of each contender takes a time that is known."""

    seconds: dict
    wrong: tuple = ()
    breaks: tuple = ()  # whose turns raise, though their warm-up does not
    refuses: tuple = ()  # to be captured
    turns: list = field(default_factory=list)
    cleared: int = 0
    device = "a fake"
    versions = {"cupy": "0"}  # noqa: RUF012

    def make_inputs(self, cell):
        return (cell,)

    def judge(self, cell, inputs, results):
        assert inputs == (cell,)
        return Verdict(results[0] not in self.wrong, "off by 1" if results[0] in self.wrong else "")

    def captured(self, run):
        if run.launch() in self.refuses:
            raise RuntimeError("it waits for the device")
        return replace(run, launch=lambda: f"graph of {run.launch()}")

    def time(self, run, launches):
        name = run.launch()
        self.turns.append((name, launches))
        if name in self.breaks and launches != WARM_UP:
            raise RuntimeError("the clock stopped")
        return [self.seconds[name]] * launches

    def matmul_rate(self, dtype):
        return 1e15

    def clear(self):
        self.cleared += 1


def contender(name, ours=False, directions=DIRECTIONS):
    return Contender(name, lambda cell, inputs: Run(lambda: name, lambda result: (result,)), ours, directions)
