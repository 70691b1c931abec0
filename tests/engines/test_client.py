import asyncio
import errno
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.protocol import (
    Bundle,
    Delta,
    EmbeddingMissingError,
    EncodeCall,
    Encoded,
    EngineError,
    Media,
    Prefilled,
    Prompt,
    Route,
)
from easerve.engines.vllm import client
from easerve.engines.vllm.client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    MAX_MESSAGE,
    VllmEngine,
)
from easerve.engines.vllm.ec.inbox import Inbox
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import Item, new_socket
from easerve.engines.vllm.ec.store import Store
from easerve.types import MediaItem, Modality, Stage, WorkerId

from .stand_in import Answer, StandIn, breaks_off, choice, fails, replies, stand_in, streams, writes

FEATURES = {
    "mm_hashes": {"image": ["k0", "k1"]},
    "mm_placeholders": {"image": [{"offset": 1, "length": 2}, {"offset": 4, "length": 3}]},
    "kwargs_data": None,
}
ITEMS = (MediaItem("k0", Modality.IMAGE, 2), MediaItem("k1", Modality.IMAGE, 3))
TOKENS = [1, 32, 32, 5, 33, 33, 33, 6]
PICTURES = [
    {"type": "image_url", "image_url": {"url": "data:0"}, "uuid": "k0"},
    {"type": "text", "text": "and"},
    {"type": "image_url", "image_url": {"url": "data:1"}, "uuid": "k1"},
]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PICTURES}]
BODY = {"messages": MESSAGES, "max_completion_tokens": 9, "temperature": 0.0}
GREEDY = {"max_tokens": 9, "temperature": 0.0}
PROMPT = Prompt(TOKENS, GREEDY, FEATURES, ITEMS, (32, 33), BODY)
TEXT = Prompt([1, 2, 3], GREEDY, body={"messages": [{"role": "user", "content": "hi"}]})
HANDLE = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "p"}
KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
TOKEN = "secret"
P0, P1 = WorkerId("prefill-0"), WorkerId("local-prefill-0")
# What the connector of a prefill engine says, and what it means.
SAID = {"wait_s": 0.25, "bundles": [[2, 4096, 0.001]], "evicted": ["k8", "k9"]}
TOLD: dict[str, Any] = {
    "wait_s": 0.25,
    "bundles": (Bundle(2, 4096, 0.001),),
    "evicted": ("k8", "k9"),
}
ANY_TOKEN = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}


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
    inbox = tmp_path / "inbox"
    engine = VllmEngine(
        WorkerId("e-0"), Stage.PREFILL, tmp_path / "s", "tiny", inbox=inbox, token=TOKEN
    )
    yield engine
    await engine.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """What the engine has, and where it says so."""
    store = Store(1 << 20, 100)
    inbox = Inbox(tmp_path / "inbox", TOKEN, store)
    yield store
    inbox.close()


@pytest.fixture
async def sparse(tmp_path: Path) -> AsyncIterator[VllmEngine]:
    """Of a model whose media go to prefill, too."""
    engine = VllmEngine(
        WorkerId("e-0"),
        Stage.PREFILL,
        tmp_path / "s",
        "tiny",
        media_at_prefill=True,
        inbox=tmp_path / "inbox",
        token=TOKEN,
    )
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
            await engine.encode([EncodeCall(media, 32, (P0,))])
            return None
        case "prefill":
            return await engine.prefill(TEXT, ())
        case "decode":
            return await decode(engine)
        case "decode as OpenAI":
            return await decode(engine, replace(PROMPT, route=Route.OPENAI))
        case "decode as OpenAI, whole":
            return await decode(engine, replace(PROMPT, route=Route.OPENAI, stream=False))
        case "release":
            await engine.release(PROMPT, HANDLE)
            return None
        case "metrics":
            return await engine.metrics()
    raise AssertionError(method)


STREAMS = ["decode", "decode as OpenAI"]
METHODS = ["render", "encode", "prefill", *STREAMS, "decode as OpenAI, whole", "release"]
every_method = pytest.mark.parametrize("method", METHODS)


# Render ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "path"),
    [
        ({"messages": [{"role": "user"}], "tools": []}, CHAT),
        ({"prompt": "hi", "echo": True}, COMPLETIONS),
        ({"prompt": [1, 2, 3]}, COMPLETIONS),
    ],
)
async def test_render_asks_for_tokens_without_the_media(
    server: StandIn, engine: VllmEngine, own: dict[str, Any], path: str
) -> None:
    reply = {"token_ids": TOKENS, "features": FEATURES, "sampling_params": GREEDY}
    server.answer = replies(reply if path == CHAT else [reply])
    body = {**own, "stream": True, "model": "theirs", "seed": 1}
    assert await engine.render(body) == Prompt(TOKENS, GREEDY, FEATURES, ITEMS, (32, 33), body)
    sent = {**own, "seed": 1, "model": "tiny", "mm_payload": "none", "stream": False}
    assert server.requests == [(f"{path}/render", sent)]


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
    server.answer = replies({"token_ids": [1, 2, 3], "features": None, "sampling_params": GREEDY})
    assert await engine.render(TEXT.body) == TEXT


async def test_a_limit_that_vllm_leaves_out_is_its_default(
    server: StandIn, engine: VllmEngine
) -> None:
    server.answer = replies({"token_ids": [1], "features": None, "sampling_params": {}})
    prompt = await engine.render({"messages": []})
    assert (prompt.max_new_tokens, prompt.sampling) == (16, {"max_tokens": 16})


# Encode ---------------------------------------------------------------------------------------

CALLS = [
    EncodeCall(Media("k0", "image_url", "data:0"), 32, (P0,)),
    EncodeCall(Media("k1", "audio_url", "data:1"), 40, (P0, P1)),
]


async def test_encode_is_one_call_with_destinations_for_each_item(
    server: StandIn, engine: VllmEngine
) -> None:
    assert await engine.encode(CALLS) == Encoded()
    sent = {
        "model": "tiny",
        "token_ids": [32, 40],
        "content_parts": [
            {"type": "image_url", "url": "data:0", "uuid": "k0"},
            {"type": "audio_url", "url": "data:1", "uuid": "k1"},
        ],
        "sampling_params": ANY_TOKEN,
        "ec_transfer_params": {"destinations": [["prefill-0"], ["prefill-0", "local-prefill-0"]]},
    }
    assert server.requests == [(GENERATE, sent)]


async def test_encode_of_sparse_placeholders_is_one_chat(
    server: StandIn, sparse: VllmEngine
) -> None:
    await sparse.encode(CALLS)
    parts = [
        {"type": "image_url", "image_url": {"url": "data:0"}, "uuid": "k0"},
        {"type": "audio_url", "audio_url": {"url": "data:1"}, "uuid": "k1"},
    ]
    sent = {
        "model": "tiny",
        "messages": [{"role": "user", "content": parts}],
        "ec_transfer_params": {"destinations": [["prefill-0"], ["prefill-0", "local-prefill-0"]]},
        **ANY_TOKEN,
    }
    assert server.requests == [(CHAT, sent)]


@pytest.mark.parametrize("params", [{"items": {}, "evicted": ["k8", "k9"]}, {"items": {}}, None])
async def test_encode_tells_what_the_encoder_dropped(
    server: StandIn, engine: VllmEngine, sparse: VllmEngine, params: dict[str, Any] | None
) -> None:
    server.answer = replies({"choices": [], "ec_transfer_params": params})
    for encoder in (engine, sparse):
        assert await encoder.encode(CALLS) == Encoded(tuple((params or {}).get("evicted", ())))


# Prefill --------------------------------------------------------------------------------------


def drawn(**sampling: Any) -> Prompt:
    """A prompt of text with these sampling parameters."""
    return Prompt([1], {"max_tokens": 9} | sampling)


@pytest.mark.parametrize("coming", [[0], []])
async def test_prefill_asks_for_one_token_and_keeps_the_kv_cache(
    server: StandIn, engine: VllmEngine, coming: list[int]
) -> None:
    server.answer = replies(prefilled())
    assert await engine.prefill(PROMPT, coming) == Prefilled(HANDLE)
    sent = {
        "model": "tiny",
        "token_ids": TOKENS,
        "features": FEATURES,
        "sampling_params": {"max_tokens": 1, "temperature": 0.0},
        "output_mode": "text",
        "ec_transfer_params": {"coming": coming},
        "kv_transfer_params": KEEP,
    }
    assert server.requests == [(GENERATE, sent)]


async def test_prefill_tells_what_the_engine_waited_for_got_and_dropped(
    server: StandIn, engine: VllmEngine
) -> None:
    server.answer = replies(prefilled(ec_transfer_params=SAID))
    assert await engine.prefill(PROMPT, [0]) == Prefilled(HANDLE, **TOLD)


async def test_prefill_of_text_names_no_embeddings(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies(prefilled())
    assert await engine.prefill(TEXT, ()) == Prefilled(HANDLE)
    sent = {
        "model": "tiny",
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 1, "temperature": 0.0},
        "output_mode": "text",
        "kv_transfer_params": KEEP,
    }
    assert server.requests == [(GENERATE, sent)]


async def test_no_media_are_sent_to_prefill_and_decode(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies(prefilled())
    await engine.prefill(PROMPT, ())
    server.answer = streams({"choices": [choice("two", 7, "stop")]})
    await decode(engine)
    await decode_openai(server, engine, PROMPT)
    assert "content_parts" not in json.dumps(server.requests)
    assert "url" not in json.dumps(server.requests)


# What prefill draws, by what decode will draw from the same place.
DECIDES = {
    "greedy": ({"temperature": 0.0}, Route.TEXT, True),
    "drawn": ({"temperature": 0.7}, Route.TEXT, False),
    "drawn by default": ({}, Route.TEXT, False),
    "one token": ({"max_tokens": 1}, Route.TEXT, True),
    "one drawn token": ({"max_tokens": 1, "temperature": 0.7}, Route.TEXT, True),
    "greedy format": ({"temperature": 0.0, "structured_outputs": {"json": {}}}, Route.TEXT, False),
    "one token of a format": (
        {"max_tokens": 1, "structured_outputs": {"json": {}}},
        Route.TEXT,
        False,
    ),
    "no format": ({"temperature": 0.0, "structured_outputs": None}, Route.TEXT, True),
    "greedy, parsed": ({"temperature": 0.0}, Route.OPENAI, False),
    "one token, parsed": ({"max_tokens": 1}, Route.OPENAI, False),
}
# What of a request is not asked of a first token that prefill does not decide.
NO_END = {"max_tokens": 1, "min_tokens": 1, "ignore_eos": True, "stop": [], "stop_token_ids": []}
ENDS = {"stop": ["x"], "stop_token_ids": [7], "seed": 3, "min_tokens": 5, "logprobs": 2}


@pytest.mark.parametrize(("sampling", "route", "decides"), DECIDES.values(), ids=DECIDES)
async def test_prefill_ends_an_answer_only_if_it_draws_what_decode_would(
    server: StandIn, engine: VllmEngine, sampling: dict[str, Any], route: Route, decides: bool
) -> None:
    prompt = replace(drawn(**ENDS | sampling), route=route)
    before = dict(prompt.sampling)
    server.answer = replies(prefilled("stop"))
    made = await engine.prefill(prompt, ())
    if decides:
        assert server.body["sampling_params"] == before | {"max_tokens": 1, "min_tokens": 1}
        assert made == Prefilled(answer=Delta("two", [7], "stop"))
    else:
        own = {name: value for name, value in before.items() if name != "structured_outputs"}
        assert server.body["sampling_params"] == own | NO_END
        assert made == Prefilled(HANDLE)
    keeps = prompt.max_new_tokens > 1 or not decides
    assert server.body.get("kv_transfer_params") == (KEEP if keeps else None)
    assert prompt.sampling == before, "the prompt itself is not changed"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "wrong", [{"top_p": 5}, {"min_p": -1}, {"logit_bias": {"9": 1}}, {"bad_words": [""]}], ids=repr
)
async def test_prefill_sees_every_parameter_that_may_be_wrong(
    server: StandIn, engine: VllmEngine, wrong: dict[str, Any], temperature: float
) -> None:
    server.answer = fails(400, "no such value")
    with pytest.raises(EngineError, match="no such value") as error:
        await engine.prefill(drawn(temperature=temperature, **wrong), ())
    assert not error.value.retryable
    assert wrong.items() <= server.body["sampling_params"].items()


@pytest.mark.parametrize(("asked", "sent"), [(None, None), (0, 0), (1, 1), (5, 1)])
async def test_prefill_cannot_be_asked_for_more_tokens_than_its_one(
    server: StandIn, engine: VllmEngine, asked: int | None, sent: int | None
) -> None:
    server.answer = replies(prefilled())
    given = {} if asked is None else {"min_tokens": asked}
    await engine.prefill(drawn(temperature=0, **given), ())
    assert server.body["sampling_params"].get("min_tokens") == sent


async def test_a_first_token_that_does_not_end_the_answer_is_decodes_to_say(
    server: StandIn, engine: VllmEngine
) -> None:
    server.answer = replies(prefilled("length"))
    assert await engine.prefill(TEXT, ()) == Prefilled(HANDLE)


async def test_an_answer_of_one_token_needs_no_decode(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies(prefilled(handle=None, ec_transfer_params=SAID))
    made = await engine.prefill(drawn(max_tokens=1), ())
    assert made == Prefilled(answer=Delta("two", [7], "length"), **TOLD)


@pytest.mark.parametrize("handle", [HANDLE, None])
async def test_an_answer_that_ends_at_its_first_token_is_final(
    server: StandIn, engine: VllmEngine, handle: Mapping[str, Any] | None
) -> None:
    entry = {"token": "two", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    said = choice("two", 7, "stop", stop_reason=3, logprobs={"content": [entry]})
    server.answer = replies(prefilled(handle=handle, choices=[said]))
    made = await engine.prefill(TEXT, ())
    assert made == Prefilled(answer=Delta("two", [7], "stop", 3, [entry]))


@pytest.mark.parametrize("salt", ["mine", None, ""])
async def test_the_clients_salt_goes_with_the_tokens(
    server: StandIn, engine: VllmEngine, salt: str | None
) -> None:
    server.answer = replies(prefilled())
    salted = replace(TEXT, body={**TEXT.body, "cache_salt": salt})
    await engine.prefill(salted, ())
    server.answer = streams({"choices": [choice("two", 7, "stop")]})
    await decode(engine, salted)
    assert [body.get("cache_salt") for _, body in server.requests] == [salt or None] * 2


# Prefill with sparse placeholders -------------------------------------------------------------

RENDERING = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "cache_salt": "mine",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": True,
    "documents": [{}],
    "messages": MESSAGES,
    "reasoning_effort": "low",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
}
SAYING = {
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "frequency_penalty": 1,
    "include_reasoning": False,
    "logit_bias": {"1": 1},
    "logprobs": True,
    "max_completion_tokens": 9,
    "max_tokens": 9,
    "min_tokens": 5,
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "seed": 1,
    "stop": ["x"],
    "structured_outputs": {"regex": "a"},
    "temperature": 0.7,
    "tool_choice": "required",
    "top_logprobs": 2,
}


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("max_tokens", [1, 9])
async def test_prefill_of_sparse_placeholders_is_the_chat_again_with_its_media(
    server: StandIn, sparse: VllmEngine, route: Route, max_tokens: int
) -> None:
    reply = {"choices": [{"message": {}, "finish_reason": "length"}], "kv_transfer_params": HANDLE}
    server.answer = replies(reply | {"ec_transfer_params": SAID})
    sampling = GREEDY | {"max_tokens": max_tokens}
    prompt = replace(PROMPT, body=RENDERING | SAYING, route=route, sampling=sampling)
    assert await sparse.prefill(prompt, [0]) == Prefilled(HANDLE, **TOLD)
    sent = {
        "model": "tiny",
        **RENDERING,
        **ANY_TOKEN,
        "tool_choice": "none",
        "ec_transfer_params": {"coming": [0]},
        "kv_transfer_params": KEEP,
    }
    assert server.requests == [(CHAT, sent)]


async def test_text_is_prefilled_as_everywhere(server: StandIn, sparse: VllmEngine) -> None:
    server.answer = replies(prefilled("stop"))
    assert (await sparse.prefill(TEXT, ())).answer == Delta("two", [7], "stop")
    assert [path for path, _ in server.requests] == [GENERATE]


async def test_a_prefill_with_media_that_lacked_an_embedding_says_so(
    server: StandIn, sparse: VllmEngine, store: Store
) -> None:
    server.answer = fails(500)
    with pytest.raises(EmbeddingMissingError):
        await sparse.prefill(PROMPT, [0])


# Prefill fails --------------------------------------------------------------------------------


@pytest.mark.parametrize("handle", [None, {}])
async def test_a_prefill_that_kept_no_kv_cache_has_failed(
    server: StandIn, engine: VllmEngine, handle: Mapping[str, Any] | None
) -> None:
    server.answer = replies(prefilled(handle=handle))
    with pytest.raises(EngineError, match="e-0 prefilled without keeping the KV cache") as error:
        await engine.prefill(TEXT, ())
    assert error.value.retryable


@pytest.mark.parametrize("finish", ["abort", "error", "tool_calls", None])
@pytest.mark.parametrize("prompt", [TEXT, PROMPT, drawn(temperature=1), drawn(max_tokens=1)])
async def test_a_prefill_that_ends_otherwise_has_failed(
    server: StandIn, engine: VllmEngine, prompt: Prompt, finish: str | None
) -> None:
    server.answer = replies(prefilled(choices=[choice("", 7, finish)]))
    with pytest.raises(EngineError, match=f"e-0 ended its token: {finish}") as error:
        await engine.prefill(prompt, ())
    assert (error.value.status, error.value.retryable) == (None, True)


async def test_a_prefill_with_sparse_placeholders_that_ends_otherwise_has_failed(
    server: StandIn, sparse: VllmEngine
) -> None:
    choices = [{"message": {}, "finish_reason": "abort"}]
    server.answer = replies({"choices": choices, "kv_transfer_params": HANDLE})
    with pytest.raises(EngineError, match="e-0 ended its token: abort"):
        await sparse.prefill(PROMPT, ())


def put(store: Store, *keys: str) -> None:
    memory = Memory.of([memoryview(b"1234")])
    store.add(memory, [Item(key, 0, (1, 1), "float32") for key in keys], 0.0)


@pytest.mark.parametrize(
    ("present", "status", "missing"),
    [
        ((), 500, ("k0", "k1")),
        (("k0",), 500, ("k1",)),
        (("k0", "k1"), 500, None),
        ((), 400, None),
        ((), 503, None),
    ],
)
async def test_a_failed_prefill_lacked_the_embeddings_that_the_engine_does_not_have(
    server: StandIn,
    engine: VllmEngine,
    store: Store,
    present: tuple[str, ...],
    status: int,
    missing: tuple[str, ...] | None,
) -> None:
    server.answer = fails(status)
    put(store, *present)
    with pytest.raises(EngineError, match="it went wrong") as error:
        await engine.prefill(PROMPT, [0])
    assert getattr(error.value, "keys", None) == missing
    assert isinstance(error.value, EmbeddingMissingError) is bool(missing)
    assert error.value.status == status


async def test_an_item_that_is_lacked_twice_is_named_once(
    server: StandIn, engine: VllmEngine, store: Store
) -> None:
    server.answer = fails(500)
    with pytest.raises(EmbeddingMissingError) as error:
        await engine.prefill(replace(PROMPT, items=(*ITEMS, *ITEMS)), ())
    assert error.value.keys == ("k0", "k1")


async def test_an_engine_that_does_not_say_what_it_lacks_has_just_failed(
    server: StandIn, engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = fails(500)
    monkeypatch.setattr(client, "QUERY_TIMEOUT_S", 0.05)

    async def prefill_fails() -> None:
        with pytest.raises(EngineError) as error:
            await engine.prefill(PROMPT, ())
        assert type(error.value) is EngineError

    await prefill_fails()
    with new_socket() as silent:
        silent.bind(str(tmp_path / "inbox"))
        silent.listen()
        await prefill_fails()


async def test_who_does_not_know_where_to_ask_does_not_ask(
    server: StandIn, tmp_path: Path, store: Store
) -> None:
    server.answer = fails(500)
    engine = VllmEngine(WorkerId("e-0"), Stage.PREFILL, server.socket, "tiny")
    with pytest.raises(EngineError) as error:
        await engine.prefill(PROMPT, ())
    assert type(error.value) is EngineError
    await engine.close()


async def test_a_failed_prefill_of_text_lacked_no_embedding(
    server: StandIn, engine: VllmEngine, store: Store
) -> None:
    server.answer = fails(500)
    with pytest.raises(EngineError) as error:
        await engine.prefill(TEXT, ())
    assert type(error.value) is EngineError


# Decode ---------------------------------------------------------------------------------------


async def test_decode_streams_what_comes(server: StandIn, engine: VllmEngine) -> None:
    entry = {"token": "a ", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    server.answer = streams(
        {"choices": [choice("a ", 7, logprobs={"content": [entry]})]},
        {"choices": []},
        {"choices": [choice("ré", 8, None, token_ids=None)]},
        {"choices": [choice("", 9, "stop", stop_reason="x")]},
    )
    assert await decode(engine) == [
        Delta("a ", [7], logprobs=[entry]),
        Delta("ré", ()),
        Delta("", [9], "stop", "x"),
    ]
    assert server.requests[0][0] == GENERATE
    assert server.body == {
        "model": "tiny",
        "token_ids": TOKENS,
        "features": FEATURES,
        "sampling_params": PROMPT.sampling,
        "output_mode": "text",
        "stream": True,
        "kv_transfer_params": HANDLE,
    }


async def test_a_seed_of_a_leg_goes_to_decode(server: StandIn, engine: VllmEngine) -> None:
    server.answer = streams({"choices": [choice("two", 7, "stop")]})
    await decode(engine, drawn(seed=5).for_leg(2))
    assert server.body["sampling_params"] == {"max_tokens": 9, "seed": 7}


@pytest.mark.parametrize("method", ["decode", "decode as OpenAI"])
@pytest.mark.parametrize(("code", "retryable"), [(500, True), (400, False), (None, True)])
async def test_an_error_within_a_stream_is_raised_after_what_came_before(
    server: StandIn, engine: VllmEngine, method: str, code: int | None, retryable: bool
) -> None:
    error = {"error": {"message": "no blocks", "code": code}}
    server.answer = streams({"choices": [choice("a", 7)]}, error)
    route = Route.TEXT if method == "decode" else Route.OPENAI
    stream = engine.decode(replace(PROMPT, route=route), HANDLE)
    assert (await anext(stream)).token_ids == [7]
    with pytest.raises(EngineError, match=r"^no blocks$") as raised:
        await anext(stream)
    assert (raised.value.status, raised.value.retryable) == (code, retryable)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("method", ["decode", "decode as OpenAI"])
async def test_a_stream_that_ends_before_its_finish_reason_was_broken_off(
    server: StandIn, engine: VllmEngine, method: str, whole: bool
) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 1}}
    server.answer = streams({"choices": [choice("a", 7)]}, usage, whole=whole)
    with pytest.raises(EngineError) as error:
        await call(engine, method)
    assert error.value.retryable


EVENT = {"choices": [choice("é" * 3, 7, "stop")]}
TEXT_OF_EVENT = json.dumps(EVENT, ensure_ascii=False).encode()
LINES = b"data: " + TEXT_OF_EVENT + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    "written",
    [
        [LINES],
        [bytes([byte]) for byte in LINES],
        [LINES.replace(b"\n", b"\r\n")],
        [b": ping\n\n", b"event: x\n", LINES],
        [b"\n\n", LINES[:-2]],
        [LINES[: LINES.index("é".encode()) + 1], LINES[LINES.index("é".encode()) + 1 :]],
    ],
    ids=["at once", "byte by byte", "CRLF", "comments", "blank lines", "within a character"],
)
async def test_a_stream_is_read_line_by_line_however_it_is_cut(
    server: StandIn, engine: VllmEngine, written: list[bytes]
) -> None:
    server.answer = writes(*written)
    assert await decode(engine) == [Delta("ééé", [7], "stop")]


async def test_events_that_come_together_are_all_read(server: StandIn, engine: VllmEngine) -> None:
    events = [{"choices": [choice(str(number), number)]} for number in range(100)]
    lines = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    server.answer = writes(lines + LINES)
    deltas = await decode(engine)
    assert [delta.text for delta in deltas] == [*map(str, range(100)), "ééé"]


async def test_a_line_of_a_stream_may_be_long(server: StandIn, engine: VllmEngine) -> None:
    text = "x" * (4 << 20)
    server.answer = streams({"choices": [choice(text, 7, "stop")]})
    (delta,) = await decode(engine)
    assert delta.text == text


# Release --------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("prompt", [PROMPT, TEXT, drawn(structured_outputs={"regex": "("}, seed=5)])
async def test_a_release_pulls_the_kv_cache_with_one_token(
    server: StandIn, engine: VllmEngine, prompt: Prompt, route: Route
) -> None:
    await engine.release(replace(prompt, route=route), HANDLE)
    sent = {
        "model": "tiny",
        "token_ids": list(prompt.token_ids),
        "sampling_params": ANY_TOKEN,
        "kv_transfer_params": HANDLE,
    } | ({"features": FEATURES} if prompt.features else {})
    assert server.requests == [(GENERATE, sent)]


# Decode on its OpenAI routes ------------------------------------------------------------------

USAGE = {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}
COMPLETION = Prompt([1, 2, 3], GREEDY, body={"prompt": "hi", "logprobs": 1, "max_tokens": 9})

COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def chunk(token: int | None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk's choice of a chat, as vLLM leaves out what it did not set."""
    given = {"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": finish}
    return given | ({} if token is None else {"token_ids": [token]}) | more


async def decode_openai(server: StandIn, engine: VllmEngine, prompt: Prompt) -> Any:
    """What decode's own route is sent for a prompt; and its path."""
    server.answer = (
        streams({"choices": [chunk(7, "stop")]})
        if prompt.stream
        else replies({"choices": [chunk(7, "stop")], "usage": USAGE})
    )
    await decode(engine, replace(prompt, route=Route.OPENAI))
    return server.requests[-1]


def salt_of(*parts: str) -> str:
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_is_sent_to_decode_without_media_and_with_its_tokens(
    server: StandIn, engine: VllmEngine, stream: bool
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = BODY | {"tools": tools, "tool_choice": "required", "max_tokens": 99}
    path, sent = await decode_openai(server, engine, replace(PROMPT, body=body, stream=stream))
    assert path == CHAT
    assert sent == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "and"}]},
        ],
        "tools": tools,
        "tool_choice": "required",
        "temperature": 0.0,
        "max_tokens": 9,
        "seed": None,
        "stream": stream,
        "return_token_ids": True,
        "cache_salt": salt_of("", "k0", "k1"),
        "kv_transfer_params": {**HANDLE, "prompt_token_ids": TOKENS},
    } | (COUNTED if stream else {})
    assert body["messages"] == MESSAGES, "the request itself is not changed"
    assert "prompt_token_ids" not in HANDLE


@pytest.mark.parametrize("stream", [True, False])
async def test_a_completion_is_sent_to_decode_as_tokens(
    server: StandIn, engine: VllmEngine, stream: bool
) -> None:
    path, sent = await decode_openai(server, engine, replace(COMPLETION, stream=stream))
    assert path == COMPLETIONS
    assert sent == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "logprobs": 1,
        "max_tokens": 9,
        "seed": None,
        "stream": stream,
        "return_token_ids": True,
        "kv_transfer_params": HANDLE,
    } | (COUNTED if stream else {})


@pytest.mark.parametrize(("echo", "ids"), [(True, False), (False, True), (None, True)])
async def test_an_echoed_prompt_comes_as_text_so_no_ids_are_asked_for(
    server: StandIn, engine: VllmEngine, echo: bool | None, ids: bool
) -> None:
    prompt = replace(COMPLETION, body={"prompt": "hi"} | ({} if echo is None else {"echo": echo}))
    _, sent = await decode_openai(server, engine, prompt)
    assert sent["return_token_ids"] is ids


async def test_messages_without_content_are_sent_as_they_are(
    server: StandIn, engine: VllmEngine
) -> None:
    messages = [{"role": "assistant", "tool_calls": [{}]}, {"role": "tool", "content": "one"}]
    _, sent = await decode_openai(server, engine, replace(TEXT, body={"messages": messages}))
    assert sent["messages"] == messages


async def test_the_seed_of_a_leg_goes_to_decodes_own_route(
    server: StandIn, engine: VllmEngine
) -> None:
    prompt = replace(PROMPT, body=BODY | {"seed": 5}, sampling=GREEDY | {"seed": 5})
    _, sent = await decode_openai(server, engine, prompt.for_leg(2))
    assert sent["seed"] == 7


@pytest.mark.parametrize(
    ("keys", "given", "salt"),
    [
        ((), None, None),
        ((), "mine", "mine"),
        (("k0",), None, salt_of("", "k0")),
        (("k0",), "mine", salt_of("mine", "k0")),
        (("k0", "k1"), None, salt_of("", "k0", "k1")),
        (("k1", "k0"), None, salt_of("", "k1", "k0")),
    ],
)
async def test_a_salt_stands_for_the_pictures_that_decode_does_not_see(
    server: StandIn, engine: VllmEngine, keys: tuple[str, ...], given: str | None, salt: str | None
) -> None:
    items = tuple(MediaItem(key, Modality.IMAGE, 2) for key in keys)
    body = BODY | ({} if given is None else {"cache_salt": given})
    _, sent = await decode_openai(server, engine, replace(PROMPT, items=items, body=body))
    assert sent.get("cache_salt") == salt
    assert ("cache_salt" in sent) is (salt is not None)


async def test_chunks_of_decode_are_passed_on_and_then_its_usage(
    server: StandIn, engine: VllmEngine
) -> None:
    parts = [
        chunk(None, delta={"role": "assistant", "content": ""}),
        chunk(7, delta={"tool_calls": [{"index": 0}]}),
        chunk(8, "tool_calls", stop_reason=3, delta={}),
    ]
    server.answer = streams(
        *({"choices": [part]} for part in parts), {"choices": [], "usage": USAGE}
    )
    assert await decode(engine, replace(PROMPT, route=Route.OPENAI)) == [
        Delta("", (), choice=parts[0]),
        Delta("", [7], choice=parts[1]),
        Delta("", [8], "tool_calls", 3, choice=parts[2]),
        Delta("", usage=USAGE),
    ]


async def test_every_chunk_of_decode_brings_the_usage_so_far(
    server: StandIn, engine: VllmEngine
) -> None:
    parts = [chunk(None), chunk(7), chunk(8, "stop")]
    usages = [USAGE | {"completion_tokens": number} for number in range(len(parts))]
    events = [
        {"choices": [part], "usage": usage} for part, usage in zip(parts, usages, strict=True)
    ]
    server.answer = streams(*events, {"choices": [], "usage": USAGE}, {"choices": []})
    deltas = await decode(engine, replace(PROMPT, route=Route.OPENAI))
    assert [delta.choice for delta in deltas] == [*parts, None]
    assert [delta.usage for delta in deltas] == [*usages, USAGE]


async def test_a_whole_answer_of_decode_is_one_piece(server: StandIn, engine: VllmEngine) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{}]}
    whole = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [7, 8]}
    server.answer = replies({"choices": [whole], "usage": USAGE})
    prompt = replace(PROMPT, route=Route.OPENAI, stream=False)
    assert await decode(engine, prompt) == [
        Delta("", [7, 8], "stop", choice=whole, usage=USAGE),
    ]


async def test_an_echo_has_no_ids_to_count(server: StandIn, engine: VllmEngine) -> None:
    part = {"index": 0, "text": "hi a", "logprobs": None, "finish_reason": "length"}
    part |= {"stop_reason": None, "token_ids": None}
    server.answer = replies({"choices": [part], "usage": USAGE})
    prompt = replace(COMPLETION, route=Route.OPENAI, stream=False)
    assert await decode(engine, prompt) == [Delta("", (), "length", choice=part, usage=USAGE)]


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


LONG = "a\n  b\tc\r\n" * 10_000


def assert_one_bounded_line(error: EngineError, status: int) -> None:
    text = str(error)
    assert text.startswith("a b c a b c")
    assert text.endswith("…"), "it says that there was more"
    assert text.splitlines() == [text]
    assert len(text) <= MAX_MESSAGE + len("…")
    assert error.status == status


@every_method
@pytest.mark.parametrize("status", [400, 500])
async def test_the_text_of_a_refusal_is_one_bounded_line(
    server: StandIn, engine: VllmEngine, method: str, status: int
) -> None:
    server.answer = fails(status, LONG)
    with pytest.raises(EngineError) as error:
        await call(engine, method)
    assert_one_bounded_line(error.value, status)


@pytest.mark.parametrize("method", STREAMS)
@pytest.mark.parametrize("status", [400, 500])
async def test_the_text_of_an_error_within_a_stream_is_one_bounded_line(
    server: StandIn, engine: VllmEngine, method: str, status: int
) -> None:
    server.answer = streams({"error": {"message": LONG, "code": status}})
    with pytest.raises(EngineError) as error:
        await call(engine, method)
    assert_one_bounded_line(error.value, status)


@pytest.mark.parametrize("number", [1, MAX_MESSAGE - 1, MAX_MESSAGE])
async def test_a_text_that_fits_is_given_as_it_is(
    server: StandIn, engine: VllmEngine, number: int
) -> None:
    server.answer = fails(400, "x" * number)
    with pytest.raises(EngineError) as error:
        await engine.prefill(TEXT, ())
    assert str(error.value) == "x" * number


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


@pytest.mark.parametrize("method", [*METHODS, "metrics"])
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


# Limits ---------------------------------------------------------------------------------------


def models(*max_model_lens: object) -> dict[str, Any]:
    """As vLLM lists them."""
    return {"object": "list", "data": [{"id": "m", "max_model_len": n} for n in max_model_lens]}


@pytest.mark.parametrize(
    ("bound", "max_model_len", "learned"),
    [(8192, 2048, 2047), (8192, 100_000, 8192), (2048, 2049, 2048), (2048, 2048, 2047)],
)
async def test_a_call_to_an_encoder_is_no_longer_than_its_prompt_may_be(
    server: StandIn, tmp_path: Path, bound: int, max_model_len: int, learned: int
) -> None:
    """A token has to fit beside it."""
    engine = VllmEngine(WorkerId("e0"), Stage.ENCODE, server.socket, "m", max_batch_tokens=bound)
    server.answer = replies(models(max_model_len))
    assert await engine.learn_limits() == max_model_len
    assert engine.max_batch_tokens == learned
    assert server.requests == [("/v1/models", None)]
    await engine.close()


async def test_the_first_model_is_the_one_that_is_served(
    server: StandIn, engine: VllmEngine
) -> None:
    """Others are adapters."""
    server.answer = replies(models(512, None))
    assert await engine.learn_limits() == 512


@pytest.mark.parametrize(
    "body",
    ["{", [], {}, {"data": []}, {"data": [{}]}, {"data": 5}, models(None), models("many")],
    ids=str,
)
async def test_an_engine_that_does_not_say_its_limits_is_an_error_that_names_it(
    server: StandIn, engine: VllmEngine, body: object
) -> None:
    before = engine.max_batch_tokens
    server.answer = replies(body)
    with pytest.raises(EngineError, match="e-0 does not say its max_model_len"):
        await engine.learn_limits()
    assert engine.max_batch_tokens == before


async def test_an_engine_that_breaks_off_does_not_say_its_limits(
    server: StandIn, engine: VllmEngine
) -> None:
    server.answer = breaks_off
    with pytest.raises(EngineError, match="e-0"):
        await engine.learn_limits()


async def test_metrics_are_the_engines_text(server: StandIn, engine: VllmEngine) -> None:
    server.answer = replies("vllm:x 1\n")
    assert await engine.metrics() == "vllm:x 1\n"
    assert server.requests == [("/metrics", None)]
