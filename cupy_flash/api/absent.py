"""What a call with an option that does not exist is answered: what there is in its place, under the name that it has here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])

# What PyTorch, JAX, FlashAttention and xFormers call what is here under another name, and what is not here.
ELSEWHERE = {
    "is_causal": "causal=True, which is aligned bottom right, or causal='top_left'",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "window_size": "window=(left, right)",
    "local_window_size": "window=(left, right)",
    "sliding_window": "window=(left, right)",
    "logits_soft_cap": "softcap",
    "return_softmax_lse": "return_lse",
    "return_residual": "return_lse",
    "return_attn_probs": "return_lse, since probabilities are nowhere in memory",
    "need_weights": "return_lse, since probabilities are nowhere in memory",
    "enable_gqa": "nothing: k and v may always have fewer heads than q",
    "learnable_sink": "sinks",
    "s_aux": "sinks",
    "dropout_p": "dropout, with a seed",
    "dropout_rate": "dropout, with a seed",
    "attn_mask": "mask for booleans, and bias for what is added",
    "attn_bias": "bias",
    "mask_mod": "mask",
    "mask_func": "mask=KeyRanges(start, stop)",
    "startend_row_indices": "mask, as an expression or KeyRanges(start, stop) of each query",
    "score_mod": "score",
    "implementation": "backend and algorithm",
    "input_layout": "layout",
    "qkv_format": "layout",
    "key_padding_mask": "seqlens_kv, how many keys each sequence has, or mask",
    "seqused_q": "seqlens_q",
    "seqused_k": "seqlens_kv",
    "query_seq_lengths": "seqlens_q",
    "key_value_seq_lengths": "seqlens_kv",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_kv",
    "cu_seqlens_k": "cu_seqlens_kv",
    "max_seqlen_q": "nothing: lengths are read where they are",
    "max_seqlen_k": "nothing: lengths are read where they are",
    "cache_seqlens": "seqlens_kv, of a cache that has the new keys already",
    "block_table": "pages",
    "page_table": "pages",
    "k_cache": "k, with seqlens_kv",
    "v_cache": "v, with seqlens_kv",
}
PLANNED = ("arch", "kernel")  # options of plans alone
MISSING = {"block_mask", "num_splits", "cache_leftpad", "descale_q", "descale_k", "descale_v"}
# What they call options that some functions here have.
RENAMED = {
    "cache_seqlens": "seqlens",
    "block_table": "pages",
    "page_table": "pages",
    "rotary_cos": "cos",
    "rotary_sin": "sin",
    "rotary_interleaved": "interleaved",
    "position_ids": "positions",
}
THERE_IS = (
    "masks are causal, window, prefix and mask; scores go through scale, softcap, score, bias and alibi_slopes; sequences have "
    "lengths of their own by seqlens_kv, cu_seqlens_kv or pages; and merge_states joins results over different keys"
)


def answers_absent(function: Function) -> Function:
    """Let a function say what there is in place of an option that it does not have. Calls cost a fraction of a microsecond more."""
    names = tuple(inspect.signature(function).parameters)
    knows = frozenset(names).issuperset

    @functools.wraps(function)
    def answering(*arguments: Any, **options: Any) -> Any:
        if knows(options):
            return function(*arguments, **options)
        unknown = next(name for name in options if name not in names)
        raise _answer(function.__name__, unknown, names)

    return answering


def _answer(function: str, name: str, known: tuple[str, ...]) -> Exception:
    if RENAMED.get(name) in known:
        return TypeError(f"{name}: expected an option of {function}; what it means elsewhere is {RENAMED[name]} here")
    if name in MISSING:
        return UnsupportedError(f"{name}: expected an option of {function}, and there is none for this yet; {THERE_IS}")
    close = difflib.get_close_matches(name, known, n=1)
    if name in ELSEWHERE:
        hint = f"what it means elsewhere is {ELSEWHERE[name]} here"
    elif name in PLANNED:
        hint = "plan_attention and plan_attention_backward have it"
    elif close:
        hint = f"{close[0]} is one"
    else:
        hint = f"there are {', '.join(known)}"
    return TypeError(f"{name}: expected an option of {function}; {hint}")
