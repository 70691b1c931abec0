import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from easerve.bench import job
from easerve.bench.client import run_in_process, run_load
from easerve.bench.job import Planned, Progress, endpoint
from easerve.bench.sample import Sample
from easerve.goodput import Outcome, Record

from .stand_in import (
    ANSWER,
    DONE,
    QUESTION,
    Answer,
    StandIn,
    breaks_after,
    chunk,
    event,
    fails,
    numbers,
    planned,
    records_of,
    replies,
    stalls_after,
    stand_in,
    streams,
    until,
    usage,
)

Run = Callable[..., Awaitable[list[Sample]]]
EITHER_WAY = pytest.mark.parametrize("run", [run_load, run_in_process])


@pytest.fixture
async def server() -> AsyncIterator[StandIn]:
    async with stand_in() as started:
        yield started


async def outcome_of(server: StandIn, timeout_s: float = 5) -> tuple[Record, str | None]:
    """One request's record and the cause that is named."""
    told: list[Progress] = []
    (sample,) = await run_load(
        server.url, "m", planned(0), timeout_s=timeout_s, on_progress=told.append
    )
    assert (told[-1].num_sent, told[-1].num_done) == (1, 1)
    (cause,) = told[-1].causes or [None]
    assert cause == sample.cause
    return sample.record, cause


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
    records = records_of(await run)
    assert numbers(server) == [1, 3, 2, 0]
    assert [record.scheduled_s for record in records] == [0.09, 0, 0.06, 0.03]
    assert all(record.lateness_s >= 0 for record in records)
    assert min(record.lateness_s for record in records) < 0.03
    assert {record.outcome for record in records} == {"completed"}


async def test_waiting_for_a_place_is_apart_and_counts(server: StandIn) -> None:
    server.gate.clear()
    run = asyncio.create_task(run_load(server.url, "m", planned(0, 0.01, 0.02), max_in_flight=2))
    await until(lambda: len(server.bodies) == 2)
    await asyncio.sleep(0.1)
    assert numbers(server) == [0, 1]
    server.gate.set()
    records = records_of(await run)
    assert server.most_running == 2
    assert all(record.slot_wait_s < 0.01 for record in records[:2])
    waited = records[2]
    assert waited.slot_wait_s > 0.05
    assert waited.lateness_s < waited.slot_wait_s
    assert waited.ttft_s is not None
    assert waited.ttft_s > waited.slot_wait_s


async def test_a_closed_loop_sends_the_next_when_one_is_answered(server: StandIn) -> None:
    server.gate.clear()
    run = asyncio.create_task(run_load(server.url, "m", planned(*[9.0] * 8), concurrency=3))
    await until(lambda: len(server.bodies) == 3)
    await asyncio.sleep(0.02)
    assert numbers(server) == [0, 1, 2]
    server.gate.set()
    records = records_of(await run)
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
        (
            streams(chunk("a"), event({"error": {"message": "lost"}}), DONE),
            "failed",
            "error in the answer: lost",
        ),
        (breaks_after(event({"error": "lost"})), "failed", "error in the answer: lost"),
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
        (replies(200, "{}"), "failed", "the answer has no token"),
        (replies(200, '{"choices":[{"message":{"content":"a"}}]}'), "completed", None),
        (streams(DONE), "failed", "the answer has no token"),
        (streams(chunk("", role="assistant"), DONE), "failed", "the answer has no token"),
        (replies(200, '{"error":{"message":"lost"}}'), "failed", "error in the answer: lost"),
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
    answer = '{"choices":[{"message":{"content":"a"}}],"usage":{"completion_tokens":7}}'
    server.answer = replies(200, answer)
    record, _ = await outcome_of(server)
    assert (record.first_token_s, record.num_output_tokens) == (None, 7)


async def test_one_connection_serves_again(server: StandIn) -> None:
    answers = [streams(*ANSWER), fails(429, "x"), fails(500, "x"), streams(*ANSWER)]
    waiting = iter(answers)
    server.answer = lambda request: next(waiting)(request)
    records = records_of(await run_load(server.url, "m", planned(*[0.0] * 4), concurrency=1))
    assert [record.outcome for record in records] == [
        *("completed", "rejected", "failed", "completed")
    ]
    assert len(server.connections) == 1


async def test_progress_names_some_causes(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "MAX_CAUSES", 2)
    messages = iter("aabbcdac")
    server.answer = lambda request: fails(500, next(messages) * 300)(request)
    told: list[Progress] = []
    samples = await run_load(
        server.url, "m", planned(*[0.0] * 8), concurrency=1, on_progress=told.append
    )
    aaa, bbb, ccc, ddd = (f"HTTP 500: {letter * 190}" for letter in "abcd")
    assert told[-1] == Progress(0, 8, 8, {}, {aaa: 3, bbb: 2, job.OTHER_CAUSES: 3})
    assert [sample.cause for sample in samples] == [aaa, aaa, bbb, bbb, ccc, ddd, aaa, ccc]


async def test_an_error_of_the_listener_is_raised(server: StandIn) -> None:
    def report(_: Progress) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await run_load(server.url, "m", planned(0, 0.15), on_progress=report)


async def test_cancelling_hangs_up(server: StandIn) -> None:
    server.gate.clear()
    run = asyncio.create_task(run_load(server.url, "m", planned(0, 0, 9)))
    await until(lambda: server.running == 2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await until(lambda: server.running == 0)
