"""Exact attention for CuPy, NumPy and everything else that is not PyTorch."""

from .api import attention, attention_backward, attention_vjp, merge_states
from .backward import BackwardPlan
from .errors import CompileError, DeadlockError, FaultError, SanitizerError, UnsupportedError
from .gradients import Gradients
from .launch import AttentionPlan
from .planning import plan_attention, plan_attention_backward

__version__ = "0.1.0"
__all__ = [
    "AttentionPlan",
    "BackwardPlan",
    "CompileError",
    "DeadlockError",
    "FaultError",
    "Gradients",
    "SanitizerError",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "attention_vjp",
    "merge_states",
    "plan_attention",
    "plan_attention_backward",
]
