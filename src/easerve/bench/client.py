"""A load client for any server that speaks OpenAI's API: when requests were sent, what came back.

Bodies are encoded before the clock starts, and of an answer no more is read than what is counted.

``python -m easerve.bench.client`` does it in a process of its own, so that the client's work does
not hold up the event loop of a server in this one: it reads a ``Job`` as a line of JSON and its
bodies from stdin, and writes its progress to stderr, as lines of JSON, and what it has seen to
stdout, as msgpack. SIGTERM stops a run early.
"""

import asyncio
import contextlib
import ctypes
import gc
import resource
import signal
import sys
from collections import deque
from collections.abc import Sequence

import msgspec
import uvloop

from easerve.bench import loop
from easerve.bench.health import raise_priority
from easerve.bench.job import TIMEOUT_S, Job, OnProgress, Planned, Progress, Target, encoded
from easerve.bench.sample import Sample, Seen

__all__ = ["LoadError", "Planned", "in_process", "run_in_process", "run_load"]
PR_SET_PDEATHSIG = 1
PROGRESS_START = b'{"num_warm":'
MAX_ERROR_LINES = 20


class LoadError(Exception):
    """There is nothing to report: the client's process failed, or no warm-up was completed."""


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
) -> list[Sample]:
    """Send the requests; what came of each in the order given, in seconds from the start.

    ``concurrency`` makes it a closed loop of that many workers. In an open loop, a request waits
    when ``max_in_flight`` are unanswered. ``timeout_s`` is for each request as a whole.
    ``on_progress`` is called ten times a second at most, and at the end. What a server does wrong
    is an outcome; ValueError is raised for arguments that cannot be.
    """
    target = Target(url, model, api_key, timeout_s)
    job, bodies = encoded(target, requests, max_in_flight=max_in_flight, concurrency=concurrency)
    return (await loop.run(job, bodies, on_progress)).samples


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
) -> list[Sample]:
    """``run_load`` in a process of its own, which is killed when this is cancelled.

    Raises LoadError when the process fails.
    """
    target = Target(url, model, api_key, timeout_s)
    job, bodies = encoded(target, requests, max_in_flight=max_in_flight, concurrency=concurrency)
    return (await in_process(job, bodies, on_progress)).samples


async def in_process(
    job: Job,
    bodies: Sequence[bytes],
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
) -> Seen:
    """``loop.run`` in a process of its own, which is killed when this is cancelled.

    Raises LoadError when the process fails.
    """
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
    stopping = asyncio.create_task(_stop(child, stop or asyncio.Event()))
    try:
        # Shielded: its pipes must be read to their end for asyncio to notice that it has ended.
        seen, words, _ = await asyncio.shield(work)
        code = await child.wait()
    finally:
        stopping.cancel()
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await asyncio.wait([work])
            await child.wait()
    if code:
        raise LoadError("\n".join(words) or f"the load client ended with exit code {code}")
    return msgspec.msgpack.decode(seen, type=Seen)


async def _stop(child: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
    await stop.wait()
    with contextlib.suppress(ProcessLookupError):
        child.terminate()


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


# The process of its own --------------------------------------------------------------------------


def _report(progress: Progress) -> None:
    sys.stderr.buffer.write(msgspec.json.encode(progress) + b"\n")
    sys.stderr.buffer.flush()


async def _run(job: Job, bodies: Sequence[bytes]) -> Seen:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return await loop.run(job, bodies, _report, stop)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection per open request
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
    bodies = [sys.stdin.buffer.read(size) for size in job.body_bytes]
    raise_priority()
    gc.freeze()  # so that collecting does not hold up the loop for what is here anyway
    seen = uvloop.run(_run(job, bodies))
    sys.stdout.buffer.write(msgspec.msgpack.encode(seen))


if __name__ == "__main__":
    main()
