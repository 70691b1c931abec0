"""What ``easerve profile`` measures on: an encoder and its local prefill engine, no router."""

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

from easerve.cli import deploy
from easerve.cli.profile_here import dtype
from easerve.cli.profile_sweep import Sample
from easerve.cluster.local import EngineStartError, make_folders
from easerve.cluster.supervisor import PARENT_PID
from easerve.config import Deployment
from easerve.costs.profile import Peak
from easerve.engines.protocol import (
    Division,
    Driven,
    EncodeCall,
    Engine,
    EngineError,
    Media,
    Prompt,
)
from easerve.engines.vllm import launch
from easerve.engines.vllm.client import VllmEngine
from easerve.engines.vllm.launch import EngineSpec
from easerve.policy.partition import ALL, Demand
from easerve.serve.media import prepare
from easerve.types import Stage
from easerve.workload import mix

PEAK, PEAK_MODULE, PEAK_S = "device peak", "easerve.engines.vllm.peak", 120.0
MAX_PIXELS = 1 << 26
PREFILL_TOKENS, NUM_PREFILLS = 512, 4
NUM_CALLERS = 2
UNDER_LOAD_S = 2.0
Progress = Callable[[str, str], None]


class Item(NamedTuple):
    """A picture, the token that stands for it, the embeddings that it becomes."""

    url: str
    placeholder: int
    num_tokens: int


class EnginesBench:
    """``driven``: what divides the device. ``words``: tokens that texts are made of."""

    def __init__(
        self,
        encoder: Engine,
        prefill: Engine,
        driven: Driven,
        item: Item,
        words: Sequence[int],
        prefill_tokens: int,
    ) -> None:
        self.encoder, self._prefill, self.driven = encoder, prefill, driven
        self._item, self._words, self._prefill_tokens = item, words, prefill_tokens
        self.total, self.item_tokens = driven.total, item.num_tokens
        self._rng = random.Random(0)  # noqa: S311 (texts, not secrets)
        self._numbers = count()

    @property
    def most_items(self) -> int:
        """Of one call, by their tokens."""
        return self.encoder.max_batch_tokens // self.item_tokens

    async def encode(self, units: int, batch: int) -> Sample:
        """Once more if it did not get them: a lease may run out on a busy machine."""
        for _ in range(2):
            before = (await division_of(self.encoder)).counts
            begin = time.perf_counter()
            await self.call(self._demand(units), batch)
            wall_s = time.perf_counter() - begin
            counts = (await division_of(self.encoder)).counts
            if counts["encode_failed"] or counts["prefill_failed"]:
                raise EngineError("the device is not divided any more: the engines' logs say why")
            num_forwards = counts["forwards"] - before["forwards"]
            if (num_forwards, counts["encode_units"]) == (1, units):
                return Sample(counts["encode_s"], wall_s, counts["late"] > before["late"])
        raise EngineError(
            f"a call of {batch} items on {units} units was {num_forwards} forwards, the last on "
            f"{counts['encode_units']} units"
        )

    def _demand(self, units: int) -> Demand:
        return Demand(ALL if units == self.total else units, False, "profile")

    async def call(self, demand: Demand, batch: int) -> None:
        """Nothing comes from a cache: items are known by their keys."""
        keys = (f"profile-{next(self._numbers)}" for _ in range(batch))
        calls = [
            EncodeCall(Media(key, "image_url", self._item.url), self._item.placeholder, ())
            for key in keys
        ]
        await self.encoder.encode(calls, demand)

    @asynccontextmanager
    async def prefilling(self) -> AsyncIterator[Callable[[], int]]:
        """Gives the number of tokens so far. Raises EngineError when a prefill failed."""
        num_tokens = 0

        async def again_and_again() -> None:
            nonlocal num_tokens
            while True:
                num_tokens += await self._prefill_once()

        tasks = [asyncio.create_task(again_and_again()) for _ in range(NUM_PREFILLS)]
        try:
            yield lambda: num_tokens
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for error in ended:
            if isinstance(error, EngineError):
                raise error

    async def encode_rate(self, batch: int) -> float:
        """Items per second with all units, one call sent ahead."""

        async def call() -> int:
            await self.call(self._demand(self.total), batch)
            return batch

        return await self._rate(NUM_CALLERS, call)

    async def prefill_rate(self) -> float:
        """Tokens per second with all units."""
        return await self._rate(NUM_PREFILLS, self._prefill_once)

    async def _prefill_once(self) -> int:
        """Tokens of a text that no prefix cache knows."""
        tokens = self._rng.choices(self._words, k=self._prefill_tokens)
        await self._prefill.prefill(Prompt(tokens, {"max_tokens": 1, "temperature": 0.0}), ())
        return len(tokens)

    async def _rate(self, num_callers: int, call: Callable[[], Awaitable[int]]) -> float:
        begin = time.perf_counter()

        async def caller() -> int:
            made = 0
            while time.perf_counter() - begin < UNDER_LOAD_S:
                made += await call()
            return made

        made = await asyncio.gather(*(caller() for _ in range(num_callers)))
        return sum(made) / (time.perf_counter() - begin)


async def division_of(encoder: Engine) -> Division:
    division = await encoder.division()
    if division is None:
        raise EngineError("the encoder does not divide its device")
    return division


@asynccontextmanager
async def started(
    deployment: Deployment,
    size: tuple[int, int],
    progress: Progress,
    first: Callable[[EngineSpec], Awaitable[None]] | None = None,
) -> AsyncIterator[EnginesBench]:
    """The engines run; leaving ends them. ``first``: before they start, of the encoder.

    The first encoder and its local prefill engine, as the deployment has them. Raises ConfigError,
    EngineStartError, EngineError.
    """
    info, plan = deploy.check(deployment)
    folders, token = make_folders(), secrets.token_hex(32)
    try:
        cluster = deploy.make_cluster(deployment, plan, folders, token, info, lambda *_: None)
        pair = cluster.specs = _first_pair(cluster.specs)
        if first is not None:
            await first(pair[0])
    except BaseException:
        folders.remove()
        os.close(folders.lock)
        raise
    encoder, prefill = (
        VllmEngine(
            spec.worker_id,
            spec.stage,
            spec.socket,
            deployment.name,
            info.media_at_prefill,
            max_batch_tokens=deployment.encode.max_num_batched_tokens or launch.ENCODE_BATCH_TOKENS,
            divided=spec.stage is Stage.ENCODE,
        )
        for spec in pair
    )
    by_id = {engine.worker_id: engine for engine in (encoder, prefill)}

    async def healthy(spec: EngineSpec) -> bool:
        return await by_id[spec.worker_id].health() is True

    try:
        await cluster.start(healthy, deployment.engine.startup_timeout_s, progress)
        yield await _bench(deployment, encoder, prefill, size)
    finally:
        for engine in (encoder, prefill):
            await engine.close()
        await cluster.stop()


def _first_pair(specs: Sequence[EngineSpec]) -> list[EngineSpec]:
    encoder = next(spec for spec in specs if spec.stage is Stage.ENCODE)
    prefill = next(spec for spec in specs if encoder.worker_id in spec.beside)
    return [encoder, prefill]


async def _bench(
    deployment: Deployment, encoder: VllmEngine, prefill: VllmEngine, size: tuple[int, int]
) -> EnginesBench:
    division = await division_of(encoder)
    sides = division.encode, division.prefill
    if None in sides or len({driven.driver for driven in sides if driven}) > 1:
        raise EngineError(f"the two engines do not divide their device alike: {sides}")
    max_model_len = await encoder.learn_limits()
    request = mix.request(mix.Mix(sizes={size: 1.0}), seed=0, index=0)
    (url,) = (part["image_url"]["url"] for part in request.content if "image_url" in part)
    picture = prepare(url, MAX_PIXELS)
    part = {"type": "image_url", "image_url": {"url": picture.url}, "uuid": picture.key}
    rendered = await encoder.render(_chat(deployment, [part]))
    text = {"type": "text", "text": " ".join(mix.WORDS)}
    words = (await prefill.render(_chat(deployment, [text]))).token_ids
    item = Item(picture.url, rendered.placeholders[0], rendered.items[0].num_tokens)
    assert division.encode is not None
    tokens = min(PREFILL_TOKENS, max_model_len - 1)
    return EnginesBench(encoder, prefill, division.encode, item, words, tokens)


def _chat(deployment: Deployment, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"model": deployment.name, "messages": [{"role": "user", "content": content}]}


async def measured_peak(deployment: Deployment, encoder: EngineSpec, progress: Progress) -> Peak:
    """In a process of its own, with the encoder's environment and a thread for each core."""
    progress(PEAK, "measuring")
    cores = encoder.env.get(launch.CORES)
    num_cores = len(cores.split(",")) if cores else len(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        **encoder.env,
        PARENT_PID: str(os.getpid()),
        "OMP_NUM_THREADS": str(num_cores),
    }
    words = [sys.executable, "-m", PEAK_MODULE, deployment.device, dtype(deployment)]
    process = await asyncio.create_subprocess_exec(
        *words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the command
    )
    try:
        async with asyncio.timeout(PEAK_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise EngineStartError(f"the {PEAK} was not measured within {PEAK_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = err.decode(errors="replace").splitlines()[-1:]
        raise EngineStartError(f"the {PEAK} was not measured: {' '.join(last)}")
    progress(PEAK, "ready")
    return Peak(**json.loads(out))
