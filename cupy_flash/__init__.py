"""Exact attention for CuPy, NumPy and everything else that is not PyTorch."""

from .api import attention, plan_attention
from .errors import CompileError, DeadlockError, SanitizerError, UnsupportedError
from .launch import AttentionPlan

__version__ = "0.1.0"
__all__ = [
    "AttentionPlan",
    "CompileError",
    "DeadlockError",
    "SanitizerError",
    "UnsupportedError",
    "attention",
    "plan_attention",
]
