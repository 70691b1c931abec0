"""Answers over HTTP: a client is told what the engines said about its own prompt."""

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from easerve.engines.fake import TOKENS_PER_ITEM

from .conftest import Serve
from .server import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Content,
    Server,
    Streamed,
    answer,
    answer_of,
    answer_words,
    answers_of,
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
    assert server.engines["e0"].encode_calls == [2]
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


# Several choices ----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["hello", ask_about("which?", RED)], ids=["text", "picture"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_each_choice_has_its_own_prefill_handle_and_decode(
    server: Server, content: Content, stream: bool
) -> None:
    if stream:
        await server.stream(content, n=3)
    else:
        await server.ask(content, n=3)
    calls = [server.num_calls(call) for call in ("render", "prefill", "decode")]
    assert calls == [1, 3, 3]
    assert server.engines["e0"].calls["encode"] == (0 if content == "hello" else 1)
    assert list(server.fabric.uses.values()) == [1, 1, 1]
    assert server.fabric.kv == {}


@pytest.mark.parametrize("max_tokens", [1, 5, 16])
async def test_the_seeds_of_choices_count_up_from_the_requests(
    server: Server, max_tokens: int
) -> None:
    expected = ["".join(answer_words("hello", seed=7 + leg)[:max_tokens]) for leg in range(3)]
    assert len(set(expected)) == 3
    asked = {"n": 3, "seed": 7, "max_tokens": max_tokens}
    assert answers_of(await server.ask("hello", **asked)) == expected
    assert (await server.stream("hello", **asked)).texts == expected


async def test_without_a_seed_no_choice_gets_one(server: Server) -> None:
    assert answers_of(await server.ask("hello", n=2)) == [answer("hello")] * 2


async def test_a_stream_of_several_choices_begins_and_ends_each(server: Server) -> None:
    streamed = await server.stream(
        ask_about("which?", RED), n=3, seed=1, stream_options={"include_usage": True}
    )
    assert streamed.texts == [answer("which?", RED, seed=seed) for seed in (1, 2, 3)]
    for number in range(3):
        parts = [chunk for chunk in streamed.chunks if chunk["index"] == number]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in part["delta"] for part in parts[1:])
        assert [part["finish_reason"] for part in parts] == [*[None] * 16, "length"]
    assert len({event["id"] for event in streamed.events}) == 1
    prompt = TOKENS_PER_ITEM + 1
    assert streamed.events[-1]["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 48,
        "total_tokens": prompt + 48,
    }
    assert streamed.num_done == 1


# Text completions ---------------------------------------------------------------------------------

PROMPTS: dict[str, tuple[Any, list[str], int]] = {
    "a text": ("what is new?", ["what is new?"], 3),
    "tokens": ([5, 6], ["5 6"], 2),
    "texts": (["what is new?", "hello"], ["what is new?", "hello"], 4),
    "lists of tokens": ([[5, 6], [7]], ["5 6", "7"], 3),
}


@pytest.mark.parametrize(("prompt", "texts", "num_tokens"), PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("n", [1, 2])
async def test_every_prompt_has_its_choices_in_order(
    server: Server, prompt: Any, texts: list[str], num_tokens: int, n: int
) -> None:
    expected = [answer(text, seed=seed) for text in texts for seed in range(4, 4 + n)]
    whole = await server.complete(prompt, n=n, seed=4)
    options = {"include_usage": True}
    streamed = await server.stream_completion(prompt, n=n, seed=4, stream_options=options)
    assert answers_of(whole) == expected
    assert streamed.texts == expected
    usage = {
        "prompt_tokens": num_tokens,
        "completion_tokens": 16 * len(expected),
        "total_tokens": num_tokens + 16 * len(expected),
    }
    assert whole.json()["usage"] == streamed.events[-1]["usage"] == usage
    assert server.num_calls("render") == 2 * len(texts)
    assert server.num_calls("prefill") == server.num_calls("decode") == 2 * len(expected)


async def test_a_whole_completion_has_the_form_of_one(server: Server) -> None:
    response = await server.complete("hello", max_tokens=2)
    content = response.json()
    assert content["object"] == "text_completion"
    assert content["id"].startswith("cmpl-")
    assert response.headers["x-request-id"] == content["id"]
    assert content["choices"] == [
        {
            "index": 0,
            "text": "".join(answer_words("hello")[:2]),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


async def test_a_streamed_completion_has_one_id_and_no_roles(server: Server) -> None:
    streamed = await server.stream_completion(["a", "b"])
    assert {event["object"] for event in streamed.events} == {"text_completion"}
    assert len({event["id"] for event in streamed.events}) == 1
    assert all("delta" not in chunk for chunk in streamed.chunks)
    assert len(streamed.chunks) == 32
    assert streamed.num_done == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_echoed_prompt_comes_before_the_answer(server: Server, stream: bool) -> None:
    prompts, asked = ["hello", "you"], {"echo": True, "max_tokens": 3}
    expected = [prompt + "".join(answer_words(prompt)[:3]) for prompt in prompts]
    if stream:
        options = {"include_usage": True}
        streamed = await server.stream_completion(prompts, **asked, stream_options=options)
        texts, usage = streamed.texts, streamed.events[-1]["usage"]
    else:
        response = await server.complete(prompts, **asked)
        texts, usage = answers_of(response), response.json()["usage"]
    assert texts == expected
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2, 6)


async def test_continuous_usage_counts_the_tokens_of_an_echo_too(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"echo": True, "max_tokens": 3, "stream_options": options}
    streamed = await server.stream_completion("hello you", **asked)
    *usages, whole = [event["usage"] for event in streamed.events]
    assert [usage["completion_tokens"] for usage in usages] == [1, 2, 3]
    assert whole == usages[-1] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_tokens_of_a_prompt_are_returned_with_its_choices(
    server: Server, stream: bool
) -> None:
    asked = {"return_token_ids": True, "max_tokens": 2}
    if stream:
        choices = (await server.stream_completion([[5, 6], [7]], **asked)).chunks
        given = [choice for choice in choices if "prompt_token_ids" in choice]
    else:
        given = (await server.complete([[5, 6], [7]], **asked)).json()["choices"]
        assert [choice["token_ids"] for choice in given] == [[100, 101]] * 2
    by_choice = {choice["index"]: choice["prompt_token_ids"] for choice in given}
    assert (len(given), by_choice) == (2, {0: [5, 6], 1: [7]})


async def test_the_openai_client_reads_our_completions(server: Server) -> None:
    """Its schema has no reason for a chunk that is not the last; OpenAI sends null there, too."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        strict = client.with_options(_extra_kwargs={"_strict_response_validation": True})
        whole = await strict.completions.create(model=MODEL, prompt=["a", "b"], n=2)
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        pieces = [chunk.choices[0].text async for chunk in stream]
    assert [choice.text for choice in whole.choices] == [*[answer("a")] * 2, *[answer("b")] * 2]
    assert "".join(pieces) == answer("a")


# Tools --------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOOLS = {"tools": [TOOL], "max_tokens": 20}


def calls_of(streamed: Streamed) -> list[dict[str, str]]:
    """Name and arguments of each choice's call, as a client joins them."""
    calls: dict[int, dict[str, str]] = {}
    for chunk in streamed.chunks:
        call = calls.setdefault(chunk["index"], {"name": "", "arguments": ""})
        for piece in chunk["delta"].get("tool_calls", ()):
            for name in call:
                call[name] += piece["function"].get(name, "")
    return [calls[index] for index in sorted(calls)]


async def test_a_tool_is_called_whole(server: Server) -> None:
    response = await server.ask(ask_about("which?", RED), **TOOLS, n=2, seed=1)
    content = response.json()
    assert [choice["index"] for choice in content["choices"]] == [0, 1]
    for seed, choice in enumerate(content["choices"], 1):
        (call,) = choice["message"]["tool_calls"]
        expected = {"name": "look", "arguments": answer("which?", RED, seed=seed)}
        assert call["function"] == expected
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        assert "token_ids" not in choice
    prompt = TOKENS_PER_ITEM + 1
    assert content["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 32,
        "total_tokens": prompt + 32,
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


async def test_a_tool_is_called_in_pieces(server: Server) -> None:
    streamed = await server.stream(
        ask_about("which?", RED), **TOOLS, n=2, seed=1, stream_options={"include_usage": True}
    )
    assert calls_of(streamed) == [
        {"name": "look", "arguments": answer("which?", RED, seed=seed)} for seed in (1, 2)
    ]
    reasons = [chunk["finish_reason"] for chunk in streamed.chunks if chunk["finish_reason"]]
    assert reasons == ["tool_calls"] * 2
    assert all("token_ids" not in chunk for chunk in streamed.chunks)
    assert len({event["id"] for event in streamed.events}) == 1
    assert streamed.events[-1]["usage"]["completion_tokens"] == 32
    assert streamed.num_done == 1


async def test_a_stream_by_decode_says_the_role_of_each_choice_once(server: Server) -> None:
    streamed = await server.stream("hello", **TOOLS, n=2)
    roles = [chunk["index"] for chunk in streamed.chunks if "role" in chunk["delta"]]
    assert sorted(roles) == [0, 1]


async def test_an_answer_that_comes_whole_has_no_first_token_to_time(server: Server) -> None:
    await server.ask("hello", **TOOLS)
    await server.stream("hello", **TOOLS)
    await server.idle()
    whole, streamed = server.driver.timelines.values()
    assert "ttft" not in whole
    assert 0 <= streamed["ttft"] <= streamed["end"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_one_token_with_tools_is_decodes_to_parse(server: Server, stream: bool) -> None:
    if stream:
        await server.stream("hello", tools=[TOOL], max_tokens=1)
    else:
        await server.ask("hello", tools=[TOOL], max_tokens=1)
    assert (server.num_calls("prefill"), server.num_calls("decode")) == (1, 1)


async def test_engines_that_know_reasoning_word_every_answer(serve: Serve) -> None:
    server = await serve(engine={"reasoning_parser": "qwen3"})
    response = await server.ask("hello")
    assert answer_of(response) == (await server.stream("hello")).text == answer("hello")
    details = {"reasoning_tokens": 1}
    assert response.json()["usage"]["completion_tokens_details"] == details


async def test_the_openai_client_reads_a_tool_call_and_sends_it_back(server: Server) -> None:
    messages: Any = body("hello")["messages"]
    asked: Any = {"model": MODEL, **TOOLS}
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        whole = await client.chat.completions.create(messages=messages, **asked)
        said = whole.choices[0].message
        messages += [
            said.model_dump(),
            {"role": "tool", "content": "one", "tool_call_id": said.tool_calls[0].id},
        ]
        again = await client.chat.completions.create(messages=messages, model=MODEL)
    assert said.tool_calls[0].function.name == "look"
    assert again.choices[0].message.content == answer("hello one")


# Logprobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("top", "number"), [(None, 0), (0, 0), (2, 2)])
async def test_logprobs_come_with_each_token(server: Server, top: int | None, number: int) -> None:
    asked = {"logprobs": True, "top_logprobs": top, "max_tokens": 3}
    whole = (await server.ask("hello", **asked)).json()["choices"][0]["logprobs"]["content"]
    streamed = await server.stream("hello", **asked)
    pieces = [chunk["logprobs"] for chunk in streamed.chunks]
    assert [entry["token"] for entry in whole] == answer_words("hello")[:3]
    assert {len(entry["top_logprobs"]) for entry in whole} == {number}
    assert pieces[0] is None
    assert [entry for piece in pieces[1:] for entry in piece["content"]] == whole


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_schema_of_a_body_is_documented(server: Server, path: str) -> None:
    schema = (await server.client.get("/openapi.json")).json()["paths"][path]["post"]
    assert schema["requestBody"]["content"]["application/json"]["schema"]["properties"]["model"]
