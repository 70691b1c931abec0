"""A modelled encoder: calls are preprocessed on the host, then run one forward after another."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from easerve.costs.base import Costs, Media
from easerve.sim.clock import Effect, Handler
from easerve.sim.lanes import Lanes
from easerve.sim.run import Run
from easerve.sim.sharing import Device
from easerve.types import Stage


@dataclass(frozen=True, slots=True)
class EncodeLimits:
    """``dispatch_s``: host time of a forward during which the device waits, and ``item_s`` of an
    item on one of ``host_workers`` before it. ``merge_items``, ``merge_tokens``: calls that wait
    may share a forward up to so much; 1: every call is a forward of its own.
    """

    dispatch_s: float = 0.0
    item_s: float = 0.0
    host_workers: int = 1
    merge_items: int = 1
    merge_tokens: int = 1 << 30


@dataclass(eq=False, slots=True)
class Call:
    """Items that are encoded together. ``done``: what follows when they are."""

    items: Sequence[Media]
    done: Handler
    dropped: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


def whole() -> float:
    """The part of an encoder that has its device to itself."""
    return 1.0


class EncodeEngine:
    """``part``: of its device, that a forward which begins now runs on."""

    def __init__(
        self,
        name: str,
        costs: Costs,
        device: Device,
        limits: EncodeLimits,
        run: Run,
        part: Callable[[], float] = whole,
    ) -> None:
        self.name, self._costs, self._device, self._run = name, costs, device, run
        self._limits, self._part = limits, part
        self._host = Lanes(limits.host_workers)
        self._ready: deque[Call] = deque()
        self._running: list[Call] = []
        self._epoch = 0
        self.num_items = 0
        """Of the calls that are here."""
        run.engine(name, Stage.ENCODE)

    def submit(self, call: Call, now_ns: int) -> Iterator[Effect]:
        self.num_items += len(call.items)
        begin_ns, end_ns = self._host.take(self._limits.item_s * len(call.items), now_ns)
        if end_ns > begin_ns:
            self._run.note(self.name, "preprocess", begin_ns, end_ns)
        if end_ns > now_ns:
            yield end_ns, partial(self._prepared, self._epoch, call)
        else:
            yield from self._prepared(self._epoch, call, now_ns)

    def drop(self, call: Call) -> bool:
        """Nobody wants it any more. Whether its forward runs, which goes on."""
        call.dropped = True
        return call in self._running

    def reset(self, now_ns: int) -> Iterator[Effect]:
        """It has died, and forgets all."""
        self._epoch += 1
        self._ready.clear()
        self._running = []
        self.num_items = 0
        self._host = Lanes(self._limits.host_workers)
        yield from self._device.drop(self.name, now_ns)

    def _prepared(self, epoch: int, call: Call, now_ns: int) -> Iterator[Effect]:
        if epoch == self._epoch:
            self._ready.append(call)
            yield from self._start(now_ns)

    def _start(self, now_ns: int) -> Iterator[Effect]:
        if self._running:
            return
        self._running = self._next()
        items = [item for call in self._running for item in call.items]
        if items:
            part = self._part()
            seconds = self._limits.dispatch_s + self._costs.encode(items, part)
            ended = partial(self._ended, now_ns, part)
            yield from self._device.begin(self.name, seconds, part, now_ns, ended)

    def _next(self) -> list[Call]:
        """The calls of the next forward."""
        calls: list[Call] = []
        items = tokens = 0
        while self._ready:
            call = self._ready[0]
            if not call.dropped:
                items, tokens = items + len(call.items), tokens + call.num_tokens
                limits = self._limits
                if calls and (items > limits.merge_items or tokens > limits.merge_tokens):
                    break
                calls.append(call)
            else:
                self.num_items -= len(call.items)
            self._ready.popleft()
        return calls

    def _ended(self, begin_ns: int, part: float, now_ns: int) -> Iterator[Effect]:
        calls, self._running = self._running, []
        num_items = sum(len(call.items) for call in calls)
        self.num_items -= num_items
        self._run.busy(self.name, "encode", begin_ns, now_ns, items=num_items, part=round(part, 3))
        self._run.encoded(num_items)
        for call in calls:
            yield from call.done(now_ns)
        yield from self._start(now_ns)
