"""What a driver knows of its requests and engines, told what a core is told and asked for.

It asserts that what the core asks for can be done; ``invariants`` has the rest.
"""

from dataclasses import dataclass, field

from easerve.policy import events as ev
from easerve.policy.core import Core, Limits
from easerve.types import BatchId, MediaItem, Reason, RequestId, Stage, WorkerId

Handle = tuple[RequestId, int, int]
"""Request, leg, attempt."""
PrefillAnswer = ev.PrefillFinished | ev.PrefillFailed | ev.EmbeddingMissing
DecodeAnswer = ev.FirstToken | ev.DecodeFinished | ev.DecodeFailed


@dataclass
class Asked:
    """An open request, as its driver sees it."""

    received: ev.RequestReceived
    deadline_ns: int
    num_prepares: int = 0
    num_failures: int = 0
    """It has used up at most so many retries."""
    items: tuple[MediaItem, ...] | None = None
    """Known when it is prepared."""
    encoded: set[int] = field(default_factory=set)
    """Indices of the items whose embeddings it has."""
    attempts: dict[int, int] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    answered: dict[int, int] = field(default_factory=dict)
    """The attempt at each leg that gave its answer."""
    destination: WorkerId | None = None
    """Where embeddings are sent while no leg prefills them."""

    def needs(self, stage: Stage) -> bool:
        return stage is not Stage.ENCODE or bool(self.received.modalities)

    @property
    def wanted(self) -> list[tuple[int, MediaItem]]:
        """Items whose embeddings it waits for, by index."""
        return [pair for pair in enumerate(self.items or ()) if pair[0] not in self.encoded]

    @property
    def keys_had(self) -> set[str]:
        return {item.key for index, item in enumerate(self.items or ()) if index in self.encoded}

    @property
    def generates(self) -> bool:
        return self.items is not None and not self.wanted

    @property
    def num_retries(self) -> int:
        """At least as many retries as this were needed for what was asked."""
        return self.num_prepares - 1 + max([0, *self.attempts.values()])


def keys_of(batch: ev.StartEncode) -> set[str]:
    return {entry.item.key for entry in batch.items}


def num_tokens_of(batch: ev.StartEncode) -> int:
    return sum(entry.item.num_tokens for entry in batch.items)


class Model:
    """``step`` follows each step of the core."""

    def __init__(self, core: Core, limits: Limits) -> None:
        self.core, self.limits = core, limits
        self.now_ns = 0
        self.draining = False
        self.workers: dict[WorkerId, ev.WorkerJoined] = {}
        self.requests: dict[RequestId, Asked] = {}  # the open ones
        self.ends: dict[RequestId, Reason | str] = {}
        self.to_prepare: set[RequestId] = set()
        self.since_ns: dict[str, int] = {}
        """Since when somebody waits for an item, by key."""
        self.batches: dict[BatchId, ev.StartEncode] = {}
        self.at_fault: set[str] = set()
        """Items that failed for good when they were alone."""
        self.legs: dict[Handle, ev.StartPrefill | ev.StartDecode] = {}
        self.all_batches: dict[BatchId, ev.StartEncode] = {}
        self.all_handles: list[Handle] = []
        self.decoded: set[Handle] = set()

    def step(self, events: list[ev.Event], actions: list[ev.Action], now_ns: int) -> None:
        """Told this, in any order, the core has asked for that."""
        self.now_ns = now_ns
        self.cancelled: set[RequestId] = set()
        self.called_off: set[BatchId] = set()
        waited_for = {batch_id: self.waiters(batch) for batch_id, batch in self.batches.items()}
        for event in sorted(events, key=ev.sort_key):
            self.hear(event)
        forgotten = self.batches.keys() - self.core._encoding._batches.keys()
        for batch_id in forgotten:
            del self.batches[batch_id]
        for action in actions:
            self.do(action)
        assert forgotten <= self.called_off
        assert self.called_off.isdisjoint(self.batches), "somebody waits for it"
        told = {event.request_id for event in events if isinstance(event, ev.ClientCancelled)}
        assert self.cancelled <= told, "cancelled by nobody"
        assert told.isdisjoint(self.requests), "a cancelled request goes on"
        for batch_id in forgotten:
            assert waited_for[batch_id].isdisjoint(self.requests), "somebody waits for it"
        self.note_waits()

    # What was told ----------------------------------------------------------------------------

    def hear(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerJoined():
                self.drop_work(event.worker_id)
                self.workers[event.worker_id] = event
            case ev.WorkerLost():
                self.drop_work(event.worker_id)
                self.workers.pop(event.worker_id, None)
            case ev.Draining():
                self.draining = True
            case ev.RequestReceived():
                deadline_ns = self.now_ns + self.limits.request_timeout_ns
                self.requests[event.request_id] = Asked(event, deadline_ns)
            case ev.Prepared():
                request = self.requests.get(event.request_id)
                if request is not None and request.items is None:
                    request.items = event.shape.items
                    self.note_what_others_have(event.request_id)
            case ev.PrepareFailed():
                self.note_failure(event.request_id)
            case ev.EncodeFinished() | ev.EncodeFailed():
                batch = self.batches.pop(event.batch_id, None)
                if batch is not None:
                    self.hear_of_batch(batch, event)
            case ev.FirstToken() | ev.DecodeFinished() | ev.DecodeFailed():
                self.hear_of_leg(event, ev.StartDecode)
            case ev.PrefillFinished() | ev.PrefillFailed() | ev.EmbeddingMissing():
                self.hear_of_leg(event, ev.StartPrefill)
            case _:
                pass

    def hear_of_batch(
        self, batch: ev.StartEncode, event: ev.EncodeFinished | ev.EncodeFailed
    ) -> None:
        keys = keys_of(batch)
        if isinstance(event, ev.EncodeFinished):
            self.forget_waits(keys)
            for request in self.requests.values():
                request.encoded |= {index for index, item in request.wanted if item.key in keys}
        elif event.retryable:
            self.note_failure(*self.waiters(batch))
        elif len(keys) == 1:
            self.at_fault |= keys

    def hear_of_leg(
        self,
        event: PrefillAnswer | DecodeAnswer,
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
        match event:
            case ev.DecodeFinished():
                request.answered[event.leg] = event.attempt
            case ev.PrefillFinished():
                if event.final:
                    request.answered[event.leg] = event.attempt
                elif not self.serves(Stage.DECODE):
                    request.num_failures += 1
            case ev.EmbeddingMissing():
                request.num_failures += 1
                if request.generates:
                    request.encoded.clear()
            case ev.PrefillFailed() | ev.DecodeFailed():
                request.num_failures += 1
                if isinstance(event, ev.PrefillFailed) and request.destination == work.worker_id:
                    request.destination = None

    def note_what_others_have(self, request_id: RequestId) -> None:
        """Of its items, those that the core does not wait for."""
        request, known = self.requests[request_id], self.core._requests.get(request_id)
        if known is not None:
            had = {key for other in self.requests.values() for key in other.keys_had}
            there = [pair for pair in request.wanted if pair[0] not in known.pending]
            assert {item.key for _, item in there} <= had, "nobody has it"
            request.encoded |= {index for index, _ in there}

    def drop_work(self, worker_id: WorkerId) -> None:
        lost = [id_ for id_, batch in self.batches.items() if batch.worker_id == worker_id]
        batches = [self.batches.pop(batch_id) for batch_id in lost]
        self.note_failure(*{waiter for batch in batches for waiter in self.waiters(batch)})
        legs = [handle for handle, work in self.legs.items() if work.worker_id == worker_id]
        self.note_failure(*{handle[0] for handle in legs})
        for handle in legs:
            del self.legs[handle]
        for request in self.requests.values():
            if request.destination == worker_id:
                request.destination = None

    def note_failure(self, *request_ids: RequestId) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                self.requests[request_id].num_failures += 1

    def waiters(self, batch: ev.StartEncode) -> set[RequestId]:
        """The requests that wait for something of a batch, also those that came later."""
        keys = keys_of(batch)
        return {
            request_id
            for request_id, request in self.requests.items()
            if any(item.key in keys for _, item in request.wanted)
        }

    # What it is asked to do -------------------------------------------------------------------

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
                request = self.requests[action.request_id]
                assert request.num_prepares, "refused, then cancelled"
                self.last_cancelled = request
                self.end(action.request_id, "cancelled")
                self.cancelled.add(action.request_id)
            case ev.CancelEncode():
                self.called_off.add(action.batch_id)
            case ev.Fail():
                self.cancelled.remove(action.request_id)
                self.ends[action.request_id] = action.reason
                self.fail(self.last_cancelled, action.reason)
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
        if isinstance(action, ev.StartEncode | ev.CancelEncode):
            return
        if action.request_id in self.requests:
            assert self.requests[action.request_id].num_retries <= self.limits.max_retries

    def fail(self, request: Asked, reason: Reason) -> None:
        """It has just been cancelled."""

    def start_encode(self, action: ev.StartEncode) -> None:
        self.assert_in_pool(action.worker_id, Stage.ENCODE)
        keys = keys_of(action)
        assert len(keys) == len(action.items), "twice in a batch"
        assert not any(keys & keys_of(batch) for batch in self.batches.values()), "twice at once"
        for entry in action.items:
            asking = {
                (request_id, index)
                for request_id, request in self.requests.items()
                for index, item in request.wanted
                if item == entry.item
            }
            assert {(waiter.request_id, waiter.index) for waiter in entry.waiters} == asking
            for waiter in entry.waiters:
                self.assert_in_pool(waiter.destination, Stage.PREFILL)
                request = self.requests[waiter.request_id]
                assert request.destination in (None, waiter.destination), "scattered embeddings"
                request.destination = waiter.destination
        assert action.batch_id not in self.all_batches
        self.batches[action.batch_id] = self.all_batches[action.batch_id] = action

    def start_prefill(self, action: ev.StartPrefill) -> None:
        self.assert_in_pool(action.worker_id, Stage.PREFILL)
        request = self.requests[action.request_id]
        handle = action.request_id, action.leg, action.attempt
        assert request.generates, "not all embeddings are there"
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

    def serves(self, *stages: Stage) -> bool:
        return {worker.stage for worker in self.workers.values()}.issuperset(stages)

    def assert_in_pool(self, worker_id: WorkerId, stage: Stage) -> None:
        assert self.workers[worker_id].stage is stage

    def end(self, request_id: RequestId, how: Reason | str) -> None:
        request = self.requests.pop(request_id)
        self.forget_waits({item.key for _, item in request.wanted})
        assert request_id not in self.ends, "answered twice"
        self.ends[request_id] = how
        self.to_prepare.discard(request_id)
        self.legs = {handle: work for handle, work in self.legs.items() if handle[0] != request_id}

    # What waits -------------------------------------------------------------------------------

    def forget_waits(self, keys: set[str]) -> None:
        """Whoever waits for them after this has come later, for all we know."""
        for key in keys:
            self.since_ns.pop(key, None)

    def note_waits(self) -> None:
        wanted = [item.key for request in self.requests.values() for _, item in request.wanted]
        self.since_ns = {key: self.since_ns.get(key, self.now_ns) for key in wanted}

    @property
    def queued(self) -> set[str]:
        """What somebody waits for and nobody encodes."""
        return self.since_ns.keys() - set().union(*map(keys_of, self.batches.values()))

    @property
    def is_under_way(self) -> bool:
        """Something will be answered."""
        return bool(self.to_prepare or self.batches or self.legs)
