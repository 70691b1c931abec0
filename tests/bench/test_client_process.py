"""The client in a process of its own."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from easerve.bench import loop
from easerve.bench.client import LoadError, in_process, run_in_process
from easerve.bench.job import Planned, Progress, Target, encoded
from easerve.goodput import Slo
from tests.processes import is_alive

from .stand_in import (
    ANSWER,
    QUESTION,
    StandIn,
    chunk,
    fails,
    numbers,
    planned,
    records_of,
    stalls_after,
    stand_in,
    streams,
    until,
)


@pytest.fixture
async def server() -> AsyncIterator[StandIn]:
    async with stand_in() as started:
        yield started


class Children:
    """Notes the processes that are started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[asyncio.subprocess.Process] = []
        self._start = asyncio.create_subprocess_exec
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self.start)

    async def start(self, *words: Any, **options: Any) -> asyncio.subprocess.Process:
        child = await self._start(*words, **options)
        self.started.append(child)
        return child

    def assert_none_lives(self) -> None:
        assert self.started
        assert not any(is_alive(child.pid) for child in self.started)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


async def test_a_process_of_its_own_does_the_same(server: StandIn, children: Children) -> None:
    refused = iter([False, True, False])
    server.answer = lambda request: (fails(429, "no") if next(refused) else streams(*ANSWER))(
        request
    )
    requests = [*planned(0, 0.03), Planned(0.06, b'{"n":2,"x":"%s"}' % (b"x" * (2 << 20)))]
    reports: list[Progress] = []
    samples = await run_in_process(
        server.url, "m", requests, api_key="secret", on_progress=reports.append
    )
    records = records_of(samples)
    assert [record.outcome for record in records] == ["completed", "rejected", "completed"]
    assert [record.num_output_tokens for record in records] == [2, 0, 2]
    assert [record.scheduled_s for record in records] == [0, 0.03, 0.06]
    assert numbers(server) == [0, 1, 2]
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert reports[-1] == Progress(0, 3, 3, {}, {"HTTP 429: no": 1})
    assert [sample.cause for sample in samples] == [None, "HTTP 429: no", None]
    assert [sample.num_prompt_tokens for sample in samples] == [9, None, 9]
    assert [len(sample.chunk_times_s) for sample in samples] == [2, 0, 2]
    children.assert_none_lives()


async def test_a_closed_loop_in_a_process(server: StandIn, children: Children) -> None:
    samples = await run_in_process(server.url, "m", planned(*[9.0] * 6), concurrency=2)
    assert {sample.record.outcome for sample in samples} == {"completed"}
    assert server.most_running <= 2
    children.assert_none_lives()


def cancel_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[None]]:
    async def scenario() -> None:
        children = Children(monkeypatch)
        async with stand_in() as server:
            server.gate.clear()
            run = asyncio.create_task(run_in_process(server.url, "m", planned(0)))
            await until(lambda: server.running)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            children.assert_none_lives()
            await until(lambda: not server.running)

    return scenario


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_cancelling_kills_the_process(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(cancel_while_it_runs(monkeypatch)())


async def test_cancelling_while_the_bodies_are_handed_over(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, tmp_path, "exec sleep 60")
    run = asyncio.create_task(run_in_process("http://x", "m", [Planned(0, b"x" * (8 << 20))]))
    await until(lambda: children.started)
    await asyncio.sleep(0.02)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    children.assert_none_lives()


async def test_an_error_of_the_caller_kills_the_process(
    server: StandIn, children: Children
) -> None:
    def report(_: Progress) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        await run_in_process(server.url, "m", planned(0, 60), on_progress=report)
    children.assert_none_lives()


def instead(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """A shell script takes the place of the client's process."""
    path = folder / "child"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo "{\\"num_warm\\":1}" >&2; echo "it broke" >&2; exit 3', "^it broke$"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "exit code -9"),
    ],
)
async def test_a_process_that_fails(
    script: str,
    message: str,
    children: Children,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    instead(monkeypatch, tmp_path, script)
    with pytest.raises(LoadError, match=message):
        await run_in_process("http://x", "m", [Planned(0, b"x" * (1 << 20))])
    children.assert_none_lives()


async def test_a_process_that_cannot_read_its_job_says_why() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "easerve.bench.client"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate(b'{"url": 1}\n')
    assert process.returncode == 1
    assert b"ValidationError" in error.splitlines()[-1]


async def test_no_process_outlives_its_parent(server: StandIn) -> None:
    server.gate.clear()
    program = (
        "import asyncio, sys\n"
        "from easerve.bench.client import run_in_process\n"
        "from easerve.bench.job import Planned\n"
        "asyncio.run(run_in_process(sys.argv[1], 'm', [Planned(0, {})]))\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, server.url)
    await until(lambda: server.running)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await until(lambda: not server.running)


async def test_warm_ups_come_first_and_are_apart(server: StandIn) -> None:
    asked, bodies = encoded(
        Target(server.url, "m"),
        planned(0.0, 0.01),
        [Planned(0, {**QUESTION, "n": n}) for n in (-1, -2, -3)],
        slos={"all": Slo(), "none": Slo(ttft_s=1e-9)},
    )
    told: list[Progress] = []
    seen = await loop.run(asked, bodies, told.append)
    assert numbers(server)[3:] == [0, 1]
    assert sorted(numbers(server)[:3]) == [-3, -2, -1]
    assert server.most_running <= loop.WARMUP_CONCURRENCY
    assert [len(each) for each in (seen.warmup, seen.samples)] == [3, 2]
    assert not seen.stopped
    assert told[-1] == Progress(3, 2, 2, {"all": 2, "none": 0}, {})
    assert seen.samples[0].record.sent_s < 5  # its clock has started anew
    assert seen.wall_s >= max(sample.done_s or 0 for sample in seen.samples)


async def test_nothing_follows_warm_ups_that_all_fail(server: StandIn) -> None:
    server.answer = fails(400, "what?")
    asked, bodies = encoded(Target(server.url, "m"), planned(0), planned(0, 0))
    seen = await loop.run(asked, bodies)
    assert [sample.cause for sample in seen.warmup] == ["HTTP 400: what?"] * 2
    assert seen.samples == []
    assert len(server.bodies) == 2


@pytest.mark.long
async def test_a_run_that_is_stopped_tells_of_what_was_sent(
    server: StandIn, children: Children
) -> None:
    answers = iter([streams(*ANSWER), stalls_after(chunk("a")), stalls_after()])
    server.answer = lambda request: next(answers)(request)
    asked, bodies = encoded(Target(server.url, "m"), planned(0, 0, 0, 60))
    stop = asyncio.Event()
    run = asyncio.create_task(in_process(asked, bodies, stop=stop))
    await until(lambda: server.running == 2)
    stop.set()
    seen = await run
    assert seen.stopped
    outcomes = sorted(sample.record.outcome for sample in seen.samples)
    assert outcomes == ["cancelled", "cancelled", "completed"]
    assert {sample.cause for sample in seen.samples} == {None, "cancelled"}
    await until(lambda: not server.running)
    children.assert_none_lives()
