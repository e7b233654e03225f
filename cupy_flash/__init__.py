"""Exact attention for CuPy, NumPy and everything else that is not PyTorch."""

from .api.append import append_kv
from .api.backward import attention_backward, attention_vjp, plan_attention_backward
from .api.dropout import dropout_mask
from .api.forward import attention, plan_attention
from .api.merge import merge_states
from .api.rotate import rotate
from .call.backward import BackwardPlan
from .call.forward import AttentionPlan
from .call.tile_mask import TileMask
from .errors import CommunicationError, CompileError, DeadlockError, FaultError, SanitizerError, UnsupportedError
from .problem.backward import Gradients
from .problem.key_ranges import KeyRanges

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
