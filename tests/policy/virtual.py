"""Engines in virtual time: a heap of events, a core, and servers that take as long as is said.

A prefill begins when its embeddings have come; what an encoder has already is sent at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.policy.knobs import Knobs
from easerve.types import NS_PER_S, BatchId, RequestId, Shape, WorkerId

from .invariants import Checked
from .model import destinations
from .scenario import MAX_NEW_TOKENS

ADMISSION = Admission(max_requests=10_000, max_bytes=1 << 40)
LIMITS = Limits(request_timeout_ns=10**6 * NS_PER_S)
PREPARE_S = SEND_S = 0.001


@dataclass(frozen=True)
class Arrival:
    at_ns: int
    shape: Shape


def gamma_gaps_s(random: Random, rate_per_s: float, cv: float = 1.0) -> Iterator[float]:
    shape = 1 / cv**2
    while True:
        yield random.gammavariate(shape, 1 / (shape * rate_per_s))


class World:
    """``run`` serves all arrivals; ``started`` is what the encoders were asked for, and when."""

    def __init__(self, knobs: Knobs, costs: LinearCosts, engines: list[ev.WorkerJoined]) -> None:
        self.costs = costs
        self.core = Core(knobs, ADMISSION, costs, LIMITS)
        self.model = Checked(self.core, LIMITS)
        self.started: list[tuple[int, ev.StartEncode]] = []
        self.num_steps = 0
        self._shapes: dict[RequestId, Shape] = {}
        self._batches: dict[BatchId, ev.StartEncode] = {}
        self._waiting: list[tuple[int, ev.StartPrefill]] = []
        """Prefills that wait for embeddings, and since when."""
        self._numbers = count()
        self._heap: list[tuple[int, int, ev.Event]] = []
        self._free_ns: dict[WorkerId, list[int]] = {}
        """When each server of an engine is free: decode has one for each slot."""
        for engine in engines:
            num_servers = engine.num_slots if engine.worker_id.startswith("d") else 1
            self._free_ns[engine.worker_id] = [0] * num_servers
            self._at(0, engine)

    def run(self, arrivals: list[Arrival]) -> None:
        for number, arrival in enumerate(arrivals):
            request_id = RequestId(f"r{number:04}")
            self._shapes[request_id] = arrival.shape
            modalities = tuple(item.modality for item in arrival.shape.items)
            self._at(arrival.at_ns, ev.RequestReceived(request_id, 1, modalities))
        while self._heap or self.core.num_open:
            deadline_ns = self.core.next_deadline()
            times = [self._heap[0][0]] if self._heap else []
            self._step(min(times + ([] if deadline_ns is None else [deadline_ns])))

    def _step(self, now_ns: int) -> None:
        events = []
        while self._heap and self._heap[0][0] <= now_ns:
            events.append(heappop(self._heap)[2])
        actions = self.core.step(events, now_ns)
        for event in events:
            if isinstance(event, ev.Prepared):
                self.model.to_prepare.discard(event.request_id)
            if isinstance(event, ev.EncodeFinished):
                del self._batches[event.batch_id]
        self.model.step(events, actions, now_ns)
        for action in actions:
            self._do(action, now_ns)
        for since_ns, prefill in self._waiting:
            if not self._is_coming(prefill):
                self._prefill(prefill, since_ns, now_ns)
        self._waiting = [waiting for waiting in self._waiting if self._is_coming(waiting[1])]
        self.num_steps += 1

    def _at(self, at_ns: int, event: ev.Event) -> None:
        heappush(self._heap, (at_ns, next(self._numbers), event))

    def _serve(self, worker_id: WorkerId, seconds: float, now_ns: int, answer: ev.Event) -> None:
        free_ns = self._free_ns[worker_id]
        ends_ns = max(now_ns, heappop(free_ns)) + int(seconds * NS_PER_S)
        heappush(free_ns, ends_ns)
        self._at(ends_ns, answer)

    def _do(self, action: ev.Action, now_ns: int) -> None:
        match action:
            case ev.Prepare(request_id):
                prepared = ev.Prepared(request_id, self._shapes[request_id])
                self._at(now_ns + int(PREPARE_S * NS_PER_S), prepared)
            case ev.StartEncode(batch_id, worker_id, items):
                self.started.append((now_ns, action))
                self._batches[batch_id] = action
                tokens = sum(entry.item.num_tokens for entry in items)
                finished = ev.EncodeFinished(batch_id)
                if action.forward:
                    seconds = self.costs.encode_s(len(items), tokens)
                    self._serve(worker_id, seconds, now_ns, finished)
                else:
                    self._at(now_ns + int(SEND_S * NS_PER_S), finished)
            case ev.StartPrefill():
                assert bool(action.coming) == self._is_coming(action)
                self._waiting.append((now_ns, action))
            case ev.StartDecode(request_id, leg, attempt, worker_id):
                tpot_s = self.costs.step_s(1)
                seconds = MAX_NEW_TOKENS * tpot_s
                decoded = ev.DecodeFinished(request_id, leg, attempt, seconds, tpot_s)
                self._serve(worker_id, seconds, now_ns, decoded)

    def _prefill(self, action: ev.StartPrefill, since_ns: int, now_ns: int) -> None:
        seconds = self.costs.prefill_s(self._shapes[action.request_id].num_prompt_tokens)
        wait_s = (now_ns - since_ns) / NS_PER_S
        finished = ev.PrefillFinished(action.request_id, action.leg, action.attempt, wait_s=wait_s)
        self._serve(action.worker_id, seconds, now_ns, finished)

    def _is_coming(self, prefill: ev.StartPrefill) -> bool:
        items = self._shapes[prefill.request_id].items
        return any(
            entry.item in items and prefill.worker_id in destinations(entry)
            for batch in self._batches.values()
            for entry in batch.items
        )
