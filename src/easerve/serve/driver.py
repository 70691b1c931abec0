"""The asyncio driver: gathers the events of one instant, steps the core, performs its actions.

It decides nothing. Every action that starts work is answered by exactly one event, unless the
work was cancelled. What a request needs on its way (media, prompt, KV handles) is in its Job;
its embeddings go from engine to engine.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, assert_never

from easerve.engines.protocol import (
    Delta,
    Division,
    EmbeddingMissingError,
    EncodeCall,
    Engine,
    EngineError,
    Media,
    Prompt,
)
from easerve.policy import events as ev
from easerve.policy.core import Core
from easerve.policy.knobs import Knobs
from easerve.serve.decisions import StepLog
from easerve.serve.errors import ApiError, ended
from easerve.serve.job import Job, MediaPart, Pace
from easerve.serve.media import MediaError
from easerve.serve.metrics import Metrics
from easerve.serve.preparation import PreparationPool
from easerve.types import NS_PER_S, BatchId, Modality, Reason, RequestId, Shape, Stage, WorkerId

PREPARATION = -1
KEPT_TIMELINES = 256
CANNOT_RENDER = (
    "The prompt cannot be rendered: the model's chat template does not take these messages, or a "
    "parameter of the template, of truncation or of the format is wrong"
)
logger = logging.getLogger("easerve.driver")


class Driver:
    """Drives one core. ``max_decoded_bytes`` bounds the decoded pictures held at once, in all."""

    def __init__(
        self,
        core: Core,
        preparation: PreparationPool,
        metrics: Metrics,
        max_decoded_bytes: int,
        log: StepLog | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.core, self.metrics = core, metrics
        self._preparation, self._log, self._clock_ns = preparation, log, clock_ns
        self._max_decoded_bytes, self._decoded_bytes = max_decoded_bytes, 0
        self._engines: dict[WorkerId, Engine] = {}
        self._rendering: dict[WorkerId, int] = {}
        self._jobs: dict[RequestId, Job] = {}
        self.divisions: dict[WorkerId, Division] = {}  # of devices, as last seen, by encoder
        self.timelines: OrderedDict[str, dict[str, float]] = OrderedDict()  # of the last requests
        self._batches: dict[BatchId, asyncio.Task[None]] = {}
        self._calls: defaultdict[WorkerId, set[asyncio.Task[None]]] = defaultdict(set)
        self._events: list[ev.Event] = []
        self._flush_due = False
        self._timer: asyncio.TimerHandle | None = None

    # Interface --------------------------------------------------------------------------------

    def add_engine(self, engine: Engine) -> None:
        self._engines[engine.worker_id] = engine
        self._rendering.setdefault(engine.worker_id, 0)  # the one before may still render
        self._post(
            ev.WorkerJoined(
                engine.worker_id,
                engine.stage,
                engine.num_slots,
                engine.max_batch_tokens,
                engine.beside,
            )
        )
        self._flush()  # joining and getting lost never share an instant

    def lose_engine(self, worker_id: WorkerId) -> None:
        """An engine is gone; what it still had to say is not waited for, nor passed on."""
        if self._engines.pop(worker_id, None) is not None:
            if self.divisions.pop(worker_id, None) is not None:
                self.metrics.undivided(worker_id)
            for task in self._calls.pop(worker_id, set()) - {asyncio.current_task()}:
                task.cancel()
            self._post(ev.WorkerLost(worker_id))
            self._flush()

    def engines(self) -> list[Engine]:
        return list(self._engines.values())

    def render_metrics(self) -> bytes:
        """In Prometheus' text form."""
        return self.metrics.render(self.core, self._clock_ns())

    @property
    def ready(self) -> bool:
        """Whether every stage has an engine."""
        return {engine.stage for engine in self._engines.values()}.issuperset(Stage)

    def submit(self, job: Job) -> None:
        """Take in a request; its answer comes through ``job.outputs``."""
        job.received_ns = self._clock_ns()
        self._jobs[job.request_id] = job
        kinds = (Modality.IMAGE,) * len(job.media_parts)
        self._post(ev.RequestReceived(job.request_id, job.num_bytes, kinds, job.num_choices))

    def cancel(self, job: Job) -> None:
        """The client has gone. Harmless for a request that has ended."""
        if job.request_id in self._jobs:
            job.withdrawn = True
            self._post(ev.ClientCancelled(job.request_id))

    def turn(self, knobs: Knobs) -> None:
        """Other knobs, in force when this returns."""
        self._post(ev.KnobsChanged(knobs))
        self._flush()

    def drain(self) -> None:
        """The server is about to end: let no batch wait for company any more."""
        self._post(ev.Draining())

    def end_requests(self) -> None:
        """End every open request; their clients get an error."""
        for job in self._jobs.values():
            job.error = ended(Reason.WORKER_LOST)
            self.cancel(job)
        self._flush()

    async def close(self) -> None:
        """End every open request and the preparation. The engines belong to the caller."""
        self.end_requests()
        if self._timer is not None:
            self._timer.cancel()
        for task in itertools.chain.from_iterable(self._calls.values()):
            task.cancel()
        await self._preparation.close()
        if self._log is not None:
            self._log.close()

    # The loop ---------------------------------------------------------------------------------

    def _post(self, event: ev.Event) -> None:
        self._events.append(event)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        events, self._events = self._events, []
        now_ns = self._clock_ns()
        actions: list[ev.Action] = []
        try:
            actions = self.core.step(events, now_ns)
        finally:
            if self._log is not None:
                self._log.step(now_ns, events, actions)
        for action in actions:
            self._perform(action)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.next_deadline()
        if deadline is not None:
            delay_s = max(0, deadline - self._clock_ns()) / NS_PER_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._flush)

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.StartEncode():
                self._start_encode(action)
            case ev.Divide():
                task = asyncio.get_running_loop().create_task(self._divide(action))
                self._track(action.worker_id, task)
            case ev.Retuned():
                self.metrics.retuned(action)
                logger.warning(
                    "adapt: knob %s changed from %g to %g: %s",
                    action.knob,
                    action.before,
                    action.after,
                    action.reason,
                )
            case ev.CancelEncode():
                if action.batch_id in self._batches:
                    self._batches[action.batch_id].cancel()
            case _:
                if action.request_id in self._jobs:
                    self._perform_for(self._jobs[action.request_id], action)

    def _perform_for(self, job: Job, action: ev.RequestAction) -> None:
        match action:
            case ev.Prepare():
                self._run(job, PREPARATION, partial(self._prepare, job))
            case ev.StartPrefill():
                self.metrics.prefill_placed(action)
                task = self._run(job, action.leg, partial(self._prefill, job, action))
                self._track(action.worker_id, task)
            case ev.StartDecode():
                task = self._run(job, action.leg, partial(self._decode, job, action))
                self._track(action.worker_id, task)
            case ev.Cancel():
                self._stop(job)
                if job.withdrawn:
                    self._finish(job, "failed" if job.error else "cancelled", job.error)
            case ev.Reject():
                self._finish(job, "rejected", ended(action.reason, action.retry_after_s))
            case ev.Fail():
                self._finish(job, "failed", job.error or ended(action.reason))
            case ev.Complete():
                self._finish(job, "completed")
            case _:
                assert_never(action)

    def _run(self, job: Job, leg: int, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        if leg in job.tasks:
            job.tasks[leg].cancel()
        task = job.tasks[leg] = asyncio.get_running_loop().create_task(self._guard(job, work))
        return task

    def _track(self, worker_id: WorkerId, task: asyncio.Task[None]) -> None:
        """The task calls this engine, and ends with it."""
        calls = self._calls[worker_id]
        calls.add(task)
        task.add_done_callback(calls.discard)

    async def _guard(self, job: Job, work: Callable[[], Awaitable[None]]) -> None:
        """A bug of ours costs the one request that met it."""
        try:
            await work()
        except Exception:
            logger.exception("request %s failed unexpectedly", job.request_id)
            job.error = ApiError(500, "Internal server error")
            self.cancel(job)

    def _stop(self, job: Job) -> None:
        for task in job.tasks.values():
            task.cancel()

    def _finish(self, job: Job, outcome: str, error: ApiError | None = None) -> None:
        del self._jobs[job.request_id]
        self._decoded_bytes -= job.decoded_bytes
        for _, handle in job.handles.values():
            assert job.prompt is not None
            self._release(job.prompt, handle)
        self._stamp(job, "end")
        self._observe(job, outcome)
        self.timelines[job.request_id] = job.timeline
        if len(self.timelines) > KEPT_TIMELINES:
            self.timelines.popitem(last=False)
        job.outputs.put(error)

    # Stages -----------------------------------------------------------------------------------

    async def _prepare(self, job: Job) -> None:
        begin = self._clock_ns()
        try:
            if not job.media:
                job.media = await self._decode_media(job)
            prompt = await self._render(job)
            prompt = job.prompt = replace(prompt, route=job.route, stream=job.stream)
        except EngineError as error:
            self._post(ev.PrepareFailed(job.request_id, retryable=error.retryable))
            return
        except ApiError as error:
            job.error = error
            self._post(ev.PrepareFailed(job.request_id))
            return
        self._measure("prepare", begin, job)
        job.wanting_ns = self._clock_ns()
        shape = Shape(len(prompt.token_ids), prompt.max_new_tokens, prompt.items)
        self._post(ev.Prepared(job.request_id, shape))

    async def _decode_media(self, job: Job) -> list[Media]:
        """Every part at once; the first one at fault, in the request's order, is the error."""
        decoded = await asyncio.gather(
            *(self._decode_part(job, part) for part in job.media_parts), return_exceptions=True
        )
        media = [each for each in decoded if isinstance(each, Media)]
        for failure in (each for each in decoded if isinstance(each, BaseException)):
            raise failure
        return media

    async def _decode_part(self, job: Job, part: MediaPart) -> Media:
        try:
            picture = await self._preparation.prepare(part.url)
        except MediaError as error:
            raise ApiError(400, f"{part.path}: {error}", part.path) from None
        if self._decoded_bytes and self._decoded_bytes + len(picture.url) > self._max_decoded_bytes:
            raise ended(Reason.OVERLOADED, retry_after_s=1)
        job.decoded_bytes += len(picture.url)
        self._decoded_bytes += len(picture.url)
        part.part.update(type="image_url", image_url={"url": picture.url}, uuid=picture.key)
        part.url = ""
        return Media(picture.key, "image_url", picture.url)

    async def _render(self, job: Job) -> Prompt:
        """On the engine of the right stage that renders least; media go to encoders only."""
        stage = Stage.ENCODE if job.media_parts else Stage.PREFILL
        engines = [engine for engine in self._engines.values() if engine.stage is stage]
        if not engines:
            raise EngineError(f"no {stage} engine to render the prompt")
        engine = min(engines, key=lambda each: (self._rendering[each.worker_id], each.worker_id))
        self._rendering[engine.worker_id] += 1
        try:
            return await engine.render(job.body)
        except EngineError as error:
            await self._failed(engine.worker_id, error, job)
            if error.status != 500 or engine.worker_id not in self._engines:
                raise
            # It answers, and is healthy: this is how vLLM fails on what it did not expect.
            failed = EngineError(CANNOT_RENDER, 400)
            await self._failed(engine.worker_id, failed, job)
            raise failed from None
        finally:
            self._rendering[engine.worker_id] -= 1

    async def _failed(
        self, worker_id: WorkerId, error: EngineError, job: Job | None = None, path: str = ""
    ) -> None:
        """Blame the request (its part ``path``), or find out whether the engine is gone.

        A slow one is not.
        """
        level = logging.WARNING if error.retryable else logging.INFO
        logger.log(level, "%s, request %s: %s", worker_id, job.request_id if job else "-", error)
        if error.retryable:
            await self.probe(worker_id)
        elif job is not None:
            text = f"{path}: {error}" if path else str(error)
            job.error = ApiError(400, text, path or None)

    async def probe(self, worker_id: WorkerId) -> None:
        """Give up an engine that is gone. One that is slow to say so is not."""
        engine = self._engines.get(worker_id)
        if engine is not None and await engine.health() is False:
            logger.error("%s is gone", worker_id)
            self.lose_engine(worker_id)

    def _start_encode(self, action: ev.StartEncode) -> None:
        now_ns, waits_s, calls = self._clock_ns(), [], []
        for entry in action.items:
            jobs = [self._jobs[waiter.request_id] for waiter in entry.waiters]
            waits_s.append((now_ns - min(job.wanting_ns for job in jobs)) / NS_PER_S)
            for job in jobs if action.forward else ():
                job.timeline.setdefault("encode_wait", (now_ns - job.wanting_ns) / NS_PER_S)
            calls.append(_encode_call(entry, jobs[0]))
        self.metrics.batch_closed(action, waits_s)
        task = asyncio.get_running_loop().create_task(self._encode(action, calls))
        task.add_done_callback(lambda _: self._batches.pop(action.batch_id))
        self._batches[action.batch_id] = task
        self._track(action.worker_id, task)

    async def _encode(self, action: ev.StartEncode, calls: Sequence[EncodeCall]) -> None:
        begin = self._clock_ns()
        if action.forward:
            self.metrics.encoder_busy(action.worker_id, 1, begin)
        try:
            encoded = await self._engine(action.worker_id).encode(calls, action.demand)
            waiters = {waiter.request_id for entry in action.items for waiter in entry.waiters}
            jobs = (self._jobs[each] for each in waiters if each in self._jobs)
            self._measure("encode" if action.forward else "resend", begin, *jobs)
            self._post(ev.EncodeFinished(action.batch_id))
            self._evicted(action.worker_id, encoded.evicted)
        except EngineError as error:
            await self._encode_failed(action, error)
        except Exception:
            logger.exception("batch %d failed unexpectedly", action.batch_id)
            self._post(ev.EncodeFailed(action.batch_id, retryable=False))
        finally:
            if action.forward:
                self.metrics.encoder_busy(action.worker_id, -1, self._clock_ns())

    async def _divide(self, action: ev.Divide) -> None:
        try:
            await self._engine(action.worker_id).divide(action.demand)
        except EngineError as error:  # the next call says it again
            await self._failed(action.worker_id, error)

    async def see_divisions(self) -> None:
        """Ask the encoders how their devices are divided."""
        encoders = (engine for engine in self.engines() if engine.stage is Stage.ENCODE)
        await asyncio.gather(*(self._see_division(encoder) for encoder in encoders))

    async def _see_division(self, encoder: Engine) -> None:
        with contextlib.suppress(EngineError):  # a slow one is asked again
            division = await encoder.division()
            if division is not None and encoder.worker_id in self._engines:
                self.divisions[encoder.worker_id] = division
                self.metrics.divided(encoder.worker_id, division)

    async def _encode_failed(self, action: ev.StartEncode, error: EngineError) -> None:
        """Of one item it is known who is at fault; the core looks for it among several."""
        await self._failed(action.worker_id, error)
        if len(action.items) == 1 and not error.retryable:
            key = action.items[0].item.key
            for job in [*self._jobs.values()]:  # also those who came while it was being encoded
                if job.prompt is not None and any(item.key == key for item in job.prompt.items):
                    await self._failed(
                        action.worker_id, error, job, job.media_parts[job.index(key)].path
                    )
        self._post(ev.EncodeFailed(action.batch_id, error.retryable))

    def _evicted(self, worker_id: WorkerId, keys: tuple[str, ...]) -> None:
        if keys:
            self.metrics.evicted(worker_id, len(keys))
            self._post(ev.Evicted(worker_id, keys))

    async def _prefill(self, job: Job, action: ev.StartPrefill) -> None:
        assert job.prompt is not None
        begin = self._clock_ns()
        leg = (job.request_id, action.leg, action.attempt)
        try:
            engine = self._engine(action.worker_id)
            prefilled = await engine.prefill(job.prompt.for_leg(action.leg), action.coming)
        except EmbeddingMissingError as error:
            job.wanting_ns = self._clock_ns()
            self.metrics.missing(action.worker_id, len(error.keys))
            self._post(ev.EmbeddingMissing(*leg, error.keys))
            return
        except EngineError as error:
            await self._failed(action.worker_id, error, job)
            self._post(ev.PrefillFailed(*leg, retryable=error.retryable))
            return
        wait_s = prefilled.wait_s or 0.0
        self._measure("prefill", begin + round(wait_s * NS_PER_S), job)
        self.metrics.prompt_tokens.inc(len(job.prompt.token_ids))
        self.metrics.pushed(prefilled.bundles)
        self._evicted(action.worker_id, prefilled.evicted)
        if prefilled.bundles and job.prompt.items:
            job.timeline["transfer"] = max(bundle.usable_s for bundle in prefilled.bundles)
        if prefilled.answer is None:
            job.handles[action.leg, action.attempt] = action.worker_id, prefilled.handle
            self._post(ev.PrefillFinished(*leg, wait_s=wait_s))
        else:
            self._see_first_token(job)
            self._deliver(job, action.leg, prefilled.answer)
            self._post(ev.PrefillFinished(*leg, final=True, wait_s=wait_s))
            self._flush()  # it is delivered: the loss of the engine must not come first

    async def _decode(self, job: Job, action: ev.StartDecode) -> None:
        assert job.prompt is not None
        begin = self._clock_ns()
        leg = (job.request_id, action.leg, action.attempt)
        prefill_id, handle = job.handles.pop((action.leg, action.attempt))
        prompt, num_pieces, held = job.prompt.for_leg(action.leg), 0, []
        pace = Pace(begin)
        try:
            async for delta in self._engine(action.worker_id).decode(prompt, handle):
                num_pieces += 1
                pace.piece(delta, self._clock_ns())
                if num_pieces == 1 and (job.stream or delta.choice is None):
                    self._measure("first token", begin, job)
                    self._see_first_token(job)
                if not job.stream:  # handed over in the end: until then the leg may start again
                    held.append(delta)
                    continue
                if num_pieces == 1:
                    self._post(ev.FirstToken(*leg))
                await job.outputs.room()
                self._deliver(job, action.leg, delta)
                await job.outputs.room()  # what is not read now is kept by the engine
                pace.resume(self._clock_ns())
        except EngineError as error:
            await self._failed(action.worker_id, error, job)
            constrained = "structured_outputs" in prompt.sampling
            if error.status == 500 and constrained and not num_pieces:
                error = await self._blame_format(job, error, action.worker_id, prefill_id)
            if not error.retryable and not num_pieces:
                self._release(prompt, handle)
            self._post(ev.DecodeFailed(*leg, retryable=error.retryable))
            return
        for delta in held:
            self._deliver(job, action.leg, delta)
        self._measure("decode", begin, job)
        self._post(ev.DecodeFinished(*leg, pace.decode_s, pace.tpot_s))
        self._flush()  # it is delivered: the loss of the engine must not come first

    async def _blame_format(
        self, job: Job, error: EngineError, decode_id: WorkerId, prefill_id: WorkerId
    ) -> EngineError:
        """vLLM's grammar compiler gives a bad format back as an error of the engine's own.

        So does the end of the prefill engine that the KV cache is pulled from.
        """
        await self.probe(prefill_id)
        if not {decode_id, prefill_id} <= self._engines.keys():
            return error
        job.error = ApiError(400, "The engine cannot apply this format (schema, grammar or tools)")
        return EngineError(str(error), 400)

    def _release(self, prompt: Prompt, handle: Mapping[str, Any]) -> None:
        """Give a KV cache back that nobody will decode."""
        engines = [each for each in self._engines.values() if each.stage is Stage.DECODE]
        if not engines:
            return  # it is freed when its lease ends
        engine = min(engines, key=lambda each: (len(self._calls[each.worker_id]), each.worker_id))

        async def release() -> None:
            with contextlib.suppress(EngineError):
                await engine.release(prompt, handle)

        self._track(engine.worker_id, asyncio.get_running_loop().create_task(release()))

    def _see_first_token(self, job: Job) -> None:
        if "ttft" not in job.timeline:
            self._stamp(job, "ttft")

    def _deliver(self, job: Job, leg: int, delta: Delta) -> None:
        job.count(leg, delta)
        job.outputs.put((job.first_choice + leg, delta))

    def _engine(self, worker_id: WorkerId) -> Engine:
        try:
            return self._engines[worker_id]
        except KeyError:
            raise EngineError(f"{worker_id} is gone") from None

    # Measurements -----------------------------------------------------------------------------

    def _stamp(self, job: Job, name: str) -> None:
        job.timeline[name] = (self._clock_ns() - job.received_ns) / NS_PER_S

    def _measure(self, name: str, begin_ns: int, *jobs: Job) -> None:
        """A call to an engine that began at ``begin_ns`` has ended."""
        seconds = (self._clock_ns() - begin_ns) / NS_PER_S
        for job in jobs:
            job.timeline[name] = job.timeline.get(name, 0.0) + seconds
        if name in self.metrics.stages:
            self.metrics.stages[name].observe(seconds)

    def _observe(self, job: Job, outcome: str) -> None:
        self.metrics.requests.labels(outcome).inc()
        self.metrics.output_tokens.inc(sum(job.num_tokens.values()))
        if "ttft" in job.timeline:
            self.metrics.ttft.observe(job.timeline["ttft"])
            longest = max(job.num_tokens.values(), default=0)
            if outcome == "completed" and longest > 1:
                after = job.timeline["end"] - job.timeline["ttft"]
                job.timeline["tpot"] = after / (longest - 1)
                self.metrics.tpot.observe(job.timeline["tpot"])


def _encode_call(entry: ev.EncodeItem, job: Job) -> EncodeCall:
    """``job`` has the item's media, as everybody has who waits for it."""
    assert job.prompt is not None
    index = entry.waiters[0].index
    destinations = dict.fromkeys(waiter.destination for waiter in entry.waiters)
    return EncodeCall(job.media[index], job.prompt.placeholders[index], tuple(destinations))
