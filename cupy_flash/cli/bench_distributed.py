"""``bench-distributed``: how fast attention is on several GPUs of this host, and what the model says of any number."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from .. import __version__
from ..measure.distributed import SCHEMES, Measured, Setting, forecasts, measured
from .lists import SIZES, names
from .output import table, terminal_width, tflops
from .plotting import OUTPUT


@click.command("bench-distributed")
@click.option("--devices", type=SIZES, default="2", show_default=True, help="How many of them, from the first on.")
@click.option("--rows", type=SIZES, default="8192", show_default=True, help="Tokens of each device.")
@click.option("--heads", type=click.IntRange(1), default=64, show_default=True, help="Query heads.")
@click.option("--heads-kv", type=click.IntRange(1), default=8, show_default=True, help="Key-value heads.")
@click.option("--dim", type=click.IntRange(1), default=128, show_default=True, help="Head dim.")
@click.option("--schemes", type=names(*SCHEMES), default=",".join(SCHEMES), show_default=True, help="What is measured.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Times of which the median is taken.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=120.0, show_default=True, help="Seconds.")
@click.option("--forecast", is_flag=True, help="What the model says, of any number of devices, without any.")
@click.option("--json", "json_path", type=OUTPUT, metavar="FILE", help="Write what was found.")
@click.pass_context
def bench_distributed(
    context: click.Context,
    devices: tuple[int, ...],
    rows: tuple[int, ...],
    heads: int,
    heads_kv: int,
    dim: int,
    schemes: tuple[str, ...],
    rounds: int,
    timeout: float,
    forecast: bool,
    json_path: Path | None,
) -> None:
    """Measure attention on several GPUs.

    In bfloat16, causal, in zigzag order: each scheme through NCCL, forward and backward, in TFLOP/s of each device and as a share
    of what one device does, beside the share that the model says. Results are judged before they are timed. Exits with 1 if one
    fails.

    \b
    Examples:
      cupy-flash bench-distributed --devices 2,4,8 --rows 8192,65536 --json found.json
      cupy-flash bench-distributed --forecast --devices 8,64 --rows 131072
    """
    if not forecast:
        _check_devices(max(devices))
    found: list[Measured] = []
    for count in devices:
        for tokens in rows:
            setting = Setting(tokens, heads, heads_kv, dim)
            source = forecasts(setting, count, schemes) if forecast else measured(setting, count, schemes, rounds, timeout)
            found += source
            if json_path is not None:
                report = {"version": __version__, "results": [asdict(row) for row in found]}
                json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    head = ("devices", "tokens", "scheme", "direction", "ms", "TFLOP/s", "share", "model", "sent MB", "memory MB")
    lines = [
        (
            str(row.ranks), str(row.rows), row.scheme, row.direction, "-" if row.seconds is None else f"{row.seconds * 1e3:.3f}",
            "-" if row.rate is None else tflops(row.rate), "-" if row.share is None else f"{row.share:.3f}", f"{row.forecast:.3f}",
            f"{row.sent_bytes / 1e6:.0f}", f"{row.memory_bytes / 1e6:.0f}",
        )
        for row in found
    ]  # fmt: skip
    click.echo("\n".join(table(head, lines, ">><<>>>>>>", terminal_width())))
    failed = [row for row in found if row.error]
    for row in failed:
        click.echo(f"{row.scheme}, {row.direction}, {row.ranks} devices: {row.error}", err=True)
    context.exit(int(bool(failed)))


def _check_devices(devices: int) -> None:
    try:
        import cupy

        there = cupy.cuda.runtime.getDeviceCount() if cupy.cuda.is_available() else 0
    except ImportError:
        there = 0
    if there < devices:
        raise click.UsageError(f"--devices: expected at most {there}, which this machine has, got {devices}; --forecast needs none")
    try:
        from cupy.cuda import nccl  # noqa: F401  which CuPy has where it finds the library
    except ImportError:
        raise click.UsageError("several devices need NCCL: pip install nvidia-nccl-cu12, or -cu13 beside CuPy of CUDA 13") from None
