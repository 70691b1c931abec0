"""How much CPU processes have used, from /proc."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Positions in /proc/<pid>/stat behind the name, see proc_pid_stat(5).
PARENT, TIMES = 1, slice(11, 15)  # the times: utime, stime, cutime, cstime, in clock ticks
NS_PER_S = 1e9


class _Process(NamedTuple):
    parent: int
    cpu_s: float


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """CPU seconds, user and system, of each process and all its descendants since they began.

    A descendant counts for the nearest of ``pids`` above it, so that nothing counts twice. One that
    has ended counts from when its parent has waited for it. A process that does not exist is left
    out.
    """
    processes = _processes()
    children = defaultdict(list)
    for pid, process in processes.items():
        children[process.parent].append(pid)
    totals = {pid: 0.0 for pid in pids if pid in processes}
    for pid in totals:
        waiting = [pid]
        while waiting:
            member = waiting.pop()
            totals[pid] += processes[member].cpu_s
            waiting += [child for child in children[member] if child not in totals]
    return totals


def scheduled_s(pid: int) -> float:
    """CPU seconds of a process's threads that live, as the scheduler counts them (nanoseconds).

    Finer than ``cpu_seconds``, but without threads that have ended; 0 for no process.
    """
    return sum(thread_s(pid, thread) for thread in _threads(pid))


def thread_s(pid: int, thread: int) -> float:
    """CPU seconds of one thread, in nanoseconds' steps; 0 for one that has ended.

    The first thread of a process has the process's number.
    """
    with contextlib.suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
        return int(words[0]) / NS_PER_S
    return 0.0


def children(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    found: list[int] = []
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def _threads(pid: int) -> list[int]:
    with contextlib.suppress(OSError):  # it has just ended
        return [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
    return []


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _processes() -> dict[int, _Process]:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    processes = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # it has just ended
                # The name in front is in parentheses, and may hold more of them.
                values = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
                cpu_s = sum(map(int, values[TIMES])) / ticks_per_s
                processes[int(folder.name)] = _Process(int(values[PARENT]), cpu_s)
    return processes
