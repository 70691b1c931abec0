"""The encode stage alone: real encoders under a core and a driver, all that follows a stub.

All pictures are decoded, rendered and in the queue before the clock starts, and prefill begins when
it has stopped. What is measured is the queue, the calls and what an encoder does with them:
preprocessing, forward, embeddings pushed to a prefill engine.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from easerve.bench.cpu import cpu_seconds
from easerve.cli.bench.recorder import EncodeRun, Recorder
from easerve.costs.linear import LinearCosts
from easerve.engines.protocol import (
    Delta,
    Division,
    EncodeCall,
    Encoded,
    Engine,
    EngineError,
    Media,
    Prefilled,
    Prompt,
)
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.policy.knobs import Knobs
from easerve.policy.partition import SHARED, Demand
from easerve.serve.driver import Driver
from easerve.serve.job import Job, MediaPart
from easerve.serve.media import Picture
from easerve.serve.metrics import Metrics
from easerve.serve.preparation import PreparationPool
from easerve.types import RequestId, Stage, WorkerId

FIRST_TOKEN = Prefilled(answer=Delta("", (0,), "length"))


class Stub:
    """An engine that is done at once, when it is its turn; it stands for prefill and for decode."""

    num_slots = 1 << 30
    max_batch_tokens = 0
    beside: tuple[WorkerId, ...] = ()

    def __init__(self, stage: Stage, turn: asyncio.Event) -> None:
        self.worker_id, self.stage, self._turn = WorkerId(f"stub-{stage}"), stage, turn

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        raise NotImplementedError

    async def encode(self, calls: Sequence[EncodeCall], demand: Demand = SHARED) -> Encoded:
        raise NotImplementedError

    async def prefill(self, prompt: Prompt, coming: Collection[int]) -> Prefilled:
        await self._turn.wait()
        return FIRST_TOKEN

    async def decode(self, prompt: Prompt, handle: Mapping[str, Any]) -> AsyncIterator[Delta]:
        yield Delta("")

    async def release(self, prompt: Prompt, handle: Mapping[str, Any]) -> None:
        pass

    async def divide(self, demand: Demand) -> None:
        pass

    async def division(self) -> Division | None:
        return None

    async def health(self) -> bool | None:
        return True

    async def metrics(self) -> str:
        return ""

    async def close(self) -> None:
        pass


class Rendered(Stub):
    """A real encoder whose prompts are rendered already: all are as long as ``prompt``.

    It pushes to a real prefill engine, whatever its destinations.
    """

    def __init__(
        self, encoder: Engine, prefill_id: WorkerId, prompt: Prompt, turn: asyncio.Event
    ) -> None:
        super().__init__(Stage.ENCODE, turn)
        self.worker_id, self.max_batch_tokens = encoder.worker_id, encoder.max_batch_tokens
        self._encoder, self._prefill_id, self._prompt = encoder, prefill_id, prompt

    async def render(self, body: Mapping[str, Any]) -> Prompt:
        (item,) = self._prompt.items
        return replace(self._prompt, items=(replace(item, key=body["part"]["uuid"]),))

    async def encode(self, calls: Sequence[EncodeCall], demand: Demand = SHARED) -> Encoded:
        await self._turn.wait()
        calls = [replace(call, destinations=(self._prefill_id,)) for call in calls]
        return await self._encoder.encode(calls, demand)


class Decoded(PreparationPool):
    """Pictures that are decoded already, by their keys."""

    def __init__(self, pictures: Sequence[Picture]) -> None:
        super().__init__(0, 0)
        self._pictures = {picture.key: picture for picture in pictures}

    async def prepare(self, url: str) -> Picture:
        return self._pictures[url]


@dataclass(frozen=True, slots=True)
class StageRun:
    """``cpu_s``: of all processes, for an item."""

    items_per_s: float
    cpu_s: float
    encode: EncodeRun


@dataclass(frozen=True, slots=True)
class EncodeStage:
    """``prompt``: of one picture, as an encoder renders it. ``pids``: of the engines.

    ``prefill_id``: the engine that embeddings are pushed to.
    """

    encoders: Sequence[Engine]
    prefill_id: WorkerId
    prompt: Prompt
    pids: Sequence[int]

    @property
    def most_items(self) -> int:
        """Pictures in one call, by their tokens."""
        most = min(encoder.max_batch_tokens for encoder in self.encoders)
        return most // self.prompt.items[0].num_tokens

    async def saturate(self, knobs: Knobs, pictures: Sequence[Picture]) -> StageRun:
        """All pictures at once, each of a request of its own; until the last one is encoded."""
        recorder, go, over = Recorder(), asyncio.Event(), asyncio.Event()
        knobs = replace(knobs, max_queue_s=math.inf, flow=False)
        core = Core(knobs, Admission(len(pictures), 1 << 60), LinearCosts(), Limits())
        driver = Driver(core, Decoded(pictures), Metrics(), 1 << 60, recorder)
        for stage in (Stage.PREFILL, Stage.DECODE):
            driver.add_engine(Stub(stage, over))
        for encoder in self.encoders:
            driver.add_engine(Rendered(encoder, self.prefill_id, self.prompt, go))
        jobs = list(_jobs(pictures))
        try:
            for job in jobs:
                driver.submit(job)
            await recorder.until(lambda: recorder.num_prepared == len(jobs))
            before, begin_ns = self._cpu_s(), time.monotonic_ns()
            recorder.set_clock(begin_ns)
            go.set()
            await recorder.until(lambda: recorder.num_encoded + recorder.num_failed >= len(jobs))
            if recorder.num_failed:
                raise EngineError("an encoder failed under load; its log says why")
            run = recorder.run(time.monotonic_ns(), len(self.encoders))
            cpu_s = self._cpu_s() - before
            over.set()
            await asyncio.gather(*map(_answered, jobs))
        finally:
            await driver.close()
        return StageRun(len(jobs) / run.duration_s, cpu_s / len(jobs), run)

    async def call(self, pictures: Sequence[Picture]) -> float:
        """Seconds of one call to an encoder, made directly."""
        placeholder, destinations = self.prompt.placeholders[0], (self.prefill_id,)
        calls = [
            EncodeCall(Media(p.key, "image_url", p.url), placeholder, destinations)
            for p in pictures
        ]
        begin = time.perf_counter()
        await self.encoders[0].encode(calls)
        return time.perf_counter() - begin

    def _cpu_s(self) -> float:
        return sum(cpu_seconds([os.getpid(), *self.pids]).values())


def _jobs(pictures: Sequence[Picture]) -> Iterator[Job]:
    for number, picture in enumerate(pictures):
        part: dict[str, Any] = {}
        yield Job(
            RequestId(f"stage-{number}"),
            {"part": part},
            [MediaPart(part, picture.key, "")],
            num_bytes=1,
            stream=False,
        )


async def _answered(job: Job) -> None:
    async for _ in job.outputs.pieces(1):
        pass
