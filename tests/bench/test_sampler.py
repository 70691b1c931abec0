"""Threads seen every few milliseconds by another process."""

import asyncio
import os
import time

from easerve.bench.sampler import sampling

PERIOD_S = 0.002


async def test_a_thread_that_works_is_seen_to_work() -> None:
    async with sampling([os.getpid()], PERIOD_S) as samples:
        begin, used_s = time.monotonic(), time.process_time()
        while time.process_time() < used_s + 0.1:
            pass
        await asyncio.sleep(0.02)
    assert len(samples) > 3
    times_s = [now_s for now_s, _ in samples]
    assert times_s == sorted(times_s)
    assert times_s[0] < begin + 0.1 < times_s[-1]
    (first,), (last,) = samples[0][1], samples[-1][1]
    assert last - first >= 0.09


async def test_a_thread_that_ends_keeps_its_last_value() -> None:
    child = await asyncio.create_subprocess_exec("sleep", "60")
    async with sampling([child.pid, os.getpid()], PERIOD_S) as samples:
        await asyncio.sleep(0.02)
        child.kill()
        await child.wait()
        await asyncio.sleep(0.05)
    assert samples[-1][1][0] >= samples[0][1][0] > 0
    assert len({len(used) for _, used in samples}) == 1
