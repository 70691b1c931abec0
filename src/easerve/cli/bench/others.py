"""How busy other processes keep the machine while a bench measures."""

import os
import time
from pathlib import Path

from easerve.bench.cpu import cpu_seconds

STAT = Path("/proc/stat")
NUM_COLUMNS, IDLE = 8, slice(3, 5)  # of its first line, see proc_stat(5)


class Others:
    """Counts from when it was made."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._before_s = _others_s()

    def cores(self) -> float:
        """Cores that processes other than this one and its descendants have used, in the mean."""
        used_s = _others_s() - self._before_s
        return max(0.0, used_s / (time.monotonic() - self._begin))


def _others_s() -> float:
    return busy_s(STAT.read_text()) - sum(cpu_seconds([os.getpid()]).values())


def busy_s(stat: str) -> float:
    """CPU seconds of all processes since the machine started."""
    ticks = [int(each) for each in stat.splitlines()[0].split()[1 : NUM_COLUMNS + 1]]
    return (sum(ticks) - sum(ticks[IDLE])) / os.sysconf("SC_CLK_TCK")
