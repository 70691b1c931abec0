"""Slots in a buffer that other processes read: taken in turn, given back in any order."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from easerve.engines.vllm.ec.messages import ALIGNMENT, Slot

SLOT_LIFE_NS = 5_000_000_000


@dataclass(slots=True)
class _Slot:
    number: int
    begin: int
    end: int
    peer: str
    taken_ns: int
    free_ns: int | None = None


class Ring:
    """Bookkeeping of a buffer of ``num_bytes``; it touches no memory.

    A slot is free again when its peer gave it back, or a life after its peer was forgotten: by then
    a peer that still reads knows that it must not use what it reads.
    """

    def __init__(self, num_bytes: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._num_bytes, self._clock = num_bytes, clock
        self._slots: deque[_Slot] = deque()  # in the order they were taken
        self._numbers = itertools.count()

    def take(self, num_bytes: int, peer: str) -> Slot | None:
        """A slot of this size, or None where there is no room now."""
        now = self._clock()
        while self._slots and (free_ns := self._slots[0].free_ns) is not None and free_ns <= now:
            self._slots.popleft()
        begin = self._place(-(-num_bytes // ALIGNMENT) * ALIGNMENT)
        if begin is None:
            return None
        slot = _Slot(next(self._numbers), begin, begin + num_bytes, peer, now)
        self._slots.append(slot)
        return Slot(slot.number, begin, num_bytes)

    def _place(self, num_bytes: int) -> int | None:
        if not self._slots:
            return 0 if num_bytes <= self._num_bytes else None
        first, last = self._slots[0], self._slots[-1]
        begin = -(-last.end // ALIGNMENT) * ALIGNMENT
        if last.begin < first.begin:  # it has come round
            return begin if begin + num_bytes <= first.begin else None
        if begin + num_bytes <= self._num_bytes:
            return begin
        return 0 if num_bytes <= first.begin else None

    def give_back(self, peer: str, number: int) -> None:
        for slot in self._slots:
            if slot.peer == peer and slot.number == number:
                slot.free_ns = self._clock()

    def late(self) -> set[str]:
        """The peers that have had a slot for longer than its life."""
        until = self._clock() - SLOT_LIFE_NS
        return {slot.peer for slot in self._slots if slot.free_ns is None and slot.taken_ns < until}

    def forget(self, peer: str) -> None:
        """We have hung up on the peer, or it on us."""
        free_ns = self._clock() + SLOT_LIFE_NS
        for slot in self._slots:
            if slot.peer == peer and slot.free_ns is None:
                slot.free_ns = free_ns
