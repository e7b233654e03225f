"""Attention for programs of JAX, in place of `jax.nn.dot_product_attention`: ``pip install "cupy_flash[jax]"``."""

try:
    import jax as _jax
    import jax.ffi as _ffi  # noqa: F401
    from jax.extend.core import Primitive as _Primitive  # noqa: F401
except ImportError as error:
    raise ImportError(f'cupy_flash.jax needs JAX of version 0.6.2 or newer: pip install "cupy_flash[jax]" ({error})') from error

if not hasattr(_jax, "typeof"):
    raise ImportError(f'cupy_flash.jax needs JAX of version 0.6.2 or newer, got {_jax.__version__}: pip install "cupy_flash[jax]"')

from .entry import attention
from .handler import register

__all__ = ["attention", "register"]
