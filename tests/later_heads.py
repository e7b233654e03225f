"""Backwards whose blocks make what later heads need: their plans, the formula, and what is allowed between them."""

import ml_dtypes
import numpy

from cupy_flash import attention, plan_attention_backward
from cupy_flash.machine import host, source

HOST = {"backend": "host", "arch": "90a"}


def normal(rng, shape, dtype):
    return rng.standard_normal(shape, numpy.float32).astype(dtype)


def backward_of(shape, shape_kv, dtype="f2", with_dlse=False, deterministic=False, **options):
    """The plan, the formula, and what both are given."""
    rng = numpy.random.default_rng(0)
    q, k, v = (normal(rng, x, dtype) for x in (shape, shape_kv, shape_kv))
    options |= {"sinks": normal(rng, shape[-3], numpy.float32)} if options.pop("sinks", False) else {}
    out, lse = attention(q, k, v, return_lse=True, **options)
    dout, dlse = normal(rng, out.shape, dtype), normal(rng, lse.shape, numpy.float32) if with_dlse else None
    given = (dout, q, k, v, out, lse)
    options_of = {"dlse": dlse, "deterministic": deterministic, **options}
    plans = (plan_attention_backward(*given, **where, **options_of) for where in (HOST, {"backend": "numpy"}))
    named = {"dlse": dlse} if with_dlse else {}
    return *plans, given, named | ({"sinks": options["sinks"]} if "sinks" in options else {})


def judged(plan, formula, given, named):
    memory = numpy.full(plan.workspace_bytes, 0x7F, numpy.uint8)  # which may hold anything
    for got, right in zip(plan(*given, workspace=memory, **named), formula(*given, **named)):
        error = abs(got.astype("f4") - right.astype("f4")).max()
        allowed = 4 * float(ml_dtypes.finfo(got.dtype).eps) * max(1, abs(right.astype("f4")).max())
        assert numpy.isfinite(got.astype("f4")).all() and error <= allowed


def plan_of(heads, len_q=512, len_kv=512, dim=64, order=None, **options):
    shapes = ((heads, len_q, dim), (heads, len_kv, dim))
    q, k = (numpy.zeros(shape, "f2", order=order) for shape in shapes)
    return plan_attention_backward(q, q, k, k, q, numpy.zeros(shapes[0][:-1], "f4"), **HOST, **options)


def slow_down(monkeypatch, plan, file, call, file_of_wait, wait=None):
    """All blocks of a plan run at once, and before this call each takes long; without that wait, if one is named."""
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: range(20 * plan.kernel.config.WARPS))
    changes = [(file, call, "  std::this_thread::sleep_for(std::chrono::milliseconds(500));\n" + call)]
    changes += [(file_of_wait, wait, "")] if wait else []
    texts = dict(source.files())
    for name, old, new in changes:
        assert texts[name].count(old) == 1
        texts[name] = texts[name].replace(old, new)
    changed = {name: texts[name] for name, *_ in changes}
    monkeypatch.setattr(host, "source_of", lambda plan: source.source_of(plan) | changed)
