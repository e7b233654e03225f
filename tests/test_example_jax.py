"""The example of a training in JAX: its loss falls, and is that with the attention of `jax.nn`."""

import sys
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("optax")


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parent.parent / "examples")
        import jax_train

        yield jax_train
        del sys.modules["jax_train"]


def test_the_loss_falls_as_with_the_attention_of_jax(example):
    flash, naive = (list(example.train(12, batch=4, seq=24, attend=attend)) for attend in example.ATTENTIONS.values())
    assert flash[-1] < flash[0] - 0.5
    assert np.allclose(flash, naive, rtol=2e-3)  # steps amplify what roundings differ in
