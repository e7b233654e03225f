"""Exact attention for CuPy, NumPy and everything else that is not PyTorch."""

from typing import TYPE_CHECKING, Any

from .api.append import append_kv
from .api.backward import attention_backward, attention_vjp, plan_attention_backward
from .api.dropout import dropout_mask
from .api.forward import attention, plan_attention
from .api.merge import merge_states
from .api.rotate import rotate
from .call.forward import AttentionPlan
from .call.tile_mask import TileMask
from .errors import CommunicationError, CompileError, DeadlockError, FaultError, SanitizerError, UnsupportedError
from .problem.key_ranges import KeyRanges

if TYPE_CHECKING:
    from .call.backward import BackwardPlan
    from .problem.backward import Gradients

__version__ = "0.1.0"
__all__ = [
    "AttentionPlan",
    "BackwardPlan",
    "CommunicationError",
    "CompileError",
    "DeadlockError",
    "FaultError",
    "Gradients",
    "KeyRanges",
    "SanitizerError",
    "TileMask",
    "UnsupportedError",
    "append_kv",
    "attention",
    "attention_backward",
    "attention_vjp",
    "dropout_mask",
    "merge_states",
    "plan_attention",
    "plan_attention_backward",
    "rotate",
]


if not TYPE_CHECKING:  # who checks types knows the names above, and that there are no others

    def __getattr__(name: str) -> Any:
        """The classes of gradients, which are loaded when somebody asks for gradients, or for the classes by their names."""
        if name == "BackwardPlan":
            from .call.backward import BackwardPlan as found
        elif name == "Gradients":
            from .problem.backward import Gradients as found
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
