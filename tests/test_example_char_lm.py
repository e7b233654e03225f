"""The language model of examples/: its gradients by finite differences, its training, its command."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
ATTENTIONS = ("flash", "naive")


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        import train_char_lm

        yield train_char_lm
        for name in ("train_char_lm", "char_lm"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def text(example):
    return example.read_text()


@pytest.fixture(scope="module")
def small(example):
    """A model and a training that take a second."""
    return example.Model(layers=2, heads=2, dim=32), example.Training(seq=48, batch=8, steps=20, rate=1e-2)


def tokens_of(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gradients_are_those_of_finite_differences(example, attention):
    model = example.Model(layers=2, heads=2, dim=12, dtype="float64", attention=attention)
    weights = model.initial_weights(seed=1)
    tokens, targets = tokens_of((2, 9)), tokens_of((2, 9), seed=1)
    gradient = model.views(example.loss_vjp(model, weights, tokens, targets)[1]())

    # With a step of eps**(1/3), a central difference is off by eps**(2/3), once for the third derivative along a vector of
    # length 1 and once for the rounding of the loss. The loss is about 6 and the sum of some hundred roundings.
    eps = np.finfo(float).eps
    step, tolerance = eps ** (1 / 3), 100 * eps ** (2 / 3)
    rng = np.random.default_rng(2)
    for name, shape in model.shapes.items():
        for _ in range(3):
            direction = rng.standard_normal(shape)
            direction /= np.linalg.norm(direction)

            def loss_at(distance, name=name, direction=direction):
                moved = weights.copy()
                model.views(moved)[name] += distance * direction
                return example.loss_vjp(model, moved, tokens, targets)[0]

            slope = (loss_at(step) - loss_at(-step)) / (2 * step)
            assert abs(slope) > 1000 * tolerance, f"{name}: too flat to tell a wrong gradient"
            assert abs((gradient[name] * direction).sum() - slope) <= tolerance, name


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_no_byte_sees_a_later_one(example, attention):
    model = example.Model(layers=2, heads=2, dim=16, dtype="float64", attention=attention)
    weights, tokens = model.initial_weights(seed=0), tokens_of((1, 20))
    changed = tokens.copy()
    changed[0, 12] ^= 1
    before, after = (example.logits_vjp(model, weights, t)[0] for t in (tokens, changed))
    np.testing.assert_allclose(after[:12], before[:12], rtol=1e-12)
    assert (np.abs(after[12:] - before[12:]).max(axis=-1) > 1e-3).all()


def test_order_of_the_bytes_matters(example):
    model = example.Model(layers=1, heads=2, dim=16, dtype="float64")
    weights = model.initial_weights(seed=0)
    one, other = (example.logits_vjp(model, weights, np.array([list(t)], np.uint8))[0][-1] for t in (b"abc", b"bac"))
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_flash_and_naive_attention_train_alike(example, text, small, dtype):
    model, training = replace(small[0], dtype=dtype), replace(small[1], steps=5)
    flash, naive = (example.train(replace(model, attention=name), training, text) for name in ATTENTIONS)
    # The two round differently, by a few eps. Adam divides a gradient by its own size, so a small one can lose all its
    # digits, but not move its weight by more than the rate: half of the digits of the loss are left.
    np.testing.assert_allclose(flash.losses, naive.losses, rtol=np.finfo(dtype).eps ** 0.5)
    np.testing.assert_allclose(flash.validation_loss, naive.validation_loss, rtol=np.finfo(dtype).eps ** 0.5)


def test_training_learns_more_than_the_frequencies(example, text, small):
    model, training = small
    run = example.train(model, replace(training, steps=80), text)
    unigram, _ = example.counting_losses(text)
    assert run.validation_loss < 0.9 * unigram
    assert np.mean(run.losses[-10:]) < 0.9 * unigram < unigram < run.losses[0]
    assert len(run.losses) == len(run.seconds) == 80
    assert run.tokens_per_second == pytest.approx(8 * 48 / np.median(run.seconds))


def test_same_seed_same_losses(example, text, small):
    model, training = small[0], replace(small[1], steps=3)
    first, second, other = (example.train(model, replace(training, seed=seed), text) for seed in (1, 1, 2))
    assert first.losses == second.losses and (first.weights == second.weights).all()
    assert first.losses[0] != other.losses[0]


def test_training_ends_when_its_time_is_up(example, text, small):
    seen = []
    limited = replace(small[1], steps=10**9, seconds=0.3)
    run = example.train(small[0], limited, text, report=lambda progress, loss: seen.append((progress, loss)))
    assert sum(run.seconds) >= 0.3 > sum(run.seconds[:-1])
    assert [loss for _, loss in seen] == run.losses
    assert [progress for progress, _ in seen] == sorted(progress for progress, _ in seen) and seen[-1][0] == 1


def test_adamw_goes_downhill_by_the_rate(example):
    """The first step of Adam is the rate, whatever the gradient's size; the gradient of norm above 1 is scaled to norm 1."""
    weights = np.array([1.0, -2.0, 3.0])
    optimizer = example.AdamW(weights, decay=0)
    optimizer.step(np.array([30.0, -40.0, 0.0]), rate=0.1)
    np.testing.assert_allclose(weights, [0.9, -1.9, 3.0], rtol=1e-7)
    np.testing.assert_allclose(optimizer.mean, [0.06, -0.08, 0], rtol=1e-12)
    decaying = np.array([1.0])
    example.AdamW(decaying, decay=0.5).step(np.zeros(1), rate=0.1)
    np.testing.assert_allclose(decaying, [0.95])


def test_text_is_python_and_its_parts_are_apart(example, text):
    training, validation = (part.tobytes() for part in text)
    assert len(training) > 10 * len(validation) > 10**5
    assert b"import" in training and b"import" in validation
    assert validation[:2000] not in training
    assert all((one == other).all() for one, other in zip(text, example.read_text()))


def test_windows_pair_every_byte_with_the_next(example):
    tokens, targets = example.windows(np.arange(100, dtype=np.uint8), np.array([3, 96]), 3)
    assert tokens.tolist() == [[3, 4, 5], [96, 97, 98]]
    assert targets.tolist() == [[4, 5, 6], [97, 98, 99]]


def test_counting_losses(example):
    text = np.frombuffer(b"abac" * 25_000, np.uint8)
    # Each of the 256 bytes has one more occurrence than was counted, in 100,000; each pair has a 256th of one.
    unigram, bigram = example.counting_losses((text, text[:1000]))
    assert unigram == pytest.approx(1.5 * math.log(2), abs=0.005)
    assert bigram == pytest.approx(0.5 * math.log(2), rel=0.005)
    # "a" may be followed by "b" or by "c", while "b" only follows "a".
    assert example.counting_losses((text, text[:2]))[1] == pytest.approx(math.log(2), rel=0.005)


def test_generated_bytes_follow_the_model(example, small):
    model = replace(small[0], layers=1)
    weights = model.initial_weights(seed=0)
    views = model.views(weights)
    views["head"][...] = 0  # all bytes are equally likely ...
    drawn = example.generate(model, weights, b"ab", 200, seq=16)
    assert len(drawn) == 200 and len(set(drawn)) > 100
    assert drawn == example.generate(model, weights, b"ab", 200, seq=16)
    views["out"][...] = views["down"][...] = 0  # ... and now "a" is followed by "b", and "b" by "a"
    views["head"][:, ord("b")], views["head"][:, ord("a")] = views["embed"][ord("a")], views["embed"][ord("b")]
    weights[-model.dim * 256 :] *= 10
    assert example.generate(model, weights, b"a", 9, seq=4) == b"babababab"


def test_command(example, tmp_path):
    picture = tmp_path / "loss.png"
    sizes = "--layers 1 --heads 2 --dim 16 --seq 32 --batch 2 --steps 3"
    arguments = f"--device cpu {sizes} --seed 1 --attention flash --attention naive --sample 20 --plot"
    result = CliRunner().invoke(example.main, [*arguments.split(), str(picture)])
    assert result.exit_code == 0, result.output
    assert "validation loss of counts" in result.output
    for name in ATTENTIONS:
        assert any(line.startswith(f"{name}: ") and "3 steps" in line for line in result.output.splitlines())
    assert "[from here on it is the model's]" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("--dim", "30", "--heads", "4"), "--dim: expected a multiple of 2 * heads = 8, got 30"),
        (("--dtype", "bfloat16"), "--dtype bfloat16 needs a GPU"),
        (("--steps", "0"), "--steps"),
    ),
)
def test_wrong_options_are_refused(example, arguments, message):
    result = CliRunner().invoke(example.main, ["--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_help_says_what_to_expect_without_a_gpu(example):
    said = " ".join(CliRunner().invoke(example.main, ["--help"]).output.split())
    assert "OPENBLAS_NUM_THREADS=1" in said and "With --steps 3000 they are lines" in said


def test_import_needs_neither_cupy_nor_matplotlib():
    code = "import sys, train_char_lm; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples")))}
    modules = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert {"cupy", "matplotlib"}.isdisjoint(modules.stdout.split())


@pytest.mark.gpu
def test_gpu_meets_the_cpu(example, text, small):
    import cupy

    model, training = small[0], replace(small[1], steps=5)
    cpu, gpu = (example.train(model, training, text, xp) for xp in (np, cupy))
    np.testing.assert_allclose(gpu.losses, cpu.losses, rtol=np.finfo(np.float32).eps ** 0.5)


@pytest.mark.gpu
def test_bfloat16_trains_like_float32(example, text, small):
    import cupy

    model, training = small[0], replace(small[1], seq=300, steps=60)
    narrow = {name: example.train(replace(model, dtype="bfloat16", attention=name), training, text, cupy) for name in ATTENTIONS}
    full = example.train(model, training, text, cupy)
    for run in narrow.values():
        # Before the first update: logits are of order 1, computed from numbers rounded to 8 bits.
        assert run.losses[0] == pytest.approx(full.losses[0], abs=2**-7)
        assert run.validation_loss < 0.95 * example.counting_losses(text)[0] < run.losses[0]
