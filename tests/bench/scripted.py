"""An OpenAI server that answers by a script, with times and failures that are known beforehand.

``python -m tests.bench.scripted --port 9090 --script "ok*6,slow*2,err500"`` runs it by itself.
Request i gets step i of the script, which begins anew at its end:

    ok         the role, then the tokens: the first after ttft_s, each next tpot_s later
    slow       the same with ten times the ttft_s
    one        one token                        bundle     the first token, then all others as one
    late       the usage comes LATE_S late      nousage    no usage, even if asked for
    badusage   the usage counts BAD_TOKENS more than there were
    err500     HTTP 500                         err429     HTTP 429
    sse_error  an event with an error           cut        breaks off after CUT_TOKENS tokens
    short      ends properly after as many      late_error  an event with an error after as many
    empty      nothing but [DONE]               hang       no answer at all

All times are from when the request's head had come, on a schedule: an event that was late makes
no other late. A warm-up or a check whether the server is ready takes a step too.
"""

import argparse
import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

STEPS = tuple(
    "ok slow one bundle late nousage badusage err500 err429 sse_error cut short late_error empty "
    "hang".split()
)
BROKEN = ("cut", "short", "late_error")
ERROR_AFTER_S, LATE_S = 0.005, 0.5
SLOW, BAD_TOKENS, CUT_TOKENS, PROMPT_TOKENS = 10, 7, 3, 10
MODEL, WORD = "scripted", " word"
DONE = b"data: [DONE]\n\n"
MAX_BODY_BYTES = 1 << 30
MEDIA = re.compile(rb'"(?:data:[^"]+|[A-Za-z0-9+/]{200,}=*)"')


@dataclass(frozen=True, slots=True)
class Script:
    """``steps`` and the times of an answer. ``role_delay_s``: of the chunk that has only the role;
    None: the first token has it. An answer has ``num_tokens``, or fewer if fewer are asked.
    """

    steps: tuple[str, ...] = ("ok",)
    ttft_s: float = 0.2
    tpot_s: float = 0.02
    num_tokens: int = 11
    role_delay_s: float | None = 0.0

    def __post_init__(self) -> None:
        unknown = set(self.steps) - set(STEPS)
        if unknown or not self.steps:
            raise ValueError(f"a step is one of {', '.join(STEPS)}, not {', '.join(unknown)}")


def parse_steps(text: str) -> tuple[str, ...]:
    """``ok*2,err500`` -> ok, ok, err500."""
    steps: list[str] = []
    for word in text.split(","):
        name, _, times = word.strip().partition("*")
        steps += [name] * int(times or 1)
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request: when it came, in seconds since the server's start, what it got, what it was.

    ``media`` and ``text`` are digests: of each picture, video or sound, and of all the rest.
    """

    at_s: float
    step: str
    body: dict[str, Any]
    media: tuple[str, ...]
    text: str


@dataclass(slots=True)
class Scripted:
    """A running server. ``most_open`` is the most requests that were open at once."""

    script: Script
    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    log: Path | None = None
    start: float = field(default_factory=time.monotonic)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        begin = time.monotonic()
        raw = await request.read()
        step = self._note(raw, begin - self.start)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await _Answer(self.script, step, begin, self.seen[-1].body, request).send()
        finally:
            self.num_open -= 1

    def _note(self, raw: bytes, at_s: float) -> str:
        step = self.script.steps[len(self.seen) % len(self.script.steps)]
        media = tuple(_digest(each) for each in MEDIA.findall(raw))
        seen = Seen(at_s, step, json.loads(raw), media, _digest(MEDIA.sub(b"", raw)))
        self.seen.append(seen)
        if self.log is not None:
            line = {"at_s": round(at_s, 6), "step": step, "media": media, "text": seen.text}
            with self.log.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return step

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


@dataclass(slots=True)
class _Answer:
    script: Script
    step: str
    begin: float
    body: dict[str, Any]
    request: web.Request
    stream: web.StreamResponse = field(
        default_factory=lambda: web.StreamResponse(headers={"content-type": "text/event-stream"})
    )

    @property
    def num_tokens(self) -> int:
        if self.step == "one":
            return 1
        asked = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        most = CUT_TOKENS if self.step in BROKEN else self.script.num_tokens
        return min(most, asked or most)

    @property
    def ttft_s(self) -> float:
        return self.script.ttft_s * (SLOW if self.step == "slow" else 1)

    @property
    def usage(self) -> dict[str, int]:
        num = self.num_tokens + (BAD_TOKENS if self.step == "badusage" else 0)
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": num,
            "total_tokens": PROMPT_TOKENS + num,
        }

    async def send(self) -> web.StreamResponse:
        if self.step == "hang":
            await asyncio.Event().wait()
        if self.step in ("err500", "err429"):
            await self._until(ERROR_AFTER_S)
            code = int(self.step[3:])
            return web.json_response(_error(code), status=code)
        if not self.body.get("stream"):
            return await self._whole()
        await self.stream.prepare(self.request)
        if self.step == "sse_error":
            await self._until(self.ttft_s)
            await self._event(_error(504))
        elif self.step != "empty":
            await self._tokens()
            if self.step == "cut":
                assert self.request.transport is not None
                self.request.transport.abort()
            if self.step == "late_error":
                await self._event(_error(500))
            if self.step in BROKEN:
                return self.stream
            await self._last()
        await self.stream.write(DONE)
        return self.stream

    async def _whole(self) -> web.Response:
        await self._until(self.ttft_s + (self.num_tokens - 1) * self.script.tpot_s)
        message = {"role": "assistant", "content": WORD * self.num_tokens}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        content = {"object": "chat.completion", "model": MODEL, "choices": [choice]}
        return web.json_response({"id": "scripted", "usage": self.usage, **content})

    async def _tokens(self) -> None:
        """The role, and each token at its time."""
        first = {"content": WORD}
        if self.script.role_delay_s is None:
            first = {"role": "assistant", **first}
        else:
            await self._until(self.script.role_delay_s)
            await self._chunk({"role": "assistant", "content": ""})
        await self._until(self.ttft_s)
        await self._chunk(first)
        last = self.num_tokens - 1
        if self.step == "bundle" and last:
            await self._until(self.ttft_s + last * self.script.tpot_s)
            await self._chunk({"content": WORD * last})
            return
        for number in range(1, last + 1):
            await self._until(self.ttft_s + number * self.script.tpot_s)
            await self._chunk({"content": WORD})

    async def _last(self) -> None:
        await self._chunk({}, "length")
        options = self.body.get("stream_options") or {}
        if options.get("include_usage") and self.step != "nousage":
            if self.step == "late":
                last_s = self.ttft_s + (self.num_tokens - 1) * self.script.tpot_s
                await self._until(last_s + LATE_S)
            await self._event({**_chunk(), "choices": [], "usage": self.usage})

    async def _until(self, after_s: float) -> None:
        await asyncio.sleep(max(0.0, self.begin + after_s - time.monotonic()))

    async def _chunk(self, delta: dict[str, str], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        await self._event({**_chunk(), "choices": [choice]})

    async def _event(self, content: dict[str, Any]) -> None:
        await self.stream.write(f"data: {json.dumps(content)}\n\n".encode())


def _chunk() -> dict[str, Any]:
    return {"id": "scripted", "object": "chat.completion.chunk", "model": MODEL, "created": 0}


def _error(code: int) -> dict[str, Any]:
    return {"error": {"message": "as scripted", "type": "scripted", "code": code}}


@asynccontextmanager
async def serving(
    script: Script, port: int = 0, keepalive_s: float = 60.0, log: Path | None = None
) -> AsyncIterator[Scripted]:
    """On the loopback, at a free port unless one is named. Answers under way are given up at the
    end.
    """
    server = Scripted(script, log=log)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/health", server.health)
    runner = web.AppRunner(
        app, keepalive_timeout=keepalive_s, shutdown_timeout=0.1, handler_cancellation=True
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=4096)
    await site.start()
    host, at = runner.addresses[0][:2]
    server.url = f"http://{host}:{at}"
    try:
        yield server
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--script", default="ok", type=parse_steps)
    parser.add_argument("--ttft", type=float, default=0.2, help="seconds")
    parser.add_argument("--tpot", type=float, default=0.02, help="seconds")
    parser.add_argument("--tokens", type=int, default=11)
    parser.add_argument("--role-delay", type=float, default=0.0, help="seconds; < 0: no such chunk")
    parser.add_argument("--keep-alive", type=float, default=60.0, help="seconds")
    parser.add_argument("--log", type=Path)
    asked = parser.parse_args()
    role_delay_s = None if asked.role_delay < 0 else asked.role_delay
    script = Script(asked.script, asked.ttft, asked.tpot, asked.tokens, role_delay_s)
    asyncio.run(_serve(script, asked))


async def _serve(script: Script, asked: argparse.Namespace) -> None:
    async with serving(script, asked.port, asked.keep_alive, asked.log) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    main()
