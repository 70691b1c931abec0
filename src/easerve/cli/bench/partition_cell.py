"""What a demand costs the two engines at every step: part of ``easerve bench partition``.

Each call is timed by itself, so every figure has one reading of the clock in it, which is listed.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import median, quantiles

from easerve.bench.report import Section, Table
from easerve.cli.bench.encode import Result
from easerve.cli.doctor import SHM_ROOT
from easerve.engines.partition.cell import Cell, scratch
from easerve.engines.partition.cpu import CpuDriver
from easerve.engines.partition.sides import (
    LEASE_NS,
    DriverError,
    EncodeSide,
    PrefillSide,
    Undivided,
)
from easerve.policy.partition import Hold, Layout
from easerve.types import Stage

GOAL_NS = 1000
UNITS = 24
LAYOUT = Layout(132, granule=8, min_prefill=16)
NUM_THREADS = (1, 4, 16)
NUM_KINDS = 7 + len(NUM_THREADS)
READ, IDLE_READ = "read + decide", "read + decide, nothing demanded"
Call = Callable[[], object]


def measure(num: int, tick: Callable[[str], None] = lambda _: None) -> Result:
    """``num`` calls of each kind, a tenth as many switches; times in ns, ``goal_met`` by READ."""
    rows = []
    with scratch(SHM_ROOT) as path, closing(Cell(path)) as cell:
        for name, call, before in _calls(cell):
            tick(f"partition, {name}")
            rows.append(_row(name, call, num, before))
    for num_threads in NUM_THREADS if len(os.sched_getaffinity(0)) > 1 else ():
        tick(f"partition, switch of {num_threads} threads")
        rows.append(_switch(num_threads, num // 10))
    read_ns = next(row["median_ns"] for row in rows if row["name"] == READ)
    return {"cell": rows, "goal_ns": GOAL_NS, "goal_met": read_ns < GOAL_NS}


def _calls(cell: Cell) -> Iterator[tuple[str, Call, Call]]:
    """A name, what is timed, and what goes before it untimed."""
    hold, nothing = Hold(LEASE_NS), lambda: None
    unswitched = Undivided("none", LAYOUT)
    prefill = PrefillSide(cell, unswitched, _raise, LEASE_NS)
    encode = EncodeSide(cell, unswitched, _raise)

    def read() -> int:
        return hold.leave(prefill.wanted(), cell.clock_ns())

    yield "nothing, but the clock", nothing, nothing
    yield IDLE_READ, read, nothing
    cell.announce(UNITS, None)
    yield READ, read, nothing
    yield "prefill's begin, the same part as before", prefill.begin, prefill.end
    yield "prefill's end", prefill.end, prefill.begin
    yield "encode's begin, the same part as before", encode.begin, encode.end
    yield "encode's end", encode.end, encode.begin


def _switch(num_threads: int, num: int) -> Result:
    """Of the affinity of so many threads that sleep, this one among them."""
    gate = threading.Event()
    threads = [threading.Thread(target=gate.wait) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    driver = CpuDriver(os.sched_getaffinity(0), lambda _: None)
    try:
        confine = lambda: driver.confine(Stage.ENCODE, 1)  # noqa: E731
        return _row(f"affinity of {num_threads} threads", confine, num, driver.close)
    finally:
        driver.close()
        gate.set()
        for thread in threads:
            thread.join()


def _row(name: str, call: Call, num: int, before: Call) -> Result:
    clock_ns, taken_ns = time.perf_counter_ns, []
    for _ in range(num):
        before()
        begin_ns = clock_ns()
        call()
        taken_ns.append(clock_ns() - begin_ns)
    p95_ns = quantiles(taken_ns, n=20)[-1]
    return {"name": name, "num": num, "median_ns": median(taken_ns), "p95_ns": p95_ns}


def _raise(error: DriverError) -> None:
    raise error


def section(result: Result) -> Section:
    """The table, and what was claimed."""
    rows = [
        (row["name"], row["num"], _us(row["median_ns"]), _us(row["p95_ns"]))
        for row in result["cell"]
    ]
    met = "as" if result["goal_met"] else "not as"
    text = f"Reading the demand and deciding takes {met} aimed at less than {_us(GOAL_NS)} us."
    columns = ("call", "times", "median us", "p95 us")
    return Section("The cell", text, [Table("What a step pays", columns, rows)])


def _us(ns: float) -> str:
    return f"{ns / 1000:.2f}"
