"""An HTTP server on a Unix socket that plays a vLLM API server: keeps requests, answers as told."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def choice(text: str, token: int, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """As the generate route has it in text mode, whole or in a stream."""
    return {
        "index": 0,
        "text": text,
        "token_ids": [token],
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
    } | more


def replies(body: object, status: int = 200) -> Answer:
    """Answer with JSON, or with a text as it is."""

    async def answer(_: web.Request) -> web.Response:
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(text=text, status=status, content_type="application/json")

    return answer


def fails(status: int, message: str = "it went wrong") -> Answer:
    """Answer as vLLM does when it refuses or fails."""
    return replies({"error": {"message": message, "type": "X", "code": status}}, status)


def streams(*events: Mapping[str, Any] | str, whole: bool = True) -> Answer:
    """Answer with server-sent events; unless whole, the connection breaks after them."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        if whole:
            await response.write(b"data: [DONE]\n\n")
        else:
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


def writes(*pieces: bytes) -> Answer:
    """Answer with these bytes, each piece on its way before the next."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    return answer


async def breaks_off(request: web.Request) -> web.StreamResponse:
    """Close the connection without a word."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@dataclass
class StandIn:
    """``requests`` are the paths and bodies that came, ``headers`` what came with them; ``answer``
    is what comes back.
    """

    socket: Path
    answer: Answer = field(default_factory=lambda: replies({}))
    requests: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.path, body))
        self.headers.append(request.headers)
        return await self.answer(request)

    async def never(self, request: web.Request) -> web.StreamResponse:
        """Take a request and keep silent until the client hangs up."""
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.hung_up.set()
        raise AssertionError

    async def starts_and_stalls(self, request: web.Request) -> web.StreamResponse:
        """Begin a stream, then say nothing more until the client hangs up."""
        response = web.StreamResponse()
        await response.prepare(request)
        event = {"choices": [choice("a", 1)]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
        return await self.never(request)

    @property
    def body(self) -> Any:
        """The body of the only request."""
        ((_, body),) = self.requests
        return body


@asynccontextmanager
async def stand_in(socket: Path) -> AsyncIterator[StandIn]:
    server = StandIn(socket)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(socket)).start()
    try:
        yield server
    finally:
        await runner.cleanup()
