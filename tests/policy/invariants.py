"""What must hold of a core, whatever it is told; asserted at each step of a ``Model``."""

from copy import deepcopy
from itertools import chain

from easerve.policy import events as ev
from easerve.policy.batching import FULL, HARD_TIMEOUT_NS
from easerve.policy.encoding import Encoding, Entry
from easerve.policy.knobs import Order
from easerve.policy.lifecycle import RequestState
from easerve.types import Reason, Stage, WorkerId

from .model import Asked, Model, num_tokens_of
from .scenario import MAX_NEW_TOKENS, NUM_PROMPT_TOKENS


class Checked(Model):
    def step(self, events: list[ev.Event], actions: list[ev.Action], now_ns: int) -> None:
        super().step(events, actions, now_ns)
        assert all(request.num_prepares for request in self.requests.values())
        assert self.core.num_open == len(self.requests)
        self.check_work()
        self.check_numbers()
        self.check_queue(self.core._encoding)
        self.check_holders(self.core._encoding)
        if self.serves(*Stage):
            self.check_progress()
            self.check_waits()
        self.check_deadline()

    # Of an action -----------------------------------------------------------------------------

    def fail(self, request: Asked, reason: Reason) -> None:
        """A request does not pay for another's item, nor twice for one loss."""
        if reason is Reason.ENCODE_FAILED:
            own_fault = not request.items or any(i.key in self.at_fault for i in request.items)
        elif reason is Reason.WORKER_LOST:
            own_fault = bool(request.started) and not request.received.can_resume
        else:
            return
        assert own_fault or request.num_failures > self.limits.max_retries

    def start_encode(self, action: ev.StartEncode) -> None:
        knobs, decision = self.core.knobs, action.decision
        assert decision.wait_s >= decision.held_s >= 0
        assert decision.num_left >= 0
        assert bool(decision.held_s) == bool(decision.held_by)
        assert len({entry.item.modality for entry in action.items}) == 1
        if knobs.when == "none":
            assert len(action.items) == 1
        else:
            self.check_size(action)
            self.check_turn(action)
        super().start_encode(action)

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
        num_ahead = sum(other.worker_id == batch.worker_id for other in self.batches.values())
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
        held: dict[WorkerId, dict[object, int]] = {id_: {} for id_ in self.workers}
        for batch_id, batch in self.batches.items():
            held[batch.worker_id][batch_id] = num_tokens_of(batch)
        for (request_id, leg, _), work in self.legs.items():
            decodes = isinstance(work, ev.StartDecode)
            tokens = NUM_PROMPT_TOKENS + (MAX_NEW_TOKENS if decodes else 0)
            held[work.worker_id][request_id, leg] = tokens
        running = {worker_id: set(work) for worker_id, work in held.items()}
        for request_id, request in self.requests.items():
            if request.destination is not None:
                held[request.destination][request_id] = NUM_PROMPT_TOKENS
        assert {worker.worker_id: worker.work for worker in self.core.pool} == held
        for worker in self.core.pool:
            assert worker.backlog_tokens == sum(worker.work.values())
            assert set(worker.running) == running[worker.worker_id]

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

    def check_queue(self, encoding: Encoding) -> None:
        entries = list(chain(*encoding._queues.values()))
        assert len(entries) == len(self.queued) == self.core.queue_lengths()[Stage.ENCODE]
        assert {entry.item.key for entry in entries} == self.queued
        assert all(entry.since_ns <= self.since_ns[entry.item.key] for entry in entries)
        for kind, queue in encoding._queues.items():
            assert queue == sorted(queue, key=encoding._place)
            assert {entry.kind for entry in queue} == {kind}

    def check_holders(self, encoding: Encoding) -> None:
        holders = encoding._holders
        assert holders.keys().isdisjoint(encoding._entries), "encoded though it is there"
        for key, request_ids in holders.items():
            assert request_ids
            assert all(key in self.requests[request_id].keys_had for request_id in request_ids)

    def check_progress(self) -> None:
        """Every request waits for something that will be."""
        for request_id, request in self.requests.items():
            if request.items is None:
                assert request_id in self.to_prepare
            elif request.generates:
                for leg in range(request.received.num_choices):
                    attempt = request.attempts.get(leg, -1)
                    answered = request.answered.get(leg, -2) == attempt
                    waits = request_id in self.core._flow.gate._waiting
                    assert answered or waits or (request_id, leg, attempt) in self.legs

    def check_waits(self) -> None:
        """What may wait while engines of every stage are there."""
        if self.requests and not self.is_under_way:
            assert self.queued, "nothing is waited for"
            wake_ns = self.core._batcher.wake_ns
            assert wake_ns is not None, "nobody will ask again"
            assert wake_ns <= self.now_ns + HARD_TIMEOUT_NS
        if self.core.knobs.when == "none":
            assert not self.queued
        elif self.has_idle_encoder and self.has_credit_for_all:
            self.check_waits_beside_an_idle_encoder()

    @property
    def has_idle_encoder(self) -> bool:
        busy = {batch.worker_id for batch in self.batches.values()}
        return any(w.stage is Stage.ENCODE and id_ not in busy for id_, w in self.workers.items())

    @property
    def has_credit_for_all(self) -> bool:
        core = self.core
        return deepcopy(core._flow).opening(core.pool, core._now_ns).allowed is None

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
        kept = [encoding._entries, encoding._queues, encoding._batches, encoding._holders]
        assert not any(kept)
        assert not any([queues.legs, queues.preparations])
        assert not any(worker.work for worker in self.core.pool)
        assert self.core._batcher.wake_ns is self.core._flow.wake_ns is None
