"""How: the compute units that an encode batch gets of a device that it shares with local prefill.

A unit is an SM of a GPU or a core of a CPU. A batch gets the fewest that meet an absolute target
for its latency, local prefill the rest, and everything while nothing is encoded. What is decided
here is a ``Demand``; it travels with the call to the encoder, and the two engines keep to it by
themselves (engines/partition).
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from easerve.policy.knobs import Knobs

MAX_UNITS = (1 << 12) - 1
"""What a demand can say; the two largest have a meaning of their own."""
ALL = MAX_UNITS
"""Every unit: prefill pauses."""
HALF = MAX_UNITS - 1
"""Half of them."""


@dataclass(frozen=True, slots=True)
class Demand:
    """``units`` that local prefill is to leave to the encoder; 0: the two share all of them.

    ``standing``: also between batches, until another demand comes. ``reason``: why so many.
    """

    units: int
    standing: bool
    reason: str


SHARED = Demand(0, False, "shared")


@dataclass(frozen=True, slots=True)
class Surface:
    """Measured latency of the encoder: ``rows`` of (batch, ((units, seconds), ...)), both rising.

    ``item_tokens``: of each item that was measured, so that batches can be told apart by tokens.
    Seconds are the p95 of a forward beside prefill, where that was measured, else alone.
    """

    item_tokens: int
    rows: tuple[tuple[int, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, slots=True)
class Devices:
    """What the encoders of a deployment share with local prefill; no ``surface``: not profiled."""

    surface: Surface | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """``met``: False when even all units that were measured miss the target."""

    batch: int
    units: int
    met: bool


class MinUnits:
    """Batch size -> the fewest units that meet the target; more items never get fewer units."""

    def __init__(self, surface: Surface, target_s: float) -> None:
        self._item_tokens = surface.item_tokens
        self.rows: list[Row] = []
        least = 0
        for batch, latencies in surface.rows:
            units, met = _fewest(latencies, target_s)
            least = max(least, units)
            self.rows.append(Row(batch, least, met))

    def row(self, num_tokens: int) -> Row:
        """Of the next larger batch that was measured; of the largest for one that is larger."""
        batch = max(1, ceil(num_tokens / self._item_tokens))
        index = bisect_left(self.rows, batch, key=lambda row: row.batch)
        return self.rows[min(index, len(self.rows) - 1)]


def _fewest(latencies: tuple[tuple[int, float], ...], target_s: float) -> tuple[int, bool]:
    """The smallest number of units from which on every measured one meets the target."""
    fewest, met = latencies[-1][0], False
    for units, seconds in reversed(latencies):
        if seconds > target_s:
            break
        fewest, met = units, True
    return fewest, met


class Partition:
    """The rule in force. ``devices`` None: they are not to be divided, whatever the rule."""

    def __init__(self, knobs: Knobs, devices: Devices | None) -> None:
        self._devices = devices
        self.retune(knobs)

    def retune(self, knobs: Knobs) -> None:
        """Go by other knobs from now on."""
        self._knobs = knobs
        surface = None if self._devices is None else self._devices.surface
        self.table = None if surface is None else MinUnits(surface, knobs.encode_target_s)

    def demand(self, num_tokens: int) -> Demand:
        """For a batch that makes it so many tokens that are at its encoder.

        What is there before it counts: with the fewest units for each of them in turn, an encoder
        could do less in a second than comes.
        """
        return SHARED if self._devices is None else RULES[self._knobs.how](self, num_tokens)

    @property
    def standing(self) -> Demand:
        """Between batches."""
        demand = self.demand(0)
        return demand if demand.standing else SHARED

    def _dynamic(self, num_tokens: int) -> Demand:
        if self.table is None:
            return Demand(HALF, False, "no profile")
        row = self.table.row(num_tokens)
        return Demand(
            row.units, False, f"{'table' if row.met else 'over target'}, batch {row.batch}"
        )

    def _static(self, num_tokens: int) -> Demand:
        return Demand(self._knobs.encode_units or HALF, True, "static")

    def _gate(self, num_tokens: int) -> Demand:
        return Demand(ALL, False, "gate")

    def _none(self, num_tokens: int) -> Demand:
        return SHARED


RULES: Mapping[str, Callable[[Partition, int], Demand]] = {
    "dynamic": Partition._dynamic,
    "static": Partition._static,
    "gate": Partition._gate,
    "none": Partition._none,
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The units of a device, cut into granules, numbered from the encoder's end.

    The encoder's part of ``k`` units are the first ``k``, prefill's all others. So every part of
    the encoder is within every larger one, and who has read an old, larger demand takes nothing
    that the encoder has. ``min_prefill``: units that prefill keeps, but for a demand of ALL.
    """

    total: int
    granule: int = 1
    min_prefill: int = 1

    @property
    def parts(self) -> tuple[int, ...]:
        """Every part of an encoder that there can be beside prefill, rising."""
        most = self.total - max(self.min_prefill, 1)
        return tuple(range(self.granule, most + 1, self.granule))

    def round(self, units: int) -> int:
        """What a demand comes to here: the next larger part or, where there is none, the largest.

        ALL: the whole device; HALF: the part that is nearest to it.
        """
        parts = self.parts
        if units == ALL:
            return self.total
        if units == HALF and parts:
            return min(parts, key=lambda part: abs(2 * part - self.total))
        return parts[min(bisect_left(parts, units), len(parts) - 1)] if units and parts else 0


@dataclass(frozen=True, slots=True)
class Levels(Layout):
    """A layout in which only some parts have been made."""

    levels: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[int, ...]:
        return self.levels


class Indivisible(Layout):
    """A device whose parts cannot be chosen per batch. Whoever wants all of it may have it."""

    @property
    def parts(self) -> tuple[int, ...]:
        return ()


class Gate(Indivisible):
    """A device that one of the two has at a time: whatever an encoder wants, prefill pauses."""

    def round(self, units: int) -> int:
        return self.total if units else 0


class Hold:
    """Hysteresis of prefill: it gives units up at once, and takes them back ``hold_ns`` later."""

    def __init__(self, hold_ns: int) -> None:
        self._hold_ns = hold_ns
        self._last, self._until_ns = 0, 0

    def leave(self, demanded: int, now_ns: int) -> int:
        """Units to leave free now, of ``demanded`` ones."""
        if now_ns < self._until_ns and demanded < self._last:
            return self._last
        self._last = demanded
        if demanded:
            self._until_ns = now_ns + self._hold_ns
        return demanded
