"""Devices: the files that come with the package, and errors in others."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from easerve.config import ConfigError
from easerve.costs import hardware
from easerve.costs.hardware import FOLDER

GPUS = ["a100-80", "h100-sxm", "h200-sxm", "l40s", "rtx6000-ada"]


def test_names() -> None:
    assert hardware.names() == sorted([*GPUS, "cpu-2-cores"])


@pytest.mark.parametrize("name", hardware.names())
def test_each_can_be_read(name: str) -> None:
    device = hardware.read(name)
    assert device.num_granule <= device.num_units
    assert device.efficiency.memory.si <= 1
    assert (device.kernels is not None) is (device.kind == "gpu")


def test_figures() -> None:
    ada, a100 = hardware.read("rtx6000-ada"), hardware.read("a100-80")
    assert ada.num_units == 142
    assert ada.bandwidth.si == 960e9
    assert not ada.link.nvlink
    assert a100.num_units == 108
    assert a100.flops.si == 312e12
    assert a100.link.nvlink
    assert a100.all_reduce[4].bandwidth.si > a100.all_reduce[2].bandwidth.si


def test_a_stand_in_is_scaled_by_bandwidth() -> None:
    ada, l40s = hardware.read("rtx6000-ada"), hardware.read("l40s")
    assert ada.kernels
    assert ada.kernels.table == "l40s"
    assert ada.kernels.memory_scale == pytest.approx(l40s.bandwidth.si / ada.bandwidth.si)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"hardware 'l4': known are a100-80, .* or give the path"):
        hardware.read("l4")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    content = yaml.safe_load((FOLDER / "l40s.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**content, "title": "Mine"}))
    assert hardware.read("mine.yaml", tmp_path).title == "Mine"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": {"value": 1, "unit": "GB/s", "source": "x"}}, "memory: unit 'GB/s' is not"),
        ({"memori": 1}, "memori: unknown key; did you mean 'memory'?"),
        ({"kernels": {"table": "l4", "source": "x"}}, "kernels: table must be one of a100, h100"),
        ({"kernels": {"table": "l40s", "memory_scale": 2, "source": "x"}}, "kernels.memory_scale"),
        ({"flops": {"value": 1, "unit": "TFLOP/s"}}, "flops.source: Field required"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    content = yaml.safe_load((FOLDER / "l40s.yaml").read_text())
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({**content, **change}))
    with pytest.raises(ConfigError) as caught:
        hardware.read(str(path))
    assert f"{path}: {words}" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        hardware.read(str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("{")
    with pytest.raises(ConfigError, match="not YAML"):
        hardware.read("bad.yaml", tmp_path)
