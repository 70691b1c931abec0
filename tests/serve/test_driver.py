"""Failures, retries, cancellation and load, seen from the client and from what is left behind."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from easerve.costs.linear import LinearCosts
from easerve.engines import fake
from easerve.engines.protocol import Delta, EncodeCall, EngineError, Prefilled, Prompt
from easerve.serve.driver import Job, Output, pieces
from easerve.serve.errors import ApiError, ended
from easerve.types import Reason, RequestId, Stage, WorkerId

from .conftest import Serve
from .server import (
    COMPLETIONS,
    MODEL,
    TWO_OF_EACH,
    Content,
    Server,
    answer,
    answer_of,
    answer_words,
    answers_of,
    ask_about,
    body,
    error_of,
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
    ("urls", "num_lost"),
    [([RED], 1), ([RED, GREEN], 1), ([RED, GREEN], 2), ([RED, RED], 2)],
    ids=["the one", "one of two", "both", "both of a pair"],
)
async def test_missing_embeddings_are_encoded_exactly_once_more(
    server: Server, monkeypatch: pytest.MonkeyPatch, urls: list[str], num_lost: int
) -> None:
    publish, number = fake.publish, count(1)

    def lose_the_first(call: EncodeCall) -> None:
        if next(number) > num_lost:
            publish(call)

    monkeypatch.setattr(fake, "publish", lose_the_first)
    response = await server.ask(ask_about("which?", *urls))
    assert answer_of(response) == answer("which?", *urls)
    assert server.engines["e0"].encode_calls == [1] * 2 * len(urls)
    assert server.num_calls("prefill") == 2


async def test_an_embedding_that_never_comes_is_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "publish", lambda _: None)
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
    await two_tokens_sent(server)
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


async def test_a_whole_answer_that_breaks_after_the_first_token_is_an_error(
    server: Server,
) -> None:
    server.hold("decode", permits=2)
    task = asyncio.create_task(server.ask(PICTURE))
    await two_tokens_sent(server)
    server.engines["d0"].failures["decode"].append(EngineError("the engine failed", 500))
    server.release()
    assert error_of(await task, 500)["code"] == "decode_failed"
    assert server.num_calls("decode") == 1


async def two_tokens_sent(server: Server) -> None:
    def sent() -> bool:
        return [job.num_output_tokens for job in server.driver._jobs.values()] == [2]

    await until(sent, "the second token")


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
    await two_tokens_sent(server)
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

    async def lost_with_its_answer(prompt: Prompt, folder: Path | None) -> Prefilled:
        made = await prefill(prompt, folder)
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
    await until(lambda: server.num_calls("encode") == len(held) or any(t.done() for t in held))
    responses = [await server.ask(ask_about("which?", GREEN)) for _ in range(2)]
    assert {response.status_code for response in responses} == {429}
    server.release()
    assert ANSWER in [answer_of(r) for r in await asyncio.gather(*held) if r.status_code == 200]
    assert answer_of(await server.ask(PICTURE)) == ANSWER


async def test_an_encoder_that_is_late_leaves_no_folder(server: Server) -> None:
    server.hold("encode")
    task = asyncio.create_task(server.ask(PICTURE))
    await server.working("encode")
    (folder,) = server.folder.iterdir()
    task.cancel()
    await until(lambda: not folder.exists(), "the end of the folder")
    with pytest.raises(FileNotFoundError):
        (folder / "late").touch()
    assert list(server.folder.iterdir()) == []


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
    assert list(server.folder.iterdir()) == []


@streamed_or_not
async def test_a_client_may_leave_in_the_middle_of_the_answer(server: Server, stream: bool) -> None:
    server.hold("decode", permits=2)
    client = await server.connect(body(PICTURE, stream=stream))
    await two_tokens_sent(server)
    await client.leave()
    await server.idle()


async def test_a_client_may_leave_in_the_instant_of_its_request(server: Server) -> None:
    job = Job(RequestId("r"), body(TEXT), [], num_bytes=1)
    server.driver.submit(job)
    server.driver.cancel(job)
    assert [piece async for piece in pieces(job.outputs, 1)] == []
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
async def test_a_client_that_leaves_does_not_touch_another(server: Server, call: str) -> None:
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
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    said: list[tuple[int, Delta]] = [(0, Delta("a")), (1, Delta("b")), (0, Delta("c"))]
    for output in (said[0], None, said[1], None, said[2], None):
        outputs.put_nowait(output)
    assert [piece async for piece in pieces(outputs, 3)] == said
    assert outputs.empty()


async def test_an_answer_ends_with_the_first_error_of_its_jobs() -> None:
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    for output in ((0, Delta("a")), None, ended(Reason.DECODE_FAILED), ended(Reason.TIMED_OUT)):
        outputs.put_nowait(output)
    stream = pieces(outputs, 3)
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
    await until(lambda: sum(job.num_output_tokens for job in server.driver._jobs.values()) == 2)
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
    (job,) = server.driver._jobs.values()
    await until(lambda: job.num_output_tokens == permits)
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
    ("asked", "status", "code"),
    [
        ({}, 500, "decode_failed"),
        (TOOLS, 500, "decode_failed"),
        (FORMAT, 400, None),
        (TOOLS | FORMAT, 400, None),
    ],
    ids=["plain", "tools", "format", "tools and format"],
)
@streamed_or_not
async def test_a_format_that_no_engine_can_apply_is_the_clients_fault(
    server: Server, asked: dict[str, Any], status: int, code: str | None, stream: bool
) -> None:
    server.engines["d0"].failures["decode"] = [EngineError("a secret of ours", 500)] * 3
    response = await server.ask(TEXT, **asked, stream=stream)
    error = error_of(response, status)
    assert error["code"] == code
    assert ("format" in error["message"]) is (status == 400)
    assert "secret" not in response.text
    assert server.num_calls("decode") == 3


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

    def decode_s(self, num_tokens: int) -> float:
        return self.chance.choice([0.0, 0.0, 0.002])


@pytest.mark.parametrize("engines", [("e0", "p0", "d0"), TWO_OF_EACH], ids=["1e1p1d", "2e2p2d"])
async def test_under_load_every_answer_is_right_and_nothing_is_left(
    serve: Serve, engines: Sequence[str]
) -> None:
    server = await serve(engines, costs=RandomCosts())
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
