"""How long threads have run, read every few milliseconds by a process that does nothing else.

``python -m easerve.bench.sampler SECONDS THREAD ...`` writes a line for each moment until its
standard input ends: the monotonic clock and the CPU time of each thread, in nanoseconds; before
them an empty line, when it begins. A busy event loop could not keep such a pace, and would be
disturbed by it.
"""

import asyncio
import os
import select
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

NS_PER_S = 1e9
MAX_LINE = 64
Sample = tuple[float, tuple[float, ...]]
"""Seconds on the monotonic clock, and CPU seconds of each thread."""


@asynccontextmanager
async def sampling(threads: Sequence[int], period_s: float) -> AsyncIterator[list[Sample]]:
    """The list is filled when the body has ended. A thread that ends keeps its last value."""
    samples: list[Sample] = []
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, str(period_s), *map(str, threads)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    await child.stdout.readline()  # it has begun
    reading = asyncio.create_task(child.stdout.read())
    try:
        yield samples
    finally:
        child.stdin.close()
        output = await reading
        await child.wait()
        samples += map(_sample, output.decode().splitlines())


def _sample(line: str) -> Sample:
    now_ns, *used_ns = map(int, line.split())
    return now_ns / NS_PER_S, tuple(each / NS_PER_S for each in used_ns)


def main(period_s: float, threads: Sequence[int]) -> None:
    """Files are kept open, so that a moment costs a system call for each thread."""
    files = [os.open(f"/proc/{each}/task/{each}/schedstat", os.O_RDONLY) for each in threads]
    used_ns, lines = [0] * len(files), list[str]()
    due_s = time.monotonic()
    print(flush=True)
    while True:
        due_s = max(due_s + period_s, time.monotonic())
        if select.select([0], [], [], max(0.0, due_s - time.monotonic()))[0]:
            break
        now_ns = time.monotonic_ns()
        for index, file in enumerate(files):
            with suppress(OSError):  # it has ended
                used_ns[index] = int(os.pread(file, MAX_LINE, 0).split()[0])
        lines.append(" ".join(map(str, (now_ns, *used_ns))))
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main(float(sys.argv[1]), [int(each) for each in sys.argv[2:]])
