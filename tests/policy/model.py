"""What a driver knows of its requests and engines, told what a core is told and asked for.

It asserts that what the core asks for can be done; ``invariants`` has the rest.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from easerve.policy import events as ev
from easerve.policy.core import Core, Limits
from easerve.policy.encoding import requests_of
from easerve.types import BatchId, MediaItem, Reason, RequestId, Shape, Side, Stage, WorkerId

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
    num_missed: int = 0
    """How often embeddings were missing that were thought to be there."""
    failed_by: set[WorkerId] = field(default_factory=set)
    at_fault: bool = False
    """An item that it waited for failed for good when it was alone."""
    shape: Shape | None = None
    """Known when it is prepared."""
    pending: set[int] = field(default_factory=set)
    """Indices of the items that hold its prefill back, as the core says."""
    num_late: int = 0
    """Attempts at legs that were given up for want of what was still on its way."""
    attempts: dict[int, int] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    answered: dict[int, int] = field(default_factory=dict)
    """The attempt at each leg that gave its answer."""
    destination: WorkerId | None = None
    """Drawn in an earlier step or asked for: where its embeddings are sent and its prefills run,
    until that fails.
    """

    def needs(self, stage: Stage) -> bool:
        return stage is not Stage.ENCODE or bool(self.received.modalities)

    @property
    def items(self) -> tuple[MediaItem, ...]:
        return self.shape.items if self.shape else ()

    @property
    def wanted(self) -> set[str]:
        return {self.items[index].key for index in self.pending}

    @property
    def has_its_answer(self) -> bool:
        whole = len(self.answered) == self.received.num_choices
        return whole and self.answered == self.attempts

    @property
    def generates(self) -> bool:
        return self.shape is not None and not self.pending

    @property
    def num_retries(self) -> int:
        """At least as many retries as this were needed for what was asked."""
        return self.num_prepares - 1 + max([0, *self.attempts.values()]) - self.num_late


def keys_of(batch: ev.StartEncode) -> set[str]:
    return {entry.item.key for entry in batch.items}


def num_tokens_of(batch: ev.StartEncode) -> int:
    return sum(entry.item.num_tokens for entry in batch.items)


def destinations(entry: ev.EncodeItem) -> set[WorkerId]:
    return {waiter.destination for waiter in entry.waiters}


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
        """Since when an item holds somebody back, by key."""
        self.batches: dict[BatchId, ev.StartEncode] = {}
        self.cut: set[tuple[BatchId, WorkerId]] = set()
        """Batches from which nothing gets to a prefill engine: it was lost meanwhile."""
        self.waiters: dict[BatchId, set[RequestId]] = {}
        """Of the batches under way, as the core says; late ones included."""
        self.blamed: dict[str, set[WorkerId]] = {}
        """Encoders that have an item and are not asked for it: one has failed somebody who waits
        for it, or has waited since it was queued; or one could not send it.
        """
        self.directory: dict[WorkerId, set[str]] = {}
        """The keys of the embeddings that each engine has."""
        self.legs: dict[Handle, ev.StartPrefill | ev.StartDecode] = {}
        self.waiting: set[Handle] = set()
        """Prefills that wait at their engine for embeddings."""
        self.missed_before: dict[Handle, int] = {}
        self.all_batches: dict[BatchId, ev.StartEncode] = {}
        self.all_handles: list[Handle] = []
        self.decoded: set[Handle] = set()

    def step(self, events: list[ev.Event], actions: list[ev.Action], now_ns: int) -> None:
        """Told this, in any order, the core has asked for that."""
        self.now_ns = now_ns
        self.cancelled: set[RequestId] = set()
        self.called_off: set[BatchId] = set()
        self.finished: set[str] = set()
        """Keys of the items that were encoded."""
        self.ending = {a.request_id for a in actions if isinstance(a, ev.Cancel | ev.Complete)}
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
            assert self.waiters[batch_id].isdisjoint(self.requests), "somebody waits for it"
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
            case ev.Evicted():
                self.drop_keys(event.worker_id, event.keys)
            case ev.Draining():
                self.draining = True
            case ev.RequestReceived():
                deadline_ns = self.now_ns + self.limits.request_timeout_ns
                self.requests[event.request_id] = Asked(event, deadline_ns)
            case ev.Prepared() | ev.PrepareFailed():
                self.hear_of_preparation(event)
            case ev.EncodeFinished() | ev.EncodeFailed():
                if self.open_waiters(event.batch_id):
                    self.hear_of_batch(self.batches.pop(event.batch_id), event)
            case ev.FirstToken() | ev.DecodeFinished() | ev.DecodeFailed():
                self.hear_of_leg(event, ev.StartDecode)
            case ev.PrefillFinished() | ev.PrefillFailed() | ev.EmbeddingMissing():
                self.hear_of_leg(event, ev.StartPrefill)

    def hear_of_preparation(self, event: ev.Prepared | ev.PrepareFailed) -> None:
        request = self.requests.get(event.request_id)
        if isinstance(event, ev.PrepareFailed):
            self.note_failure([event.request_id])
        elif request is not None and request.shape is None:
            request.shape = event.shape

    def open_waiters(self, batch_id: BatchId) -> set[RequestId]:
        """Nobody, if the batch is not under way."""
        waiters = self.waiters[batch_id] if batch_id in self.batches else set()
        return {id_ for id_, each in self.requests.items() if not each.has_its_answer} & waiters

    def hear_of_batch(
        self, batch: ev.StartEncode, event: ev.EncodeFinished | ev.EncodeFailed
    ) -> None:
        waiters, keys = self.waiters[event.batch_id], keys_of(batch)
        if isinstance(event, ev.EncodeFinished):
            self.finished |= keys
            self.forget_waits(keys)
            for entry in batch.items:
                for worker_id in {batch.worker_id} | destinations(entry):
                    if worker_id in self.workers and (event.batch_id, worker_id) not in self.cut:
                        self.directory.setdefault(worker_id, set()).add(entry.item.key)
            for handle in [handle for handle in self.waiting if handle[0] in waiters]:
                if not self.awaited(handle[0], self.legs[handle].worker_id):
                    self.waiting.remove(handle)
            return
        self.note_not_sent(batch)
        if event.retryable:
            self.note_failure(waiters, batch.worker_id)
        else:
            for request_id in waiters & self.requests.keys():
                self.requests[request_id].at_fault |= len(keys) == 1

    def awaited(self, request_id: RequestId, worker_id: WorkerId) -> bool:
        """Whether a batch that a request waits for has something of it for a prefill worker."""
        keys = {item.key for item in self.requests[request_id].items}
        return any(
            request_id in self.waiters[batch_id] and keys & self.brought(batch, worker_id)
            for batch_id, batch in self.batches.items()
        )

    def brought(self, batch: ev.StartEncode, worker_id: WorkerId) -> set[str]:
        if (batch.batch_id, worker_id) in self.cut:
            return set()
        return {each.item.key for each in batch.items if worker_id in destinations(each)}

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
        self.drop_leg(handle)
        match event:
            case ev.DecodeFinished():
                request.answered[event.leg] = event.attempt
            case ev.PrefillFinished():
                if event.final:
                    request.answered[event.leg] = event.attempt
                elif not self.serves(Stage.DECODE):
                    request.num_failures += 1
            case ev.EmbeddingMissing():
                self.hear_of_miss(request, handle, work.worker_id, event.keys)
            case ev.PrefillFailed() | ev.DecodeFailed():
                self.note_failure([event.request_id], work.worker_id)
                if request.destination == work.worker_id:
                    request.destination = None

    def hear_of_miss(
        self, request: Asked, handle: Handle, worker_id: WorkerId, keys: Sequence[str]
    ) -> None:
        """It costs one retry, for all prefills that were started before it was known of, unless
        all of it is just late. The second time it is the engine's.
        """
        brought = [self.brought(batch, worker_id) for batch in self.batches.values()]
        late = bool(keys) and set(keys) <= set().union(*brought)
        request.num_late += late
        if self.missed_before[handle] == request.num_missed and not late:
            request.num_missed += 1
            request.num_failures += 1
            if request.num_missed > 1:
                request.failed_by.add(worker_id)
                if request.destination == worker_id:
                    request.destination = None
        if handle[0] in self.ending:  # maybe before: then the core has not listened
            keys = [key for key in keys if not self.core._directory.holds(worker_id, key)]
        self.drop_keys(worker_id, keys)

    def drop_leg(self, handle: Handle) -> None:
        del self.legs[handle]
        self.waiting.discard(handle)

    def drop_keys(self, worker_id: WorkerId, keys: Iterable[str]) -> None:
        self.directory.get(worker_id, set()).difference_update(keys)

    def drop_work(self, worker_id: WorkerId) -> None:
        self.directory.pop(worker_id, None)
        self.cut |= {(batch_id, worker_id) for batch_id in self.batches}
        lost = [id_ for id_, batch in self.batches.items() if batch.worker_id == worker_id]
        self.note_failure({r for id_ in lost for r in self.waiters[id_]}, worker_id)
        for batch_id in lost:
            self.note_not_sent(self.batches.pop(batch_id))
        legs = [handle for handle, work in self.legs.items() if work.worker_id == worker_id]
        self.note_failure({handle[0] for handle in legs}, worker_id)
        for handle in legs:
            self.drop_leg(handle)
        for request in self.requests.values():
            if request.destination == worker_id:
                request.destination = None
                request.failed_by.add(worker_id)

    def note_failure(
        self, request_ids: Iterable[RequestId], worker_id: WorkerId | None = None
    ) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                self.requests[request_id].num_failures += 1
                if worker_id is not None:
                    self.requests[request_id].failed_by.add(worker_id)

    def note_not_sent(self, batch: ev.StartEncode) -> None:
        """What cannot be sent is encoded, though another may have it."""
        if not batch.forward:
            for worker_id, keys in self.directory.items():
                self.blame(keys & keys_of(batch), worker_id)

    def blame(self, keys: Iterable[str], *encoder_ids: WorkerId) -> None:
        for key in keys:
            self.blamed.setdefault(key, set()).update(encoder_ids)

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
                assert request.has_its_answer, "a leg has no answer"
                self.end(action.request_id, "complete")
        if isinstance(action, ev.StartEncode | ev.CancelEncode | ev.Divide | ev.Retuned):
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
            assert entry.waiters, "for nobody"
            for waiter in entry.waiters:
                request = self.requests[waiter.request_id]
                assert request.items[waiter.index] == entry.item
                self.note_destination(request, waiter.destination)
        assert action.batch_id not in self.all_batches
        self.batches[action.batch_id] = self.all_batches[action.batch_id] = action

    def start_prefill(self, action: ev.StartPrefill) -> None:
        request = self.requests[action.request_id]
        handle = action.request_id, action.leg, action.attempt
        assert request.shape is not None
        self.note_destination(request, action.worker_id)
        assert action.attempt == request.attempts.get(action.leg, -1) + 1
        assert self.serves(Stage.DECODE), "nobody to pull the KV cache"
        assert action.resume == (action.leg in request.started)
        assert request.received.can_resume or not action.resume
        assert action.placement.side is self.side(action.worker_id)
        self.check_embeddings(action, [item.key for item in request.items])
        request.attempts[action.leg] = action.attempt
        self.legs[handle] = action
        self.missed_before[handle] = request.num_missed
        self.all_handles.append(handle)
        if action.coming:
            self.waiting.add(handle)

    def note_destination(self, request: Asked, worker_id: WorkerId) -> None:
        """One that has not failed it if there is any; it is kept until it does."""
        self.assert_in_pool(worker_id, Stage.PREFILL)
        if request.destination is None:
            engines = {id_ for id_, w in self.workers.items() if w.stage is Stage.PREFILL}
            assert worker_id not in request.failed_by or engines <= request.failed_by
            request.destination = worker_id
        assert request.destination == worker_id, "not where its embeddings are"

    def check_embeddings(self, action: ev.StartPrefill, keys: list[str]) -> None:
        """Each is at the worker or on the way there, as far as was told."""
        held = self.directory.get(action.worker_id, set()).intersection(keys)
        brought = [self.brought(batch, action.worker_id) for batch in self.batches.values()]
        coming = set().union(*brought).intersection(keys)
        assert held | coming == set(keys), "an embedding is neither there nor on the way"
        indices = {*action.coming}
        assert {keys[index] for index in indices} <= coming
        assert {key for index, key in enumerate(keys) if index not in indices} <= held
        assert action.num_held <= sum(key in held for key in keys)

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

    def side(self, worker_id: WorkerId) -> Side:
        return Side.LOCAL if self.workers[worker_id].beside else Side.REMOTE

    def assert_in_pool(self, worker_id: WorkerId, stage: Stage) -> None:
        assert self.workers[worker_id].stage is stage

    def end(self, request_id: RequestId, how: Reason | str) -> None:
        request = self.requests.pop(request_id)
        self.forget_waits(request.wanted)
        assert request_id not in self.ends, "answered twice"
        self.ends[request_id] = how
        self.to_prepare.discard(request_id)
        for handle in [handle for handle in self.legs if handle[0] == request_id]:
            self.drop_leg(handle)

    # What waits -------------------------------------------------------------------------------

    def forget_waits(self, keys: set[str]) -> None:
        """Whoever waits for them after this has come later, for all we know."""
        for key in keys:
            self.since_ns.pop(key, None)

    def note_waits(self) -> None:
        """Who waits for what, and goes where, is the core's to say; ``invariants`` has the rest."""
        for request_id, request in self.requests.items():
            known = self.core._requests[request_id]
            request.pending = set(known.pending)
            assert request.destination in (None, known.destination)
            request.destination = known.destination
        wanted = [key for request in self.requests.values() for key in request.wanted]
        self.since_ns = {key: self.since_ns.get(key, self.now_ns) for key in wanted}
        self.waiters = {
            batch_id: {request.request_id for request in requests_of(batch.entries)}
            for batch_id, batch in self.core._encoding._batches.items()
        }
        waited_for = self.since_ns.keys() | set(self.under_way())
        self.blamed = {key: who for key, who in self.blamed.items() if key in waited_for}
        for request_id, request in self.requests.items():
            ids = [id_ for id_, waiters in self.waiters.items() if request_id in waiters]
            coming = set().union(*(keys_of(self.batches[id_]) for id_ in ids))
            self.blame(request.wanted | coming, *request.failed_by)

    def under_way(self) -> Iterator[str]:
        for batch in self.batches.values():
            yield from keys_of(batch)

    @property
    def queued(self) -> set[str]:
        """What holds somebody back and nobody encodes."""
        return self.since_ns.keys() - set(self.under_way())

    @property
    def is_under_way(self) -> bool:
        """Something will be answered, whatever else is done."""
        return bool(self.to_prepare or self.batches or self.legs.keys() - self.waiting)
