import json
import re
from pathlib import Path

import pytest

from easerve.config import Policy
from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.core import Limits
from easerve.serve.admin import knobs_of
from easerve.serve.decisions import DecisionLog, Header
from easerve.types import MediaItem, Modality, RequestId, Shape, Stage, WorkerId

from .conftest import Easerve

HEADER = Header(knobs_of(Policy()), Admission(8, 1 << 20), Limits(), LinearCosts())
R = RequestId("r")
PREPARE = '{"action":"Prepare","request_id":"r"}'


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Three engines, and a picture's way into an encoder."""
    path, core = tmp_path / "log", HEADER.make_core()
    writer = DecisionLog(path, HEADER)
    item = MediaItem("key", Modality.IMAGE, 30)
    steps: list[list[ev.Event]] = [
        [ev.WorkerJoined(WorkerId(stage), stage) for stage in Stage],
        [ev.RequestReceived(R, 1, (Modality.IMAGE,))],
        [ev.Prepared(R, Shape(100, 20, (item,)))],
        [],
    ]
    for number, events in enumerate(steps):
        writer.step(number, events, core.step(events, number))
    writer.close()
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_the_same_actions_are_said_to_be_the_same(easerve: Easerve, log: Path) -> None:
    ended = easerve("replay", log)
    assert (ended.code, ended.err) == (0, "")
    assert "4 steps, 5 events, 3 actions, 1 encode batches\n" in ended.out
    assert ended.out.endswith("The core decides the same actions.\n")


def test_batches_are_shown_by_reason(easerve: Easerve, log: Path) -> None:
    decision = '"reason":"[idle]","wait_s":0.25'
    log.write_text(re.sub(r'"reason":"[^"]+","wait_s":[0-9.]+', decision, log.read_text()))
    ended = easerve("replay", log)
    assert ended.code == 1
    assert re.search(r"\[idle\]\W+1\W+1\.00\W+250\.0\W", ended.out)
    assert re.search(r'expected: StartEncode\(.*items=…, decision={"reason": "\[idle\]"', ended.out)
    assert json.loads(easerve("replay", log, "--json").out)["batches"] == {
        "[idle]": {"count": 1, "mean_items": 1.0, "mean_wait_s": 0.25}
    }


@pytest.mark.parametrize(
    ("logged", "expected", "got"),
    [
        (
            PREPARE.replace('"r"', '"s"'),
            'Prepare(request_id="s")',
            'Prepare(request_id="r")',
        ),
        ("", "no further action", 'Prepare(request_id="r")'),
        (f"{PREPARE},{PREPARE}", 'Prepare(request_id="r")', "no further action"),
    ],
)
def test_the_first_difference_is_shown(
    easerve: Easerve, log: Path, logged: str, expected: str, got: str
) -> None:
    edit(log, PREPARE, logged)
    ended = easerve("replay", log)
    assert (ended.code, ended.err) == (1, "")
    assert "The core decides otherwise (line 3, step 2, at 1 ns):\n" in ended.out
    assert f"  expected: {expected}\n  got:      {got}\n" in ended.out
    assert "written by" not in ended.out


def test_a_core_that_fails_is_shown(easerve: Easerve, log: Path) -> None:
    step = log.read_text().splitlines(keepends=True)[2]
    edit(log, step, step * 2)
    ended = easerve("replay", log)
    assert ended.code == 1
    assert "The core fails (line 4, step 3, at 1 ns):\n  ValueError: " in ended.out


def test_another_version_explains_a_difference(easerve: Easerve, log: Path) -> None:
    edit(log, '"easerve":"', '"easerve":"9.')
    assert "written by" not in easerve("replay", log).out
    edit(log, PREPARE, "")
    assert "The log was written by easerve 9." in easerve("replay", log).out


def test_as_json(easerve: Easerve, log: Path) -> None:
    ended = easerve("replay", log, "--json")
    assert ended.code == 0
    report = json.loads(ended.out)
    batches = report.pop("batches")
    assert [set(each) for each in batches.values()] == [{"count", "mean_items", "mean_wait_s"}]
    assert report == {
        "same": True,
        "num_steps": 4,
        "num_events": 5,
        "num_actions": 3,
        "truncated": False,
        "difference": None,
    }


def test_a_difference_as_json(easerve: Easerve, log: Path) -> None:
    edit(log, PREPARE, "")
    ended = easerve("replay", log, "--json")
    assert ended.code == 1
    report = json.loads(ended.out)
    assert (report["same"], report["num_steps"], report["num_actions"]) == (False, 4, 2)
    assert report["difference"] == {
        "step": 2,
        "line": 3,
        "now_ns": 1,
        "expected": [],
        "got": [json.loads(PREPARE)],
    }


def test_a_line_that_is_cut_off_is_told(easerve: Easerve, log: Path) -> None:
    log.write_bytes(log.read_bytes()[:-1])
    ended = easerve("replay", log)
    assert (ended.code, "cut off" in ended.out) == (0, True)
    assert json.loads(easerve("replay", log, "--json").out)["truncated"] is True


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format":4', '"format":0', "log:1: not the header"),
        ('"event":"RequestReceived"', '"event":"Rain"', "log:3: unknown event 'Rain'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    easerve: Easerve, log: Path, old: str, new: str, message: str
) -> None:
    edit(log, old, new)
    ended = easerve("replay", log)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("easerve: ")
    assert message in ended.err


def test_a_file_that_is_not_there_is_named(easerve: Easerve, tmp_path: Path) -> None:
    ended = easerve("replay", tmp_path / "nosuch", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"easerve: {tmp_path}/nosuch: No such file or directory\n"
