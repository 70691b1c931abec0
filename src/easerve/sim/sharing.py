"""Devices that more than one engine works on: who gets how much, and when work ends.

Work is begun with the seconds that it would take undisturbed on the part of the device that it was
begun on, which it keeps. Where parts overlap, units are shared in time: work then goes on at a
fraction of its speed, until another ends or begins.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from easerve.policy.partition import SHARED, Demand, Layout
from easerve.sim.clock import Effect, Handler
from easerve.types import NS_PER_S

DONE_S = 1 / NS_PER_S
"""Time does not tell less apart."""


class Device(Protocol):
    def begin(
        self, engine: str, seconds: float, part: float, now_ns: int, done: Handler
    ) -> Iterable[Effect]:
        """Work of an engine, which has no other under way, on a part (0 to 1) of the device."""
        ...

    def drop(self, engine: str, now_ns: int) -> Iterable[Effect]:
        """Forget the work of an engine."""
        ...


class Own:
    """The device of one engine."""

    def __init__(self) -> None:
        self._epoch = 0

    def begin(
        self, engine: str, seconds: float, part: float, now_ns: int, done: Handler
    ) -> Iterable[Effect]:
        return ((now_ns + round(seconds * NS_PER_S), partial(self._end, self._epoch, done)),)

    def _end(self, epoch: int, done: Handler, now_ns: int) -> Iterable[Effect]:
        return done(now_ns) if epoch == self._epoch else ()

    def drop(self, engine: str, now_ns: int) -> Iterable[Effect]:
        self._epoch += 1
        return ()


@dataclass(slots=True)
class Work:
    """``left`` of 1; ``speed``: how fast it goes on, of 1."""

    seconds: float
    part: float
    done: Handler
    left: float = 1.0
    speed: float = 1.0


class Shared:
    """A device on which work goes on as fast as ``speeds`` says, of the parts under way."""

    def __init__(self, speeds: Callable[[Mapping[str, float]], Mapping[str, float]]) -> None:
        self._speeds = speeds
        self._under_way: dict[str, Work] = {}
        self._since_ns = self._version = 0

    def begin(
        self, engine: str, seconds: float, part: float, now_ns: int, done: Handler
    ) -> Iterator[Effect]:
        assert engine not in self._under_way, f"{engine} has work under way"
        self._pass(now_ns)
        self._under_way[engine] = Work(max(seconds, 1 / NS_PER_S), part, done)
        yield from self._go_on(now_ns)

    def drop(self, engine: str, now_ns: int) -> Iterator[Effect]:
        self._pass(now_ns)
        if self._under_way.pop(engine, None) is not None:
            yield from self._go_on(now_ns)

    def _pass(self, now_ns: int) -> None:
        """Work has gone on since the last time."""
        passed_s = (now_ns - self._since_ns) / NS_PER_S
        self._since_ns = now_ns
        for work in self._under_way.values():
            work.left -= passed_s * work.speed / work.seconds

    def _go_on(self, now_ns: int) -> Iterator[Effect]:
        """From now on at other speeds; the effects that were announced before are void."""
        self._version += 1
        if not self._under_way:
            return
        speeds = self._speeds({engine: work.part for engine, work in self._under_way.items()})
        ends_s = []
        for engine, work in self._under_way.items():
            work.speed = speeds[engine]
            ends_s.append(max(0.0, work.left) * work.seconds / work.speed)
        yield now_ns + round(min(ends_s) * NS_PER_S), partial(self._end, self._version)

    def _end(self, version: int, now_ns: int) -> Iterator[Effect]:
        if version != self._version:
            return
        self._pass(now_ns)
        ended = [
            engine for engine, work in self._under_way.items() if work.left * work.seconds < DONE_S
        ]
        done = [self._under_way.pop(engine).done for engine in ended]
        yield from self._go_on(now_ns)
        for each in done:
            yield from each(now_ns)


def machine(cores: float) -> Shared:
    """A CPU: whoever works wants ``part`` cores (1 is one core); more than there are is shared."""

    def speeds(parts: Mapping[str, float]) -> Mapping[str, float]:
        speed = min(1.0, cores / sum(parts.values()))
        return dict.fromkeys(parts, speed)

    return Shared(speeds)


class Colocated:
    """Encoders, each on devices of its own, and the prefill engine that is on all of them.

    ``layout``: of the units of a device. An encoder's part of it is what the core demands, prefill
    gets the rest when its step begins. ``crowding``: how much longer each takes beside the other,
    for want of memory bandwidth.
    """

    def __init__(self, layout: Layout, prefill: str, crowding: float) -> None:
        self._layout, self._prefill, self._crowding = layout, prefill, crowding
        self._standing: dict[str, Demand] = {}
        self._demands: dict[str, list[Demand]] = {}
        self._device = Shared(self._speeds)
        self.wake: Handler = _nothing
        """Called when prefill may go on that was kept from it."""

    def announce(self, encoder: str, demand: Demand) -> None:
        """A call has reached an encoder."""
        self._demands.setdefault(encoder, []).append(demand)

    def withdraw(self, encoder: str, demand: Demand, now_ns: int) -> Iterator[Effect]:
        """It has ended."""
        paused = self.prefill_part() == 0
        self._demands[encoder].remove(demand)
        if paused and self.prefill_part() > 0:
            yield now_ns, self.wake

    def stand(self, encoder: str, demand: Demand) -> None:
        """The encoder's part between its calls."""
        self._standing[encoder] = demand

    def encode_part(self, encoder: str) -> float:
        """What a forward of an encoder that begins now runs on; all, where nothing is demanded."""
        return self._part(encoder) or 1.0

    def prefill_part(self) -> float:
        """What a step of prefill that begins now may take; 0: it may not begin."""
        encoders = {*self._standing, *self._demands}
        return 1 - max((self._part(encoder) for encoder in encoders), default=0.0)

    def _part(self, encoder: str) -> float:
        demands = self._demands.get(encoder) or [self._standing.get(encoder, SHARED)]
        units = max(self._layout.round(demand.units) for demand in demands)
        return units / self._layout.total

    def begin(
        self, engine: str, seconds: float, part: float, now_ns: int, done: Handler
    ) -> Iterator[Effect]:
        return self._device.begin(engine, seconds, part, now_ns, done)

    def drop(self, engine: str, now_ns: int) -> Iterator[Effect]:
        return self._device.drop(engine, now_ns)

    def forget(self, encoder: str, now_ns: int) -> Iterator[Effect]:
        """It has died, and demands nothing."""
        self._demands.pop(encoder, None)
        self._standing.pop(encoder, None)
        yield now_ns, self.wake

    def _speeds(self, parts: Mapping[str, float]) -> Mapping[str, float]:
        """Whoever overlaps shares by the sizes of the parts; prefill waits for its slowest rank."""
        speeds = dict.fromkeys(parts, 1.0)
        beside = parts.get(self._prefill)
        if beside is None:
            return speeds
        for engine, part in parts.items():
            if engine != self._prefill:
                speed = min(1.0, 1 / (part + beside)) / (1 + self._crowding)
                speeds[engine] = speed
                speeds[self._prefill] = min(speeds[self._prefill], speed)
        return speeds


def _nothing(now_ns: int) -> Iterator[Effect]:
    yield from ()
