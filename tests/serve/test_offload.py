"""Where over the server: the side of a prefill, and the ways of an embedding to it."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from easerve.cli.deploy import recipe
from easerve.config import Deployment
from easerve.costs.linear import LinearCosts
from easerve.engines.fake import BYTES_PER_ITEM
from easerve.engines.protocol import EngineError
from easerve.policy import events as ev
from easerve.serve.decisions import DecisionLog, read, replay
from easerve.types import RequestId, Side, WorkerId

from .conftest import Serve
from .server import (
    MODEL,
    Content,
    Server,
    answer,
    answer_of,
    answers_of,
    ask_about,
    body,
    error_of,
    key,
    metrics_of,
    picture,
    pictures,
    until,
)

pytestmark = pytest.mark.long

RED, GREEN = picture("red"), picture("green")
BOTH_SIDES = ("e0", "l0", "p0", "d0")
LOCAL, REMOTE = {"remote_share": 0.0}, {"remote_share": 1.0}
TOKEN = "a token"
SOON_S = 0.2  # for a prefill to give up; much more than a push takes here

Asked = asyncio.Task[httpx.Response]


def ask(server: Server, *urls: str, **parameters: Any) -> Asked:
    return asyncio.create_task(server.ask(ask_about("which?", *urls), **parameters))


async def assert_answers(*tasks: Asked, urls: Sequence[str] = (RED,)) -> None:
    answers = [answer_of(response) for response in await asyncio.gather(*tasks)]
    assert answers == [answer("which?", *urls)] * len(tasks)


def turn(server: Server, share: float) -> None:
    server.driver.turn(replace(server.core.knobs, remote_share=share))


def num_prefills(server: Server) -> dict[str, int]:
    """Calls of prefill engines, by name."""
    return {
        name: engine.calls["prefill"]
        for name, engine in server.engines.items()
        if engine.calls["prefill"]
    }


async def ask_many(server: Server, numbers: Iterable[int], urls: Sequence[str] = ()) -> None:
    """Requests of all kinds, 16 at a time; each gets the answer to its own question."""
    chance, slots = random.Random(7), asyncio.Semaphore(16)

    async def one(number: int, chosen: Sequence[str], text: str, stream: bool) -> None:
        content: Content = ask_about(text, *chosen)
        async with slots:
            if stream:
                got = (await server.stream(content)).text
            else:
                got = answer_of(await server.ask(content))
        assert got == answer(text, *chosen), number

    await asyncio.gather(
        *(
            one(
                number,
                chance.choices(urls, k=chance.randrange(4)) if urls else (),
                " ".join([str(number), *["word"] * chance.randrange(40)]),
                chance.random() < 0.5,
            )
            for number in numbers
        )
    )


# The share ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Kept:
    """A log of the requests' sizes and of where they were prefilled first."""

    num_tokens: dict[RequestId, int] = field(default_factory=dict)
    placed: dict[RequestId, ev.StartPrefill] = field(default_factory=dict)

    def step(self, _: int, events: Sequence[ev.Event], actions: Sequence[ev.Action]) -> None:
        for event in events:
            if isinstance(event, ev.Prepared):
                self.num_tokens[event.request_id] = event.shape.num_prompt_tokens
        for action in actions:
            if isinstance(action, ev.StartPrefill):
                self.placed.setdefault(action.request_id, action)

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("share", [0.0, 0.3, 0.55, 1.0])
async def test_of_sixty_requests_the_share_is_remote(serve: Serve, share: float) -> None:
    server = await serve(BOTH_SIDES, policy={"remote_share": share})
    await ask_many(server, range(60), pictures(8))
    calls = Counter(num_prefills(server))
    assert calls.total() == 60
    assert abs(calls["p0"] - 60 * share) <= 0.5
    assert max(server.engines["e0"].encoded.values()) == 1
    realised = (await metrics_of(server))["easerve_offload_realised_share_ratio"]
    assert realised == calls["p0"] / 60


@pytest.mark.parametrize("share", [0.3, 0.55])
async def test_by_tokens_the_share_of_the_tokens_is_remote(serve: Serve, share: float) -> None:
    kept, policy = Kept(), {"remote_share": share, "where": "deficit-tokens"}
    server = await serve(BOTH_SIDES, policy=policy, log=kept)
    await ask_many(server, range(60), pictures(8))
    assert len(kept.placed) == 60
    remote = [each for each, action in kept.placed.items() if action.worker_id == "p0"]
    num_remote = sum(kept.num_tokens[each] for each in remote)
    longest = max(kept.num_tokens.values())
    assert abs(num_remote - share * sum(kept.num_tokens.values())) <= longest / 2


async def test_the_share_is_changed_while_serving(serve: Serve) -> None:
    server = await serve(BOTH_SIDES, server={"admin_token": TOKEN}, policy=LOCAL)
    expected = Counter[str]()
    for share, num_remote in ((0.0, 0), (1.0, 20), (0.5, 10), (0.0, 0)):
        response = await server.client.patch(
            "/admin/knobs",
            json={"remote_share": share},
            headers={"authorization": f"Bearer {TOKEN}"},
        )
        assert response.json()["remote_share"] == share
        await ask_many(server, range(20), pictures(4))
        expected.update(p0=num_remote, l0=20 - num_remote)
        assert num_prefills(server) == +expected
        found = await metrics_of(server)
        assert found["easerve_offload_share_ratio"] == share
        assert abs(found["easerve_offload_deficit"]) <= 0.5


@pytest.mark.parametrize(("policy", "name"), [(LOCAL, "l0"), (REMOTE, "p0")])
@pytest.mark.parametrize("urls", [[], [RED], [RED, GREEN, RED]], ids=len)
async def test_the_answer_is_right_on_either_side(
    serve: Serve, policy: dict[str, Any], name: str, urls: list[str]
) -> None:
    server = await serve(BOTH_SIDES, policy=policy)
    response = await server.ask(ask_about("which?", *urls), n=2, seed=3)
    assert answers_of(response) == [answer("which?", *urls, seed=seed) for seed in (3, 4)]
    assert (await server.stream(ask_about("which?", *urls))).text == answer("which?", *urls)
    assert num_prefills(server) == {name: 3}


async def test_local_is_beside_the_encoder_that_encodes(serve: Serve) -> None:
    server = await serve(["e0", "l0", "e1", "l1", "p0", "d0"], policy=LOCAL | {"when": "none"})
    server.hold("encode")
    tasks = [ask(server, url) for url in pictures(2)]
    await until(lambda: server.encode_calls == [1, 1])
    server.release()
    for task, url in zip(tasks, pictures(2), strict=True):
        await assert_answers(task, urls=[url])
    assert num_prefills(server) == {"l0": 1, "l1": 1}
    for encoder, prefill in (("e0", "l0"), ("e1", "l1")):
        engines = server.engines
        assert engines[encoder].store.keys == engines[prefill].store.keys


@pytest.mark.parametrize(
    ("name", "other", "side"), [("l0", "p0", "remote"), ("p0", "l0", "local")], ids=["l0", "p0"]
)
@pytest.mark.long
async def test_without_the_engine_of_a_side_all_goes_to_the_other_until_it_is_back(
    serve: Serve, name: str, other: str, side: str
) -> None:
    """Nothing is made up for: the share holds for what could go to both."""
    costs = LinearCosts(0.001, 0.0, 0.001, 0.0, 0.0001)
    server = await serve(BOTH_SIDES, costs=costs, policy={"remote_share": 0.5})
    load = asyncio.create_task(ask_many(server, range(120), pictures(12)))
    lost, left = server.engines[name], server.engines[other]
    await until(lambda: lost.calls["prefill"] >= 20)
    server.lose(name)
    await load
    assert lost.calls["prefill"] < 40
    assert left.calls["prefill"] >= 120 - lost.calls["prefill"]
    again, before = server.add(name), left.calls["prefill"]
    await ask_many(server, range(40), pictures(12))
    assert again.calls["prefill"] == left.calls["prefill"] - before == 20
    found = await metrics_of(server)
    assert found[f"easerve_prefill_placed_total only side {side}"] > 0
    assert found["easerve_requests_total completed"] == 160


# A picture that was seen before -------------------------------------------------------------------


async def test_what_prefill_has_is_not_sent(serve: Serve) -> None:
    server = await serve(BOTH_SIDES, policy=LOCAL)
    for _ in range(3):
        await assert_answers(ask(server, RED))
    assert server.encode_calls == [1]
    assert num_prefills(server) == {"l0": 3}


async def test_what_an_encoder_has_is_sent_to_another_prefill_engine_without_a_forward(
    serve: Serve,
) -> None:
    server = await serve(BOTH_SIDES, policy=LOCAL)
    await assert_answers(ask(server, RED))
    turn(server, 1.0)
    await assert_answers(ask(server, RED))
    encoder = server.engines["e0"]
    assert (encoder.encode_calls, encoder.encoded, encoder.resent) == (
        [1, 1],
        {key(RED): 1},
        {key(RED): 1},
    )
    assert num_prefills(server) == {"l0": 1, "p0": 1}


@pytest.mark.parametrize(
    ("small", "share", "sources"),
    [("e0", 1.0, {"encoded": 3}), ("l0", 0.0, {"encoded": 2, "encoder": 1})],
    ids=["encoder", "prefill"],
)
async def test_what_was_evicted_comes_again(
    serve: Serve, small: str, share: float, sources: dict[str, int]
) -> None:
    """Encoded again if the encoder evicted it. Nobody misses it, for the engines have said so."""
    server = await serve(BOTH_SIDES, policy=LOCAL)
    server.lose(small)
    server.add(small, cache_items=1)
    for url in (RED, GREEN):
        await assert_answers(ask(server, url), urls=[url])
    await server.idle()
    turn(server, share)
    await assert_answers(ask(server, RED))
    assert server.engines["e0"].encoded.total() == sources["encoded"]
    assert await items_by_source(server) == sources
    assert server.num_calls("prefill") == 3
    found = await metrics_of(server)
    assert found[f"easerve_embedding_evicted_total {small}"] >= 1


async def test_a_picture_for_both_sides_is_encoded_once_and_pushed_to_both(serve: Serve) -> None:
    server = await serve(BOTH_SIDES, policy={"when": "greedy", "remote_share": 0.5})
    server.hold("encode")
    first = ask(server, GREEN)
    await server.working("encode")
    tasks = [ask(server, RED) for _ in range(2)]
    await until(lambda: server.num_waiting == 3)
    server.release()
    await assert_answers(first, urls=[GREEN])
    await assert_answers(*tasks)
    assert server.encode_calls == [1, 1]
    assert all(key(RED) in server.engines[name].store.keys for name in ("l0", "p0"))


async def test_who_wants_elsewhere_what_is_under_way_has_it_sent_on(serve: Serve) -> None:
    server = await serve(BOTH_SIDES, policy=LOCAL)
    server.hold("encode")
    tasks = [ask(server, RED)]
    await server.working("encode")
    turn(server, 1.0)
    tasks.append(ask(server, RED))
    await until(lambda: server.num_waiting == 2)
    server.release()
    await assert_answers(*tasks)
    assert server.engines["e0"].encoded == server.engines["e0"].resent == {key(RED): 1}
    assert num_prefills(server) == {"l0": 1, "p0": 1}


# An embedding that is not where it should be ------------------------------------------------------

GONE = {
    "lost on the way": ([], 1),
    "gone at prefill": (["l0"], 1),
    "gone at both": (["l0", "e0"], 2),
}


@pytest.mark.parametrize(("where", "num_encoded"), GONE.values(), ids=GONE)
@pytest.mark.parametrize("n", [1, 3])
async def test_what_is_missing_comes_once_more_for_all_choices(
    serve: Serve, where: list[str], num_encoded: int, n: int
) -> None:
    """Nobody knows that it is gone until prefill misses it."""
    server = await serve(BOTH_SIDES, policy=LOCAL)
    server.lose("l0")
    server.add("l0", timeout_s=SOON_S)
    encoder = server.engines["e0"]
    if where:
        await assert_answers(ask(server, RED))
        for name in where:
            del server.engines[name].store.keys[key(RED)]
    else:
        encoder.lost = {key(RED)}
    before = server.num_calls("prefill")
    response = await ask(server, RED, n=n, seed=1)
    assert answers_of(response) == [answer("which?", RED, seed=1 + leg) for leg in range(n)]
    assert encoder.encode_calls == [1, 1]
    assert encoder.encoded == {key(RED): num_encoded}
    num_missed = (await metrics_of(server))["easerve_embedding_missing_total l0"]
    assert 1 <= num_missed <= n, "one may find what comes for another"
    assert server.num_calls("prefill") - before == n + num_missed


# Prefill and encode at the same time --------------------------------------------------------------


async def waits_for_encode(server: Server, task: Asked | None = None) -> None:
    """Until prefill is called for, and waits for, what is still being encoded."""
    await server.working("encode")
    await until(lambda: server.num_calls("prefill") == 1, "the call of prefill")
    assert server.num_waiting == 1
    assert task is None or not task.done()


@pytest.mark.parametrize("policy", [LOCAL, REMOTE])
async def test_prefill_is_called_before_the_encode_call_has_ended(
    serve: Serve, policy: dict[str, Any]
) -> None:
    server = await serve(BOTH_SIDES, policy=policy)
    server.hold("encode")
    task = ask(server, RED)
    await waits_for_encode(server, task)
    await asyncio.sleep(0.05)
    server.release()
    await assert_answers(task)
    assert server.num_calls("prefill") == 1
    await server.idle()
    timeline = server.driver.timelines.popitem()[1]
    assert timeline["prefill"] < timeline["encode"], "waiting is not prefilling"


async def test_an_encoder_that_dies_is_replaced_while_prefill_goes_on_waiting(
    serve: Serve,
) -> None:
    server = await serve(["e0", "e1", "p0", "p1", "d0"])
    server.hold("encode")
    task = ask(server, RED)
    await waits_for_encode(server, task)
    server.lose(await server.working("encode"))
    await until(lambda: server.num_calls("encode") == 2, "a call to the other one")
    server.release()
    await assert_answers(task)
    assert server.num_calls("prefill") == 1


async def test_a_prefill_engine_that_dies_while_it_waits_is_replaced(serve: Serve) -> None:
    """What is under way to the dead one is sent on to the other."""
    server = await serve(BOTH_SIDES, policy=LOCAL)
    server.hold("encode")
    task = ask(server, RED)
    await waits_for_encode(server, task)
    server.lose("l0")
    await asyncio.sleep(0)
    server.release()
    await assert_answers(task)
    assert server.engines["e0"].encoded == {key(RED): 1}
    assert num_prefills(server) == {"l0": 1, "p0": 1}


@pytest.mark.parametrize("policy", [LOCAL, REMOTE])
async def test_a_picture_that_is_refused_while_prefill_waits_is_the_clients_fault(
    serve: Serve, policy: dict[str, Any]
) -> None:
    server = await serve(BOTH_SIDES, policy=policy)
    server.hold("encode")
    task = ask(server, RED)
    await waits_for_encode(server, task)
    server.engines["e0"].refused = {key(RED)}
    server.release()
    assert "an item cannot be encoded" in error_of(await task, 400)["message"]
    await server.idle()


@pytest.mark.parametrize("policy", [LOCAL, REMOTE])
async def test_a_client_that_leaves_while_prefill_waits_leaves_nothing(
    serve: Serve, policy: dict[str, Any]
) -> None:
    server = await serve(BOTH_SIDES, policy=policy)
    server.hold("encode")
    client = await server.connect(body(ask_about("which?", RED), n=3))
    await server.working("encode")
    await until(lambda: server.num_calls("prefill") == 3)
    await client.leave()
    await server.idle()
    assert not server.engines["e0"].running
    server.release()
    await assert_answers(ask(server, RED))
    assert server.fabric.kv == {}


@pytest.mark.parametrize("seed", range(2))
async def test_clients_leave_and_engines_come_and_go_and_who_stays_has_his_answer(
    serve: Serve, seed: int
) -> None:
    costs = LinearCosts(0.001, 0.0, 0.001, 0.0, 0.0001)
    engines = [*BOTH_SIDES, "e1", "l1", "p1"]
    server = await serve(engines, {"max_retries": 9}, costs=costs, policy={"remote_share": 0.5})
    chance, urls = random.Random(seed), pictures(8)
    for name in ("l0", "l1", "p0", "p1", "e0"):
        server.lose(name)
        server.add(name, timeout_s=SOON_S, cache_items=4 if name == "e0" else 100)
    server.engines["e1"].lost = {key(url) for url in urls[:4]}
    stayers = asyncio.create_task(ask_many(server, range(60), urls))
    while not stayers.done():
        content = ask_about("which?", *chance.sample(urls, 2))
        client = await server.connect(body(content, n=chance.choice([1, 3])))
        await asyncio.sleep(chance.uniform(0, 0.01))
        await client.leave()
        name = chance.choice(["l0", "l1", "p1", "e1"])
        if chance.random() < 0.2:
            server.lose(name)
            server.add(name, timeout_s=SOON_S)
    await stayers
    await server.idle()


# What is written down -----------------------------------------------------------------------------


async def test_the_log_has_every_placement_and_replays_to_the_same(
    serve: Serve, tmp_path: Path
) -> None:
    policy, path = {"remote_share": 0.3}, tmp_path / "log"
    content = {"model": MODEL, "local_prefill": {}, "policy": policy}
    log = DecisionLog(path, recipe(Deployment.model_validate(content)))
    server = await serve(BOTH_SIDES, policy=policy, log=log)
    server.engines["l0"].failures["prefill"] = [EngineError("broken", 500)] * 3
    await ask_many(server, range(60), pictures(6))
    turn(server, 0.8)
    lost = server.engines["l0"]
    server.lose("l0")
    await ask_many(server, range(10), pictures(6))
    server.add("l0")
    await ask_many(server, range(60), pictures(6))
    await server.idle()
    await server.driver.close()
    assert replay(path).difference is None
    started = [
        action
        for step in read(path)
        for action in step.actions
        if isinstance(action, ev.StartPrefill)
    ]
    assert len(started) == server.num_calls("prefill") + lost.calls["prefill"]
    sides = {WorkerId("l0"): Side.LOCAL, WorkerId("p0"): Side.REMOTE}
    assert all(action.placement.side is sides[action.worker_id] for action in started)
    assert {action.placement.share for action in started} == {0.3, 0.8}
    assert {action.placement.local_s is None for action in started} == {True, False}


async def items_by_source(server: Server) -> Mapping[str, float]:
    name = "easerve_embedding_items_total "
    found = await metrics_of(server)
    return {each.removeprefix(name): n for each, n in found.items() if each.startswith(name) and n}


async def test_items_are_counted_by_where_their_embeddings_came_from(serve: Serve) -> None:
    server = await serve(BOTH_SIDES, policy=LOCAL)
    await assert_answers(ask(server, RED, GREEN), urls=[RED, GREEN])
    assert await items_by_source(server) == {"encoded": 2}
    await assert_answers(ask(server, RED))
    assert await items_by_source(server) == {"encoded": 2, "prefill": 1}
    turn(server, 1.0)
    await assert_answers(ask(server, GREEN), urls=[GREEN])
    assert await items_by_source(server) == {"encoded": 2, "prefill": 1, "encoder": 1}


async def test_placements_and_bundles_are_counted(serve: Serve) -> None:
    server = await serve(BOTH_SIDES, policy={"remote_share": 0.25})
    for urls in ([RED, GREEN], [RED], [GREEN], []):
        await assert_answers(ask(server, *urls, n=2), urls=urls)
    found = await metrics_of(server)
    assert found["easerve_prefill_placed_total share local"] == 3
    assert found["easerve_prefill_placed_total share remote"] == 1
    assert found["easerve_offload_share_ratio"] == 0.25
    assert found["easerve_offload_realised_share_ratio"] == 0.25
    assert found["easerve_offload_deficit"] == 0
    assert {found[f"easerve_prefill_backlog_seconds {side.value}"] for side in Side} == {0}
    num_items = [found[f"easerve_embedding_bundle_items_{each}"] for each in ("count", "sum")]
    assert num_items == [2, 3], "two to l0, then one of them to p0"
    assert found["easerve_embedding_bundle_bytes_sum"] == 3 * BYTES_PER_ITEM
    assert found["easerve_embedding_push_seconds_count"] == 2


async def test_a_prefill_that_is_tried_again_is_placed_once(serve: Serve) -> None:
    server = await serve(BOTH_SIDES, policy=LOCAL)
    server.engines["l0"].failures["prefill"].append(EngineError("broken", 500))
    await assert_answers(ask(server, RED))
    assert num_prefills(server) == {"l0": 1, "p0": 1}
    name = "easerve_prefill_placed_total "
    found = await metrics_of(server)
    assert {each: n for each, n in found.items() if each.startswith(name)} == {
        f"{name}share local": 1
    }
    assert found["easerve_offload_realised_share_ratio"] == 0
