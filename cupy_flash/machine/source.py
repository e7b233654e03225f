"""The kernel sources, and exactly the text that is compiled for a plan."""

from __future__ import annotations

import functools
import re
from dataclasses import asdict
from pathlib import Path

from ..plan.kernel import Config, KernelPlan


@functools.cache
def shelf() -> Path:
    """The folder ``kernels_cu``: inside the installed package, beside it in a checkout."""
    here = Path(__file__).resolve().parents[1]
    installed = here / "kernels_cu"
    return installed if installed.is_dir() else here.parent / "kernels_cu"


@functools.cache
def files() -> dict[str, str]:
    """Every source file by its path on the shelf, as included."""
    paths = sorted(path for path in shelf().rglob("*") if path.suffix in (".cu", ".cuh", ".cpp"))
    return {path.relative_to(shelf()).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def source_of(plan: KernelPlan) -> dict[str, str]:
    """The files that a plan compiles: its kernel first, then every header, `config.cuh` with the plan's own values."""
    main = f"{plan.file}.cu"
    headers = {name: text for name, text in files().items() if name.endswith(".cuh")}
    return {main: files()[main], **headers, "config.cuh": config_text(plan.config)}


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
    if values:
        raise ValueError(f"config.cuh: expected a constant for each field of Config, found none for {sorted(values)}")
    return text
