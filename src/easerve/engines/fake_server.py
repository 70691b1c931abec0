"""Engines of fixed latency behind the very HTTP that vLLM's API servers speak.

``python -m easerve.engines.fake_server FOLDER`` listens on ``e.sock``, ``p.sock`` and ``d.sock`` in
the folder and, for routers that want addresses, on three free ports of loopback, which it prints.
It computes nothing: an answer is so many tokens, after so many milliseconds. So what a request
takes beyond those is the control plane's. It is written on asyncio's transports, with as little
work per call as Python allows, so that it is not what saturates.

The OpenAI route of each engine makes a whole answer by itself: render, encode, prefill and decode
take their time one after the other. That is the same work without any router in between, and what
a router of plain engines stands in front of. With ``kv_transfer_params`` it is one stage, as vLLM's
own disaggregated engines are.
"""

import argparse
import asyncio
import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

STAGES, MODEL = ("e", "p", "d"), "fake"
TOKENS_PER_ITEM, PLACEHOLDER, TEXT_TOKENS = 16, 1, 32
TEXT = " token"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of each call; ``token_s`` between the tokens of an answer, the first one at once."""

    render_s: float = 0.001
    encode_s: float = 0.005
    prefill_s: float = 0.01
    token_s: float = 0.005


class Part(msgspec.Struct):
    """Of a message."""

    type: str = "text"
    uuid: str | None = None


class Message(msgspec.Struct):
    content: str | list[Part] | None = None


class Handle(msgspec.Struct):
    do_remote_decode: bool = False
    do_remote_prefill: bool = False


class Coming(msgspec.Struct):
    coming: list[int] = []


class Sampling(msgspec.Struct):
    max_tokens: int = 16


class Call(msgspec.Struct):
    """What is read of a body; the rest is skipped."""

    messages: list[Message] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    sampling_params: Sampling | None = None
    content_parts: list[Part] | None = None
    features: dict[str, Any] | None = None
    kv_transfer_params: Handle | None = None
    ec_transfer_params: Coming | None = None

    @property
    def keys(self) -> list[str]:
        """Of the media in the messages."""
        parts = (m.content for m in self.messages if isinstance(m.content, list))
        return [str(part.uuid) for each in parts for part in each if part.type != "text"]

    @property
    def num_tokens(self) -> int:
        return self.max_completion_tokens or self.max_tokens or 16


_decode = msgspec.json.Decoder(Call).decode
_encode = msgspec.json.encode


class Fabric:
    """What the engines share: embeddings that have been pushed, and who waits for one."""

    def __init__(self, latency: Latency) -> None:
        self.latency = latency
        self.loop = asyncio.get_running_loop()
        self._there: set[str] = set()
        self._waiting: defaultdict[str, list[Callable[[], None]]] = defaultdict(list)

    def push(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._there.add(key)
            for resume in self._waiting.pop(key, ()):
                resume()

    def when_there(self, keys: Sequence[str], then: Callable[[], None]) -> None:
        """Once every key has been pushed. Each push is used up: pictures never repeat."""
        missing = [key for key in keys if key not in self._there]
        self._there.difference_update(keys)
        if not missing:
            then()
            return
        left = len(missing)

        def came() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._there.difference_update(missing)
                then()

        for key in missing:
            self._waiting[key].append(came)

    def after(self, delays_s: Sequence[float], then: Callable[[], None]) -> None:
        """After all the delays, one timer each: a chain rounds as its links would on their own."""
        if not delays_s:
            then()
            return
        self.loop.call_later(delays_s[0], self.after, delays_s[1:], then)


class Connection(asyncio.Protocol):
    """One client's; requests on it come one after the other."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric, self._rest = fabric, bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._rest += data
        head_end = self._rest.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._rest[:head_end])
        size, at = 0, head.lower().find(b"\r\ncontent-length:")
        if at >= 0:
            size = int(head[at + 17 :].split(b"\r\n", 1)[0])
        begin, end = head_end + 4, head_end + 4 + size
        if len(self._rest) < end:
            return
        body = bytes(self._rest[begin:end])
        del self._rest[:end]
        self._handle(head.split(b" ", 2)[1].decode(), body)

    # What is answered ---------------------------------------------------------------------------

    def _handle(self, path: str, body: bytes) -> None:
        latency, after = self._fabric.latency, self._fabric.after
        if not body:
            self._reply(_about(path))
            return
        call = _decode(body)
        if path.endswith("/render"):
            after([latency.render_s], lambda: self._reply(_rendered(call)))
        elif call.content_parts is not None:
            keys = [str(part.uuid) for part in call.content_parts]
            after([latency.encode_s], lambda: self._encoded(keys))
        elif path.endswith("/generate"):
            self._generate(call)
        else:
            self._openai(call)

    def _encoded(self, keys: Sequence[str]) -> None:
        self._reply(_encode({"ec_transfer_params": {"evicted": []}, "choices": []}))
        self._fabric.push(keys)

    def _generate(self, call: Call) -> None:
        """Prefill if the KV cache is to be kept, else decode."""
        sampling = call.sampling_params or Sampling()
        if call.stream:
            self._stream(sampling.max_tokens, is_chat=False)
            return
        keys = (call.features or {}).get("mm_hashes", {}).get("image", [])
        coming = call.ec_transfer_params.coming if call.ec_transfer_params else []
        prefill_s = self._fabric.latency.prefill_s
        self._fabric.when_there(
            [keys[index] for index in coming],
            lambda: self._fabric.after([prefill_s], lambda: self._reply(PREFILLED)),
        )

    def _openai(self, call: Call) -> None:
        """A whole answer; or prefill's part of one, or decode's."""
        latency, handle = self._fabric.latency, call.kv_transfer_params or Handle()
        delays_s = [latency.render_s, latency.prefill_s]
        if call.keys:
            delays_s.insert(1, latency.encode_s)
        if handle.do_remote_decode:
            self._fabric.after(delays_s, lambda: self._reply(CHAT_PREFILLED))
            return
        if handle.do_remote_prefill:
            delays_s = []
        self._fabric.after(delays_s, lambda: self._stream(call.num_tokens, is_chat=True))

    # How ----------------------------------------------------------------------------------------

    def _reply(self, body: bytes) -> None:
        if self._transport is not None:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )

    def _stream(self, num_tokens: int, is_chat: bool) -> None:
        """Tokens one by one."""
        if self._transport is not None:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            self._next_token(num_tokens, is_chat)

    def _next_token(self, num_left: int, is_chat: bool) -> None:
        if self._transport is None:
            return
        last = num_left <= 1
        self._transport.write(_chunked(EVENTS[is_chat, last]) + (END if last else b""))
        if not last:
            token_s = self._fabric.latency.token_s
            self._fabric.loop.call_later(token_s, self._next_token, num_left - 1, is_chat)


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(content: Any) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


def _about(path: str) -> bytes:
    if path == "/v1/models":
        return _encode({"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]})
    return b"{}"


def _rendered(call: Call) -> bytes:
    keys = call.keys
    place = [{"offset": i * TOKENS_PER_ITEM, "length": TOKENS_PER_ITEM} for i in range(len(keys))]
    features = {"mm_hashes": {"image": keys}, "mm_placeholders": {"image": place}}
    return _encode(
        {
            "token_ids": [PLACEHOLDER] * TOKENS_PER_ITEM * len(keys) + [5] * TEXT_TOKENS,
            "features": features if keys else None,
            "sampling_params": {"max_tokens": call.num_tokens, "temperature": 0.0},
        }
    )


def _token(finish: str | None) -> dict[str, Any]:
    """A choice of vLLM's generate route."""
    token = {"index": 0, "text": TEXT, "token_ids": [7], "logprobs": None}
    return {**token, "finish_reason": finish, "stop_reason": None}


def _chunk(finish: str | None) -> dict[str, Any]:
    """A choice of a chat's chunk."""
    return {"index": 0, "delta": {"content": TEXT}, "logprobs": None, "finish_reason": finish}


CHAT = {"id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 0, "model": MODEL}
HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "fake",
    "remote_block_ids": [1],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
}
USAGE = {"prompt_tokens": TEXT_TOKENS, "completion_tokens": 1, "total_tokens": TEXT_TOKENS + 1}
PREFILLED = _encode(
    {"choices": [_token("length")], "kv_transfer_params": HANDLE, "ec_transfer_params": {}}
)
CHAT_PREFILLED = _encode(
    {
        **CHAT,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT},
                "finish_reason": "length",
            }
        ],
        "usage": USAGE,
        "kv_transfer_params": HANDLE,
    }
)
# By the route, and whether it is the last: what comes with each token.
EVENTS = {
    (False, False): _event({"request_id": "fake", "choices": [_token(None)]}),
    (False, True): _event({"request_id": "fake", "choices": [_token("length")]}) + DONE,
    (True, False): _event({**CHAT, "choices": [_chunk(None)]}),
    (True, True): _event({**CHAT, "choices": [_chunk("length")]})
    + _event({**CHAT, "choices": [], "usage": USAGE})
    + DONE,
}


async def serve(folder: Path, latency: Latency) -> None:
    """Until standard input ends. Prints the ports, with a space between them."""
    fabric, loop = Fabric(latency), asyncio.get_running_loop()
    servers = [
        await loop.create_unix_server(lambda: Connection(fabric), folder / f"{name}.sock")
        for name in STAGES
    ]
    tcp = [await loop.create_server(lambda: Connection(fabric), "127.0.0.1", 0) for _ in STAGES]
    print(*(server.sockets[0].getsockname()[1] for server in tcp), flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    for server in [*servers, *tcp]:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in Latency.__dataclass_fields__:
        default = getattr(Latency(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    asked = vars(parser.parse_args())
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(asked.pop("folder"), Latency(**asked)))


if __name__ == "__main__":
    main()
