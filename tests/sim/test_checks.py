"""Keys that would do nothing, or that the hardware cannot do."""

from pathlib import Path
from typing import Any

import pytest

from easerve.config import ConfigError
from easerve.sim.checks import check
from easerve.sim.scenario import build, laid, read, read_content

from .scenarios import SCENARIOS, write

NEEDS = "needs a section partition: without it encode and local prefill share all of their device"
CPU = "Two cores of an AMD EPYC: all engines share the cores"
PROFILE = "with costs.source profile an engine is the one that was measured; leave it out"


def said(path: Path, *over: str) -> list[str]:
    """What is wrong with a scenario."""
    try:
        check(read(path, over=over))
    except ConfigError as error:
        return str(error).split("\n")
    return []


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "scenario.yaml")


@pytest.mark.long
@pytest.mark.parametrize(
    "path", [path for path in sorted(SCENARIOS.glob("*.yaml")) if path.stem != "fitted"]
)
def test_no_scenario_of_ours_says_what_it_does_not_do(path: Path) -> None:
    scenario, content = read(path), read_content(path)
    check(scenario)
    for change in scenario.experiment.all_variants.values() if scenario.experiment else ():
        check(build(laid(content, change), str(path)))


@pytest.mark.parametrize("policy", [{"how": "static"}, {"encode_units": 70}, {"how": "gate"}])
def test_a_rule_of_partition_needs_one(tmp_path: Path, policy: dict[str, Any]) -> None:
    systems = {"easerve": {"policy": policy, "partition": None}}
    path = write(tmp_path / "scenario.yaml", systems=systems)
    (name,) = policy
    assert said(path) == [f"systems.easerve.policy.{name} {NEEDS}"]


def test_who_takes_the_partition_of_a_base_away_may_leave_its_rule(small: Path) -> None:
    targets = "systems.easerve.policy.encode_target_s=0.2"
    assert not said(small, "systems.easerve.partition=null", targets)
    assert not said(small, "systems.easerve.partition=null", "systems.easerve.policy.how=none")


def test_without_any_word_of_partition_no_rule_may_be_given(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    write(path, systems={"easerve": {"policy": {"how": "dynamic", "encode_target_s": 0.2}}})
    path.write_text(path.read_text().replace("    partition: {}\n", ""))
    keys = ("encode_target_s", "how")
    assert said(path) == [f"systems.easerve.policy.{key} {NEEDS}" for key in keys]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("partition.min_prefill_units", 1000, "1000: it can be 1 to 140 of 142 units"),
        ("partition.min_prefill_units", 140, ""),
        (
            "policy.encode_units",
            1000,
            "1000: it can be 1 to 140 of 142 units, as local prefill keeps 2",
        ),
        ("policy.encode_units", 140, ""),
    ],
)
def test_parts_are_within_the_device(small: Path, key: str, value: int, message: str) -> None:
    expected = [f"systems.easerve.{key} {message}"] if message else []
    assert said(small, f"systems.easerve.{key}={value}") == expected


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("costs.knobs.gemm_scale=2", "costs.knobs.gemm_scale 2.0: costs.source profile has no"),
        ("systems.easerve.decode.step_overhead_s=1", f"decode.step_overhead_s 1.0: {PROFILE}"),
        ("systems.easerve.prefill.tensor_parallel_size=2", f"tensor_parallel_size 2: {PROFILE}"),
        ("systems.easerve.partition={}", f"systems.easerve.partition: {CPU}"),
        ("systems.easerve.local_prefill.crowding=1", f"local_prefill.crowding: {CPU}"),
    ],
)
def test_what_a_profile_or_a_cpu_does_not_know_may_not_be_given(over: str, message: str) -> None:
    beside = "systems.easerve.local_prefill.max_num_seqs=8"
    found = said(SCENARIOS / "tiny-llava-cpu.yaml", "num_gpus=9", beside, over)
    assert len(found) == 1
    assert message in found[0]
