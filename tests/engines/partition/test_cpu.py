import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from easerve.engines.partition import cpu
from easerve.engines.partition.cpu import CpuDriver
from easerve.engines.partition.sides import DriverError
from easerve.policy.partition import ALL, HALF
from easerve.types import Stage

CORES = sorted(os.sched_getaffinity(0))
NUM_THREADS = 3
CONFINED = f"""
import sys, threading
from easerve.engines.partition.cpu import CpuDriver
from easerve.types import Stage
driver = CpuDriver({CORES}, lambda number: print("threads", number, flush=True))
gate = threading.Event()
threads = [threading.Thread(target=gate.wait, daemon=True) for _ in range({NUM_THREADS})]
for thread in threads:
    thread.start()
for line in sys.stdin:
    what, *rest = line.split()
    if what == "confine":
        driver.confine(Stage(rest[0]), int(rest[1]))
    elif what == "thread":
        threading.Thread(target=gate.wait, daemon=True).start()
    elif what == "close":
        driver.close()
    print("done", flush=True)
"""
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be divided")


class Confined:
    """Another process with several threads and a driver; its masks are read from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CONFINED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.nums_threads: list[int] = []

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        while (answer := self._process.stdout.readline()) != "done\n":
            assert answer, "it has ended"
            self.nums_threads.append(int(answer.split()[1]))

    def masks(self) -> list[set[int]]:
        """Of all its threads, as the kernel has them."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return [_cores(task / "status") for task in tasks]

    def end(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


def _cores(status: Path) -> set[int]:
    (line,) = (
        line for line in status.read_text().splitlines() if line.startswith("Cpus_allowed_list")
    )
    cores = set[int]()
    for part in line.split(":")[1].split(","):
        first, _, last = part.strip().partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


@pytest.fixture
def confined() -> Iterator[Confined]:
    process = Confined()
    yield process
    process.end()


def test_every_thread_follows_and_is_let_go(confined: Confined) -> None:
    confined.tell("begin")
    assert confined.masks() == [set(CORES)] * (1 + NUM_THREADS)
    confined.tell("confine prefill 1")
    assert confined.masks() == [set(CORES[1:])] * (1 + NUM_THREADS)
    confined.tell("confine encode 1")
    assert confined.masks() == [set(CORES[:1])] * (1 + NUM_THREADS)
    confined.tell("confine encode 0")
    assert confined.masks() == [set(CORES)] * (1 + NUM_THREADS)
    total = len(CORES)
    assert confined.nums_threads == [total, total - 1, 1, total], "as many as there are cores"


def test_new_threads_inherit_and_are_let_go_as_well(confined: Confined) -> None:
    confined.tell("confine encode 1")
    confined.tell("thread")
    assert confined.masks() == [set(CORES[:1])] * (2 + NUM_THREADS)
    confined.tell("close")
    assert confined.masks() == [set(CORES)] * (2 + NUM_THREADS)


def test_a_thread_that_ends_meanwhile_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    (tmp_path / str(ended.native_id)).touch()
    monkeypatch.setattr(cpu, "TASKS", tmp_path)
    driver = CpuDriver(CORES, lambda _: None)
    try:
        driver.confine(Stage.ENCODE, 1)
        assert os.sched_getaffinity(0) == set(CORES[:1])
    finally:
        driver.close()
    assert os.sched_getaffinity(0) == set(CORES)


def test_cores_that_are_not_there_are_an_error_that_names_them() -> None:
    driver = CpuDriver([4000, 4001], lambda _: None)
    with pytest.raises(DriverError, match=r"cores \[4001\]: Invalid argument"):
        driver.confine(Stage.PREFILL, 1)
    driver.close()
    assert os.sched_getaffinity(0) == set(CORES)


def test_one_core_cannot_be_divided() -> None:
    with pytest.raises(DriverError, match="1 cores cannot be divided"):
        CpuDriver([0], lambda _: None)
    with pytest.raises(DriverError, match="4 cores cannot be divided"):
        CpuDriver(range(4), lambda _: None, min_prefill=4)


def test_the_layout_is_that_of_the_cores() -> None:
    layout = CpuDriver(range(4), lambda _: None).layout
    assert [layout.round(units) for units in (1, HALF, 4, ALL)] == [1, 2, 3, 4]
