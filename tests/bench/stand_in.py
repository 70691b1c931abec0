"""An HTTP server on the loopback that plays an OpenAI server: notes what comes, answers as told."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from easerve.bench.job import Planned
from easerve.bench.sample import Sample
from easerve.goodput import Record

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
PATIENCE_S, POLL_S = 5.0, 0.001
DONE = b"data: [DONE]\n\n"


async def until(holds: Callable[[], object]) -> None:
    """Wait for a condition; fail when it does not come."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen in {PATIENCE_S:g} s"
        await asyncio.sleep(POLL_S)


def event(content: object) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def chunk(content: str, finish: str | None = None, **more: Any) -> bytes:
    delta = {"content": content, **more}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def usage(num_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": num_tokens}})


QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "why?"}]}
ANSWER = (chunk("", role="assistant"), chunk("a"), chunk("b", "stop"), usage(2), DONE)


async def stream(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    return response


def streams(*pieces: bytes) -> Answer:
    """Answer with a stream of these bytes."""
    return lambda request: stream(request, *pieces)


def breaks_after(*pieces: bytes) -> Answer:
    """The connection breaks after these bytes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await stream(request, *pieces)
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer


def stalls_after(*pieces: bytes) -> Answer:
    """Nothing comes after these bytes, not even headers when there are none."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if pieces:
            await stream(request, *pieces)
        await asyncio.Event().wait()
        raise AssertionError

    return answer


def replies(status: int, text: str, content_type: str = "application/json") -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type=content_type)

    return answer


def fails(status: int, message: str) -> Answer:
    """Answer as OpenAI words errors."""
    return replies(status, json.dumps({"error": {"message": message, "type": "x"}}))


@dataclass
class StandIn:
    """``bodies`` and ``headers`` are what came, ``running`` are answered now.

    While ``gate`` is not set no answer begins.
    """

    answer: Answer = field(default_factory=lambda: streams(*ANSWER))
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.path == "/v1/chat/completions"
        self.bodies.append(await request.read())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.connections.add(request.transport)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            return await self.answer(request)
        finally:
            self.running -= 1


@asynccontextmanager
async def stand_in() -> AsyncIterator[StandIn]:
    server = StandIn()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


def planned(*times_s: float) -> list[Planned]:
    """Requests that are told apart by their ``n``."""
    return [Planned(at_s, {**QUESTION, "n": n}) for n, at_s in enumerate(times_s)]


def numbers(server: StandIn) -> list[int]:
    return [json.loads(body)["n"] for body in server.bodies]


def records_of(samples: Sequence[Sample]) -> list[Record]:
    return [sample.record for sample in samples]
