import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.protocol import (
    Delta,
    EmbeddingMissingError,
    EncodeCall,
    EngineError,
    Media,
    Prompt,
)
from easerve.engines.vllm import client
from easerve.engines.vllm.client import GENERATE, VllmEngine
from easerve.types import MediaItem, Modality, Stage, WorkerId

from .stand_in import Answer, StandIn, breaks_off, fails, replies, stand_in, streams

FEATURES = {
    "mm_hashes": {"image": ["k0", "k1"]},
    "mm_placeholders": {"image": [{"offset": 1, "length": 2}, {"offset": 4, "length": 3}]},
    "kwargs_data": None,
}
ITEMS = (MediaItem("k0", Modality.IMAGE, 2), MediaItem("k1", Modality.IMAGE, 3))
TOKENS = [1, 32, 32, 5, 33, 33, 33, 6]
PROMPT = Prompt(TOKENS, {"max_tokens": 9, "temperature": 0.0}, FEATURES, ITEMS, (32, 33))
TEXT = Prompt([1, 2, 3], {"max_tokens": 9})
HANDLE = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "p"}


def choice(text: str, token: int, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "text": text,
        "token_ids": [token],
        "finish_reason": finish,
        "stop_reason": None,
    } | more


def prefilled(
    finish: str = "length", handle: Mapping[str, Any] | None = HANDLE, **more: Any
) -> dict[str, Any]:
    """vLLM's reply to prefill."""
    choices = [choice("two", 7, finish)]
    return {"choices": choices, "kv_transfer_params": handle, "ec_transfer_params": None} | more


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StandIn]:
    async with stand_in(tmp_path / "s") as server:
        yield server


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(WorkerId("e-0"), Stage.PREFILL, tmp_path / "s", "tiny")
    yield engine
    await engine.close()


async def decode(engine: VllmEngine, prompt: Prompt = PROMPT) -> list[Delta]:
    return [delta async for delta in engine.decode(prompt, HANDLE)]


async def call(engine: VllmEngine, method: str) -> object:
    """Call one of the engine's methods with something fit."""
    match method:
        case "render":
            return await engine.render({"messages": []})
        case "encode":
            media = Media("k0", "image_url", "data:,")
            await engine.encode([EncodeCall(media, 32, Path("/shm/r"))])
            return None
        case "prefill":
            return await engine.prefill(TEXT, None)
        case "decode":
            return await decode(engine)
        case "metrics":
            return await engine.metrics()
    raise AssertionError(method)


every_method = pytest.mark.parametrize("method", ["render", "encode", "prefill", "decode"])


# Render ---------------------------------------------------------------------------------------


async def test_render_asks_for_tokens_without_the_media(
    server: StandIn, engine: VllmEngine
) -> None:
    sampling = {"max_tokens": 9, "temperature": 0.0}
    server.answer = replies(
        {"token_ids": TOKENS, "features": FEATURES, "sampling_params": sampling}
    )
    body = {"messages": [{"role": "user"}], "stream": True, "model": "theirs", "seed": 1}
    assert await engine.render(body) == PROMPT
    assert server.requests == [
        (
            "/v1/chat/completions/render",
            {
                "messages": [{"role": "user"}],
                "seed": 1,
                "model": "tiny",
                "mm_payload": "none",
                "stream": False,
            },
        )
    ]


async def test_rendered_items_of_all_kinds_are_in_prompt_order(
    server: StandIn, engine: VllmEngine
) -> None:
    features = {
        "mm_hashes": {"image": ["i0", "i1"], "audio": ["a0"]},
        "mm_placeholders": {
            "image": [{"offset": 4, "length": 1}, {"offset": 0, "length": 2}],
            "audio": [{"offset": 2, "length": 2}],
        },
    }
    server.answer = replies(
        {"token_ids": [30, 30, 40, 40, 31], "features": features, "sampling_params": {}}
    )
    prompt = await engine.render({})
    assert prompt.items == (
        MediaItem("i1", Modality.IMAGE, 2),
        MediaItem("a0", Modality.AUDIO, 2),
        MediaItem("i0", Modality.IMAGE, 1),
    )
    assert prompt.placeholders == (30, 40, 31)


async def test_rendered_text_has_no_items(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies(
        {"token_ids": [1, 2, 3], "features": None, "sampling_params": {"max_tokens": 9}}
    )
    assert await engine.render({"messages": []}) == TEXT


# Encode ---------------------------------------------------------------------------------------


async def test_encode_is_one_call_with_a_folder_for_each_item(
    server: StandIn, engine: VllmEngine
) -> None:
    await engine.encode(
        [
            EncodeCall(Media("k0", "image_url", "data:0"), 32, Path("/shm/r")),
            EncodeCall(Media("k1", "audio_url", "data:1"), 40, Path("/shm/s")),
        ]
    )
    assert server.requests == [
        (
            GENERATE,
            {
                "model": "tiny",
                "token_ids": [32, 40],
                "content_parts": [
                    {"type": "image_url", "url": "data:0", "uuid": "k0"},
                    {"type": "audio_url", "url": "data:1", "uuid": "k1"},
                ],
                "sampling_params": {"max_tokens": 1, "temperature": 0.0},
                "ec_transfer_params": {"folders": ["/shm/r", "/shm/s"]},
            },
        )
    ]


# Prefill --------------------------------------------------------------------------------------


async def test_prefill_asks_for_one_token_and_keeps_the_kv_cache(
    server: StandIn, engine: VllmEngine
) -> None:
    server.answer = replies(prefilled(ec_transfer_params={"load_s": 0.25}))
    made = await engine.prefill(PROMPT, Path("/shm/r"))
    assert made.first == Delta("two", [7], "length")
    assert (made.final, made.handle, made.load_s) == (False, HANDLE, 0.25)
    assert server.body == {
        "model": "tiny",
        "token_ids": TOKENS,
        "features": FEATURES,
        "sampling_params": {"max_tokens": 1, "temperature": 0.0},
        "output_mode": "text",
        "ec_transfer_params": {"folders": ["/shm/r", "/shm/r"]},
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


async def test_prefill_of_text_names_no_embeddings(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies(prefilled())
    assert (await engine.prefill(TEXT, None)).load_s is None
    assert not {"features", "ec_transfer_params", "content_parts"} & server.body.keys()


async def test_no_media_are_sent_to_prefill_and_decode(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies(prefilled())
    await engine.prefill(PROMPT, Path("/shm/r"))
    server.answer = streams({"choices": [choice("two", 7, "stop")]})
    await decode(engine)
    assert "content_parts" not in json.dumps(server.requests)
    assert "url" not in json.dumps(server.requests)


@pytest.mark.parametrize(("asked", "sent"), [(None, None), (0, 0), (1, 1), (5, 1)])
async def test_prefill_cannot_be_asked_for_more_tokens_than_its_one(
    server: StandIn, engine: VllmEngine, asked: int | None, sent: int | None
) -> None:
    server.answer = replies(prefilled())
    sampling = {"max_tokens": 9} | ({} if asked is None else {"min_tokens": asked})
    await engine.prefill(Prompt([1], sampling), None)
    assert server.body["sampling_params"].get("min_tokens") == sent
    assert sampling["max_tokens"] == 9, "the prompt itself is not changed"


async def test_a_limit_that_vllm_leaves_out_is_its_default(
    server: StandIn, engine: VllmEngine
) -> None:
    server.answer = replies({"token_ids": [1], "features": None, "sampling_params": {}})
    prompt = await engine.render({"messages": []})
    assert (prompt.max_new_tokens, prompt.sampling) == (16, {"max_tokens": 16})


@pytest.mark.parametrize(
    ("sampling", "may_end"),
    [
        ({"max_tokens": 9, "temperature": 0.0}, True),
        ({"max_tokens": 9, "temperature": 0.7}, False),
        ({"max_tokens": 9}, False),
        ({"max_tokens": 1, "temperature": 0.7}, True),
    ],
)
async def test_a_first_token_that_decode_will_draw_again_cannot_end_the_answer(
    server: StandIn, engine: VllmEngine, sampling: dict[str, Any], may_end: bool
) -> None:
    server.answer = replies(prefilled())
    await engine.prefill(Prompt([1], sampling | {"stop": ["x"], "stop_token_ids": [7]}), None)
    sent = server.body["sampling_params"]
    ends = (["x"], [7], None) if may_end else ([], [], True)
    assert (sent["stop"], sent["stop_token_ids"], sent.get("ignore_eos")) == ends


async def test_an_answer_of_one_token_needs_no_decode(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies(prefilled(handle=None))
    made = await engine.prefill(Prompt([1], {"max_tokens": 1}), None)
    assert made.final
    assert made.first.finish_reason == "length"
    assert "kv_transfer_params" not in server.body


@pytest.mark.parametrize("handle", [HANDLE, None])
async def test_an_answer_that_ends_at_its_first_token_is_final(
    server: StandIn, engine: VllmEngine, handle: Mapping[str, Any] | None
) -> None:
    server.answer = replies(prefilled("stop", handle))
    made = await engine.prefill(TEXT, None)
    assert made.final
    assert made.first.finish_reason == "stop"


@pytest.mark.parametrize("handle", [None, {}])
async def test_a_prefill_that_kept_no_kv_cache_has_failed(
    server: StandIn, engine: VllmEngine, handle: Mapping[str, Any] | None
) -> None:
    server.answer = replies(prefilled(handle=handle))
    with pytest.raises(EngineError, match="e-0 prefilled without keeping the KV cache") as error:
        await engine.prefill(TEXT, None)
    assert error.value.retryable


@pytest.mark.parametrize(
    ("present", "status", "missing"),
    [
        ((), 500, True),
        (("k0",), 500, True),
        (("k0", "k1"), 500, False),
        ((), 400, False),
        ((), 503, False),
    ],
)
async def test_a_failed_prefill_lacked_an_embedding_if_a_file_is_not_there(
    server: StandIn,
    engine: VllmEngine,
    tmp_path: Path,
    present: tuple[str, ...],
    status: int,
    missing: bool,
) -> None:
    server.answer = fails(status)
    for key in present:
        (tmp_path / f"{key}.safetensors").touch()
    with pytest.raises(EngineError, match="it went wrong") as error:
        await engine.prefill(PROMPT, tmp_path)
    assert isinstance(error.value, EmbeddingMissingError) is missing
    assert error.value.status == status


async def test_a_failed_prefill_of_text_lacked_no_embedding(
    server: StandIn, engine: VllmEngine
) -> None:
    server.answer = fails(500)
    with pytest.raises(EngineError) as error:
        await engine.prefill(TEXT, None)
    assert type(error.value) is EngineError


# Decode ---------------------------------------------------------------------------------------


async def test_decode_streams_what_comes(server: StandIn, engine: VllmEngine) -> None:
    server.answer = streams(
        {"choices": [choice("a ", 7)]},
        {"choices": []},
        {"choices": [choice("ré", 8, None, token_ids=None)]},
        {"choices": [choice("", 9, "stop", stop_reason="x")]},
    )
    assert await decode(engine) == [
        Delta("a ", [7]),
        Delta("ré", ()),
        Delta("", [9], "stop", "x"),
    ]
    assert server.body == {
        "model": "tiny",
        "token_ids": TOKENS,
        "features": FEATURES,
        "sampling_params": PROMPT.sampling,
        "output_mode": "text",
        "stream": True,
        "kv_transfer_params": HANDLE,
    }


@pytest.mark.parametrize(("code", "retryable"), [(500, True), (400, False), (None, True)])
async def test_an_error_within_a_stream_is_raised_after_what_came_before(
    server: StandIn, engine: VllmEngine, code: int | None, retryable: bool
) -> None:
    error = {"error": {"message": "no blocks", "code": code}}
    server.answer = streams({"choices": [choice("a", 7)]}, error)
    stream = engine.decode(PROMPT, HANDLE)
    assert await anext(stream) == Delta("a", [7])
    with pytest.raises(EngineError, match="e-0: no blocks") as raised:
        await anext(stream)
    assert (raised.value.status, raised.value.retryable) == (code, retryable)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_stream_that_ends_before_its_finish_reason_was_broken_off(
    server: StandIn, engine: VllmEngine, whole: bool
) -> None:
    server.answer = streams({"choices": [choice("a", 7)]}, whole=whole)
    with pytest.raises(EngineError) as error:
        await decode(engine)
    assert error.value.retryable


# Failures -------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_a_refusal_has_vllms_message_and_status(
    server: StandIn, engine: VllmEngine, method: str, status: int
) -> None:
    server.answer = fails(status, "maximum context length is 512")
    with pytest.raises(EngineError, match=r"^maximum context length is 512$") as error:
        await call(engine, method)
    assert (error.value.status, error.value.retryable) == (status, status >= 500)


@every_method
@pytest.mark.parametrize("body", ["Internal Server Error", "[]", "{}", '{"error": "text"}'])
async def test_a_refusal_in_an_unknown_form_names_engine_and_status(
    server: StandIn, engine: VllmEngine, method: str, body: str
) -> None:
    server.answer = replies(body, 500)
    with pytest.raises(EngineError, match="e-0 answered 500") as error:
        await call(engine, method)
    assert error.value.status == 500


@every_method
@pytest.mark.parametrize("answer", [breaks_off, replies("{cut"), streams("{cut")])
async def test_a_connection_that_breaks_or_carries_garbage_may_go_better_elsewhere(
    server: StandIn, engine: VllmEngine, method: str, answer: Answer
) -> None:
    server.answer = answer
    with pytest.raises(EngineError) as error:
        await call(engine, method)
    assert (error.value.status, error.value.retryable) == (None, True)


@pytest.mark.parametrize("method", ["render", "encode", "prefill", "decode", "metrics"])
@pytest.mark.parametrize("file", [False, True])
async def test_an_engine_that_is_gone_is_an_error_that_names_it(
    engine: VllmEngine, tmp_path: Path, method: str, file: bool
) -> None:
    if file:  # what a killed engine leaves
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / "s"))
    with pytest.raises(EngineError, match=r"^e-0: .") as error:
        await call(engine, method)
    assert error.value.status is None
    assert await engine.health() is False


@every_method
async def test_whoever_gives_up_on_a_silent_engine_hangs_up(
    server: StandIn, engine: VllmEngine, method: str
) -> None:
    server.answer = server.never
    task = asyncio.create_task(call(engine, method))
    await server.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        await server.hung_up.wait()


async def test_a_stream_that_is_left_is_hung_up(server: StandIn, engine: VllmEngine) -> None:
    server.answer = server.starts_and_stalls
    stream = engine.decode(PROMPT, HANDLE)
    assert await anext(stream) == Delta("a", [1])
    await stream.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(5):
        await server.hung_up.wait()


async def test_a_cancelled_stream_is_hung_up(server: StandIn, engine: VllmEngine) -> None:
    server.answer = server.starts_and_stalls
    task = asyncio.create_task(decode(engine))
    await server.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        await server.hung_up.wait()


# Health and metrics ---------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False)])
async def test_healthy_is_what_the_engine_says(
    server: StandIn, engine: VllmEngine, status: int, healthy: bool
) -> None:
    server.answer = replies("", status)
    assert await engine.health() is healthy
    assert server.requests == [("/health", None)]


async def test_an_engine_that_does_not_answer_is_neither_healthy_nor_gone(
    server: StandIn, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "HEALTH_TIMEOUT_S", 0.05)
    server.answer = server.never
    assert await engine.health() is None
    server.answer = breaks_off
    assert await engine.health() is None


async def test_an_engine_is_not_gone_because_we_have_no_file_left(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_files(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("asyncio.selector_events.socket.socket", out_of_files)
    assert await engine.health() is None


async def test_metrics_are_the_engines_text(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies("vllm:x 1\n")
    assert await engine.metrics() == "vllm:x 1\n"
    assert server.requests == [("/metrics", None)]
