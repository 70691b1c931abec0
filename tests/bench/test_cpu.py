import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from easerve.bench.cpu import children, cpu_seconds, scheduled_s, thread_s, usable_cores

BURN_S = 0.15
BURN = (
    "import os, subprocess, sys, time\n"
    "def burn():\n"
    f"    while time.process_time() < {BURN_S}: pass\n"
)
# The names of processes are cut from what they say; this one is made to be read wrongly.
RENAME = "open('/proc/self/comm', 'w').write('a) S 1 (b')\n"


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """Runs until its stdin closes; has said what it says on its first line."""
    with subprocess.Popen(
        [sys.executable, "-c", BURN + text + "sys.stdin.read()\n"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_this_process() -> None:
    before = cpu_seconds([os.getpid()])[os.getpid()]
    start = time.process_time()
    while time.process_time() - start < BURN_S:
        pass
    used = cpu_seconds([os.getpid()])[os.getpid()] - before
    assert used == pytest.approx(BURN_S, abs=0.05)


def test_a_process_that_does_not_exist_is_left_out() -> None:
    with program("print(flush=True)\n") as process:
        said(process)
    assert cpu_seconds([process.pid]) == {}
    assert cpu_seconds([]) == {}


def test_a_name_may_hold_anything() -> None:
    with program(f"{RENAME}burn()\nprint(flush=True)\n") as process:
        said(process)
        assert cpu_seconds([process.pid])[process.pid] == pytest.approx(BURN_S, abs=0.1)


CHILD = f"{BURN}burn(); print(os.getpid(), flush=True); sys.stdin.read()"
PARENT = f"subprocess.Popen([sys.executable, '-c', {CHILD!r}])\n"


def test_descendants_count_for_the_nearest_that_is_asked_for() -> None:
    with program(PARENT) as process:
        child = int(said(process))
        alone = cpu_seconds([process.pid])
        apart = cpu_seconds([process.pid, child])
        assert alone[process.pid] == pytest.approx(sum(apart.values()), abs=0.03)
        assert apart[child] >= BURN_S - 0.02
        assert apart[process.pid] < alone[process.pid]
        mine = cpu_seconds([os.getpid()])[os.getpid()]
        assert mine >= alone[process.pid]


def test_a_descendant_that_has_ended_still_counts() -> None:
    text = f"subprocess.run([sys.executable, '-c', {BURN + 'burn()'!r}])\nprint(flush=True)\n"
    with program(text) as process:
        said(process)
        assert cpu_seconds([process.pid])[process.pid] >= BURN_S - 0.02


def test_usable_cores() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_the_scheduler_counts_threads_that_live() -> None:
    text = (
        "import threading\n"
        "done, wait = threading.Event(), threading.Event()\n"
        "threading.Thread(target=lambda: (burn(), done.set(), wait.wait()), daemon=True).start()\n"
        "done.wait(); print(flush=True)\n"
    )
    with program(text) as process:
        said(process)
        # Burning is measured for the process: the thread has as much but for the start.
        assert scheduled_s(process.pid) > BURN_S
        assert thread_s(process.pid, process.pid) < scheduled_s(process.pid)


def test_nobody_has_used_nothing() -> None:
    with program("print(flush=True)\n") as process:
        said(process)
    assert (scheduled_s(process.pid), thread_s(process.pid, process.pid)) == (0, 0)
    assert children(process.pid) == []


def test_children() -> None:
    with program(PARENT) as process:
        child = int(said(process))
        assert children(process.pid) == [child]
        assert process.pid in children(os.getpid())
