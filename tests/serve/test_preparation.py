"""Media are decoded in processes that may die: one death costs one picture, none stays."""

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncIterator

import pytest
from PIL import Image

from easerve.serve import preparation
from easerve.serve.media import MediaError, Picture, prepare
from easerve.serve.preparation import PreparationPool

from .conftest import Serve
from .server import (
    MAX_PIXELS,
    answer,
    answer_of,
    ask_about,
    body,
    data_url,
    encoded,
    error_of,
    picture,
    until,
)

RED, GREEN, BLUE = picture("red"), picture("green"), picture("blue")


@pytest.fixture
async def pool() -> AsyncIterator[PreparationPool]:
    """One worker, which is not running yet."""
    pool = PreparationPool(1, MAX_PIXELS)
    yield pool
    workers = set(pool._all)
    await pool.close()
    assert all(gone(worker) for worker in workers)


async def start_worker(pool: PreparationPool) -> Process:
    """The pool's worker, idle."""
    await pool.prepare(RED)
    (worker,) = pool._all
    return worker


def gone(worker: Process) -> bool:
    """Whether the process has ended and was waited for."""
    try:
        os.kill(worker.pid, 0)
    except ProcessLookupError:
        return True
    return False


async def asleep(pool: PreparationPool, worker: Process) -> asyncio.Task[Picture]:
    """A picture at a worker that does nothing with it."""
    worker.send_signal(signal.SIGSTOP)
    task = asyncio.create_task(pool.prepare(GREEN))
    await until(pool._idle.empty, "the use of the worker")
    return task


async def test_a_worker_does_what_the_decoder_does(pool: PreparationPool) -> None:
    assert await pool.prepare(RED) == prepare(RED, MAX_PIXELS)
    with pytest.raises(MediaError, match="no comma"):
        await pool.prepare("data:")
    with pytest.raises(MediaError, match="at most 1000000 pixels"):
        await pool.prepare(picture("red", (1001, 1000)))
    assert await pool.prepare(GREEN) == prepare(GREEN, MAX_PIXELS)
    assert len(pool._all) == 1


async def test_a_worker_is_told_what_else_changes_the_embedding() -> None:
    pool = PreparationPool(1, MAX_PIXELS, "model|options|")
    assert await pool.prepare(RED) == prepare(RED, MAX_PIXELS, "model|options|")
    assert (await pool.prepare(RED)).key != prepare(RED, MAX_PIXELS).key
    await pool.close()


async def test_more_pictures_than_workers_wait_for_their_turn() -> None:
    pool = PreparationPool(2, MAX_PIXELS)
    urls = [picture(color) for color in ("red", "green", "blue", "black", "white")] * 4
    assert await asyncio.gather(*map(pool.prepare, urls)) == [prepare(u, MAX_PIXELS) for u in urls]
    assert len(pool._all) == 2
    await pool.close()


async def test_the_last_used_worker_is_used_first() -> None:
    pool = PreparationPool(2, MAX_PIXELS)
    for _ in range(3):
        await pool.prepare(RED)
    assert len(pool._all) == 1
    await pool.close()


async def test_a_worker_that_is_killed_costs_one_picture(pool: PreparationPool) -> None:
    worker = await start_worker(pool)
    task = await asleep(pool, worker)
    worker.kill()
    with pytest.raises(MediaError, match="crashed its decoder"):
        await task
    assert await pool.prepare(GREEN) == prepare(GREEN, MAX_PIXELS)
    assert gone(worker)


async def test_a_worker_that_hangs_costs_one_picture(
    pool: PreparationPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker(pool)
    monkeypatch.setattr(preparation, "TIMEOUT_S", 0.05)
    task = await asleep(pool, worker)
    with pytest.raises(MediaError, match=r"not be decoded in 0\.05 s"):
        await task
    monkeypatch.undo()
    assert await pool.prepare(GREEN) == prepare(GREEN, MAX_PIXELS)
    assert gone(worker)


async def test_an_idle_worker_that_was_killed_is_replaced(pool: PreparationPool) -> None:
    worker = await start_worker(pool)
    worker.kill()
    await worker.wait()
    assert await pool.prepare(GREEN) == prepare(GREEN, MAX_PIXELS)


async def test_a_picture_that_needs_too_much_memory_is_refused(
    pool: PreparationPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "MEMORY_BYTES", 256 << 20)
    monkeypatch.setattr(pool, "_max_pixels", 10**9)
    bomb = data_url(encoded(Image.new("1", (12_000, 12_000)), compress_level=1))
    with pytest.raises(MediaError, match="too much memory"):
        await pool.prepare(bomb)
    assert await pool.prepare(RED) == prepare(RED, MAX_PIXELS)
    assert len(pool._all) == 1


async def test_one_who_gives_up_frees_the_worker(pool: PreparationPool) -> None:
    worker = await start_worker(pool)
    task = await asleep(pool, worker)
    task.cancel()
    await asyncio.wait([task])
    assert await pool.prepare(GREEN) == prepare(GREEN, MAX_PIXELS)
    assert gone(worker)


async def test_one_who_gives_up_while_the_worker_starts_leaves_no_process(
    pool: PreparationPool,
) -> None:
    before = children()
    for steps in range(5):
        task = asyncio.create_task(pool.prepare(GREEN))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await until(
        lambda: children() - before <= {worker.pid for worker in pool._all}, "the end of processes"
    )
    assert await pool.prepare(GREEN) == prepare(GREEN, MAX_PIXELS)


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:  # noqa: PTH123
        return {int(pid) for pid in file.read().split()}


async def test_closing_leaves_no_process() -> None:
    pool = PreparationPool(2, MAX_PIXELS)
    await asyncio.gather(pool.prepare(RED), pool.prepare(GREEN))
    workers = set(pool._all)
    assert len(workers) == 2
    assert not any(map(gone, workers))
    await pool.close()
    assert all(map(gone, workers))


# In the server ------------------------------------------------------------------------------------


async def test_a_decoder_that_dies_costs_the_server_one_request(
    serve: Serve, pool: PreparationPool
) -> None:
    server = await serve(preparation=pool)
    worker = await start_worker(pool)
    worker.send_signal(signal.SIGSTOP)
    asked = asyncio.create_task(server.ask(ask_about("which?", BLUE)))
    await until(pool._idle.empty, "the use of the worker")
    waiting = asyncio.create_task(server.ask(ask_about("which?", RED, GREEN)))
    await until(lambda: server.core.num_open == 2)
    worker.kill()
    error = error_of(await asked, 400)
    assert error["param"] == "messages[0].content[0].image_url.url"
    assert answer_of(await waiting) == answer("which?", RED, GREEN)
    assert answer_of(await server.ask(ask_about("which?", BLUE))) == answer("which?", BLUE)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_decoder(
    serve: Serve, pool: PreparationPool, stream: bool
) -> None:
    server = await serve(preparation=pool)
    worker = await start_worker(pool)
    worker.send_signal(signal.SIGSTOP)
    client = await server.connect(body(ask_about("which?", BLUE), stream=stream))
    await until(pool._idle.empty, "the use of the worker")
    await client.leave()
    await server.idle()
    assert answer_of(await server.ask(ask_about("which?", BLUE))) == answer("which?", BLUE)
    assert gone(worker)
