"""An event loop in virtual time, on which coroutines and the simulator's effects happen together.

At an instant, effects happen in the order in which they were pushed; after each, every callback
that is ready runs, and those that they make ready. What is *deferred*, a function that gathers what
happens at an instant, runs when nothing else is left of it, and so do timers. Then time goes on.
"""

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from itertools import count
from typing import Any, TypeVarTuple

from easerve.sim.clock import Effect, Handler
from easerve.types import NS_PER_S

Given = TypeVarTuple("Given")


class VirtualLoop(asyncio.AbstractEventLoop):
    """``deferred``: the name of the method that is."""

    def __init__(self, deferred: str) -> None:
        self.now_ns = 0
        self._deferred_name = deferred
        self._ready: deque[asyncio.Handle] = deque()
        self._deferred: deque[asyncio.Handle] = deque()
        self._effects: list[tuple[int, int, Handler]] = []
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._numbers = count()
        self.errors: list[dict[str, Any]] = []
        """What would have been logged."""

    # The simulator's side ---------------------------------------------------------------------

    def push(self, effects: Iterable[Effect]) -> None:
        for at_ns, handler in effects:
            assert at_ns >= self.now_ns, "nothing happens in the past"
            heapq.heappush(self._effects, (at_ns, next(self._numbers), handler))

    def run(self) -> int:
        """Until nothing is left to happen; the last instant at which something did (ns)."""
        with self._running():
            while self._instant() or self._advance():
                pass
        return self.now_ns

    @contextmanager
    def _running(self) -> Iterator[None]:
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(None)

    def _instant(self) -> bool:
        """One thing more at this instant."""
        self._drain()
        if self._effects and self._effects[0][0] == self.now_ns:
            self.push(heapq.heappop(self._effects)[2](self.now_ns))
        elif self._deferred:
            self._deferred.popleft()._run()
        elif self._next_timer_ns() == self.now_ns:
            heapq.heappop(self._timers)[2]._run()
        else:
            return False
        return True

    def _drain(self) -> None:
        while self._ready:
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _next_timer_ns(self) -> int | None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def _advance(self) -> bool:
        times = [self._effects[0][0]] if self._effects else []
        timer_ns = self._next_timer_ns()
        times += [] if timer_ns is None else [timer_ns]
        if times:
            self.now_ns = min(times)
        return bool(times)

    # asyncio's side ---------------------------------------------------------------------------

    def time(self) -> float:
        return self.now_ns / NS_PER_S

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[[*Given], object], *args: *Given, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        deferred = getattr(callback, "__name__", "") == self._deferred_name
        (self._deferred if deferred else self._ready).append(handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Given], object],
        *args: *Given,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Exact to a nanosecond for the delays of a test."""
        at_ns = self.now_ns + round(delay * NS_PER_S)
        handle = asyncio.TimerHandle(at_ns / NS_PER_S, callback, args, self, context)
        heapq.heappush(self._timers, (at_ns, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        assert isinstance(coro, Coroutine)
        return asyncio.Task(coro, loop=self, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)
