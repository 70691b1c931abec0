from pathlib import Path
from typing import Any

import pytest

from easerve.config import ConfigError
from easerve.sim import scenario as scenarios
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.simulate import make_world, simulate
from easerve.sim.systems import hydra_node, hydrainfer

from .scenarios import SCENARIOS, write

ED_P = {"ed": {"replicas": 4}, "p": {"replicas": 4}}


def small(tmp_path: Path, **over: Any) -> Scenario:
    return scenarios.read(write(tmp_path / "small.yaml", **over))


def sides(scenario: Scenario) -> str:
    prefills = sorted(
        (action.request_id, str(action.placement.side))
        for _, action in simulate(scenario, "easerve").prefills
    )
    return "".join(side[0] for _, side in prefills)


def test_seeds_draw_other_sides(tmp_path: Path) -> None:
    policy = {"where": "bernoulli", "remote_share": 0.5}
    scenario = small(tmp_path, systems={"easerve": {"policy": policy}})
    drawn = [sides(scenario.at(seed=seed)) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]


def test_a_seed_that_is_given_draws_the_same_sides(tmp_path: Path) -> None:
    policy = {"where": "bernoulli", "remote_share": 0.5, "offload_seed": 1}
    scenario = small(tmp_path, systems={"easerve": {"policy": policy}})
    assert sides(scenario.at(seed=1)) == sides(scenario.at(seed=2))


def test_failures_are_not_for_other_systems(tmp_path: Path) -> None:
    failures = [{"worker": "e0", "at_s": 1, "back_s": 2}]
    scenario = small(tmp_path, systems={"vllm": {}}, failures=failures)
    assert len(simulate(scenario, "easerve").records) == 20
    with pytest.raises(ConfigError, match=r"failures: .* system vllm cannot have any"):
        simulate(scenario, "vllm")


def test_a_system_that_stands_still_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that admit nothing."""
    monkeypatch.setattr(hydra_node.Node, "admit", lambda node: iter(()))
    scenario = small(tmp_path, hardware="a100-80", systems={"hydrainfer": ED_P})
    with pytest.raises(ConfigError, match="system hydrainfer stands still: 20 of 20 requests"):
        simulate(scenario, "hydrainfer")


def test_hydrainfers_caches_are_as_its_source_divides_memory() -> None:
    """85.0 GB - 68.8 GB of weights, and of an encoder; 0.8 and 0.9 of what is left are not for
    activations, and 0.8 of that is for KV, of 245,760 bytes a token.
    """
    scenario = scenarios.read(SCENARIOS / "llava-34b-a100.yaml")
    config = scenario.configs["hydrainfer"]
    built = hydrainfer.build(config, make_world(scenario, Run()))  # type: ignore[arg-type]
    tokens = {node.name: node.llm.limits.kv_tokens for node in built.nodes if node.llm}
    assert (tokens["ed0"], tokens["p0"]) == (40_384, 47_481)
