"""What the encode stage did, from the steps of the core."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from easerve.goodput import Spread, spread
from easerve.policy import events as ev
from easerve.types import NS_PER_S, BatchId, RequestId, WorkerId


@dataclass(slots=True)
class EncodeRun:
    """Between two moments: calls, items in them, waits of requests for theirs, busy encoders."""

    duration_s: float
    batches: list[ev.StartEncode] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    calls_s: list[float] = field(default_factory=list)
    """Of each call, in the order of their ends."""
    busy_share: float = 0.0

    @property
    def batch_mean(self) -> float | None:
        return fmean(len(batch.items) for batch in self.batches) if self.batches else None

    @property
    def wait(self) -> Spread:
        return spread(self.waits_s)

    def reasons(self) -> Counter[str]:
        return Counter(batch.decision.reason for batch in self.batches)


@dataclass(slots=True)
class Call:
    """To an encoder, not yet answered."""

    worker_id: WorkerId
    num_items: int
    since_ns: int


class Recorder:
    """Takes the place of a decision log. ``reset`` begins a run, ``run`` tells of it."""

    def __init__(self) -> None:
        self._stepped = asyncio.Event()
        self.reset(0)

    def reset(self, now_ns: int) -> None:
        """Forget everything."""
        self._run = EncodeRun(0.0)
        self._prepared_ns: dict[RequestId, int] = {}
        self._calls: dict[BatchId, Call] = {}
        self._running: Counter[WorkerId] = Counter()
        self.num_encoded = self.num_failed = 0
        self.set_clock(now_ns)

    def set_clock(self, now_ns: int) -> None:
        """The run begins now, with what is under way."""
        self._begin_ns = self._now_ns = now_ns
        self._busy_ns = 0
        for call in self._calls.values():
            call.since_ns = now_ns

    @property
    def num_prepared(self) -> int:
        return len(self._prepared_ns)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a step after which this holds."""
        while not holds():
            self._stepped.clear()
            await self._stepped.wait()

    def step(self, now_ns: int, events: Sequence[ev.Event], actions: Sequence[ev.Action]) -> None:
        self._busy_ns += (now_ns - self._now_ns) * sum(n > 0 for n in self._running.values())
        self._now_ns = now_ns
        for event in events:
            match event:
                case ev.Prepared():
                    self._prepared_ns[event.request_id] = now_ns
                case ev.EncodeFinished() | ev.EncodeFailed() if event.batch_id in self._calls:
                    self._end(self._calls.pop(event.batch_id), event, now_ns)
                case _:
                    pass
        for action in actions:
            if isinstance(action, ev.StartEncode) and action.forward:
                self._start(action, now_ns)
        self._stepped.set()

    def _end(self, call: Call, event: ev.Event, now_ns: int) -> None:
        self._running[call.worker_id] -= 1
        self._run.calls_s.append((now_ns - call.since_ns) / NS_PER_S)
        if isinstance(event, ev.EncodeFinished):
            self.num_encoded += call.num_items
        else:
            self.num_failed += call.num_items

    def _start(self, batch: ev.StartEncode, now_ns: int) -> None:
        self._run.batches.append(batch)
        self._calls[batch.batch_id] = Call(batch.worker_id, len(batch.items), now_ns)
        self._running[batch.worker_id] += 1
        for request_id in {waiter.request_id for item in batch.items for waiter in item.waiters}:
            if request_id in self._prepared_ns:
                self._run.waits_s.append((now_ns - self._prepared_ns[request_id]) / NS_PER_S)

    def run(self, now_ns: int, num_encoders: int) -> EncodeRun:
        """From the last reset until now."""
        self.step(now_ns, [], [])
        self._run.duration_s = (now_ns - self._begin_ns) / NS_PER_S
        self._run.busy_share = self._busy_ns / max(1, now_ns - self._begin_ns) / num_encoders
        return self._run

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
