"""Whether the client keeps up: its event loop's lag, by a heartbeat, and its CPU time."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

from easerve.bench.sample import Health
from easerve.goodput import percentile

BEAT_S = 0.01
NICE, REAL_TIME = -10, 1
MAX_LATENESS_S, MAX_LATENESS_OF_GAP = 0.010, 0.05
MAX_LOOP_LAG_S = 0.020
MAX_CPU_SHARE = 0.9


def too_slow(
    health: Health, lateness_p99_s: float | None, mean_gap_s: float | None
) -> Iterator[str]:
    """Why the client, and not the server, may have been what was measured.

    ``mean_gap_s``: between the times at which requests were to be sent, None where they had none
    of their own. A P99 lateness up to a twentieth of it does not change what arrives.
    """
    if lateness_p99_s is not None and mean_gap_s is not None:
        limit_s = max(MAX_LATENESS_S, MAX_LATENESS_OF_GAP * mean_gap_s)
        if lateness_p99_s > limit_s:
            yield f"the client sent late: P99 {_ms(lateness_p99_s)}, more than {_ms(limit_s)}"
    if health.loop_lag_p99_s is not None and health.loop_lag_p99_s > MAX_LOOP_LAG_S:
        lag = _ms(health.loop_lag_p99_s)
        yield f"the client read late: P99 {lag}, more than {_ms(MAX_LOOP_LAG_S)}"
    if health.cpu_share > MAX_CPU_SHARE:
        yield f"the client was busy for {health.cpu_share:.0%} of the time, on one core"


def _ms(time_s: float) -> str:
    return f"{1000 * time_s:.1f} ms"


class Pulse:
    """Beats every ``BEAT_S``. How late a beat is, is how long the loop was held up."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lags_s = clock, [0.0]
        self._begin_s, self._cpu_begin_s = clock(), time.process_time()

    async def beat(self) -> None:
        while True:
            due_s = self._clock() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.note(self._clock() - due_s)

    def note(self, lag_s: float) -> None:
        """A long hold-up counts for each beat that did not take place meanwhile."""
        self._lags_s.append(max(0.0, lag_s))
        while (lag_s := lag_s - BEAT_S) > 0:
            self._lags_s.append(lag_s)

    def health(self) -> Health:
        """Since this was made."""
        wall_s = self._clock() - self._begin_s
        cpu_s = time.process_time() - self._cpu_begin_s
        return Health(
            cpu_share=cpu_s / wall_s if wall_s > 0 else 0.0,
            loop_lag_p99_s=percentile(self._lags_s, 99),
            priority=priority(),
        )


@asynccontextmanager
async def beating(clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Pulse]:
    pulse = Pulse(clock)
    task = asyncio.create_task(pulse.beat())
    try:
        yield pulse
    finally:
        task.cancel()
        await asyncio.wait([task])


def raise_priority() -> None:
    """As far as that is permitted: a client that has to wait for a core measures late.

    In real time, its wake-ups on two busy cores were 0.1 ms late (P99); with a nice value, which
    counts within a session only where the kernel groups by sessions, 30 ms.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(REAL_TIME))


def priority() -> str:
    """At which this process runs, in words."""
    if os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO):
        return "real time"
    return f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"
