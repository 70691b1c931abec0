"""The production driver over modelled engines in virtual time, and the simulator over the same.

Both have a core and a fleet of their own, made alike. What takes time is the fleet's doing; in
between is the simulator's ``Served`` on one side, on the other the driver with its tasks, behind
``engines.protocol.Engine``. A KV cache that nobody decodes is kept until its lease ends, which is
taken to be the end of its request, where the driver finds no engine that could give it back.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from easerve.config import Policy
from easerve.costs.base import Media
from easerve.costs.linear import LinearCosts
from easerve.engines import protocol
from easerve.engines.protocol import Delta, EncodeCall, Encoded, EngineError, Prefilled, Prompt
from easerve.policy import events as ev
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.policy.partition import SHARED, Demand, Devices, Layout
from easerve.serve.admin import knobs_of
from easerve.serve.driver import Driver
from easerve.serve.errors import ApiError
from easerve.serve.job import Job, MediaPart, Output, Outputs
from easerve.serve.media import Picture
from easerve.serve.metrics import Metrics
from easerve.serve.preparation import PreparationPool
from easerve.sim import clock
from easerve.sim.clock import Effect, Handler
from easerve.sim.encoder import EncodeEngine, EncodeLimits, whole
from easerve.sim.fleet import Entry, Fleet
from easerve.sim.lanes import Lanes
from easerve.sim.llm import LlmEngine, LlmLimits
from easerve.sim.run import Request, Run
from easerve.sim.sharing import Colocated, Device, Own
from easerve.sim.systems.served import Failure, Served
from easerve.types import NS_PER_S, MediaItem, RequestId, Stage, WorkerId

from .virtual_loop import VirtualLoop

LOST = EngineError("the KV cache is lost")
REFUSED = EngineError("the sequence is too long", 400)
STAGES = {"e": Stage.ENCODE, "p": Stage.PREFILL, "l": Stage.PREFILL, "d": Stage.DECODE}


@dataclass(frozen=True, slots=True)
class Costs(LinearCosts):
    """With transfers."""

    transfer_token_s: float = 0.0

    def embedding_transfer(self, num_tokens: int) -> float:
        return self.transfer_token_s * num_tokens

    def kv_transfer(self, num_tokens: int) -> float:
        return self.transfer_token_s * num_tokens


POLICY = Policy()
COSTS = Costs(0.05, 1e-4, 0.02, 1e-4, 0.01, 0.05, 1e-6)
ENCODE = EncodeLimits()
PREFILL = LlmLimits(20_000, token_budget=512, holds=True)
DECODE = LlmLimits(20_000, max_num_seqs=16)
LIMITS = Limits(request_timeout_ns=1000 * NS_PER_S)
LAYOUT = Layout(total=100, granule=10, min_prefill=10)


@dataclass(frozen=True, slots=True)
class Setup:
    """``workers``: names as in e0, p0, d0; l0 prefills beside e0, l1 beside e1.

    ``layout``: of the devices that they share; ``divided``: the core divides them.
    """

    workers: tuple[str, ...] = ("e0", "e1", "p0", "p1", "d0", "d1")
    policy: Policy = POLICY
    costs: Costs = COSTS
    encode: EncodeLimits = ENCODE
    max_batch_tokens: int = 2048
    prefill: LlmLimits = PREFILL
    decode: LlmLimits = DECODE
    prepare_s: float = 0.02
    num_preparations: int = 2
    limits: Limits = LIMITS
    max_requests: int = 1 << 20
    layout: Layout = LAYOUT
    divided: bool = False

    def core(self) -> Core:
        return Core(
            knobs_of(self.policy),
            Admission(self.max_requests, 1 << 40),
            self.costs,
            self.limits,
            Devices() if self.divided else None,
        )

    def joins(self) -> list[ev.WorkerJoined]:
        return [
            ev.WorkerJoined(
                WorkerId(name),
                STAGES[name[0]],
                self.decode.max_num_seqs,
                self.max_batch_tokens,
                (WorkerId(f"e{name[1:]}"),) if name[0] == "l" else (),
            )
            for name in self.workers
        ]

    def fleet(self, run: Run) -> Fleet:
        devices = {
            name[1:]: Colocated(self.layout, name, 0.1) for name in self.workers if name[0] == "l"
        }
        encoders = [
            self._encoder(name, devices.get(name[1:]), run)
            for name in self.workers
            if name[0] == "e"
        ]
        prefills = [
            self._prefill(name, devices.get(name[1:]) if name[0] == "l" else None, run)
            for name in self.workers
            if name[0] in "pl"
        ]
        decodes = [
            LlmEngine(name, Stage.DECODE, self.costs, Own(), self.decode, run)
            for name in self.workers
            if name[0] == "d"
        ]
        beside = {WorkerId(f"e{number}"): device for number, device in devices.items()}
        neighbours = {WorkerId(f"e{each}"): frozenset({WorkerId(f"l{each}")}) for each in devices}
        return Fleet(self.costs, run, encoders, prefills, decodes, beside, neighbours)

    def _encoder(self, name: str, shared: Colocated | None, run: Run) -> EncodeEngine:
        device: Device = shared or Own()
        part = whole if shared is None else partial(shared.encode_part, name)
        return EncodeEngine(name, self.costs, device, self.encode, run, part)

    def _prefill(self, name: str, shared: Colocated | None, run: Run) -> LlmEngine:
        device: Device = shared or Own()
        part = whole if shared is None else shared.prefill_part
        engine = LlmEngine(name, Stage.PREFILL, self.costs, device, self.prefill, run, part)
        if shared is not None:
            shared.wake = engine.wake
        return engine


# What a side did ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """Of a core: what it was told at an instant, in the order in which it takes it, and decided."""

    now_ns: int
    events: tuple[ev.Event, ...]
    actions: tuple[ev.Action, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Of a request, as its client sees it."""

    first_ns: int | None
    end_ns: int
    outcome: str


@dataclass(slots=True)
class Story:
    """``steps``: those in which something was told or decided."""

    fleet: Fleet
    core: Core
    run: Run
    steps: list[Step] = field(default_factory=list)
    ends: dict[str, End] = field(default_factory=dict)

    def step(self, now_ns: int, events: Sequence[ev.Event], actions: Sequence[ev.Action]) -> None:
        if events or actions:
            told = tuple(sorted(events, key=ev.sort_key))
            self.steps.append(Step(now_ns, told, tuple(actions)))

    def flush(self) -> None:
        """Of a log."""

    def close(self) -> None:
        """Of a log."""

    def leaks(self) -> dict[str, int]:
        """KV blocks that engines still count as taken."""
        engines = (self.fleet.prefills | self.fleet.decodes).items()
        taken = {name: each.limits.num_blocks - each.num_free_blocks for name, each in engines}
        return {name: num for name, num in taken.items() if num}


def simulated(setup: Setup, requests: Sequence[Request], failures: Sequence[Failure]) -> Story:
    run = Run()
    story = Story(setup.fleet(run), setup.core(), run)
    served = Served(
        story.core,
        story.fleet,
        setup.joins(),
        requests,
        run,
        setup.prepare_s,
        setup.num_preparations,
        failures=failures,
        observe=story.step,
    )
    clock.run(served, served.start())
    for name, record in zip(run.ids, run.records, strict=True):
        first_ns = None if record.first_token_s is None else round(record.first_token_s * NS_PER_S)
        assert record.end_s is not None
        story.ends[name] = End(first_ns, round(record.end_s * NS_PER_S), record.outcome)
    return story


def driven(
    setup: Setup,
    requests: Sequence[Request],
    failures: Sequence[Failure],
    kind: type[Driver] = Driver,
) -> Story:
    """``kind``: of driver, for those that have a fault."""
    bench = Bench(setup, requests, failures, kind)
    bench.loop.run()
    bench.close()
    return bench.story


# The driver's side --------------------------------------------------------------------------------


class Bench:
    """What happens of itself: engines join, requests come, engines die, as ``Served`` has it."""

    def __init__(
        self,
        setup: Setup,
        requests: Sequence[Request],
        failures: Sequence[Failure],
        kind: type[Driver],
    ) -> None:
        self.loop = VirtualLoop(deferred="_flush")  # type: ignore[abstract]
        run = Run()
        self.story = Story(setup.fleet(run), setup.core(), run)
        self.fleet = self.story.fleet
        self.requests = requests
        self.legs = count()
        self.media: dict[str, Media] = {}
        self.held: defaultdict[int, dict[Hashable, WorkerId]] = defaultdict(dict)
        """KV caches that nobody has pulled, by request; the engines that hold them."""
        self.engines: dict[WorkerId, ModelledEngine] = {}
        preparation = Preparation(self.loop, setup.prepare_s, setup.num_preparations)
        self.driver = kind(
            self.story.core,
            preparation,
            Metrics(),
            1 << 40,
            self.story,
            lambda: self.loop.now_ns,
        )
        self._workers = {worker.worker_id: worker for worker in setup.joins()}
        self._failures = failures
        self.loop.push(self._start())

    def close(self) -> None:
        """End what a driver with a fault has left."""
        with self.loop._running():
            self.driver.end_requests()
            self.loop._drain()
        assert not self.loop.errors, self.loop.errors

    def _start(self) -> Iterator[Effect]:
        for worker_id in self._workers:
            yield 0, partial(self._join, worker_id)
        for index, request in enumerate(self.requests):
            yield round(request.at_s * NS_PER_S), partial(self._submit, index)
        for failure in self._failures:
            yield round(failure.at_s * NS_PER_S), partial(self._lose, failure.worker)
            if failure.back_s is not None:
                yield round(failure.back_s * NS_PER_S), partial(self._join, failure.worker)

    def _join(self, worker_id: WorkerId, now_ns: int) -> Iterator[Effect]:
        engine = self.engines[worker_id] = ModelledEngine(self, self._workers[worker_id])
        self.driver.add_engine(engine)
        yield from ()

    def _lose(self, worker_id: WorkerId, now_ns: int) -> Iterator[Effect]:
        engine = self.engines.pop(worker_id, None)
        if engine is not None:
            engine.dead = True
            yield from self.fleet.lose(worker_id, now_ns)
            self.driver.lose_engine(worker_id)

    def _submit(self, index: int, now_ns: int) -> Iterator[Effect]:
        request = self.requests[index]
        request_id = f"r{index:0{len(str(len(self.requests)))}}"
        keys = request.keys or tuple(f"{request_id}.{each}" for each in range(len(request.items)))
        self.media |= dict(zip(keys, request.items, strict=True))
        self.driver.submit(
            Job(
                RequestId(request_id),
                {"index": index, "keys": keys},
                [MediaPart({}, key, "") for key in keys],
                num_bytes=1,
                outputs=Client(self, request_id, index),
            )
        )
        yield from ()


class Client(Outputs):
    """Reads at once, whatever comes."""

    def __init__(self, bench: Bench, request_id: str, index: int) -> None:
        super().__init__()
        self._bench, self._request_id, self._index = bench, request_id, index
        self._first_ns: int | None = None

    def put(self, output: Output) -> None:
        now_ns = self._bench.loop.now_ns
        if isinstance(output, tuple):
            if self._first_ns is None:
                self._first_ns = now_ns
            return
        outcome = "completed"
        if isinstance(output, ApiError):
            outcome = "rejected" if output.retry_after_s is not None else "failed"
        self._bench.story.ends[self._request_id] = End(self._first_ns, now_ns, outcome)
        self._bench.loop.call_soon(self._leases_end)

    def _leases_end(self) -> None:
        bench = self._bench
        for leg, source in bench.held.pop(self._index, {}).items():
            bench.loop.push(bench.fleet.release(source, leg, bench.loop.now_ns))


class Preparation(PreparationPool):
    """So many workers that take the same time for every picture."""

    def __init__(self, loop: VirtualLoop, prepare_s: float, num_workers: int) -> None:
        super().__init__(0, 0)
        self._loop, self._prepare_s, self._lanes = loop, prepare_s, Lanes(num_workers)

    async def prepare(self, url: str) -> Picture:
        _, end_ns = self._lanes.take(self._prepare_s, self._loop.now_ns)
        if end_ns > self._loop.now_ns:
            done = self._loop.create_future()
            self._loop.push([(end_ns, _resolves(done))])
            await done
        return Picture(url, url, 1, 1)

    async def close(self) -> None:
        """There is no process."""


class ModelledEngine:
    """An engine of a fleet, as the driver sees it."""

    def __init__(self, bench: Bench, joined: ev.WorkerJoined) -> None:
        self.worker_id, self.stage = joined.worker_id, joined.stage
        self.num_slots, self.max_batch_tokens = joined.num_slots, joined.max_batch_tokens
        self.beside = joined.beside
        self._bench, self._loop, self._fleet = bench, bench.loop, bench.fleet
        self.dead = False

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        request, keys = self._bench.requests[body["index"]], body["keys"]
        items = tuple(
            MediaItem(key, item.modality, item.num_tokens)
            for key, item in zip(keys, request.items, strict=True)
        )
        sampling = {"max_tokens": request.num_tokens}
        tokens = range(request.num_prompt_tokens)
        return Prompt(tokens, sampling, None, items, (0,) * len(items), body)

    async def encode(self, calls: Sequence[EncodeCall], demand: Demand = SHARED) -> Encoded:
        media, done = self._bench.media, self._loop.create_future()
        entries = [
            Entry(call.media.key, media[call.media.key], call.destinations) for call in calls
        ]
        call, effects = self._fleet.encode(
            self.worker_id, entries, demand, _resolves(done), self._loop.now_ns
        )
        self._loop.push(effects)
        try:
            await done
        except asyncio.CancelledError:
            if not self.dead:
                self._loop.push(self._fleet.drop(self.worker_id, call, self._loop.now_ns))
            raise
        return Encoded()

    async def divide(self, demand: Demand) -> None:
        self._fleet.divide(self.worker_id, demand)

    async def division(self) -> protocol.Division | None:
        return None

    async def prefill(self, prompt: Prompt, coming: Collection[int]) -> Prefilled:
        keys = [item.key for item in prompt.items]
        there = [key for index, key in enumerate(keys) if index not in coming]
        if missing := self._fleet.missing(self.worker_id, there):
            raise protocol.EmbeddingMissingError("", 500, missing)
        leg, done = next(self._bench.legs), self._loop.create_future()
        final = prompt.max_new_tokens <= 1

        def finished(wait_s: float, now_ns: int) -> Iterator[Effect]:
            if not done.done():
                done.set_result(wait_s)
            yield from ()

        def failed(missing: tuple[str, ...], now_ns: int) -> Iterator[Effect]:
            error = protocol.EmbeddingMissingError("", 500, missing) if missing else REFUSED
            yield from _fails(done, error)(now_ns)

        num_tokens, now_ns = len(prompt.token_ids), self._loop.now_ns
        effects = self._fleet.prefill(
            self.worker_id, leg, num_tokens, keys, finished, failed, now_ns, final=final
        )
        self._loop.push(effects)
        wait_s = await self._unless_cancelled(done, leg)
        if final:
            return Prefilled({}, Delta("", (0,), "length"), wait_s)
        self._bench.held[prompt.body["index"]][leg] = self.worker_id
        return Prefilled({"source": self.worker_id, "leg": leg}, None, wait_s)

    async def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        leg, num_tokens = handle["leg"], prompt.max_new_tokens
        del self._bench.held[prompt.body["index"]][leg]
        first, last = self._loop.create_future(), self._loop.create_future()
        self._loop.push(
            self._fleet.decode(
                self.worker_id,
                leg,
                handle["source"],
                len(prompt.token_ids),
                num_tokens,
                _resolves(first),
                _resolves(last),
                lambda retryable, now_ns: _fails(first, LOST if retryable else REFUSED)(now_ns),
                self._loop.now_ns,
            )
        )
        await self._unless_cancelled(first, leg)
        yield Delta("", (0,))
        await self._unless_cancelled(last, leg)
        yield Delta("", range(num_tokens - 1), "length")

    async def release(self, prompt: Prompt, handle: Mapping[str, Any]) -> None:
        effects = self._fleet.release(handle["source"], handle["leg"], self._loop.now_ns)
        self._loop.push(effects)

    async def _unless_cancelled(self, done: "asyncio.Future[float]", leg: Hashable) -> float:
        try:
            return await done
        except asyncio.CancelledError:
            if not self.dead:
                self._loop.push(self._fleet.abort(self.worker_id, leg, self._loop.now_ns))
            raise

    async def health(self) -> bool | None:
        return not self.dead

    async def metrics(self) -> str:
        return ""

    async def close(self) -> None:
        """There is no connection."""


def _resolves(future: "asyncio.Future[Any]") -> Handler:
    """Unless nobody waits for it any more."""

    def handler(now_ns: int) -> Iterator[Effect]:
        if not future.done():
            future.set_result(0.0)
        yield from ()

    return handler


def _fails(future: "asyncio.Future[Any]", error: EngineError) -> Handler:
    def handler(now_ns: int) -> Iterator[Effect]:
        if not future.done():
            future.set_exception(error)
        yield from ()

    return handler


def with_policy(setup: Setup, **knobs: Any) -> Setup:
    """Others than it has."""
    policy = Policy.model_validate({**setup.policy.model_dump(), **knobs})
    return replace(setup, policy=policy)
