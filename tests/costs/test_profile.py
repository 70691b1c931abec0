"""Profiles: what is read of one, what is refused, whether it holds for a device."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from easerve.config import ConfigError
from easerve.costs import profile
from easerve.costs.profile import Capacity, Key, Peak, Profile, Runs

from . import stages

KEY = Key(device="A CPU", units=4, torch="2.13", vllm="0.32", model="tiny", dtype="float32")
CELL = {"units": 1, "batch": 1, "contended": False, "forward_s": [1], "wall_s": [1]}


def runs(units: int, batch: int, seconds: float, contended: bool = False) -> Runs:
    return Runs(
        units=units, batch=batch, contended=contended, forward_s=(seconds,), wall_s=(2 * seconds,)
    )


def made(*cells: Runs) -> Profile:
    return Profile(
        made=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        easerve="0.1",
        key=KEY,
        unit="core",
        partition="cpu",
        picture=(60, 60),
        item_tokens=25,
        others_cores=0.5,
        capacity=Capacity(encode_items_per_s=9, prefill_tokens_per_s=900),
        peak=Peak(flops_per_s=1e11, bytes_per_s=1e10, how="a GEMM"),
        runs=cells,
    )


def changed(path: Path, **values: Any) -> Path:
    """A file that says so instead."""
    content = yaml.safe_load(path.read_text())
    for name, value in values.items():
        place: Any = content
        *sections, key = name.split("__")
        for section in sections:
            place = place[int(section) if section.isdigit() else section]
        place[key] = value
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profiles/a-cpu/tiny.yaml"
    profile.write(made(runs(1, 1, 0.02)), path)
    return path


@pytest.mark.parametrize(
    ("num", "percent", "rank"), [(20, 95, 19), (19, 95, 19), (100, 95, 95), (1, 95, 1), (4, 50, 2)]
)
def test_a_percentile_is_a_value_that_was_measured(num: int, percent: int, rank: int) -> None:
    values = [float(value) for value in range(num, 0, -1)]
    assert profile.percentile(values, percent) == rank


def test_the_surface_is_what_an_encoder_gets_beside_prefill() -> None:
    cells = (
        runs(4, 2, 0.01),  # all of the device, which prefill never leaves
        runs(1, 2, 0.04),
        runs(3, 2, 0.03, contended=True),
        runs(1, 2, 0.05, contended=True),
        runs(1, 1, 0.02, contended=True),
    )
    assert made(*cells).rows() == ((1, ((1, 0.02),)), (2, ((1, 0.05), (3, 0.03))))


def test_a_device_that_was_not_divided_has_only_all_its_units() -> None:
    assert made(runs(4, 1, 0.01)).rows() == ((1, ((4, 0.01),)),)


def test_what_was_written_is_read(file: Path) -> None:
    assert profile.read(file) == made(runs(1, 1, 0.02))
    assert file.read_text().startswith("# Written by easerve profile")
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_stages_are_written_and_read(tmp_path: Path) -> None:
    whole = made(runs(1, 1, 0.02)).model_copy(update={"stages": stages.made()})
    profile.write(whole, tmp_path / "p.yaml")
    assert profile.read(tmp_path / "p.yaml") == whole


def test_a_file_of_an_older_version_has_no_stages(file: Path) -> None:
    assert "stages" not in file.read_text()
    assert profile.read(file).stages is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"key__units": 0}, "key.units: Input should be greater than or equal to 1"),
        ({"runs__0__forward_s": []}, "runs.0.forward_s: "),
        ({"runs__0__forwards": 1}, "runs.0.forwards: Extra inputs are not permitted"),
        ({"made": "today"}, "made: "),
        ({"runs": [CELL] * 2}, "a profile: Value error, runs: batch 1 on 1 units is there 2 times"),
    ],
)
def test_an_error_names_the_file_and_the_key(
    file: Path, values: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        profile.read(changed(file, **values))
    assert f"{file}: {message}" in str(error.value)


def test_what_is_no_profile_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for content, message in (("{", "not YAML"), ("- 1", "a profile: Input should be")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            profile.read(path)
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        profile.read(tmp_path / "none.yaml")


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"p\.yaml: (Not a directory|File exists)"):
        profile.write(made(runs(1, 1, 0.02)), tmp_path / "file/p.yaml")


def test_a_profile_says_what_it_does_not_hold_for() -> None:
    assert profile.mismatch(KEY, KEY) is None
    other = KEY.model_copy(update={"device": "Another", "driver": "580"})
    sentence = profile.mismatch(KEY, other)
    assert sentence == (
        "the profile was made with device A CPU, here Another; driver None, here 580"
    )
