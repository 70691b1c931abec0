"""Requests sent on one event loop, and what came back.

Open loop: each request is sent at its time, however slow the server is; with ``max_in_flight`` it
may have to wait until fewer are unanswered, and counts from when it was due. Closed loop: some
workers, each of which sends its next request as soon as its last one is answered.
"""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from easerve.bench.answer import UNREADABLE, Answer, message_of
from easerve.bench.health import beating
from easerve.bench.job import Job, OnProgress, Progress, brief
from easerve.bench.sample import Sample, Seen
from easerve.goodput import Outcome, Record

# A connection that the server is about to close must not be used: uvicorn closes idle ones at 5 s.
KEEPALIVE_S = 3.0
MAX_PLAIN_BYTES = 1 << 20  # aiohttp wants larger bodies as a file, which it sends piece by piece
REFUSALS: Mapping[int, Outcome] = {429: "rejected", 503: "rejected"}
PROGRESS_INTERVAL_S = 0.1
WARMUP_CONCURRENCY = 4
Clock = Callable[[], float]


async def run(
    job: Job,
    bodies: Sequence[bytes],
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
) -> Seen:
    """Warm-ups first; when none of them was completed, nothing else is sent.

    ``stop`` ends the run early: what is unanswered then is cancelled, what was not sent is left
    out. ``on_progress`` is called ten times a second at most, and at the end.
    """
    headers = {"content-type": "application/json"}
    if job.api_key is not None:
        headers["authorization"] = f"Bearer {job.api_key}"
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),  # no balancer is to take all of them for one client
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
    ) as session:
        return await phases(job, bodies, session, on_progress, stop or asyncio.Event())


async def phases(
    job: Job,
    bodies: Sequence[bytes],
    session: aiohttp.ClientSession,
    on_progress: OnProgress | None,
    stop: asyncio.Event,
    clock: Clock = time.monotonic,
) -> Seen:
    """``clock``: in seconds, never set back."""
    progress = Progress()
    async with telling(progress, on_progress), beating(clock) as warming:
        first = Run(job, session, progress, clock, is_warmup=True)
        warmup = bodies[: job.num_warmup]
        await first.until(stop, first.closed_loop(warmup, WARMUP_CONCURRENCY))
    warmed = first.samples
    if stop.is_set() or (warmed and not any(_is_completed(each) for each in warmed)):
        return Seen(warmed, [], clock(), 0.0, warming.health(), stop.is_set())
    async with telling(progress, on_progress), beating(clock) as pulse:
        measured = Run(job, session, progress, clock)
        await measured.until(stop, measured.loop(bodies[job.num_warmup :]))
        wall_s, health = measured.now_s(), pulse.health()
    return Seen(warmed, measured.samples, measured.start_s, wall_s, health, stop.is_set())


def _is_completed(sample: Sample) -> bool:
    return sample.record.outcome == "completed"


@asynccontextmanager
async def telling(progress: Progress, on_progress: OnProgress | None) -> AsyncIterator[None]:
    """Now and then, and at the end. A listener's error is raised when the work has ended."""
    if on_progress is None:
        yield
        return
    told: Progress | None = None

    def tell() -> None:
        nonlocal told
        if progress != told:
            told = progress.copy()
            on_progress(told.copy())

    async def again() -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            tell()

    teller = asyncio.create_task(again())
    try:
        yield
    finally:
        teller.cancel()
        await asyncio.wait([teller])
    if not teller.cancelled():
        teller.result()
    tell()


class Run:
    """A run from its start, which is when this is made."""

    def __init__(
        self,
        job: Job,
        session: aiohttp.ClientSession,
        progress: Progress,
        clock: Clock = time.monotonic,
        is_warmup: bool = False,
    ) -> None:
        self._job, self._session, self._progress = job, session, progress
        self._is_warmup = is_warmup
        self._slots = None
        if job.max_in_flight is not None and not is_warmup:
            self._slots = asyncio.Semaphore(job.max_in_flight)
        self._samples: dict[int, Sample] = {}
        self._clock, self.start_s = clock, clock()

    @property
    def samples(self) -> list[Sample]:
        """Of what was sent, in the order given."""
        return [self._samples[index] for index in sorted(self._samples)]

    def now_s(self) -> float:
        return self._clock() - self.start_s

    async def until(self, stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, or as much of it as there was time for."""
        working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
        if not working.cancelled():
            working.result()

    async def loop(self, bodies: Sequence[bytes]) -> None:
        if self._job.concurrency is not None:
            await self.closed_loop(bodies, self._job.concurrency)
        else:
            await self.open_loop(bodies)

    async def open_loop(self, bodies: Sequence[bytes]) -> None:
        times_s = self._job.times_s
        async with asyncio.TaskGroup() as group:
            for index in sorted(range(len(bodies)), key=times_s.__getitem__):
                # Again if need be: some loops' timers are early by half a millisecond.
                while (left_s := times_s[index] - self.now_s()) > 0:  # noqa: ASYNC110
                    await asyncio.sleep(left_s)
                group.create_task(self._ask(index, bodies[index], times_s[index]))

    async def closed_loop(self, bodies: Sequence[bytes], concurrency: int) -> None:
        waiting = iter(range(len(bodies)))

        async def work() -> None:
            for index in waiting:
                await self._ask(index, bodies[index], self.now_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(bodies))):
                group.create_task(work())

    async def _ask(self, index: int, body: bytes, scheduled_s: float) -> None:
        if self._slots is None:
            await self._send(index, body, scheduled_s)
            return
        due_s = self.now_s()
        async with self._slots:
            await self._send(index, body, scheduled_s, self.now_s() - due_s)

    async def _send(
        self, index: int, body: bytes, scheduled_s: float, slot_wait_s: float = 0.0
    ) -> None:
        answer = Answer()
        if not self._is_warmup:
            self._progress.num_sent += 1
        sent_s = self.now_s()
        outcome: Outcome = "cancelled"
        cause: str | None = "cancelled"
        try:
            outcome, cause = await self._outcome(body, answer)
        finally:
            end_s = answer.last_token_s if outcome == "completed" else self.now_s()
            record = Record(
                *(scheduled_s, sent_s, answer.first_token_s, end_s, answer.num_tokens, outcome),
                slot_wait_s,
            )
            self._note(index, record, cause and brief(cause), answer)

    def _note(self, index: int, record: Record, cause: str | None, answer: Answer) -> None:
        self._samples[index] = Sample(
            record,
            cause,
            answer.done_s,
            answer.num_chunks,
            answer.num_usage_tokens,
            answer.num_prompt_tokens,
            answer.chunk_times_s,
        )
        if self._is_warmup:
            self._progress.num_warm += 1
        else:
            self._progress.count(record, cause, self._job.slos)

    async def _outcome(self, body: bytes, answer: Answer) -> tuple[Outcome, str | None]:
        """The outcome and, unless it is completed, the cause."""
        outcome: Outcome
        try:
            async with asyncio.timeout(self._job.timeout_s):
                outcome, cause = await self._exchange(body, answer)
        except TimeoutError:
            outcome, cause = "timed_out", f"no whole answer within {self._job.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, *UNREADABLE) as error:
            outcome, cause = "failed", f"{type(error).__name__}: {error}"
        if answer.error is not None:
            return "failed", f"error in the answer: {answer.error}"
        if answer.done_s is None:
            return outcome, cause
        # What goes wrong behind a whole answer is not the answer's fault.
        if answer.last_token_s is None:
            return "failed", "the answer has no token"
        return "completed", None

    async def _exchange(self, body: bytes, answer: Answer) -> tuple[Outcome, str]:
        """Fill in the answer, and say what it is called unless it is whole."""
        data = body if len(body) <= MAX_PLAIN_BYTES else io.BytesIO(body)
        async with self._session.post(self._job.url, data=data) as response:
            if response.status != 200:
                cause = f"HTTP {response.status}: {message_of(await response.read())}"
                return REFUSALS.get(response.status, "failed"), cause
            if response.content_type == "text/event-stream":
                # To the end, not to [DONE]: the connection is to be used again.
                async for piece in response.content.iter_any():
                    answer.take(piece, self.now_s())
            else:
                answer.take_whole(await response.read(), self.now_s())
        return "failed", "the stream ended before [DONE]"
