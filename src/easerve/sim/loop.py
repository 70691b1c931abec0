"""A heap of events: modelled engines answer the core's actions, and only the loop pushes.

Time is integer nanoseconds; events of one instant are handed to the core together, in the order in
which they were pushed otherwise. Preparation takes no time here, transfers neither; engines that
share a device do not slow each other.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import fmean

from easerve.costs.linear import LinearCosts
from easerve.goodput import Outcome, Record
from easerve.policy import events as ev
from easerve.policy.core import Core
from easerve.types import NS_PER_S, BatchId, MediaItem, Modality, RequestId, Shape, Stage, WorkerId

STAGES = {"e": Stage.ENCODE, "p": Stage.PREFILL, "l": Stage.PREFILL, "d": Stage.DECODE}
Effect = tuple[int, ev.Event | Callable[[int], "Iterable[Effect]"]]
"""When something happens: an event for the core, or what an engine does then."""


@dataclass(frozen=True, slots=True)
class Request:
    """``items``: embedding tokens of each of its pictures; ``num_tokens``: of its answer."""

    at_s: float
    items: tuple[int, ...]
    num_prompt_tokens: int
    num_tokens: int


@dataclass(slots=True)
class Run:
    """What came of a run. ``batches``: when each was started, and why."""

    records: list[Record] = field(default_factory=list)
    batches: list[tuple[int, ev.StartEncode]] = field(default_factory=list)
    busy_s: dict[WorkerId, float] = field(default_factory=dict)
    end_s: float = 0.0

    @property
    def mean_batch(self) -> float:
        """Items of a call to an encoder."""
        return fmean(len(batch.items) for _, batch in self.batches)


class Server:
    """One piece of work at a time, first come, first served: an encoder, a prefill engine."""

    def __init__(self) -> None:
        self.free_ns = 0
        self.busy_ns = 0

    def start(self, now_ns: int, service_s: float) -> int:
        """When work that comes now is done."""
        service_ns = round(service_s * NS_PER_S)
        self.busy_ns += service_ns
        self.free_ns = max(now_ns, self.free_ns) + service_ns
        return self.free_ns


@dataclass(slots=True)
class Decoding:
    """A leg under way: tokens left of how many, and when it came."""

    leg: tuple[RequestId, int, int]
    num_left: int
    num_tokens: int
    begin_ns: int


class Decoder:
    """Continuous batching: a step gives every running leg a token, and lasts by how many run."""

    def __init__(self, costs: LinearCosts, num_slots: int) -> None:
        self._costs, self._num_slots = costs, num_slots
        self._running: list[Decoding] = []
        self._waiting: deque[Decoding] = deque()
        self.busy_ns = 0

    def start(self, sequence: Decoding) -> Iterator[Effect]:
        self._waiting.append(sequence)
        if not self._running:
            yield from self._step(sequence.begin_ns)

    def _step(self, now_ns: int) -> Iterator[Effect]:
        while self._waiting and len(self._running) < self._num_slots:
            self._running.append(self._waiting.popleft())
        if self._running:
            step_ns = round(self._costs.step_s(len(self._running)) * NS_PER_S)
            self.busy_ns += step_ns
            yield now_ns + step_ns, self._stepped

    def _stepped(self, now_ns: int) -> Iterator[Effect]:
        for sequence in self._running:
            sequence.num_left -= 1
            if sequence.num_left + 1 == sequence.num_tokens:
                yield now_ns, ev.FirstToken(*sequence.leg)
            if not sequence.num_left:
                seconds = (now_ns - sequence.begin_ns) / NS_PER_S
                tpot_s = seconds / sequence.num_tokens
                yield now_ns, ev.DecodeFinished(*sequence.leg, seconds, tpot_s)
        self._running = [sequence for sequence in self._running if sequence.num_left]
        yield from self._step(now_ns)


def _joined(name: str, num_slots: int) -> ev.WorkerJoined:
    beside = (WorkerId(f"e{name[1:]}"),) if name[0] == "l" else ()
    return ev.WorkerJoined(WorkerId(name), STAGES[name[0]], num_slots, beside=beside)


class Simulation:
    """``workers``: names as in ``e0``, ``p0``, ``d0``; ``l0`` prefills beside ``e0``."""

    def __init__(
        self, core: Core, costs: LinearCosts, workers: Sequence[str], num_slots: int = 256
    ) -> None:
        self._core, self._costs = core, costs
        self._servers = {WorkerId(name): Server() for name in workers if name[0] != "d"}
        self._decoders = {
            WorkerId(name): Decoder(costs, num_slots) for name in workers if name[0] == "d"
        }
        self._requests: dict[RequestId, Request] = {}
        self._first_s: dict[RequestId, float] = {}
        self._run = Run()
        self._coming: dict[RequestId, set[BatchId]] = {}
        self._deferred: dict[RequestId, list[tuple[int, ev.StartPrefill]]] = {}
        """Prefills that wait for embeddings, and since when."""
        core.step([_joined(name, num_slots) for name in workers], 0)

    def run(self, requests: Iterable[Request]) -> Run:
        """Until every request has ended."""
        number = count()
        heap: list[tuple[int, int, ev.Event | Callable[[int], Iterable[Effect]]]] = []

        def push(effects: Iterable[Effect]) -> None:
            for at_ns, what in effects:
                heapq.heappush(heap, (at_ns, next(number), what))

        for index, request in enumerate(requests):
            request_id = RequestId(f"r{index}")
            self._requests[request_id] = request
            kinds = (Modality.IMAGE,) * len(request.items)
            push([(round(request.at_s * NS_PER_S), ev.RequestReceived(request_id, 1, kinds))])
        while True:
            deadline_ns = self._core.next_deadline()
            times = [heap[0][0]] if heap else []
            times += [deadline_ns] if deadline_ns is not None else []
            if not times:
                break
            now_ns = min(times)
            told: list[ev.Event] = []
            while heap and heap[0][0] == now_ns:
                _, _, what = heapq.heappop(heap)
                if callable(what):
                    push(what(now_ns))
                    continue
                told.append(what)
                if isinstance(what, ev.FirstToken):
                    self._first_s[what.request_id] = now_ns / NS_PER_S
            for action in self._core.step(told, now_ns):
                push(self._perform(action, now_ns))
        self._run.end_s = now_ns / NS_PER_S
        busy_ns = {name: server.busy_ns for name, server in self._servers.items()}
        busy_ns |= {name: decoder.busy_ns for name, decoder in self._decoders.items()}
        self._run.busy_s = {name: each / NS_PER_S for name, each in busy_ns.items()}
        return self._run

    def _perform(self, action: ev.Action, now_ns: int) -> Iterator[Effect]:
        match action:
            case ev.Prepare():
                yield now_ns, ev.Prepared(action.request_id, self._shape(action.request_id))
            case ev.StartEncode():
                self._run.batches.append((now_ns, action))
                tokens = sum(entry.item.num_tokens for entry in action.items)
                service_s = self._costs.encode_s(len(action.items), tokens)
                done_ns = self._servers[action.worker_id].start(now_ns, service_s)
                for entry in action.items:
                    for waiter in entry.waiters:
                        self._coming.setdefault(waiter.request_id, set()).add(action.batch_id)
                yield done_ns, partial(self._encoded, action)
            case ev.StartPrefill() if self._coming.get(action.request_id):
                self._deferred.setdefault(action.request_id, []).append((now_ns, action))
            case ev.StartPrefill():
                yield self._prefill(action, now_ns, now_ns)
            case ev.StartDecode():
                num_tokens = self._requests[action.request_id].num_tokens
                leg = (action.request_id, action.leg, action.attempt)
                sequence = Decoding(leg, num_tokens, num_tokens, now_ns)
                yield from self._decoders[action.worker_id].start(sequence)
            case ev.Complete():
                self._record(action.request_id, now_ns, "completed")
            case ev.Reject():
                self._record(action.request_id, now_ns, "rejected")
            case ev.Fail():
                self._record(action.request_id, now_ns, "failed")
            case _:
                pass

    def _encoded(self, batch: ev.StartEncode, now_ns: int) -> Iterator[Effect]:
        yield now_ns, ev.EncodeFinished(batch.batch_id)
        for entry in batch.items:
            for waiter in entry.waiters:
                coming = self._coming.get(waiter.request_id, set())
                coming.discard(batch.batch_id)
                if not coming:
                    self._coming.pop(waiter.request_id, None)
                    for since_ns, action in self._deferred.pop(waiter.request_id, ()):
                        yield self._prefill(action, since_ns, now_ns)

    def _prefill(self, action: ev.StartPrefill, since_ns: int, now_ns: int) -> Effect:
        """``since_ns``: when it was asked for; it has its embeddings now."""
        request = self._requests[action.request_id]
        service_s = self._costs.prefill_s(request.num_prompt_tokens)
        done_ns = self._servers[action.worker_id].start(now_ns, service_s)
        leg = (action.request_id, action.leg, action.attempt)
        wait_s = (now_ns - since_ns) / NS_PER_S
        return done_ns, ev.PrefillFinished(*leg, request.num_tokens <= 1, wait_s)

    def _record(self, request_id: RequestId, now_ns: int, outcome: Outcome) -> None:
        request, end_s = self._requests[request_id], now_ns / NS_PER_S
        done = outcome == "completed"
        first_s = self._first_s.pop(request_id, end_s) if done else None
        num_tokens = request.num_tokens if done else 0
        at_s = min(request.at_s, end_s)  # it was rounded to nanoseconds
        self._run.records.append(Record(at_s, at_s, first_s, end_s, num_tokens, outcome))

    def _shape(self, request_id: RequestId) -> Shape:
        request = self._requests[request_id]
        items = tuple(
            MediaItem(f"{request_id}.{index}", Modality.IMAGE, tokens)
            for index, tokens in enumerate(request.items)
        )
        return Shape(request.num_prompt_tokens, request.num_tokens, items)
