import asyncio
import os
import time
from typing import Any

import pytest

from easerve.bench import health
from easerve.bench.health import Pulse, beating, too_slow
from easerve.bench.sample import Health

WELL = Health(cpu_share=0.3, loop_lag_p99_s=0.001)


@pytest.mark.parametrize(
    ("lateness_s", "gap_s", "is_late"),
    [
        (0.010, 0.01, False),
        (0.011, 0.01, True),
        (0.049, 1.0, False),  # a twentieth of the gap
        (0.051, 1.0, True),
        (9.0, None, False),  # nothing was to be sent at a time of its own
        (None, 1.0, False),
    ],
)
def test_lateness(lateness_s: float | None, gap_s: float | None, is_late: bool) -> None:
    reasons = list(too_slow(WELL, lateness_s, gap_s))
    assert bool(reasons) == is_late
    assert all(reason.startswith("the client sent late: P99 ") for reason in reasons)


def test_all_reasons_are_named_with_their_limits() -> None:
    bad = Health(cpu_share=0.97, loop_lag_p99_s=0.0304)
    assert list(too_slow(bad, 0.0125, 0.1)) == [
        "the client sent late: P99 12.5 ms, more than 10.0 ms",
        "the client read late: P99 30.4 ms, more than 20.0 ms",
        "the client was busy for 97% of the time, on one core",
    ]
    assert list(too_slow(WELL, 0.001, 0.1)) == []


def test_a_long_hold_up_counts_for_each_beat_that_was_missed() -> None:
    now_s = 0.0
    pulse = Pulse(lambda: now_s)
    for _ in range(900):
        pulse.note(0.0)
    pulse.note(1.0)  # of 10 s: a tenth of all that could have been due
    now_s = 10.0
    lag_s = pulse.health().loop_lag_p99_s
    assert lag_s == pytest.approx(0.9, abs=0.011)


async def test_a_loop_that_is_held_up() -> None:
    async with beating() as pulse:
        await asyncio.sleep(0.02)
        time.sleep(0.1)  # noqa: ASYNC251 (that is the point)
        await asyncio.sleep(0.02)
        found = pulse.health()
    assert found.loop_lag_p99_s is not None
    assert found.loop_lag_p99_s > 0.05
    assert 0 <= found.cpu_share < 1.5
    assert found.priority == f"nice {os.getpriority(os.PRIO_PROCESS, 0)}"


@pytest.mark.parametrize("is_permitted", [True, False])
def test_the_priority_is_raised_where_it_may_be(
    monkeypatch: pytest.MonkeyPatch, is_permitted: bool
) -> None:
    asked: list[tuple[int, ...]] = []

    def ask(*words: Any) -> None:
        asked.append(words)
        if not is_permitted:
            raise PermissionError

    monkeypatch.setattr(os, "setpriority", ask)
    monkeypatch.setattr(os, "sched_setscheduler", ask)
    health.raise_priority()
    assert asked == [
        (os.PRIO_PROCESS, 0, health.NICE),
        (0, os.SCHED_RR, os.sched_param(health.REAL_TIME)),
    ]


def test_priorities_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert health.priority().startswith("nice ")
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_RR)
    assert health.priority() == "real time"
