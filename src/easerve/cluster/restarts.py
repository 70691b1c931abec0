"""Engines that are started again when they end, sooner or later by how long they lasted."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from easerve.cluster.local import EngineStartError
from easerve.config import ConfigError
from easerve.types import WorkerId

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 60.0  # up for so long, an engine is not one that always fails
logger = logging.getLogger("easerve.restarts")


class Restarts:
    """``start(worker_id)`` starts an engine and returns when it works, or raises EngineStartError.

    Only the end of its process makes an engine start again, once, after a pause of 1 s that doubles
    up to 60 s. So a start that fails leads to the next one when its process ends, and to none
    before: there are never two of an engine.
    """

    def __init__(
        self,
        start: Callable[[WorkerId], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._clock = start, clock
        self._pauses_s: dict[WorkerId, float] = {}
        self._up_since: dict[WorkerId, float] = {}
        self._tasks: dict[WorkerId, asyncio.Task[None]] = {}
        self._closed = False

    def ended(self, worker_id: WorkerId) -> float | None:
        """An engine's process has ended; in how many seconds it is started, None: it is not."""
        if self._closed:
            return None
        now, pause_s = self._clock(), self._pauses_s.get(worker_id, 0.0)
        if now - self._up_since.pop(worker_id, now) >= STEADY_S:
            pause_s = 0.0
        pause_s = self._pauses_s[worker_id] = min(2 * pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S
        if worker_id in self._tasks:
            self._tasks[worker_id].cancel()
        self._tasks[worker_id] = asyncio.create_task(self._again(worker_id, pause_s))
        return pause_s

    async def _again(self, worker_id: WorkerId, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        begin = self._clock()
        try:
            await self._start(worker_id)
        except EngineStartError as error:
            logger.error("%s", error)
            return
        except (ConfigError, OSError) as error:  # nothing was started, so nothing will end
            logger.error("%s is not started: %s", worker_id, error)
            self.ended(worker_id)
            return
        self._up_since[worker_id] = self._clock()
        logger.warning("%s is back after %.1f s", worker_id, self._up_since[worker_id] - begin)

    async def close(self) -> None:
        """Nothing is started any more, and nothing is being started, when this returns."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
