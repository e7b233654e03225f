"""The chat of examples/ with its tokens from a CUDA graph: recorded once, right for all lengths, in memory of its own."""

import sys
from dataclasses import replace
from itertools import islice

import numpy
import pytest
from test_example_chat import cache_of, example, judged, random_prompts, small, small_weights  # noqa: F401  fixtures among them

cupy = pytest.importorskip("cupy")


def graphs_of(monkeypatch):
    """The graphs that are recorded from now on."""
    recorded, graph = [], sys.modules["chat_graph"].Graph

    def made(*arguments):
        recorded.append(graph(*arguments))
        return recorded[-1]

    monkeypatch.setattr(sys.modules["chat_graph"], "Graph", made)
    return recorded


def on_host(example, found):  # noqa: F811
    """Tokens with their logits in host memory, while others overwrite whatever memory CuPy gives away."""
    for one in found:
        yield example.Token(one.prompt, one.token, cupy.asnumpy(one.logits), one.last)
        for size in (1 << 8, 1 << 12, 1 << 16, 1 << 20):
            cupy.full(size, numpy.nan, numpy.float32)


def test_one_graph_serves_prompts_that_come_and_go(example, small, monkeypatch):  # noqa: F811
    graphs = graphs_of(monkeypatch)
    model = example.make_model(small.config, small_weights(small.config), cupy)
    prompts = random_prompts(example, (1, 40, 5, 16, 3, 17, 8))
    cache = cache_of(example, model, 20, 8, cupy)
    batch = example.Batch(model, cache, prompts, most=3, chunk=20, replay=True)
    judged(model, prompts, on_host(example, batch), small.weights)
    [graph] = graphs
    assert graph._graph is not None and sorted(cache.free) == list(range(20))


def test_a_graph_finds_what_calls_find(example, small, monkeypatch):  # noqa: F811
    """Caches of so many rows that blocks share the keys of a query, in memory that the graph has to keep."""
    graphs = graphs_of(monkeypatch)
    config = replace(small.config, context=3000)
    model = example.make_model(config, small_weights(config), cupy)
    prompts = random_prompts(example, (1, 40, 1500), most=1200)
    found = []
    for replay in (True, False):
        batch = example.Batch(model, cache_of(example, model, 300, 16, cupy), prompts, chunk=4000, replay=replay)
        found.append(list(islice(on_host(example, batch), 90)))
    assert len(graphs) == 1
    assert [(one.prompt, one.token) for one in found[0]] == [(one.prompt, one.token) for one in found[1]]
    assert all(numpy.allclose(one.logits, other.logits, rtol=1e-4, atol=1e-4) for one, other in zip(*found))


def test_the_command(example, small, monkeypatch):  # noqa: F811
    pytest.importorskip("tokenizers")
    from click.testing import CliRunner
    from test_example_chat import TINY

    graphs = graphs_of(monkeypatch)
    config = replace(small.config, vocabulary=len(TINY))
    model = example.make_model(config, small_weights(config), cupy), example.Tokens(TINY, [1] * 10 + [3] * 2, ["a b", "Ġ ab"])
    monkeypatch.setattr(example, "load", lambda xp: model)
    arguments = ["--device", "cuda", "--tokens", "9", "--raw", "abc ab", "da"]
    by_graph, by_calls = (CliRunner().invoke(example.main, [option, *arguments]) for option in ("--graph", "--no-graph"))
    assert by_graph.exit_code == by_calls.exit_code == 0, (by_graph.output, by_calls.output)
    assert by_graph.stdout == by_calls.stdout and len(graphs) == 1
    assert "from one graph" in by_graph.stderr and "of the time in attention" in by_calls.stderr
