"""The command that measures several devices: its forecast, which needs none."""

import json

import pytest
from click.testing import CliRunner

from cupy_flash.cli import main
from cupy_flash.measure.distributed import Setting, forecasts


def test_the_forecast_is_a_table_and_a_file(tmp_path):
    path = tmp_path / "found.json"
    arguments = ["bench-distributed", "--forecast", "--devices", "8", "--schemes", "ring,ulysses", "--json", str(path)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())["results"]
    assert [(row["scheme"], row["direction"]) for row in found] == [
        (scheme, way) for scheme in ("ring", "ulysses") for way in ("forward", "backward")
    ]
    for row, line in zip(found, done.output.splitlines()[1:]):
        assert line.split()[:4] == ["8", "8192", row["scheme"], row["direction"]]
        assert f"{row['forecast']:.3f}" in line
        assert row["seconds"] is row["rate"] is row["share"] is None


def test_operations_are_those_of_pairs_that_are_seen():
    setting = Setting(100, heads=8, dim=16)
    assert setting.flops(2, False) == 4 * 16 * 8 * 200 * 201 / 2
    assert setting.flops(1, True) == 10 * 16 * 8 * 100 * 101 / 2
    assert len(list(forecasts(setting, 2, ("all_gather",)))) == 2


def test_without_devices_the_command_says_so():
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.is_available():
        pytest.skip("there is one")
    done = CliRunner().invoke(main, ["bench-distributed", "--devices", "2"])
    assert done.exit_code == 2
    assert "--devices: expected at most" in done.output
