"""Exactly the text that is compiled for a plan."""

from __future__ import annotations

import re
from dataclasses import asdict

from ..plan.expression_text import ExpressionText
from ..plan.kernel import Config, KernelPlan
from ..plan.sources import files
from ..plan.structs import struct
from ..problem.options import BACKWARD_KERNELS, FORWARD_KERNELS

# What the kernel files call the shared memory of a block, by entry.
STATED = {kernel: "SHARED_BYTES" for kernel in (*FORWARD_KERNELS, *BACKWARD_KERNELS)}
STATED |= dict.fromkeys(("classify", "fp16_parts"), "SHARED_BYTES")
STATED |= {f"{kernel}_postprocess": "POSTPROCESS_BYTES" for kernel in BACKWARD_KERNELS}
STATED |= {f"{kernel}_sinks": "SINKS_BYTES" for kernel in BACKWARD_KERNELS}
STATED |= {"bwd_scores": "SHARED_BYTES", "bwd_scores_add": "ADD_BYTES", "bwd_scores_gather": "ADD_BYTES"}
STATED |= {"bwd_scores_hopper": "SHARED_BYTES", "bwd_scores_hopper_add": "ADD_BYTES", "bwd_scores_hopper_gather": "ADD_BYTES"}


def source_of(plan: KernelPlan) -> dict[str, str]:
    """The files that a plan compiles: its kernel first, then every header, `config.cuh` with the plan's own values.

    Behind the kernel stands what the plan takes for granted, so that a kernel is not compiled of which it is not true.
    """
    main = f"{plan.file}.cu"
    headers = {name: text for name, text in files().items() if name.endswith(".cuh")}
    own = {"config.cuh": config_text(plan.config), "expression.cuh": expressions_text(plan.expressions)}
    return {main: files()[main] + assertions(plan), **headers, **own}


def assertions(plan: KernelPlan) -> str:
    """The sizes that a plan counts on, to be compiled with the kernel."""
    name = plan.params
    sizes = {f"sizeof({name})": struct(name).itemsize}
    sizes |= {STATED[entry]: size for entry, size in plan.entries.items() if entry in STATED}
    return "".join(f'static_assert({stated} == {size}, "the plan counts on {size} bytes");\n' for stated, size in sizes.items())


def expressions_text(expressions: ExpressionText) -> str:
    """The text of ``expression.cuh`` with the expressions of a problem in place of what returns what came."""
    text = files()["expression.cuh"]
    functions = {
        "uniform_of": "".join(f"number == {number} ? {of_head} : " for number, of_head in enumerate(expressions.uniforms)) + "0.f",
        "term_of": expressions.term,
        "key_term_of": expressions.key_term,
        "per_key_of": expressions.per_key,
        "per_query_of": expressions.per_query,
        "bend_of": expressions.bend,
        "diagonal_of": expressions.diagonal,
        "score_of": expressions.score,
        "slope_of": expressions.slope,
        "takes_part": expressions.takes_part,
        "takes_part_in": expressions.takes_part_in,
        "factor_of": expressions.factor,
        "element_of": expressions.element,
    }
    for name, returned in functions.items():
        if returned:
            text = re.sub(rf"(\b{name}\([^)]*\) {{\n  return ).*;", lambda found, returned=returned: f"{found[1]}{returned};", text)
    for name, value in expressions.constants:
        text = re.sub(rf"(constexpr \w+ {name} = )\w+;", rf"\g<1>{value};", text)
        text = re.sub(rf"typedef \w+ {name};", f"typedef {value} {name};", text)
    return text


def config_text(config: Config) -> str:
    """The text of ``config.cuh`` with the values of `config` in place of the defaults."""
    values = asdict(config)

    def with_value(constant: re.Match[str]) -> str:
        value = values.pop(constant["name"])
        spelled = str(value).lower() if isinstance(value, bool) else str(value)
        # Keeps the comments in their column.
        old = len(constant["value"]) + len(constant["gap"])
        return f"{constant['head']}{spelled};".ljust(len(constant["head"]) + old + 1)

    text = re.sub(
        r"(?P<head>constexpr +\w+ +(?P<name>\w+) = )(?P<value>\w+);(?P<gap> *)",
        with_value,
        files()["config.cuh"],
    )
    if config.CLUSTER > 1:  # which an attribute of the kernel says as well, or a launch would have to
        text = re.sub(r"(?<=#define IN_CLUSTERS)( *)", " CLUSTERS_OF(CLUSTER)  ", text)
    if values:
        raise ValueError(f"config.cuh: expected a constant for each field of Config, found none for {sorted(values)}")
    return text
