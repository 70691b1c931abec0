"""Micro-batches on real engines: sharing, one bad picture among good ones, knobs under load."""

import asyncio
import base64
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from easerve.config import Policy
from easerve.serve.decisions import replay
from easerve.workload import shapes

from ..processes import wait_until
from .conftest import ADMIN_TOKEN, RealServer

MODEL = "tiny-llava"
ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}
COUNT = "How many shapes are there?"


@pytest.fixture(autouse=True)
def default_knobs(server: RealServer) -> Iterator[None]:
    yield
    turn(server, **Policy().model_dump())


def turn(server: RealServer, **knobs: Any) -> None:
    httpx.patch(f"{server.url}/admin/knobs", json=knobs, headers=ADMIN).raise_for_status()


def body(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": COUNT}]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8}


async def ask_all(server: RealServer, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    """All at once, each on a connection of its own."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        path = "/v1/chat/completions"
        return await asyncio.gather(*(client.post(path, json=each) for each in bodies))


def answer(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"]).strip()


def value(server: RealServer, name: str) -> float:
    """Of a metric, over all its labels."""
    text = httpx.get(f"{server.url}/metrics").text
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def encoded(server: RealServer) -> float:
    return value(server, "easerve_encode_batch_items_sum")


def scenes(number: int, seed: int) -> list[shapes.Scene]:
    rng = random.Random(seed)
    return [shapes.draw(rng) for _ in range(number)]


def right(scene: shapes.Scene) -> str:
    return shapes.NUMBERS[len(scene.things)]


def test_one_bad_picture_among_sixteen_fails_alone(server: RealServer) -> None:
    drawn = scenes(15, seed=1)
    bodies = [body(shapes.data_url(scene.picture)) for scene in drawn]
    broken = base64.b64encode(b"\x89PNG\r\n\x1a\n and no more").decode()
    bodies.insert(7, body(f"data:image/png;base64,{broken}"))
    responses = asyncio.run(ask_all(server, bodies))
    bad = responses.pop(7)
    assert bad.status_code == 400
    error = bad.json()["error"]
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert error["message"].startswith(f"{error['param']}: ")
    assert [answer(each) for each in responses] == [right(scene) for scene in drawn]


def test_the_same_picture_fifty_times_at_once_is_encoded_once(server: RealServer) -> None:
    (scene,) = scenes(1, seed=2002)
    before = encoded(server)
    responses = asyncio.run(ask_all(server, [body(shapes.data_url(scene.picture))] * 50))
    assert {answer(each) for each in responses} == {right(scene)}
    assert encoded(server) - before == 1


def test_knobs_change_under_load_without_a_failure(server: RealServer) -> None:
    """Every rule in turn while requests come; a rule that waits fills the batches."""
    drawn = scenes(96, seed=3)
    bodies = [body(shapes.data_url(scene.picture)) for scene in drawn]

    async def turn_all(client: httpx.AsyncClient, done: asyncio.Event) -> int:
        turns = 0
        while not done.is_set():
            for rule in ("none", "greedy", "fixed", "fill", "gap", "slack"):
                knobs = {"when": rule, "max_batch_items": 2 + turns % 7}
                response = await client.patch("/admin/knobs", json=knobs, headers=ADMIN)
                assert response.json()["when"] == rule
                turns += 1
                await asyncio.sleep(0.01)
        return turns

    async def run() -> tuple[list[httpx.Response], int]:
        done = asyncio.Event()
        async with httpx.AsyncClient(base_url=server.url) as client:
            turning = asyncio.create_task(turn_all(client, done))
            responses = await ask_all(server, bodies)
            done.set()
            return responses, await turning

    responses, turns = asyncio.run(run())
    assert turns > 12
    assert [answer(each) for each in responses] == [right(scene) for scene in drawn]


@pytest.mark.parametrize(("token", "status"), [(ADMIN_TOKEN, 200), ("wrong", 401), ("-", 401)])
def test_knobs_are_for_those_with_the_token(server: RealServer, token: str, status: int) -> None:
    headers = {"authorization": f"Bearer {token}"}
    assert httpx.get(f"{server.url}/admin/knobs", headers=headers).status_code == status


def test_a_recorded_log_gives_the_same_actions(server: RealServer, tmp_path: Path) -> None:
    """Of all that the tests have done so far, while the server goes on."""
    assert server.decision_log is not None
    copy = tmp_path / "decisions.jsonl"
    (scene,) = scenes(1, seed=4)
    size = server.decision_log.stat().st_size

    def written() -> bool:
        asyncio.run(ask_all(server, [body(shapes.data_url(scene.picture))]))
        assert server.decision_log is not None
        return server.decision_log.stat().st_size > size

    wait_until(written, 10, "something written")
    shutil.copy(server.decision_log, copy)
    outcome = replay(copy)
    assert outcome.difference is None
    assert outcome.num_batches > 0
