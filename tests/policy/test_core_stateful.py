"""A driver that does anything a driver may do; what must hold all the same: ``invariants``."""

import pickle
from dataclasses import replace
from itertools import cycle
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.batching import HARD_TIMEOUT_NS, RULES
from easerve.policy.core import Core, Limits
from easerve.policy.knobs import Knobs, Order
from easerve.policy.partition import RULES as DIVISIONS
from easerve.policy.partition import Devices
from easerve.policy.share import RULES as SIDES
from easerve.types import NS_PER_S, BatchId, MediaItem, Modality, Reason, RequestId, WorkerId

from .invariants import Checked
from .model import Handle, keys_of
from .scenario import (
    D0,
    D1,
    DEFAULTS,
    E0,
    E1,
    L0,
    L1,
    P0,
    P1,
    SURFACE,
    joined,
    picture,
    shape_of,
)

MS = NS_PER_S // 1000
ADMISSION = Admission(max_requests=8, max_bytes=32)
WORKERS = [E0, E1, P0, P1, L0, L1, D0, D1]
FAILURES = {"failed": True, "failed for good": False}
"""Outcome -> whether it may be tried again."""
OUTCOMES = st.sampled_from(["done", "done", "done", "first token", "missing", *FAILURES])
ITEMS = {
    **{key: picture(key, 30) for key in "abcdef"},
    **{key: picture(key, 60) for key in "gh"},
    "i": MediaItem("i", Modality.AUDIO, 30),
}
KEYS = st.sampled_from(sorted(ITEMS))
MISSING = st.none() | st.lists(KEYS, max_size=3)
"""The keys that a prefill misses; None: all of its items."""
SIZES = st.fixed_dictionaries(
    {
        "num_slots": st.sampled_from([256, 2, 1]),
        "max_batch_tokens": st.sampled_from([2048, 2048, 130, 70]),
    }
)
KNOBS = st.fixed_dictionaries(
    {
        "when": st.sampled_from(list(RULES)),
        "order": st.sampled_from(Order),
        "max_batch_items": st.sampled_from([4, 4, 3, 2, 1]),
        "timeout_s": st.sampled_from([0.0, 0.05, 1.0]),
        "gap_k": st.sampled_from([0.0, 1.0, 100.0]),
        "encoder_value": st.sampled_from([0.0, 100.0]),
        "spread": st.booleans(),
        "run_ahead": st.integers(0, 2),
        "group_by_size": st.booleans(),
        "ttft_slo_s": st.sampled_from([None, 0.2, 3.0]),
        "tpot_slo_s": st.sampled_from([None, 0.001, 0.1]),
        "flow": st.booleans(),
        "prefill_ahead_s": st.sampled_from([1.0, 0.02, 0.001]),
        "max_queue_s": st.sampled_from([30.0, 30.0, 30.0, 0.02]),
        "where": st.sampled_from(list(SIDES)),
        "remote_share": st.sampled_from([0.5, 0.3, 0.75, 0.0, 1.0]),
        "band_kappa": st.sampled_from([0.5, 2.0]),
        "share_trim": st.booleans(),
        "spill_guard_s": st.sampled_from([None, None, 0.1, 0.0]),
        "how": st.sampled_from(list(DIVISIONS)),
        "encode_target_s": st.sampled_from([0.04, 0.025, 0.015, 0.001]),
        "encode_units": st.sampled_from([None, 3, 5]),
        "adapt": st.booleans(),
        "adapt_period_s": st.sampled_from([0.05, 0.3, 10.0]),
        "adapt_hold": st.integers(1, 2),
        "adapt_share": st.sampled_from([0.3, 1.0, 0.0]),
        "adapt_factor": st.sampled_from([4.0, 1.0]),
    }
).map(lambda knobs: replace(DEFAULTS, **knobs))


class Driver(RuleBasedStateMachine):
    @initialize(
        max_retries=st.integers(0, 3),
        knobs=KNOBS,
        poisoned=st.sets(KEYS, max_size=1),
        sizes=st.tuples(*[SIZES] * len(WORKERS)),
        devices=st.sampled_from([Devices(SURFACE), Devices(), None]),
    )
    def start(
        self,
        max_retries: int,
        knobs: Knobs,
        poisoned: set[str],
        sizes: tuple[dict[str, int], ...],
        devices: Devices | None,
    ) -> None:
        limits = Limits(max_retries, request_timeout_ns=5 * NS_PER_S, worker_wait_ns=500 * MS)
        self.core = Core(knobs, ADMISSION, LinearCosts(), limits, devices)
        self.model = Checked(self.core, limits, devices)
        self.poisoned = poisoned
        self.now_ns = 0
        self.inbox: list[ev.Event] = []
        self.all_received: list[ev.RequestReceived] = []
        self.items: dict[RequestId, tuple[MediaItem, ...]] = {}
        self.inbox += [joined(id_, **size) for id_, size in zip(WORKERS, sizes, strict=True)]
        self.step()

    # What may happen --------------------------------------------------------------------------

    @precondition(lambda self: self.is_busy or len(self.model.workers) < len(WORKERS))
    @rule(worker_id=st.sampled_from(WORKERS), size=SIZES, hold=st.booleans())
    def worker_joins(self, worker_id: WorkerId, size: dict[str, int], hold: bool) -> None:
        self.post(joined(worker_id, **size), hold)

    @precondition(lambda self: self.is_busy)
    @rule(worker_id=st.sampled_from(WORKERS), hold=st.booleans())
    def worker_is_lost(self, worker_id: WorkerId, hold: bool) -> None:
        self.post(ev.WorkerLost(worker_id), hold)

    @precondition(lambda self: any(self.model.directory.values()))
    @rule(worker_id=st.sampled_from(WORKERS), keys=st.sets(KEYS, min_size=1), hold=st.booleans())
    def engine_evicts(self, worker_id: WorkerId, keys: set[str], hold: bool) -> None:
        self.post(ev.Evicted(worker_id, tuple(sorted(keys))), hold)

    @precondition(lambda self: self.model.requests)
    @rule(knobs=KNOBS, hold=st.booleans())
    def knobs_are_changed(self, knobs: Knobs, hold: bool) -> None:
        self.post(ev.KnobsChanged(knobs), hold)

    @precondition(lambda self: len(self.all_received) >= 30)
    @rule(hold=st.booleans())
    def server_drains(self, hold: bool) -> None:
        self.post(ev.Draining(), hold)

    @rule(
        keys=st.lists(KEYS, max_size=4),
        num_choices=st.integers(1, 3),
        can_resume=st.booleans(),
        num_bytes=st.integers(1, 5),
        hold=st.booleans(),
    )
    def request_arrives(
        self, keys: list[str], num_choices: int, can_resume: bool, num_bytes: int, hold: bool
    ) -> None:
        self.receive(keys, num_bytes, num_choices, can_resume)
        self.step_unless(hold)

    @rule(burst=st.lists(st.lists(KEYS, min_size=1, max_size=3), min_size=2, max_size=5))
    def burst_arrives(self, burst: list[list[str]]) -> None:
        request_ids = [self.receive(keys, num_choices=len(keys)) for keys in burst]
        self.step()
        for request_id in sorted(self.model.to_prepare.intersection(request_ids)):
            self.answer_preparation(request_id, "done")
        self.step()

    @precondition(lambda self: self.model.to_prepare)
    @rule(data=st.data(), outcome=OUTCOMES, hold=st.booleans())
    def preparation_ends(self, data: st.DataObject, outcome: str, hold: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.model.to_prepare)))
        self.answer_preparation(request_id, outcome, hold)

    @precondition(lambda self: self.model.batches)
    @rule(data=st.data(), outcome=OUTCOMES, hold=st.booleans())
    def batch_ends(self, data: st.DataObject, outcome: str, hold: bool) -> None:
        self.answer_batch(data.draw(st.sampled_from(sorted(self.model.batches))), outcome, hold)

    @precondition(lambda self: self.model.legs)
    @rule(data=st.data(), outcome=OUTCOMES, missing=MISSING, hold=st.booleans())
    def leg_gets_on(
        self, data: st.DataObject, outcome: str, missing: list[str] | None, hold: bool
    ) -> None:
        handle = data.draw(st.sampled_from(sorted(self.model.legs)))
        prefills = isinstance(self.model.legs[handle], ev.StartPrefill)
        self.answer_leg(handle, prefills, outcome, hold, missing)

    @precondition(lambda self: len(self.model.requests) >= 2)
    @rule(data=st.data(), hold=st.booleans())
    def client_cancels(self, data: st.DataObject, hold: bool) -> None:
        event = data.draw(st.sampled_from(self.all_received))
        self.post(ev.ClientCancelled(event.request_id), hold)

    @precondition(lambda self: self.model.all_handles)
    @rule(data=st.data(), prefills=st.booleans(), outcome=OUTCOMES, hold=st.booleans())
    def answer_about_any_leg(
        self, data: st.DataObject, prefills: bool, outcome: str, hold: bool
    ) -> None:
        legs = self.model.legs
        retried = [handle[:2] for handle in legs if handle[2]]
        old = [h for h in self.model.all_handles if h[:2] in retried and h not in legs]
        handle = data.draw(st.sampled_from(old or self.model.all_handles))
        self.answer_leg(handle, prefills, outcome, hold)

    @precondition(lambda self: self.model.all_batches)
    @rule(data=st.data(), outcome=OUTCOMES, hold=st.booleans())
    def answer_about_any_batch(self, data: st.DataObject, outcome: str, hold: bool) -> None:
        batch_id = data.draw(st.sampled_from(sorted(self.model.all_batches)))
        self.answer_batch(batch_id, outcome, hold)

    @precondition(lambda self: self.all_received)
    @rule(data=st.data(), hold=st.booleans())
    def preparation_ends_again(self, data: st.DataObject, hold: bool) -> None:
        event = data.draw(st.sampled_from(self.all_received))
        if event.request_id not in self.model.to_prepare:
            self.post(self.prepared(event.request_id), hold)

    @precondition(lambda self: self.inbox or self.model.requests)
    @rule(time_ms=st.integers(0, 600), random=st.randoms(use_true_random=False))
    def time_passes(self, time_ms: int, random: Random) -> None:
        self.now_ns += time_ms * MS
        self.step(random)

    @precondition(lambda self: self.is_near(self.core.next_deadline()))
    @rule()
    def deadline_comes(self) -> None:
        self.step_at_deadline()

    @precondition(lambda self: self.model.is_under_way)
    @rule(outcomes=st.lists(OUTCOMES, min_size=1))
    def everything_gets_on(self, outcomes: list[str]) -> None:
        outcome = cycle(outcomes)
        for request_id in sorted(self.model.to_prepare):
            self.answer_preparation(request_id, next(outcome))
        for batch_id in self.model.batches:
            self.answer_batch(batch_id, next(outcome))
        for handle, work in self.model.legs.items():
            if handle not in self.model.waiting:
                self.answer_leg(handle, isinstance(work, ev.StartPrefill), next(outcome))
        self.step()

    @precondition(lambda self: len(self.model.requests) >= 6)
    @rule()
    def everything_is_lost(self) -> None:
        self.inbox += map(ev.WorkerLost, WORKERS)
        self.step()
        while self.core.next_deadline() is not None:
            self.step_at_deadline()
        assert not self.model.requests
        self.inbox += map(joined, WORKERS)

    @precondition(lambda self: len(self.model.requests) >= 3)
    @rule()
    def everything_is_served(self) -> None:
        self.step()
        self.inbox += [joined(id_) for id_ in WORKERS if id_ not in self.model.workers]
        self.step()
        served = set(self.model.requests)
        while self.model.requests:
            if self.model.is_under_way:
                self.everything_gets_on(["done"])
            else:
                self.step_at_deadline()
        for request_id in served:
            poisoned = {item.key for item in self.items[request_id]} & self.poisoned
            ends = {Reason.ENCODE_FAILED} if poisoned else {"complete"}
            assert self.model.ends[request_id] in ends | {Reason.TIMED_OUT}

    @property
    def is_busy(self) -> bool:
        return len(self.model.requests) >= 4

    # How it is told ---------------------------------------------------------------------------

    def receive(
        self, keys: list[str], num_bytes: int = 1, num_choices: int = 1, can_resume: bool = False
    ) -> RequestId:
        request_id = RequestId(f"r{len(self.all_received)}")
        items = self.items[request_id] = tuple(ITEMS[key] for key in keys)
        modalities = tuple(item.modality for item in items)
        event = ev.RequestReceived(request_id, num_bytes, modalities, num_choices, can_resume)
        self.all_received.append(event)
        self.inbox.append(event)
        return request_id

    def prepared(self, request_id: RequestId) -> ev.Prepared:
        shape = shape_of(*self.items[request_id])
        num_tokens = shape.num_prompt_tokens + 50 * len(shape.items)
        return ev.Prepared(request_id, replace(shape, num_prompt_tokens=num_tokens))

    def answer_preparation(self, request_id: RequestId, outcome: str, hold: bool = True) -> None:
        self.model.to_prepare.remove(request_id)
        if outcome in FAILURES:
            self.post(ev.PrepareFailed(request_id, FAILURES[outcome]), hold)
        else:
            self.post(self.prepared(request_id), hold)

    def answer_batch(self, batch_id: BatchId, outcome: str, hold: bool = True) -> None:
        """It is encoded unless an item is poisoned; then that fails for good, and only then."""
        batch = self.model.all_batches[batch_id]
        poisoned = keys_of(batch) & self.poisoned
        if outcome in FAILURES and not batch.forward:
            self.post(ev.EncodeFailed(batch_id, FAILURES[outcome]), hold)
        elif outcome == "failed" or (outcome in FAILURES and not poisoned):
            self.post(ev.EncodeFailed(batch_id, retryable=True), hold)
        elif poisoned:
            self.post(ev.EncodeFailed(batch_id, retryable=False), hold)
        else:
            self.post(ev.EncodeFinished(batch_id), hold)

    def answer_leg(
        self,
        handle: Handle,
        prefills: bool,
        outcome: str,
        hold: bool = True,
        missing: list[str] | None = None,
    ) -> None:
        own = [item.key for item in self.items[handle[0]]]
        if prefills and self.poisoned.intersection(own) and outcome not in FAILURES:
            outcome = "missing"  # what cannot be encoded never comes
        event: ev.Event
        match outcome, prefills:
            case "done", True:
                event = ev.PrefillFinished(*handle, wait_s=0.02 * handle[1])
            case "done", False:
                event = ev.DecodeFinished(*handle, decode_s=0.4, tpot_s=0.02)
            case "first token", True:
                event = ev.PrefillFinished(*handle, final=True)
            case "first token", False:
                event = ev.FirstToken(*handle)
            case "missing", _:
                event = ev.EmbeddingMissing(*handle, tuple(own if missing is None else missing))
            case _, True:
                event = ev.PrefillFailed(*handle, FAILURES[outcome])
            case _:
                event = ev.DecodeFailed(*handle, FAILURES[outcome])
        self.post(event, hold)

    def post(self, event: ev.Event, hold: bool = True) -> None:
        """``hold``: hand it over together with what comes next."""
        self.inbox.append(event)
        self.step_unless(hold)

    def step_unless(self, hold: bool) -> None:
        if not hold:
            self.step(Random(len(self.inbox)))

    def is_near(self, deadline_ns: int | None) -> bool:
        return deadline_ns is not None and deadline_ns <= self.now_ns + HARD_TIMEOUT_NS

    def step_at_deadline(self) -> None:
        deadline_ns = self.core.next_deadline()
        assert deadline_ns is not None
        self.now_ns = max(self.now_ns, deadline_ns)
        self.step()

    def step(self, random: Random | None = None) -> None:
        events, self.inbox = self.inbox, []
        shuffled = list(events)
        (random or Random(0)).shuffle(shuffled)
        twin = pickle.dumps(self.core) if shuffled != events else None  # faster than a deep copy
        actions = self.core.step(events, self.now_ns)
        if twin is not None:
            other: Core = pickle.loads(twin)
            assert other.step(shuffled, self.now_ns) == actions, "the order of events matters"
            assert other.next_deadline() == self.core.next_deadline()
        self.model.step(events, actions, self.now_ns)
        assert len(self.model.requests) <= ADMISSION.max_requests


TestDriver = pytest.mark.long(Driver.TestCase)
TestDriver.settings = settings(
    deadline=None, derandomize=True, max_examples=90, stateful_step_count=60
)
