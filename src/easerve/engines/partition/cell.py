"""What the two engines of a device tell each other: 64-bit words in a page of shared memory.

Every word has one writer; aligned 8-byte loads and stores do not tear. Three of them decide:

* ANNOUNCED, by the encoder's API server: units, and until when (a lease). It is written when a
  request arrives, before its media are preprocessed, and renewed while it is open, so that an
  encoder that dies gives everything back. Only a standing one stays, until an API server starts.
* SERVED, by the encoder's worker: the announcement that its last forward was for. Prefill need not
  wait for the answer to be on its way to take the units back. A forward that begins clears it.
* HELD, by the prefill worker: what the step that it runs leaves free, and whether it runs one.

The other words are counts, for whoever asks (``State``). Times are CLOCK_MONOTONIC, which all
processes of a host share.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from easerve.policy.partition import MAX_UNITS

PAGE_BYTES = 4096
UNIT_BITS = 12
NEVER = (1 << 51) - 1
"""The deadline of a standing announcement, in microseconds."""
SEVERAL = 1 << 63
"""Of an announcement that is for more than the forward that is next: SERVED does not end it."""
IDLE = MAX_UNITS
"""HELD: no step runs; nothing is held."""
NS_PER_US = 1000
CONFINES, GATED, FAILED = range(3)
"""What a side's driver does, the worst of both counting: it confines; it cannot, so the two take
turns; it could and failed, so each has everything.
"""


class Word:
    """Index of a word, by writer. Plain numbers: an enum's take longer to read than the word."""

    ANNOUNCED: Final = 0  # the encoder's API server
    SERVED: Final = 8  # the encoder's worker; a cache line of its own
    ENCODE_SWITCHES: Final = 9
    ENCODE_SWITCH_NS: Final = 10
    ENCODE_FORWARDS: Final = 11
    ENCODE_LATE: Final = 12
    ENCODE_UNITS: Final = 13
    ENCODE_NS: Final = 14
    ENCODE_CONFINES: Final = 15
    HELD: Final = 16  # the prefill worker
    PREFILL_SWITCHES: Final = 17
    PREFILL_SWITCH_NS: Final = 18
    PREFILL_STEPS: Final = 19
    PREFILL_NARROW: Final = 20
    PREFILL_PAUSED_NS: Final = 21
    PREFILL_FORCED: Final = 22
    PREFILL_CONFINES: Final = 23
    ENCODE_PROBE: Final = 32  # up to 15 words for each side's start-up probe
    PREFILL_PROBE: Final = 48


@dataclass(frozen=True, slots=True)
class State:
    """Counts since the engines started, and what is held now. Times in seconds.

    ``late``: forwards that began while a prefill step still held units that they were to have.
    ``narrow``: steps beside an encode; ``forced``: steps that would have paused for too long.
    ``demanded``: of an announcement in force, ``leaves``: by the step that runs (None: no step).
    """

    demanded: int
    leaves: int | None
    forwards: int
    late: int
    encode_units: int
    encode_s: float
    encode_switches: int
    encode_switch_s: float
    steps: int
    narrow: int
    forced: int
    paused_s: float
    prefill_switches: int
    prefill_switch_s: float
    encode_failed: bool
    prefill_failed: bool


class Cell:
    """The page of one device. Opened by path; ``create`` makes it anew, all words zero."""

    def __init__(self, path: Path, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            self._page = mmap.mmap(fd, PAGE_BYTES)
        finally:
            os.close(fd)
        self.words = memoryview(self._page).cast("Q")
        self.clock_ns = clock_ns

    @staticmethod
    def create(path: Path) -> None:
        path.write_bytes(bytes(PAGE_BYTES))
        path.chmod(0o600)

    def close(self) -> None:
        self.words.release()
        self._page.close()

    def add(self, word: int, number: int = 1) -> None:
        """To a count of the caller's own."""
        self.words[word] += number

    # The encoder --------------------------------------------------------------------------------

    def announce(self, units: int, lease_ns: int | None, *, several: bool = False) -> None:
        """``lease_ns`` None: until another announcement. ``several``: see SEVERAL."""
        deadline_us = NEVER if lease_ns is None else (self.clock_ns() + lease_ns) // NS_PER_US
        word = deadline_us << UNIT_BITS | units | several * SEVERAL
        self.words[Word.ANNOUNCED] = word if units else 0

    def announced(self) -> int:
        """The word itself."""
        return self.words[Word.ANNOUNCED]

    def serve(self, announcement: int) -> None:
        """The forward that was announced so is done."""
        self.words[Word.SERVED] = announcement

    # Prefill ------------------------------------------------------------------------------------

    def demanded(self) -> int:
        """Units of the announcement in force: not served, not expired; else 0."""
        words = self.words
        while word := words[Word.ANNOUNCED]:
            deadline_us = word >> UNIT_BITS & NEVER
            if deadline_us == NEVER or (
                (word != words[Word.SERVED] or word >= SEVERAL)
                and deadline_us * NS_PER_US > self.clock_ns()
            ):
                return word & MAX_UNITS
            if word == words[Word.ANNOUNCED]:  # else it was renewed meanwhile
                return 0
        return 0

    def hold(self, leaves: int) -> None:
        """A step runs that leaves so many units free; IDLE: none runs."""
        self.words[Word.HELD] = leaves + 1

    def left(self) -> int:
        """Units that prefill leaves free now; IDLE: all, as no step runs."""
        word = self.words[Word.HELD]
        return word - 1 if word else IDLE

    # Everybody ----------------------------------------------------------------------------------

    def state(self) -> State:
        words, left = self.words, self.left()

        def seconds(word: int) -> float:
            return words[word] / 1e9

        return State(
            self.demanded(),
            None if left == IDLE else left,
            words[Word.ENCODE_FORWARDS],
            words[Word.ENCODE_LATE],
            words[Word.ENCODE_UNITS],
            seconds(Word.ENCODE_NS),
            words[Word.ENCODE_SWITCHES],
            seconds(Word.ENCODE_SWITCH_NS),
            words[Word.PREFILL_STEPS],
            words[Word.PREFILL_NARROW],
            words[Word.PREFILL_FORCED],
            seconds(Word.PREFILL_PAUSED_NS),
            words[Word.PREFILL_SWITCHES],
            seconds(Word.PREFILL_SWITCH_NS),
            words[Word.ENCODE_CONFINES] == FAILED,
            words[Word.PREFILL_CONFINES] == FAILED,
        )


@contextmanager
def scratch(folder: Path | None = None) -> Iterator[Path]:
    """A page for a bench, below ``folder`` or wherever there is room; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="easerve-", dir=folder) as made:
        path = Path(made) / "cell"
        Cell.create(path)
        yield path
