"""A vLLM stage engine over HTTP on a Unix socket: tokens in, features in, tokens and text out."""

import asyncio
import errno
import hashlib
import textwrap
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from easerve.engines.protocol import (
    Bundle,
    Delta,
    Division,
    EmbeddingMissingError,
    EncodeCall,
    Encoded,
    EngineError,
    Media,
    Prefilled,
    Prompt,
    Route,
)
from easerve.engines.vllm.announcer import DEMAND, PARTITION, header
from easerve.engines.vllm.ec.messages import MessageError
from easerve.engines.vllm.ec.query import missing_items
from easerve.engines.vllm.http import NO_HEADERS, HttpError, Pool
from easerve.policy.partition import SHARED, Demand
from easerve.types import MediaItem, Modality, Stage, WorkerId

T = TypeVar("T")
GENERATE = "/inference/v1/generate"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEALTH_TIMEOUT_S = 2.0
QUERY_TIMEOUT_S = 1.0
NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ENOENT)
KEEPALIVE_S = 30.0  # below VLLM_HTTP_TIMEOUT_KEEP_ALIVE
# What can go wrong on the way to an engine and back.
BROKEN = (OSError, HttpError, msgspec.MsgspecError)
# Pictures are megabytes; the standard library takes several times as long.
_encode = msgspec.json.encode
MAX_MESSAGE = 1000  # characters; engines repeat what a client sent
# vLLM leaves out of its JSON what has its default value (sampling_params.py), but reads a missing
# max_tokens as "up to the model's length".
DEFAULT_MAX_TOKENS = 16
# One token, of no interest and never the end.
ANY_TOKEN: Mapping[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
# What of a chat request changes its prompt.
RENDERING = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "messages",
        "reasoning_effort",
        "tools",
        "truncate_prompt_tokens",
        "truncation_side",
    }
)
NO_KV_YET: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmEngine:
    """``engines.protocol.Engine`` spoken to a vLLM API server started with --enable-scale-out.

    ``media_at_prefill``: the model's placeholders are sparse, which tokens-in requests cannot say;
    requests with media go to the chat routes of encode and prefill (see models.CAPABILITIES).
    ``inbox``: where a prefill engine takes embeddings and says which it lacks, if one knows the
    deployment's ``token``. ``beside``: see the protocol. ``divided``: an encoder that shares its
    device with a local prefill engine by demand.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        stage: Stage,
        socket: Path,
        model: str,
        media_at_prefill: bool = False,
        num_slots: int = 256,
        max_batch_tokens: int = 2048,
        inbox: Path | None = None,
        token: str = "",
        beside: tuple[WorkerId, ...] = (),
        divided: bool = False,
    ) -> None:
        self.worker_id, self.stage, self._model = worker_id, stage, model
        self.num_slots, self.max_batch_tokens = num_slots, max_batch_tokens
        self.beside, self._divided = beside, divided
        self._media_at_prefill = media_at_prefill
        self._inbox, self._token = inbox, token
        self._http = Pool(socket, KEEPALIVE_S)

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        reply = await self._post(
            f"{_openai_path(body)}/render", {**body, "mm_payload": "none", "stream": False}
        )
        if isinstance(reply, list):  # completions: one per prompt
            (reply,) = reply
        token_ids, features = reply["token_ids"], reply["features"]
        found = _items(features or {})
        return Prompt(
            token_ids,
            {"max_tokens": DEFAULT_MAX_TOKENS, **reply["sampling_params"]},
            features,
            tuple(item for _, item in found),
            tuple(token_ids[offset] for offset, _ in found),
            body,
        )

    async def encode(self, calls: Sequence[EncodeCall], demand: Demand = SHARED) -> Encoded:
        media = [call.media for call in calls]
        request = (
            {
                "messages": [{"role": "user", "content": [_content_part(m) for m in media]}],
                **ANY_TOKEN,
            }
            if self._media_at_prefill
            else {
                "token_ids": [call.placeholder for call in calls],
                "content_parts": [
                    {"type": m.item_type, "url": m.url, "uuid": m.key} for m in media
                ],
                "sampling_params": ANY_TOKEN,
            }
        )
        request["ec_transfer_params"] = {"destinations": [call.destinations for call in calls]}
        path = CHAT if self._media_at_prefill else GENERATE
        reply = await self._post(path, request, {DEMAND: header(demand)} if self._divided else {})
        return self._checked(_ec_params(reply), Encoded)

    async def divide(self, demand: Demand) -> None:
        if self._divided:
            await self._post(PARTITION, {}, {DEMAND: header(demand)})

    async def division(self) -> Division | None:
        if not self._divided:
            return None
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return msgspec.json.decode(await self._get(PARTITION), type=Division)
        except BROKEN as error:
            raise self._unreachable(error) from error

    async def prefill(self, prompt: Prompt, coming: Collection[int]) -> Prefilled:
        with_media = self._media_at_prefill and bool(prompt.items)
        decides = not with_media and _prefill_decides(prompt)
        sampling = _first_token(prompt, decides)
        request = (
            {name: value for name, value in prompt.body.items() if name in RENDERING}
            | {"tool_choice": "none", **ANY_TOKEN}
            if with_media
            else {**_tokens_in(prompt, sampling), "output_mode": "text"}
        )
        if prompt.items:
            request["ec_transfer_params"] = {"coming": list(coming)}
        if prompt.max_new_tokens > 1 or not decides:
            request["kv_transfer_params"] = NO_KV_YET
        try:
            reply = await self._post(CHAT if with_media else GENERATE, request)
        except EngineError as error:
            # The engine names no cause.
            if error.status == 500 and (keys := await self._missing(prompt)):
                raise EmbeddingMissingError(str(error), error.status, keys) from None
            raise
        made = self._checked(_ec_params(reply), _News).prefilled()
        choice, handle = reply["choices"][0], reply["kv_transfer_params"]
        if choice["finish_reason"] not in ("length", "stop"):
            raise EngineError(f"{self.worker_id} ended its token: {choice['finish_reason']}")
        if decides and (prompt.max_new_tokens <= 1 or choice["finish_reason"] == "stop"):
            return replace(made, answer=_delta(choice))
        if not handle:
            raise EngineError(f"{self.worker_id} prefilled without keeping the KV cache")
        return replace(made, handle=handle)

    def _checked(self, params: Mapping[str, Any], kind: type[T]) -> T:
        """What the engine's connector says of itself."""
        try:
            return msgspec.convert(params, kind)
        except msgspec.ValidationError as error:
            raise EngineError(f"{self.worker_id}: ec_transfer_params: {error}") from None

    async def _missing(self, prompt: Prompt) -> tuple[str, ...]:
        """The keys of the prompt's items that the engine does not have, where it says so."""
        if self._inbox is None or not prompt.items:
            return ()
        keys = list(dict.fromkeys(item.key for item in prompt.items))
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                return await missing_items(self._inbox, self._token, keys)
        except (OSError, MessageError):  # a TimeoutError is an OSError
            return ()

    async def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        if prompt.route is Route.OPENAI:
            path, request = _openai_path(prompt.body), _openai_request(prompt, handle)
        else:
            path = GENERATE
            request = {
                **_tokens_in(prompt, prompt.sampling),
                "output_mode": "text",
                "stream": True,
                "kv_transfer_params": dict(handle),
            }
        if not request["stream"]:
            reply = await self._post(path, request)
            yield _openai_delta(reply["choices"][0], reply["usage"])
            return
        finished = False
        async for event in self._stream(path, request):
            for delta in self._deltas(event, path):
                finished = finished or delta.finish_reason is not None
                yield delta
        if not finished:
            raise EngineError(f"{self.worker_id} broke off its answer")

    def _deltas(self, content: bytes, path: str) -> list[Delta]:
        """What an event says."""
        try:
            if path == GENERATE:
                generated = _decode_generated(content)
                failure, deltas = generated.error, [each.delta() for each in generated.choices]
            else:
                event = msgspec.json.decode(content)
                failure, usage = event.get("error"), event.get("usage")
                deltas = [_openai_delta(choice, usage) for choice in event.get("choices", ())]
                if usage and not deltas:
                    deltas = [Delta("", usage=usage)]
        except msgspec.MsgspecError as error:
            raise self._unreachable(error) from error
        if failure is not None:
            raise EngineError(_brief(str(failure.get("message"))), failure.get("code"))
        return deltas

    async def release(self, prompt: Prompt, handle: Mapping[str, Any]) -> None:
        # Prefill frees a KV cache when it has been pulled; else it keeps it for its lease of 30 s.
        request = {**_tokens_in(prompt, ANY_TOKEN), "kv_transfer_params": dict(handle)}
        await self._post(GENERATE, request)

    async def health(self) -> bool | None:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                status, _ = await self._http.call("GET", "/health")
                return status == 200
        except OSError as error:
            return False if error.errno in NOBODY_LISTENS else None
        except HttpError:
            return None

    async def learn_limits(self) -> int:
        """The engine's max_model_len, which bounds the tokens of one call as well."""
        try:
            first, *_ = msgspec.json.decode(await self._get("/v1/models"))["data"]
            max_model_len = int(first["max_model_len"])
        except (OSError, HttpError) as error:
            raise self._unreachable(error) from error
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
            raise EngineError(f"{self.worker_id} does not say its max_model_len") from None
        self.max_batch_tokens = min(self.max_batch_tokens, max_model_len - 1)
        return max_model_len

    async def metrics(self) -> str:
        try:
            return (await self._get("/metrics")).decode()
        except BROKEN as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        await self._http.close()

    async def _get(self, path: str) -> bytes:
        _, body = await self._http.call("GET", path)
        return body

    async def _post(
        self, path: str, request: Mapping[str, Any], headers: Mapping[str, str] = NO_HEADERS
    ) -> Any:
        content = _encode({**request, "model": self._model})
        try:
            status, body = await self._http.call("POST", path, content, headers)
            if status == 200:
                return msgspec.json.decode(body)
        except BROKEN as error:
            raise self._unreachable(error) from error
        raise self._error(status, body)

    async def _stream(self, path: str, request: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The JSON of each server-sent event, without the closing [DONE]."""
        content = _encode({**request, "model": self._model})
        rest, failed = b"", 0
        try:
            async for status, piece in self._http.stream(path, content):
                if status != 200:
                    rest, failed = rest + piece, status
                    continue
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield line[6:]
        except BROKEN as error:
            if not failed:
                raise self._unreachable(error) from error
        if failed:
            raise self._error(failed, rest)

    def _unreachable(self, error: Exception) -> EngineError:
        return EngineError(f"{self.worker_id}: {str(error) or type(error).__name__}")

    def _error(self, status: int, body: bytes) -> EngineError:
        try:
            message = msgspec.json.decode(body)["error"]["message"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            message = f"{self.worker_id} answered {status}"
        return EngineError(_brief(str(message)), status)


def _brief(message: str) -> str:
    """One line, bounded: it goes to the client and into the log."""
    return textwrap.shorten(message[: 4 * MAX_MESSAGE], MAX_MESSAGE, placeholder=" …")


def _prefill_decides(prompt: Prompt) -> bool:
    """Whether the token that prefill draws is the one decode would draw, should it be the last.

    Decode draws the first token again. At a temperature an end would have two chances; a grammar
    and the parsing of an answer are decode's.
    """
    if prompt.route is Route.OPENAI or prompt.sampling.get("structured_outputs"):
        return False
    return prompt.max_new_tokens <= 1 or prompt.sampling.get("temperature") == 0


def _first_token(prompt: Prompt, decides: bool) -> dict[str, Any]:
    """The request's sampling parameters for prefill, which refuses what is wrong with them.

    Unless prefill decides, the token may not end the answer; a grammar is compiled by decode only.
    """
    sampling = {**prompt.sampling, "max_tokens": 1}
    if sampling.get("min_tokens"):
        sampling["min_tokens"] = 1
    if not decides:
        sampling |= {"ignore_eos": True, "stop": [], "stop_token_ids": []}
        sampling.pop("structured_outputs", None)
    return sampling


def _tokens_in(prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {
        "token_ids": list(prompt.token_ids),
        "sampling_params": dict(sampling),
    }
    if salt := prompt.body.get("cache_salt"):
        request["cache_salt"] = salt
    if prompt.features:
        # Decode gets the features too: they keep its prefix cache from mixing up pictures.
        request["features"] = dict(prompt.features)
    return request


def _openai_path(body: Mapping[str, Any]) -> str:
    return CHAT if "messages" in body else COMPLETIONS


def _openai_request(prompt: Prompt, handle: Mapping[str, Any]) -> dict[str, Any]:
    """The request for decode's own OpenAI route, with the prompt as tokens.

    vLLM takes a chat's prompt from ``kv_transfer_params`` when the messages are all text, so the
    media are left out of them (online_renderer.py, _reused_prompt_token_ids). The salt stands for
    them in the prefix cache.
    """
    request = {
        **prompt.body,
        "max_tokens": prompt.max_new_tokens,
        "seed": prompt.sampling.get("seed"),
        "stream": prompt.stream,
        # To count them. An echoed prompt comes as text only where no ids are asked for.
        "return_token_ids": not prompt.body.get("echo"),
        "kv_transfer_params": dict(handle),
    }
    request.pop("max_completion_tokens", None)
    if prompt.stream:
        request["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if prompt.items:
        salts = [prompt.body.get("cache_salt") or "", *(item.key for item in prompt.items)]
        request["cache_salt"] = hashlib.sha256("|".join(salts).encode()).hexdigest()
    if "messages" in request:
        request["messages"] = [_without_media(message) for message in prompt.body["messages"]]
        request["kv_transfer_params"]["prompt_token_ids"] = list(prompt.token_ids)
    else:
        request["prompt"] = list(prompt.token_ids)
    return request


def _without_media(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [part for part in message["content"] if part["type"] == "text"]}


def _content_part(media: Media) -> dict[str, Any]:
    return {"type": media.item_type, media.item_type: {"url": media.url}, "uuid": media.key}


def _ec_params(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the engine's connector says in the reply."""
    return reply.get("ec_transfer_params") or {}


class _News(msgspec.Struct):
    """What the connector of a prefill engine says; bundles as in ``Bundle``."""

    wait_s: float | None = None
    bundles: tuple[tuple[int, int, float], ...] = ()
    evicted: tuple[str, ...] = ()

    def prefilled(self) -> Prefilled:
        """Neither answer nor KV cache yet."""
        bundles = tuple(Bundle(*bundle) for bundle in self.bundles)
        return Prefilled(wait_s=self.wait_s, bundles=bundles, evicted=self.evicted)


class _Choice(msgspec.Struct):
    """A piece of the text mode of the generate route."""

    text: str
    token_ids: list[int] | None
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: dict[str, Any] | None

    def delta(self) -> Delta:
        return Delta(
            self.text,
            self.token_ids or (),
            self.finish_reason,
            self.stop_reason,
            self.logprobs["content"] if self.logprobs else None,
        )


class _Generated(msgspec.Struct):
    """An event of that route; what is not named here is skipped."""

    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_decode_generated = msgspec.json.Decoder(_Generated).decode


def _delta(choice: Mapping[str, Any]) -> Delta:
    return msgspec.convert(choice, _Choice).delta()


def _openai_delta(choice: Mapping[str, Any], usage: Mapping[str, Any] | None = None) -> Delta:
    """From an OpenAI route: a chunk's choice, or a whole one."""
    return Delta(
        "",
        choice.get("token_ids") or (),
        choice["finish_reason"],
        choice.get("stop_reason"),
        choice=choice,
        usage=usage,
    )


def _items(features: Mapping[str, Any]) -> list[tuple[int, MediaItem]]:
    """The media items of a rendered prompt with their offsets, in prompt order."""
    found = [
        (place["offset"], MediaItem(key, Modality(modality), place["length"]))
        for modality, places in features.get("mm_placeholders", {}).items()
        for key, place in zip(features["mm_hashes"][modality], places, strict=True)
    ]
    return sorted(found, key=lambda pair: pair[0])
