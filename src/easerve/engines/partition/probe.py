"""The proof, when engines start, that the parts of two processes are disjoint: by timing.

No document promises that the same granules are the same SMs in two processes, and MPS shows
neither of them the true numbers. So both engines repeat a kernel that fills its part: each alone on
its own part, both at once on their own parts, both at once on the encoder's part. Disjoint parts
slow nobody down; the same part must slow both down, or the kernel could not have shown a thing.

The engines meet at words of the cell, each writing its own. The encoder judges; prefill waits for
its verdict. An engine that starts again takes the verdict over that the other still has.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from easerve.engines.partition.cell import Cell, Word
from easerve.engines.partition.green import GreenDriver
from easerve.engines.partition.sides import POLL_S
from easerve.types import NS_PER_S, Stage

MAX_DISJOINT = 1.15
MIN_SAME = 1.6
MEET_S = 300.0
"""The slower of two engines takes so much longer to load its model, at most."""
STEP_S = 10.0
WORK_S = 0.2

Work = Callable[[Stage, float], float]
"""Repeats a kernel that fills the part of a stage for so many seconds; seconds of a repetition."""


class Times(NamedTuple):
    """Of a repetition by each side: seconds, or nanoseconds in the cell."""

    encode: float
    prefill: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ok``: the parts are disjoint. ``why``: what was seen."""

    ok: bool
    why: str


def judge(alone: Times, disjoint: Times, same: Times) -> Verdict:
    """By how many times a repetition takes as long as alone.

    On the same part it is the mean of both sides, which is 2 or more however unfairly they share.
    """
    apart = max(disjoint.encode / alone.encode, disjoint.prefill / alone.prefill)
    together = (same.encode / alone.encode + same.prefill / alone.prefill) / 2
    seen = f"{apart:.2f} times as long on disjoint parts, {together:.2f} times on the same"
    if apart > MAX_DISJOINT:
        return Verdict(False, f"{seen}: the parts overlap, or the engines take turns (is MPS on?)")
    if together < MIN_SAME:
        return Verdict(False, f"{seen}: the work does not fill a part, so nothing is proved")
    return Verdict(True, seen)


class _Say(IntEnum):
    """Of a verdict word. ABSENT: the other engine did not come, or did not come back."""

    NOTHING = 0
    JUDGED = 1
    ABSENT = 2


class _Index(IntEnum):
    """Of a side's words. Times in nanoseconds; ``THEIRS`` as read of the other side."""

    VERDICT = 0
    TOKEN = 1  # of this attempt; never 0
    PARTNER = 2  # the other's token, as last seen
    STEP = 3
    OWN = 4
    THEIRS = 7


NUM_TIMES = 3  # alone, disjoint, same
ABSENT = Verdict(False, "the other engine did not come")


class _GoneError(Exception):
    """The other engine has ended, given up, or not come in time."""


class _Meeting:
    """One side's view of the words of both."""

    def __init__(self, cell: Cell, stage: Stage, sleep: Callable[[float], None]) -> None:
        encode = stage is Stage.ENCODE
        self._cell, self._sleep, self._judges = cell, sleep, encode
        self._own = Word.ENCODE_PROBE if encode else Word.PREFILL_PROBE
        self._other = Word.PREFILL_PROBE if encode else Word.ENCODE_PROBE
        self._partner = 0
        self._fence = threading.Lock()

    def _write(self, index: int, value: int) -> None:
        """After everything that was written before, for whoever reads it."""
        with self._fence:
            self._cell.words[self._own + index] = value

    def _theirs(self, index: int) -> int:
        with self._fence:
            return self._cell.words[self._other + index]

    def _wait(self, until: Callable[[], bool], seconds: float) -> None:
        deadline_ns = self._cell.clock_ns() + round(seconds * NS_PER_S)
        while not until():
            if self._cell.clock_ns() >= deadline_ns:
                raise _GoneError
            self._sleep(POLL_S)

    def come(self, seconds: float) -> bool:
        """Until the other has come too; False if it has a verdict already."""
        self._write(_Index.VERDICT, _Say.NOTHING)
        self._write(_Index.STEP, 0)
        self._write(_Index.PARTNER, 0)
        token = self._cell.clock_ns() | 1
        self._write(_Index.TOKEN, token)

        def met() -> bool:
            if self._theirs(_Index.VERDICT) != _Say.NOTHING:
                return True
            self._partner = self._theirs(_Index.TOKEN)
            self._write(_Index.PARTNER, self._partner)
            return self._theirs(_Index.PARTNER) == token

        self._wait(met, seconds)
        return self._theirs(_Index.VERDICT) == _Say.NOTHING

    def step(self, number: int, seconds: float) -> None:
        """Until both have come so far."""
        self._write(_Index.STEP, number)

        def both() -> bool:
            if self._theirs(_Index.TOKEN) != self._partner:
                raise _GoneError
            if self._theirs(_Index.VERDICT) == _Say.ABSENT:
                raise _GoneError
            return self._theirs(_Index.STEP) >= number

        self._wait(both, seconds)

    def note(self, index: int, seconds: float) -> None:
        """A time of our own."""
        self._write(_Index.OWN + index, max(1, round(seconds * NS_PER_S)))

    def read_times(self) -> None:
        for index in range(NUM_TIMES):
            self._write(_Index.THEIRS + index, self._theirs(_Index.OWN + index))

    def wait_for_verdict(self, seconds: float) -> None:
        self._wait(lambda: self._theirs(_Index.VERDICT) != _Say.NOTHING, seconds)

    def take_over(self) -> Verdict:
        """The other's verdict, and the times that it is due to."""
        for index in range(NUM_TIMES):
            self._write(_Index.OWN + index, self._theirs(_Index.THEIRS + index))
        self.read_times()
        return self.say(_Say(self._theirs(_Index.VERDICT)))

    def say(self, word: _Say) -> Verdict:
        self._write(_Index.VERDICT, word)
        if word is _Say.ABSENT:
            return ABSENT
        words = self._cell.words
        own = [float(words[self._own + _Index.OWN + index]) for index in range(NUM_TIMES)]
        theirs = [float(words[self._own + _Index.THEIRS + index]) for index in range(NUM_TIMES)]
        pairs = zip(own, theirs, strict=True) if self._judges else zip(theirs, own, strict=True)
        return judge(*(Times(*pair) for pair in pairs))


def prove(
    cell: Cell,
    stage: Stage,
    work: Work,
    *,
    meet_s: float = MEET_S,
    step_s: float = STEP_S,
    work_s: float = WORK_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Verdict:
    """To be called by both engines, ``work`` being ready to run on both parts.

    Waits ``meet_s`` for the other to come, and ``step_s`` at each of its steps.
    """
    meeting = _Meeting(cell, stage, sleep)
    encode = stage is Stage.ENCODE
    try:
        if not meeting.come(meet_s):
            return meeting.take_over()
        for number, who in enumerate((Stage.ENCODE, Stage.PREFILL), 1):
            meeting.step(number, step_s)
            if who is stage:
                meeting.note(0, work(stage, work_s))
        meeting.step(3, step_s)
        meeting.note(1, work(stage, work_s))
        meeting.step(4, step_s)
        meeting.note(2, work(Stage.ENCODE, work_s))
        meeting.step(5, step_s)
        if encode:
            meeting.read_times()
            return meeting.say(_Say.JUDGED)
        meeting.wait_for_verdict(step_s)
        return meeting.take_over()
    except _GoneError:
        return meeting.say(_Say.ABSENT)
    except Exception:
        meeting.say(_Say.ABSENT)
        raise


def decline(cell: Cell, stage: Stage) -> None:
    """To be called by an engine that has no part to prove anything of: it will not come."""
    _Meeting(cell, stage, time.sleep).say(_Say.ABSENT)


class Gemm:
    """Work: products of square matrices, on the parts of a level, of which both are made here.

    The matrices are of zeros: tensor cores are as busy with them, but take little power, so that
    two parts at once are not slowed down by the GPU's power limit.
    """

    def __init__(self, driver: GreenDriver, units: int, size: int = 4096, batch: int = 8) -> None:
        import torch

        self._cuda, self._batch = torch.cuda, batch
        self._streams = {
            stage: driver.stream(stage, units) for stage in (Stage.ENCODE, Stage.PREFILL)
        }
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": driver.device.index}
        self._left = torch.zeros(size, size, **options)
        self._product = torch.empty(size, size, **options)
        self._multiply = torch.mm
        torch.cuda.synchronize(driver.device.index)
        for stage in self._streams:
            self(stage, 0.0)

    def __call__(self, stage: Stage, seconds: float) -> float:
        stream, repetitions = self._streams[stage], 0
        begin = time.perf_counter()
        while True:
            with self._cuda.stream(stream):
                for _ in range(self._batch):
                    self._multiply(self._left, self._left, out=self._product)
            stream.synchronize()
            repetitions += self._batch
            elapsed = time.perf_counter() - begin
            if elapsed >= seconds:
                return elapsed / repetitions
