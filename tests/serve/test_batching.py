"""Encode batches over the server: who shares a call, who an embedding, and what goes wrong."""

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from math import log2
from pathlib import Path
from typing import Any

import httpx
import pytest

from easerve.cli.deploy import recipe
from easerve.config import Deployment
from easerve.engines.protocol import EngineError, Prefilled, Prompt
from easerve.serve.decisions import DecisionLog, replay
from easerve.types import Stage

from .conftest import Serve
from .server import (
    MODEL,
    Client,
    Content,
    Server,
    answer,
    answer_of,
    ask_about,
    body,
    data_url,
    error_of,
    key,
    metrics_of,
    picture,
    pictures,
    until,
)

RED, GREEN, BLUE = picture("red"), picture("green"), picture("blue")
WAITING_RULES = ["greedy", "fixed", "fill", "gap", "slack"]
FULL = 16
GREEDY = {"when": "greedy", "max_batch_items": FULL}
PART = "messages[0].content[{}].image_url.url"

Asked = asyncio.Task[httpx.Response]


def ask(server: Server, text: str, *urls: str, **parameters: Any) -> Asked:
    return asyncio.create_task(server.ask(ask_about(text, *urls), **parameters))


async def waiting(server: Server, number: int) -> None:
    """Until so many requests wait for embeddings."""
    await until(lambda: server.num_waiting == number, f"{number} requests at Encode")


async def ask_while_busy(server: Server, urls: Sequence[str]) -> list[Asked]:
    """A request for each picture. All but the first come while the encoder works for the first."""
    server.hold("encode")
    first = ask(server, "which?", urls[0])
    await server.working("encode")
    rest = [ask(server, "which?", url) for url in urls[1:]]
    await waiting(server, len(urls))
    return [first, *rest]


async def one_batch(server: Server, urls: Sequence[str]) -> list[Asked]:
    """A request for each of as many pictures as fill a batch, which waits for a permit at e0."""
    (_, *tasks) = await ask_while_busy(server, [picture("white"), *urls])
    await until(lambda: server.encode_calls == [1, FULL], "the full batch")
    return tasks


async def assert_answers(tasks: Sequence[Asked], urls: Sequence[str]) -> None:
    answers = [answer_of(response) for response in await asyncio.gather(*tasks)]
    assert answers == [answer("which?", url) for url in urls]


# One call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", WAITING_RULES)
async def test_what_comes_while_the_encoder_is_busy_is_one_call(serve: Serve, when: str) -> None:
    server = await serve(policy={"when": when, "timeout_s": 0, "max_batch_items": FULL})
    urls = pictures(FULL)
    tasks = await ask_while_busy(server, urls)
    assert server.encode_calls == [1]
    server.release()
    await assert_answers(tasks, urls)
    assert server.encode_calls == [1, FULL - 1]


async def test_passed_through_every_picture_is_a_call_of_its_own(serve: Serve) -> None:
    server = await serve(policy={"when": "none"})
    urls = pictures(FULL)
    tasks = await ask_while_busy(server, urls)
    await until(lambda: server.encode_calls == [1] * FULL)
    server.release()
    await assert_answers(tasks, urls)


@pytest.mark.parametrize(
    ("run_ahead", "at_once"), [(0, [1]), (1, [1, 3]), (2, [1, 3, 3]), (3, [1, 3, 3])]
)
async def test_so_many_full_batches_go_to_a_busy_encoder_and_no_other(
    serve: Serve, run_ahead: int, at_once: list[int]
) -> None:
    server = await serve(policy={"when": "greedy", "max_batch_items": 3, "run_ahead": run_ahead})
    urls = pictures(9)
    tasks = await ask_while_busy(server, urls)
    await until(lambda: server.encode_calls == at_once)
    server.release()
    await assert_answers(tasks, urls)
    assert server.encode_calls == [1, 3, 3, 2]


async def test_a_batch_holds_no_more_tokens_than_its_engine_takes(serve: Serve) -> None:
    server = await serve(["p0", "d0"], policy={"when": "greedy"})
    server.add("e0", max_batch_tokens=3 * 4)
    urls = pictures(8)
    tasks = await ask_while_busy(server, urls)
    server.release()
    await assert_answers(tasks, urls)
    assert server.encode_calls == [1, 3, 3, 1]


async def test_a_batch_waits_for_its_window(serve: Serve) -> None:
    server = await serve(policy={"when": "fixed", "timeout_s": 1, "max_batch_items": 2})
    first = ask(server, "which?", RED)
    await waiting(server, 1)
    assert server.encode_calls == []
    await assert_answers([first, ask(server, "which?", GREEN)], [RED, GREEN])
    assert server.encode_calls == [2]


async def test_what_waits_for_company_is_sent_when_the_server_ends(serve: Serve) -> None:
    server = await serve(policy={"when": "fixed", "timeout_s": 1})
    tasks = [ask(server, "which?", url) for url in (RED, GREEN)]
    await waiting(server, 2)
    server.driver.drain()
    await assert_answers(tasks, [RED, GREEN])
    await assert_answers([ask(server, "which?", BLUE)], [BLUE])
    assert server.encode_calls == [2, 1]
    assert (await metrics_of(server))["easerve_encode_batches_total drain"] == 2


# One picture is at fault --------------------------------------------------------------------------


async def test_a_picture_that_cannot_be_decoded_costs_nobody_else(server: Server) -> None:
    urls = [*pictures(FULL - 1), data_url(b"no picture")]
    *good, bad = [ask(server, "which?", url) for url in urls]
    await assert_answers(good, urls[:-1])
    error = error_of(await bad, 400)
    assert error["param"] == PART.format(0)
    assert error["message"].startswith(f"{PART.format(0)}: ")
    assert max(server.engines["e0"].encoded.values()) == 1


@pytest.mark.parametrize("index", [0, 6, 15])
async def test_a_picture_that_the_encoder_refuses_is_found_by_halving(
    serve: Serve, index: int
) -> None:
    server = await serve(policy=GREEDY)
    urls = pictures(FULL)
    tasks = await one_batch(server, urls)
    encoder = server.engines["e0"]
    encoder.refused = {key(urls[index])}
    server.release()
    error = error_of(await tasks.pop(index), 400)
    assert error["param"] == PART.format(0)
    assert error["message"] == f"{PART.format(0)}: an item cannot be encoded"
    del urls[index]
    await assert_answers(tasks, urls)
    assert encoder.calls["encode"] - 1 <= 2 * log2(FULL) + 1
    assert encoder.encoded == Counter(map(key, [picture("white"), *urls]))


async def test_each_of_several_pictures_at_fault_is_found(serve: Serve) -> None:
    server = await serve(policy=GREEDY)
    urls = pictures(FULL)
    tasks = await one_batch(server, urls)
    server.engines["e0"].refused = {key(url) for url in urls[3:6]}
    server.release()
    for task in tasks[3:6]:
        assert error_of(await task, 400)["param"] == PART.format(0)
    await assert_answers(tasks[:3] + tasks[6:], urls[:3] + urls[6:])
    assert max(server.engines["e0"].encoded.values()) == 1


@pytest.mark.parametrize("when", ["none", "greedy"])
async def test_everybody_who_wants_a_refused_picture_is_told_of_his_own_part(
    serve: Serve, when: str
) -> None:
    server = await serve(policy={"when": when})
    server.engines["e0"].refused = {key(RED)}
    server.hold("encode")
    contents = [[RED], [GREEN, RED], [BLUE, GREEN, RED, RED], [BLUE, GREEN]]
    tasks = [ask(server, "which?", *urls) for urls in contents]
    await waiting(server, len(tasks))
    server.release()
    for index, task in enumerate(tasks[:3]):
        error = error_of(await task, 400)
        assert error["param"] == PART.format(index)
        assert error["message"].startswith(f"{PART.format(index)}: ")
    assert answer_of(await tasks[3]) == answer("which?", BLUE, GREEN)


async def test_a_refused_picture_does_not_touch_who_shares_another_one(server: Server) -> None:
    server.hold("decode")
    client = await server.connect(body(ask_about("which?", RED)))
    await server.working("decode")
    server.engines["e0"].refused = {key(GREEN)}
    error = error_of(await ask(server, "which?", RED, GREEN), 400)
    assert error["param"] == PART.format(1)
    await client.leave()
    await until(lambda: not server.core.num_open)
    metrics = await metrics_of(server)
    outcomes = [metrics[f"easerve_requests_total {name}"] for name in ("failed", "cancelled")]
    assert outcomes == [1, 1]


@pytest.mark.parametrize("max_retries", [1, 2])
async def test_a_picture_that_ends_its_engine_is_given_up_before_it_ends_them_all(
    serve: Serve, max_retries: int
) -> None:
    server = await serve(limits={"max_retries": max_retries}, policy=GREEDY)
    urls = pictures(FULL)
    tasks = await one_batch(server, urls)
    for name in ("e1", "e2", "e3"):
        server.add(name)
    for engine in server.engines.values():
        engine.deadly = {key(urls[6])}
    server.release()
    assert error_of(await tasks.pop(6), 503)["code"] == "worker_lost"
    del urls[6]
    await assert_answers(tasks, urls)
    dead = [name for name, engine in server.engines.items() if engine.dead]
    assert len(dead) == 1 + max_retries
    assert len(server.driver.engines()) == 6 - len(dead)
    assert server.encode_calls.count(FULL) == 1
    assert set(server.encode_calls) == {1, FULL}


async def test_what_an_engine_may_have_died_of_is_alone_at_another(serve: Serve) -> None:
    """Not even ahead of what that one is doing."""
    server = await serve(policy=GREEDY)
    urls = pictures(FULL)
    tasks = await one_batch(server, urls)
    others = [server.add(name) for name in ("e1", "e2", "e3")]
    for engine in others:
        engine.permits["encode"] = asyncio.Semaphore(0)
    server.engines["e0"].deadly = {key(urls[0])}
    for _ in range(2):
        server.engines["e0"].permits["encode"].release()
    await until(lambda: all(engine.encode_calls for engine in others), "a call at each")
    assert [engine.encode_calls for engine in others] == [[1]] * 3
    server.release()
    await assert_answers(tasks, urls)
    assert server.encode_calls == [1, FULL, *[1] * FULL]


async def test_an_engine_that_fails_a_shared_item_is_asked_for_its_health_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, asked = server.engines["e0"], []

    async def health() -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(encoder, "health", health)
    server.hold("encode")
    tasks = [ask(server, "which?", RED) for _ in range(5)]
    await waiting(server, 5)
    encoder.failures["encode"].append(EngineError("broken", 500))
    server.release()
    await assert_answers(tasks, [RED] * 5)
    assert len(asked) == 1


# One embedding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["none", "slack"])
async def test_a_picture_that_many_want_at_once_is_encoded_once(serve: Serve, when: str) -> None:
    server = await serve(policy={"when": when})
    server.hold("encode")
    tasks = [ask(server, f"question {number}", RED) for number in range(50)]
    await waiting(server, 50)
    server.release()
    answers = [answer_of(response) for response in await asyncio.gather(*tasks)]
    assert answers == [answer(f"question {number}", RED) for number in range(50)]
    assert server.encode_calls == [1]
    await server.idle()


async def clients_waiting(server: Server, number: int) -> list[Client]:
    """They want the red picture, which is being encoded for the first of them."""
    server.hold("encode")
    clients = [await server.connect(body(ask_about("which?", RED)))]
    await server.working("encode")
    clients += [await server.connect(body(ask_about("which?", RED))) for _ in range(number - 1)]
    await waiting(server, number)
    return clients


@pytest.mark.parametrize("leaving", [[0], [1, 3], [0, 1, 2, 3]], ids=str)
async def test_clients_that_leave_do_not_touch_who_shares_their_picture(
    server: Server, leaving: list[int]
) -> None:
    clients = await clients_waiting(server, 4)
    tasks = [ask(server, "which?", RED) for _ in range(3)]
    await waiting(server, 7)
    for index in leaving:
        await clients[index].leave()
    await waiting(server, 7 - len(leaving))
    late = ask(server, "which?", RED)
    await waiting(server, 8 - len(leaving))
    server.release()
    await assert_answers([*tasks, late], [RED] * 4)
    assert server.encode_calls == [1]
    for client in clients:
        await client.leave()
    await server.idle()


async def test_a_call_that_nobody_waits_for_any_more_is_ended(server: Server) -> None:
    for client in await clients_waiting(server, 4):
        await client.leave()
    await until(lambda: not server.engines["e0"].running, "the end of the call")
    await server.idle()


async def test_who_comes_while_another_one_has_the_embedding_needs_no_call(
    server: Server,
) -> None:
    """Nor that one any longer."""
    server.hold("decode")
    clients = []
    for number in range(1, 4):
        clients.append(await server.connect(body(ask_about("which?", RED))))
        await until(lambda number=number: server.num_calls("decode") == number)  # type: ignore[misc]
    server.hold("prefill")
    tasks = [ask(server, "which?", RED) for _ in range(2)]
    await until(lambda: server.num_calls("prefill") == 5)
    for client in clients:
        await client.leave()
    await until(lambda: server.core.num_open == 2)
    server.release()
    await assert_answers(tasks, [RED, RED])
    assert server.encode_calls == [1]


async def test_only_what_nobody_has_is_encoded(server: Server) -> None:
    server.hold("decode")
    tasks = [ask(server, "which?", RED)]
    await server.working("decode")
    server.hold("encode")
    tasks.append(ask(server, "which?", GREEN, RED))
    await waiting(server, 1)
    tasks.append(ask(server, "which?", RED, GREEN, BLUE))
    await waiting(server, 2)
    server.release()
    urls = [[RED], [GREEN, RED], [RED, GREEN, BLUE]]
    for task, asked in zip(tasks, urls, strict=True):
        assert answer_of(await task) == answer("which?", *asked)
    assert server.engines["e0"].encoded == Counter(map(key, (RED, GREEN, BLUE)))


async def test_a_call_is_not_kept_for_who_has_another_embedding(server: Server) -> None:
    server.hold("decode")
    first = ask(server, "which?", RED)
    await server.working("decode")
    server.engines["e0"].permits["encode"] = asyncio.Semaphore(0)
    client = await server.connect(body(ask_about("which?", RED, GREEN)))
    await until(lambda: server.num_calls("encode") == 2)
    await client.leave()
    await until(lambda: not server.engines["e0"].running, "the end of the call")
    server.release()
    await assert_answers([first], [RED])


async def test_a_batch_goes_on_for_those_who_stay(server: Server) -> None:
    clients = await clients_waiting(server, 2)
    leaver = await server.connect(body(ask_about("which?", GREEN, RED)))
    stayer = ask(server, "which?", BLUE, RED)
    await waiting(server, 4)
    for client in (*clients, leaver):
        await client.leave()
    await waiting(server, 1)
    server.release()
    assert answer_of(await stayer) == answer("which?", BLUE, RED)
    assert server.encode_calls == [1, 1], "the red one went on, the green one was not begun"


async def test_an_embedding_is_kept_for_who_comes_after_the_answers(server: Server) -> None:
    for _ in range(2):
        await assert_answers([ask(server, "which?", RED)], [RED])
        await server.idle()
    assert server.encode_calls == [1]


@pytest.mark.parametrize("when", ["none", "slack"])
async def test_clients_may_leave_and_come_at_any_time(serve: Serve, when: str) -> None:
    server = await serve(["e0", "e1", "p0", "d0"], policy={"when": when})
    contents: list[Content] = [ask_about("which?", *urls) for urls in ([RED], [RED, GREEN])]
    for number in range(0, 30, 2):
        stayer = asyncio.create_task(server.ask(contents[number // 2 % 2]))
        client = await server.connect(body(contents[0]))
        for _ in range(number):
            await asyncio.sleep(0)
        await client.leave()
        urls = ([RED], [RED, GREEN])[number // 2 % 2]
        assert answer_of(await stayer) == answer("which?", *urls)
    await server.idle()


async def test_a_lost_encoder_costs_a_shared_picture_one_more_call(serve: Serve) -> None:
    server = await serve(["e0", "e1", "p0", "d0"])
    server.hold("encode")
    tasks = [ask(server, "which?", RED) for _ in range(5)]
    await waiting(server, 5)
    server.lose(await server.working("encode"))
    await until(lambda: server.num_calls("encode") == 2, "the second call")
    tasks.append(ask(server, "which?", RED))
    await waiting(server, 6)
    server.release()
    await assert_answers(tasks, [RED] * 6)
    assert server.encode_calls == [1, 1]


@pytest.mark.parametrize("where", [["p0"], ["p0", "e0"]], ids=["at prefill", "at the encoder, too"])
async def test_an_embedding_that_is_lost_is_sent_again_once_for_all_who_relied_on_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, where: list[str]
) -> None:
    server = await serve(["e0", "d0"])
    prefill, turns = server.add("p0", timeout_s=0.2).prefill, asyncio.Semaphore(0)

    async def prefill_in_turn(prompt: Prompt, coming: Collection[int]) -> Prefilled:
        await turns.acquire()
        return await prefill(prompt, coming)

    monkeypatch.setattr(server.engines["p0"], "prefill", prefill_in_turn)
    tasks = []
    for _ in range(3):
        tasks.append(ask(server, "which?", RED))
        await until(lambda: server.core.num_open == len(tasks) and not server.num_preparing)
    await until(lambda: not server.num_waiting)
    assert server.encode_calls == [1]
    for name in where:
        server.engines[name].store.keys.clear()
    server.hold("encode")
    turns.release()
    await until(lambda: server.encode_calls == [1, 1], "a second call for the first")
    for num_waiting in (2, 3):
        turns.release()
        await waiting(server, num_waiting)  # they join it
    server.release()
    for _ in tasks:
        turns.release()
    await assert_answers(tasks, [RED] * 3)
    assert server.encode_calls == [1, 1]
    assert server.engines["e0"].encoded == {key(RED): len(where)}


@pytest.mark.parametrize("turns", range(-8, 9, 2))
async def test_a_request_may_end_in_the_instant_in_which_another_one_shares_its_embedding(
    server: Server, turns: int
) -> None:
    server.hold("decode", permits=15)
    tasks = [ask(server, "which?", RED)]
    await until(lambda: server.engines["d0"].num_pieces == 15)
    server.hold("render")
    tasks.append(ask(server, "which?", RED))
    await until(lambda: server.num_calls("render") == 2)
    last, render = (server.engines[n].permits[c] for n, c in (("d0", "decode"), ("e0", "render")))
    first, then = (last, render) if turns > 0 else (render, last)
    first.release()
    for _ in range(abs(turns)):
        await asyncio.sleep(0)
    then.release()
    await until(tasks[0].done)
    server.release()
    await assert_answers(tasks, [RED, RED])
    assert server.encode_calls in ([1], [1, 1])


# One request on several encoders ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "each"),
    [({"when": "none"}, [1, 1]), ({"when": "greedy", "max_batch_items": 2}, [2])],
    ids=["none", "greedy"],
)
async def test_pictures_of_a_request_are_encoded_side_by_side_and_joined_at_prefill(
    serve: Serve, policy: dict[str, Any], each: list[int]
) -> None:
    server = await serve(["e0", "e1", "p0", "d0"], policy=policy)
    server.hold("encode")
    urls = pictures(4)
    task = ask(server, "which?", *urls)
    await until(lambda: server.encode_calls == [*each, *each])
    late, permits = server.engines["e1"], server.engines["e1"].permits.pop("encode")
    server.release()
    await until(lambda: not server.engines["e0"].running)
    assert late.running == len(each)
    assert server.num_waiting == 1
    assert server.num_calls("prefill") == 1
    assert not server.engines["p0"].running, "it waits for the rest"
    for _ in each:
        permits.release()
    assert answer_of(await task) == answer("which?", *urls)
    assert server.num_calls("prefill") == 1


async def test_a_request_waits_for_what_another_one_has_begun(server: Server) -> None:
    tasks = await ask_while_busy(server, [RED, GREEN])
    tasks.append(ask(server, "which?", BLUE, GREEN, RED))
    await waiting(server, 3)
    server.release()
    assert answer_of(await tasks.pop()) == answer("which?", BLUE, GREEN, RED)
    await assert_answers(tasks, [RED, GREEN])
    assert server.encode_calls == [1, 2]


# More than Encode can do --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_who_would_wait_too_long_for_encode_is_refused_but_not_text(
    serve: Serve, stream: bool
) -> None:
    server = await serve(policy={"when": "greedy", "max_queue_s": 1e-9})
    tasks = await ask_while_busy(server, [RED, GREEN])
    assert (await metrics_of(server))["easerve_encode_queue_seconds"] > 0
    response = await server.ask(ask_about("which?", BLUE), stream=stream)
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
    assert int(response.headers["retry-after"]) > 0
    assert answer_of(await server.ask("hello")) == answer("hello")
    server.release()
    await assert_answers(tasks, [RED, GREEN])
    assert (await metrics_of(server))["easerve_encode_queue_seconds"] == 0
    await assert_answers([ask(server, "which?", BLUE)], [BLUE])


@pytest.mark.parametrize("flow", [True, False])
async def test_encode_holds_back_what_would_only_wait_for_decode(serve: Serve, flow: bool) -> None:
    server = await serve(["e0", "p0"], policy={"when": "greedy", "flow": flow})
    server.add("d0", num_slots=1)
    server.hold("decode")
    first = ask(server, "which?", RED)
    await server.working("decode")
    second = ask(server, "which?", GREEN)
    if flow:
        await waiting(server, 1)
        assert server.num_calls("encode") == 1
        assert server.core.queue_lengths()[Stage.ENCODE] == 1
    else:
        await until(lambda: server.num_calls("decode") == 2)
    server.release()
    await assert_answers([first, second], [RED, GREEN])
    held = (await metrics_of(server)).get("easerve_encode_held_seconds_total decode", 0)
    assert (held > 0) is flow


# The log ------------------------------------------------------------------------------------------


async def test_what_the_server_decided_can_be_decided_again(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = DecisionLog(path, recipe(Deployment(model=MODEL)))
    server = await serve(["e0", "e1", "p0", "d0"], log=log)
    urls = pictures(4)
    server.engines["e0"].refused = {key(urls[3])}
    server.engines["e1"].failures["encode"].append(EngineError("broken", 500))

    async def one(number: int) -> None:
        chosen = [urls[number % 3], urls[number // 3 % 3]][: number % 3]
        assert answer_of(await ask(server, "which?", *chosen)) == answer("which?", *chosen)

    await asyncio.gather(*map(one, range(40)))
    server.lose("e1")
    error_of(await ask(server, "which?", urls[0], urls[3]), 400)
    client = await server.connect(body(ask_about("which?", RED)))
    await client.leave()
    await server.idle()
    server.driver.drain()
    await assert_answers([ask(server, "which?", RED)], [RED])
    await server.driver.close()
    outcome = replay(path)
    assert outcome.difference is None
    assert not outcome.truncated
    assert outcome.num_batches == len(server.encode_calls)
    assert sum(batches.num_items for batches in outcome.batches.values()) == sum(
        server.encode_calls
    )
