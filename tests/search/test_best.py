"""The winner is a file that serve takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from easerve import config
from easerve.config import ConfigError
from easerve.search import best
from easerve.sim import scenario as scenarios

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "scenarios/llava-34b-rtx6000ada.yaml"
TINY = ROOT / "scenarios/tiny-llava-cpu.yaml"


def scenario(path: Path, **changes: Any) -> scenarios.Scenario:
    over = {f"systems.easerve.{key}": each for key, each in changes.items()}
    return scenarios.build(scenarios.laid(scenarios.read_content(path), over), str(path))


def test_a_scenario_becomes_a_deployment_of_its_model() -> None:
    made = best.of_scenario(scenario(IMAGES, partition=None))
    built = config.build(made, "best")
    assert built.model == "llava-hf/llava-v1.6-34b-hf"
    assert (built.device, built.prefill.tensor_parallel_size) == ("cuda", 2)
    assert built.local_prefill is not None
    assert built.policy.remote_share == 0.5
    assert "offload_seed" not in made["policy"]
    assert "encode_target_s" not in made["policy"], "there is no partition to keep it"
    assert "limits" not in made, "those of the paper's runs refuse nobody"


def test_what_only_the_simulator_knows_is_left_out() -> None:
    made = best.of_scenario(scenario(IMAGES, partition=None, encode={"dispatch_s": 0.1}))
    assert made["encode"] == {"replicas": 2}


def test_a_model_that_is_nowhere_needs_a_deployment_file() -> None:
    with pytest.raises(ConfigError, match="--deployment"):
        best.of_scenario(scenario(TINY))
    base = config.read_file(ROOT / "examples/tiny-llava.yaml")
    made = best.of_scenario(scenario(TINY, **{"policy.max_batch_items": 4}), base)
    assert made["policy"]["max_batch_items"] == 4
    assert made["policy"]["when"] == base["policy"]["when"]
    assert made["engine"] == base["engine"]


def test_changes_of_a_deployment_take_sections_away() -> None:
    base = config.read_file(ROOT / "examples/tiny-llava-partition.yaml")
    changes = {"local_prefill": None, "partition": None, "policy.remote_share": 1.0}
    made = best.of_deployment(base, changes)
    assert "local_prefill" not in made
    assert not config.PARTITION_KNOBS & set(made["policy"])


def test_a_winner_that_cannot_be_says_so() -> None:
    with pytest.raises(ConfigError, match="remote_share"):
        best.of_deployment({"model": "m"}, {"policy.remote_share": 0.5})


def test_the_file_is_read_again_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    base = config.read_file(Path("examples/tiny-llava.yaml"))
    made = best.of_deployment(base, {"policy.max_batch_items": 8})
    path = tmp_path / "best.yaml"
    remarks = ["Found by a search.", "x" * 60 + " " + "y" * 60]
    built = best.write(path, made, remarks)
    assert Path(built.model).resolve() == ROOT / "models/tiny-llava"
    assert built.policy.max_batch_items == 8
    head = path.read_text().split("\n\n")[0].splitlines()
    assert head == ["# Found by a search.", f"# {'x' * 60}", f"# {'y' * 60}"]
    assert yaml.safe_load(path.read_text())["served_model_name"] == "tiny-llava"


def test_knobs_in_words() -> None:
    assert best.shown([("policy.when", "gap"), ("policy.gap_k", 0.5)]) == "when gap, gap_k 0.5"
