"""The fake engines keep the rules that the server's tests rely on."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from easerve.engines.fake import BYTES_PER_ITEM, Fabric, FakeEngine, words
from easerve.engines.protocol import (
    Bundle,
    Delta,
    EmbeddingMissingError,
    EncodeCall,
    Encoded,
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
    handle = (await prefill.prefill(prompt, coming=())).handle
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
    handle = (await prefill.prefill(prompt, coming=())).handle
    decode.failures["decode"].append(EngineError("no", status))
    with pytest.raises(EngineError, match="no"):
        await pieces(decode, prompt, handle)
    assert (len(fabric.kv), fabric.uses.total()) == (1, 0)


async def test_a_release_uses_the_handle(
    prefill: FakeEngine, decode: FakeEngine, fabric: Fabric
) -> None:
    prompt = await prefill.render(TEXT)
    handle = (await prefill.prefill(prompt, coming=())).handle
    await decode.release(prompt, handle)
    assert (fabric.kv, fabric.uses.total()) == ({}, 1)
    with pytest.raises(EngineError, match="twice"):
        await decode.release(prompt, handle)
    with pytest.raises(EngineError, match="twice"):
        await pieces(decode, prompt, handle)


# Embeddings ---------------------------------------------------------------------------------------

P0, P1 = WorkerId("p0"), WorkerId("p1")


def calls(*keys: str, to: tuple[WorkerId, ...] = (P0,)) -> list[EncodeCall]:
    return [EncodeCall(Media(key, "image_url", "data:"), 1, to) for key in keys]


def pushed(engine: FakeEngine) -> tuple[list[str], list[Bundle]]:
    """What came to a prefill engine, and in which bundles since it last said so."""
    return list(engine.store.keys), list(engine.store.news()[0])


async def test_each_destination_gets_one_bundle_of_what_is_for_it(
    encode: FakeEngine, prefill: FakeEngine, fabric: Fabric
) -> None:
    other = FakeEngine(P1, Stage.PREFILL, fabric)
    items = [*calls("a"), *calls("b", to=(P0, P1)), *calls("c", to=(P1, WorkerId("gone")))]
    assert await encode.encode(items) == Encoded()
    assert pushed(prefill) == (["a", "b"], [Bundle(2, 2 * BYTES_PER_ITEM, 0.0)])
    assert pushed(other) == (["b", "c"], [Bundle(2, 2 * BYTES_PER_ITEM, 0.0)])
    assert encode.encoded == {"a": 1, "b": 1, "c": 1}


async def test_what_the_encoder_has_is_sent_without_a_forward(
    encode: FakeEngine, prefill: FakeEngine, fabric: Fabric
) -> None:
    other = FakeEngine(P1, Stage.PREFILL, fabric)
    await encode.encode(calls("a"))
    await encode.encode(calls("a", "b", to=(P1,)))
    assert pushed(prefill)[0] == ["a"]
    assert pushed(other)[0] == ["a", "b"]
    assert (encode.encoded, encode.resent) == ({"a": 1, "b": 1}, {"a": 1})


async def test_an_encoder_says_once_what_it_keeps_no_longer(
    fabric: Fabric, prefill: FakeEngine
) -> None:
    encode = FakeEngine(WorkerId("e0"), Stage.ENCODE, fabric, cache_items=2)
    assert (await encode.encode(calls("a", "b"))).evicted == ()
    assert (await encode.encode(calls("c"))).evicted == ("a",)
    assert (await encode.encode(calls("c"))).evicted == ()
    await encode.encode(calls("a"))
    assert encode.encoded == {"a": 2, "b": 1, "c": 1}
    assert pushed(prefill)[0] == ["a", "b", "c"]


async def test_a_push_that_gets_lost_is_lost_once(encode: FakeEngine, prefill: FakeEngine) -> None:
    encode.lost = {"a"}
    await encode.encode(calls("a", "b"))
    assert pushed(prefill) == (["b"], [Bundle(1, BYTES_PER_ITEM, 0.0)])
    await encode.encode(calls("a"))
    assert pushed(prefill)[0] == ["b", "a"]


async def test_a_refused_picture_costs_its_whole_call(
    encode: FakeEngine, prefill: FakeEngine
) -> None:
    encode.refused = {"b"}
    with pytest.raises(EngineError) as error:
        await encode.encode(calls("a", "b"))
    assert error.value.status == 400
    assert (pushed(prefill), encode.encoded.total()) == (([], []), 0)
    await encode.encode(calls("a"))
    assert (encode.encoded, encode.encode_calls) == ({"a": 1}, [2, 1])
    assert pushed(prefill)[0] == ["a"]


async def test_an_engine_dies_of_a_deadly_picture(encode: FakeEngine, prefill: FakeEngine) -> None:
    encode.deadly = {"b"}
    for keys in (("a", "b"), ("a",)):
        with pytest.raises(EngineError, match="e0 is dead") as error:
            await encode.encode(calls(*keys))
        assert error.value.retryable
    assert await encode.health() is False
    assert pushed(prefill) == ([], [])


async def test_a_failure_may_come_in_the_middle_of_a_call(
    encode: FakeEngine, prefill: FakeEngine
) -> None:
    encode.permits["encode"] = asyncio.Semaphore(0)
    task = asyncio.create_task(encode.encode(calls("a")))
    await asyncio.sleep(0)
    assert encode.running
    encode.failures["encode"].append(EngineError("no", 500))
    encode.permits["encode"].release()
    with pytest.raises(EngineError, match="no"):
        await task
    assert pushed(prefill) == ([], [])


@pytest.mark.parametrize("coming", [[0], []])
async def test_a_prompt_with_pictures_needs_their_embeddings(
    fabric: Fabric, encode: FakeEngine, coming: list[int]
) -> None:
    prefill = FakeEngine(P0, Stage.PREFILL, fabric, timeout_s=0.01)
    prompt = await prefill.render(CHAT)
    with pytest.raises(EmbeddingMissingError) as error:
        await prefill.prefill(prompt, coming)
    assert (error.value.keys, error.value.retryable) == (("k0",), True)
    await encode.encode(calls("k0"))
    made = await prefill.prefill(prompt, coming=())
    assert made.handle
    assert made.bundles == (Bundle(1, BYTES_PER_ITEM, 0.0),)


async def test_prefill_waits_for_what_is_coming_and_says_how_long(
    encode: FakeEngine, prefill: FakeEngine
) -> None:
    task = asyncio.create_task(prefill.prefill(await prefill.render(CHAT), coming=[0]))
    await asyncio.sleep(0.05)
    assert not task.done()
    await encode.encode(calls("k0"))
    wait_s = (await task).wait_s
    assert wait_s is not None
    assert wait_s > 0.04


async def test_prefill_says_once_what_came_and_what_it_keeps_no_longer(
    fabric: Fabric, encode: FakeEngine
) -> None:
    prefill = FakeEngine(P0, Stage.PREFILL, fabric, cache_items=1)
    await encode.encode(calls("a"))
    await encode.encode(calls("k0"))
    prompt = await prefill.render(CHAT)
    first, second = [await prefill.prefill(prompt, coming=()) for _ in range(2)]
    assert (len(first.bundles), first.evicted) == (2, ("a",))
    assert (second.bundles, second.evicted) == ((), ())


# Answers ------------------------------------------------------------------------------------------


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
    made = await prefill.prefill(prompt, coming=())
    assert (made.answer is not None, not made.handle) == (decides, decides)


async def test_an_answer_depends_on_the_seed_of_decode_and_on_the_cache_of_prefill(
    prefill: FakeEngine, decode: FakeEngine
) -> None:
    prompt = await prefill.render(TEXT | {"seed": 5})
    other = await prefill.render({"prompt": "another", "seed": 5})
    for asked, seed in ((prompt, 5), (prompt.for_leg(2), 7), (other, 5)):
        handle = (await prefill.prefill(prompt, coming=())).handle
        said = [delta.text for delta in await pieces(decode, asked, handle)]
        assert said == words("a b", (), seed)


@pytest.mark.parametrize("own", [TEXT, TEXT | {"tools": TOOLS}, {"prompt": "a b", "echo": True}])
@pytest.mark.parametrize("max_tokens", [1, 2, 16, 20])
async def test_its_chunks_say_what_its_whole_choice_says(
    prefill: FakeEngine, decode: FakeEngine, own: dict[str, Any], max_tokens: int
) -> None:
    made = replace(await prefill.render(own | {"max_tokens": max_tokens}), route=Route.OPENAI)
    handles = [(await prefill.prefill(made, coming=())).handle for _ in range(2)]
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
