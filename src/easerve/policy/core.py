"""The control core: ``step(events, now_ns) -> actions`` and ``next_deadline() -> int | None``.

Invariants. Every admitted request ends in exactly one of Complete, Fail or the client's own
cancellation; every refused one in exactly one Reject. A worker holds work only for open requests.
A late or repeated answer (an old batch, an old attempt, a closed request) is ignored. When no
request is open, nothing is kept but the workers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias, assert_never

from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.batching import BatchingRule, QueuedItem, Wait
from easerve.policy.estimates import Estimates
from easerve.policy.lifecycle import REQUEST, LegState, RequestState
from easerve.policy.pool import Pool, Worker
from easerve.policy.queues import Queues, prepares
from easerve.policy.state import Leg, Request
from easerve.types import NS_PER_S, BatchId, Reason, RequestId, Stage, WorkerId

PrefillEvent: TypeAlias = ev.PrefillFinished | ev.PrefillFailed | ev.EmbeddingMissing
DecodeEvent: TypeAlias = ev.FirstToken | ev.DecodeFinished | ev.DecodeFailed


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_retries``: how often one request may be tried again, over all its stages.

    ``worker_wait_ns``: how long accepted work waits for an engine of a stage that has none.
    """

    max_retries: int = 2
    request_timeout_ns: int = 600 * NS_PER_S
    worker_wait_ns: int = 10 * NS_PER_S


@dataclass(frozen=True, slots=True)
class Batch:
    worker_id: WorkerId
    items: tuple[QueuedItem, ...]


class Core:
    """Decides for one pool of engines. Single-threaded; the caller owns the clock."""

    def __init__(
        self, batching: BatchingRule, admission: Admission, estimates: Estimates, limits: Limits
    ) -> None:
        self._batching, self._admission = batching, admission
        self._estimates, self._limits = estimates, limits
        self.pool = Pool()
        self._requests: dict[RequestId, Request] = {}  # by arrival, so by deadline as well
        self._num_bytes = 0  # of the open requests
        self._queues = Queues()
        self._batches: dict[BatchId, Batch] = {}
        self._last_batch = 0
        self._batch_wait_ns: int | None = None
        self._actions: list[ev.Action] = []
        self._now_ns = 0

    # Interface --------------------------------------------------------------------------------

    def step(self, events: Iterable[ev.Event], now_ns: int) -> list[ev.Action]:
        """Take in everything that happened at ``now_ns`` (in any order) and decide."""
        self._now_ns = now_ns
        for event in sorted(events, key=ev.sort_key):
            self._handle(event)
        self.pool.note_starved_stages(now_ns)
        self._expire()
        self._prepare_again()
        self._dispatch_encode()
        self._dispatch_prefill()
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> int | None:
        """When to call ``step`` again at the latest, events or not."""
        first = next(iter(self._requests.values()), None)
        times = [first.deadline_ns] if first else []
        times += [
            since + self._limits.worker_wait_ns
            for stage, since in self.pool.starved_since.items()
            if next(self._queues.needing(stage), None)
        ]
        if self._batch_wait_ns is not None:
            times.append(self._batch_wait_ns)
        return min(times, default=None)

    @property
    def num_open(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._requests)

    def queue_lengths(self) -> dict[Stage, int]:
        """What waits for an engine: items for Encode, legs for Prefill."""
        return {Stage.ENCODE: len(self._queues.items), Stage.PREFILL: len(self._queues.legs)}

    # Events -----------------------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerJoined():
                self._worker_lost(event.worker_id)  # one that comes back has lost what it held
                self.pool.join(event.worker_id, event.stage)
            case ev.WorkerLost():
                self._worker_lost(event.worker_id)
            case ev.RequestReceived():
                self._received(event)
            case ev.EncodeFinished():
                self._encode_finished(event.batch_id)
            case ev.EncodeFailed():
                self._encode_failed(event.batch_id, event.retryable)
            case ev.ClientCancelled():
                if event.request_id in self._requests:
                    self._close(self._requests[event.request_id], "cancelled")
            case ev.Prepared() | ev.PrepareFailed():
                request = self._requests.get(event.request_id)
                if request is not None and request.state is RequestState.PREPARING:
                    self._handle_preparation(request, event)
            case _:
                self._handle_leg(event)

    def _handle_preparation(self, request: Request, event: ev.Prepared | ev.PrepareFailed) -> None:
        if isinstance(event, ev.PrepareFailed):
            if event.retryable and self._may_retry(request):
                request.state = REQUEST.next(request.state, "prepare retried")
                self._queues.preparations.append(request)
            else:
                self._fail(request, Reason.PREPARE_FAILED)
            return
        request.shape = event.shape
        media = bool(event.shape.items)
        request.state = REQUEST.next(
            request.state, "prepared with media" if media else "prepared as text"
        )
        if media:
            self._queues.add_items(request, self._now_ns)
        else:
            self._queues.add_legs(request)

    def _handle_leg(self, event: PrefillEvent | DecodeEvent) -> None:
        request = self._requests.get(event.request_id)
        if request is None or not 0 <= event.leg < len(request.legs):
            return
        leg = request.legs[event.leg]
        running = LegState.PREFILLING if isinstance(event, PrefillEvent) else LegState.DECODING
        if leg.attempt != event.attempt or leg.state is not running:
            return
        match event:
            case ev.PrefillFinished():
                self._prefill_finished(request, leg, event.final)
            case ev.PrefillFailed():
                self._legs_failed(request, [leg], event.retryable, Reason.PREFILL_FAILED)
            case ev.EmbeddingMissing():
                self._embedding_missing(request, leg)
            case ev.FirstToken():
                leg.started = True
            case ev.DecodeFinished():
                leg.move("decoded")
                self._leg_done(request, leg)
            case ev.DecodeFailed():
                self._legs_failed(request, [leg], event.retryable, Reason.DECODE_FAILED)
            case _:
                assert_never(event)

    def _received(self, event: ev.RequestReceived) -> None:
        if event.request_id in self._requests:
            raise ValueError(f"request id {event.request_id} is in use")
        needed = {Stage.PREFILL, Stage.DECODE} | ({Stage.ENCODE} if event.modalities else set())
        refusal = None
        if not self.pool.has(*needed):
            refusal = Reason.NO_WORKER
        elif not self._admission.admits(len(self._requests), self._num_bytes, event.num_bytes):
            refusal = Reason.OVERLOADED
        state = REQUEST.enter("rejected" if refusal else "admitted")
        if refusal is not None:
            self._actions.append(ev.Reject(event.request_id, refusal, self._retry_after_s()))
            return
        self._requests[event.request_id] = Request(
            event.request_id,
            state,
            event.num_bytes,
            event.num_choices,
            event.can_resume,
            deadline_ns=self._now_ns + self._limits.request_timeout_ns,
            retries_left=self._limits.max_retries,
            has_media=bool(event.modalities),
        )
        self._num_bytes += event.num_bytes
        self._actions.append(ev.Prepare(event.request_id))

    def _prepare_again(self) -> None:
        waiting, self._queues.preparations = self._queues.preparations, []
        for request in waiting:
            if self.pool.has(prepares(request)):
                self._actions.append(ev.Prepare(request.request_id))
            else:
                self._queues.preparations.append(request)

    # Encode -----------------------------------------------------------------------------------

    def _dispatch_encode(self) -> None:
        self._batch_wait_ns = None
        while self._queues.items:
            head = self._requests[self._queues.items[0].request_id]
            encoder = self.pool.pick(Stage.ENCODE, head.avoid, idle=self._batching.needs_idle)
            if encoder is None or not self.pool.has(Stage.PREFILL):
                return
            decision = self._batching.decide(self._queues.items, self._now_ns)
            if isinstance(decision, Wait):
                self._batch_wait_ns = decision.until_ns
                return
            self._start_encode(encoder, self._queues.take_items(decision.size), decision.reason)

    def _start_encode(self, encoder: Worker, queued: list[QueuedItem], reason: str) -> None:
        self._last_batch += 1
        batch_id = BatchId(self._last_batch)
        items = tuple(
            ev.EncodeItem(
                entry.request_id,
                entry.index,
                entry.item,
                self._place(self._requests[entry.request_id]).worker_id,
            )
            for entry in queued
        )
        self._batches[batch_id] = Batch(encoder.worker_id, tuple(queued))
        encoder.hold(batch_id, sum(entry.item.num_tokens for entry in queued))
        self._actions.append(ev.StartEncode(batch_id, encoder.worker_id, items, reason))

    def _encode_finished(self, batch_id: BatchId) -> None:
        batch = self._take_batch(batch_id)
        for entry in batch.items if batch else ():
            request = self._requests.get(entry.request_id)
            if request is None:
                continue
            request.pending.remove(entry.index)
            if not request.pending:
                request.state = REQUEST.next(request.state, "embeddings there")
                self._queues.add_legs(request)

    def _encode_failed(self, batch_id: BatchId, retryable: bool) -> None:
        batch = self._take_batch(batch_id)
        if batch is not None:
            self._items_failed(batch.worker_id, batch.items, retryable, Reason.ENCODE_FAILED)

    def _items_failed(
        self, worker_id: WorkerId, items: Iterable[QueuedItem], retryable: bool, reason: Reason
    ) -> None:
        """One failure; it costs a request one retry, however many of its items it took."""
        failed: dict[RequestId, list[QueuedItem]] = {}
        for entry in items:
            failed.setdefault(entry.request_id, []).append(entry)
        for request_id, entries in failed.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            request.avoid.add(worker_id)
            if retryable and self._may_retry(request):
                self._queues.put_back(entries)
            else:
                self._fail(request, reason)

    def _take_batch(self, batch_id: BatchId) -> Batch | None:
        batch = self._batches.pop(batch_id, None)
        if batch is not None:
            self.pool.release(batch.worker_id, batch_id)
        return batch

    # Prefill and decode -----------------------------------------------------------------------

    def _dispatch_prefill(self) -> None:
        if not self.pool.has(Stage.PREFILL, Stage.DECODE):
            return
        for request, leg in self._queues.take_legs():
            planned = request.destination
            worker = self._place(request)
            holds_embeddings = bool(request.items) and planned == worker.worker_id
            leg.move("prefill started")
            leg.worker_id = worker.worker_id
            worker.release(request.request_id)  # held by the request until a leg holds it
            worker.hold((request.request_id, leg.index), request.shape.num_prompt_tokens)
            self._actions.append(
                ev.StartPrefill(
                    request.request_id,
                    leg.index,
                    leg.attempt,
                    worker.worker_id,
                    "holds its embeddings" if holds_embeddings else "least backlog",
                    resume=leg.started,
                )
            )

    def _prefill_finished(self, request: Request, leg: Leg, final: bool) -> None:
        if final:
            leg.move("first token was the last")
            self._leg_done(request, leg)
            return
        decoder = self.pool.pick(Stage.DECODE, request.avoid)
        if decoder is None:  # the KV cache does not keep; prefill again when there is a decoder
            self._retry_or_fail(request, [leg], Reason.NO_WORKER)
            return
        leg.move("prefilled")
        self._hand_over(request, leg, decoder)
        self._actions.append(
            ev.StartDecode(request.request_id, leg.index, leg.attempt, decoder.worker_id)
        )

    def _hand_over(self, request: Request, leg: Leg, worker: Worker | None) -> None:
        """Move a leg's weight to the worker that runs it now."""
        key = (request.request_id, leg.index)
        self.pool.release(leg.worker_id, key)
        leg.worker_id = worker.worker_id if worker else None
        if worker:
            worker.hold(key, request.shape.num_prompt_tokens + request.shape.max_new_tokens)

    def _legs_failed(
        self, request: Request, legs: list[Leg], retryable: bool, reason: Reason
    ) -> None:
        """One failure of one worker; it costs one retry, however many legs it took."""
        worker_id = legs[0].worker_id
        assert worker_id is not None, "a leg that runs has a worker"
        self._avoid(request, worker_id)
        if retryable and (request.can_resume or not any(leg.started for leg in legs)):
            self._retry_or_fail(request, legs, reason)
        else:
            self._fail(request, reason)

    def _retry_or_fail(self, request: Request, legs: list[Leg], reason: Reason) -> None:
        if not self._may_retry(request):
            self._fail(request, reason)
            return
        for leg in legs:
            self._take_back(request, leg)
            if request.state is RequestState.GENERATING:
                self._queues.legs.append((request, leg))

    def _take_back(self, request: Request, leg: Leg) -> None:
        self._hand_over(request, leg, None)
        prefilling = leg.state is LegState.PREFILLING
        leg.move("prefill retried" if prefilling else "decode retried")

    def _embedding_missing(self, request: Request, leg: Leg) -> None:
        """The first leg that misses it has the items encoded again, for all legs."""
        first = request.state is RequestState.GENERATING
        if first and not (request.items and self._may_retry(request)):
            self._fail(request, Reason.ENCODE_FAILED)
            return
        self._take_back(request, leg)
        if first:
            request.state = REQUEST.next(request.state, "embedding missing")
            self._queues.drop(request)
            self._queues.add_items(request, self._now_ns)

    def _leg_done(self, request: Request, leg: Leg) -> None:
        self._hand_over(request, leg, None)
        if all(other.state is LegState.DONE for other in request.legs):
            self._close(request, "legs done")

    # Workers ----------------------------------------------------------------------------------

    def _worker_lost(self, worker_id: WorkerId) -> None:
        if not self.pool.lose(worker_id):
            return
        lost = [id_ for id_, batch in self._batches.items() if batch.worker_id == worker_id]
        items = [entry for batch_id in lost for entry in self._batches.pop(batch_id).items]
        self._items_failed(worker_id, items, retryable=True, reason=Reason.WORKER_LOST)
        for request in list(self._requests.values()):
            if request.destination == worker_id:
                self._avoid(request, worker_id)
            legs = [leg for leg in request.legs if leg.worker_id == worker_id]
            if legs:
                self._legs_failed(request, legs, retryable=True, reason=Reason.WORKER_LOST)

    def _avoid(self, request: Request, worker_id: WorkerId) -> None:
        """Keep a request from a worker that failed it; its embeddings go elsewhere from now on."""
        request.avoid.add(worker_id)
        if request.destination == worker_id:
            self.pool.release(worker_id, request.request_id)
            request.destination = None

    def _place(self, request: Request) -> Worker:
        """The prefill worker of a request: one for all its items and legs, until that one fails."""
        worker = self.pool.get(request.destination)
        if worker is None:
            worker = self.pool.pick(Stage.PREFILL, request.avoid)
            assert worker is not None, "callers have checked that there is one"
            request.destination = worker.worker_id
        worker.hold(request.request_id, request.shape.num_prompt_tokens)
        return worker

    # Ends -------------------------------------------------------------------------------------

    def _may_retry(self, request: Request) -> bool:
        request.retries_left -= 1
        return request.retries_left >= 0

    def _fail(self, request: Request, reason: Reason, cause: str = "failed") -> None:
        self._close(request, cause)
        self._actions.append(ev.Fail(request.request_id, reason))

    def _close(self, request: Request, cause: str) -> None:
        """Forget an open request; its running work is cancelled unless it has its answer."""
        request.state = REQUEST.next(request.state, cause)
        request_id = request.request_id
        del self._requests[request_id]
        self._num_bytes -= request.num_bytes
        self._queues.drop(request)
        for leg in request.legs:
            self._hand_over(request, leg, None)
        self.pool.release(request.destination, request_id)
        for batch_id in [id_ for id_, batch in self._batches.items() if self._is_orphan(batch)]:
            self._take_batch(batch_id)
        done = request.state is RequestState.COMPLETED
        self._actions.append((ev.Complete if done else ev.Cancel)(request_id))

    def _is_orphan(self, batch: Batch) -> bool:
        return not any(entry.request_id in self._requests for entry in batch.items)

    def _expire(self) -> None:
        for request in list(self._requests.values()):
            if request.deadline_ns > self._now_ns:
                break
            self._fail(request, Reason.TIMED_OUT, "timed out")
        for stage, since in self.pool.starved_since.items():
            if since + self._limits.worker_wait_ns <= self._now_ns:
                for request_id in dict.fromkeys(self._queues.needing(stage)):
                    self._fail(self._requests[request_id], Reason.NO_WORKER)

    def _retry_after_s(self) -> int:
        """Whole seconds until the least loaded prefill worker is through what it holds."""
        worker = self.pool.pick(Stage.PREFILL)
        backlog = worker.backlog_tokens if worker is not None else 0
        return max(1, ceil(self._estimates.prefill_s(backlog)))
