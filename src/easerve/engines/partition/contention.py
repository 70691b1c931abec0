"""Encode beside prefill on one device, rule by rule: what each gets, and what the other pays.

An encoder serves batches that arrive by a trace, first come, first served; prefill has work without
end, in steps of so many chunks. Both keep to the demands as in two engines: by a cell and its two
sides. They are one thread here, so that a simulated device can have a clock of its own.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from easerve.engines.partition.cell import Cell, scratch
from easerve.engines.partition.sides import (
    LEASE_NS,
    POLL_S,
    DriverError,
    EncodeSide,
    PrefillSide,
)
from easerve.engines.partition.sweep import Device, Work
from easerve.goodput import percentile
from easerve.policy.knobs import Knobs
from easerve.policy.partition import Devices, MinUnits, Partition, Surface
from easerve.types import NS_PER_S, Stage

MIX: Mapping[int, float] = {1: 0.30, 2: 0.25, 4: 0.20, 8: 0.15, 16: 0.10}
"""Share of batches by number of items: an assumption, many small ones and a few large."""
LOAD = 0.4
NOTICE_S = 0.005
"""From the announcement of a batch until its media are preprocessed (an estimate)."""
HOLD_NS = 20_000_000
RENEW_NS = LEASE_NS // 4


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rules have in common. ``alone_s``: a forward of a batch that has the device.

    ``steps``: chunks of a prefill step, by name.
    """

    surface: Surface
    alone_s: Mapping[int, float]
    knobs: Knobs
    steps: Mapping[str, int]

    @property
    def table(self) -> MinUnits:
        return MinUnits(self.surface, self.knobs.encode_target_s)

    def forward_s(self, batch: int) -> float:
        """On the units of the table, by the surface."""
        row = self.table.row(batch * self.surface.item_tokens)
        return dict(dict(self.surface.rows)[row.batch])[row.units]


@dataclass(frozen=True, slots=True)
class Trace:
    """``arrivals``: when a batch can begin, and of how many items, in order of time."""

    arrivals: tuple[tuple[int, int], ...]
    notice_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Case:
    """``how``: a rule of policy.partition; None: nothing is encoded.

    ``most``: rule static with the largest number of units in the table, else with half of all.
    """

    name: str
    how: str | None
    most: bool = False
    hold_ns: int = 0
    prefer_encode: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Of one case. Latency is from when a batch can begin until it is done, in ms.

    ``x_alone``: the latency of a batch over that of its forward alone. ``in_target``: share of
    batches whose latency, ``forwards_in_target``: whose forward is within the target. ``late``:
    share of forwards that began beside a step that held units of theirs. ``prefill_per_s``: chunks.
    """

    case: str
    step: str
    encodes: int
    p50_ms: float | None
    p95_ms: float | None
    p50_x_alone: float | None
    p95_x_alone: float | None
    in_target: float | None
    forwards_in_target: float | None
    late: float | None
    prefill_per_s: float
    prefill_share: float
    latencies_ms: tuple[float, ...]


def draw(
    setting: Setting,
    rng: random.Random,
    duration_s: float,
    load: float = LOAD,
    notice_s: float = NOTICE_S,
) -> Trace:
    """Poisson arrivals of what was measured of the mix.

    ``load``: share of the time that an encoder works, were every forward to take what it takes on
    the units of the table.
    """
    mix = {batch: share for batch, share in MIX.items() if batch in setting.alone_s}
    batches, weights = list(mix), list(mix.values())
    mean_s = sum(share * setting.forward_s(batch) for batch, share in mix.items()) / sum(weights)
    gaps_s = (rng.expovariate(load / mean_s) for _ in iter(int, 1))
    arrivals = []
    for at_s in accumulate(gaps_s, initial=notice_s):
        if at_s >= duration_s:
            break
        arrivals.append((round(at_s * NS_PER_S), rng.choices(batches, weights)[0]))
    return Trace(tuple(arrivals), round(notice_s * NS_PER_S), round(duration_s * NS_PER_S))


CASES = (
    Case("alone", None),
    Case("none", "none"),
    Case("priority", "none", prefer_encode=True),
    Case("static, half", "static"),
    Case("static, most", "static", most=True),
    Case("gate", "gate"),
    Case("dynamic", "dynamic"),
    Case("dynamic+hold", "dynamic", hold_ns=HOLD_NS),
)
"""The first is what the shares of prefill are of."""


def compare(
    device: Device, setting: Setting, trace: Trace, tick: Callable[[str], None]
) -> Iterator[Row]:
    """Every case for every size of step, on the same trace. ``tick`` hears what is run."""
    for step, chunks in setting.steps.items():
        alone_per_s = None
        for case in CASES:
            tick(f"{case.name}, {step} steps")
            with scratch() as path, closing(Cell(path, device.now_ns)) as cell:
                row = Contention(device, cell, setting, case, trace, chunks).run(step)
            alone_per_s = alone_per_s or row.prefill_per_s
            yield dataclasses.replace(row, prefill_share=row.prefill_per_s / alone_per_s)


@dataclass(slots=True)
class _Batch:
    ready_ns: int
    items: int
    units: int
    began_ns: int = 0


class Contention:
    """One case on one trace."""

    def __init__(
        self,
        device: Device,
        cell: Cell,
        setting: Setting,
        case: Case,
        trace: Trace,
        chunks: int,
    ) -> None:
        self._device, self._cell, self._setting = device, cell, setting
        self._case, self._chunks = case, chunks
        units = setting.table.rows[-1].units if case.most else None
        knobs = dataclasses.replace(setting.knobs, how=case.how or "none", encode_units=units)
        self._partition = Partition(knobs, Devices(setting.surface))
        self._encode_side = EncodeSide(cell, device, _raise)
        self._prefill_side = PrefillSide(
            cell, device, _raise, case.hold_ns, sleep=self._prefill_waits
        )
        self._trace, self._begin_ns = trace, device.now_ns()
        self._arrivals = deque(trace.arrivals if case.how else ())
        self._open: deque[_Batch] = deque()  # announced, the first is next or runs
        self._published_ns = 0
        self._forward: Work | None = None
        self._step: Work | None = None
        self._done: list[tuple[_Batch, int]] = []
        self._num_chunks, self._stepped_ns = 0, self._begin_ns

    def run(self, step: str) -> Row:
        """Until the trace ends; what is under way then is waited for, and not counted."""
        device = self._device
        device.prefer_encode(self._case.prefer_encode)
        for stage in (Stage.ENCODE, Stage.PREFILL):
            device.confine(stage, 0)
        self._publish()
        while self._now_ns < self._trace.duration_ns:
            self._encode()
            self._prefill()
            device.wait(self._idle_s)
        while not all(work is None or work() for work in (self._forward, self._step)):
            device.wait(POLL_S)
        return self._row(step)

    @property
    def _now_ns(self) -> int:
        """Since the run began."""
        return self._device.now_ns() - self._begin_ns

    @property
    def _idle_s(self) -> float:
        """Until the next batch is announced or can begin, or an announcement is to be renewed."""
        times = [self._trace.duration_ns, self._published_ns + RENEW_NS]
        times += [ready_ns - self._trace.notice_ns for ready_ns, _ in list(self._arrivals)[:1]]
        times += [batch.ready_ns for batch in list(self._open)[:1] if self._forward is None]
        return max(0, min(times) - self._now_ns) / NS_PER_S

    # The encoder and its API server -------------------------------------------------------------

    def _encode(self) -> None:
        self._arrive()
        if self._forward is not None and self._forward():
            self._forward = None
            self._encode_side.end()
            self._done.append((self._open.popleft(), self._now_ns))
            self._publish()
        if self._forward is None and self._open and self._open[0].ready_ns <= self._now_ns:
            self._encode_side.begin()
            self._open[0].began_ns = self._now_ns
            self._forward = self._device.encode(self._open[0].items)

    def _arrive(self) -> None:
        came = False
        while self._arrivals and self._arrivals[0][0] - self._trace.notice_ns <= self._now_ns:
            ready_ns, items = self._arrivals.popleft()
            num_items = items + sum(batch.items for batch in self._open)
            demand = self._partition.demand(num_items * self._setting.surface.item_tokens)
            self._open.append(_Batch(ready_ns, items, demand.units))
            came = True
        if came or self._now_ns - self._published_ns >= RENEW_NS:
            self._publish()

    def _publish(self) -> None:
        """As vllm.announcer: the most that an open request wants, or what stands."""
        standing = self._partition.standing
        units = max((batch.units for batch in self._open), default=0)
        if units > standing.units:
            self._cell.announce(units, LEASE_NS)
        else:
            self._cell.announce(standing.units, None)
        self._published_ns = self._now_ns

    # Prefill ------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        self._end_step()
        if self._step is None and self._now_ns < self._trace.duration_ns:
            self._prefill_side.begin()
            self._step = self._device.prefill(self._chunks)

    def _end_step(self) -> None:
        if self._step is not None and self._step():
            self._step = None
            self._prefill_side.end()
            self._num_chunks += self._chunks
            self._stepped_ns = self._device.now_ns()

    def _prefill_waits(self, seconds: float) -> None:
        self._encode()
        self._device.wait(seconds)

    # What came of it ----------------------------------------------------------------------------

    def _row(self, step: str) -> Row:
        state = self._cell.state()
        return row_of(
            self._case.name,
            step,
            [batch.items for batch, _ in self._done],
            [(end_ns - batch.ready_ns) / NS_PER_S for batch, end_ns in self._done],
            [(end_ns - batch.began_ns) / NS_PER_S for batch, end_ns in self._done],
            self._setting.alone_s,
            self._setting.knobs.encode_target_s,
            state.late / state.forwards if state.forwards else None,
            self._num_chunks * NS_PER_S / max(1, self._stepped_ns - self._begin_ns),
        )


def row_of(
    case: str,
    step: str,
    batches: Sequence[int],
    latencies_s: Sequence[float],
    forwards_s: Sequence[float],
    alone_s: Mapping[int, float],
    target_s: float,
    late: float | None,
    prefill_per_s: float,
) -> Row:
    """Of the batches that were done; its share of prefill is still to come."""
    pairs = zip(latencies_s, batches, strict=True)
    x_alone = [latency_s / alone_s[batch] for latency_s, batch in pairs]
    latencies_ms = tuple(1e3 * latency_s for latency_s in latencies_s)
    return Row(
        case,
        step,
        len(batches),
        percentile(latencies_ms, 50),
        percentile(latencies_ms, 95),
        percentile(x_alone, 50),
        percentile(x_alone, 95),
        _share(latencies_s, target_s),
        _share(forwards_s, target_s),
        late,
        prefill_per_s,
        1.0,
        latencies_ms,
    )


def _share(seconds: Sequence[float], limit_s: float) -> float | None:
    return fmean(each <= limit_s for each in seconds) if seconds else None


def _raise(error: DriverError) -> None:
    raise error
