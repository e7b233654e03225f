"""The options that all functions of attention take: written down once, and in the signature of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from ..problem.options import CommonOptions, Options

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(function: Function) -> Function:
    """Give a function that takes `**options` a signature in which each of `CommonOptions` has its name and its default."""
    own = inspect.signature(function)
    defaults = {field.name: field.default for field in fields(Options)}
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name), annotation=kind.__forward_arg__)
        for name, kind in CommonOptions.__annotations__.items()
    ]
    parameters = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    arrays = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    others = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=[*arrays, *common, *others])
    return function
