"""Failures, retries, cancellation and load, seen from the client and from what is left behind."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from easerve.costs.linear import LinearCosts
from easerve.engines.protocol import Delta, EngineError, Prefilled, Prompt, Route
from easerve.engines.vllm.client import GENERATE, MAX_MESSAGE, VllmEngine
from easerve.serve import job as jobs
from easerve.serve.errors import ApiError, ended
from easerve.serve.job import Job, Outputs
from easerve.types import Reason, RequestId, Stage, WorkerId

from ..engines.stand_in import fails, stand_in, streams
from .conftest import Serve
from .server import (
    COMPLETIONS,
    MODEL,
    PATIENCE_S,
    TWO_OF_EACH,
    Client,
    Content,
    Server,
    answer,
    answer_of,
    answer_words,
    answers_of,
    ask_about,
    body,
    error_of,
    key,
    picture,
    until,
)

RED, GREEN, BLUE = picture("red"), picture("green"), picture("blue")
PICTURE, TEXT = ask_about("which?", RED), "what is new?"
ANSWER = answer("which?", RED)

# Every call to an engine that a request with a picture makes, and then one of text.
CALLS: list[tuple[str, str, Content]] = [
    ("e0", "render", PICTURE),
    ("e0", "encode", PICTURE),
    ("p0", "prefill", PICTURE),
    ("d0", "decode", PICTURE),
    ("p0", "render", TEXT),
]
CALL_IDS = [f"{name} {call}" for name, call, _ in CALLS]
FAILURES = {
    "status 500": EngineError("the engine failed", 500),
    "connection lost": EngineError("the engine is gone"),
}
every_call = pytest.mark.parametrize(("name", "call", "content"), CALLS, ids=CALL_IDS)
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def expected(content: Content) -> str:
    return ANSWER if content is PICTURE else answer(TEXT)


async def answer_to(server: Server, content: Content, stream: bool) -> str:
    if not stream:
        return answer_of(await server.ask(content))
    streamed = await server.stream(content)
    assert (streamed.status, streamed.errors, streamed.num_done) == (200, [], 1)
    return streamed.text


# A call fails -------------------------------------------------------------------------------------


@streamed_or_not
@pytest.mark.parametrize(
    ("name", "call", "content", "failure"),
    [
        pytest.param(*called, failure, id=f"{called[0]} {called[1]} {kind}")
        for called in CALLS
        for kind, failure in FAILURES.items()
        if (called[1], failure.status) != ("render", 500)  # the messages' fault, see below
    ],
)
async def test_a_call_that_fails_once_is_tried_again(
    server: Server, name: str, call: str, content: Content, failure: EngineError, stream: bool
) -> None:
    server.engines[name].failures[call].append(failure)
    assert await answer_to(server, content, stream) == expected(content)
    assert server.num_calls(call) == 2


@pytest.mark.parametrize(
    ("name", "call", "content", "status", "code"),
    [
        ("e0", "render", PICTURE, 400, None),  # how a chat template fails: not tried again
        ("p0", "render", TEXT, 400, None),
        ("e0", "encode", PICTURE, 500, "encode_failed"),
        ("p0", "prefill", PICTURE, 500, "prefill_failed"),
        ("d0", "decode", PICTURE, 500, "decode_failed"),
    ],
    ids=CALL_IDS[:1] + CALL_IDS[4:] + CALL_IDS[1:4],
)
@pytest.mark.parametrize("max_retries", [0, 2])
@streamed_or_not
async def test_a_call_that_always_fails_is_tried_so_often_and_no_more(
    serve: Serve,
    name: str,
    call: str,
    content: Content,
    status: int,
    code: str | None,
    max_retries: int,
    stream: bool,
) -> None:
    server = await serve(limits={"max_retries": max_retries})
    server.engines[name].failures[call] = [EngineError("a secret of ours", 500)] * 100
    response = await server.ask(content, stream=stream)
    error = error_of(response, status)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    assert (error["type"], error["code"]) == (kind, code)
    assert "secret" not in response.text
    assert response.headers["x-request-id"].startswith("chatcmpl-")
    assert server.num_calls(call) == (1 if status == 400 else 1 + max_retries)


@pytest.mark.parametrize(("name", "content"), [("e0", PICTURE), ("p0", TEXT)])
@streamed_or_not
async def test_a_prompt_that_the_engine_refuses_is_a_400_in_its_words(
    server: Server, name: str, content: Content, stream: bool
) -> None:
    server.engines[name].failures["render"].append(EngineError("the prompt is too long", 400))
    error = error_of(await server.ask(content, stream=stream), 400)
    assert error["message"] == "the prompt is too long"
    assert error["type"] == "invalid_request_error"
    assert server.num_calls("render") == 1


@every_call
async def test_a_refusal_is_not_tried_again(
    server: Server, name: str, call: str, content: Content
) -> None:
    server.engines[name].failures[call] = [EngineError("no", 400)] * 2
    response = await server.ask(content)
    assert response.status_code >= 400
    assert server.num_calls(call) == 1


@every_call
@streamed_or_not
async def test_an_unexpected_exception_costs_the_request_that_met_it(
    server: Server, name: str, call: str, content: Content, stream: bool
) -> None:
    server.engines[name].failures[call].append(KeyError("a secret of ours"))
    response = await server.ask(content, stream=stream)
    assert error_of(response, 500)["type"] == "server_error"
    assert "secret" not in response.text
    await server.idle()
    assert await answer_to(server, content, stream) == expected(content)


async def test_an_unexpected_exception_does_not_touch_another_request(server: Server) -> None:
    server.hold("decode")
    good = asyncio.create_task(server.ask(PICTURE))
    await server.working("decode")
    server.engines["d0"].failures["decode"].append(KeyError())
    error_of(await server.ask(TEXT), 500)
    server.release()
    assert answer_of(await good) == ANSWER


async def test_retries_prefer_an_engine_that_has_not_failed_the_request(serve: Serve) -> None:
    server = await serve(TWO_OF_EACH)
    for name, call in (("e0", "encode"), ("p0", "prefill")):
        server.engines[name].failures[call] = [EngineError("broken", 500)] * 100
    assert answer_of(await server.ask(PICTURE)) == ANSWER
    assert server.engines["e1"].calls["encode"] == server.engines["p1"].calls["prefill"] == 1


# Embeddings and KV caches -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("urls", "lost"),
    [([RED], [RED]), ([RED, GREEN], [RED]), ([RED, GREEN], [RED, GREEN]), ([RED, RED], [RED])],
    ids=["the one", "one of two", "both", "that of a pair"],
)
async def test_missing_embeddings_are_sent_exactly_once_more(
    serve: Serve, urls: list[str], lost: list[str]
) -> None:
    """All of a request in one call, which is no forward: the encoder has them."""
    server = await serve(["e0", "d0"])
    server.add("p0", timeout_s=0.2)
    encoder = server.engines["e0"]
    encoder.lost = {key(url) for url in lost}
    response = await server.ask(ask_about("which?", *urls))
    assert answer_of(response) == answer("which?", *urls)
    assert server.encode_calls == [len(set(urls)), len(lost)]
    assert encoder.encoded == dict.fromkeys(map(key, urls), 1)
    assert encoder.resent == dict.fromkeys(map(key, lost), 1)
    assert server.num_calls("prefill") == 2


async def test_an_embedding_that_never_comes_is_an_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def swallow(keys: Sequence[str]) -> None:
        pass

    server = await serve(["e0", "d0"])
    prefill = server.add("p0", timeout_s=0.1)
    monkeypatch.setattr(prefill.store, "push", swallow)
    assert error_of(await server.ask(PICTURE), 500)["code"] == "encode_failed"
    assert server.num_calls("encode") == server.num_calls("prefill") == 3


@streamed_or_not
async def test_a_decode_that_fails_before_the_first_token_begins_again_at_prefill(
    server: Server, stream: bool
) -> None:
    decoder = server.engines["d0"]
    server.hold("decode")
    task = asyncio.create_task(answer_to(server, PICTURE, stream))
    await server.working("decode")
    decoder.failures["decode"].append(EngineError("the engine failed", 500))
    server.release()
    assert await task == ANSWER
    assert server.num_calls("prefill") == server.num_calls("decode") == 2
    assert server.num_calls("encode") == 1
    assert server.fabric.kv == {}


async def test_a_stream_that_breaks_after_the_first_token_ends_with_an_error(
    server: Server,
) -> None:
    server.hold("decode", permits=2)
    task = asyncio.create_task(server.stream(PICTURE))
    await pieces_made(server, 2)
    server.engines["d0"].failures["decode"].append(EngineError("a secret of ours", 500))
    server.release()
    streamed = await task
    assert streamed.status == 200
    assert streamed.text == "".join(answer_words("which?", RED)[:2])
    assert all(chunk["finish_reason"] is None for chunk in streamed.chunks)
    assert [error["code"] for error in streamed.errors] == ["decode_failed"]
    assert "error" in streamed.events[-1]
    assert "secret" not in str(streamed.errors)
    assert streamed.num_done == 1
    assert server.num_calls("decode") == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_a_whole_answer_that_breaks_in_the_middle_is_made_again(
    server: Server, n: int
) -> None:
    server.hold("decode", permits=2)
    task = asyncio.create_task(server.ask(PICTURE, n=n, seed=1))
    await pieces_made(server, 2)
    server.engines["d0"].failures["decode"].append(EngineError("the engine failed", 500))
    server.release()
    response = await task
    assert answers_of(response) == [answer("which?", RED, seed=1 + leg) for leg in range(n)]
    assert response.json()["usage"]["completion_tokens"] == 16 * n
    assert (server.num_calls("prefill"), server.num_calls("decode")) == (n + 1, n + 1)


@pytest.mark.parametrize("asked", [{}, {"tools": [{"function": {"name": "look"}}]}])
async def test_a_whole_answer_whose_engine_dies_in_the_middle_is_another_ones(
    serve: Serve, asked: dict[str, Any]
) -> None:
    server = await serve(["e0", "p0", "d0", "d1"])
    server.hold("decode", permits=2)
    lost = server.engines["d0"]
    if asked:  # what decode parses comes whole, too
        lost.permits["decode"] = asyncio.Semaphore(0)
    task = asyncio.create_task(server.ask(PICTURE, **asked))
    await server.working("decode")
    await until(lambda: asked or lost.num_pieces == 2, "the second token")
    server.lose("d0")
    server.release()
    response = await task
    if asked:
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == ANSWER
    else:
        assert answer_of(response) == ANSWER
    assert response.json()["usage"]["completion_tokens"] == 16
    assert [server.engines[name].calls["decode"] for name in ("d0", "d1")] == [1, 1]
    await server.idle()
    assert server.driver.timelines.popitem()[1].get("ttft", 0.0) >= 0


async def test_an_engine_that_dies_after_its_last_piece_is_not_asked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = Job.count

    def count_and_lose(job: Job, leg: int, delta: Delta) -> None:
        count(job, leg, delta)
        if delta.finish_reason:
            asyncio.get_running_loop().call_soon(server.lose, "d0")

    monkeypatch.setattr(Job, "count", count_and_lose)
    assert answer_of(await server.ask(PICTURE)) == ANSWER


async def test_the_time_per_token_of_several_choices_is_that_of_each(server: Server) -> None:
    await server.ask(TEXT, n=4)
    await server.idle()
    timeline = server.driver.timelines.popitem()[1]
    assert timeline["tpot"] == (timeline["end"] - timeline["ttft"]) / 15


async def test_a_whole_answer_that_always_breaks_in_the_middle_is_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.engines["d0"]
    decode = engine.decode

    async def break_off(prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        async for delta in decode(prompt, handle):
            yield delta
            raise EngineError("a secret of ours", 500)

    monkeypatch.setattr(engine, "decode", break_off)
    response = await server.ask(PICTURE)
    assert error_of(response, 500)["code"] == "decode_failed"
    assert "secret" not in response.text
    assert server.num_calls("decode") == 3


async def pieces_made(server: Server, number: int) -> None:
    def made() -> bool:
        return sum(engine.num_pieces for engine in server.engines.values()) == number

    await until(made, f"piece {number} of decode")


# A client reads slowly ----------------------------------------------------------------------------

UNREAD = 4
held_or_not = pytest.mark.parametrize("asked", [{}, {"tools": [{"function": {"name": "look"}}]}])


@pytest.fixture
def few_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_UNREAD", UNREAD)


def submit(server: Server, stream: bool = True, num_choices: int = 1, **asked: Any) -> Job:
    """A request whose answer nobody reads."""
    route = Route.OPENAI if "tools" in asked else Route.TEXT
    job = Job(RequestId("r"), body(TEXT, **asked), [], 1, num_choices, route, stream)
    server.driver.submit(job)
    return job


async def held_at(server: Server, number: int) -> None:
    """Decode makes so many pieces, and no more."""
    await pieces_made(server, number)
    await asyncio.sleep(0.02)
    await pieces_made(server, number)


@held_or_not
@pytest.mark.usefixtures("few_unread")
async def test_decode_waits_for_a_client_that_does_not_read(
    server: Server, asked: dict[str, Any]
) -> None:
    job = submit(server, **asked)
    await held_at(server, UNREAD)
    stream = job.outputs.pieces(1)
    for number in (1, 2):
        await anext(stream)
        await held_at(server, UNREAD + number)
    rest = [piece async for piece in stream]
    assert len(rest) + 2 == server.engines["d0"].num_pieces
    assert sum(job.num_tokens.values()) == 16


@pytest.mark.parametrize("token_ids", [(), (1,), (1, 2), tuple(range(UNREAD))], ids=len)
@pytest.mark.usefixtures("few_unread")
async def test_there_is_room_for_so_many_tokens_in_pieces_of_any_size(
    token_ids: tuple[int, ...],
) -> None:
    outputs = Outputs()
    fits = UNREAD // (len(token_ids) or 1)
    for _ in range(fits):
        await asyncio.wait_for(outputs.room(), PATIENCE_S)
        outputs.put((0, Delta("a", token_ids)))
    room = asyncio.create_task(outputs.room())
    await asyncio.sleep(0)
    assert not room.done()
    await anext(outputs.pieces(1))
    await asyncio.wait_for(room, PATIENCE_S)


@pytest.mark.usefixtures("few_unread")
async def test_choices_wait_together_for_a_client_that_does_not_read(server: Server) -> None:
    job = submit(server, num_choices=3, seed=1)
    await until(lambda: server.num_calls("decode") == 3)
    await asyncio.sleep(0.02)
    made = server.engines["d0"].num_pieces
    assert UNREAD <= made <= UNREAD + 2, "each has at most one piece in its hands"
    texts = ["", "", ""]
    async for leg, delta in job.outputs.pieces(1):
        texts[leg] += delta.text
    assert texts == [answer(TEXT, seed=1 + leg) for leg in range(3)]


@held_or_not
@pytest.mark.usefixtures("few_unread")
async def test_a_whole_answer_waits_for_nobody(server: Server, asked: dict[str, Any]) -> None:
    job = submit(server, stream=False, num_choices=2, **asked)
    await until(lambda: server.core.num_open == 0 and job.timeline.get("end"))
    answers = [piece async for piece in job.outputs.pieces(1)]
    assert len(answers) == (2 if asked else 32)


@pytest.mark.usefixtures("few_unread")
async def test_a_request_that_is_withdrawn_while_it_waits_leaves_nothing(server: Server) -> None:
    job = submit(server)
    await held_at(server, UNREAD)
    server.driver.cancel(job)
    await server.idle()
    assert len([piece async for piece in job.outputs.pieces(1)]) == UNREAD


@pytest.mark.parametrize(
    ("limits", "code"), [({"request_timeout_s": 0.1}, "timed_out"), ({}, None)]
)
@pytest.mark.usefixtures("few_unread")
async def test_what_ends_a_request_that_waits_is_said_after_its_pieces(
    serve: Serve, limits: dict[str, float], code: str | None
) -> None:
    server = await serve(limits=limits)
    job = submit(server)
    await held_at(server, UNREAD)
    if code is None:
        code = "worker_lost"
        server.lose("d0")
    await server.idle()
    stream = job.outputs.pieces(1)
    for _ in range(UNREAD):
        await anext(stream)
    with pytest.raises(ApiError) as error:
        await anext(stream)
    assert error.value.code == code


async def stalled(server: Server, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client that reads nothing of an answer that is larger than what the system buffers."""
    engine = server.engines["d0"]
    decode = engine.decode

    async def decode_much(prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        async for delta in decode(prompt, handle):
            yield replace(delta, text=delta.text + "x" * (2 << 20))

    monkeypatch.setattr(engine, "decode", decode_much)
    monkeypatch.setattr(jobs, "MAX_UNREAD", 2)
    client = await server.connect(body(TEXT, stream=True))
    await until(lambda: engine.num_pieces)
    number = 0
    while number < engine.num_pieces:  # until it makes no more
        number = engine.num_pieces
        await asyncio.sleep(0.1)
    assert number < 16
    return client


async def test_a_client_that_reads_on_gets_the_rest(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await stalled(server, monkeypatch)
    said = b""
    while not said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        read = await asyncio.wait_for(client.reader.read(1 << 20), PATIENCE_S)
        assert read, "the stream broke off"
        said += read.replace(b"x", b"")
    assert said.count(b'"content":" w') == 16
    await client.leave()


async def test_a_client_that_leaves_instead_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await stalled(server, monkeypatch)
    await client.leave()
    await server.idle()
    assert server.engines["d0"].num_pieces < 16


# KV caches that nobody decodes --------------------------------------------------------------------


def after_prefill(server: Server, name: str, then: Callable[[], None], after: int = 0) -> None:
    """Do this when the engine has prefilled; or when the loop has turned so often since."""
    engine = server.engines[name]
    prefill, loop = engine.prefill, asyncio.get_running_loop()

    def turn(number: int) -> None:
        if number == 0:
            then()
        else:
            loop.call_soon(turn, number - 1)

    async def prefill_and_go_on(prompt: Prompt, coming: Collection[int]) -> Prefilled:
        made = await prefill(prompt, coming)
        turn(after)
        return made

    engine.prefill = prefill_and_go_on  # type: ignore[method-assign]


def withdraw_all(server: Server) -> None:
    for job in server.driver._jobs.values():
        server.driver.cancel(job)
    server.driver._flush()


@pytest.mark.parametrize("error", [EngineError("no", 400), EngineError("no", 422)])
@streamed_or_not
async def test_a_kv_cache_that_decode_refuses_is_given_back(
    server: Server, error: EngineError, stream: bool
) -> None:
    server.engines["d0"].failures["decode"].append(error)
    error_of(await server.ask(PICTURE, stream=stream), 400)
    await server.idle()
    assert server.fabric.kv == {}
    assert server.num_calls("release") == 1


async def test_a_kv_cache_that_was_pulled_is_not_given_back(server: Server) -> None:
    server.hold("decode", permits=2)
    task = asyncio.create_task(server.stream(PICTURE))
    await pieces_made(server, 2)
    server.engines["d0"].failures["decode"].append(EngineError("no", 400))
    server.release()
    assert [error["message"] for error in (await task).errors] == ["no"]
    await server.idle()
    assert server.num_calls("release") == 0


@streamed_or_not
async def test_a_kv_cache_whose_decode_is_tried_again_is_not_given_back(
    server: Server, stream: bool
) -> None:
    server.engines["d0"].failures["decode"].append(EngineError("the engine failed", 500))
    assert await answer_to(server, PICTURE, stream) == ANSWER
    await server.idle()
    assert server.num_calls("release") == 0


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("after", range(1, 6))
async def test_a_client_that_leaves_around_the_end_of_prefill_leaves_no_kv_cache(
    server: Server, after: int, num_choices: int
) -> None:
    after_prefill(server, "p0", lambda: withdraw_all(server), after)
    server.hold("decode")
    job = submit(server, num_choices=num_choices)
    assert [piece async for piece in job.outputs.pieces(1)] == []
    await server.idle()
    assert server.fabric.kv == {}


async def test_a_client_that_leaves_between_prefill_and_decode_has_its_kv_cache_given_back(
    server: Server,
) -> None:
    after_prefill(server, "p0", lambda: server.driver.cancel(job))
    job = submit(server)
    await server.idle()
    assert (server.num_calls("prefill"), server.num_calls("decode")) == (1, 0)
    assert (server.num_calls("release"), server.fabric.kv) == (1, {})


@pytest.mark.parametrize("others", [1, 2])
async def test_the_kv_caches_of_the_other_legs_are_given_back_when_one_fails(
    server: Server, others: int
) -> None:
    engine, number = server.engines["p0"], count(0)
    prefill = engine.prefill

    async def refuse_the_last(prompt: Prompt, coming: Collection[int]) -> Prefilled:
        if next(number) < others:
            return await prefill(prompt, coming)
        await asyncio.sleep(0)  # it ends in the same instant
        raise EngineError("no", 400)

    engine.prefill = refuse_the_last  # type: ignore[method-assign]
    error_of(await server.ask(TEXT, n=others + 1), 400)
    await server.idle()
    assert server.num_calls("decode") == 0
    assert (server.num_calls("release"), server.fabric.kv) == (others, {})


@streamed_or_not
async def test_a_kv_cache_that_was_left_over_is_given_back_at_the_end(
    server: Server, stream: bool
) -> None:
    """There was no decode engine when it was ready."""
    server.hold("prefill")
    task = asyncio.create_task(answer_to(server, TEXT, stream))
    await server.working("prefill")
    server.lose("d0")
    server.release()
    await until(lambda: server.core.queue_lengths()[Stage.PREFILL], "the return to the queue")
    assert len(server.fabric.kv) == 1
    server.add("d1")
    assert await task == answer(TEXT)
    await server.idle()
    assert (server.num_calls("release"), server.fabric.kv) == (1, {})


async def test_without_a_decode_engine_no_kv_cache_is_given_back(server: Server) -> None:
    def lose_decode() -> None:
        server.driver.cancel(job)
        server.lose("d0")

    after_prefill(server, "p0", lose_decode)
    job = submit(server)
    await server.idle()
    assert server.num_calls("release") == 0
    assert len(server.fabric.kv) == 1, "it ends with its lease"


@pytest.mark.parametrize("busy", ["d0", "d1"])
async def test_the_decode_engine_with_fewest_calls_gives_it_back(serve: Serve, busy: str) -> None:
    server = await serve(["e0", "p0", busy])
    server.hold("decode")
    tasks = [asyncio.create_task(server.ask(TEXT)) for _ in range(2)]
    await until(lambda: server.num_calls("decode") == 2)
    idle = server.add({"d0": "d1", "d1": "d0"}[busy])
    after_prefill(server, "p0", lambda: withdraw(server, "r"))
    submit(server)
    await until(lambda: server.num_calls("release") == 1)
    assert idle.calls["release"] == 1
    server.release()
    assert [answer_of(await task) for task in tasks] == [answer(TEXT)] * 2


def withdraw(server: Server, name: str) -> None:
    server.driver.cancel(server.driver._jobs[RequestId(name)])


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "is cut short"])
async def test_a_release_that_does_not_work_harms_nobody(server: Server, fails: bool) -> None:
    decoder = server.engines["d0"]
    decoder.failures["decode"].append(EngineError("no", 400))
    if fails:
        decoder.failures["release"].append(EngineError("the engine failed", 500))
    else:
        server.hold("release")
    error_of(await server.ask(TEXT), 400)
    if not fails:
        await server.working("release")
        server.lose("d0")
        server.add("d0")
    await server.idle()
    assert answer_of(await server.ask(TEXT)) == answer(TEXT)


async def test_closing_waits_for_no_release(server: Server) -> None:
    server.hold("release")
    server.engines["d0"].failures["decode"].append(EngineError("no", 400))
    error_of(await server.ask(TEXT), 400)
    await server.working("release")
    await server.driver.close()
    await server.idle()


# What is said of an error -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "level"), [(EngineError("no", 400), "INFO"), (EngineError("broken", 500), "WARNING")]
)
async def test_only_errors_of_ours_are_worth_a_warning(
    server: Server, caplog: pytest.LogCaptureFixture, error: EngineError, level: str
) -> None:
    caplog.set_level("INFO", "easerve.driver")
    server.engines["p0"].failures["prefill"].append(error)
    await server.ask(TEXT)
    found = [record for record in caplog.records if record.name == "easerve.driver"]
    assert [record.levelname for record in found] == [level]
    assert str(error) in found[0].getMessage()


@pytest.mark.parametrize("within", [False, True], ids=["at once", "within a stream"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_long_text_of_an_engine_reaches_the_client_as_one_bounded_line(
    serve: Serve, tmp_path: Path, stream: bool, within: bool
) -> None:
    server = await serve(["e0", "p0"])
    text = "no such\n  grammar\n" * 1000
    async with stand_in(tmp_path / "s") as vllm:
        refusal = {"error": {"message": text, "code": 400}}
        vllm.answer = streams(refusal) if within else fails(400, text)
        engine = VllmEngine(WorkerId("d0"), Stage.DECODE, tmp_path / "s", "tiny")
        server.driver.add_engine(engine)
        try:
            message = error_of(await server.ask(TEXT, stream=stream), 400)["message"]
            await server.idle()
        finally:
            await engine.close()
    assert message.startswith("no such grammar no such grammar")
    assert message.splitlines() == [message]
    assert len(message) <= MAX_MESSAGE + len("…")
    assert [path for path, _ in vllm.requests] == [GENERATE] * 2, "decode and release"


# Headers ------------------------------------------------------------------------------------------


async def test_the_headers_of_a_stream_wait_for_its_first_token(server: Server) -> None:
    server.hold("decode")
    client = await server.connect(body(PICTURE, stream=True))
    await server.working("decode")
    head = asyncio.create_task(client.reader.readuntil(b"\r\n\r\n"))
    await asyncio.sleep(0.01)
    assert not head.done()
    server.release()
    assert (await head).startswith(b"HTTP/1.1 200 ")
    await client.leave()


async def test_the_first_token_does_not_wait_for_the_second(server: Server) -> None:
    server.hold("decode", permits=1)
    client = await server.connect(body(PICTURE, stream=True))
    head = await asyncio.wait_for(client.reader.readuntil(b'"content":" w'), 5)
    assert head.startswith(b"HTTP/1.1 200 ")
    await client.leave()


# Engines are lost ---------------------------------------------------------------------------------

STAGE_CALLS = ["encode", "prefill", "decode"]


@pytest.mark.parametrize("call", STAGE_CALLS)
@streamed_or_not
async def test_the_work_of_a_lost_engine_moves_to_another(
    serve: Serve, call: str, stream: bool
) -> None:
    server = await serve(TWO_OF_EACH)
    server.hold(call)
    task = asyncio.create_task(answer_to(server, PICTURE, stream))
    lost = await server.working(call)
    server.lose(lost)
    await until(lambda: not server.engines[lost].running, "the end of the lost engine's work")
    server.release()
    assert await task == ANSWER
    assert server.engines[lost].calls[call] == 1


@pytest.mark.parametrize("call", STAGE_CALLS)
async def test_without_another_engine_the_work_is_given_up_after_a_while(
    serve: Serve, call: str
) -> None:
    server = await serve(limits={"worker_wait_s": 0.05})
    server.hold(call)
    task = asyncio.create_task(server.ask(PICTURE))
    server.lose(await server.working(call))
    assert error_of(await task, 503)["code"] == "no_worker"


@pytest.mark.parametrize("call", STAGE_CALLS)
@streamed_or_not
async def test_work_waits_for_an_engine_that_comes_back(
    server: Server, call: str, stream: bool
) -> None:
    server.hold(call)
    task = asyncio.create_task(answer_to(server, PICTURE, stream))
    lost = await server.working(call)
    server.lose(lost)
    await until(lambda: sum(server.core.queue_lengths().values()), "the return to the queue")
    server.add(lost)
    assert await task == ANSWER


async def test_an_engine_may_come_back_before_the_lost_one_has_rendered(server: Server) -> None:
    server.hold("render")
    task = asyncio.create_task(server.ask(TEXT))
    lost = server.engines[await server.working("render")]
    server.lose("p0")
    server.add("p0")
    lost.permits["render"].release()
    assert answer_of(await task) == answer(TEXT)
    assert not any(server.driver._rendering.values())


async def test_what_a_lost_engine_still_says_is_not_passed_on(server: Server) -> None:
    server.hold("decode")
    task = asyncio.create_task(server.stream(PICTURE))
    lost = server.engines[await server.working("decode")]
    server.driver.lose_engine(WorkerId("d0"))  # its answer is on the way
    server.release()
    await until(lambda: server.core.queue_lengths()[Stage.PREFILL], "the return to the queue")
    await until(lambda: not lost.running)
    server.add("d1")
    streamed = await task
    assert streamed.text == ANSWER
    assert streamed.errors == []


async def test_an_engine_lost_in_the_middle_of_a_stream_ends_it_with_an_error(
    serve: Serve,
) -> None:
    server = await serve(TWO_OF_EACH)
    server.hold("decode", permits=2)
    task = asyncio.create_task(server.stream(PICTURE))
    await pieces_made(server, 2)
    server.lose("d0")
    streamed = await task
    assert [error["code"] for error in streamed.errors] == ["worker_lost"]
    assert streamed.num_done == 1


@every_call
async def test_an_engine_that_fails_and_is_not_healthy_is_given_up(
    serve: Serve, name: str, call: str, content: Content
) -> None:
    server = await serve(TWO_OF_EACH)
    server.engines[name].dead = True
    assert answer_of(await server.ask(content)) == expected(content)
    assert WorkerId(name) not in {engine.worker_id for engine in server.driver.engines()}


async def test_an_engine_that_does_not_say_how_it_is_is_kept(server: Server) -> None:
    async def silent() -> None:
        return None

    server.engines["p0"].health = silent  # type: ignore[method-assign]
    server.engines["p0"].failures["prefill"].append(EngineError("connection lost"))
    assert answer_of(await server.ask(PICTURE)) == ANSWER
    assert len(server.driver.engines()) == 3


async def test_an_answer_of_one_token_is_not_given_twice_when_its_engine_is_lost(
    serve: Serve,
) -> None:
    server = await serve(["e0", "p0", "p1", "d0"])
    engine = server.engines["p0"]
    prefill = engine.prefill

    async def lost_with_its_answer(prompt: Prompt, coming: Collection[int]) -> Prefilled:
        made = await prefill(prompt, coming)
        loop = asyncio.get_running_loop()
        loop.call_soon(server.driver.lose_engine, WorkerId("p0"))
        return made

    engine.prefill = lost_with_its_answer  # type: ignore[method-assign]
    response = await server.ask(TEXT, max_tokens=1)
    assert answer_of(response) == answer_words(TEXT)[0]
    assert response.json()["usage"]["completion_tokens"] == 1


async def test_decoded_pictures_are_bounded_in_all(serve: Serve) -> None:
    server = await serve(limits={"max_decoded": 300})  # one of them is some 150 bytes
    server.hold("encode")
    held = [asyncio.create_task(server.ask(PICTURE)) for _ in range(2)]
    await until(lambda: server.num_waiting == len(held) or any(t.done() for t in held))
    responses = [await server.ask(ask_about("which?", GREEN)) for _ in range(2)]
    assert {response.status_code for response in responses} == {429}
    server.release()
    assert ANSWER in [answer_of(r) for r in await asyncio.gather(*held) if r.status_code == 200]
    assert answer_of(await server.ask(PICTURE)) == ANSWER


@pytest.mark.parametrize("name", ["e0", "p0", "d0"])
async def test_a_new_request_without_an_engine_of_a_stage_is_refused_at_once(
    server: Server, name: str
) -> None:
    server.lose(name)
    response = await server.ask(PICTURE)
    error = error_of(response, 503)
    assert error["type"] == "server_error"
    assert int(response.headers["retry-after"]) > 0
    assert server.num_calls("render") == 0


# Bounds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{"max_requests": 2}, {"max_held": 2100}])
@streamed_or_not
async def test_more_than_the_server_may_hold_is_refused(
    serve: Serve, limits: dict[str, int], stream: bool
) -> None:
    server = await serve(limits=limits)
    text = "x" * 900
    server.hold("prefill")
    tasks = [asyncio.create_task(server.ask(text)) for _ in range(2)]
    await until(lambda: server.core.num_open == 2)
    response = await server.ask(text, stream=stream)
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert int(response.headers["retry-after"]) > 0
    server.release()
    assert [answer_of(await task) for task in tasks] == [answer(text)] * 2
    assert answer_of(await server.ask(text)) == answer(text)


@pytest.mark.parametrize("call", ["render", *STAGE_CALLS])
async def test_a_request_that_takes_too_long_is_ended(serve: Serve, call: str) -> None:
    server = await serve(limits={"request_timeout_s": 0.05})
    server.hold(call)
    assert error_of(await server.ask(PICTURE), 504)["code"] == "timed_out"
    await server.idle()


@pytest.mark.parametrize("call", ["render", *STAGE_CALLS])
async def test_closing_ends_what_is_open(server: Server, call: str) -> None:
    server.hold(call)
    task = asyncio.create_task(server.ask(PICTURE))
    await server.working(call)
    await server.driver.close()
    assert error_of(await task, 503)["code"] == "worker_lost"
    await server.idle()


# Clients leave ------------------------------------------------------------------------------------


@every_call
@streamed_or_not
async def test_nothing_runs_for_a_client_that_has_left(
    server: Server, name: str, call: str, content: Content, stream: bool
) -> None:
    server.hold(call)
    client = await server.connect(body(content, stream=stream))
    assert await server.working(call) == name
    await client.leave()
    await server.idle()
    assert server.core.num_open == 0


@streamed_or_not
async def test_a_client_may_leave_in_the_middle_of_the_answer(server: Server, stream: bool) -> None:
    server.hold("decode", permits=2)
    client = await server.connect(body(PICTURE, stream=stream))
    await pieces_made(server, 2)
    await client.leave()
    await server.idle()


async def test_a_client_may_leave_in_the_instant_of_its_request(server: Server) -> None:
    job = Job(RequestId("r"), body(TEXT), [], num_bytes=1)
    server.driver.submit(job)
    server.driver.cancel(job)
    assert [piece async for piece in job.outputs.pieces(1)] == []
    assert server.num_calls("render") == 0


@streamed_or_not
async def test_clients_may_leave_at_any_time(serve: Serve, stream: bool) -> None:
    server = await serve(costs=LinearCosts(0.001, 0.0, 0.001, 0.0, 0.0001))
    for number in range(40):
        client = await server.connect(body(PICTURE, stream=stream))
        for _ in range(number):
            await asyncio.sleep(0)
        await client.leave()
    await server.idle()


@pytest.mark.parametrize("call", STAGE_CALLS)
async def test_a_client_that_leaves_does_not_touch_another(serve: Serve, call: str) -> None:
    server = await serve(policy={"when": "none"})
    server.hold(call)
    client = await server.connect(body(ask_about("which?", GREEN)))
    await server.working(call)
    task = asyncio.create_task(server.ask(PICTURE))
    await until(lambda: server.num_calls(call) == 2)
    await client.leave()
    await until(lambda: server.core.num_open == 1)
    server.release()
    assert answer_of(await task) == ANSWER


# Several choices and prompts ----------------------------------------------------------------------


async def test_an_answer_ends_with_the_last_of_its_jobs() -> None:
    outputs = Outputs()
    said: list[tuple[int, Delta]] = [(0, Delta("a")), (1, Delta("b")), (0, Delta("c"))]
    for output in (said[0], None, said[1], None, said[2], None):
        outputs.put(output)
    assert [piece async for piece in outputs.pieces(3)] == said


async def test_an_answer_ends_with_the_first_error_of_its_jobs() -> None:
    outputs = Outputs()
    for output in ((0, Delta("a")), None, ended(Reason.DECODE_FAILED), ended(Reason.TIMED_OUT)):
        outputs.put(output)
    stream = outputs.pieces(3)
    assert await anext(stream) == (0, Delta("a"))
    with pytest.raises(ApiError) as error:
        await anext(stream)
    assert error.value.code == "decode_failed"


async def test_a_prompt_that_is_answered_early_does_not_end_the_answer(serve: Serve) -> None:
    server = await serve(["e0", "p0", "d0", "d1"])
    slow = server.engines["d1"]
    slow.permits["decode"] = asyncio.Semaphore(0)
    task = asyncio.create_task(server.stream_completion(["a", "b"]))
    await until(lambda: server.core.num_open == 1 and slow.running)
    server.release()
    assert (await task).texts == [answer("a"), answer("b")]


@streamed_or_not
async def test_a_leg_that_fails_once_does_not_touch_the_others(
    server: Server, stream: bool
) -> None:
    server.engines["d0"].failures["decode"].append(EngineError("the engine failed", 500))
    expected = [answer("which?", RED, seed=seed) for seed in (1, 2, 3)]
    if stream:
        streamed = await server.stream(PICTURE, n=3, seed=1)
        assert (streamed.texts, streamed.errors) == (expected, [])
    else:
        assert answers_of(await server.ask(PICTURE, n=3, seed=1)) == expected
    assert (server.num_calls("prefill"), server.num_calls("decode")) == (4, 4)
    assert max(server.fabric.uses.values()) == 1


@streamed_or_not
async def test_a_leg_that_cannot_be_helped_ends_its_request_with_one_error(
    server: Server, stream: bool
) -> None:
    server.engines["d0"].failures["decode"] = [EngineError("no", 400)]
    response = await server.ask(PICTURE, n=3, stream=stream)
    assert error_of(response, 400)["message"] == "no"
    await server.idle()
    assert server.fabric.kv == {}


@pytest.mark.parametrize("call", ["render", "prefill", "decode"])
@streamed_or_not
async def test_one_prompt_that_fails_ends_all_of_them_with_one_error(
    server: Server, call: str, stream: bool
) -> None:
    engine = server.engines["d0" if call == "decode" else "p0"]
    server.hold("decode")
    engine.failures[call].append(EngineError("no", 400))
    response = await server.complete(["a", "b", "c"], n=2, stream=stream)
    assert error_of(response, 400)["message"] == "no"
    await server.idle()
    assert server.core.num_open == 0


async def test_one_prompt_that_fails_in_mid_stream_ends_it_with_one_error(server: Server) -> None:
    server.hold("decode", permits=2)
    task = asyncio.create_task(server.stream_completion(["a", "b", "c"]))
    await pieces_made(server, 2)
    server.engines["d0"].failures["decode"] = [EngineError("a secret of ours", 500)] * 9
    server.release()
    streamed = await task
    assert [error["code"] for error in streamed.errors] == ["decode_failed"]
    assert "error" in streamed.events[-1]
    assert streamed.num_done == 1
    await server.idle()


@pytest.mark.parametrize("permits", [0, 4])
@streamed_or_not
async def test_a_client_may_leave_in_the_middle_of_several_choices(
    server: Server, stream: bool, permits: int
) -> None:
    server.hold("decode", permits)
    client = await server.connect(body(PICTURE, n=3, stream=stream))
    await until(lambda: server.num_calls("decode") == 3)
    await pieces_made(server, permits)
    await client.leave()
    await server.idle()
    assert server.core.num_open == 0


@streamed_or_not
async def test_a_client_may_leave_in_the_middle_of_several_prompts(
    server: Server, stream: bool
) -> None:
    server.hold("decode", permits=4)
    request = {"model": MODEL, "prompt": ["a", "b", "c"], "n": 2, "stream": stream}
    client = await server.connect(request, COMPLETIONS)
    await until(lambda: server.num_calls("decode") == 6)
    await client.leave()
    await server.idle()
    assert server.core.num_open == 0


@streamed_or_not
async def test_prompts_that_are_more_than_the_server_may_hold_are_refused_together(
    serve: Serve, stream: bool
) -> None:
    server = await serve(limits={"max_requests": 2})
    response = await server.complete(["a", "b", "c"], stream=stream)
    assert error_of(response, 429)["code"] == "overloaded"
    await server.idle()
    assert answers_of(await server.complete(["a", "b"])) == [answer("a"), answer("b")]


# Formats and tools --------------------------------------------------------------------------------

TOOLS = {"tools": [{"type": "function", "function": {"name": "look"}}]}
FORMAT = {"structured_outputs": {"regex": "("}}


@pytest.mark.parametrize(
    ("asked", "status", "code", "num_calls"),
    [
        ({}, 500, "decode_failed", 3),
        (TOOLS, 500, "decode_failed", 3),
        (FORMAT, 400, None, 1),
        (TOOLS | FORMAT, 400, None, 1),
    ],
    ids=["plain", "tools", "format", "tools and format"],
)
@streamed_or_not
async def test_a_format_that_an_engine_cannot_apply_is_the_clients_fault_at_once(
    server: Server,
    asked: dict[str, Any],
    status: int,
    code: str | None,
    num_calls: int,
    stream: bool,
) -> None:
    server.engines["d0"].failures["decode"] = [EngineError("a secret of ours", 500)] * 3
    response = await server.ask(TEXT, **asked, stream=stream)
    error = error_of(response, status)
    assert error["code"] == code
    assert ("format" in error["message"]) is (status == 400)
    assert "secret" not in response.text
    assert server.num_calls("decode") == num_calls
    await server.idle()
    assert server.num_calls("release") == (status == 400)


@pytest.mark.parametrize("status", [503, None])
@streamed_or_not
async def test_a_format_is_not_to_blame_for_an_engine_that_is_unwell(
    server: Server, status: int | None, stream: bool
) -> None:
    server.engines["d0"].failures["decode"].append(EngineError("busy", status))
    response = await server.ask(TEXT, **FORMAT, stream=stream)
    assert response.status_code == 200
    assert server.num_calls("decode") == 2


async def test_a_format_is_not_to_blame_for_a_whole_answer_that_breaks_in_the_middle(
    server: Server,
) -> None:
    server.hold("decode", permits=2)
    task = asyncio.create_task(server.ask(TEXT, **FORMAT))
    await pieces_made(server, 2)
    server.engines["d0"].failures["decode"].append(EngineError("the engine failed", 500))
    server.release()
    assert answer_of(await task) == answer(TEXT)


@streamed_or_not
async def test_a_format_is_not_to_blame_for_the_end_of_decode(serve: Serve, stream: bool) -> None:
    server = await serve(["e0", "p0", "d0", "d1"])
    engine = server.engines["d0"]

    async def gone() -> bool:
        return False

    engine.health = gone  # type: ignore[method-assign]
    engine.failures["decode"].append(EngineError("the engine failed", 500))
    task = asyncio.create_task(server.ask(TEXT, **FORMAT, stream=stream))
    assert (await task).status_code == 200
    assert server.engines["d1"].calls["decode"] == 1


@pytest.mark.parametrize("known", [True, False], ids=["known", "not known yet"])
@streamed_or_not
async def test_a_format_is_not_to_blame_for_the_end_of_prefill(
    serve: Serve, known: bool, stream: bool
) -> None:
    """Decode cannot pull a KV cache from an engine that is gone."""
    server = await serve(["e0", "p0", "p1", "d0"])
    server.hold("decode")
    task = asyncio.create_task(server.ask(TEXT, **FORMAT, stream=stream))
    await server.working("decode")
    (holder,) = [name for name in ("p0", "p1") if server.engines[name].calls["prefill"]]
    if known:
        server.lose(holder)
    server.engines[holder].dead = True
    server.engines["d0"].failures["decode"].append(EngineError("the engine failed", 500))
    server.release()
    assert (await task).status_code == 200
    assert (server.num_calls("prefill"), server.num_calls("decode")) == (2, 2)


@pytest.mark.parametrize("call", ["encode", "prefill"])
async def test_a_format_is_not_to_blame_for_another_stage(server: Server, call: str) -> None:
    name = {"encode": "e0", "prefill": "p0"}[call]
    server.engines[name].failures[call] = [EngineError("broken", 500)] * 3
    response = await server.ask(PICTURE, **FORMAT)
    assert error_of(response, 500)["code"] == f"{call}_failed"


@streamed_or_not
async def test_a_decode_that_parses_begins_again_as_any_other(server: Server, stream: bool) -> None:
    server.engines["d0"].failures["decode"].append(EngineError("the engine failed", 500))
    response = await server.ask(PICTURE, **TOOLS, stream=stream)
    assert response.status_code == 200
    assert "tool_calls" in response.text
    assert (server.num_calls("prefill"), server.num_calls("decode")) == (2, 2)


# Load ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RandomCosts(LinearCosts):
    """A few milliseconds, never the same."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))

    def encode_s(self, num_items: int, num_tokens: int) -> float:
        return self.chance.uniform(0, 0.004)

    def prefill_s(self, num_tokens: int) -> float:
        return self.chance.uniform(0, 0.004)

    def step_s(self, num_running: int) -> float:
        return self.chance.choice([0.0, 0.0, 0.002])


LOCAL_TOO = (*TWO_OF_EACH, "l0", "l1")


@pytest.mark.parametrize(
    ("engines", "share"),
    [(("e0", "p0", "d0"), 1.0), (LOCAL_TOO, 0.5)],
    ids=["1e1p1d", "2e2l2p2d"],
)
@pytest.mark.parametrize("when", ["none", "slack"])
@pytest.mark.long
async def test_under_load_every_answer_is_right_and_nothing_is_left(
    serve: Serve, engines: Sequence[str], share: float, when: str
) -> None:
    policy = {"when": when, "remote_share": share}
    server = await serve(engines, costs=RandomCosts(), policy=policy)
    colors = [RED, GREEN, BLUE, *map(picture, ("black", "white", "yellow"))]
    chance = random.Random(1)
    slots = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        urls = chance.choices(colors, k=chance.randrange(4))
        text = f"question {number}"
        async with slots:
            got = await answer_to(server, ask_about(text, *urls), stream=chance.random() < 0.5)
        assert got == answer(text, *urls)

    await asyncio.gather(*map(one, range(200)))
    await server.idle()
    assert server.leftovers() == {}
    assert server.fabric.kv == {}
    assert all(sum(engine.calls.values()) for engine in server.engines.values())
