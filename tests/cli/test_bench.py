"""``easerve bench``: what is asked wrongly, and what becomes of measured values."""

from pathlib import Path
from typing import Any

import pytest

from easerve.bench.report import Table, html
from easerve.cli.bench import shown
from easerve.cli.bench.encode import PARTS, Plan, Result, medians, ratios
from easerve.cli.bench.recorder import Recorder
from easerve.config import Policy
from easerve.policy import events as ev
from easerve.types import NS_PER_S, BatchId, MediaItem, Modality, RequestId, Shape, WorkerId

from .conftest import Easerve

SPREAD = {"mean": 0.05, "p50": 0.04, "p99": 0.2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parts", "stage,nosuch"), "--parts: 'nosuch' is none of stage, call, server"),
        (("--rules", "none,greedier"), "--rules: 'greedier' is none of none, greedy"),
        (("--rates", "5,x"), "--rates: '5,x' is not a list of numbers"),
        (("--rates", "0"), "--rates: 0 is not from"),
        (("--rates", "nan"), "--rates: nan is not from"),
        (("--windows-ms", "2000"), "--windows-ms: 2000 is not from 0 to 1000"),
        (("nosuch.yaml",), "nosuch.yaml: No such file"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    easerve: Easerve, options: tuple[str, ...], message: str
) -> None:
    ended = easerve("bench", "encode", *options)
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.parametrize("command", ["encode", "flow"])
def test_a_report_that_cannot_be_written_is_said_before_anything_starts(
    easerve: Easerve, tmp_path: Path, command: str
) -> None:
    ended = easerve("bench", command, "--html", tmp_path / "no/such.html")
    assert (ended.code, ended.out) == (2, "")
    assert "such.html: No such file or directory" in ended.err


def test_the_commands_are_known_by_their_names(easerve: Easerve) -> None:
    assert all(name in easerve("bench", "--help").out for name in ("encode", "flow"))


# Values -------------------------------------------------------------------------------------------


def test_medians_are_taken_value_by_value() -> None:
    rows = [{"a": a, "b": {"c": a}, "d": None if a == 3 else 1.0} for a in (3, 1, 9)]
    assert medians(rows) == {"a": 3, "b": {"c": 3}, "d": None}


def load_row(**values: Any) -> Result:
    row = {
        "cpu_s": 0.04,
        "items_per_s": 9.0,
        "batch_mean": 2.0,
        "encode_wait_s": SPREAD,
        "ttft_s": SPREAD,
        "tpot_s": {"mean": None, "p50": None, "p99": None},
        "busy_share": 0.5,
        "throughput_per_s": 10.0,
        "not_completed": 0,
    }
    return row | values


def stage_row(items_per_s: float, cpu_s: float) -> Result:
    return {"items_per_s": items_per_s, "cpu_s": cpu_s, "batch_mean": 1.0, "busy_share": 0.9}


RESULT: Result = {
    "stage": {"none": stage_row(100, 0.010), "slack": stage_row(300, 0.002)},
    "call": {"num_items": 16, "direct_s": 0.03, "stage_s": 0.033, "ratio": 1.1},
    "server": {"none": load_row(), "slack": load_row(throughput_per_s=12.0)},
    "low": {
        "none": load_row(),
        "slack": load_row(ttft_s={**SPREAD, "mean": 0.051}),
    },
    "rates": {"none": {"5": load_row(), "9": load_row(batch_mean=3.0)}},
    "windows": {"0": load_row(), "0.05": load_row()},
}


def test_the_servers_ratio_is_explained_by_what_the_stage_saves() -> None:
    found = ratios(RESULT, "slack")
    assert found["encode_stage_ratio"] == 3
    assert found["one_call_ratio"] == 1.1
    assert found["server_ratio"] == pytest.approx(1.2)
    assert found["server_ratio_expected"] == pytest.approx(0.04 / (0.04 - 0.008))
    assert found["low_load_ttft_ratio"] == pytest.approx(1.02)
    assert found["systems"]["none"]["batch_mean"] == 3  # at the highest rate
    assert list(found["systems"]["none"]["by_rate"]) == ["5", "9"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_shown_alone_as_well(part: str) -> None:
    result = {part: RESULT[part]}
    (section,) = shown.of_encode(result | ratios(result, "slack"))
    assert any(isinstance(each, Table) for each in section.parts)


def test_everything_goes_onto_a_page() -> None:
    page = html("bench", shown.of_encode(RESULT | ratios(RESULT, "slack")))
    assert all(text in page for text in ("Batched, the stage encodes 3.00", "50.0 / 200"))


def test_engines_that_run_and_modelled_ones_are_in_one_table() -> None:
    part = {"tpot_alone_s": 0.01, "tpot_promise_s": 0.03, "systems": {"credits": load_row()}}
    (section,) = shown.of_flow({"engines": part, "modelled": part})
    (table,) = section.parts
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["credits (engines)", "credits (modelled)"]
    assert "promise 30.0 ms" in section.text


def test_a_plan_counts_its_runs() -> None:
    plan = Plan(Policy(), PARTS, ["none", "slack"], [5, 9], [0, 0.1, 1], 5, 9, 1, 1, 1, 1, 3, 0)
    assert plan.num_runs == 6 + 6 + 7 + 6 + 4 + 3
    assert [rule for rule, _ in plan.pair()] == ["none", "slack"]


# What is recorded ---------------------------------------------------------------------------------


def prepared(name: str) -> ev.Prepared:
    item = MediaItem(name, Modality.IMAGE, 25)
    return ev.Prepared(RequestId(name), Shape(10, 1, (item,)))


def started(number: int, *names: str) -> ev.StartEncode:
    items = tuple(
        ev.EncodeItem(
            MediaItem(name, Modality.IMAGE, 25),
            (ev.Waiter(RequestId(name), 0, WorkerId("p0")),),
        )
        for name in names
    )
    decision = ev.Decision("full", 0.0, 0.0, "", 0, 0.0, 1.0)
    return ev.StartEncode(BatchId(number), WorkerId("e0"), items, decision)


def test_waits_calls_and_busy_time_are_recorded() -> None:
    recorder = Recorder()
    recorder.reset(0)
    recorder.step(1 * NS_PER_S, [prepared("a")], [])
    recorder.step(2 * NS_PER_S, [prepared("b")], [started(1, "a", "b")])
    recorder.step(3 * NS_PER_S, [], [started(2, "c")])  # of another run: it was prepared before
    recorder.step(5 * NS_PER_S, [ev.EncodeFinished(BatchId(1))], [])
    recorder.step(6 * NS_PER_S, [ev.EncodeFailed(BatchId(2), retryable=True)], [])
    recorder.step(7 * NS_PER_S, [ev.EncodeFinished(BatchId(9))], [])
    run = recorder.run(8 * NS_PER_S, num_encoders=1)
    assert run.waits_s == [1, 0] or run.waits_s == [0, 1]
    assert run.calls_s == [3, 3]
    assert run.batch_mean == 1.5
    assert run.busy_share == pytest.approx(4 / 8)
    assert run.duration_s == 8
    assert run.reasons() == {"full": 2}
    assert run.wait.mean == 0.5


def test_a_reset_forgets() -> None:
    recorder = Recorder()
    recorder.step(1, [prepared("a")], [started(1, "a")])
    recorder.reset(5 * NS_PER_S)
    run = recorder.run(6 * NS_PER_S, num_encoders=2)
    assert (run.batches, run.waits_s, run.batch_mean, run.busy_share) == ([], [], None, 0)
