"""The fake engines keep the rules that the server's tests rely on."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.fake import Fabric, FakeEngine, words
from easerve.engines.protocol import (
    Delta,
    EmbeddingMissingError,
    EncodeCall,
    EngineError,
    Media,
    Prompt,
    Route,
)
from easerve.types import Stage, WorkerId

TOOLS = [{"type": "function", "function": {"name": "look"}}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:0"}, "uuid": "k0"}
CHAT = {"messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "a b"}]}]}
TEXT = {"messages": [{"role": "user", "content": "a b"}]}


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def encode(fabric: Fabric) -> FakeEngine:
    return FakeEngine(WorkerId("e0"), Stage.ENCODE, fabric)


@pytest.fixture
def prefill(fabric: Fabric) -> FakeEngine:
    return FakeEngine(WorkerId("p0"), Stage.PREFILL, fabric)


@pytest.fixture
def decode(fabric: Fabric) -> FakeEngine:
    return FakeEngine(WorkerId("d0"), Stage.DECODE, fabric)


async def pieces(decode: FakeEngine, prompt: Prompt, handle: Mapping[str, Any]) -> list[Delta]:
    return [delta async for delta in decode.decode(prompt, handle)]


async def test_a_handle_is_used_once(prefill: FakeEngine, decode: FakeEngine) -> None:
    prompt = await prefill.render(TEXT)
    handle = (await prefill.prefill(prompt, None)).handle
    assert "".join(d.text for d in await pieces(decode, prompt, handle)) == "".join(
        words("a b", ())
    )
    with pytest.raises(EngineError, match="twice"):
        await pieces(decode, prompt, handle)


@pytest.mark.parametrize("status", [400, 500, None])
async def test_a_decode_that_does_not_begin_has_not_used_its_handle(
    prefill: FakeEngine, decode: FakeEngine, fabric: Fabric, status: int | None
) -> None:
    prompt = await prefill.render(TEXT)
    handle = (await prefill.prefill(prompt, None)).handle
    decode.failures["decode"].append(EngineError("no", status))
    with pytest.raises(EngineError, match="no"):
        await pieces(decode, prompt, handle)
    assert (len(fabric.kv), fabric.uses.total()) == (1, 0)


async def test_a_release_uses_the_handle(
    prefill: FakeEngine, decode: FakeEngine, fabric: Fabric
) -> None:
    prompt = await prefill.render(TEXT)
    handle = (await prefill.prefill(prompt, None)).handle
    await decode.release(prompt, handle)
    assert (fabric.kv, fabric.uses.total()) == ({}, 1)
    with pytest.raises(EngineError, match="twice"):
        await decode.release(prompt, handle)
    with pytest.raises(EngineError, match="twice"):
        await pieces(decode, prompt, handle)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def calls(folder: Path, *keys: str) -> list[EncodeCall]:
    return [EncodeCall(Media(key, "image_url", "data:"), 1, folder) for key in keys]


async def test_a_refused_picture_costs_its_whole_call(encode: FakeEngine, tmp_path: Path) -> None:
    encode.refused = {"b"}
    with pytest.raises(EngineError) as error:
        await encode.encode(calls(tmp_path, "a", "b"))
    assert error.value.status == 400
    assert (names(tmp_path), encode.encoded.total()) == ([], 0)
    await encode.encode(calls(tmp_path, "a"))
    assert (encode.encoded, encode.encode_calls) == ({"a": 1}, [2, 1])
    assert names(tmp_path) == ["a.json"]


async def test_an_engine_dies_of_a_deadly_picture(encode: FakeEngine, tmp_path: Path) -> None:
    encode.deadly = {"b"}
    for keys in (("a", "b"), ("a",)):
        with pytest.raises(EngineError, match="e0 is dead") as error:
            await encode.encode(calls(tmp_path, *keys))
        assert error.value.retryable
    assert await encode.health() is False
    assert names(tmp_path) == []


async def test_a_failure_may_come_in_the_middle_of_a_call(
    encode: FakeEngine, tmp_path: Path
) -> None:
    encode.permits["encode"] = asyncio.Semaphore(0)
    task = asyncio.create_task(encode.encode(calls(tmp_path, "a")))
    await asyncio.sleep(0)
    assert encode.running
    encode.failures["encode"].append(EngineError("no", 500))
    encode.permits["encode"].release()
    with pytest.raises(EngineError, match="no"):
        await task
    assert names(tmp_path) == []


async def test_a_prompt_with_pictures_needs_their_embeddings(
    prefill: FakeEngine, tmp_path: Path
) -> None:
    prompt = await prefill.render(CHAT)
    for folder in (None, tmp_path):
        with pytest.raises(EmbeddingMissingError):
            await prefill.prefill(prompt, folder)
    (tmp_path / "k0.json").touch()
    assert (await prefill.prefill(prompt, tmp_path)).handle


@pytest.mark.parametrize(
    ("parameters", "route", "decides"),
    [
        ({"max_tokens": 1}, Route.TEXT, True),
        ({"max_tokens": 2}, Route.TEXT, False),
        ({"max_tokens": 1, "structured_outputs": {}}, Route.TEXT, False),
        ({"max_tokens": 1}, Route.OPENAI, False),
    ],
)
async def test_prefill_answers_where_vllms_does(
    prefill: FakeEngine, parameters: dict[str, Any], route: Route, decides: bool
) -> None:
    prompt = replace(await prefill.render(TEXT | parameters), route=route)
    made = await prefill.prefill(prompt, None)
    assert (made.answer is not None, not made.handle) == (decides, decides)


async def test_an_answer_depends_on_the_seed_of_decode_and_on_the_cache_of_prefill(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    prompt = await prefill.render(TEXT | {"seed": 5})
    other = await prefill.render({"prompt": "another", "seed": 5})
    for asked, seed in ((prompt, 5), (prompt.for_leg(2), 7), (other, 5)):
        handle = (await prefill.prefill(prompt, None)).handle
        said = [delta.text for delta in await pieces(decode, asked, handle)]
        assert said == words("a b", (), seed)


@pytest.mark.parametrize("own", [TEXT, TEXT | {"tools": TOOLS}, {"prompt": "a b", "echo": True}])
@pytest.mark.parametrize("max_tokens", [1, 2, 16, 20])
async def test_its_chunks_say_what_its_whole_choice_says(
    prefill: FakeEngine, decode: FakeEngine, own: dict[str, Any], max_tokens: int
) -> None:
    made = replace(await prefill.render(own | {"max_tokens": max_tokens}), route=Route.OPENAI)
    handles = [(await prefill.prefill(made, None)).handle for _ in range(2)]
    (whole,) = await pieces(decode, replace(made, stream=False), handles[0])
    *chunks, usage = await pieces(decode, made, handles[1])
    assert usage.choice is None
    assert usage.usage == whole.usage
    assert [token for chunk in chunks for token in chunk.token_ids] == list(whole.token_ids)
    assert chunks[-1].finish_reason == whole.finish_reason
    counts = [chunk.usage["completion_tokens"] for chunk in chunks if chunk.usage]
    num_tokens = len(counts) - ("messages" in own)  # the role is no token
    assert counts == list(range(num_tokens + 1))[-len(counts) :]
    assert chunks[-1].usage == usage.usage
    assert whole.choice is not None
    assert said(*(chunk.choice for chunk in chunks)) == said(whole.choice)


def said(*choices: Mapping[str, Any] | None) -> str:
    """Text and arguments of a choice, or of its chunks."""
    text = ""
    for choice in choices:
        assert choice is not None
        message = choice.get("message") or choice.get("delta") or choice
        text += message.get("content") or message.get("text") or ""
        for call in message.get("tool_calls", ()):
            text += call["function"]["arguments"]
    return text
