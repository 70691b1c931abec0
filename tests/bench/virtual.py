"""A server in virtual time, behind what the client takes for an HTTP session: exact to the ns."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeVarTuple, cast

import aiohttp

from easerve.bench.job import Job, Planned, Target, encoded
from easerve.bench.loop import phases
from easerve.bench.sample import Sample, Seen
from easerve.goodput import Slo
from easerve.types import NS_PER_S
from tests.sim.virtual_loop import VirtualLoop

Given = TypeVarTuple("Given")
Step = Sequence[tuple[float, bytes]]
"""Seconds after the one before, and what comes then."""


class Loop(VirtualLoop):
    def call_later(
        self,
        delay: float,
        callback: Callable[[*Given], object],
        *args: *Given,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """What is to be later is so, if by a nanosecond: a loop would go on for ever else."""
        later_s = max(delay, 1 / NS_PER_S) if delay > 0 else delay
        return super().call_later(later_s, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Given], object],
        *args: *Given,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_later(when - self.time(), callback, *args, context=context)


@dataclass
class Content:
    step: Step

    async def iter_any(self) -> AsyncIterator[bytes]:
        for after_s, piece in self.step:
            await asyncio.sleep(after_s)
            yield piece


@dataclass
class Response:
    content: Content
    status: int = 200
    content_type: str = "text/event-stream"

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.content.iter_any()])


@dataclass
class Session:
    """Answers by its steps, one after the other. ``at_s``: when each request came."""

    responses: Iterator[Response]
    loop: Loop
    at_s: list[float] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0

    @asynccontextmanager
    async def post(self, url: str, data: Any) -> AsyncIterator[Response]:
        self.at_s.append(self.loop.time())
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            yield next(self.responses)
        finally:
            self.num_open -= 1


def served(
    responses: Sequence[Response],
    times_s: Sequence[float],
    stop_at_s: float | None = None,
    warmup: int = 0,
    slos: dict[str, Slo] | None = None,
    **how: Any,
) -> tuple[Seen, Session]:
    """What a client saw of these answers, and what the server saw of the client."""
    loop = Loop("")  # type: ignore[abstract]
    session = Session(iter(responses), loop)
    timeout_s = how.pop("timeout_s", 600.0)
    job, bodies = encoded(
        Target("http://x", "m", timeout_s=timeout_s),
        [Planned(at_s, b"{}") for at_s in times_s],
        [Planned(0, b"{}")] * warmup,
        slos=slos,
        **how,
    )
    seen = _run(loop, job, bodies, session, stop_at_s)
    return seen, session


def _run(
    loop: Loop, job: Job, bodies: Sequence[bytes], session: Session, stop_at_s: float | None
) -> Seen:
    async def whole() -> Seen:
        stop = asyncio.Event()
        if stop_at_s is not None:
            loop.call_later(stop_at_s, stop.set)
        given = cast(aiohttp.ClientSession, session)
        return await phases(job, bodies, given, None, stop, loop.time)

    task = loop.create_task(whole())
    loop.run()
    assert loop.errors == []
    return cast(Seen, task.result())


def sample_of(response: Response, **how: Any) -> Sample:
    """Of one request, sent at 1 s."""
    seen, _ = served([response], [1.0], **how)
    (sample,) = seen.samples
    return sample
