from pathlib import Path
from typing import Any

import pytest

from easerve.config import ConfigError
from easerve.goodput import Slo
from easerve.sim.scenario import Scenario, read

from .scenarios import SCENARIOS, write

FILES = sorted(path for path in SCENARIOS.glob("*.yaml") if path.stem != "fitted")
"""All but the file of the knobs that easerve reproduce has fitted."""
PAPER = SCENARIOS / "llava-34b-rtx6000ada.yaml"
ANCHOR = {
    "system": "easerve",
    "rate_per_s": 2,
    "metric": "ttft_s.p99",
    "published": 1,
    "source": "s",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scenario.yaml"


def error_of(path: Path, **asked: Any) -> str:
    with pytest.raises(ConfigError) as error:
        read(path, **asked)
    return str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_scenario_of_the_repository_is_right(file: Path) -> None:
    scenario = read(file)
    for config in scenario.configs.values():
        assert config.num_gpus == scenario.num_gpus


@pytest.mark.long
def test_no_two_scenarios_have_one_title() -> None:
    titles = [read(file).title for file in FILES]
    assert len(set(titles)) == len(titles) > 10


@pytest.mark.long
def test_the_papers_set_ups_are_there() -> None:
    scenarios = [read(file) for file in FILES]
    assert {
        (scenario.model, scenario.hardware)
        for scenario in scenarios
        if scenario.experiment and len(scenario.experiment.rates_per_s) == 5
    } == {
        (model, hardware)
        for model in ("llava-v1.6-34b", "qwen2.5-vl-32b", "ultravox-v0.6-27b")
        for hardware in ("rtx6000-ada", "a100-80")
    }
    assert {each.workload.num_requests for each in scenarios if each.experiment} == {500}


def test_the_papers_rules_are_a_variant() -> None:
    def rules(scenario: Scenario) -> tuple[str, str]:
        policy = scenario.configs["easerve"].policy  # type: ignore[union-attr]
        return policy.when, policy.where

    assert rules(read(PAPER)) == ("slack", "deficit-tokens")
    assert rules(read(PAPER, "paper")) == ("gap", "deficit")
    assert rules(read(PAPER, "paper", ["systems.easerve.policy.when=none"])) == ("none", "deficit")


def test_a_grid_is_every_choice_with_every_other() -> None:
    experiment = read(SCENARIOS / "allocations.yaml").experiment
    assert experiment is not None
    assert len(experiment.all_variants) == 1 + 5 * 4 * 5
    changes = experiment.all_variants["e2-p2-d4 batch-16 share-0.4"]
    assert changes == {
        "systems.easerve.decode": {"replicas": 1, "tensor_parallel_size": 4},
        "systems.easerve.policy.max_batch_items": 16,
        "systems.easerve.policy.remote_share": 0.4,
    }


def test_a_topology_is_asked_for_by_its_name(tmp_path: Path, path: Path) -> None:
    change = {"systems.easerve.prefill.replicas": 2, "systems.easerve.decode.replicas": 1}
    experiment = {"systems": ["easerve"], "rates_per_s": [1], "topologies": {"p2": change}}
    write(path, experiment=experiment)
    assert read(path, "p2").configs["easerve"].workers == ("e0", "e1", "l0", "p0", "p1", "d0")  # type: ignore[union-attr]
    found = read(path).experiment
    assert found is not None
    assert list(found.changes) == ["p2"]
    assert not found.all_variants


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (
            {"topologies": {"big": {"systems.easerve.decode.replicas": 4}}},
            "topology big: systems.easerve has engines on 12 GPUs, but num_gpus is 8",
        ),
        (
            {"topologies": {"x": {"systems.easerve.decod.replicas": 1}}},
            "topology x: systems.easerve.decod: unknown key; did you mean 'decode'?",
        ),
        (
            {"topologies": {"v": {}}, "variants": {"v": {}}},
            "experiment: topologies.v: there is a variant of this name",
        ),
        (
            {"topologies": {"x": {"num_gpus": 16}}},
            "experiment: topologies.x: 'num_gpus': only keys below systems may change",
        ),
        ({"origins": {"vlm": "x"}}, "experiment.origins: 'vlm' is not there; there are easerve"),
    ],
)
def test_a_topology_that_cannot_be(path: Path, over: dict[str, Any], message: str) -> None:
    experiment = {"systems": ["easerve"], "rates_per_s": [1], **over}
    assert message in error_of(write(path, experiment=experiment))


def test_another_load() -> None:
    scenario = read(PAPER)
    other = scenario.at(5, 7)
    assert (other.workload.rate_per_s, other.workload.seed) == (5, 7)
    assert other.at(2, 1) == scenario == scenario.at()


def test_objectives_are_the_tiers_and_an_own_one(path: Path) -> None:
    slos = read(write(path)).slo.slos()
    assert list(slos) == ["S1", "S2", "S3", "S4", "S5", "own"]
    assert slos["S3"] == Slo(12.0, 1.85 * 0.052)
    assert slos["own"] == Slo(2.0, 0.08)
    assert read(write(path, slo={"ttft": None})).slo.slos()["own"] == Slo(None, 0.08)


def test_a_file_lies_on_another(tmp_path: Path, path: Path) -> None:
    write(path)
    over = tmp_path / "over.yaml"
    over.write_text(
        "base: scenario.yaml\ntitle: over\nworkload: {seed: 3}\n"
        "systems: {easerve: {local_prefill: null, partition: null, policy: {remote_share: 1}}}\n"
    )
    base, scenario = read(path), read(over)
    assert scenario.title == "over"
    assert scenario.workload == base.at(seed=3).workload
    assert scenario.configs["easerve"].workers == ("e0", "e1", "p0", "d0", "d1")  # type: ignore[union-attr]
    assert base.configs["easerve"].workers == ("e0", "e1", "l0", "p0", "d0", "d1")  # type: ignore[union-attr]


def test_files_are_named_from_the_file_that_names_them(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "times").write_text("1\n2\n")
    model = (SCENARIOS.parent / "src/easerve/costs/models/llava-v1.6-34b.yaml").read_text()
    (inner / "model.yaml").write_text(model)
    trace = {"arrivals": "trace", "trace": "times", "rate_per_s": None}
    change = {"model": "model.yaml", "workload.trace": "times"}
    experiment = {"systems": ["easerve"], "rates_per_s": [1], "variants": {"v": change}}
    write(inner / "base.yaml", model="model.yaml", workload=trace, experiment=experiment)
    over = tmp_path / "over.yaml"
    over.write_text("base: inner/base.yaml\n")
    for variant in (None, "v"):
        scenario = read(over, variant)
        assert scenario.model == str(inner / "model.yaml")
        assert scenario.workload.trace == str(inner / "times")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("there.yaml", "base: {folder}/there.yaml is no file"),
        ("2", "base: expected the name of a file (got 2)"),
        (
            "scenario.yaml",
            "base: files that lie on each other in a circle: scenario.yaml on scenario.yaml",
        ),
        (
            "other.yaml",
            "other.yaml: base: files that lie on each other in a circle: "
            "scenario.yaml on other.yaml on scenario.yaml",
        ),
    ],
)
def test_a_base_that_cannot_be(path: Path, base: str, message: str) -> None:
    path.write_text(f"base: {base}\n")
    path.with_name("other.yaml").write_text("base: scenario.yaml\n")
    assert error_of(path).endswith(message.format(folder=path.parent))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"title": ""}, "title: String should have at least 1 character (got '')"),
        ({"modle": 1}, "modle: unknown key; did you mean 'model'?"),
        ({"model": "llava"}, "model 'llava': known are llava-v1.6-34b, "),
        ({"hardware": "tpu"}, "hardware 'tpu': known are a100-80, "),
        ({"hardware": "tpu.yaml"}, "/tpu.yaml: No such file or directory"),
        ({"num_gpus": 7}, "systems.easerve has engines on 8 GPUs, but num_gpus is 7"),
        ({"system": "vllm"}, "system: 'vllm' is not there; there are easerve"),
        ({"systems": {"vlm": {}}}, "systems.vlm: unknown key; did you mean 'vllm'?"),
        (
            {"systems": {"vllm-epd": {"encode": {}}}},
            "systems.vllm-epd.prefill: Field required",
        ),
        (
            {"systems": {"easerve": {"policy": {"when": "never"}}}},
            "systems.easerve.policy.when: Input should be 'none', 'greedy', 'fixed', 'fill', 'gap' "
            "or 'slack' (got 'never')",
        ),
        (
            {"systems": {"easerve": {"encode": {"replicas": 3}}}},
            "systems.easerve: local_prefill.tensor_parallel_size 2 does not divide the 3 GPUs of "
            "encode",
        ),
        (
            {"systems": {"easerve": {"local_prefill": None}}},
            "systems.easerve: policy.remote_share 0.5 needs a section local_prefill",
        ),
        (
            {"systems": {"easerve": {"local_prefill": None, "policy": {"remote_share": 1}}}},
            "systems.easerve: partition needs a section local_prefill",
        ),
        (
            {"systems": {"hydrainfer": {"ed": {}}}},
            "systems.hydrainfer: no node runs prefill: give one of p, ep, pd, epd",
        ),
        ({"costs": {"source": "guess"}}, "costs.source: Input should be 'measured', 'roofline' or"),
        ({"costs": {"source": "profile"}}, "costs: source: profile and the file profile: give"),
        ({"costs": {"knobs": {"luck": 2}}}, "costs.knobs.luck: unknown key; known keys: "),
        ({"workload": {"rate_per_s": None}}, "workload: poisson arrivals need rate_per_s"),
        ({"workload": {"rate_per_s": "fast"}}, "workload.rate_per_s: Input should be a valid num"),
        ({"workload": {"preset": "none"}}, "workload: preset 'none' is none of random-mm, "),
        ({"workload": {"preset": None}}, "workload: give a preset (random-mm, "),
        (
            {"workload": {"preset": None, "items": []}},
            "workload: one of the items must have a weight of more",
        ),
        (
            {"workload": {"items": [{}, {"imag": "2x2"}]}},
            "workload.items.1.imag: unknown key; did you mean 'image'?",
        ),
        (
            {"workload": {"items": [{"image": "2 by 2"}]}},
            "workload.items.0.image: expected width x height in pixels, such as 1280x720 (got '2 b",
        ),
        ({"workload": {"preset": "librispeech"}}, "workload: LLaVA-v1.6-34B takes no sound: "),
        ({"slo": {"tpot_ref_s": None}}, "slo: ttft_ref_s and tpot_ref_s: give both or neither"),
        ({"slo": {"tpot": "80m"}}, "slo: 'tpot=80m' is not like ttft=2s, tpot=80ms"),
        (
            {"experiment": {"systems": ["vllm"], "rates_per_s": [1]}},
            "experiment.systems: 'vllm' is not there; there are easerve",
        ),
        (
            {
                "experiment": {
                    "systems": ["easerve"],
                    "rates_per_s": [1],
                    "variants": {"v": {"systems.easerve.polcy": 1}},
                }
            },
            "scenario.yaml: variant v: systems.easerve.polcy: unknown key; did you mean 'policy'?",
        ),
        ({"anchors": [ANCHOR | {"sytem": 1}]}, "anchors.0.sytem: unknown key; did you mean 'sys"),
        (
            {"anchors": [ANCHOR | {"system": "x"}]},
            "anchors.0.system: 'x' is not there; there are e",
        ),
        ({"anchors": [ANCHOR | {"metric": "x"}]}, "anchors.0: metric 'x' is none of throughput_pe"),
        (
            {"anchors": [ANCHOR, ANCHOR | {"variant": "x"}]},
            "anchors.1.variant: 'x' is not there; there is none",
        ),
        (
            {
                "anchors": [ANCHOR | {"metric": "attainment.S3"}],
                "slo": {"ttft_ref_s": None, "tpot_ref_s": None},
            },
            "anchors.0.metric: the objective: 'S3' is not there; there are own",
        ),
        (
            {"failures": [{"worker": "e2", "at_s": 1}]},
            "failures.0.worker: 'e2' is not there; there are e0, e1, l0, p0, d0, d1",
        ),
        (
            {"failures": [{"worker": "e0", "at_s": 2, "back_s": 1}]},
            "failures.0: back_s 1 must be after at_s 2",
        ),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_legal(
    path: Path, over: dict[str, Any], message: str
) -> None:
    error = error_of(write(path, **over))
    assert str(path) in error
    assert message in error


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"variant": "papr"}, ": experiment has no variant 'papr'; there are: paper"),
        ({"over": ["seed"]}, "--set 'seed' is not like workload.num_requests=100"),
        ({"over": ["a..b=1"]}, "--set 'a..b=1' is not like workload.num_requests=100"),
        ({"over": ["a=[1"]}, "--set a: not YAML: "),
        (
            {"variant": "paper", "over": ["workload.sed=1"]},
            ", variant paper, --set workload.sed=1: workload.sed: unknown key; did you mean 'seed'",
        ),
        ({"over": ["num_gpus=few"]}, ", --set num_gpus=few: num_gpus: Input should be a valid int"),
    ],
)
def test_a_change_that_cannot_be_is_named(asked: dict[str, Any], message: str) -> None:
    assert message in error_of(PAPER, **asked)


def test_a_change_is_laid_on_what_is_there() -> None:
    scenario = read(PAPER, over=["workload.items=[{image: 64x48}]", "costs.source=roofline"])
    assert scenario.costs.source == "roofline"
    (item,) = scenario.workload.mix().items
    assert item.image == (64, 48)


def test_of_a_preset_and_items_the_one_that_is_laid_on_counts(path: Path) -> None:
    items = read(PAPER, over=["workload.items=[{image: 64x48}]"])
    assert items.workload.preset is None
    named = read(PAPER, over=["workload.items=[{image: 64x48}]", "workload.preset=random-mm"])
    assert named.workload.items is None


@pytest.mark.parametrize("text", ["a: [", "- a list", "\0"])
def test_a_file_that_is_no_mapping_is_named(path: Path, text: str) -> None:
    path.write_text(text)
    assert error_of(path).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    assert error_of(path) == f"{path}: No such file or directory"
