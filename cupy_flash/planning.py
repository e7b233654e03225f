"""The public functions that decide how to compute, without computing. No logic: each hands its arguments on."""

from __future__ import annotations

from typing import Any

from .absent import answers_absent
from .backward import BackwardPlan, operands, prepared_backward
from .launch import Arguments, AttentionPlan, prepared


@answers_absent
def plan_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "bhsd",
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    precision: str | None = None,
    algorithm: str = "auto",
    backend: str = "auto",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    arch: str | None = None,
    kernel: str | None = None,
) -> AttentionPlan:
    """Decide how `attention` would compute, without computing.

    Parameters
    ----------
    q, k, v, layout, scale, causal, window, softcap, precision, algorithm, backend, return_lse, out, lse
        As in `attention`. Only the layouts of the arrays matter.
    arch : str, optional
        Architecture to plan for on backend 'host', such as '75' or '90a'; by default '80'. On a GPU it is the device's own.
    kernel : {None, 'fwd_v1', 'fwd_v2', 'fwd_hopper'}
        Kernel file to compute with, such as to compare two; None leaves the choice to the planner. Of 'v2' there are 'fwd_v2', for
        everything, and 'fwd_hopper', for sm_90a, 16-bit dtypes and arrays whose strides are multiples of 16 bytes.

    Returns
    -------
    AttentionPlan
        Prints itself, and computes when called as ``plan(q, k, v, out=..., lse=...)`` with arrays of the same layouts.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention`; also if the kernel asked for cannot compute this.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> q = np.ones((1, 4, 256, 64), np.float16)
    >>> plan = cupy_flash.plan_attention(q, q, q, causal=True, backend="host")
    >>> plan.kernel.config.TILE_Q
    128
    """
    options = (arch, layout, scale, causal, window, softcap, precision, algorithm, backend, return_lse, kernel)
    return prepared(Arguments(q, k, v, out, lse), options)


@answers_absent
def plan_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    layout: str = "bhsd",
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    precision: str | None = None,
    algorithm: str = "auto",
    backend: str = "auto",
    dlse: Any = None,
    deterministic: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    arch: str | None = None,
    kernel: str | None = None,
) -> BackwardPlan:
    """Decide how `attention_backward` would compute, without computing.

    Parameters
    ----------
    dout, q, k, v, out, lse, layout, scale, causal, window, softcap, precision, algorithm, backend, dlse, deterministic, dq, dk, dv
        As in `attention_backward`. Only the layouts of the arrays matter.
    arch : str, optional
        As in `plan_attention`.
    kernel : {None, 'bwd_v2', 'bwd_hopper', 'bwd_hopper_wide'}
        Kernel file to compute with, such as to compare two; None leaves the choice to the planner. 'bwd_v2' is for everything, the
        others are for sm_90a, 16-bit dtypes and arrays whose strides are multiples of 16 bytes: 'bwd_hopper' for head dims of at
        most 128, 'bwd_hopper_wide' for wider ones as well.

    Returns
    -------
    BackwardPlan
        Prints itself, knows its `workspace_bytes`, and computes when called as
        ``plan(dout, q, k, v, out, lse, dlse=..., dq=..., dk=..., dv=..., workspace=...)`` with arrays of the same layouts.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `attention_backward`; also if the kernel asked for cannot compute this.

    Examples
    --------
    >>> import numpy as np, cupy_flash
    >>> x, lse = np.ones((4, 256, 64), np.float16), np.ones((4, 256), np.float32)
    >>> plan = cupy_flash.plan_attention_backward(x, x, x, x, x, lse, backend="host")
    >>> plan.workspace.names
    ('stats', 'dq_accum')
    """
    given = operands(dout, q, k, v, out, lse, dlse, dq, dk, dv)
    options = (layout, scale, causal, window, softcap, precision, algorithm, backend)
    return prepared_backward(given, options, deterministic, arch, kernel)
