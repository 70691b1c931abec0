"""EAServe: the very core that serves, told by modelled engines what happens.

What happens at an instant is gathered, and the core steps when nothing is left of it, as under
the driver of the server. Like that driver it steps at once, with what was told before, when an
engine joins or is lost and when the end of an answer is delivered: whatever the instant still
brings comes after that. So both decide alike, step by step (tests/sim/test_parity.py).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from easerve.goodput import Outcome
from easerve.policy import events as ev
from easerve.policy.core import Core
from easerve.sim.clock import Effect
from easerve.sim.encoder import Call
from easerve.sim.fleet import Entry, Fleet
from easerve.sim.lanes import Lanes
from easerve.sim.run import Request, Run
from easerve.types import NS_PER_S, BatchId, MediaItem, RequestId, Shape, Stage, WorkerId

Leg: TypeAlias = tuple[RequestId, int, int]
"""Request, leg, attempt."""
Observe: TypeAlias = Callable[[int, Sequence[ev.Event], Sequence[ev.Action]], None]
"""Is told of every step of the core, as a decision log is."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine dies, and joins again as new; ``back_s`` None: never."""

    worker: WorkerId
    at_s: float
    back_s: float | None = None


class Served:
    """Steps the core and performs its actions.

    ``prepare_s``: that one of ``num_preparations`` workers takes to decode an item. Then an engine
    renders the prompt, for which no time is counted. ``first_at``: whose first token the client
    sees.
    """

    def __init__(
        self,
        core: Core,
        fleet: Fleet,
        workers: Sequence[ev.WorkerJoined],
        requests: Sequence[Request],
        run: Run,
        prepare_s: float = 0.0,
        num_preparations: int = 1,
        first_at: Stage = Stage.DECODE,
        failures: Sequence[Failure] = (),
        observe: Observe | None = None,
    ) -> None:
        self._core, self._fleet, self._run = core, fleet, run
        self._workers = {worker.worker_id: worker for worker in workers}
        width = len(str(len(requests)))
        self._requests = {
            RequestId(f"r{index:0{width}}"): request for index, request in enumerate(requests)
        }
        self._prepare_s, self._preparation = prepare_s, Lanes(num_preparations)
        self._first_at = first_at
        self._failures, self._observe = failures, observe
        self._told: list[ev.Event] = []
        self._deadline_ns: int | None = None
        self._there: dict[WorkerId, Stage] = {}
        self._preparing: set[RequestId] = set()
        self._media: set[RequestId] = set()
        """Requests whose media are decoded."""
        self._first_ns: dict[RequestId, int] = {}
        self._calls: dict[BatchId, tuple[WorkerId, Call]] = {}
        self._running: dict[RequestId, dict[Leg, WorkerId]] = {}
        self._sources: dict[RequestId, dict[Leg, WorkerId]] = {}
        """The prefill engines that hold KV caches of legs that do not decode; those of earlier
        attempts are given back with the others when the request ends."""
        self._decode_first_ns: dict[Leg, int] = {}

    # Time -------------------------------------------------------------------------------------

    def start(self) -> Iterator[Effect]:
        """What happens of itself: engines join, requests come, engines die."""
        for worker in self._workers.values():
            yield 0, partial(self._join, worker)
        for request_id, request in self._requests.items():
            kinds = tuple(item.modality for item in request.items)
            received = partial(self._tell, ev.RequestReceived(request_id, 1, kinds))
            arrived = partial(self._fleet.host.arrived, received)
            yield round(request.at_s * NS_PER_S), arrived
        for failure in self._failures:
            yield round(failure.at_s * NS_PER_S), partial(self._lose, failure)
            if failure.back_s is not None:
                joined = self._workers[failure.worker]
                yield round(failure.back_s * NS_PER_S), partial(self._join, joined)

    def settle(self, now_ns: int) -> Iterator[Effect]:
        due = self._deadline_ns is not None and self._deadline_ns <= now_ns
        if self._told or due:
            yield from self._step(now_ns)

    def _step(self, now_ns: int) -> Iterator[Effect]:
        told, self._told = self._told, []
        actions = self._core.step(told, now_ns)
        self._deadline_ns = self._core.next_deadline()
        if self._observe is not None:
            self._observe(now_ns, told, actions)
        for action in actions:
            yield from self._perform(action, now_ns)

    def deadline_ns(self) -> int | None:
        return self._deadline_ns

    def _tell(self, event: ev.Event, now_ns: int) -> Iterator[Effect]:
        self._told.append(event)
        yield from ()

    def _answer(self, event: ev.Event, now_ns: int) -> Iterable[Effect]:
        """What an action brings before any time has passed: another step at this instant."""
        self._told.append(event)
        self._deadline_ns = now_ns
        return ()

    def _join(self, worker: ev.WorkerJoined, now_ns: int) -> Iterator[Effect]:
        self._there[worker.worker_id] = worker.stage
        self._told.append(worker)
        yield from self._step(now_ns)

    def _lose(self, failure: Failure, now_ns: int) -> Iterator[Effect]:
        """Whatever it still had to say is not told."""
        worker_id = failure.worker
        if self._there.pop(worker_id, None) is None:
            return
        back_ns = now_ns if failure.back_s is None else round(failure.back_s * NS_PER_S)
        self._run.note(worker_id, "lost", now_ns, back_ns)
        for batch_id, (encoder, _) in list(self._calls.items()):
            if encoder == worker_id:
                del self._calls[batch_id]
        for legs in (*self._running.values(), *self._sources.values()):
            for leg in [leg for leg, engine in legs.items() if engine == worker_id]:
                del legs[leg]
        yield from self._fleet.lose(worker_id, now_ns)
        self._told.append(ev.WorkerLost(worker_id))
        yield from self._step(now_ns)

    # Actions ----------------------------------------------------------------------------------

    def _perform(self, action: ev.Action, now_ns: int) -> Iterable[Effect]:
        match action:
            case ev.Prepare():
                return self._prepare(action.request_id, now_ns)
            case ev.StartEncode():
                return self._encode(action, now_ns)
            case ev.CancelEncode():
                if action.batch_id in self._calls:
                    encoder, call = self._calls.pop(action.batch_id)
                    return self._fleet.drop(encoder, call, now_ns)
            case ev.Divide() | ev.Retuned():
                self._change(action, now_ns)
            case ev.StartPrefill():
                return self._prefill(action, now_ns)
            case ev.StartDecode():
                return self._decode(action, now_ns)
            case ev.Complete():
                return self._end(action.request_id, "completed", now_ns)
            case ev.Cancel():
                return self._cancel(action.request_id, now_ns)
            case ev.Reject():
                return self._end(action.request_id, "rejected", now_ns)
            case ev.Fail():
                return self._end(action.request_id, "failed", now_ns)
        return ()

    def _change(self, action: ev.Divide | ev.Retuned, now_ns: int) -> None:
        if isinstance(action, ev.Divide):
            self._fleet.divide(action.worker_id, action.demand)
        else:
            self._run.retuned.append((now_ns, action))

    def _prepare(self, request_id: RequestId, now_ns: int) -> Iterable[Effect]:
        """An item that is decoded stays so, should the prompt have to be rendered once more."""
        self._preparing.add(request_id)
        end_ns = now_ns
        if request_id not in self._media:
            for _ in self._requests[request_id].items:
                end_ns = max(end_ns, self._preparation.take(self._prepare_s, now_ns)[1])
        if end_ns > now_ns:
            return [(end_ns, partial(self._render, request_id))]
        return self._render(request_id, now_ns)

    def _render(self, request_id: RequestId, now_ns: int) -> Iterable[Effect]:
        if request_id not in self._preparing:
            return ()
        self._media.add(request_id)
        num_items = len(self._requests[request_id].items)
        if (Stage.ENCODE if num_items else Stage.PREFILL) not in self._there.values():
            return self._prepared(ev.PrepareFailed(request_id, retryable=True), now_ns)
        prepared = partial(self._prepared, ev.Prepared(request_id, self._shape(request_id)))
        return self._fleet.prepare(num_items, prepared, now_ns)

    def _prepared(self, event: ev.Prepared | ev.PrepareFailed, now_ns: int) -> Iterable[Effect]:
        if event.request_id not in self._preparing:
            return ()
        self._preparing.remove(event.request_id)
        return self._answer(event, now_ns)

    def _encode(self, action: ev.StartEncode, now_ns: int) -> Iterable[Effect]:
        self._run.batches.append((now_ns, action))
        entries = [
            Entry(
                entry.item.key,
                self._requests[entry.waiters[0].request_id].items[entry.waiters[0].index],
                tuple(dict.fromkeys(waiter.destination for waiter in entry.waiters)),
            )
            for entry in action.items
        ]
        call, effects = self._fleet.encode(
            action.worker_id,
            entries,
            action.demand,
            partial(self._encoded, action.batch_id),
            now_ns,
        )
        self._calls[action.batch_id] = action.worker_id, call
        return effects

    def _encoded(self, batch_id: BatchId, now_ns: int) -> Iterator[Effect]:
        if self._calls.pop(batch_id, None) is not None:
            self._told.append(ev.EncodeFinished(batch_id))
        yield from ()

    def _prefill(self, action: ev.StartPrefill, now_ns: int) -> Iterable[Effect]:
        self._run.prefills.append((now_ns, action))
        leg = (action.request_id, action.leg, action.attempt)
        request = self._requests[action.request_id]
        keys = self._keys(action.request_id)
        there = [key for index, key in enumerate(keys) if index not in action.coming]
        missing = self._fleet.missing(action.worker_id, there)
        if missing:
            return self._answer(ev.EmbeddingMissing(*leg, missing), now_ns)
        self._running.setdefault(action.request_id, {})[leg] = action.worker_id
        return self._fleet.prefill(
            action.worker_id,
            leg,
            request.num_prompt_tokens,
            keys,
            partial(self._prefilled, leg),
            partial(self._unserved, leg),
            now_ns,
            final=request.num_tokens <= 1,
        )

    def _prefilled(self, leg: Leg, wait_s: float, now_ns: int) -> Iterator[Effect]:
        worker_id = self._ended(leg)
        if worker_id is None:
            return
        request_id, _, _ = leg
        final = self._requests[request_id].num_tokens <= 1
        if final or self._first_at is Stage.PREFILL:
            self._first_ns.setdefault(request_id, now_ns)
        self._told.append(ev.PrefillFinished(*leg, final, wait_s))
        if final:
            yield from self._step(now_ns)
        else:
            self._sources.setdefault(request_id, {})[leg] = worker_id

    def _unserved(self, leg: Leg, missing: tuple[str, ...], now_ns: int) -> Iterable[Effect]:
        """Embeddings do not come, or the prompt is too long."""
        if self._ended(leg) is not None:
            if missing:
                self._told.append(ev.EmbeddingMissing(*leg, missing))
            else:
                self._told.append(ev.PrefillFailed(*leg, retryable=False))
        return ()

    def _ended(self, leg: Leg) -> WorkerId | None:
        """A leg's prefill or decode has; the engine, None where nobody wants to hear of it."""
        return self._running.get(leg[0], {}).pop(leg, None)

    def _decode(self, action: ev.StartDecode, now_ns: int) -> Iterable[Effect]:
        leg = (action.request_id, action.leg, action.attempt)
        request = self._requests[action.request_id]
        self._running[action.request_id][leg] = action.worker_id
        return self._fleet.decode(
            action.worker_id,
            leg,
            self._sources[action.request_id].pop(leg),
            request.num_prompt_tokens,
            request.num_tokens,
            partial(self._first, leg),
            partial(self._decoded, leg, now_ns),
            partial(self._failed, leg),
            now_ns,
        )

    def _first(self, leg: Leg, now_ns: int) -> Iterable[Effect]:
        if leg in self._running.get(leg[0], {}):
            self._first_ns.setdefault(leg[0], now_ns)
            self._decode_first_ns[leg] = now_ns
            self._told.append(ev.FirstToken(*leg))
        return ()

    def _decoded(self, leg: Leg, begin_ns: int, now_ns: int) -> Iterator[Effect]:
        if self._ended(leg) is None:
            return
        later = self._requests[leg[0]].num_tokens - 1
        tpot_s = (now_ns - self._decode_first_ns.pop(leg)) / later / NS_PER_S
        self._told.append(ev.DecodeFinished(*leg, (now_ns - begin_ns) / NS_PER_S, tpot_s))
        yield from self._step(now_ns)

    def _failed(self, leg: Leg, retryable: bool, now_ns: int) -> Iterable[Effect]:
        """The engine that held its KV cache has died, or it is too long."""
        if self._ended(leg) is not None:
            self._told.append(ev.DecodeFailed(*leg, retryable))
        return ()

    def _cancel(self, request_id: RequestId, now_ns: int) -> Iterator[Effect]:
        self._preparing.discard(request_id)
        for leg, worker_id in self._running.pop(request_id, {}).items():
            yield from self._fleet.abort(worker_id, leg, now_ns)

    def _end(self, request_id: RequestId, outcome: Outcome, now_ns: int) -> Iterator[Effect]:
        self._running.pop(request_id, None)
        self._media.discard(request_id)
        first_ns = self._first_ns.pop(request_id, None)
        self._run.record(request_id, self._requests[request_id], first_ns, now_ns, outcome)
        for leg, worker_id in self._sources.pop(request_id, {}).items():
            yield from self._fleet.release(worker_id, leg, now_ns)

    def _shape(self, request_id: RequestId) -> Shape:
        request = self._requests[request_id]
        items = tuple(
            MediaItem(key, item.modality, item.num_tokens)
            for key, item in zip(self._keys(request_id), request.items, strict=True)
        )
        return Shape(request.num_prompt_tokens, request.num_tokens, items)

    def _keys(self, request_id: RequestId) -> Sequence[str]:
        """Of its items: no two are alike, unless the request says so."""
        request = self._requests[request_id]
        return request.keys or [f"{request_id}.{index}" for index in range(len(request.items))]
