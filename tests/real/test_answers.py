"""Right answers from real engines: golden tokens, the openai SDK, load, and what is left after."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from easerve.workload import shapes

from ..processes import wait_until
from .conftest import RealServer, golden
from .requests import picture_part, text_part, user

MODEL = "tiny-llava"
MAX_TOKENS = 24
TEXTS = (
    "What is in the picture?",
    "How many shapes are there?",
    "What colour is the circle?",
    "Hello",
    "Is there a red square?",
    "What is on the left?",
    "What shape is blue?",
    "Describe the picture.",
    "circle circle circle",
    "yes or no?",
)


def requests_to_compare() -> list[list[dict[str, Any]]]:
    """30 with a picture, 10 of text, 5 with several pictures (one over two turns)."""
    rng = random.Random(20261129)
    scenes = [shapes.draw(rng) for _ in range(45)]
    asked = [shapes.questions(scene, rng) for scene in scenes]
    single = [
        [user([picture_part(scene.picture), text_part(rng.choice(questions).text)])]
        for scene, questions in zip(scenes[:30], asked[:30], strict=True)
    ]
    several = [
        [
            user(
                [
                    *(picture_part(s.picture) for s in scenes[30 + 2 * i : 32 + 2 * i + i % 2]),
                    text_part(TEXTS[i]),
                ]
            )
        ]
        for i in range(4)
    ]
    turns = [
        user([picture_part(scenes[40].picture), text_part(TEXTS[0])]),
        {"role": "assistant", "content": str(scenes[40].things[0])},
        user([text_part(TEXTS[1]), picture_part(scenes[41].picture)]),
    ]
    return [*single, *([user(text)] for text in TEXTS), *several, turns]


def test_tokens_equal_those_of_hugging_face(server: RealServer) -> None:
    requests = requests_to_compare()
    expected = golden(requests)

    async def ask_all() -> list[dict[str, Any]]:
        limit = asyncio.Semaphore(8)
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
                async with limit:
                    response = await client.post(
                        "/v1/chat/completions",
                        json={
                            "model": MODEL,
                            "messages": messages,
                            "temperature": 0,
                            "max_tokens": MAX_TOKENS,
                            "return_token_ids": True,
                        },
                    )
                assert response.status_code == 200, response.text
                answer: dict[str, Any] = response.json()
                return answer

            return await asyncio.gather(*map(ask, requests))

    answers = asyncio.run(ask_all())
    assert len(answers) == len(expected) == 45
    for answer, right in zip(answers, expected, strict=True):
        assert answer["prompt_token_ids"] == right["prompt"]
        assert answer["choices"][0]["token_ids"] == right["answer"]
        assert answer["usage"] == {
            "prompt_tokens": len(right["prompt"]),
            "completion_tokens": len(right["answer"]),
            "total_tokens": len(right["prompt"]) + len(right["answer"]),
        }


@pytest.fixture
def client(server: RealServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        yield client


def test_openai_sdk_whole_and_streamed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    scene = shapes.draw(random.Random(5))
    messages: Any = [user([picture_part(scene.picture), text_part("How many shapes are there?")])]
    whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert whole.choices[0].message.content == " " + shapes.NUMBERS[len(scene.things)]
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_openai_sdk_streams_a_tool_call(client: OpenAI) -> None:
    parameters: dict[str, object] = {
        "type": "object",
        "properties": {"word": {"type": "string", "enum": ["yes", "no"]}},
        "required": ["word"],
    }
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Is there a red circle?"}],
        tools=[{"type": "function", "function": {"name": "say", "parameters": parameters}}],
        tool_choice="required",
        temperature=0,
    ) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    called = choice.message.tool_calls[0].function
    assert called.name == "say"
    json.loads(called.arguments)


def test_openai_sdk_completes_text(client: OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt=["a red", "a blue"], n=2, seed=1, max_tokens=3, logprobs=1
    )
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    for choice in completion.choices:
        assert choice.logprobs
        assert choice.logprobs.tokens
        assert "".join(choice.logprobs.tokens).startswith(choice.text)


def test_questions_of_the_demo_are_answered_right(client: OpenAI) -> None:
    """A hundred new pictures, each with a question as the demo draws it."""
    right = 0
    for seed in range(100):
        rng = random.Random(seed)
        scene = shapes.draw(rng)
        question = rng.choice(shapes.questions(scene, rng))
        messages: Any = [user([picture_part(scene.picture), text_part(question.text)])]
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        right += (answer.choices[0].message.content or "").strip() == question.answer
    assert right >= 95


@pytest.mark.parametrize("max_tokens", [1, 2, 16, 17, 300])
def test_max_tokens_is_kept(server: RealServer, max_tokens: int) -> None:
    scene = shapes.draw(random.Random(6))
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={
            "model": MODEL,
            "messages": [user([picture_part(scene.picture), text_part("What is in the picture?")])],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
        },
        timeout=60,
    ).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens


def test_wrong_input_is_a_400_that_names_the_cause(server: RealServer) -> None:
    long = {"model": MODEL, "messages": [user("word " * 3000)]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=long, timeout=60)
    assert answer.status_code == 400
    assert "1024" in answer.json()["error"]["message"]
    hot = {"model": MODEL, "messages": [user("hi")], "temperature": -3}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=hot, timeout=60)
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]


def test_a_missing_embedding_fails_one_request_and_not_the_engine(
    server: RealServer, client: OpenAI
) -> None:
    transport = httpx.HTTPTransport(uds=str(server.run_dir / "prefill-0.sock"))
    request = {
        "model": MODEL,
        "token_ids": [3] * 25 + [202, 270],
        "features": {
            "mm_hashes": {"image": ["0" * 64]},
            "mm_placeholders": {"image": [{"offset": 0, "length": 25}]},
        },
        "sampling_params": {"max_tokens": 1},
        "ec_transfer_params": {"coming": False},
    }
    with httpx.Client(transport=transport, base_url="http://engine", timeout=60) as prefill:
        for params in (request, {**request, "ec_transfer_params": None}):
            assert prefill.post("/inference/v1/generate", json=params).status_code == 500
        assert prefill.get("/health").status_code == 200
    scene = shapes.draw(random.Random(7))
    messages: Any = [user([picture_part(scene.picture), text_part("How many shapes are there?")])]
    answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert answer.choices[0].message.content == " " + shapes.NUMBERS[len(scene.things)]


def metric(text: str, name: str) -> float:
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def test_load_leaves_nothing_behind(server: RealServer) -> None:
    """200 requests, 16 in flight, a quarter of them text, some of them dropped half-way."""
    rng = random.Random(8)
    scenes = [shapes.draw(rng) for _ in range(60)]

    async def ask(client: AsyncOpenAI, number: int, limit: asyncio.Semaphore) -> None:
        scene = scenes[number % len(scenes)]
        parts = [text_part("How many shapes are there?")]
        if number % 4:
            parts.insert(0, picture_part(scene.picture))
        messages: Any = [user(parts)]
        async with limit:
            stream = await client.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=16, stream=True
            )
            if number % 10 == 0:
                await stream.close()
                return
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        if number % 4:
            answers[number] = text == " " + shapes.NUMBERS[len(scene.things)]

    async def ask_all() -> None:
        limit = asyncio.Semaphore(16)
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            await asyncio.gather(*(ask(client, number, limit) for number in range(200)))

    answers: dict[int, bool] = {}
    before = httpx.get(f"{server.url}/metrics").text
    asyncio.run(ask_all())
    assert sum(answers.values()) >= 0.95 * len(answers)  # the model itself is not always right

    def settled() -> bool:
        text = httpx.get(f"{server.url}/metrics").text
        gauges = ("easerve_requests_open", "easerve_queue_length", "easerve_backlog_tokens")
        return not any(metric(text, name) for name in gauges)

    wait_until(settled, 10, "no open request, empty queues")
    after = httpx.get(f"{server.url}/metrics").text
    for name, number in (("_total", 200), (r"_total{outcome=\"failed\"}", 0)):
        name = f"easerve_requests{name}"
        assert metric(after, name) - metric(before, name) == number

    def engine_idle(name: str) -> bool:
        transport = httpx.HTTPTransport(uds=str(server.run_dir / f"{name}.sock"))
        with httpx.Client(transport=transport, base_url="http://engine") as engine:
            text = engine.get("/metrics").text
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(metric(text, f"vllm:{gauge}") for gauge in gauges)

    for name in ("encode-0", "prefill-0", "decode-0"):
        # A KV cache that was prefilled for a client who left is kept until its lease ends.
        wait_until(partial(engine_idle, name), 45, f"{name} idle, its KV blocks free")
