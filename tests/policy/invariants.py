"""What must hold of a core, whatever it is told; asserted at each step of a ``Model``."""

from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from math import inf

import pytest

from easerve.policy import events as ev
from easerve.policy.adapt import ADAPTED
from easerve.policy.batching import FULL, HARD_TIMEOUT_NS
from easerve.policy.core import Core, Limits
from easerve.policy.directory import Directory
from easerve.policy.encoding import Encoding, Entry
from easerve.policy.knobs import Knobs, Order
from easerve.policy.lifecycle import RequestState
from easerve.policy.offload import ONLY, SPILL, Candidate, Load, Offload, Placement
from easerve.policy.partition import ALL, HALF, SHARED, Demand, Devices, Surface
from easerve.policy.share import ONE
from easerve.types import BatchId, Reason, RequestId, Side, Stage, WorkerId

from .model import Asked, Model, keys_of, num_tokens_of


class Watched(Offload):
    """Remembers what it has drawn, batch by batch."""

    def __init__(self, knobs: Knobs) -> None:
        super().__init__(knobs)
        self.batches: list[list[tuple[Candidate, Placement]]] = []

    def place(self, candidates: Sequence[Candidate], load: Load, now_ns: int) -> list[Placement]:
        placements = super().place(candidates, load, now_ns)
        self.batches.append(list(zip(candidates, placements, strict=True)))
        return placements


class Share:
    """What the remote side is behind its share, in billionths, by all that was drawn."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.deficit = self.largest = 0

    def retune(self, knobs: Knobs) -> None:
        if (knobs.where, knobs.band_kappa) != (self.knobs.where, self.knobs.band_kappa):
            self.deficit = 0
        self.knobs = knobs

    def check(self, batch: Sequence[tuple[Candidate, Placement]], in_force: Knobs) -> None:
        trims = in_force.share_trim and not in_force.adapt
        for candidate, placement in batch:
            assert round(placement.deficit_before * ONE) == self.deficit
            assert trims or placement.share == pytest.approx(in_force.remote_share, abs=1e-9)
            assert placement.side in candidate.sides
            if placement.reason not in (ONLY, SPILL):
                by_tokens = self.knobs.where == "deficit-tokens"
                weight = candidate.num_tokens if by_tokens else 1
                self.largest = max(self.largest, candidate.num_tokens)
                remote = placement.side is Side.REMOTE
                self.deficit += weight * (round(placement.share * ONE) - ONE * remote)
            assert round(placement.deficit_after * ONE) == self.deficit
        bounds = {"deficit": 0.5, "deficit-tokens": self.largest / 2, "band": self.knobs.band_kappa}
        assert abs(self.deficit) <= ONE * bounds.get(self.knobs.where, inf), "off its share"


def fewest(surface: Surface, target_s: float, num_tokens: int) -> tuple[int, int, bool]:
    """Of the rows up to the one for so many tokens: its batch, the most units, if it is met."""
    fits = [row for row in surface.rows if row[0] * surface.item_tokens >= num_tokens]
    batch, latencies = (fits or surface.rows[-1:])[0]
    units = [
        min(
            (k for k, _ in row if all(s <= target_s for other, s in row if other >= k)),
            default=max(k for k, _ in row),
        )
        for each, row in surface.rows
        if each <= batch
    ]
    return batch, max(units), max(latencies)[1] <= target_s


def demanded(devices: Devices | None, knobs: Knobs, num_tokens: int) -> Demand:
    """What a forward is to get at an encoder of so many tokens, found the long way."""
    if devices is None or knobs.how == "none":
        return SHARED
    if knobs.how == "gate":
        return Demand(ALL, False, "gate")
    if knobs.how == "static":
        return Demand(HALF if knobs.encode_units is None else knobs.encode_units, True, "static")
    if devices.surface is None:
        return Demand(HALF, False, "no profile")
    batch, units, met = fewest(devices.surface, knobs.encode_target_s, num_tokens)
    return Demand(units, False, f"{'table' if met else 'over target'}, batch {batch}")


class Checked(Model):
    def __init__(self, core: Core, limits: Limits, devices: Devices | None = None) -> None:
        super().__init__(core, limits)
        self.devices = devices
        self.standing: dict[WorkerId, Demand] = {}
        """What each encoder was told last; nothing that it was told before it joined."""
        self.share = Share(core.knobs)
        self.configured = self.in_force = core.knobs
        self.watched = core._placing.offload = Watched(core.knobs)

    def step(self, events: list[ev.Event], actions: list[ev.Action], now_ns: int) -> None:
        self.joining: set[WorkerId] = set()
        self.explained: set[str] = set()
        """Knobs that may have changed in this step."""
        super().step(events, actions, now_ns)
        for batch in self.watched.batches:
            self.share.check(batch, self.core.knobs)
        self.watched.batches.clear()
        assert all(request.num_prepares for request in self.requests.values())
        assert self.core.num_open == len(self.requests)
        self.check_work()
        self.check_numbers()
        self.check_queue(self.core._encoding)
        self.check_pending(self.core._encoding)
        self.check_directory(self.core._directory)
        if self.serves(*Stage):
            self.check_progress()
            self.check_waits()
        self.check_deadline()
        self.check_standing()
        self.check_adapted()

    def hear(self, event: ev.Event) -> None:
        super().hear(event)
        if isinstance(event, ev.KnobsChanged):
            self.share.retune(event.knobs)
            self.configured = event.knobs
            self.explained.update(ADAPTED)
        elif isinstance(event, ev.WorkerJoined | ev.WorkerLost):
            self.standing.pop(event.worker_id, None)
            if isinstance(event, ev.WorkerJoined) and event.stage is Stage.ENCODE:
                self.standing[event.worker_id] = SHARED
                self.joining.add(event.worker_id)

    # Of an action -----------------------------------------------------------------------------

    def fail(self, request: Asked, reason: Reason) -> None:
        """A request does not pay for another's item, nor twice for one loss."""
        if reason is Reason.ENCODE_FAILED:
            own_fault = request.at_fault
        elif reason is Reason.WORKER_LOST:
            own_fault = bool(request.started) and not request.received.can_resume
        else:
            return
        assert own_fault or request.num_failures > self.limits.max_retries

    def do(self, action: ev.Action) -> None:
        if isinstance(action, ev.Divide):
            self.divide(action)
        elif isinstance(action, ev.Retuned):
            assert action.after != action.before
            self.explained.add(action.knob)
        super().do(action)

    def divide(self, action: ev.Divide) -> None:
        """Nobody is told twice; one that joins and is lost in one step is told in vain."""
        if action.worker_id in self.standing:
            told = self.standing[action.worker_id]
            assert action.demand != told or action.worker_id in self.joining, "told before"
            self.standing[action.worker_id] = action.demand

    def start_encode(self, action: ev.StartEncode) -> None:
        decision = action.decision
        assert decision.wait_s >= decision.held_s >= 0
        assert decision.num_left >= 0
        assert bool(decision.held_s) == bool(decision.held_by)
        if not action.forward:
            self.check_sent(action)
            assert action.demand == self.stands
        else:
            there = [each for each in self.batches.values() if each.forward]
            there = [action, *(each for each in there if each.worker_id == action.worker_id)]
            num_tokens = sum(map(num_tokens_of, there))
            assert action.demand == demanded(self.devices, self.core.knobs, num_tokens)
            assert len({entry.item.modality for entry in action.items}) == 1
            if self.core.knobs.when == "none":
                assert len(action.items) == 1
            else:
                self.check_size(action)
                self.check_turn(action)
            self.check_needed(action)
        super().start_encode(action)

    def check_sent(self, batch: ev.StartEncode) -> None:
        """To one request, of what the encoder has and the destination has not."""
        assert keys_of(batch) <= self.directory[batch.worker_id]
        ((request_id, destination),) = {
            (waiter.request_id, waiter.destination)
            for entry in batch.items
            for waiter in entry.waiters
        }
        assert batch.worker_id not in self.requests[request_id].failed_by
        assert keys_of(batch).isdisjoint(self.directory.get(destination, set()))

    def check_needed(self, batch: ev.StartEncode) -> None:
        """Encoders that have it have failed somebody; and nobody is left out who waited."""
        for entry in batch.items:
            key, waiters = entry.item.key, {waiter.request_id for waiter in entry.waiters}
            failed_by = set().union(*(self.requests[id_].failed_by for id_ in waiters))
            holders = {id_ for id_, keys in self.directory.items() if key in keys}
            encoders = {id_ for id_ in holders if self.workers[id_].stage is Stage.ENCODE}
            assert encoders <= failed_by | self.blamed.get(key, set()), "an encoder has it"
            waited = {id_ for id_, each in self.requests.items() if key in each.wanted}
            assert key in self.finished or waited <= waiters

    def check_size(self, batch: ev.StartEncode) -> None:
        knobs = self.core.knobs
        assert not knobs.group_by_size or len({e.item.num_tokens for e in batch.items}) == 1
        assert len(batch.items) <= knobs.max_batch_items
        max_tokens = self.workers[batch.worker_id].max_batch_tokens
        assert len(batch.items) == 1 or num_tokens_of(batch) <= max_tokens

    def check_turn(self, batch: ev.StartEncode) -> None:
        """Only a full batch runs ahead, and none overtakes an item that has waited too long."""
        knobs = self.core.knobs
        entries = self.core._encoding._batches[batch.batch_id].entries
        ahead = [b for b in self.batches.values() if b.forward and b.worker_id == batch.worker_id]
        num_ahead = len(ahead)
        assert num_ahead <= knobs.run_ahead
        if num_ahead:
            assert batch.decision.reason == FULL
            assert not any(entry.suspects for entry in entries)
        if knobs.order is Order.FIFO and not (knobs.flow or knobs.spread):
            first = min(entry.number for entry in entries)
            patience_ns = 0 if knobs.when == "greedy" else HARD_TIMEOUT_NS
            for left in chain(*self.core._encoding._queues.values()):
                has_patience = self.now_ns < left.since_ns + patience_ns
                assert left.number > first or has_patience, "overtaken"

    # Of a state -------------------------------------------------------------------------------

    def check_work(self) -> None:
        """Engines hold what was started there, and what is on its way."""
        held: dict[str, dict[BatchId | tuple[RequestId, int], int]] = {w: {} for w in self.workers}
        for batch_id, batch in self.batches.items():
            if batch.forward:
                held[batch.worker_id][batch_id] = num_tokens_of(batch)
        for (id_, leg, _), work in self.legs.items():
            shape = self.core._requests[id_].shape
            decodes = isinstance(work, ev.StartDecode)
            tokens = shape.num_prompt_tokens + (shape.max_new_tokens if decodes else 0)
            held[work.worker_id][id_, leg] = tokens
        waiting = {handle[:2] for handle in self.waiting}
        for worker in self.core.pool:
            assert worker.backlog_tokens == sum(worker.work.values())
            on_its_way = {key: num for key, num in worker.work.items() if isinstance(key, str)}
            assert worker.work == held[worker.worker_id] | on_its_way
            assert set(worker.running) == held[worker.worker_id].keys() - waiting
            for request_id, num_tokens in on_its_way.items():
                request = self.core._requests[RequestId(request_id)]
                assert request.destination == worker.worker_id
                assert request.needs_prefill
                assert num_tokens == request.shape.num_prompt_tokens
        assert {worker.worker_id for worker in self.core.pool} == held.keys()

    def check_numbers(self) -> None:
        core, requests = self.core, self.core._requests.values()
        preparing = [r for r in requests if r.state is RequestState.PREPARING]
        assert core._flow._num_preparing == sum(request.num_media for request in preparing)
        assert core._flow.gate.num_passed == sum(r.num_choices for r in requests if r.passed)
        assert core._flow._num_waiting == sum(r.num_choices for r in requests if not r.passed)
        assert core._num_bytes == sum(request.num_bytes for request in requests)
        before = [r for r in requests if not (r.passed or r.state is RequestState.PREPARING)]
        assert sorted(core._flow.gate._waiting) == sorted(request.request_id for request in before)
        assert core._flow.gate._num_waiting == sum(request.num_choices for request in before)
        assert not any(r.passed for r in preparing)
        assert core._flow.times.prefill_s >= 0
        for request_id, asked in self.requests.items():
            num_retries = self.limits.max_retries - core._requests[request_id].retries_left
            assert num_retries <= asked.num_failures, "a failure was paid for twice"

    def check_queue(self, encoding: Encoding) -> None:
        entries = list(chain(*encoding._queues.values()))
        assert len(entries) == len(self.queued) == self.core.queue_lengths()[Stage.ENCODE]
        assert {entry.item.key for entry in entries} == self.queued
        assert all(entry.since_ns <= self.since_ns[entry.item.key] for entry in entries)
        for kind, queue in encoding._queues.items():
            assert queue == sorted(queue, key=encoding._place)
            assert {entry.kind for entry in queue} == {kind}

    def check_pending(self, encoding: Encoding) -> None:
        """What holds a request back is queued or under way, and what is queued holds back."""
        for request in self.core._requests.values():
            assert (request.state is RequestState.ENCODING) == bool(request.pending)
            for index in request.pending:
                entry = encoding._entries[request.items[index].key]
                assert (request, index) in entry.waiters
        for entry in encoding._entries.values():
            for request, index in entry.waiters:
                assert self.core._requests[request.request_id] is request
                assert request.items[index] == entry.item
                assert entry.batch_id is not None or index in request.pending

    def check_directory(self, directory: Directory) -> None:
        there = {worker_id: keys for worker_id, keys in self.directory.items() if keys}
        assert {id_: set(keys) for id_, keys in directory._keys.items() if keys} == there
        pairs = {(key, id_) for key, holders in directory._holders.items() for id_ in holders}
        assert pairs == {(key, id_) for id_, keys in there.items() for key in keys}
        assert all(directory._holders.values())
        assert directory._keys.keys() <= self.workers.keys()

    def check_progress(self) -> None:
        """Every request waits for something that will be."""
        for request_id, request in self.requests.items():
            if request.shape is None:
                assert request_id in self.to_prepare
            elif request.generates:
                for leg in range(request.received.num_choices):
                    attempt = request.attempts.get(leg, -1)
                    answered = request.answered.get(leg, -2) == attempt
                    waits = request_id in self.core._flow.gate._waiting
                    assert answered or waits or (request_id, leg, attempt) in self.legs

        for handle in self.waiting:
            request, worker_id = self.requests[handle[0]], self.legs[handle].worker_id
            if request.destination == worker_id:  # else the engine will miss them
                assert request.pending or self.awaited(handle[0], worker_id), "waits in vain"

    def check_waits(self) -> None:
        """What may wait while engines of every stage are there."""
        if self.requests and not self.is_under_way:
            assert self.queued, "nothing is waited for"
            wake_ns = self.core._batcher.wake_ns
            assert wake_ns is not None, "nobody will ask again"
            assert wake_ns <= self.now_ns + HARD_TIMEOUT_NS
        if self.core.knobs.when == "none":
            assert not self.queued
        elif self.queued and self.has_idle_encoder and self.has_credit_for_all:
            self.check_waits_beside_an_idle_encoder()

    @property
    def has_idle_encoder(self) -> bool:
        busy = {batch.worker_id for batch in self.batches.values() if batch.forward}
        return any(w.stage is Stage.ENCODE and id_ not in busy for id_, w in self.workers.items())

    @property
    def has_credit_for_all(self) -> bool:
        core = self.core
        _, backlog_s = core._placing.least_and_most_s(core._now_ns)
        return deepcopy(core._flow).opening(core.pool, backlog_s, core._now_ns).allowed is None

    def check_waits_beside_an_idle_encoder(self) -> None:
        knobs = self.core.knobs
        if self.draining or knobs.when == "greedy":
            assert not self.queued
        encoders = [w for w in self.workers.values() if w.stage is Stage.ENCODE]
        max_tokens = min(worker.max_batch_tokens for worker in encoders)
        for queue in self.core._encoding._queues.values():
            assert len(queue) < knobs.max_batch_items, "a full batch waits"
            assert sum(entry.item.num_tokens for entry in queue) <= max_tokens, "a full batch waits"
            for entry in queue:
                self.check_wait(entry)

    def check_wait(self, entry: Entry) -> None:
        assert self.now_ns < entry.since_ns + HARD_TIMEOUT_NS, "waits too long"
        assert not entry.suspects, "nobody will join it"

    @property
    def stands(self) -> Demand:
        demand = demanded(self.devices, self.core.knobs, 0)
        return demand if demand.standing else SHARED

    def check_standing(self) -> None:
        assert all(each == self.stands for each in self.standing.values()), "not told"

    def check_adapted(self) -> None:
        """Near what was configured, and never without a word."""
        before, self.in_force = self.in_force, self.core.knobs
        changed = {
            name for name in ADAPTED if getattr(before, name) != getattr(self.in_force, name)
        }
        assert changed <= self.explained
        away = abs(self.in_force.remote_share - self.configured.remote_share)
        assert away <= self.configured.adapt_share + 1e-9
        if not self.configured.adapt:
            assert self.in_force == self.configured

    def check_deadline(self) -> None:
        deadline_ns = self.core.next_deadline()
        if self.requests:
            assert deadline_ns is not None
            first_ns = min(request.deadline_ns for request in self.requests.values())
            assert self.now_ns < deadline_ns <= first_ns
        else:
            assert deadline_ns is None
            self.check_nothing_is_kept()

    def check_nothing_is_kept(self) -> None:
        encoding, queues = self.core._encoding, self.core._queues
        kept = [encoding._entries, encoding._queues, encoding._batches]
        assert not any(kept)
        assert not any([queues.legs, queues.preparations])
        assert not any(worker.work or worker.running for worker in self.core.pool)
        assert self.core._batcher.wake_ns is self.core._flow.wake_ns is None
