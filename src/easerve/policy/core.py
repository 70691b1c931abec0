"""The control core: ``step(events, now_ns) -> actions`` and ``next_deadline() -> int | None``.

Invariants. Every admitted request ends in exactly one of Complete, Fail or the client's own
cancellation; every refused one in exactly one Reject. A worker holds work only for open requests.
A late or repeated answer (an old batch, an old attempt, a closed request) is ignored. When no
request is open, nothing is kept but the workers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from math import ceil
from typing import TypeAlias, assert_never

from easerve.policy import events as ev
from easerve.policy.adapt import Adapt
from easerve.policy.admission import Admission
from easerve.policy.arrivals import Arrivals
from easerve.policy.directory import Directory
from easerve.policy.encoding import Batch, Encoding, requests_of
from easerve.policy.estimates import Estimates
from easerve.policy.flow import Flow
from easerve.policy.knobs import Knobs
from easerve.policy.lifecycle import REQUEST, LegState, RequestState
from easerve.policy.microbatch import Closing, MicroBatcher
from easerve.policy.offload import Offload
from easerve.policy.partition import SHARED, Devices, Partition
from easerve.policy.placing import Placing
from easerve.policy.pool import Pool, Worker
from easerve.policy.queues import Queues, prepares
from easerve.policy.state import Leg, Request
from easerve.policy.supply import Supply
from easerve.types import NS_PER_S, Reason, RequestId, Side, Stage, WorkerId

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


class Core:
    """Decides for one pool of engines. Single-threaded; the caller owns the clock."""

    def __init__(
        self,
        knobs: Knobs,
        admission: Admission,
        estimates: Estimates,
        limits: Limits,
        devices: Devices | None = None,
    ) -> None:
        self._admission, self._limits = admission, limits
        self.pool = Pool()
        self._adapt = Adapt(knobs)
        self._flow = Flow(knobs, estimates)
        self._requests: dict[RequestId, Request] = {}  # by arrival, so by deadline as well
        self._num_bytes = 0  # of the open requests
        self._queues = Queues()
        self._encoding = Encoding(knobs)
        self._directory = Directory()
        self._placing = Placing(knobs, self.pool, self._directory, self._flow.times)
        self._batcher = MicroBatcher(knobs, self._encoding, self._flow.times)
        self._partition = Partition(knobs, devices)
        self._supply = Supply(
            self.pool, self._encoding, self._directory, self._batcher, self._partition
        )
        self._actions: list[ev.Action] = []
        self._now_ns = 0

    # Interface --------------------------------------------------------------------------------

    def step(self, events: Iterable[ev.Event], now_ns: int) -> list[ev.Action]:
        """Take in everything that happened at ``now_ns`` (in any order) and decide."""
        self._now_ns = now_ns
        told = [*events]
        if len(told) > 1:
            told.sort(key=ev.sort_key)
        for event in told:
            self._handle(event)
        self.pool.note_starved_stages(now_ns)
        self._expire()
        self._prepare_again()
        self._adapt_knobs()
        self._batcher.wake_ns = self._flow.wake_ns = None
        self._dispatch_encode()
        while self._dispatch_prefill():
            self._expire()  # it may be held back for an engine that has been missing for too long
            self._dispatch_encode()
        actions, self._actions = self._actions, []
        return actions

    def next_deadline(self) -> int | None:
        """When to call ``step`` again at the latest, events or not."""
        first = next(iter(self._requests.values()), None)
        times = [first.deadline_ns] if first else []
        if first and self._adapt.due_ns is not None:
            times.append(self._adapt.due_ns)
        for stage, since in self.pool.starved_since.items():
            if next(self._needing(stage), None):
                times.append(since + self._limits.worker_wait_ns)
        wakes = (self._batcher.wake_ns, self._flow.wake_ns)
        times += [wake_ns for wake_ns in wakes if wake_ns is not None]
        return min(times, default=None)

    @property
    def num_open(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._requests)

    @property
    def knobs(self) -> Knobs:
        """In force now; those that are adapted may not be as they were configured."""
        return self._flow.knobs

    @property
    def offload(self) -> Offload:
        """The sides that prefills go to."""
        return self._placing.offload

    def backlogs_s(self, now_ns: int) -> dict[Side, float]:
        """Of the least loaded prefill engine of each side, in seconds."""
        return self._placing.backlogs_s(now_ns)

    @property
    def arrivals(self) -> Arrivals:
        """Of requests with media, at the encode queue."""
        return self._batcher.arrivals

    def queue_lengths(self) -> dict[Stage, int]:
        """What waits for an engine: items for Encode, legs for Prefill."""
        return {
            Stage.ENCODE: self._encoding.num_queued,
            Stage.PREFILL: len(self._queues.legs),
        }

    # Events -----------------------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerJoined() | ev.WorkerLost():
                self._worker_lost(event.worker_id)  # one that comes back has lost what it held
                if isinstance(event, ev.WorkerJoined):
                    self._joined(event)
            case ev.KnobsChanged():
                self._actions += self._adapt.configure(event.knobs)
                self._retune()
            case ev.Evicted():
                self._directory.dropped(event.worker_id, event.keys)
            case ev.Draining():
                self._batcher.draining = True
            case ev.RequestReceived():
                self._received(event)
            case ev.EncodeFinished() | ev.EncodeFailed():
                self._encode_ended(event)
            case ev.ClientCancelled():
                if event.request_id in self._requests:
                    self._close(self._requests[event.request_id], "cancelled")
            case ev.Prepared() | ev.PrepareFailed():
                request = self._requests.get(event.request_id)
                if request is not None and request.state is RequestState.PREPARING:
                    self._handle_preparation(request, event)
            case _:
                self._handle_leg(event)

    def _joined(self, event: ev.WorkerJoined) -> None:
        self.pool.join(Worker(*astuple(event)))
        if event.stage is Stage.ENCODE and self._partition.standing != SHARED:
            self._divide(event.worker_id)

    def _adapt_knobs(self) -> None:
        if self._adapt.due_ns is None or self._now_ns < self._adapt.due_ns:
            return
        num_prefills = {side: len(workers) for side, workers in self.pool.sides().items()}
        num_encoders = len(self.pool.of(Stage.ENCODE))
        retuned = self._adapt.tick(num_prefills, num_encoders, self._flow.times, self._now_ns)
        if retuned:
            self._actions += retuned
            self._retune()

    def _retune(self) -> None:
        before, knobs = self._partition.standing, self._adapt.knobs
        self._flow.knobs = knobs
        for policy in (self._batcher, self.offload, self._partition):
            policy.retune(knobs)
        if self._partition.standing != before:
            for worker in self.pool.of(Stage.ENCODE):
                self._divide(worker.worker_id)

    def _divide(self, worker_id: WorkerId) -> None:
        self._actions.append(ev.Divide(worker_id, self._partition.standing))

    def _handle_preparation(self, request: Request, event: ev.Prepared | ev.PrepareFailed) -> None:
        if isinstance(event, ev.PrepareFailed):
            if event.retryable and self._may_retry(request):
                request.state = REQUEST.next(request.state, "prepare retried")
                self._queues.preparations.append(request)
            else:
                self._fail(request, Reason.PREPARE_FAILED)
            return
        request.shape = event.shape
        self._flow.prepared(request)
        media = bool(event.shape.items)
        request.state = REQUEST.next(
            request.state, "prepared with media" if media else "prepared as text"
        )
        if media:
            for item in request.items:
                self._flow.times.seen(item)
            if self._supply.want_unknown(request, self._now_ns):
                self._batcher.arrivals.observe(self._now_ns)
            if not request.pending:
                self._sent(request)
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
                self._prefill_finished(request, leg, event)
            case ev.PrefillFailed():
                self._legs_failed(request, [leg], event.retryable, Reason.PREFILL_FAILED)
            case ev.EmbeddingMissing():
                self._embedding_missing(request, leg, event.keys)
            case ev.FirstToken():
                leg.started = True
            case ev.DecodeFinished():
                self._observe_decode(event, leg)
                leg.move("decoded")
                self._leg_done(request, leg)
            case ev.DecodeFailed():
                self._legs_failed(request, [leg], event.retryable, Reason.DECODE_FAILED)
            case _:
                assert_never(event)

    def _received(self, event: ev.RequestReceived) -> None:
        if event.request_id in self._requests:
            raise ValueError(f"request id {event.request_id} is in use")
        refusal = self._refusal(event)
        state = REQUEST.enter("rejected" if refusal else "admitted")
        if refusal is not None:
            self._actions.append(refusal)
            return
        request = self._requests[event.request_id] = Request(
            event.request_id,
            state,
            event.num_bytes,
            event.num_choices,
            event.can_resume,
            received_ns=self._now_ns,
            deadline_ns=self._now_ns + self._limits.request_timeout_ns,
            retries_left=self._limits.max_retries,
            num_media=len(event.modalities),
        )
        self._num_bytes += event.num_bytes
        self._flow.admitted(request)
        if self.knobs.adapt:
            self._adapt.asked(self._placing.backlog_tokens(), self._now_ns)
        self._actions.append(ev.Prepare(event.request_id))

    def _refusal(self, event: ev.RequestReceived) -> ev.Reject | None:
        needed = {Stage.PREFILL, Stage.DECODE} | ({Stage.ENCODE} if event.modalities else set())
        if not self.pool.has(*needed):
            return ev.Reject(event.request_id, Reason.NO_WORKER, 1)
        if not self._admission.admits(len(self._requests), self._num_bytes, event.num_bytes):
            return ev.Reject(event.request_id, Reason.OVERLOADED, self._retry_after_s())
        excess_s = self.queue_s() - self.knobs.max_queue_s if event.modalities else 0.0
        if excess_s > 0:
            return ev.Reject(event.request_id, Reason.OVERLOADED, ceil(excess_s))
        return None

    def _prepare_again(self) -> None:
        waiting, self._queues.preparations = self._queues.preparations, []
        for request in waiting:
            if self.pool.has(prepares(request)):
                self._actions.append(ev.Prepare(request.request_id))
            else:
                self._queues.preparations.append(request)

    # Encode -----------------------------------------------------------------------------------

    def _dispatch_encode(self) -> None:
        if not self.pool.has(Stage.ENCODE, Stage.PREFILL, Stage.DECODE):
            return
        if not self._encoding.num_queued:
            self._batcher.rest()
            return
        started = True
        while started:
            started = False
            least_s, most_s = self._placing.least_and_most_s(self._now_ns)
            gate = self._flow.opening(self.pool, most_s, self._now_ns)
            for closing in self._batcher.close(self.pool, gate, least_s, self._now_ns):
                self._start_encode(closing)
                started = True

    def queue_s(self) -> float:
        """Seconds until all that waits for Encode has passed it; 0 while there is no engine."""
        return self._flow.queue_s(self.pool, self._encoding.num_queued, self._placing.num_prefills)

    def _start_encode(self, closing: Closing) -> None:
        """Its destinations are drawn first. Prefill starts with it, and waits for what comes."""
        requests = requests_of(closing.entries)
        self._placing.place(requests, self._now_ns, closing.worker.worker_id)
        self._adapt.closed(closing.decision.reason, closing.decision.wait_s)
        self._actions.append(self._supply.start(closing, self._now_ns))
        for request in requests:
            self._flow.let_pass(request)
            self._actions += self._supply.complete(request, self._now_ns)
            if not request.pending:
                self._sent(request)

    def _encode_ended(self, event: ev.EncodeFinished | ev.EncodeFailed) -> None:
        batch = self._encoding.take(event.batch_id)
        if batch is None:
            return
        worker, seconds = self.pool.get(batch.worker_id), None
        assert worker is not None, "the batches of a lost engine are forgotten"
        if batch.forward:
            since_ns = worker.running[event.batch_id]
            seconds = worker.finish(event.batch_id, since_ns, self._now_ns)
        if isinstance(event, ev.EncodeFailed):
            self._encode_failed(batch, event.retryable)
            return
        if seconds is not None:
            self._flow.times.encode.observe(batch.num_tokens, seconds)
            self._adapt.encoded(len(batch.entries), batch.num_tokens, seconds)
        self._supply.arrived(batch)
        for request in self._encoding.finished(batch):
            self._sent(request)
        for request in requests_of(batch.entries):
            self._begin_prefills(request)

    def _begin_prefills(self, request: Request) -> None:
        """Those that wait for nothing else, now that something has come."""
        for leg in request.legs:
            worker = self.pool.get(leg.worker_id) if leg.state is LegState.PREFILLING else None
            if worker is not None and not self._encoding.coming(request, worker.worker_id):
                worker.begin((request.request_id, leg.index), self._now_ns)

    def _sent(self, request: Request) -> None:
        """Nothing holds its prefill back any more."""
        request.state = REQUEST.next(request.state, "embeddings sent")
        self._queues.add_legs(request)

    def _held_back(self, request: Request) -> None:
        """Something is to be encoded again; prefills that run wait for it."""
        if request.pending and request.state is RequestState.GENERATING:
            request.state = REQUEST.next(request.state, "to be encoded again")
            self._queues.drop(request)

    def _encode_failed(self, batch: Batch, retryable: bool) -> None:
        if retryable:
            self._encode_again([batch], Reason.ENCODE_FAILED)
        elif len(batch.entries) > 1:
            self._put_back(batch, 2)  # an item at fault is alone in the end
        else:
            for request in requests_of(batch.entries):
                self._fail(request, Reason.ENCODE_FAILED)

    def _encode_again(self, batches: Sequence[Batch], reason: Reason) -> None:
        """After one failure of one encoder, which costs a request one retry, however many items.

        What an engine may have died of is not given to the next in company.
        """
        for request in requests_of(entry for batch in batches for entry in batch.entries):
            request.avoid.add(batches[0].worker_id)
            if not self._may_retry(request):
                self._fail(request, reason)
        for batch in batches:
            self._put_back(batch, len(batch.entries))

    def _put_back(self, batch: Batch, num_parts: int) -> None:
        self._encoding.put_back(batch, num_parts)
        for request in requests_of(batch.entries):
            self._held_back(request)

    # Prefill and decode -----------------------------------------------------------------------

    def _dispatch_prefill(self) -> bool:
        """Start what may start; whether an encoder is needed for something after all."""
        if not self._queues.legs or not self.pool.has(Stage.PREFILL, Stage.DECODE):
            return False
        idle = self.pool.pick(Stage.ENCODE, max_work=0)
        _, most_s = self._placing.least_and_most_s(self._now_ns)
        gate = self._flow.opening(self.pool, most_s, self._now_ns, idle_encoder=idle is not None)
        held_back = False
        for request, leg in self._queues.take_legs():
            if not gate.admits(request):
                self._queues.legs.append((request, leg))
                continue
            self._flow.let_pass(request)
            self._placing.place([request], self._now_ns)
            self._actions += self._supply.complete(request, self._now_ns)
            if request.pending:  # all of its legs come again when it is supplied
                self._held_back(request)
                held_back = True
            else:
                self._start_prefill(request, leg)
        return held_back

    def _start_prefill(self, request: Request, leg: Leg) -> None:
        worker = self.pool.get(request.destination)
        assert worker is not None, "it was placed in this step"
        assert request.placement is not None, "it was placed in this step"
        leg.move("prefill started")
        leg.worker_id, leg.since_ns = worker.worker_id, self._now_ns
        leg.num_missed = request.num_missed
        worker.release(request.request_id)  # held by the request until a leg holds it
        key = request.request_id, leg.index
        coming = self._encoding.coming(request, worker.worker_id)
        worker.hold(key, request.shape.num_prompt_tokens)
        if not coming:
            worker.begin(key, self._now_ns)
        self._actions.append(
            ev.StartPrefill(
                request.request_id,
                leg.index,
                leg.attempt,
                worker.worker_id,
                request.chosen,
                request.placement,
                coming,
                self._supply.num_held(request, worker.worker_id),
                resume=leg.started,
            )
        )

    def _prefill_finished(self, request: Request, leg: Leg, event: ev.PrefillFinished) -> None:
        worker = self.pool.get(leg.worker_id)
        assert worker is not None, "a leg that runs has a worker"
        since_ns = leg.since_ns + int(event.wait_s * NS_PER_S)
        seconds = worker.finish((request.request_id, leg.index), since_ns, self._now_ns)
        self._flow.times.prefilled(seconds, request.shape.num_prompt_tokens)
        self._adapt.prefilled(worker.side, seconds, request.shape.num_prompt_tokens)
        if event.final:
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

    def _observe_decode(self, event: ev.DecodeFinished, leg: Leg) -> None:
        worker = self.pool.get(leg.worker_id)
        if worker is not None and event.tpot_s:
            self._flow.decoded(event.decode_s, event.tpot_s, leg, worker)

    def _hand_over(self, request: Request, leg: Leg, worker: Worker | None) -> None:
        """Move a leg's weight to the worker that runs it now."""
        key = (request.request_id, leg.index)
        self.pool.release(leg.worker_id, key)
        leg.worker_id = worker.worker_id if worker else None
        if worker:
            tokens = request.shape.num_prompt_tokens + request.shape.max_new_tokens
            worker.start(key, tokens, self._now_ns)
            leg.beside = len(worker.running)

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

    def _embedding_missing(self, request: Request, leg: Leg, keys: Sequence[str]) -> None:
        """They are sent again, or encoded again where no encoder has them, once for all legs.

        That costs a retry, unless they are just late. Nothing seems to get there the second time.
        """
        worker_id = leg.worker_id
        assert worker_id is not None, "a leg that runs has a worker"
        self._directory.dropped(worker_id, keys)
        late = bool(keys) and all(self._encoding.goes_to(worker_id, key) for key in keys)
        if leg.num_missed == request.num_missed and not late:
            request.num_missed += 1
            if not self._may_retry(request):
                self._fail(request, Reason.ENCODE_FAILED)
                return
            if request.num_missed > 1:
                self._avoid(request, worker_id)
        self._take_back(request, leg)
        if request.state is RequestState.GENERATING:
            self._queues.legs.append((request, leg))

    def _leg_done(self, request: Request, leg: Leg) -> None:
        self._hand_over(request, leg, None)
        if all(other.state is LegState.DONE for other in request.legs):
            self._close(request, "legs done")

    # Workers ----------------------------------------------------------------------------------

    def _worker_lost(self, worker_id: WorkerId) -> None:
        if not self.pool.lose(worker_id):
            return
        self._directory.lost(worker_id)
        self._encode_again(self._encoding.lost(worker_id), Reason.WORKER_LOST)
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

    # Ends -------------------------------------------------------------------------------------

    def _may_retry(self, request: Request) -> bool:
        request.retries_left -= 1
        return request.retries_left >= 0

    def _fail(self, request: Request, reason: Reason, cause: str = "failed") -> None:
        self._close(request, cause)
        self._actions.append(ev.Fail(request.request_id, reason))

    def _close(self, request: Request, cause: str) -> None:
        """Forget an open request; its running work is cancelled unless it has its answer."""
        self._flow.closed(request)
        request.state = REQUEST.next(request.state, cause)
        request_id = request.request_id
        del self._requests[request_id]
        self._num_bytes -= request.num_bytes
        self._queues.drop(request)
        orphans = self._encoding.drop(request)
        for batch_id, batch in orphans:
            self.pool.release(batch.worker_id, batch_id)
        for leg in request.legs:
            self._hand_over(request, leg, None)
        self.pool.release(request.destination, request_id)
        done = request.state is RequestState.COMPLETED
        self._actions.append((ev.Complete if done else ev.Cancel)(request_id))
        self._actions += [ev.CancelEncode(batch_id) for batch_id, _ in orphans]

    def _expire(self) -> None:
        for request in list(self._requests.values()):
            if request.deadline_ns > self._now_ns:
                break
            self._fail(request, Reason.TIMED_OUT, "timed out")
        for stage, since in self.pool.starved_since.items():
            if since + self._limits.worker_wait_ns <= self._now_ns:
                for request in dict.fromkeys(self._needing(stage)):
                    self._fail(request, Reason.NO_WORKER)

    def _needing(self, stage: Stage) -> Iterator[Request]:
        """The requests that cannot go on without an engine of a stage."""
        yield from self._queues.needing(stage)
        yield from self._encoding.waiting()

    def _retry_after_s(self) -> int:
        """Whole seconds until the least loaded prefill worker is through what it holds."""
        worker = self.pool.pick(Stage.PREFILL)
        backlog = worker.backlog_tokens if worker is not None else 0
        return max(1, ceil(self._flow.times.prefill_token_s * backlog))
