import asyncio
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from easerve.bench import client
from easerve.bench.client import (
    LoadError,
    Planned,
    Progress,
    endpoint,
    run_in_process,
    run_load,
)
from easerve.goodput import Outcome, Record
from tests.processes import is_alive

from .stand_in import (
    ANSWER,
    DONE,
    Answer,
    StandIn,
    breaks_after,
    chunk,
    event,
    fails,
    replies,
    stalls_after,
    stand_in,
    streams,
    until,
    usage,
)

Run = Callable[..., Awaitable[list[Record]]]
QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "why?"}]}
EITHER_WAY = pytest.mark.parametrize("run", [run_load, run_in_process])


@pytest.fixture
async def server() -> AsyncIterator[StandIn]:
    async with stand_in() as started:
        yield started


def planned(*times_s: float) -> list[Planned]:
    """Requests that are told apart by their ``n``."""
    return [Planned(at_s, {**QUESTION, "n": n}) for n, at_s in enumerate(times_s)]


def numbers(server: StandIn) -> list[int]:
    return [json.loads(body)["n"] for body in server.bodies]


async def outcome_of(server: StandIn, timeout_s: float = 5) -> tuple[Record, str | None]:
    """One request's record and the cause that is named."""
    last = Progress()

    def note(progress: Progress) -> None:
        nonlocal last
        last = progress

    (record,) = await run_load(server.url, "m", planned(0), timeout_s=timeout_s, on_progress=note)
    assert last.num_done == 1
    (cause,) = last.causes or [None]
    return record, cause


# What is sent -------------------------------------------------------------------------------------


async def test_a_dict_gets_the_model_and_is_streamed_with_its_usage(server: StandIn) -> None:
    await run_load(server.url, "m", [Planned(0, QUESTION)], api_key="secret")
    assert json.loads(server.bodies[0]) == {
        **QUESTION,
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert server.headers[0]["content-type"] == "application/json"
    assert server.headers[0]["authorization"] == "Bearer secret"


def test_what_a_dict_says_itself_stays() -> None:
    body = {"model": "other", "stream": False}
    assert json.loads(Planned(0, body).encoded("m")) == body
    assert body == {"model": "other", "stream": False}
    body = {"model": "other", "stream": True, "stream_options": {"include_usage": False}}
    assert json.loads(Planned(0, body).encoded("m")) == body


async def test_bytes_are_sent_as_they_are(server: StandIn) -> None:
    large = b"x" * (3 << 20)
    await run_load(server.url, "m", [Planned(0, b"{ }"), Planned(0.02, large)])
    assert server.bodies == [b"{ }", large]
    assert "authorization" not in server.headers[0]
    assert server.headers[1]["content-length"] == str(len(large))
    assert server.headers[1]["content-type"] == "application/json"


@pytest.mark.parametrize("url", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_an_address_may_be_of_the_server_or_of_the_route(url: str) -> None:
    assert endpoint(f"http://host:1{url}") == "http://host:1/v1/chat/completions"


def test_a_prefix_and_another_route_are_kept() -> None:
    assert endpoint("https://host/api/v1") == "https://host/api/v1/chat/completions"
    assert endpoint("http://host/v1/completions") == "http://host/v1/completions"


@pytest.mark.parametrize("url", ["", "host:8000", "127.0.0.1:8000", "ftp://host", "http://"])
async def test_what_is_no_address_is_said_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="is not like http"):
        await run_load(url, "m", [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"max_in_flight": 0},
        {"concurrency": 1, "max_in_flight": 1},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
    ],
)
@EITHER_WAY
async def test_arguments_that_cannot_be(run: Run, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(reversed(wrong)))):
        await run("http://127.0.0.1:1", "m", [], **wrong)


@pytest.mark.parametrize("at_s", [-1, float("nan"), float("inf")])
def test_a_time_that_cannot_be(at_s: float) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        Planned(at_s, {})


# When it is sent ----------------------------------------------------------------------------------


async def test_an_open_loop_does_not_wait_for_answers(server: StandIn) -> None:
    server.gate.clear()
    run = asyncio.create_task(run_load(server.url, "m", planned(0.09, 0, 0.06, 0.03)))
    await until(lambda: len(server.bodies) == 4)
    assert server.running == 4
    server.gate.set()
    records = await run
    assert numbers(server) == [1, 3, 2, 0]
    assert [record.scheduled_s for record in records] == [0.09, 0, 0.06, 0.03]
    assert all(record.lateness_s >= 0 for record in records)
    assert min(record.lateness_s for record in records) < 0.03
    assert {record.outcome for record in records} == {"completed"}


async def test_what_has_to_wait_for_a_place_is_late(server: StandIn) -> None:
    server.gate.clear()
    run = asyncio.create_task(run_load(server.url, "m", planned(0, 0.01, 0.02), max_in_flight=2))
    await until(lambda: len(server.bodies) == 2)
    await asyncio.sleep(0.1)
    assert numbers(server) == [0, 1]
    server.gate.set()
    records = await run
    assert records[2].lateness_s > 0.05
    assert server.most_running == 2


async def test_a_closed_loop_sends_the_next_when_one_is_answered(server: StandIn) -> None:
    server.gate.clear()
    run = asyncio.create_task(run_load(server.url, "m", planned(*[9.0] * 8), concurrency=3))
    await until(lambda: len(server.bodies) == 3)
    await asyncio.sleep(0.02)
    assert numbers(server) == [0, 1, 2]
    server.gate.set()
    records = await run
    assert sorted(numbers(server)) == list(range(8))
    assert server.most_running == 3
    assert len(server.connections) == 3
    assert all(record.lateness_s < 0.1 for record in records)
    first_end_s = min(record.end_s or 0 for record in records)
    assert all(record.sent_s >= first_end_s for record in records[3:])


async def test_a_closed_loop_may_have_more_workers_than_requests(server: StandIn) -> None:
    assert len(await run_load(server.url, "m", planned(0), concurrency=5)) == 1
    assert await run_load(server.url, "m", [], concurrency=5) == []
    assert await run_load(server.url, "m", []) == []


# What comes of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "outcome", "cause"),
    [
        (streams(*ANSWER), "completed", None),
        (fails(429, "too many"), "rejected", "HTTP 429: too many"),
        (fails(503, "nobody"), "rejected", "HTTP 503: nobody"),
        (fails(500, "it broke"), "failed", "HTTP 500: it broke"),
        (fails(401, "no key"), "failed", "HTTP 401: no key"),
        (replies(502, "<p>bad\n gateway", "text/html"), "failed", "HTTP 502: <p>bad gateway"),
        (replies(404, '{"detail":"x"}'), "failed", 'HTTP 404: {"detail":"x"}'),
        (replies(404, '{"error":"gone"}'), "failed", "HTTP 404: gone"),
        (streams(chunk("a"), event({"error": {"message": "lost"}}), DONE), "failed", "lost"),
        (breaks_after(event({"error": {"message": "lost"}})), "failed", "lost"),
        (streams(chunk("a", "stop")), "failed", "the stream ended before [DONE]"),
        (streams(), "failed", "the stream ended before [DONE]"),
        (streams(b"data: {\n\n", DONE), "failed", "DecodeError"),
        (streams(event({"choices": 1}), DONE), "failed", "ValidationError"),
        (streams(b'data: {"error":"\xff"}\n\n', DONE), "failed", "DecodeError"),
        (streams(b'data: {"error":' + b"[" * 10**5 + b"\n\n", DONE), "failed", "RecursionError"),
        (streams(chunk("a"), usage(-1), DONE), "failed", "ValidationError"),
        (breaks_after(), "failed", "Client"),
        (breaks_after(chunk("a")), "failed", "Client"),
        (stalls_after(), "timed_out", "no whole answer within 0.1 s"),
        (stalls_after(chunk("a")), "timed_out", "no whole answer within 0.1 s"),
        (stalls_after(*ANSWER), "completed", None),
        (replies(200, "{}"), "completed", None),
        (replies(200, '{"error":{"message":"lost"}}'), "failed", "lost"),
        (replies(200, "hello", "text/plain"), "failed", "DecodeError"),
    ],
)
async def test_outcomes(
    server: StandIn, answer: Answer, outcome: Outcome, cause: str | None
) -> None:
    server.answer = answer
    stalls = outcome == "timed_out" or "stalls" in answer.__qualname__
    record, named = await outcome_of(server, timeout_s=0.1 if stalls else 5)
    assert record.outcome == outcome
    assert named == cause if cause is None else str(named).startswith(cause)
    assert record.end_s is not None


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    record, cause = await outcome_of(StandIn(url=f"http://127.0.0.1:{port}"))
    assert record.outcome == "failed"
    assert "Cannot connect" in str(cause)


async def test_what_came_before_the_end_is_kept(server: StandIn) -> None:
    server.answer = stalls_after(chunk("a"), chunk("b"))
    record, _ = await outcome_of(server, timeout_s=0.2)
    assert record.num_output_tokens == 2
    assert record.first_token_s is not None
    assert record.end_s is not None
    assert record.first_token_s < record.end_s
    assert record.end_s - record.sent_s >= 0.2


async def test_an_answer_that_is_not_streamed_has_no_first_token(server: StandIn) -> None:
    server.answer = replies(200, '{"choices":[{"message":{}}],"usage":{"completion_tokens":7}}')
    record, _ = await outcome_of(server)
    assert (record.first_token_s, record.num_output_tokens) == (None, 7)


async def test_one_connection_serves_again(server: StandIn) -> None:
    answers = [streams(*ANSWER), fails(429, "x"), fails(500, "x"), streams(*ANSWER)]
    waiting = iter(answers)
    server.answer = lambda request: next(waiting)(request)
    records = await run_load(server.url, "m", planned(*[0.0] * 4), concurrency=1)
    assert [record.outcome for record in records] == [
        *("completed", "rejected", "failed", "completed")
    ]
    assert len(server.connections) == 1


async def test_progress_names_some_causes(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_CAUSES", 2)
    messages = iter("aabbcdac")
    server.answer = lambda request: fails(500, next(messages) * 300)(request)
    seen: list[int] = []
    last = Progress()

    def note(progress: Progress) -> None:
        nonlocal last
        last = progress
        seen.append(progress.num_done)

    await run_load(server.url, "m", planned(*[0.0] * 8), concurrency=1, on_progress=note)
    assert seen == list(range(1, 9))
    aaa, bbb = (f"HTTP 500: {letter * 190}" for letter in "ab")
    assert last.causes == {aaa: 3, bbb: 2, client.OTHER_CAUSES: 3}


async def test_cancelling_hangs_up(server: StandIn) -> None:
    server.gate.clear()
    run = asyncio.create_task(run_load(server.url, "m", planned(0, 0, 9)))
    await until(lambda: server.running == 2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(lambda: server.running == 0)


# A process of its own -----------------------------------------------------------------------------


class Children:
    """Notes the processes that are started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[asyncio.subprocess.Process] = []
        self._start = asyncio.create_subprocess_exec
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self.start)

    async def start(self, *words: Any, **options: Any) -> asyncio.subprocess.Process:
        child = await self._start(*words, **options)
        self.started.append(child)
        return child

    def assert_none_lives(self) -> None:
        assert self.started
        assert not any(is_alive(child.pid) for child in self.started)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


async def test_a_process_of_its_own_does_the_same(server: StandIn, children: Children) -> None:
    refused = iter([False, True, False])
    server.answer = lambda request: (fails(429, "no") if next(refused) else streams(*ANSWER))(
        request
    )
    requests = [*planned(0, 0.03), Planned(0.06, b'{"n":2,"x":"%s"}' % (b"x" * (2 << 20)))]
    reports: list[Progress] = []
    records = await run_in_process(
        server.url, "m", requests, api_key="secret", on_progress=reports.append
    )
    assert [record.outcome for record in records] == ["completed", "rejected", "completed"]
    assert [record.num_output_tokens for record in records] == [2, 0, 2]
    assert [record.scheduled_s for record in records] == [0, 0.03, 0.06]
    assert numbers(server) == [0, 1, 2]
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert reports[-1] == Progress(3, {"HTTP 429: no": 1})
    children.assert_none_lives()


async def test_a_closed_loop_in_a_process(server: StandIn, children: Children) -> None:
    records = await run_in_process(server.url, "m", planned(*[9.0] * 6), concurrency=2)
    assert {record.outcome for record in records} == {"completed"}
    assert server.most_running <= 2
    children.assert_none_lives()


def cancel_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[None]]:
    async def scenario() -> None:
        children = Children(monkeypatch)
        async with stand_in() as server:
            server.gate.clear()
            run = asyncio.create_task(run_in_process(server.url, "m", planned(0)))
            await until(lambda: server.running)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            children.assert_none_lives()
            await until(lambda: not server.running)

    return scenario


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_cancelling_kills_the_process(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(cancel_while_it_runs(monkeypatch)())


async def test_cancelling_while_the_bodies_are_handed_over(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, tmp_path, "exec sleep 60")
    run = asyncio.create_task(run_in_process("http://x", "m", [Planned(0, b"x" * (8 << 20))]))
    await until(lambda: children.started)
    await asyncio.sleep(0.02)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    children.assert_none_lives()


async def test_an_error_of_the_caller_kills_the_process(
    server: StandIn, children: Children
) -> None:
    def report(_: Progress) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await run_in_process(server.url, "m", planned(0, 60), on_progress=report)
    children.assert_none_lives()


def instead(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """A shell script takes the place of the client's process."""
    path = folder / "child"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "{\\"num_done\\":1}" >&2; echo "it broke" >&2; exit 3', "^it broke$"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "exit code -9"),
    ],
)
async def test_a_process_that_fails(
    script: str,
    message: str,
    children: Children,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instead(monkeypatch, tmp_path, script)
    with pytest.raises(LoadError, match=message):
        await run_in_process("http://x", "m", [Planned(0, b"x" * (1 << 20))])
    children.assert_none_lives()


async def test_a_process_that_cannot_read_its_job_says_why() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "easerve.bench.client"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate(b'{"url": 1}\n')
    assert process.returncode == 1
    assert b"ValidationError" in error.splitlines()[-1]


async def test_no_process_outlives_its_parent(server: StandIn) -> None:
    server.gate.clear()
    program = (
        "import asyncio, sys\n"
        "from easerve.bench.client import Planned, run_in_process\n"
        "asyncio.run(run_in_process(sys.argv[1], 'm', [Planned(0, {})]))\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, server.url)
    await until(lambda: server.running)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await until(lambda: not server.running)


def test_a_reporter_is_brief(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    times = iter([10.0, 10.05, 10.15, 10.16])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    reporter = client._Reporter(4)
    for num_done in range(1, 5):
        reporter(Progress(num_done))
    lines: Sequence[bytes] = capfdbinary.readouterr().err.splitlines()
    assert all(line.startswith(client.PROGRESS_START) for line in lines)
    assert [msgspec.json.decode(line, type=Progress).num_done for line in lines] == [1, 3, 4]
