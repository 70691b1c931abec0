"""``easerve search`` on the simulator."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from easerve import config
from easerve.cli.search import compare, prepare, shown
from easerve.cli.search.result import best_so_far
from easerve.config import ConfigError
from easerve.search import best
from easerve.search.study import Study

from .conftest import Easerve

ROOT = Path(__file__).parents[2]
IMAGES = str(ROOT / "scenarios/llava-34b-rtx6000ada.yaml")
SMALL = ["--set", "workload.num_requests=40", "--knob", "policy.max_batch_items=4"]
HARD = ["--slo", "ttft=2s,tpot=80ms", "--rate", "50"]
SMALL += ["--space", "paper", "--rate", "2", "--seeds", "1,2"]


Searched = Callable[..., dict[str, Any]]


@pytest.fixture
def searched(easerve: Easerve) -> Searched:
    """The JSON of a small search."""

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        ended = easerve("search", IMAGES, *SMALL, "--json", *arguments)
        assert ended.code == code, ended.err
        found: dict[str, Any] = json.loads(ended.out)
        return found

    return run


def test_a_search_ends_with_the_file_that_serve_takes(searched: Searched, tmp_path: Path) -> None:
    out, html = tmp_path / "best.yaml", tmp_path / "search.html"
    found = searched("--trials", "5", "--out", str(out), "--html", str(html))
    assert found["num_configurations"] == 4 * 20
    assert found["num_candidates"] == 3
    assert found["num_trials"] == 5
    won = found["best"]
    assert won["goodput_per_s"] == max(each["goodput_per_s"] for each in found["trials"])
    built = config.build(config.read_file(out), str(out))
    assert built.policy.remote_share == won["knobs"]["policy.remote_share"]
    assert built.policy.max_batch_items == 4
    assert f"e{built.encode.replicas}-p" in won["allocation"]
    text = out.read_text()
    assert f"trial {won['trial']} of 5" in text
    assert "Runner-up: " in text
    assert "times the goodput of" in text
    assert [each["seed"] for each in found["confirmation"]["rounds"]] == [3, 4, 5]
    before = found["confirmation"]["rounds"][0]["before"]
    assert before["goodput_per_s"] > 0
    assert "best so far" in html.read_text()


@pytest.mark.long
def test_the_same_seed_is_the_same_study_and_a_repeat_adds_nothing(
    searched: Searched, tmp_path: Path
) -> None:
    kept = ["--storage", str(tmp_path / "study.db")]
    alone = searched("--trials", "6")
    first = searched("--trials", "3", *kept)
    again = searched("--trials", "6", *kept)
    assert again["trials"] == alone["trials"]
    assert again["trials"][:3] == first["trials"]
    assert searched("--trials", "6", *kept)["trials"] == alone["trials"]
    other = searched("--trials", "6", *kept, "--study", "another")
    assert other["num_cached"] == 6, "its scores are known"


def test_a_study_of_something_else_is_not_gone_on_with(
    easerve: Easerve, searched: Searched, tmp_path: Path
) -> None:
    kept = ["--storage", str(tmp_path / "study.db"), "--study", "one", "--trials", "1"]
    searched(*kept)
    ended = easerve("search", IMAGES, *SMALL, *kept, "--method", "random")
    assert ended.code == 2
    assert "method: has there, random here" in ended.err


def test_a_promise_that_nothing_keeps_has_no_winner(
    easerve: Easerve, searched: Searched, tmp_path: Path
) -> None:
    out = tmp_path / "best.yaml"
    asked = ["--slo", "ttft=1ms", "--trials", "2", "--out", str(out)]
    ended = easerve("search", IMAGES, *SMALL, *asked)
    assert ended.code == 2
    assert "no allocation can keep the promise" in ended.err
    found = searched(*HARD, "--trials", "2", "--out", str(out), code=1)
    assert found["best"] is None
    assert found["closest"]["attainment"] < 0.9
    assert not out.exists()
    told = easerve("search", IMAGES, *SMALL, *HARD, "--trials", "2")
    assert "there is no winner" in told.out


def test_fewer_gpus_than_the_scenarios_systems_have_can_be_asked_for(searched: Searched) -> None:
    found = searched("--trials", "2", "--set", "num_gpus=6")
    assert {each["name"] for each in found["allocations"]} == {"e2-p2-d2"}
    assert "confirmation" not in found, "the scenario as it is has more GPUs"


def test_a_method_that_prunes_nothing_says_so(searched: Searched) -> None:
    found = searched("--trials", "2", "--method", "random")
    assert found["num_candidates"] == len(found["allocations"]) == 4
    assert all(each["kept"] for each in found["allocations"])


def test_what_would_be_searched_is_said_without_searching(easerve: Easerve) -> None:
    ended = easerve("search", IMAGES, *SMALL, "--dry-run")
    assert ended.code == 0
    assert "80 configurations of 4 allocations" in ended.out
    assert "leaves 1 device idle: another has all its engines and more" in ended.out
    assert "Trials" not in ended.out


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["nowhere.yaml"], "nowhere.yaml: No such file"),
        ([IMAGES, "--slo", "S9"], "--slo S9: the scenario has S1, S2"),
        ([IMAGES, "--knob", "policy.max_batch_items=abc"], "--knob policy.max_batch_items=abc: "),
        ([IMAGES, "--knob", "policy.remote_share=.nan"], "--knob policy.remote_share=nan: "),
        ([IMAGES, "--gpus", "0,1"], "--gpus goes with a deployment file, which"),
        ([str(ROOT / "scenarios/drift.yaml")], "its arrivals have rates of their own"),
        ([IMAGES, "--space", "all"], "none of paper, full"),
        ([IMAGES, "--method", "best"], "'best' is none of has"),
        ([IMAGES, "--knob", "max_batch_items=1"], "is not like policy.max_batch_items=1,4,16"),
        ([IMAGES, "--knob", "policy.when=[gap"], "--knob policy.when: '[gap': values are"),
        ([IMAGES, "--knob", "policy.when=2020-01-01"], "values are numbers or names"),
        ([IMAGES, "--knob", "a.b=1", "--knob", "a.b=2"], "--knob a.b: it is given twice"),
        ([IMAGES, "--knob", "encode.replicas=1,2"], "encode.replicas: allocations say it"),
        ([IMAGES, "--storage", "http://here/study"], "--storage http://here/study: studies are"),
        ([IMAGES, "--rate", "fast"], "not a list of numbers"),
        ([IMAGES, "--out", "nowhere/best.yaml"], "nowhere/best.yaml: No such file"),
        ([IMAGES, "--storage", "nowhere/study.db"], "there is no directory nowhere"),
        ([str(ROOT / "examples/tiny-llava.yaml")], "--rate: one is needed"),
        ([IMAGES, "--knob", "policy.nonsense=1,2"], "--knob policy.nonsense=1: "),
        ([IMAGES, "--knob", "policy.max_batch_items=4,0"], "--knob policy.max_batch_items=0: "),
    ],
)
def test_what_is_asked_wrongly(easerve: Easerve, arguments: list[str], cause: str) -> None:
    ended = easerve("search", *arguments)
    assert ended.code == 2, ended.err
    assert cause in " ".join(ended.err.split())


def test_a_result_is_drawn_again_from_its_json(
    easerve: Easerve, searched: Searched, tmp_path: Path
) -> None:
    kept, page = tmp_path / "search.json", tmp_path / "page.html"
    kept.write_text(json.dumps(searched("--trials", "3")))
    assert easerve("report", kept, "--html", page).code == 0
    assert "Every trial, darker where goodput is higher" in page.read_text()
    assert "3 trials by has (seed 0)" in easerve("report", kept).out


def test_values_of_knobs_are_read_as_yaml() -> None:
    assert prepare.knobs_of(["policy.when=gap,slack", "policy.flow=true", "a.b=1,0.5"]) == {
        "policy.when": ("gap", "slack"),
        "policy.flow": (True,),
        "a.b": (0.5, 1),
    }
    assert prepare.knobs_of(["a.b=16,4,16", "a.c=b,a,b"]) == {"a.b": (4, 16), "a.c": ("b", "a")}
    with pytest.raises(ConfigError, match="numbers or names"):
        prepare.knobs_of(["a.b=[1]"])


def test_a_ladder_is_climbed_in_its_order() -> None:
    knobs = {"policy.max_batch_items": (4,)}
    common = prepare.Common(Path(IMAGES), "S3", (1,), 0.9, "paper", knobs, 3, 0.25)
    found = prepare.on_simulator(common, prepare.Simulated((), (3.0, 1.0, 2.0, 1.0), None))
    assert list(found.question.rates_per_s) == [1.0, 2.0, 3.0]


def test_a_winner_that_could_not_be_written_is_not_searched(
    easerve: Easerve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> dict[str, Any]:
        raise ConfigError("name a deployment file with --deployment")

    monkeypatch.setattr(best, "of_scenario", refused)
    monkeypatch.setattr(Study, "run", None)
    ended = easerve("search", IMAGES, *SMALL, "--out", str(tmp_path / "best.yaml"))
    assert ended.code == 2
    assert "--deployment" in ended.err


def test_half_of_the_studies_were_near_by_the_median() -> None:
    def row(*near: int | None) -> list[object]:
        some = {"gap": 0.0, "num_scores": 3, "thinking_s": 0.1}
        return [*compare._row("has", [{"trials_to_near": each, **some} for each in near])[:4]]

    assert row(2, 6, 3, 9) == ["has", "4 of 4", 4.5, 9]
    assert row(2, 3, None) == ["has", "2 of 3", 3, None]
    assert row(2, 3, None, None) == ["has", "2 of 4", None, None]


def test_best_so_far_counts_what_keeps_the_promise() -> None:
    trials: list[dict[str, Any]] = [
        {"state": "complete", "attainment": 0.5, "goodput_per_s": 9.0},
        {"state": "complete", "attainment": 0.95, "goodput_per_s": 1.0},
        {"state": "pruned", "attainment": 1.0, "goodput_per_s": 5.0},
        {"state": "failed", "attainment": None, "goodput_per_s": None},
        {"state": "complete", "attainment": 0.9, "goodput_per_s": 2.0},
    ]
    assert best_so_far(trials, 0.9) == [None, 1.0, 1.0, 1.0, 2.0]


def test_methods_are_compared_with_all_there_is(searched: Searched, tmp_path: Path) -> None:
    few = ["--knob", "policy.remote_share=0.4,0.7,1.0", "--compare", "--compare-seeds", "2"]
    html = tmp_path / "compared.html"
    found = searched(*few, "--trials", "4", "--jobs", "1", "--html", str(html))
    assert found["num_configurations"] == 12
    most = found["exhaustive"]["goodput_per_s"]
    assert set(found["methods"]) == {"has", "tpe", "random", "coordinate"}
    for studies in found["methods"].values():
        assert [each["seed"] for each in studies] == [0, 1]
        for each in studies:
            assert each["gap"] >= 0
            assert len(each["curve"]) == 4
    assert found["best"]["goodput_per_s"] == pytest.approx((1 - found["gap"]) * most)
    assert "best so far" in html.read_text()


KILLED = [*SMALL, "--trials", "8", "--storage"]


@pytest.mark.long
def test_a_search_that_is_killed_goes_on_where_it_was(searched: Searched, tmp_path: Path) -> None:
    """Nothing is scored twice but what was being scored: each trial is as if nothing happened."""
    kept = tmp_path / "study.db"
    code = "import sys; from easerve.cli.main import main; sys.argv = sys.argv[1:]; main()"
    line = [sys.executable, "-c", code, "easerve", "search", IMAGES, *KILLED, str(kept), "--json"]
    rng, output = Random(7), b""
    for _ in range(10):
        process = subprocess.Popen(line, stdout=subprocess.PIPE, env={**os.environ})
        try:
            output, _ = process.communicate(timeout=rng.uniform(0.8, 2.5))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    else:
        output = subprocess.run(line, stdout=subprocess.PIPE, check=True, timeout=100).stdout
    found, alone = json.loads(output), searched("--trials", "8")
    assert found["trials"] == alone["trials"]


@pytest.mark.long
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    kept = tmp_path / "study.db"
    code = "import sys; from easerve.cli.main import main; sys.argv = sys.argv[1:]; main()"
    line = [sys.executable, "-c", code, "easerve", "search", IMAGES, *SMALL, "--trials", "5000"]
    process = subprocess.Popen([*line, "--storage", str(kept)], stderr=subprocess.PIPE)
    deadline_s = time.monotonic() + 30
    while not kept.exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"the same command goes on where it was ({kept})" in said.decode()


def test_knobs_in_words() -> None:
    trial = {"knobs": {"policy.remote_share": 0.55, "policy.when": "gap"}}
    assert shown.knobs(trial) == "remote_share 0.55, when gap"
