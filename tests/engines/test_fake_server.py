import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from easerve.engines.fake_server import STAGES, TEXT
from easerve.engines.protocol import EncodeCall, Media, Prompt
from easerve.engines.vllm.client import VllmEngine
from easerve.types import Stage, WorkerId

LATENCY = ("--render-s", "0", "--encode-s", "0.02", "--prefill-s", "0.01", "--token-s", "0.001")
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "k"}
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
SEEN: dict[str, Any] = {"messages": [{"role": "user", "content": [PICTURE]}], "max_tokens": 4}


@dataclass
class Running:
    encode: VllmEngine
    prefill: VllmEngine
    decode: VllmEngine
    urls: list[str]


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Running]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "easerve.engines.fake_server", str(tmp_path), *LATENCY),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    ports = (await child.stdout.readline()).split()
    clients = [
        VllmEngine(WorkerId(name), stage, tmp_path / f"{name}.sock", "fake")
        for name, stage in zip(STAGES, Stage, strict=True)
    ]
    encode, prefill, decode = clients
    yield Running(encode, prefill, decode, [f"http://127.0.0.1:{int(port)}" for port in ports])
    for client in clients:
        await client.close()
    child.stdin.close()
    assert await child.wait() == 0


async def answer(engines: Running, prompt: Prompt, coming: list[int]) -> str:
    made = await engines.prefill.prefill(prompt, coming)
    deltas = [delta async for delta in engines.decode.decode(prompt, made.handle)]
    assert [delta.finish_reason for delta in deltas] == [None] * 3 + ["length"]
    return "".join(delta.text for delta in deltas)


async def test_the_servers_way_through_the_stages(engines: Running) -> None:
    assert await answer(engines, await engines.prefill.render(ASKED), []) == 4 * TEXT


async def test_prefill_waits_for_what_is_encoded(engines: Running) -> None:
    prompt = await engines.encode.render(SEEN)
    answered = asyncio.create_task(answer(engines, prompt, [0]))
    await asyncio.sleep(0.03)
    assert not answered.done()
    call = EncodeCall(Media("k", "image_url", "data:,"), prompt.placeholders[0], (WorkerId("p"),))
    await engines.encode.encode([call])
    assert await answered == 4 * TEXT


async def test_what_is_encoded_first_is_there(engines: Running) -> None:
    prompt = await engines.encode.render(SEEN)
    call = EncodeCall(Media("k", "image_url", "data:,"), prompt.placeholders[0], (WorkerId("p"),))
    await engines.encode.encode([call])
    assert await answer(engines, prompt, [0]) == 4 * TEXT


async def test_health_and_limits(engines: Running) -> None:
    assert await engines.encode.health() is True
    assert await engines.encode.learn_limits() == 4096


@pytest.mark.parametrize("asked", [ASKED, SEEN], ids=["text", "picture"])
async def test_a_whole_answer_by_openais_route(engines: Running, asked: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as session:
        for url in engines.urls:
            body = {**asked, "stream": True}
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                lines = (await response.text()).split("\n\n")
        *events, done, end = lines
        assert (done, end) == ("data: [DONE]", "")
        read = [msgspec.json.decode(event.removeprefix("data: ")) for event in events]
        texts = [event["choices"][0]["delta"]["content"] for event in read if event["choices"]]
        assert texts == [TEXT] * 4
        assert "usage" in read[-1]


async def test_the_two_halves_of_a_divided_answer(engines: Running) -> None:
    _, prefill, decode = engines.urls
    async with aiohttp.ClientSession() as session:
        first = {**ASKED, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        async with session.post(f"{prefill}/v1/chat/completions", json=first) as response:
            handle = (await response.json())["kv_transfer_params"]
        rest = {**ASKED, "stream": True, "kv_transfer_params": handle}
        async with session.post(f"{decode}/v1/chat/completions", json=rest) as response:
            assert (await response.text()).count(TEXT) == 4
