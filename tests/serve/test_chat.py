"""Answers: what a client is told must be what the engines said about its own prompt."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from easerve.engines.fake import TOKENS_PER_ITEM

from .server import (
    CHAT,
    MODEL,
    Content,
    Server,
    answer,
    answer_of,
    answer_words,
    ask_about,
    body,
    image_part,
    picture,
    text_part,
)

RED, GREEN, BLUE = picture("red"), picture("green"), picture("blue")

CONTENTS = {
    "text": ("what is new?", answer("what is new?")),
    "text parts": ([text_part("what is"), text_part("new?")], answer("what is new?")),
    "one picture": (ask_about("which?", RED), answer("which?", RED)),
    "pictures in order": (ask_about("which?", RED, GREEN), answer("which?", RED, GREEN)),
    "the other order": (ask_about("which?", GREEN, RED), answer("which?", GREEN, RED)),
    "duplicates": (ask_about("which?", RED, BLUE, RED), answer("which?", RED, BLUE, RED)),
    "a picture alone": ([image_part(RED)], answer("", RED)),
}


@pytest.mark.parametrize(("content", "expected"), CONTENTS.values(), ids=CONTENTS)
async def test_the_answer_is_right_whole_and_streamed(
    server: Server, content: Content, expected: str
) -> None:
    whole, streamed = await server.ask(content), await server.stream(content)
    assert answer_of(whole) == expected
    assert streamed.text == expected


async def test_pictures_of_several_turns_are_in_the_order_of_the_conversation(
    server: Server,
) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": ask_about("first", RED)},
        {"role": "assistant", "content": "red"},
        {"role": "user", "content": [text_part("second"), *map(image_part, (BLUE, RED))]},
    ]
    response = await server.post({"model": MODEL, "messages": messages})
    assert answer_of(response) == answer("be brief first red second", RED, BLUE, RED)


async def test_media_go_to_the_encoder_as_the_router_wrote_them(server: Server) -> None:
    assert answer_of(await server.ask(ask_about("which?", RED, GREEN))) != answer("which?")
    assert server.engines["e0"].encode_calls == [1, 1]
    assert server.engines["e0"].calls["render"] == 1
    assert server.engines["p0"].calls["render"] == 0


async def test_text_does_not_touch_the_encoder(server: Server) -> None:
    await server.ask("what is new?")
    assert not server.engines["e0"].calls


async def test_a_whole_answer_has_the_form_of_a_chat_completion(server: Server) -> None:
    response = await server.ask(ask_about("what is new?", RED))
    content = response.json()
    assert response.headers["content-type"] == "application/json"
    assert content["object"] == "chat.completion"
    assert content["model"] == MODEL
    assert content["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": answer("what is new?", RED)},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    num_prompt_tokens = TOKENS_PER_ITEM + 3
    assert content["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": 16,
        "total_tokens": num_prompt_tokens + 16,
    }


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason(server: Server) -> None:
    streamed = await server.stream("what is new?")
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["delta"] for chunk in streamed.chunks[1:])
    pieces = [chunk["delta"]["content"] for chunk in streamed.chunks[1:]]
    assert pieces == answer_words("what is new?")
    reasons = [chunk["finish_reason"] for chunk in streamed.chunks]
    assert reasons == [None] * 16 + ["length"]
    assert {event["object"] for event in streamed.events} == {"chat.completion.chunk"}
    assert {event["model"] for event in streamed.events} == {MODEL}
    assert len({(event["id"], event["created"]) for event in streamed.events}) == 1
    assert streamed.num_done == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_a_stream_has_no_usage_unless_asked(
    server: Server, options: dict[str, Any] | None
) -> None:
    streamed = await server.stream("what is new?", stream_options=options)
    assert all("usage" not in event for event in streamed.events)
    assert streamed.num_done == 1


async def test_usage_is_the_last_event_of_a_stream_when_asked(server: Server) -> None:
    streamed = await server.stream("hello", stream_options={"include_usage": True})
    assert streamed.events[-1]["choices"] == []
    usage = {"prompt_tokens": 1, "completion_tokens": 16, "total_tokens": 17}
    assert [event["usage"] for event in streamed.events if "usage" in event] == [usage]
    assert streamed.num_done == 1


@pytest.mark.parametrize(
    ("max_tokens", "num_tokens", "reason"),
    [(1, 1, "length"), (2, 2, "length"), (16, 16, "length"), (20, 16, "stop")],
)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_an_answer_is_as_long_as_asked(
    server: Server, name: str, max_tokens: int, num_tokens: int, reason: str
) -> None:
    expected = "".join(answer_words("hello")[:num_tokens])
    whole = await server.ask("hello", **{name: max_tokens})
    streamed = await server.stream("hello", **{name: max_tokens})
    assert answer_of(whole) == streamed.text == expected
    assert whole.json()["choices"][0]["finish_reason"] == reason
    assert streamed.chunks[-1]["finish_reason"] == reason
    assert whole.json()["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("content", ["hello", ask_about("which?", RED)], ids=["text", "picture"])
async def test_an_answer_of_one_token_is_not_decoded(server: Server, content: Content) -> None:
    whole = await server.ask(content, max_tokens=1)
    streamed = await server.stream(content, max_tokens=1)
    assert answer_of(whole) == streamed.text
    assert [chunk["finish_reason"] for chunk in streamed.chunks] == [None, "length"]
    assert server.num_calls("decode") == 0
    assert server.fabric.kv == {}


@pytest.mark.parametrize("given", ["mine", "a b", "é", "x" * 129, ""])
async def test_ids_are_ours_and_a_well_formed_header_is_echoed(server: Server, given: str) -> None:
    headers = {b"x-request-id": given.encode()}
    whole = await server.client.post(CHAT, json=body("hello"), headers=headers)
    streamed = await server.stream("hello")
    ids = [whole.json()["id"], streamed.events[0]["id"]]
    assert len(set(ids)) == 2
    assert all(each.startswith("chatcmpl-") for each in ids)
    echoed = given if given == "mine" else ids[0]
    assert [whole.headers["x-request-id"], streamed.headers["x-request-id"]] == [echoed, ids[1]]


async def test_hints_for_other_servers_in_a_part_have_no_effect(server: Server) -> None:
    part = image_part(RED) | {"cache_control": {"type": "ephemeral"}}
    part["image_url"] |= {"detail": "low", "foo": 1}
    assert answer_of(await server.ask([part, text_part("which?")])) == answer("which?", RED)


async def test_a_uuid_of_the_client_is_no_key(server: Server) -> None:
    first = [image_part(RED, uuid="same"), text_part("which?")]
    second = [image_part(GREEN, uuid="same"), text_part("which?")]
    answers = await asyncio.gather(server.ask(first), server.ask(second))
    assert [*map(answer_of, answers)] == [answer("which?", RED), answer("which?", GREEN)]


async def test_token_ids_are_returned_when_asked(server: Server) -> None:
    whole = (await server.ask("hello", max_tokens=3, return_token_ids=True)).json()
    streamed = await server.stream("hello", max_tokens=3, return_token_ids=True)
    assert whole["prompt_token_ids"] == streamed.events[0]["prompt_token_ids"] == [15]
    assert whole["choices"][0]["token_ids"] == [100, 101, 102]
    assert [chunk.get("token_ids") for chunk in streamed.chunks] == [None, [100], [101], [102]]


async def test_the_openai_client_reads_our_answers(server: Server) -> None:
    messages: Any = body(ask_about("which?", RED))["messages"]
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(model=MODEL, messages=messages)
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert whole.choices[0].message.content == "".join(pieces) == answer("which?", RED)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage == chunks[-1].usage
