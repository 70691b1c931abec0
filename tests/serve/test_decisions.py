import dataclasses
import errno
import io
import json
import math
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, NewType, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.config import ConfigError, Policy
from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.batching import RULES
from easerve.policy.core import Core, Limits
from easerve.policy.knobs import Knobs
from easerve.policy.partition import RULES as DIVISION_RULES
from easerve.policy.partition import Devices, Surface
from easerve.policy.share import RULES as SHARE_RULES
from easerve.serve import decisions
from easerve.serve.admin import knobs_of
from easerve.serve.decisions import (
    FORMAT,
    DecisionLog,
    DecisionLogError,
    Header,
    Step,
    read,
    replay,
)
from easerve.types import NS_PER_S, BatchId, MediaItem, Modality, RequestId, Shape, Stage, WorkerId

KNOBS = knobs_of(Policy())
HEADER = Header(KNOBS, Admission(8, 1 << 20), Limits(), LinearCosts())
R, E0, P0 = RequestId("r"), WorkerId("e0"), WorkerId("p0")
KINDS = [*get_args(ev.Event), *get_args(ev.Action)]
Told = tuple[int, Sequence[ev.Event], Sequence[ev.Action]]


def decision(reason: str = "full", wait_s: float = 0.5) -> ev.Decision:
    return ev.Decision(reason, wait_s, 0.0, "", 0, 1.0, 1.0)


def start_encode(number: int, num_items: int, reason: str, wait_s: float) -> ev.StartEncode:
    item = ev.EncodeItem(MediaItem("k", Modality.IMAGE, 30), (ev.Waiter(R, 0, P0),))
    return ev.StartEncode(BatchId(number), E0, (item,) * num_items, decision(reason, wait_s))


def received(now_ns: int, name: str) -> Told:
    """A step that any core answers alike: it is asked, it prepares."""
    request_id = RequestId(name)
    return now_ns, [ev.RequestReceived(request_id, 1)], [ev.Prepare(request_id)]


STEPS: list[Told] = [received(5, "a"), (7, [], []), received(8, "b"), (9, [ev.Draining()], [])]


def write(path: Path, steps: Iterable[Told] = STEPS, header: Header = HEADER) -> Path:
    log = DecisionLog(path, header)
    for step in steps:
        log.step(*step)
    log.close()
    return path


def told(steps: Iterable[Step]) -> list[Told]:
    return [(step.now_ns, list(step.events), list(step.actions)) for step in steps]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


class Preparing:
    """A core that prepares whatever it receives."""

    def __init__(self, *parts: object) -> None:
        assert parts == (HEADER.knobs, HEADER.admission, HEADER.costs, HEADER.limits, None)

    def step(self, events: Iterable[ev.Event], now_ns: int) -> list[ev.Action]:
        asked = [event for event in events if isinstance(event, ev.RequestReceived)]
        return [ev.Prepare(event.request_id) for event in asked]


@pytest.fixture
def preparing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "Core", Preparing)


# What is written, and read again ------------------------------------------------------------------


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that events and actions are made of; numbers as far as JSON has them."""
    if isinstance(hint, NewType):
        return values(hint.__supertype__)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        fields = {each.name: values(hints[each.name]) for each in dataclasses.fields(hint)}
        return st.builds(hint, **fields)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        if kinds[-1] is Ellipsis:
            return st.lists(values(kinds[0]), max_size=3).map(tuple)
        return st.tuples(*map(values, kinds))
    if isinstance(hint, UnionType):
        return st.one_of([values(each) for each in get_args(hint)])
    return st.integers(-(1 << 63), (1 << 63) - 1) if hint is int else st.from_type(hint)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(deadline=None, derandomize=True, max_examples=30)
@given(data=st.data())
def test_every_event_and_action_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, kind: type, data: st.DataObject
) -> None:
    some = data.draw(st.lists(values(kind), min_size=1, max_size=3))
    step = (1, some, []) if kind in get_args(ev.Event) else (1, [], some)
    path = write(tmp_path_factory.mktemp("log") / "log", [step])
    assert repr(told(read(path))) == repr([step])  # nan is not equal to itself


@settings(deadline=None, derandomize=True, max_examples=50)
@given(header=values(Header).map(lambda header: dataclasses.replace(header, format=FORMAT)))
def test_a_header_is_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, header: Header
) -> None:
    path = write(tmp_path_factory.mktemp("log") / "log", [], header)
    assert repr(read(path).header) == repr(header)


def test_a_log_is_lines_of_json_and_a_step_without_news_a_short_one(path: Path) -> None:
    header, *steps = write(path).read_bytes().splitlines()
    assert msgspec.json.decode(header)["knobs"]["order"] == "fifo"
    assert list(msgspec.json.decode(header)) == [
        *("kind", "easerve", "format", "knobs", "admission", "limits", "costs", "devices")
    ]
    assert steps[1] == b'{"kind":"step","now_ns":7}'
    assert msgspec.json.decode(steps[3]) == {
        "kind": "step",
        "now_ns": 9,
        "events": [{"event": "Draining"}],
    }
    assert msgspec.json.decode(steps[0])["actions"] == [{"action": "Prepare", "request_id": "a"}]


def test_steps_know_their_lines(path: Path) -> None:
    reading = read(write(path))
    assert [step.line for step in reading] == [2, 3, 4, 5]
    assert told(read(path)) == STEPS
    assert not reading.truncated


# When it is written, and where --------------------------------------------------------------------


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def test_steps_are_on_disk_after_a_second_and_at_the_end(path: Path) -> None:
    log = DecisionLog(path, HEADER)
    assert num_lines(path) == 1
    log.step(NS_PER_S, [], [])
    assert num_lines(path) == 2
    log.step(2 * NS_PER_S - 1, [], [])
    assert num_lines(path) == 2
    log.step(2 * NS_PER_S, [], [])
    assert num_lines(path) == 4
    log.step(2 * NS_PER_S + 1, [], [])
    log.close()
    log.close()
    log.step(9 * NS_PER_S, [], [])
    assert num_lines(path) == 5


def test_what_was_gathered_is_written_while_no_steps_come(path: Path) -> None:
    log = DecisionLog(path, HEADER)
    log.step(NS_PER_S, [], [])
    log.step(NS_PER_S + 1, [], [])
    assert num_lines(path) == 2
    log.flush()
    assert num_lines(path) == 3
    log.close()
    log.flush()  # harmless


def test_many_steps_are_not_kept_in_memory_for_a_second(path: Path) -> None:
    log = DecisionLog(path, HEADER)
    for _ in range(10_000):
        log.step(1, [], [])
    size = path.stat().st_size
    log.close()
    assert path.stat().st_size - size <= decisions.BUFFER_BYTES


@pytest.mark.parametrize("exists", [False, True])
def test_only_its_owner_reads_a_log(path: Path, exists: bool) -> None:
    if exists:
        path.touch(0o644)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_log_before_this_one_is_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = path.with_name("decisions.jsonl.1")
    for number in range(3):
        write(path, [received(number, "a")])
        assert [step.now_ns for step in read(path)] == [number]
        assert older.exists() is bool(number)
    assert [step.now_ns for step in read(older)] == [1]
    assert len(caplog.messages) == 2
    assert str(path) in caplog.messages[0]
    assert str(older) in caplog.messages[0]


def test_servers_that_do_not_come_up_push_no_log_out(path: Path) -> None:
    write(path)
    for _ in range(3):
        write(path, [])
    assert told(read(path.with_name("decisions.jsonl.1"))) == STEPS


def cannot_log(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        DecisionLog(path, HEADER)
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_log_that_another_server_writes_is_left_alone(path: Path) -> None:
    log = DecisionLog(path, HEADER)
    for num_steps in range(2):
        assert "another server" in cannot_log(path)
        log.step(num_steps, [], [])
    log.close()
    assert len(list(read(path))) == 2
    write(path)


@pytest.mark.parametrize("content", [b"model: x\n", b"{}", b'{"kind":"header"}\n', b"\0"])
def test_a_file_that_is_no_log_is_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o640)
    assert "not a decision log" in cannot_log(path)
    assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_a_path_that_cannot_be_written_is_an_error_at_the_start(path: Path) -> None:
    assert "No such file" in cannot_log(path / "log")
    path.mkdir()
    assert "Is a directory" in cannot_log(path)
    assert path.is_dir()
    os.mkfifo(path / "fifo")
    cannot_log(path / "fifo")
    cannot_log(Path("/dev/null"))
    cannot_log(Path("/dev/full"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(path: Path) -> None:
    path.mkdir(0o500)
    assert "Permission denied" in cannot_log(path / "log")


class FullDisk(io.RawIOBase):
    """Takes ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, b""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        taken = bytes(content)[: self.room - len(self.taken)]
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.taken += taken
        return len(taken)


@pytest.mark.parametrize("room", [0, 50])
def test_a_full_disk_ends_the_log_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    log = DecisionLog(path, HEADER)
    disk = FullDisk(room)
    assert log._file is not None
    log._file.close()
    monkeypatch.setattr(log, "_file", io.BufferedWriter(disk))
    for number in range(5):
        log.step(number * NS_PER_S, [], [])
    log.close()
    assert disk.closed
    assert len(disk.taken) == room
    assert len(caplog.records) == 1
    assert f"{path}: [Errno 28] No space left" in caplog.messages[0]


def test_a_disk_that_is_full_at_the_end_is_reported_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLog(path, HEADER)
    assert log._file is not None
    log._file.close()
    monkeypatch.setattr(log, "_file", io.BufferedWriter(FullDisk(0)))
    log.step(0, [], [])
    assert caplog.messages == []
    log.close()
    assert "No space left" in caplog.messages[0]


def test_a_disk_that_is_full_at_the_start_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(0)
    monkeypatch.setattr(decisions, "_open", lambda _: io.BufferedWriter(disk))
    assert "No space left" in cannot_log(path)
    assert disk.closed


def test_what_cannot_be_written_down_ends_the_log_and_nothing_else(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = DecisionLog(path, HEADER)
    log.step(1, [], [])
    log.step(2, [ev.WorkerLost(WorkerId("\ud800"))], [])
    log.step(3, [], [])
    log.close()
    assert [step.now_ns for step in read(path)] == [1]
    assert str(path) in caplog.text


# What is not a log --------------------------------------------------------------------------------


def test_a_log_of_a_server_that_was_killed_is_read_up_to_its_last_whole_line(path: Path) -> None:
    content = write(path).read_bytes()
    begin = content.index(b"\n") + 1
    for size in range(begin, len(content)):
        path.write_bytes(content[:size])
        reading = read(path)
        assert told(reading) == STEPS[: content[begin:size].count(b"\n")]
        assert reading.truncated is not content[:size].endswith(b"\n")


STEP = '{"kind":"step","now_ns":1'
WHIMSICAL = json.dumps(dataclasses.asdict(KNOBS) | {"whim": 1})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("\0", "malformed"),
        ("[]", "unknown kind None"),
        ('{"kind":"header"}', "unknown kind 'header'"),
        ('{"kind":["step"]}', "unknown kind ['step']"),
        ('{"kind":"step"}', "now_ns"),
        (STEP + ',"took_ns":1}', "unknown field 'took_ns'"),
        (STEP + ',"events":{}}', "array"),
        (STEP + ',"events":[1]}', "object"),
        (STEP + ',"events":[{"event":"Prepare","request_id":"r"}]}', "unknown event 'Prepare'"),
        (STEP + ',"actions":[{"action":"Boil"}]}', "unknown action 'Boil': written by another"),
        (STEP + ',"events":[{"event":"WorkerLost"}]}', "worker_id"),
        (
            STEP + ',"events":[{"event":"Draining","since":1}]}',
            "unknown field 'since' of Draining: written by another version",
        ),
        (
            STEP + f',"events":[{{"event":"KnobsChanged","knobs":{WHIMSICAL}}}]}}',
            "unknown field 'whim' of KnobsChanged",
        ),
        (
            STEP + ',"events":[{"event":"Prepared","request_id":"r","shape":{"num_prompt_tokens":1,'
            '"max_new_tokens":1,"items":[{"key":"k","modality":"image","num_tokens":1,"hue":2}]}}]}',
            "unknown field 'hue' of Prepared",
        ),
        (STEP + ',"events":[{"event":"WorkerJoined","worker_id":"w","stage":"x"}]}', "'x'"),
    ],
)
def test_a_line_that_is_not_understood_is_named(path: Path, line: str, message: str) -> None:
    lines = write(path).read_text().splitlines()
    path.write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    reading = read(path)
    with pytest.raises(DecisionLogError) as error:
        list(reading)
    assert str(error.value).startswith(f"{path}:4: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"format":4', b'"format":2', "not the header of a decision log of format 4"),
        (b'"limits":{', b'"limits":{"max_luck":1,', "unknown field 'max_luck' of header: "),
        (b'"kind":"header"', b'"kind":"step"', "unknown kind 'step'"),
        (b"\n", b"", "truncated"),
    ],
)
def test_a_header_that_is_not_understood_is_an_error(
    path: Path, old: bytes, new: bytes, message: str
) -> None:
    path.write_bytes(write(path, []).read_bytes().replace(old, new))
    with pytest.raises(DecisionLogError, match=f"decisions.jsonl:1: .*{message}"):
        read(path)


def test_a_file_that_cannot_be_read_is_an_error(path: Path) -> None:
    with pytest.raises(DecisionLogError, match=r"decisions\.jsonl: No such file"):
        read(path)
    path.mkdir()
    with pytest.raises(DecisionLogError, match="Is a directory"):
        read(path)
    (path / "empty").touch()
    with pytest.raises(DecisionLogError, match="empty:1: "):
        read(path / "empty")


# Replay -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("preparing")
def test_the_same_actions_are_no_difference(path: Path) -> None:
    outcome = replay(write(path))
    assert outcome.difference is None
    assert (outcome.num_steps, outcome.num_events, outcome.num_actions) == (4, 3, 2)
    assert (outcome.num_batches, outcome.truncated) == (0, False)
    path.write_bytes(path.read_bytes()[:-1])
    outcome = replay(path)
    assert (outcome.num_steps, outcome.truncated, outcome.difference) == (3, True, None)


@pytest.mark.usefixtures("preparing")
@pytest.mark.parametrize(
    "actions",
    [[], [ev.Prepare(RequestId("b"))], [ev.Prepare(R), ev.Prepare(R)], [ev.Complete(R)]],
)
def test_the_first_step_that_differs_is_told_and_the_rest_counted(
    path: Path, actions: list[ev.Action]
) -> None:
    other = (8, [ev.RequestReceived(R, 1)], actions)
    outcome = replay(write(path, [*STEPS, other, other]))
    found = outcome.difference
    assert found is not None
    assert (found.step, found.line, found.now_ns) == (5, 6, 8)
    assert found.got == [{"action": "Prepare", "request_id": "r"}]
    assert [entry["action"] for entry in found.expected] == [type(a).__name__ for a in actions]
    assert (outcome.num_steps, outcome.num_actions) == (6, 2 + 2 * len(actions))


def test_knobs_that_the_core_has_changed_are_changed_again(path: Path) -> None:
    knobs = knobs_of(Policy(when="greedy", flow=False, adapt=True, remote_share=0.5))
    header = Header(knobs, Admission(100, 1 << 20), Limits(), LinearCosts())
    core, steps = header.make_core(), list[Told]()

    def step(now_ns: int, *events: ev.Event) -> list[ev.Action]:
        actions = core.step(events, now_ns)
        steps.append((now_ns, list(events), actions))
        return actions

    e0, l0, p0 = WorkerId("e0"), WorkerId("l0"), WorkerId("p0")
    stages = {e0: Stage.ENCODE, l0: Stage.PREFILL, p0: Stage.PREFILL, WorkerId("d"): Stage.DECODE}
    for worker, stage in stages.items():
        step(0, ev.WorkerJoined(worker, stage, beside=(e0,) if worker == l0 else ()))
    for number in range(60):
        now_ns, name = number * NS_PER_S, RequestId(f"r{number}")
        step(now_ns, ev.RequestReceived(name, 1))
        started = step(now_ns, ev.Prepared(name, Shape(1000, 1)))
        for each in (each for each in started if isinstance(each, ev.StartPrefill)):
            if each.worker_id == p0 or number < 4:  # then the local engine gets no further
                later_ns = now_ns + NS_PER_S // (20 if each.worker_id == p0 else 2)
                step(later_ns, ev.PrefillFinished(name, 0, 0, final=True))
    retuned = [each for _, _, actions in steps for each in actions if isinstance(each, ev.Retuned)]
    assert retuned
    assert replay(write(path, steps, header)).difference is None


def test_a_core_that_fails_is_a_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Preparing, events: Iterable[ev.Event], now_ns: int) -> list[ev.Action]:
        raise AssertionError("no such leg")

    monkeypatch.setattr(decisions, "Core", Preparing)
    monkeypatch.setattr(Preparing, "step", fail)
    found = replay(write(path)).difference
    assert found is not None
    assert (found.step, found.line, found.got) == (1, 2, "AssertionError: no such leg")


def test_a_header_that_makes_no_core_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_core(knobs: Knobs, *parts: object) -> Core:
        raise KeyError(knobs.when)

    monkeypatch.setattr(decisions, "Core", no_core)
    with pytest.raises(DecisionLogError, match=r":1: makes no core: KeyError\('slack'\)"):
        replay(write(path))


@pytest.mark.usefixtures("preparing")
def test_batches_are_counted_by_reason(path: Path) -> None:
    batches = [
        start_encode(1, 4, "full", 0.5),
        start_encode(2, 2, "full", 1.0),
        start_encode(3, 1, "slack", math.nan),
    ]
    outcome = replay(write(path, [(1, [], batches)]))
    assert outcome.num_batches == 3
    full = outcome.batches["full"]
    assert (full.count, full.num_items, full.wait_s) == (2, 6, 1.5)
    assert outcome.batches["slack"].num_items == 1
    assert outcome.difference is not None


# With the real core -------------------------------------------------------------------------------

POOL = {WorkerId(f"{stage}{number}"): stage for stage in Stage for number in range(2)}
BESIDE = {WorkerId("prefill1"): (WorkerId("encode1"),)}
KEYS = "abcdef"
SURFACE = Surface(500, ((1, ((1, 0.05), (2, 0.02))), (4, ((1, 0.2), (2, 0.1), (3, 0.05)))))
DIVIDED = dataclasses.replace(HEADER, devices=Devices(SURFACE))


def with_rule(when: str) -> Header:
    return dataclasses.replace(DIVIDED, knobs=dataclasses.replace(KNOBS, when=when))


def answer(chance: random.Random, action: ev.Action) -> ev.Event | None:
    """What an engine says to an action, well or badly; None where nothing is to be said."""
    well, retryable = chance.random() < 0.9, chance.random() < 0.8
    match action:
        case ev.Prepare(name):
            keys = chance.choices(KEYS, k=int(name) % 4)
            items = tuple(MediaItem(key, Modality.IMAGE, 10 * ord(key)) for key in keys)
            return ev.Prepared(name, Shape(900, 50, items)) if well else ev.PrepareFailed(name)
        case ev.StartEncode(number):
            return ev.EncodeFinished(number) if well else ev.EncodeFailed(number, retryable)
        case ev.StartPrefill(name, leg, attempt):
            failed = ev.EmbeddingMissing(name, leg, attempt, tuple(chance.sample(KEYS, 2)))
            return ev.PrefillFinished(name, leg, attempt) if well else failed
        case ev.StartDecode(name, leg, attempt):
            failed_ = ev.DecodeFailed(name, leg, attempt, retryable)
            return ev.DecodeFinished(name, leg, attempt, 1.0, 0.02) if well else failed_
    return None


def joined(worker_id: WorkerId) -> ev.WorkerJoined:
    beside = BESIDE.get(worker_id, ())
    return ev.WorkerJoined(worker_id, POOL[worker_id], num_slots=4, beside=beside)


def news(chance: random.Random, number: int) -> ev.Event:
    """What happens by itself."""
    name, worker_id = RequestId(str(number)), chance.choice(list(POOL))
    match chance.randrange(20):
        case 0:
            return ev.WorkerLost(worker_id)
        case 1 | 2 | 3:
            return joined(worker_id)
        case 4:
            when, flow = chance.choice(list(RULES)), chance.random() < 0.5
            where, share = chance.choice(list(SHARE_RULES)), chance.choice([0.0, 0.3, 0.55, 1.0])
            turned: dict[str, Any] = {
                "when": when,
                "flow": flow,
                "where": where,
                "remote_share": share,
                "how": chance.choice(list(DIVISION_RULES)),
                "encode_units": chance.choice([None, 1, 2]),
                "adapt": chance.random() < 0.5,
            }
            return ev.KnobsChanged(dataclasses.replace(KNOBS, **turned))
        case 5:
            return ev.ClientCancelled(RequestId(str(chance.randrange(number + 1))))
        case 6:
            return ev.Evicted(worker_id, tuple(chance.sample(KEYS, 3)))
    kinds = (Modality.IMAGE,) * (number % 4)
    return ev.RequestReceived(name, 10, kinds, num_choices=chance.choice([1, 1, 3]))


def scenario(seed: int, num_steps: int = 300) -> Iterator[Told]:
    """A core among engines that come, go and fail."""
    chance, core, now_ns = random.Random(seed), DIVIDED.make_core(), NS_PER_S
    waiting: list[ev.Event] = [*map(joined, POOL)]
    for number in range(num_steps):
        events = [waiting.pop(chance.randrange(len(waiting))) for _ in waiting[:3]]
        actions = core.step(events, now_ns)
        yield now_ns, events, actions
        waiting += filter(None, (answer(chance, action) for action in actions))
        waiting += [news(chance, number)] if chance.random() < 0.5 else []
        later_ns, deadline_ns = now_ns + chance.randrange(NS_PER_S // 5), core.next_deadline()
        now_ns = later_ns if deadline_ns is None else max(now_ns, min(later_ns, deadline_ns))
    yield now_ns, [ev.Draining()], core.step([ev.Draining()], now_ns)


REPLAY = """
import sys
from pathlib import Path
from easerve.serve.decisions import replay
for path in sys.argv[1:]:
    outcome = replay(Path(path))
    print(outcome.num_steps, outcome.difference)
"""


@pytest.mark.long
def test_the_real_core_decides_the_same_in_another_process(tmp_path: Path) -> None:
    runs = [list(scenario(seed)) for seed in range(20)]
    paths = [write(tmp_path / str(seed), steps, DIVIDED) for seed, steps in enumerate(runs)]
    done = {type(action) for steps in runs for _, _, actions in steps for action in actions}
    assert done == set(get_args(ev.Action)), "too little happens"
    for hash_seed in "123":
        replayed = subprocess.run(
            [sys.executable, "-c", REPLAY, *paths],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert replayed.stdout.splitlines() == ["301 None"] * len(paths)


def test_the_real_core_decides_otherwise_with_other_knobs(path: Path) -> None:
    steps = list(scenario(0))
    header = with_rule("none")
    outcome = replay(write(path, steps, header))
    assert outcome.difference is not None
    assert outcome.num_steps == len(steps)
    assert outcome.num_batches == sum(each.count for each in outcome.batches.values()) > 0


def test_the_real_core_is_not_made_of_a_rule_that_does_not_exist(path: Path) -> None:
    with pytest.raises(DecisionLogError, match=r":1: makes no core: .*whim"):
        replay(write(path, [], with_rule("whim")))
