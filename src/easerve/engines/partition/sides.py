"""What the two workers of a device do at every step, whatever the driver.

Prefill reads the demand, says what it will leave free, and reads again: an encoder that announced
in between either sees what prefill says or is seen by it. The encoder takes what was announced. A
prefill step that began before the announcement may hold some of it still; the encoder waits for it
up to ``patience_ns``, then goes ahead, and counts itself late.

Each side writes under a lock, whose release is a full fence on x86-64: what it reads after that, it
reads when the other can see what it wrote.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Protocol

from easerve.engines.partition.cell import CONFINES, FAILED, GATED, IDLE, Cell, Word
from easerve.policy.partition import Gate, Hold, Layout, Levels
from easerve.types import Stage

LEASE_NS = 500_000_000
"""Of an announcement; prefill does not wait longer for a dead encoder, nor for a busy one."""
POLL_S = 0.0002
UNHEEDED = -1
"""In place of units that are wanted: prefill has paused for long enough, or a side has failed, as
one that is not confined makes the other's confinement pointless.
"""


class DriverError(Exception):
    """The device cannot be divided, or not any more; the text says why."""


class Driver(Protocol):
    """Confines the work of this process. ``name`` is what logs and metrics call it."""

    name: str

    @property
    def layout(self) -> Layout: ...

    def confine(self, stage: Stage, units: int) -> None:
        """Encode: to the first ``units``; prefill: to all but those; 0: to nothing, all are free.

        ``units`` as ``layout.round`` gives them. Work that was submitted before stays where it is.
        Raises DriverError.
        """
        ...

    def close(self) -> None: ...


class Undivided:
    """A driver that confines nothing: something else does, or the two engines take turns."""

    def __init__(self, name: str, layout: Layout) -> None:
        self.name, self.layout = name, layout

    def confine(self, stage: Stage, units: int) -> None:
        """Nothing is to be done."""

    def close(self) -> None:
        pass


class _Side:
    """``on_error`` hears once of a driver that failed; the engine goes on unconfined."""

    def __init__(
        self,
        cell: Cell,
        driver: Driver,
        stage: Stage,
        on_error: Callable[[DriverError], None],
        sleep: Callable[[float], None],
    ) -> None:
        self._cell, self._driver, self._stage = cell, driver, stage
        self._on_error, self._sleep = on_error, sleep
        self._units = 0  # it is confined by
        self._total = driver.layout.total
        self._round = cache(driver.layout.round)
        self._lock = threading.Lock()
        encode = stage is Stage.ENCODE
        self._own = Word.ENCODE_CONFINES if encode else Word.PREFILL_CONFINES
        self._other = Word.PREFILL_CONFINES if encode else Word.ENCODE_CONFINES
        self._switches = Word.ENCODE_SWITCHES if encode else Word.PREFILL_SWITCHES
        self._switch_ns = Word.ENCODE_SWITCH_NS if encode else Word.PREFILL_SWITCH_NS
        self._cell.words[self._own] = GATED if isinstance(driver.layout, Gate) else CONFINES

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do ``work`` once on every part, where parts are made rather than chosen."""
        if isinstance(self._driver.layout, Levels):
            for part in self._driver.layout.parts:
                if not self._confine(part):
                    return
                work()
            self._confine(0)

    def _confine(self, units: int) -> bool:
        """False: the driver has failed at it."""
        if units == self._units:
            return True
        begin = time.perf_counter_ns()
        try:
            self._driver.confine(self._stage, units)
        except DriverError as error:
            self._cell.words[self._own] = FAILED
            self._units = 0
            with contextlib.suppress(DriverError):
                self._driver.confine(self._stage, 0)
            self._on_error(error)
            return False
        self._units = units
        self._cell.add(self._switches)
        self._cell.add(self._switch_ns, time.perf_counter_ns() - begin)
        return True

    def wanted(self) -> int:
        """Units for the encoder, in this device's granules; UNHEEDED."""
        words = self._cell.words
        if words[self._own] or words[self._other]:
            if FAILED in (words[self._own], words[self._other]):
                return UNHEEDED
            return self._total if self._cell.demanded() else 0
        return self._round(self._cell.demanded())


class EncodeSide(_Side):
    """``begin`` before a forward, ``end`` after it."""

    def __init__(
        self,
        cell: Cell,
        driver: Driver,
        on_error: Callable[[DriverError], None],
        patience_ns: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(cell, driver, Stage.ENCODE, on_error, sleep)
        self._patience_ns = patience_ns
        self._announcement = self._began_ns = 0

    def begin(self) -> int:
        """The units that the forward gets; 0: it shares all of them."""
        cell = self._cell
        self._announcement = cell.announced()
        with self._lock:
            cell.serve(0)  # it may be for more than the forward before
        units = max(0, self.wanted())
        if cell.left() < units:
            late_ns = cell.clock_ns() + self._patience_ns
            while (left := cell.left()) < units and cell.clock_ns() < late_ns:
                self._sleep(POLL_S)
            if left < units:
                cell.add(Word.ENCODE_LATE)
        if not self._confine(0 if units >= self._total else units):
            units = 0
        cell.words[Word.ENCODE_UNITS] = units
        self._began_ns = cell.clock_ns()
        return units

    def end(self) -> None:
        cell = self._cell
        cell.words[Word.ENCODE_NS] = cell.clock_ns() - self._began_ns
        cell.add(Word.ENCODE_FORWARDS)
        cell.serve(self._announcement)


class PrefillSide(_Side):
    """``begin`` before a step that computes something, ``end`` when nothing of it runs any more.

    A step may begin while others run, and end in another thread.
    """

    def __init__(
        self,
        cell: Cell,
        driver: Driver,
        on_error: Callable[[DriverError], None],
        hold_ns: int = 0,
        max_pause_ns: int = LEASE_NS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(cell, driver, Stage.PREFILL, on_error, sleep)
        self._hold, self._max_pause_ns = Hold(hold_ns), max_pause_ns
        self._running: dict[int, int] = {}  # step -> what it leaves
        self.step = 0
        cell.hold(IDLE)

    def begin(self) -> int:
        """The units that the step leaves free; it pauses while that is all of them.

        ``step`` is its number from then on.
        """
        cell = self._cell
        began_ns = now_ns = cell.clock_ns()
        self.step += 1
        paused = forced = False
        while True:
            wanted = UNHEEDED if forced else self.wanted()
            if wanted < self._total:
                leaves = self._hold.leave(wanted, now_ns) if wanted >= 0 else 0
                self._tell(leaves)
                if forced or self.wanted() <= leaves:
                    break
                self._tell(None)
            elif now_ns - began_ns < self._max_pause_ns:
                paused = True
                self._sleep(POLL_S)
            else:
                forced = True
                cell.add(Word.PREFILL_FORCED)
            now_ns = cell.clock_ns()
        if paused:
            cell.add(Word.PREFILL_PAUSED_NS, now_ns - began_ns)
        if not self._confine(leaves):
            leaves = 0
            self._tell(leaves)
        cell.add(Word.PREFILL_STEPS)
        if leaves:
            cell.add(Word.PREFILL_NARROW)
        return leaves

    def end(self, step: int | None = None) -> None:
        """Of a step and all before it; None: of all."""
        with self._lock:
            last = self.step if step is None else step
            self._running = {each: left for each, left in self._running.items() if each > last}
            self._hold_least()

    def _tell(self, leaves: int | None) -> None:
        """What the step that begins leaves; None: it does not begin yet."""
        with self._lock:
            if leaves is None:
                self._running.pop(self.step, None)
            else:
                self._running[self.step] = leaves
            self._hold_least()

    def _hold_least(self) -> None:
        self._cell.hold(min(self._running.values(), default=IDLE))
