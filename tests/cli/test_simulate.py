import json
import re
from pathlib import Path

import pytest

from easerve.goodput import TIERS
from easerve.sim import scenario as scenarios

from ..sim.scenarios import write
from .conftest import Easerve, Ended

KEYS = {"num_requests", "completed", "failed", "rejected", "throughput_per_s", "goodput_per_s"}
KEYS |= {"attainment", "ttft_s", "tpot_s", "lateness_p99_s"}
KEYS |= {"utilisation", "bound_per_s", "wall_s", "simulated_s"}


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    experiment = {
        "systems": ["easerve"],
        "rates_per_s": [1],
        "variants": {"gap": {"systems.easerve.policy.when": "gap"}},
    }
    return write(tmp_path / "scenario.yaml", experiment=experiment)


def cells(ended: Ended) -> dict[str, list[str]]:
    """The rows of all tables by their name."""
    assert (ended.code, ended.err) == (0, "")
    rows = re.findall(r"^  (\S[^\n]*?)  +(\S[^\n]*?) *$", ended.out, re.M)
    found: dict[str, list[str]] = {}
    for name, values in rows:
        found.setdefault(name, []).extend(values.split())
    return found


def test_a_run_is_shown(easerve: Easerve, scenario: Path) -> None:
    ended = easerve("simulate", scenario)
    rows = cells(ended)
    assert rows["completed"] == ["20"]
    assert rows["failed or refused"] == ["0"]
    assert rows["attainment S5, %"] == ["100"]
    for name in ("mean, s", "P50, s", "P99, s"):
        assert float(rows[f"TTFT {name}"][0]) > 0
        assert float(rows[f"TPOT {name}".replace(", s", ", ms")][0]) > 0
    assert 0 < float(rows["throughput, /s"][0]) < float(rows["bound, /s"][0])
    assert {f"{stage} busy, %" for stage in ("encode", "prefill", "decode")} <= rows.keys()
    assert "goodput own, /s" in rows
    assert "S5 40 s and 208 ms; own 2 s and 80 ms." in ended.out
    assert "Too few requests to trust: tpot_s.p99, ttft_s.p99." in ended.out
    assert "small, 2 requests/s" in ended.out


def test_json_has_the_keys_that_scripts_rely_on(easerve: Easerve, scenario: Path) -> None:
    ended = easerve("simulate", scenario, "--json")
    assert (ended.code, ended.err) == (0, "")
    result = json.loads(ended.out)
    assert result.keys() >= KEYS
    assert (result["num_requests"], result["completed"]) == (20, 20)
    assert result["goodput_per_s"].keys() == {*TIERS, "own"}
    assert result["utilisation"].keys() == {"encode", "prefill", "decode"}
    assert all(0 < share <= 1 for share in result["utilisation"].values())
    assert result["ttft_s"].keys() == {"mean", "p50", "p90", "p99"}
    assert (result["system"], result["rate_per_s"], result["seed"]) == ("easerve", 2, 1)


def test_the_same_seed_is_the_same_run(easerve: Easerve, scenario: Path) -> None:
    first, again, other = (
        json.loads(easerve("simulate", scenario, "--json", "--seed", seed).out)
        for seed in ("4", "4", "5")
    )
    del first["wall_s"], again["wall_s"]
    assert first == again
    assert first["ttft_s"] != other["ttft_s"]


def test_rates_and_seeds_make_tables_and_medians(easerve: Easerve, scenario: Path) -> None:
    asked = ("simulate", scenario, "--rate", "1,4", "--seeds", "1,2,3")
    runs = json.loads(easerve(*asked, "--json").out)["runs"]
    assert [(run["rate_per_s"], run["seed"]) for run in runs] == [
        (rate, seed) for rate in (1, 4) for seed in (1, 2, 3)
    ]
    ended = easerve(*asked)
    shown = cells(ended)["TTFT mean, s"]
    means = [run["ttft_s"]["mean"] for run in runs]
    expected = [sorted(means[:3])[1], sorted(means[3:])[1]]
    assert [float(each) for each in shown] == pytest.approx(expected, rel=1e-3)
    assert "Each figure is the median of 3 seeds." in ended.out
    assert "small, 1 requests/s" in ended.out
    assert "small, 4 requests/s" in ended.out


def test_a_variant_and_changes_are_laid_on_the_scenario(easerve: Easerve, scenario: Path) -> None:
    asked = ("simulate", scenario, "--json", "--set", "workload.num_requests=12")
    plain, varied = (json.loads(easerve(*asked, *over).out) for over in ((), ("--variant", "gap")))
    assert plain["num_requests"] == varied["num_requests"] == 12
    assert varied["ttft_s"]["mean"] > plain["ttft_s"]["mean"]


def test_a_trace_and_a_report_are_written(easerve: Easerve, scenario: Path, tmp_path: Path) -> None:
    trace, html = tmp_path / "trace.json", tmp_path / "report.html"
    ended = easerve("simulate", scenario, "--trace", trace, "--html", html)
    assert ended.out.endswith(f"trace, for https://ui.perfetto.dev: {trace}\nreport: {html}\n")
    phases = {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert phases == {"M", "X", "b", "e", "n", "C"}
    page = html.read_text()
    for title in ("TTFT: share of requests", "easerve: engines busy", "small, 2 requests/s"):
        assert title in page


def test_a_request_that_is_too_long_fails_alone(easerve: Easerve, scenario: Path) -> None:
    over = "workload.text_tokens=[1, 300000]"
    result = json.loads(easerve("simulate", scenario, "--json", "--set", over).out)
    assert result["failed"] > 0
    assert result["completed"] == 20 - result["failed"] > 0


@pytest.mark.parametrize("where", ["deficit", "bernoulli"])
def test_what_the_core_decides_is_written_and_decided_again(
    easerve: Easerve, scenario: Path, tmp_path: Path, where: str
) -> None:
    path = tmp_path / "decisions"
    over = ("--set", f"systems.easerve.policy.where={where}")
    ended = easerve("simulate", scenario, "--decision-log", path, *over)
    assert ended.out.endswith(f"decisions, for easerve replay: {path}\n")
    replayed = json.loads(easerve("replay", path, "--json").out)
    assert replayed["same"]
    assert replayed["batches"]
    path.write_text(path.read_text().replace('"remote_share":0.5', '"remote_share":0.9'))
    assert not json.loads(easerve("replay", path, "--json").out)["same"]


def test_only_our_core_has_decisions_to_write(easerve: Easerve, tmp_path: Path) -> None:
    path = write(tmp_path / "scenario.yaml", systems={"vllm": {}})
    ended = easerve("simulate", path, "--system", "vllm", "--decision-log", tmp_path / "log")
    assert ended.code == 2
    assert "--decision-log: system vllm has no core; ask for easerve" in ended.err


def test_all_are_the_systems_of_the_scenario(easerve: Easerve, scenario: Path) -> None:
    assert json.loads(easerve("simulate", scenario, "--json", "--system", "all").out).keys() >= KEYS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", "vllm"], "--system: 'vllm' is none of easerve"),
        (["--rate", "0"], "--rate: 0 is not from 0.001 to 1e+06"),
        (["--rate", "fast"], "--rate: 'fast' is not a list of numbers"),
        (["--seed", "1.5"], "--seeds: 1.5 is not a whole number"),
        (["--variant", "x"], ": experiment has no variant 'x'; there are: gap"),
        (["--set", "x"], "--set 'x' is not like workload.num_requests=100"),
        (["--set", "system.x=1"], "system: Input should be a valid string"),
        (["--seeds", "1,2", "--trace", "t"], "--trace is of one run: name one system, one rate"),
        (["--trace", "no/t"], "no/t: No such file or directory"),
        (["--html", "no/t"], "no/t: No such file or directory"),
        (
            ["--set", "systems.easerve.prefill.tensor_parallel_size=1"],
            "scenario.yaml: systems.easerve: tensor_parallel_size 1: an engine needs 70",
        ),
        (
            ["--set", "systems.easerve.policy.encode_units=1000"],
            "scenario.yaml: systems.easerve.policy.encode_units 1000: it can be 1 to 140 of 142",
        ),
        (["--seeds", "1,2", "--decision-log", "t"], "--decision-log is of one run: name one"),
        (["--decision-log", "no/t"], "no/t: No such file or directory"),
    ],
)
def test_what_cannot_be_simulated_is_said(
    easerve: Easerve, scenario: Path, words: list[str], message: str
) -> None:
    ended = easerve("simulate", scenario, *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("easerve: ")
    assert message in ended.err


def test_a_trace_of_arrivals_has_its_own_rate(easerve: Easerve, tmp_path: Path) -> None:
    (tmp_path / "times").write_text("1\n2\n2.5\n")
    load = {"arrivals": "trace", "trace": "times", "rate_per_s": None, "num_requests": 3}
    path = write(tmp_path / "scenario.yaml", workload=load)
    assert "small, trace" in easerve("simulate", path).out
    ended = easerve("simulate", path, "--rate", "2")
    assert ended.code == 2
    assert "--rate: the arrivals of this scenario are a trace" in ended.err


def test_the_bench_times_the_simulator(easerve: Easerve, scenario: Path) -> None:
    asked = ("bench", "simulate", scenario, "--requests", "40", "--rounds", "1")
    ended = easerve(*asked)
    assert (ended.code, ended.err) == (0, "")
    assert "times real time" in ended.out
    result = json.loads(easerve(*asked, "--json").out)
    for row, num in ((result["systems"]["easerve"], 20), (result["many"], 40)):
        assert row["num_requests"] == num
        assert row["times_real_time"] == pytest.approx(row["simulated_s"] / row["wall_s"])
    speed, many = result["targets"]
    assert (many["measured"], many["met"]) == (result["many"]["wall_s"], None)
    assert speed["measured"] == result["systems"]["easerve"]["times_real_time"]
    assert speed["met"] is (speed["measured"] >= 1000)
    assert "easerve on 8 GPUs: at least 1,000 times real time" in ended.out
    assert "10,000 requests: computed in less than 10 s" in ended.out


def test_the_bench_knows_the_repositorys_scenario() -> None:
    from easerve.cli.bench.simulate import DEFAULT_SCENARIO

    assert scenarios.read(DEFAULT_SCENARIO).num_gpus == 8
