"""A vLLM stage engine over HTTP on a Unix socket: tokens in, features in, tokens and text out."""

import errno
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from easerve.engines.protocol import (
    Delta,
    EmbeddingMissingError,
    EncodeCall,
    EngineError,
    Prefilled,
    Prompt,
)
from easerve.types import MediaItem, Modality, Stage, WorkerId

GENERATE = "/inference/v1/generate"
CONNECT_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 2.0
NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ENOENT)
KEEPALIVE_S = 30.0  # below VLLM_HTTP_TIMEOUT_KEEP_ALIVE
JSON = {"content-type": "application/json"}
# Pictures are megabytes; the standard library takes several times as long.
_encode = msgspec.json.encode
MAX_LINE_BYTES = 1 << 24
# vLLM leaves out of its JSON what has its default value (sampling_params.py), but reads a missing
# max_tokens as "up to the model's length".
DEFAULT_MAX_TOKENS = 16
NO_KV_YET: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class VllmEngine:
    """``engines.protocol.Engine`` spoken to a vLLM API server started with --enable-scale-out."""

    def __init__(self, worker_id: WorkerId, stage: Stage, socket: Path, model: str) -> None:
        self.worker_id, self.stage, self._model = worker_id, stage, model
        self._session = aiohttp.ClientSession(
            "http://engine",
            connector=aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),
            read_bufsize=MAX_LINE_BYTES,
            trust_env=False,
        )

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        reply = await self._post(
            "/v1/chat/completions/render",
            {**body, "model": self._model, "mm_payload": "none", "stream": False},
        )
        token_ids, features = reply["token_ids"], reply["features"]
        found = _items(features or {})
        return Prompt(
            token_ids,
            {"max_tokens": DEFAULT_MAX_TOKENS, **reply["sampling_params"]},
            features,
            tuple(item for _, item in found),
            tuple(token_ids[offset] for offset, _ in found),
        )

    async def encode(self, calls: Sequence[EncodeCall]) -> None:
        await self._generate(
            {
                "token_ids": [call.placeholder for call in calls],
                "content_parts": [
                    {"type": call.media.item_type, "url": call.media.url, "uuid": call.media.key}
                    for call in calls
                ],
                "sampling_params": {"max_tokens": 1, "temperature": 0.0},
                "ec_transfer_params": {"folders": [str(call.folder) for call in calls]},
            }
        )

    async def prefill(self, prompt: Prompt, folder: Path | None) -> Prefilled:
        sampling = {**prompt.sampling, "max_tokens": 1}
        if sampling.get("min_tokens"):
            sampling["min_tokens"] = 1
        if prompt.max_new_tokens > 1 and prompt.sampling.get("temperature") != 0:
            # Decode draws the first token again: an end that is drawn here must not count.
            sampling |= {"ignore_eos": True, "stop": [], "stop_token_ids": []}
        request = {**_tokens_in(prompt, sampling), "output_mode": "text"}
        if folder is not None:
            request["ec_transfer_params"] = {"folders": [str(folder)] * len(prompt.items)}
        if prompt.max_new_tokens > 1:
            request["kv_transfer_params"] = NO_KV_YET
        try:
            reply = await self._generate(request)
        except EngineError as error:
            # The engine names no cause. Ours is known from what it was given: the files.
            keys = [item.key for item in prompt.items]
            files = [folder / f"{key}.safetensors" for key in keys] if folder else []
            if error.status == 500 and not all(file.exists() for file in files):
                raise EmbeddingMissingError(str(error), error.status) from None
            raise
        first = _delta(reply["choices"][0])
        handle = reply["kv_transfer_params"]
        load_s = (reply.get("ec_transfer_params") or {}).get("load_s")
        final = prompt.max_new_tokens <= 1 or first.finish_reason != "length"
        if not final and not handle:
            raise EngineError(f"{self.worker_id} prefilled without keeping the KV cache")
        return Prefilled(first, final, handle or {}, load_s)

    async def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        request = {
            **_tokens_in(prompt, prompt.sampling),
            "model": self._model,
            "output_mode": "text",
            "stream": True,
            "kv_transfer_params": dict(handle),
        }
        finished = False
        async for event in self._stream(GENERATE, request):
            if "error" in event:
                error = event["error"]
                raise EngineError(f"{self.worker_id}: {error.get('message')}", error.get("code"))
            for choice in event["choices"]:
                delta = _delta(choice)
                finished = finished or delta.finish_reason is not None
                yield delta
        if not finished:
            raise EngineError(f"{self.worker_id} broke off its answer")

    async def health(self) -> bool | None:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._session.get("/health", timeout=timeout) as response:
                return response.status == 200
        except aiohttp.ClientConnectorError as error:
            return False if error.os_error.errno in NOBODY_LISTENS else None
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    async def metrics(self) -> str:
        try:
            async with self._session.get("/metrics") as response:
                return await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        await self._session.close()

    async def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self._post(GENERATE, {**request, "model": self._model})

    async def _post(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            async with self._session.post(path, data=_encode(request), headers=JSON) as response:
                if response.status != 200:
                    raise await self._error(response)
                reply: dict[str, Any] = await response.json()
                return reply
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._unreachable(error) from error

    async def _stream(self, path: str, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each server-sent event, without the closing [DONE]."""
        try:
            async with self._session.post(path, data=_encode(request), headers=JSON) as response:
                if response.status != 200:
                    raise await self._error(response)
                async for line in response.content:
                    if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                        yield json.loads(line[6:])
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> EngineError:
        return EngineError(f"{self.worker_id}: {str(error) or type(error).__name__}")

    async def _error(self, response: aiohttp.ClientResponse) -> EngineError:
        try:
            message = (await response.json())["error"]["message"]
        except (aiohttp.ClientError, ValueError, KeyError, TypeError):
            message = f"{self.worker_id} answered {response.status}"
        return EngineError(message, response.status)


def _tokens_in(prompt: Prompt, sampling: Mapping[str, Any]) -> dict[str, Any]:
    request: dict[str, Any] = {
        "token_ids": list(prompt.token_ids),
        "sampling_params": dict(sampling),
    }
    if prompt.features:
        # Decode gets the features too: they keep its prefix cache from mixing up pictures.
        request["features"] = dict(prompt.features)
    return request


def _delta(choice: Mapping[str, Any]) -> Delta:
    return Delta(
        choice["text"],
        choice["token_ids"] or (),
        choice["finish_reason"],
        choice["stop_reason"],
    )


def _items(features: Mapping[str, Any]) -> list[tuple[int, MediaItem]]:
    """The media items of a rendered prompt with their offsets, in prompt order."""
    found = [
        (place["offset"], MediaItem(key, Modality(modality), place["length"]))
        for modality, places in features.get("mm_placeholders", {}).items()
        for key, place in zip(features["mm_hashes"][modality], places, strict=True)
    ]
    return sorted(found, key=lambda pair: pair[0])
