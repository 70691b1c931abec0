"""A driver that does anything a driver may do, and what must hold whatever it does."""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import cycle
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.batching import NoBatching
from easerve.policy.core import Core, Limits
from easerve.types import BatchId, Modality, Reason, RequestId, Stage, WorkerId

from .scenario import (
    D0,
    D1,
    E0,
    E1,
    MAX_NEW_TOKENS,
    NUM_ITEM_TOKENS,
    NUM_PROMPT_TOKENS,
    P0,
    P1,
    STAGES,
    Pairs,
    joined,
    shape,
)

ADMISSION = Admission(max_requests=4, max_bytes=16)
WORKERS = [E0, E1, P0, P1, D0, D1]
FAILURES = {"failed": True, "failed for good": False}
"""Outcome -> whether it may be tried again."""
OUTCOMES = st.sampled_from(["done", "done", "done", "first token", "missing", *FAILURES])

Handle = tuple[RequestId, int, int]
"""Request, leg, attempt."""


@dataclass
class Asked:
    """An open request, as its driver sees it."""

    received: ev.RequestReceived
    deadline_ns: int
    num_prepares: int = 0
    num_encodes: Counter[int] = field(default_factory=Counter)
    encoded: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    answered: dict[int, int] = field(default_factory=dict)
    """The attempt at each leg that gave its answer."""
    destination: WorkerId | None = None
    """Where embeddings are sent while no leg prefills them."""

    @property
    def num_items(self) -> int:
        return len(self.received.modalities)

    def needs(self, stage: Stage) -> bool:
        return stage is not Stage.ENCODE or self.num_items > 0

    @property
    def num_retries(self) -> int:
        """At least as many retries as this were needed for what was asked."""
        encodes = max(self.num_encodes.values(), default=1)
        return self.num_prepares - 1 + max([encodes - 1, *self.attempts.values()])


class Driver(RuleBasedStateMachine):
    @initialize(max_retries=st.integers(0, 3), pairs=st.booleans())
    def start(self, max_retries: int, pairs: bool) -> None:
        self.pairs = pairs
        self.limits = Limits(max_retries, request_timeout_ns=1000, worker_wait_ns=100)
        self.core = Core(Pairs() if pairs else NoBatching(), ADMISSION, LinearCosts(), self.limits)
        self.now_ns = 0
        self.inbox: list[ev.Event] = []

        self.workers: set[WorkerId] = set()
        self.requests: dict[RequestId, Asked] = {}  # the open ones
        self.ends: dict[RequestId, Reason | str] = {}
        self.to_prepare: set[RequestId] = set()
        self.batches: dict[BatchId, ev.StartEncode] = {}
        self.legs: dict[Handle, ev.StartPrefill | ev.StartDecode] = {}
        self.all_received: list[ev.RequestReceived] = []
        self.all_batches: list[BatchId] = []
        self.all_handles: list[Handle] = []
        self.decoded: set[Handle] = set()

        self.inbox += map(joined, WORKERS[::2])
        self.step()

    # What may happen --------------------------------------------------------------------------

    @precondition(lambda self: self.requests or len(self.workers) < len(WORKERS))
    @rule(worker_id=st.sampled_from(WORKERS), hold=st.booleans())
    def worker_joins(self, worker_id: WorkerId, hold: bool) -> None:
        self.post(joined(worker_id), hold)

    @precondition(lambda self: self.requests)
    @rule(worker_id=st.sampled_from(WORKERS), hold=st.booleans())
    def worker_is_lost(self, worker_id: WorkerId, hold: bool) -> None:
        self.post(ev.WorkerLost(worker_id), hold)

    @rule(
        num_items=st.integers(0, 3),
        num_choices=st.integers(1, 3),
        can_resume=st.booleans(),
        num_bytes=st.integers(1, 5),
        hold=st.booleans(),
    )
    def request_arrives(
        self, num_items: int, num_choices: int, can_resume: bool, num_bytes: int, hold: bool
    ) -> None:
        request_id = RequestId(f"r{len(self.all_received)}")
        modalities = (Modality.IMAGE,) * num_items
        event = ev.RequestReceived(request_id, num_bytes, modalities, num_choices, can_resume)
        self.all_received.append(event)
        self.post(event, hold)

    @precondition(lambda self: self.to_prepare)
    @rule(data=st.data(), outcome=OUTCOMES, hold=st.booleans())
    def preparation_ends(self, data: st.DataObject, outcome: str, hold: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.to_prepare)))
        self.answer_preparation(request_id, outcome, hold)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), outcome=OUTCOMES, hold=st.booleans())
    def batch_ends(self, data: st.DataObject, outcome: str, hold: bool) -> None:
        self.answer_batch(data.draw(st.sampled_from(sorted(self.batches))), outcome, hold)

    @precondition(lambda self: self.legs)
    @rule(data=st.data(), outcome=OUTCOMES, hold=st.booleans())
    def leg_gets_on(self, data: st.DataObject, outcome: str, hold: bool) -> None:
        handle = data.draw(st.sampled_from(sorted(self.legs)))
        prefills = isinstance(self.legs[handle], ev.StartPrefill)
        self.answer_leg(handle, prefills, outcome, hold)

    @precondition(lambda self: len(self.requests) >= 2)
    @rule(data=st.data(), hold=st.booleans())
    def client_cancels(self, data: st.DataObject, hold: bool) -> None:
        event = data.draw(st.sampled_from(self.all_received))
        self.post(ev.ClientCancelled(event.request_id), hold)

    @precondition(lambda self: self.all_handles)
    @rule(data=st.data(), prefills=st.booleans(), outcome=OUTCOMES, hold=st.booleans())
    def answer_about_any_leg(
        self, data: st.DataObject, prefills: bool, outcome: str, hold: bool
    ) -> None:
        retried = [handle[:2] for handle in self.legs if handle[2]]
        old = [h for h in self.all_handles if h[:2] in retried and h not in self.legs]
        handle = data.draw(st.sampled_from(old or self.all_handles))
        self.answer_leg(handle, prefills, outcome, hold)

    @precondition(lambda self: self.all_batches)
    @rule(data=st.data(), outcome=OUTCOMES, hold=st.booleans())
    def answer_about_any_batch(self, data: st.DataObject, outcome: str, hold: bool) -> None:
        self.answer_batch(data.draw(st.sampled_from(self.all_batches)), outcome, hold)

    @precondition(lambda self: self.all_received)
    @rule(data=st.data(), hold=st.booleans())
    def preparation_ends_again(self, data: st.DataObject, hold: bool) -> None:
        event = data.draw(st.sampled_from(self.all_received))
        if event.request_id not in self.to_prepare:
            self.post(self.prepared(event.request_id), hold)

    @precondition(lambda self: self.inbox or self.requests)
    @rule(time_ns=st.integers(0, 120), random=st.randoms(use_true_random=False))
    def time_passes(self, time_ns: int, random: Random) -> None:
        self.now_ns += time_ns
        self.step(random)

    @precondition(lambda self: (self.core.next_deadline() or 10**9) <= self.now_ns + 100)
    @rule()
    def deadline_comes(self) -> None:
        self.step_at_deadline()

    @precondition(lambda self: self.to_prepare or self.batches or self.legs)
    @rule(outcomes=st.lists(OUTCOMES, min_size=1))
    def everything_gets_on(self, outcomes: list[str]) -> None:
        outcome = cycle(outcomes)
        for request_id in sorted(self.to_prepare):
            self.answer_preparation(request_id, next(outcome))
        for batch_id in self.batches:
            self.answer_batch(batch_id, next(outcome))
        for handle, work in self.legs.items():
            self.answer_leg(handle, isinstance(work, ev.StartPrefill), next(outcome))
        self.step()

    @precondition(lambda self: len(self.requests) >= 3)
    @rule()
    def everything_is_lost(self) -> None:
        self.inbox += map(ev.WorkerLost, WORKERS)
        self.step()
        while self.core.next_deadline() is not None:
            self.step_at_deadline()
        assert not self.requests
        self.inbox += map(joined, WORKERS[::2])

    @precondition(lambda self: len(self.requests) >= 3)
    @rule()
    def everything_is_served(self) -> None:
        self.step()
        self.inbox += [joined(id_) for id_ in WORKERS if id_ not in self.workers]
        self.step()
        served = set(self.requests)
        while self.requests:
            if self.to_prepare or self.batches or self.legs:
                self.everything_gets_on(["done"])
            else:
                assert self.pairs, "nothing is asked for, and there is nothing to wait for"
                self.step_at_deadline()
        assert {self.ends[request_id] for request_id in served} <= {"complete", Reason.TIMED_OUT}

    # How it is told ---------------------------------------------------------------------------

    def prepared(self, request_id: RequestId) -> ev.Prepared:
        received = self.all_received[int(request_id[1:])]
        return ev.Prepared(request_id, shape(request_id, len(received.modalities)))

    def answer_preparation(self, request_id: RequestId, outcome: str, hold: bool = True) -> None:
        self.to_prepare.remove(request_id)
        if outcome in FAILURES:
            self.post(ev.PrepareFailed(request_id, FAILURES[outcome]), hold)
        else:
            self.post(self.prepared(request_id), hold)

    def answer_batch(self, batch_id: BatchId, outcome: str, hold: bool = True) -> None:
        if outcome in FAILURES:
            self.post(ev.EncodeFailed(batch_id, FAILURES[outcome]), hold)
        else:
            self.post(ev.EncodeFinished(batch_id), hold)

    def answer_leg(self, handle: Handle, prefills: bool, outcome: str, hold: bool = True) -> None:
        event: ev.Event
        match outcome, prefills:
            case "done", True:
                event = ev.PrefillFinished(*handle)
            case "done", False:
                event = ev.DecodeFinished(*handle)
            case "first token", True:
                event = ev.PrefillFinished(*handle, final=True)
            case "first token", False:
                event = ev.FirstToken(*handle)
            case "missing", _:
                event = ev.EmbeddingMissing(*handle)
            case _, True:
                event = ev.PrefillFailed(*handle, FAILURES[outcome])
            case _:
                event = ev.DecodeFailed(*handle, FAILURES[outcome])
        self.post(event, hold)

    def post(self, event: ev.Event, hold: bool = True) -> None:
        """``hold``: hand it over together with what comes next."""
        self.inbox.append(event)
        if not hold:
            self.step(Random(len(self.inbox)))

    def step_at_deadline(self) -> None:
        deadline_ns = self.core.next_deadline()
        assert deadline_ns is not None
        self.now_ns = max(self.now_ns, deadline_ns)
        self.step()

    def step(self, random: Random | None = None) -> None:
        events, self.inbox = self.inbox, []
        shuffled = list(events)
        (random or Random(0)).shuffle(shuffled)
        twin = deepcopy(self.core) if shuffled != events else None
        actions = self.core.step(events, self.now_ns)
        if twin is not None:
            assert twin.step(shuffled, self.now_ns) == actions, "the order of events matters"
            assert twin.next_deadline() == self.core.next_deadline()
        self.cancelled: set[RequestId] = set()
        for event in sorted(events, key=ev.sort_key):
            self.hear(event)
        for action in actions:
            self.do(action)
        told = {event.request_id for event in events if isinstance(event, ev.ClientCancelled)}
        assert self.cancelled <= told, "cancelled by nobody"
        assert told.isdisjoint(self.requests), "a cancelled request goes on"
        self.check()

    def check(self) -> None:
        assert all(request.num_prepares for request in self.requests.values())
        assert self.core.num_open == len(self.requests) <= ADMISSION.max_requests
        held: dict[WorkerId, dict[object, int]] = {id_: {} for id_ in self.workers}
        for batch_id, batch in self.batches.items():
            held[batch.worker_id][batch_id] = NUM_ITEM_TOKENS * len(batch.items)
        for (request_id, leg, _), work in self.legs.items():
            decodes = isinstance(work, ev.StartDecode)
            tokens = NUM_PROMPT_TOKENS + (MAX_NEW_TOKENS if decodes else 0)
            held[work.worker_id][request_id, leg] = tokens
        for request_id, request in self.requests.items():
            if request.destination is not None:
                held[request.destination][request_id] = NUM_PROMPT_TOKENS
        assert {worker.worker_id: worker.work for worker in self.core.pool} == held
        for worker in self.core.pool:
            assert worker.backlog_tokens == sum(worker.work.values())

        deadline_ns = self.core.next_deadline()
        if self.requests:
            first_ns = min(request.deadline_ns for request in self.requests.values())
            assert deadline_ns is not None
            assert self.now_ns < deadline_ns <= first_ns
        else:
            assert deadline_ns is None
            assert set(self.core.queue_lengths().values()) == {0}
            assert not any(worker.work for worker in self.core.pool)
            assert not self.core._batches
            assert not self.core._num_bytes

    # What it makes of work under way ----------------------------------------------------------

    def hear(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerJoined():
                self.drop_work(event.worker_id)
                self.workers.add(event.worker_id)
            case ev.WorkerLost():
                self.drop_work(event.worker_id)
                self.workers.discard(event.worker_id)
            case ev.RequestReceived():
                self.requests[event.request_id] = Asked(
                    event, self.now_ns + self.limits.request_timeout_ns
                )
            case ev.EncodeFinished() | ev.EncodeFailed():
                batch = self.batches.pop(event.batch_id, None)
                for entry in batch.items if batch else ():
                    if entry.request_id in self.requests and isinstance(event, ev.EncodeFinished):
                        self.requests[entry.request_id].encoded.add(entry.index)
            case ev.FirstToken() | ev.DecodeFinished() | ev.DecodeFailed():
                self.hear_of_leg(event, ev.StartDecode)
            case ev.PrefillFinished() | ev.PrefillFailed() | ev.EmbeddingMissing():
                self.hear_of_leg(event, ev.StartPrefill)
            case _:
                pass

    def hear_of_leg(
        self,
        event: ev.FirstToken
        | ev.DecodeFinished
        | ev.DecodeFailed
        | ev.PrefillFinished
        | ev.PrefillFailed
        | ev.EmbeddingMissing,
        kind: type[ev.StartPrefill | ev.StartDecode],
    ) -> None:
        handle = event.request_id, event.leg, event.attempt
        work = self.legs.get(handle)
        if not isinstance(work, kind):
            return
        request = self.requests[event.request_id]
        if isinstance(event, ev.FirstToken):
            request.started.add(event.leg)
            return
        del self.legs[handle]
        if isinstance(event, ev.DecodeFinished) or (
            isinstance(event, ev.PrefillFinished) and event.final
        ):
            request.answered[event.leg] = event.attempt
        if isinstance(event, ev.PrefillFailed) and request.destination == work.worker_id:
            request.destination = None

    def drop_work(self, worker_id: WorkerId) -> None:
        for batch_id in [id_ for id_, b in self.batches.items() if b.worker_id == worker_id]:
            del self.batches[batch_id]
        for handle in [handle for handle, w in self.legs.items() if w.worker_id == worker_id]:
            del self.legs[handle]
        for request in self.requests.values():
            if request.destination == worker_id:
                request.destination = None

    # What it may be asked to do ---------------------------------------------------------------

    def do(self, action: ev.Action) -> None:
        match action:
            case ev.Prepare():
                self.requests[action.request_id].num_prepares += 1
                assert action.request_id not in self.to_prepare
                self.to_prepare.add(action.request_id)
            case ev.StartEncode():
                self.start_encode(action)
            case ev.StartPrefill():
                self.start_prefill(action)
            case ev.StartDecode():
                self.start_decode(action)
            case ev.Cancel():
                assert self.requests[action.request_id].num_prepares, "refused, then cancelled"
                self.end(action.request_id, "cancelled")
                self.cancelled.add(action.request_id)
            case ev.Fail():
                self.cancelled.remove(action.request_id)
                self.ends[action.request_id] = action.reason
            case ev.Reject():
                request = self.requests[action.request_id]
                assert not request.num_prepares
                assert action.retry_after_s >= 1
                served = all(self.serves(stage) for stage in Stage if request.needs(stage))
                assert action.reason is (Reason.OVERLOADED if served else Reason.NO_WORKER)
                self.end(action.request_id, action.reason)
            case ev.Complete():
                request = self.requests[action.request_id]
                assert set(request.attempts) == set(range(request.received.num_choices))
                assert request.answered == request.attempts, "a leg has no answer"
                self.end(action.request_id, "complete")
        if not isinstance(action, ev.StartEncode) and action.request_id in self.requests:
            assert self.requests[action.request_id].num_retries <= self.limits.max_retries

    def start_encode(self, action: ev.StartEncode) -> None:
        self.assert_in_pool(action.worker_id, Stage.ENCODE)
        encoding = {(e.request_id, e.index) for b in self.batches.values() for e in b.items}
        for entry in action.items:
            self.assert_in_pool(entry.destination, Stage.PREFILL)
            request = self.requests[entry.request_id]
            assert (entry.request_id, entry.index) not in encoding, "encoded twice at once"
            assert entry.item == self.prepared(entry.request_id).shape.items[entry.index]
            assert request.destination in (None, entry.destination), "embeddings are scattered"
            request.destination = entry.destination
            request.num_encodes[entry.index] += 1
            request.encoded.discard(entry.index)
            assert request.num_retries <= self.limits.max_retries
        assert action.batch_id not in self.all_batches
        if self.pairs:
            busy = {batch.worker_id for batch in self.batches.values()}
            assert action.worker_id not in busy, "the rule was asked for an idle encoder"
        self.batches[action.batch_id] = action
        self.all_batches.append(action.batch_id)

    def start_prefill(self, action: ev.StartPrefill) -> None:
        self.assert_in_pool(action.worker_id, Stage.PREFILL)
        request = self.requests[action.request_id]
        handle = action.request_id, action.leg, action.attempt
        assert request.encoded == set(range(request.num_items)), "not all embeddings are there"
        assert action.attempt == request.attempts.get(action.leg, -1) + 1
        assert self.serves(Stage.DECODE), "nobody to pull the KV cache"
        assert action.resume == (action.leg in request.started)
        assert request.received.can_resume or not action.resume
        assert request.destination in (None, action.worker_id), "not where its embeddings are"
        request.destination = None
        request.attempts[action.leg] = action.attempt
        self.legs[handle] = action
        self.all_handles.append(handle)

    def start_decode(self, action: ev.StartDecode) -> None:
        self.assert_in_pool(action.worker_id, Stage.DECODE)
        handle = action.request_id, action.leg, action.attempt
        assert self.requests[action.request_id].attempts[action.leg] == action.attempt
        assert handle not in self.legs, "its prefill is not answered"
        assert handle not in self.decoded, "a KV handle is used once"
        self.decoded.add(handle)
        self.legs[handle] = action

    def serves(self, stage: Stage) -> bool:
        return any(STAGES[worker_id[0]] is stage for worker_id in self.workers)

    def assert_in_pool(self, worker_id: WorkerId, stage: Stage) -> None:
        assert worker_id in self.workers
        assert STAGES[worker_id[0]] is stage

    def end(self, request_id: RequestId, how: Reason | str) -> None:
        del self.requests[request_id]
        assert request_id not in self.ends, "answered twice"
        self.ends[request_id] = how
        self.to_prepare.discard(request_id)
        self.legs = {handle: work for handle, work in self.legs.items() if handle[0] != request_id}
        self.batches = {
            batch_id: batch
            for batch_id, batch in self.batches.items()
            if any(entry.request_id in self.requests for entry in batch.items)
        }


TestDriver = Driver.TestCase
TestDriver.settings = settings(
    deadline=None, derandomize=True, max_examples=300, stateful_step_count=60
)
