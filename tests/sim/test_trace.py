import io
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from easerve.sim import trace
from easerve.sim.run import Request, Run
from easerve.sim.scenario import read
from easerve.sim.simulate import simulate
from easerve.types import Stage

from .scenarios import write

US = 1000


def events_of(run: Run) -> list[dict[str, Any]]:
    file = io.StringIO()
    num = trace.write(run, file)
    content = json.loads(file.getvalue())
    assert content["displayTimeUnit"] == "ms"
    assert len(content["traceEvents"]) == num
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


def names_of(events: list[dict[str, Any]], kind: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == kind
    }


def check(events: list[dict[str, Any]]) -> None:
    """What the format asks for, and what viewers need to show everything."""
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        assert event["ph"] in ("M", "X", "b", "e", "n", "C")
        assert event["ph"] == "M" or event["ts"] >= 0
    threads = names_of(events, "thread_name")
    last_us: dict[tuple[int, int], float] = defaultdict(float)
    for event in (event for event in events if event["ph"] == "X"):
        thread = (event["pid"], event["tid"])
        assert thread in threads
        assert event["ts"] >= last_us[thread] - 1e-6, "slices of a thread do not overlap"
        last_us[thread] = event["ts"] + event["dur"]
    check_rows(events)


def check_rows(events: list[dict[str, Any]]) -> None:
    """Of each request, slices begin and end as brackets do."""
    open_slices: dict[str, list[str]] = defaultdict(list)
    for event in (event for event in events if event["ph"] in "be"):
        if event["ph"] == "b":
            open_slices[event["id"]].append(event["name"])
        else:
            assert open_slices[event["id"]].pop() == event["name"]
    assert not any(open_slices.values())


@pytest.fixture
def run() -> Run:
    """An encoder that works beside its transfers, and two requests, one of which was refused."""
    run = Run(traced=True)
    run.engine("e0", Stage.ENCODE)
    run.engine("d0", Stage.DECODE)
    run.busy("e0", "encode", 1000 * US, 3000 * US, items=2)
    run.note("e0", "transfer", 3000 * US, 5000 * US, to="p0")
    run.note("e0", "transfer", 4000 * US, 6000 * US, to="p1")
    run.note("e0", "transfer", 5000 * US, 6000 * US, to="p2")
    run.busy("d0", "decode", 2500 * US, 4500 * US)
    request = Request(0.001, (), 10, 4)
    run.record("r0", request, 3_000 * US, 4_500 * US, "completed")
    run.record("r1", request, None, 2_000 * US, "rejected")
    return run


def test_a_thread_is_an_engine_and_what_overlaps_gets_threads_of_its_own(run: Run) -> None:
    events = events_of(run)
    check(events)
    slices = [event for event in events if event["ph"] == "X"]
    threads = names_of(events, "thread_name")
    processes = {pid: name for (pid, _), name in names_of(events, "process_name").items()}
    assert [
        (processes[each["pid"]], threads[each["pid"], each["tid"]], each["ts"], each["dur"])
        for each in slices
    ] == [
        ("encode", "e0", 1000, 2000),
        ("decode", "d0", 2500, 2000),
        ("encode", "e0 transfer", 3000, 2000),
        ("encode", "e0 transfer 2", 4000, 2000),
        ("encode", "e0 transfer", 5000, 1000),
    ]
    assert slices[0]["args"] == {"items": 2}
    assert set(processes.values()) == {"requests", "encode", "decode"}


def test_a_request_has_a_row(run: Run) -> None:
    rows = [event for event in events_of(run) if event["ph"] in "be"]
    assert [(event["ph"], event["name"], event["ts"]) for event in rows if event["id"] == "r0"] == [
        ("b", "request r0", 1000),
        ("b", "to first token", 1000),
        ("e", "to first token", 3000),
        ("b", "answer", 3000),
        ("e", "answer", 4500),
        ("e", "request r0", 4500),
    ]
    refused = [event for event in rows if event["id"] == "r1"]
    assert [event["name"] for event in refused if event["ph"] == "b"] == [
        "request r1",
        "to first token",
    ]
    assert refused[0]["args"] == {"outcome": "rejected", "output_tokens": 0}


def test_requests_are_counted_by_what_they_wait_for(run: Run) -> None:
    counters = [event for event in events_of(run) if event["ph"] == "C"]
    assert [(event["ts"], *event["args"].values()) for event in counters] == [
        (1000, 2, 0),
        (2000, 1, 0),
        (3000, 0, 1),
        (4500, 0, 0),
    ]


def test_a_run_of_ours_says_where_each_request_went_and_why(tmp_path: Path) -> None:
    scenario = read(write(tmp_path / "scenario.yaml"))
    run = simulate(scenario, "easerve", traced=True)
    events = events_of(run)
    check(events)
    requests = {event["id"] for event in events if event["ph"] == "b"}
    assert len(requests) == scenario.workload.num_requests
    for what in ("encode on e", "prefill on "):
        marks = [event for event in events if event["ph"] == "n" and what in event["name"]]
        assert {event["id"] for event in marks} == requests
        assert all(event["args"]["reason"] for event in marks)
    slices = {event["name"] for event in events if event["ph"] == "X"}
    assert slices >= {"encode", "prefill", "decode", "transfer", "preprocess"}


def test_a_run_that_was_not_traced_has_rows_alone(tmp_path: Path) -> None:
    run = simulate(read(write(tmp_path / "scenario.yaml")), "easerve")
    assert {event["ph"] for event in events_of(run)} == {"M", "b", "e", "n", "C"}
