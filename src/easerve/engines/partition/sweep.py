"""Latency of an encoder by units and batch, measured on a device in one process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from easerve.engines.partition.sides import Driver
from easerve.goodput import percentile
from easerve.policy.partition import Surface
from easerve.types import NS_PER_S, Stage

NUM_WARM_UPS, NUM_RUNS = 3, 20
WAIT_S = 0.01
Work = Callable[[], bool]
"""What was submitted: is it done?"""


class Device(Driver, Protocol):
    """``source``: the card's name, or that it is simulated. ``levels``: parts of an encoder.

    ``confine`` holds for what is submitted afterwards. At most one batch and one step at a time.
    """

    source: str
    levels: Sequence[int]
    item_tokens: int

    def now_ns(self) -> int: ...

    def encode(self, batch: int) -> Work: ...

    def prefill(self, chunks: int) -> Work: ...

    def wait(self, seconds: float) -> None:
        """Let time pass, so long or until something is done."""
        ...

    def prefer_encode(self, preferred: bool) -> None:
        """Where parts overlap, the encoder's work is to go first."""
        ...


@dataclass(frozen=True, slots=True)
class Runs:
    """Forwards of a batch on so many units (0: all), as they ran, warm-ups left out.

    ``beside``: prefill was busy on all other units; False: the device was idle.
    """

    batch: int
    units: int
    beside: bool
    seconds: tuple[float, ...]

    @property
    def p50_s(self) -> float:
        return _percentile(self.seconds, 50)

    @property
    def p95_s(self) -> float:
        return _percentile(self.seconds, 95)


def sweep(
    device: Device,
    batches: Sequence[int],
    chunks: int,
    most_s: float,
    num_runs: int = NUM_RUNS,
) -> Iterator[Runs]:
    """Alone on every level and on the whole device, then beside prefill on every level.

    ``chunks``: of the prefill steps beside. ``most_s``: what takes longer alone is not run beside.
    """
    beside = []
    for batch in batches:
        for units in (0, *device.levels):
            runs = _runs(device, batch, units, None, num_runs)
            if units and runs.p50_s <= most_s:
                beside.append((batch, units))
            yield runs
    for batch, units in beside:
        yield _runs(device, batch, units, chunks, num_runs)


def surface(runs: Iterable[Runs], item_tokens: int) -> Surface:
    """Of the p95, beside prefill where that was measured, else alone; not of the whole device."""
    rows: dict[int, dict[int, float]] = {}
    for each in sorted(runs, key=lambda each: (each.batch, each.units, each.beside)):
        if each.units:
            rows.setdefault(each.batch, {})[each.units] = each.p95_s
    return Surface(item_tokens, tuple((batch, tuple(row.items())) for batch, row in rows.items()))


def alone_s(runs: Iterable[Runs]) -> dict[int, float]:
    """The median for each batch on the whole device."""
    return {each.batch: each.p50_s for each in runs if not each.units}


def _runs(device: Device, batch: int, units: int, chunks: int | None, num_runs: int) -> Runs:
    device.confine(Stage.ENCODE, units)
    device.confine(Stage.PREFILL, units)
    step: Work | None = None
    seconds = []
    for _ in range(NUM_WARM_UPS + num_runs):
        if chunks is not None and (step is None or step()):
            step = device.prefill(chunks)
        begin_ns = device.now_ns()
        forward = device.encode(batch)
        while not forward():
            device.wait(WAIT_S)
            if chunks is not None and step is not None and step():
                step = device.prefill(chunks)
        seconds.append((device.now_ns() - begin_ns) / NS_PER_S)
    while step is not None and not step():
        device.wait(WAIT_S)
    return Runs(batch, units, chunks is not None, tuple(seconds[NUM_WARM_UPS:]))


def _percentile(seconds: Sequence[float], percent: int) -> float:
    """By nearest rank."""
    value = percentile(seconds, percent)
    assert value is not None
    return value
