"""The step that chat.py repeats: logits are those of steps of their own, and it does nothing that a graph could not record."""

import contextlib
import sys
import types

import numpy as np
import pytest
from test_example_chat import cache_of, example, judged, random_prompts, small, small_weights  # noqa: F401  fixtures among them

import cupy_flash

CALLS = ("append_kv", "attention", "rotate")  # of cupy_flash in the model, which read arrays where they are


def texts_of(found, prompts):
    texts = [[] for _ in prompts]
    for token in found:
        texts[token.prompt].append(token.token)
    return texts


@pytest.mark.parametrize("page_size, chunk, together", [(4, 256, 3), (16, 7, 3), (1, 1, 2), (8, 20, 8)])
def test_prompts_that_come_and_go(example, small, page_size, chunk, together):  # noqa: F811
    """As many rows as prompts that run together, of which some have no sequence now and then; one prompt ends early."""
    prompts = random_prompts(example, (1, 40, 5, 16, 3, 17, 8))
    plain = example.Batch(small, cache_of(example, small, 120, page_size), prompts, most=together, chunk=chunk)
    expected = texts_of(plain, prompts)
    stop = expected[2][1]
    prompts[2] = example.Prompt(prompts[2].tokens, 6, stop)
    cache = cache_of(example, small, -(-100 // page_size), page_size)
    batch = example.Batch(small, cache, prompts, most=together, chunk=chunk, replay=True)
    assert batch.decoder.tokens.shape == (min(together, 7),)
    found = judged(small, prompts, batch)
    assert found[:2] == expected[:2] and found[3:] == expected[3:] and found[2] == expected[2][: expected[2].index(stop) + 1]
    assert sorted(cache.free) == list(range(-(-100 // page_size)))


def test_steps_over_the_same_arrays_are_those_of_their_own(example, small):  # noqa: F811
    """Bit for bit, with lengths that only the step itself advances, from one key to full pages."""
    model, rng = sys.modules["chat_model"], np.random.default_rng(0)
    caches = [cache_of(example, small, 24, 4) for _ in range(2)]
    pages = rng.permutation(24).reshape(3, 8).astype(np.int32)
    prompts = [rng.integers(0, 97, length).tolist() for length in (1, 7, 18)]
    cached, tokens = [len(prompt) for prompt in prompts], []
    for cache in caches:
        logits = small.logits(cache, model.Step(np, prompts, [0, 0, 0], pages), example.flash_attention)
        tokens = logits.argmax(-1).tolist()
    decoder = sys.modules["chat_graph"].Decoder(small, caches[1], example.flash_attention, rows=3, width=8)
    decoder.place(tokens, cached, pages)
    addresses = [array.ctypes.data for array in vars(decoder).values() if isinstance(array, np.ndarray)]
    for _ in range(14):
        step = model.Step(np, [[token] for token in tokens], cached, pages)
        expected = small.logits(caches[0], step, example.flash_attention)
        decoder.advance()
        assert decoder.logits.tobytes() == expected.tobytes()
        tokens, cached = expected.argmax(-1).tolist(), [length + 1 for length in cached]
        assert decoder.tokens.tolist() == tokens and decoder.cached.tolist() == cached
    assert [array.ctypes.data for array in vars(decoder).values() if isinstance(array, np.ndarray)] == addresses
    assert all(x.tobytes() == y.tobytes() for x, y in zip((caches[0].k, caches[0].v), (caches[1].k, caches[1].v)))


@pytest.mark.parametrize("temperature", [4.0, 20.0])
def test_tokens_that_are_drawn(example, small, temperature):  # noqa: F811
    """The host draws from the same logits, and the decoder is told what it did not find itself."""
    prompts = random_prompts(example, (4, 11, 2))
    options = {"temperature": temperature, "seed": 3, "together": 2, "page": 4, "chunk": 8}
    found = [list(example.new_batch(small, prompts, example.flash_attention, replay=replay, **options)) for replay in (True, False)]
    assert len({token.token for token in found[0]}) > 3
    assert [(one.prompt, one.token, one.last) for one in found[0]] == [(one.prompt, one.token, one.last) for one in found[1]]
    judged(small, prompts, found[0])


# In the place of a GPU


class OnDevice(np.ndarray):
    """An array whose numbers are on a device: whatever would bring one of them to the host, or one from there, is an error."""

    def refuse(self, *_):
        raise AssertionError("the host reads what is on a device")

    def __matmul__(self, _):
        raise AssertionError("CuPy calls cuBLAS, which it lets no graph record")

    __bool__ = __int__ = __float__ = __index__ = __contains__ = __array__ = item = tolist = tobytes = refuse

    def __iter__(self):
        return iter([self[i] for i in range(len(self))]) if self.ndim > 1 else self.refuse()

    def __getitem__(self, key):
        found = super().__getitem__(key)
        return found if isinstance(found, OnDevice) else self.refuse()


def put(x):
    return np.array(x).view(OnDevice)


class Device:
    """What `cupy` is to a `Decoder`: it keeps what is asked of it, in order, and to launch a graph is to compute the step."""

    def __init__(self):
        self.asked, self.names = [], set()
        self.inside = self.capturing = False
        names = ("Stream", "MemoryPool", "using_allocator", "get_current_stream")
        self.cuda = types.SimpleNamespace(**{name: getattr(self, name.lower()) for name in names})

    def __getattr__(self, name):
        """What NumPy has by the name. Inside of a step that may be what has no argument in host memory."""
        assert not self.inside or name in ("exp", "sqrt"), f"{name}: expected nothing that a graph cannot record"
        return getattr(np, name)

    def asarray(self, x, dtype=None):
        assert not self.inside, "asarray: expected no copy from the host"
        return put(np.array(x, dtype))

    def zeros(self, shape, dtype):
        assert not self.inside
        return put(np.zeros(shape, dtype))

    def empty(self, shape, dtype):
        return self.zeros(shape, dtype)

    def ReductionKernel(self, in_params, out_params, map_expr, reduce_expr, post_map_expr, identity, name):
        assert (map_expr, reduce_expr, post_map_expr, identity) == ("x * w", "a + b", "y = a", "0")
        return lambda x, w, axis: put(np.multiply(x.view(np.ndarray), w.view(np.ndarray)).sum(axis))

    def memorypool(self):
        return types.SimpleNamespace(malloc=self)

    @contextlib.contextmanager
    def using_allocator(self, allocator):
        assert allocator is self
        self.asked.append("memory of its own")
        try:
            yield
        finally:
            self.asked.append("memory of all")

    def get_current_stream(self):
        return FakeStream(self, "outside")

    def stream(self, non_blocking):
        assert non_blocking
        return FakeStream(self, "inside")


class FakeStream:
    def __init__(self, device, name):
        self.device, self.name = device, name

    def record(self):
        return self.name

    def wait_event(self, name):
        self.device.asked.append(f"{self.name} waits for {name}")

    def __enter__(self):
        self.device.asked.append("stream of its own")

    def __exit__(self, *_):
        self.device.asked.append("stream of all")

    def begin_capture(self):
        self.device.asked.append("begin")
        self.device.capturing = True

    def end_capture(self):
        self.device.asked.append("end")
        self.device.capturing = False
        return types.SimpleNamespace(launch=self.device.launch)


@pytest.fixture
def device(example, small, monkeypatch):  # noqa: F811
    """A `Device`, and a decoder of three sequences on it, which have been placed."""
    device = Device()
    config = small.config
    model = example.make_model(config, small_weights(config), device)
    for name in CALLS:  # kernels read lengths where they are, and so does NumPy in their place
        monkeypatch.setattr(cupy_flash, name, called_with_numpy(getattr(cupy_flash, name)))
    cache = example.PagedCache(config, range(12), 4, device)
    cache.k[...] = cache.v[...] = np.nan
    decoder = sys.modules["chat_graph"].Decoder(model, cache, example.flash_attention, rows=3, width=4)
    advance = decoder.step

    def step():
        """In a capture nothing is computed: it is a launch that does that."""
        device.asked.append("step")
        if not device.capturing:
            device.launch(advance)

    def launch(what=None):
        device.asked += [] if what else ["launch"]
        device.inside = True
        (what or advance)()
        device.inside = False

    device.launch = launch
    decoder.advance._step = step
    decoder.place([5, 9, 40], [0, 0, 0], np.arange(12).reshape(3, 4))
    device.asked.clear()
    return device, decoder


def called_with_numpy(function):
    def call(*arrays, **options):
        if not isinstance(arrays[0], OnDevice):
            return function(*arrays, **options)
        arrays = [x.view(np.ndarray) for x in arrays]
        options = {name: x.view(np.ndarray) if isinstance(x, OnDevice) else x for name, x in options.items()}
        found = function(*arrays, **options)
        return tuple(x.view(OnDevice) for x in found) if isinstance(found, tuple) else found.view(OnDevice)

    return call


BEFORE = ["inside waits for outside", "stream of its own", "memory of its own"]
BEHIND = ["memory of all", "stream of all", "outside waits for inside"]


def test_a_step_is_computed_then_recorded_then_launched(device):
    device, decoder = device
    for expected in (["step"], ["begin", "step", "end", "launch"], ["launch"], ["launch"]):
        decoder.advance()
        assert device.asked == [*BEFORE, *expected, *BEHIND]
        device.asked.clear()
    assert decoder.lengths.view(np.ndarray).tolist() == [5, 5, 5]


def test_a_step_reads_nothing_back_and_brings_nothing(device, example, small):  # noqa: F811
    """It would be an error of an `OnDevice`. What is found is what NumPy finds."""
    device, decoder = device
    cache = example.PagedCache(small.config, range(12), 4)
    expected = sys.modules["chat_graph"].Decoder(small, cache, example.flash_attention, rows=3, width=4)
    expected.place([5, 9, 40], [0, 0, 0], np.arange(12).reshape(3, 4))
    for _ in range(15):
        decoder.advance()
        expected.advance()
        assert np.allclose(decoder.logits.view(np.ndarray), expected.logits, rtol=1e-4, atol=1e-4)
        assert decoder.tokens.view(np.ndarray).tolist() == expected.tokens.tolist()
    for read in (lambda: int(decoder.tokens[0]), decoder.tokens.tolist, lambda: bool(decoder.new[0]), lambda: list(decoder.new)):
        with pytest.raises(AssertionError, match="the host reads"):
            read()


def test_rows_without_a_sequence_write_and_read_nothing(device):
    """A graph has them all the same: of three rows, one has a sequence, and of what there was before nothing is left."""
    device, decoder = device
    decoder.place([5, 9], [2, 0], np.arange(8).reshape(2, 4))
    decoder.place([5], [0], np.array([[3, 7, 0, 0]]))
    for _ in range(6):
        decoder.advance()
    read = {name: x.view(np.ndarray) for name, x in vars(decoder).items() if isinstance(x, OnDevice)}
    written = np.argwhere(~np.isnan(decoder.cache.k.view(np.ndarray)[0, :, :, 0, 0])).tolist()
    assert written == [[3, 0], [3, 1], [3, 2], [3, 3], [7, 0], [7, 1]]
    assert read["lengths"].tolist() == [7, 0, 0] and read["new"].tolist() == [1, 0, 0]
    assert decoder.computed == 3 and np.isfinite(read["logits"]).all()


def test_a_step_that_fails_is_not_launched(device):
    device, decoder = device
    decoder.advance()
    good = decoder.advance._step

    def fails():
        raise MemoryError("no room")

    decoder.advance._step = fails
    with pytest.raises(MemoryError):
        decoder.advance()
    assert device.asked[-4:] == ["begin", "end", "memory of all", "stream of all"]
    decoder.advance._step = good
    device.asked.clear()
    decoder.advance()
    assert device.asked == [*BEFORE, "begin", "step", "end", "launch", *BEHIND]
