import asyncio
from collections.abc import Callable

import pytest

from easerve.cluster import restarts
from easerve.cluster.local import EngineStartError
from easerve.cluster.restarts import STEADY_S, Restarts
from easerve.config import ConfigError
from easerve.types import WorkerId

ONE, OTHER = WorkerId("local-prefill-0"), WorkerId("local-prefill-1")


class Starts:
    """Starts engines as the tests say, at a time that they say."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.begun: list[WorkerId] = []
        self.done: list[WorkerId] = []
        self.cancelled: list[WorkerId] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None
        self.go.set()
        self.restarts = Restarts(self.start, lambda: self.now)

    async def start(self, worker_id: WorkerId) -> None:
        self.begun.append(worker_id)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.append(worker_id)
            raise
        if self.error is not None:
            raise self.error
        self.done.append(worker_id)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause before the first start is short enough to wait for."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.001)


async def test_the_pause_doubles_from_a_second_to_a_minute() -> None:
    starts = Starts()
    pauses = [starts.restarts.ended(ONE) for _ in range(8)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert starts.restarts.ended(OTHER) == 1, "each has its own"
    await starts.restarts.close()
    assert not starts.begun


@pytest.mark.usefixtures("soon")
async def test_an_engine_is_started_once_after_the_pause() -> None:
    starts = Starts()
    starts.restarts.ended(ONE)
    assert not starts.begun
    await until(lambda: starts.done)
    await asyncio.sleep(0.01)
    assert starts.begun == [ONE]
    await starts.restarts.close()


@pytest.mark.parametrize(("up_s", "pause"), [(STEADY_S - 1, 0.002), (STEADY_S, 0.001)])
@pytest.mark.usefixtures("soon")
async def test_an_engine_that_was_up_for_a_minute_is_one_that_lasts(
    up_s: float, pause: float
) -> None:
    starts = Starts()
    starts.restarts.ended(ONE)
    await until(lambda: starts.done)
    await asyncio.sleep(0)
    starts.now += up_s
    assert starts.restarts.ended(ONE) == pause
    await starts.restarts.close()


@pytest.mark.usefixtures("soon")
async def test_the_time_that_a_start_takes_is_not_time_that_the_engine_was_up() -> None:
    starts = Starts()
    starts.go.clear()
    starts.restarts.ended(ONE)
    await until(lambda: starts.begun)
    starts.now += 2 * STEADY_S
    assert starts.restarts.ended(ONE) == 0.002
    await starts.restarts.close()


@pytest.mark.usefixtures("soon")
async def test_after_a_start_that_failed_the_next_one_waits_for_the_end_of_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts = Starts()
    starts.error = EngineStartError("it was not ready")
    starts.restarts.ended(ONE)
    await until(lambda: caplog.messages)
    await asyncio.sleep(0.01)
    assert starts.begun == [ONE]
    assert caplog.messages == ["it was not ready"]
    starts.error = None
    starts.restarts.ended(ONE)
    await until(lambda: starts.done)
    assert starts.begun == [ONE, ONE]
    await starts.restarts.close()


@pytest.mark.usefixtures("soon")
async def test_an_engine_that_ends_while_it_is_started_is_never_started_twice_at_once() -> None:
    starts = Starts()
    starts.go.clear()
    starts.restarts.ended(ONE)
    await until(lambda: len(starts.begun) == 1)
    starts.restarts.ended(ONE)
    await until(lambda: len(starts.begun) == 2)
    assert starts.cancelled == [ONE]
    starts.go.set()
    await until(lambda: starts.done)
    await asyncio.sleep(0.01)
    assert (starts.begun, starts.done) == ([ONE, ONE], [ONE])
    await starts.restarts.close()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("begun", [False, True])
async def test_nothing_is_started_once_it_is_closed(begun: bool) -> None:
    starts = Starts()
    starts.go.clear()
    starts.restarts.ended(ONE)
    if begun:
        await until(lambda: starts.begun)
    await starts.restarts.close()
    assert starts.cancelled == starts.begun == [ONE] * begun
    assert starts.restarts.ended(ONE) is None
    await asyncio.sleep(0.01)
    assert len(starts.begun) == begun


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("error", [ConfigError("no port is free"), OSError("no space")])
async def test_what_could_not_be_started_is_tried_again(error: Exception) -> None:
    starts = Starts()
    starts.error = error
    starts.restarts.ended(ONE)
    await until(lambda: len(starts.begun) == 2)
    starts.error = None
    await until(lambda: starts.done == [ONE])
    await starts.restarts.close()
