"""The NumPy path with its mask spelt as the oracle's, so that one set of options serves both."""

from cupy_flash.machine.numpy_path import backward, forward
from cupy_flash.problem.backward import Gradients
from cupy_flash.problem.mask import Mask


def visible(len_q, len_kv, first_key=None, last_key=None, prefix=0):
    return Mask(len_q, len_kv, first_key, last_key, prefix).visible(0, len_q, 0, len_kv)


def blocked(q, k, v, *, first_key=None, last_key=None, prefix=0, sinks=None, **others):
    others |= {} if sinks is None else {"sinks": sinks if sinks.ndim == 2 else sinks[None]}
    return forward.blocked(q, k, v, mask=Mask(q.shape[-2], k.shape[-2], first_key, last_key, prefix), **others)


def blocked_gradients(dout, q, k, v, out, lse, *, first_key=None, last_key=None, prefix=0, sinks=None, **others):
    others |= {} if sinks is None else {"sinks": sinks if sinks.ndim == 2 else sinks[None]}
    mask = Mask(q.shape[-2], k.shape[-2], first_key, last_key, prefix)
    gradients = backward.blocked_gradients(dout, q, k, v, out, lse, mask=mask, **others)
    return gradients if sinks is None else Gradients(*gradients, dsinks=gradients.dsinks.reshape(sinks.shape))
