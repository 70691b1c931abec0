"""A load client for any server that speaks OpenAI's API: when requests were sent, what came back.

Open loop: each request is sent at its time, however slow the server is. Closed loop: some workers,
each of which sends its next request as soon as its last one is answered. Bodies are encoded before
the clock starts, and of an answer no more is read than what is counted.

``python -m easerve.bench.client`` does it in a process of its own, so that the client's work does
not hold up the event loop of a server in this one: it reads a ``Job`` as a line of JSON and its
bodies from stdin, and writes its progress to stderr and the records to stdout, as JSON too.
"""

import asyncio
import contextlib
import ctypes
import io
import math
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import uvloop
from yarl import URL

from easerve.bench.answer import UNREADABLE, Answer, message_of
from easerve.goodput import Outcome, Record

PR_SET_PDEATHSIG = 1
TIMEOUT_S = 600.0
# A connection that the server is about to close must not be used: uvicorn closes idle ones at 5 s.
KEEPALIVE_S = 3.0
MAX_PLAIN_BYTES = 1 << 20  # aiohttp wants larger bodies as a file, which it sends piece by piece
MAX_CAUSES, MAX_CAUSE_CHARS = 20, 200
OTHER_CAUSES = "other causes"
REFUSALS: Mapping[int, Outcome] = {429: "rejected", 503: "rejected"}
PROGRESS_INTERVAL_S, PROGRESS_START = 0.1, b'{"num_done":'
MAX_ERROR_LINES = 20


class LoadError(Exception):
    """The client's process failed; its last words."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One request, to be sent ``at_s`` seconds after the start; a closed loop ignores the time.

    Bytes are sent as they are. A dict gets what it lacks: the model, and that the answer is to be
    streamed with its usage at the end.
    """

    at_s: float
    body: dict[str, Any] | bytes

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ValueError(f"a request cannot be sent at {self.at_s} seconds")

    def encoded(self, model: str) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        body: dict[str, Any] = {"model": model, "stream": True, **self.body}
        if body["stream"]:
            body.setdefault("stream_options", {"include_usage": True})
        return msgspec.json.encode(body)


@dataclass(slots=True)
class Progress:
    """How many requests have ended, and how often each cause kept one from being completed."""

    num_done: int = 0
    causes: dict[str, int] = field(default_factory=dict)

    def count(self, cause: str | None) -> None:
        self.num_done += 1
        if cause is not None:
            cause = " ".join(cause.split())[:MAX_CAUSE_CHARS]
            if cause not in self.causes and len(self.causes) >= MAX_CAUSES:
                cause = OTHER_CAUSES
            self.causes[cause] = self.causes.get(cause, 0) + 1


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A run without its bodies, which are ``body_bytes`` long. ValueError for what cannot be."""

    url: str
    api_key: str | None
    times_s: list[float]
    body_bytes: list[int]
    max_in_flight: int | None
    concurrency: int | None
    timeout_s: float

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if self.concurrency is not None and self.max_in_flight is not None:
            raise ValueError("a closed loop has no max_in_flight")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be more than 0 and finite, not {self.timeout_s}")


def endpoint(url: str) -> str:
    """Where chats are asked: a server's address, with or without ``/v1``, or the route itself.

    Raises ValueError for what is no HTTP address.
    """
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is not like http://127.0.0.1:8000")
    path = parsed.path.rstrip("/")
    if path.endswith("/completions"):
        return str(parsed)
    return str(parsed.with_path(f"{path.removesuffix('/v1')}/v1/chat/completions"))


async def run_load(
    url: str,
    model: str,
    requests: Sequence[Planned],
    api_key: str | None = None,
    max_in_flight: int | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    concurrency: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[Record]:
    """Send the requests; their records in the order given, in seconds from the start.

    ``concurrency`` makes it a closed loop of that many workers. In an open loop, a request waits
    when ``max_in_flight`` are unanswered, which makes it late. ``timeout_s`` is for each request as
    a whole. ``on_progress`` is called when a request has ended. What a server does wrong is an
    outcome; ValueError is raised for arguments that cannot be.
    """
    bodies = [request.encoded(model) for request in requests]
    job = _job(url, requests, bodies, api_key, max_in_flight, timeout_s, concurrency)
    return await _run(job, bodies, on_progress)


async def run_in_process(
    url: str,
    model: str,
    requests: Sequence[Planned],
    api_key: str | None = None,
    max_in_flight: int | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    concurrency: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[Record]:
    """``run_load`` in a process of its own, which is killed when this is cancelled.

    ``on_progress`` is called ten times a second at most, and for the last request. Raises
    LoadError when the process fails.
    """
    bodies = [request.encoded(model) for request in requests]
    job = _job(url, requests, bodies, api_key, max_in_flight, timeout_s, concurrency)
    return await _run_in_process(job, bodies, on_progress)


def _job(
    url: str,
    requests: Sequence[Planned],
    bodies: Sequence[bytes],
    api_key: str | None,
    max_in_flight: int | None,
    timeout_s: float,
    concurrency: int | None,
) -> Job:
    times_s, sizes = [request.at_s for request in requests], [len(body) for body in bodies]
    return Job(endpoint(url), api_key, times_s, sizes, max_in_flight, concurrency, timeout_s)


async def _run(job: Job, bodies: Sequence[bytes], on_progress: OnProgress | None) -> list[Record]:
    headers = {"content-type": "application/json"}
    if job.api_key is not None:
        headers["authorization"] = f"Bearer {job.api_key}"
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        cookie_jar=aiohttp.DummyCookieJar(),  # no balancer is to take all of them for one client
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
    ) as session:
        run = _Run(job, session, on_progress)
        if job.concurrency is not None:
            return await run.closed_loop(bodies, job.concurrency)
        return await run.open_loop(bodies, job.times_s)


class _Run:
    """A run from its start, which is when this is made."""

    def __init__(
        self, job: Job, session: aiohttp.ClientSession, on_progress: OnProgress | None
    ) -> None:
        self._url, self._timeout_s, self._session = job.url, job.timeout_s, session
        self._progress, self._on_progress = Progress(), on_progress
        self._slots: contextlib.AbstractAsyncContextManager[None] = contextlib.nullcontext()
        if job.max_in_flight is not None:
            self._slots = asyncio.Semaphore(job.max_in_flight)
        self._start = time.monotonic()

    async def open_loop(self, bodies: Sequence[bytes], times_s: Sequence[float]) -> list[Record]:
        tasks: dict[int, asyncio.Task[Record]] = {}
        async with asyncio.TaskGroup() as group:
            for index in sorted(range(len(bodies)), key=times_s.__getitem__):
                # Again if need be: some loops' timers are early by half a millisecond.
                while (left_s := times_s[index] - self._now_s()) > 0:  # noqa: ASYNC110
                    await asyncio.sleep(left_s)
                tasks[index] = group.create_task(self._ask(bodies[index], times_s[index]))
        return [tasks[index].result() for index in range(len(bodies))]

    async def closed_loop(self, bodies: Sequence[bytes], concurrency: int) -> list[Record]:
        records: dict[int, Record] = {}
        waiting = iter(range(len(bodies)))

        async def work() -> None:
            for index in waiting:
                records[index] = await self._ask(bodies[index], self._now_s())

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(bodies))):
                group.create_task(work())
        return [records[index] for index in range(len(bodies))]

    async def _ask(self, body: bytes, scheduled_s: float) -> Record:
        answer = Answer()
        async with self._slots:
            sent_s = self._now_s()
            outcome, cause = await self._outcome(body, answer)
        end_s = answer.end_s if outcome == "completed" else self._now_s()
        self._progress.count(cause)
        if self._on_progress is not None:
            self._on_progress(self._progress)
        return Record(scheduled_s, sent_s, answer.first_token_s, end_s, answer.num_tokens, outcome)

    async def _outcome(self, body: bytes, answer: Answer) -> tuple[Outcome, str | None]:
        """The outcome and, unless it is completed, the cause."""
        outcome: Outcome
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome, cause = await self._exchange(body, answer)
        except TimeoutError:
            outcome, cause = "timed_out", f"no whole answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError, *UNREADABLE) as error:
            outcome, cause = "failed", f"{type(error).__name__}: {error}"
        if answer.error is not None:
            return "failed", answer.error
        # What goes wrong behind a whole answer is not the answer's fault.
        return ("completed", None) if answer.end_s is not None else (outcome, cause)

    async def _exchange(self, body: bytes, answer: Answer) -> tuple[Outcome, str]:
        """Fill in the answer, and say what it is called unless it is whole."""
        data = body if len(body) <= MAX_PLAIN_BYTES else io.BytesIO(body)
        async with self._session.post(self._url, data=data) as response:
            if response.status != 200:
                cause = f"HTTP {response.status}: {message_of(await response.read())}"
                return REFUSALS.get(response.status, "failed"), cause
            if response.content_type == "text/event-stream":
                # To the end, not to [DONE]: the connection is to be used again.
                async for piece in response.content.iter_any():
                    answer.take(piece, self._now_s())
            else:
                answer.take_whole(await response.read(), self._now_s())
        return "failed", "the stream ended before [DONE]"

    def _now_s(self) -> float:
        return time.monotonic() - self._start


# The process of its own --------------------------------------------------------------------------


async def _run_in_process(
    job: Job, bodies: Sequence[bytes], on_progress: OnProgress | None
) -> list[Record]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "easerve.bench.client"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us, and we end it
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    work = asyncio.gather(
        child.stdout.read(),
        _listen(child.stderr, on_progress),
        _hand_over(child.stdin, job, bodies),
    )
    try:
        # Shielded: its pipes must be read to their end for asyncio to notice that it has ended.
        records, words, _ = await asyncio.shield(work)
        code = await child.wait()
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await asyncio.wait([work])
            await child.wait()
    if code:
        raise LoadError("\n".join(words) or f"the load client ended with exit code {code}")
    return msgspec.json.decode(records, type=list[Record])


async def _hand_over(stdin: asyncio.StreamWriter, job: Job, bodies: Sequence[bytes]) -> None:
    """The job on a line, then its bodies. That the process is gone is told by its exit code."""
    with contextlib.suppress(ConnectionError):
        stdin.write(msgspec.json.encode(job) + b"\n")
        for body in bodies:
            stdin.write(body)
            await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _listen(stderr: asyncio.StreamReader, on_progress: OnProgress | None) -> Sequence[str]:
    """Pass progress on; what else was said last."""
    words: deque[str] = deque(maxlen=MAX_ERROR_LINES)
    async for line in stderr:
        if not line.startswith(PROGRESS_START):
            words.append(line.decode(errors="replace").rstrip())
        elif on_progress is not None:
            on_progress(msgspec.json.decode(line, type=Progress))
    return words


class _Reporter:
    """Writes progress to stderr, not too often, and when all is done."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests, self._next = num_requests, 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now >= self._next or progress.num_done == self._num_requests:
            self._next = now + PROGRESS_INTERVAL_S
            sys.stderr.buffer.write(msgspec.json.encode(progress) + b"\n")
            sys.stderr.buffer.flush()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection per open request
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    bodies = [sys.stdin.buffer.read(size) for size in job.body_bytes]
    records = uvloop.run(_run(job, bodies, _Reporter(len(bodies))))
    sys.stdout.buffer.write(msgspec.json.encode(records))


if __name__ == "__main__":
    main()
