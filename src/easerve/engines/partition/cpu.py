"""The CPU's driver: cores by affinity, and as many OpenMP threads as there are cores.

Both are needed: threads that wait in a spin, more of them than cores, take many times as long. The
launcher sets OMP_WAIT_POLICY=passive, and nothing binds threads to cores but this.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from pathlib import Path

from easerve.engines.partition.sides import DriverError
from easerve.policy.partition import Layout
from easerve.types import Stage

TASKS, OWN_NAME = Path("/proc/self/task"), Path("/proc/self/comm")


class CpuDriver:
    """``cores``: of the device, the encoder's first. ``set_num_threads``: of parallel regions."""

    name = "cpu"

    def __init__(
        self,
        cores: Iterable[int],
        set_num_threads: Callable[[int], None],
        min_prefill: int = 1,
    ) -> None:
        self._cores = sorted(cores)
        self.layout = Layout(len(self._cores), 1, min_prefill)
        if not self.layout.parts:
            raise DriverError(f"{len(self._cores)} cores cannot be divided")
        self._set_num_threads = set_num_threads
        self._set_num_threads(len(self._cores))
        self._left_alone = _named_tasks()

    def confine(self, stage: Stage, units: int) -> None:
        """Every thread of this process that may compute, also while it does; new ones inherit it.

        Left alone are those that had a name of their own from the start: dozens of threads that
        libraries keep for messages.
        """
        cores = self._cores[:units] if stage is Stage.ENCODE else self._cores[units:]
        cores = cores if units else self._cores
        try:
            move_threads(cores, self._left_alone)
        except OSError as error:
            raise DriverError(f"cores {cores}: {error.strerror}") from None
        self._set_num_threads(len(cores))

    def close(self) -> None:
        with contextlib.suppress(DriverError):
            self.confine(Stage.PREFILL, 0)


def move_threads(cores: Iterable[int], left_alone: AbstractSet[str] = frozenset()) -> None:
    """Of this process, to these cores, but for the tasks that are ``left_alone``."""
    cores = set(cores)
    os.sched_setaffinity(0, cores)  # first the caller, of whom new ones inherit
    for task in _tasks() - left_alone:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), cores)


def _tasks() -> set[str]:
    return set(os.listdir(TASKS))  # noqa: PTH208 (three times as fast)


def _named_tasks() -> set[str]:
    """Threads with another name than the process: OpenMP and Python give none."""
    own, named = OWN_NAME.read_text(), set[str]()
    for task in _tasks():
        with contextlib.suppress(OSError):  # it may just have ended
            if (TASKS / task / "comm").read_text() != own:
                named.add(task)
    return named
