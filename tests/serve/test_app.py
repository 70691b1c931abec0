"""The edge of the API: what is refused, how, and the routes beside chat."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from .conftest import Serve
from .server import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Server,
    answer,
    answer_of,
    ask_about,
    body,
    error_of,
    metrics_of,
    picture,
    until,
)

RED = picture("red")
JSON = {"content-type": "application/json"}


# Bodies -------------------------------------------------------------------------------------------


USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"hello",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": NaN}',
        b"{'model': 1}",
        b"{} {}",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    ],
    ids=range(11),
)
async def test_a_body_that_is_not_json_is_a_400(server: Server, content: bytes) -> None:
    response = await server.client.post(CHAT, content=content, headers=JSON)
    error = error_of(response, 400)
    assert error["message"].startswith("The body is not valid JSON")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["metadata", "response_format"])
async def test_nothing_that_can_be_read_is_nested_too_deep_for_us(
    server: Server, name: str
) -> None:
    own = json.dumps(body("hello", max_tokens=1)).encode()[:-1]

    async def status(depth: int, name: str) -> int:
        nested = b'{"a":' * depth + b"1" + b"}" * depth
        content = own + f', "{name}": '.encode() + nested + b"}"
        return (await server.client.post(CHAT, content=content, headers=JSON)).status_code

    read, too_deep = 1, 1000  # what is ignored is only read
    while too_deep - read > 1:
        depth = (read + too_deep) // 2
        if await status(depth, "metadata") == 200:
            read = depth
        else:
            too_deep = depth
    statuses = [await status(depth, name) for depth in range(read - 9, too_deep + 1)]
    assert statuses == sorted(statuses)
    assert set(statuses) == {200, 400}


@pytest.mark.parametrize("content", [b"[]", b'"hello"', b"1", b"null", b"true"])
async def test_a_body_that_is_no_object_is_a_400(server: Server, content: bytes) -> None:
    response = await server.client.post(CHAT, content=content, headers=JSON)
    assert "must be a JSON object" in error_of(response, 400)["message"]


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_what_is_not_declared_json_is_a_415(server: Server, media_type: str | None) -> None:
    headers = {} if media_type is None else {"content-type": media_type}
    response = await server.client.post(CHAT, content=json.dumps(body("a")), headers=headers)
    assert "application/json" in error_of(response, 415)["message"]


@pytest.mark.parametrize(
    "messages",
    [[USER | {"content": [0] * 300_000}], [0] * 300_000, [USER] * 300_000],
    ids=["bad parts", "bad messages", "messages"],
)
async def test_a_body_of_many_mistakes_is_refused_at_the_first(
    server: Server, messages: list[Any]
) -> None:
    begin = time.monotonic()
    error_of(await server.post(body("a") | {"messages": messages}), 400)
    assert time.monotonic() - begin < 2


async def test_bodies_that_are_being_read_are_bounded_in_all(serve: Serve) -> None:
    server = await serve(limits={"max_held": 100_000})
    released = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b" " * 90_000
        await released.wait()
        yield json.dumps(body("a")).encode()

    reads = [asyncio.create_task(server.client.post(CHAT, content=slowly(), headers=JSON))]
    await until(lambda: server.open_connections())
    refused = await server.client.post(CHAT, content=b" " * 90_000, headers=JSON)
    assert error_of(refused, 429)["code"] == "overloaded"
    released.set()
    assert answer_of(await reads[0]) == answer("a")


async def test_a_body_with_a_length_over_the_limit_is_a_413(serve: Serve) -> None:
    server = await serve(limits={"max_body": 10_000})
    error = error_of(await server.ask("x" * 10_000), 413)
    assert "10000 bytes" in error["message"]
    assert answer_of(await server.ask("x" * 9_000)) == answer("x" * 9_000)


async def test_a_body_without_a_length_over_the_limit_is_a_413(serve: Serve) -> None:
    server = await serve(limits={"max_body": 10_000})

    async def pieces(number: int) -> AsyncIterator[bytes]:
        content = json.dumps(body("x" * 1000 * number)).encode()
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]

    response = await server.client.post(CHAT, content=pieces(20), headers=JSON)
    assert "content-length" not in response.request.headers
    error_of(response, 413)
    response = await server.client.post(CHAT, content=pieces(5), headers=JSON)
    assert answer_of(response) == answer("x" * 5000)


async def test_a_client_that_leaves_while_it_sends_is_no_error(server: Server) -> None:
    client = await server.connect({})
    client.writer.write(f"POST {CHAT} HTTP/1.1\r\ncontent-length: 1000\r\n\r\n{{".encode())
    await client.writer.drain()
    await client.reader.readuntil(b"\r\n\r\n")
    await client.leave()
    await until(lambda: not server.open_connections())
    assert answer_of(await server.ask("hello")) == answer("hello")


# Fields -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [USER, {"content": "hello"}]}, "messages[1].role"),
        ({"messages": [USER, USER | {"role": "boss"}]}, "messages[1].role"),
        ({"messages": [USER, USER | {"content": 5}]}, "messages[1].content"),
        ({"messages": [USER | {"content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [USER | {"content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
        ),
        (
            {"messages": [USER | {"content": [{"type": "image_url", "image_url": "data:"}]}]},
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [USER | {"content": [{"type": "video_url", "video_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"stream": "perhaps"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"foo": 1}, "foo"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"functions": [{}]}, "functions"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"ec_transfer_params": {"coming": [0]}}, "ec_transfer_params"),
    ],
)
async def test_a_wrong_field_is_a_400_that_names_it(
    server: Server, change: dict[str, Any], param: str
) -> None:
    request = {name: value for name, value in (body("hello") | change).items() if value is not None}
    error = error_of(await server.post(request), 400)
    assert error["param"] == param
    assert param in error["message"]
    assert server.num_calls("render") == 0


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0, "top_p": 0.5, "seed": 1, "stop": ["x"]},
        {"user": "me", "store": False, "metadata": {"a": "b"}},
        {"n": 1},
        {"stream": False},
        {"stream_options": None},
        {"stream": None, "n": None, "tools": None, "anything": None},
        {"logprobs": True, "top_logprobs": 2},
        {"logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
    ],
)
async def test_what_openai_clients_send_is_taken(
    server: Server, parameters: dict[str, Any]
) -> None:
    expected = answer("hello", seed=parameters.get("seed"))
    assert answer_of(await server.ask("hello", **parameters)) == expected


async def test_an_unknown_model_is_a_404(server: Server) -> None:
    error = error_of(await server.post(body("hello") | {"model": "gpt-5"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]


async def test_long_names_are_not_sent_back(server: Server) -> None:
    for change in ({"x" * 100_000: 1}, {"model": "x" * 100_000}):
        response = await server.post(body("hello") | change)
        assert response.status_code in (400, 404)
        assert len(response.content) < 2000


@pytest.mark.parametrize("limit", [0, 2])
async def test_too_many_pictures_are_a_400(serve: Serve, limit: int) -> None:
    server = await serve(limits={"limit_mm_per_prompt": {"image": limit}})
    error = error_of(await server.ask(ask_about("which?", *[RED] * (limit + 1))), 400)
    assert error["param"] == "messages"
    assert f"At most {limit} image(s)" in error["message"]
    enough = [RED] * limit
    assert answer_of(await server.ask(ask_about("which?", *enough))) == answer("which?", *enough)


# Keys and paths -----------------------------------------------------------------------------------

KEY = "sk-test"
CLOSED = [
    ("POST", CHAT),
    ("GET", CHAT),
    ("POST", COMPLETIONS),
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/no/such/path"),
    ("GET", "/health/"),
    ("GET", "//health"),
]


@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer wrong", "Bearer ä", f"Basic {KEY}"])
@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_every_path_needs_the_key(
    serve: Serve, method: str, path: str, key: str | None
) -> None:
    server = await serve(server={"api_key": KEY})
    headers = [] if key is None else [(b"authorization", key.encode())]
    response = await server.client.request(
        method, server.url + path, headers=headers, json=body("hello")
    )
    error = error_of(response, 401)
    assert error["type"] == "authentication_error"
    assert error["code"] == "invalid_api_key"
    assert server.num_calls("render") == 0


async def test_the_key_opens_every_path(serve: Serve) -> None:
    server = await serve(server={"api_key": KEY})
    for header in (f"Bearer {KEY}", f"bearer {KEY}"):
        assert answer_of(await server.post(body("hello"), authorization=header)) == answer("hello")
    headers = {"authorization": f"Bearer {KEY}"}
    for path in ("/v1/models", "/metrics"):
        assert (await server.client.get(path, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_need_no_key(serve: Serve, path: str) -> None:
    server = await serve(server={"api_key": KEY})
    assert (await server.client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/no/such/path", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("GET", COMPLETIONS, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ],
)
async def test_a_wrong_path_or_method_is_an_openai_error(
    server: Server, method: str, path: str, status: int
) -> None:
    error = error_of(await server.client.request(method, path), status)
    assert error["type"] == "invalid_request_error"


# Readiness, models, metrics -----------------------------------------------------------------------


async def test_before_its_engines_the_server_lives_but_is_not_ready(serve: Serve) -> None:
    server = await serve(engines=())
    assert (await server.client.get("/health")).status_code == 200
    response = await server.client.get("/ready")
    assert (response.status_code, response.json()) == (503, {"ready": False, "engines": []})
    response = await server.ask("hello")
    assert error_of(response, 503)["code"] == "no_worker"
    assert int(response.headers["retry-after"]) > 0


async def test_it_is_ready_when_every_stage_has_an_engine(serve: Serve) -> None:
    server = await serve(engines=())
    for name in ("d0", "e0", "e1"):
        server.add(name)
        assert (await server.client.get("/ready")).status_code == 503
    server.add("p0")
    response = await server.client.get("/ready")
    engines = ["d0", "e0", "e1", "p0"]
    assert (response.status_code, response.json()) == (200, {"ready": True, "engines": engines})
    server.lose("d0")
    assert (await server.client.get("/ready")).status_code == 503


async def test_the_one_model_is_listed(server: Server) -> None:
    content = (await server.client.get("/v1/models")).json()
    assert content["object"] == "list"
    assert [(model["id"], model["object"]) for model in content["data"]] == [(MODEL, "model")]
    assert content["data"][0]["max_model_len"] is None  # the deployment says nothing of it


async def test_metrics_count_what_happened(server: Server) -> None:
    await asyncio.gather(server.ask(ask_about("which?", RED)), server.ask("hello", max_tokens=1))
    await server.ask(ask_about("which?", "data:"))
    server.hold("prefill")
    task = asyncio.create_task(server.ask("one more"))
    await server.working("prefill")
    metrics = await metrics_of(server)
    expected = {
        "easerve_requests_total completed": 2,
        "easerve_requests_total failed": 1,
        "easerve_requests_open": 1,
        "easerve_prompt_tokens_total": 4 + 1 + 1,
        "easerve_output_tokens_total": 16 + 1,
        "easerve_prepare_call_seconds_count": 3,
        "easerve_encode_call_seconds_count": 1,
        "easerve_prefill_call_seconds_count": 2,
        "easerve_decode_call_seconds_count": 1,
        "easerve_request_ttft_seconds_count": 2,
        "easerve_request_tpot_seconds_count": 1,
        "easerve_queue_length encode": 0,
        "easerve_queue_length prefill": 0,
        "easerve_workers encode": 1,
        "easerve_workers prefill": 1,
        "easerve_workers decode": 1,
        "easerve_backlog_tokens e0": 0,
        "easerve_backlog_tokens p0": 2,
        "easerve_backlog_tokens d0": 0,
    }
    assert {name: metrics.get(name) for name in expected} == expected
    server.release()
    await task
