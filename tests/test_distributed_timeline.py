"""Where the time of ranks goes: what is noted, what comes of it, and the picture."""

import json
import sys
import types
from collections import Counter
from dataclasses import asdict
from itertools import pairwise

import numpy
import pytest
from click.testing import CliRunner

from cupy_flash import distributed
from cupy_flash.cli import main
from cupy_flash.cli.bench_distributed import _print_spans
from cupy_flash.distributed import bits, calls, growing
from cupy_flash.distributed.timeline import KINDS, DeviceClock, HostClock, Span, noted, noting
from cupy_flash.measure.distributed import Measured, read
from cupy_flash.measure.spans import beneath, mean_of, spans_of, together

# Calls and exchanges of the forward and the backward of each of two ranks in zigzag order: rows of the second one are neighbours,
# which in a ring's backward are cut in the middle.
WANTED = {
    "ulysses": (((1, 2), (1, 2)), ((1, 2), (1, 2))),
    "all_gather": (((2, 1), (2, 2)), ((1, 1), (1, 2))),
    "ring": (((3, 1), (3, 2)), ((2, 1), (3, 2))),
}


@pytest.fixture
def does(monkeypatch):
    """How often what merges and what copies is called while somebody asks, on all ranks."""
    found = Counter()

    def counted(owner, name, kind):
        function = getattr(owner, name)

        def counting(*args):
            found[kind] += noted("") is not noted("")
            return function(*args)

        monkeypatch.setattr(owner, name, counting)

    counted(growing.Growing, "_merge", "merge")
    counted(growing.Results, "_merge", "merge")
    counted(calls, "store", "merge")  # which rounds
    counted(bits, "widest", "copy")
    return found


def of_threads(scheme):
    def part(comm):
        rng = numpy.random.default_rng(comm.rank)
        q, dout = rng.standard_normal((2, 4, 40, 16), numpy.float32).astype(numpy.float16)
        k, v = rng.standard_normal((2, 2, 40, 16), numpy.float32).astype(numpy.float16)
        options = {"comm": comm, "scheme": scheme, "order": "zigzag", "causal": True}
        return spans_of(q, k, v, dout, options, comm.gather, HostClock())

    return distributed.on_threads(2, part)


@pytest.mark.parametrize("scheme", WANTED)
def test_all_that_a_rank_does_is_noted(scheme, does):
    """Of one call, though others go before it. A process does one thing after the other."""
    found = of_threads(scheme)
    for of_rank, of_rank_wanted in zip(found, WANTED[scheme]):
        for spans, wanted in zip(of_rank, of_rank_wanted):
            counts = Counter(span.kind for span in spans)
            assert (counts["attention"], counts["exchange"]) == wanted
            assert all(0 < span.begin <= span.end for span in spans)
            ordered = sorted(spans, key=lambda span: span.begin)
            assert all(a.end <= b.begin for a, b in pairwise(ordered))
    every = Counter(span.kind for of_rank in found for spans in of_rank for span in spans)
    assert (every["merge"], every["copy"]) == (does["merge"], does["copy"])
    assert every["copy"] and bool(every["merge"]) == (scheme != "ulysses")


def test_what_is_noted_is_behind_other_calls(monkeypatch):
    """So that a device is busy while the host queues it: behind one that loads kernels, and two that nobody notes."""
    found, forward, backward = Counter(), calls.Calls.forward, calls.Calls.backward
    monkeypatch.setattr(calls.Calls, "forward", lambda *args: (found.update(["forward"]), forward(*args))[1])
    monkeypatch.setattr(calls.Calls, "backward", lambda *args: (found.update(["backward"]), backward(*args))[1])
    of_ranks = of_threads("ring")
    noted_calls = [sum(span.kind == "attention" for own in of_ranks for span in own[way]) for way in (0, 1)]
    assert (found["forward"], found["backward"]) == (5 * noted_calls[0], 4 * noted_calls[1])  # one more has made the vjp


def test_nothing_is_noted_where_nobody_asks():
    """Nor what another thread does, nor what failed."""
    assert noted("copy") is noted("attention")
    with noting(HostClock()) as timeline:
        distributed.on_threads(1, lambda comm: noted("copy").__enter__())
        with noted("merge"):
            pass
        with pytest.raises(ZeroDivisionError), noted("copy"):
            raise ZeroDivisionError
    assert [span.kind for span in timeline.spans] == ["merge"]
    assert noted("copy") is noted("attention")


def test_a_device_tells_the_time_by_events(monkeypatch):
    """On the stream that does the work: an exchange on that of messages."""

    class Event:
        def synchronize(self):
            self.waited = True

    class Stream:
        def __init__(self, time):
            self.time = time

        def record(self, event):
            self.time += 1
            event.at = self.time
            return event

    def elapsed(first, later):
        assert first.waited and later.waited
        return later.at - first.at

    current, messages = Stream(10), Stream(100)
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(Event=Event, get_current_stream=lambda: current, get_elapsed_time=elapsed)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with noting(DeviceClock()) as timeline:  # at 11 ms
        with noted("attention"):
            pass
        with noted("exchange", messages):
            pass
    assert timeline.spans == (Span("attention", 0.001, 0.002), Span("exchange", 0.090, 0.091))


SPANS = (
    (Span("attention", 2.0, 5.0), Span("exchange", 1.0, 3.0), Span("exchange", 4.5, 6.0), Span("attention", 5.0, 5.5)),
    (Span("copy", 1.5, 2.0), Span("merge", 2.0, 2.5)),
)


def test_ranks_count_from_the_first_that_does_something():
    shifted = together(SPANS)
    assert shifted[0][1] == Span("exchange", 0.0, 2.0)
    assert shifted[1] == (Span("copy", 0.5, 1.0), Span("merge", 1.0, 1.5))
    assert together([(), ()]) == ()


def test_what_lies_beneath_attention():
    assert beneath(SPANS[0]) == (1.0 + 0.5 + 0.5, 3.5)
    assert beneath(SPANS[1]) == (0, 0)


def test_what_the_time_of_a_call_goes_to():
    """The mean of two ranks: 5 s and 1 s in all, then attention, merges, copies, exchanges, and those beneath attention."""
    assert mean_of(SPANS) == ((5.0 + 1.0) / 2, 3.5 / 2, 0.5 / 2, 0.5 / 2, 3.5 / 2, 2.0 / 2)
    assert mean_of([()]) == (0,) * 6


def test_the_command_prints_it(capsys):
    _print_spans([measured("ring"), measured("ulysses", spans=())])
    head, line = capsys.readouterr().out.strip().splitlines()
    assert head.split()[-7:] == ["ms", *KINDS, "beneath", "attention"]
    assert line.split() == ["2", "100", "ring", "forward", "3000.000", "1750.000", "250.000", "250.000", "1750.000", "1000.000"]


def measured(scheme, rows=100, spans=SPANS):
    return Measured(scheme, 2, rows, "forward", 1.0, 2.0, 3.0, 0.5, 0.1, 0.9, 4, 5, spans=spans)


def test_what_is_written_is_read():
    rows = [measured("ring"), measured("ulysses", spans=())]
    assert list(read(json.loads(json.dumps([asdict(row) for row in rows])))) == rows


def test_the_picture_has_all_spans():
    pytest.importorskip("matplotlib")
    from cupy_flash.measure.plots import LANES, _timelines

    figure = _timelines([measured("ring"), measured("ulysses")])
    assert {*LANES} == {*KINDS}
    assert [axes.get_title() for axes in figure.axes] == [
        f"{scheme}, forward, 57% of exchanges beneath attention" for scheme in ("ring", "ulysses")
    ]
    for axes in figure.axes:
        boxes = [path.get_extents() for bars in axes.collections for path in bars.get_paths()]
        drawn = sorted((round(box.x0 / 1e3, 6), round(box.x1 / 1e3, 6), int(box.y0)) for box in boxes)
        lanes = [(span, 3 * rank + (span.kind == "exchange")) for rank, spans in enumerate(SPANS) for span in spans]
        assert drawn == sorted((span.begin, span.end, lane) for span, lane in lanes)


def test_a_picture_of_what_was_measured_elsewhere(tmp_path):
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "found.json", tmp_path / "found.svg"
    rows = [measured("ring"), measured("ulysses", 200), measured("all_gather", spans=())]
    path.write_text(json.dumps({"machine": "a device", "results": [asdict(row) for row in rows]}))
    done = CliRunner().invoke(main, ["bench-distributed", "--read", str(path), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert sorted(x.name for x in tmp_path.iterdir()) == ["found-2-100.svg", "found-2-200.svg", "found.json"]


@pytest.mark.parametrize("report, error", [
    ({"machine": "a device", "results": [asdict(measured("ring", spans=()))]}, "--plot: expected results with timelines"),
    ({"results": []}, "--read: expected a file that --json has written of devices"),
    ({"machine": "a device", "results": [{"scheme": "ring"}]}, "--read: expected a file that --json has written of devices"),
    ([], "--read: expected a file that --json has written of devices"),
])  # fmt: skip
def test_what_cannot_be_drawn_is_refused(report, error, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "found.json"
    path.write_text(json.dumps(report))
    done = CliRunner().invoke(main, ["bench-distributed", "--read", str(path), "--plot", str(tmp_path / "x.png")])
    assert done.exit_code == 2
    assert error in done.output


@pytest.mark.parametrize("arguments, error", [
    (["--read", "nowhere.json", "--plot", "x.png"], "--read: expected a file that --json has written, got 'nowhere.json': No such"),
    (["--read", ".", "--plot", "x.png"], "--read: expected a file that --json has written, got '.': Is a directory"),
    (["--read", "nowhere.json"], "--plot: expected beside --timeline, or beside --read, which needs it"),
    (["--timeline", "--forecast"], "--timeline: expected devices to be measured"),
    (["--plot", "x.png"], "--plot: expected beside --timeline"),
    (["--forecast", "--plot", "x.png"], "--plot: expected beside --timeline"),
])  # fmt: skip
def test_options_that_do_not_go_together(arguments, error, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["bench-distributed", *arguments])
    assert done.exit_code == 2
    assert error in done.output
