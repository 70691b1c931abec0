"""The second half of ``easerve profile``: one engine of each stage behind the router, measured."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from easerve.bench.client import Planned, run_in_process
from easerve.cli import profile_cpu, profile_stages
from easerve.cli.deploy import Service, service
from easerve.cli.profile_engines import MAX_PIXELS, Item, Progress
from easerve.cli.profile_stages import Sizes, StagesBench
from easerve.config import Deployment, StageSection
from easerve.costs.stages import Load, Stages
from easerve.engines.protocol import Engine, EngineError
from easerve.engines.vllm.client import VllmEngine
from easerve.policy import events as ev
from easerve.serve.media import prepare
from easerve.types import Stage
from easerve.workload import mix

IDLE_S = 2.0
LOADS = ((5.0, 2, 20), (5.0, 32, 20), (15.0, 2, 45), (15.0, 32, 45))
"""Requests per second, tokens of an answer, requests."""
WARM_UPS = (20.0, 2, 20)
NUM_PARTS = 6
"""What ``measure`` tells of, for a progress bar."""
Tick = Callable[[str], None]


class Span:
    """A decision log that notes what was used between a run's first request and its last answer."""

    def __init__(self) -> None:
        self._used: profile_stages.Used | None = None
        self._num_left = 0
        self._begin: tuple[float, Mapping[str, float]] | None = None
        self.wall_s = 0.0
        self.used_s: dict[str, float] = {}

    def expect(self, num_requests: int, used: profile_stages.Used) -> None:
        self._used, self._num_left, self._begin = used, num_requests, None

    def step(self, now_ns: int, events: Sequence[ev.Event], actions: Sequence[ev.Action]) -> None:
        if self._used is None:
            return
        if self._begin is None and any(isinstance(each, ev.RequestReceived) for each in events):
            self._begin = time.perf_counter(), self._used()
        self._num_left -= sum(isinstance(each, ev.Complete) for each in actions)
        if self._begin is not None and self._num_left <= 0:
            begin, before = self._begin
            self.wall_s = time.perf_counter() - begin
            self.used_s = profile_cpu.since(before, self._used())
            self._used = None

    @property
    def is_over(self) -> bool:
        return self._used is None

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def alone(deployment: Deployment) -> Deployment:
    """One engine of each stage, on a free port of loopback; none shares a device."""
    local = {"host": "127.0.0.1", "port": 0, "api_key": None}
    sections = {name: _first(getattr(deployment, name)) for name in ("encode", "prefill", "decode")}
    return deployment.model_copy(
        update={
            **sections,
            "server": deployment.server.model_copy(update=local),
            "local_prefill": None,
            "partition": None,
            "policy": deployment.policy.model_copy(update={"remote_share": 1.0}),
        }
    )


def _first(section: StageSection) -> StageSection:
    groups = {
        name: given if given is None else given[:1]
        for name, given in (("devices", section.devices), ("cores", section.cores))
    }
    return section.model_copy(update={"replicas": 1, **groups})


@asynccontextmanager
async def serving(deployment: Deployment, progress: Progress, span: Span) -> AsyncIterator[Service]:
    """The deployment cut down to one engine of each stage; ``span`` is its decision log."""
    async with service(alone(deployment), progress, lambda *_: None, span) as running:
        yield running


class Content(NamedTuple):
    """``item``: a picture, of which ``body`` makes a chat by key; ``words``: tokens of texts.

    ``frame_tokens``: of that chat, around the picture.
    """

    item: Item
    body: Callable[[str], Mapping[str, Any]]
    words: Sequence[int]
    frame_tokens: int


async def content_of(name: str, request: mix.Request, encoder: Engine, prefill: Engine) -> Content:
    """Of the picture in the request, as the engines of the model of this name render it."""
    (url,) = (part["image_url"]["url"] for part in request.content if "image_url" in part)
    picture = prepare(url, MAX_PIXELS).url

    def chat(part: dict[str, Any]) -> Mapping[str, Any]:
        return {"model": name, "messages": [{"role": "user", "content": [part]}]}

    def body(key: str) -> Mapping[str, Any]:
        return chat({"type": "image_url", "image_url": {"url": picture}, "uuid": key})

    rendered = await encoder.render(body("stages"))
    item = Item(picture, rendered.placeholders[0], rendered.items[0].num_tokens)
    text = chat({"type": "text", "text": " ".join(mix.WORDS)})
    words = (await prefill.render(text)).token_ids
    return Content(item, body, words, len(rendered.token_ids) - item.num_tokens)


class ServiceBench:
    """Measures a running service with one engine of each stage, with pictures of one size."""

    def __init__(
        self, running: Service, span: Span, size: tuple[int, int], batches: Sequence[int]
    ) -> None:
        self._running, self._span, self._size, self._batches = running, span, size, batches
        self._num_asked = self._num_plans = 0

    async def plan(self) -> tuple[StagesBench, Sizes]:
        """What will be measured on these engines."""
        engines: dict[Stage, Engine] = {
            engine.stage: engine for engine in self._running.driver.engines()
        }
        encoder, prefill, decode = (engines[stage] for stage in Stage)
        assert isinstance(decode, VllmEngine)
        name = self._running.deployment.name
        content = await content_of(name, self._request(0), encoder, prefill)
        item = content.item
        caches = [await engine.metrics() for engine in (prefill, decode)]
        sizes = profile_stages.sizes_of(
            [each for each in self._batches if each * item.num_tokens <= encoder.max_batch_tokens],
            await decode.learn_limits(),
            min(prefill.num_slots, decode.num_slots),
            min(map(profile_stages.kv_tokens_of, caches)),
        )
        if not sizes.batches or not sizes.decodes:
            raise EngineError("the engines hold too little: of a picture, or of a KV cache")
        self._num_plans += 1
        on_cpu = self._running.deployment.device == "cpu"
        bench = StagesBench(
            engines, item, content.body, content.words, self._used, on_cpu, self._num_plans
        )
        return bench, sizes

    def _used(self) -> Mapping[str, float]:
        return profile_cpu.used_s(self._running)

    def _request(self, index: int) -> mix.Request:
        return mix.request(mix.Mix(sizes={self._size: 1.0}), seed=1, index=index)

    async def measure(self, tick: Tick) -> Stages:
        """``tick`` hears of each of ``NUM_PARTS``."""
        tick("engines with nothing to do")
        bench, sizes = await self.plan()
        idle = await self._idle()
        tick("encode")
        render = await bench.render()
        encode = [await bench.encode(batch) for batch in sizes.batches]
        tick("prefill")
        prefill = [await bench.prefill(tokens) for tokens in sizes.prefill]
        crowding = await bench.crowding(prefill[len(prefill) // 2])
        tick("transfers")
        pulled = dict.fromkeys((0, len(prefill) // 2, len(prefill) - 1))
        pulls = [await bench.pull(prefill[index]) for index in pulled]
        pushed = dict.fromkeys((sizes.batches[0], sizes.batches[-1]))
        pushes = [await bench.push(batch) for batch in pushed]
        tick("decode")
        decode = [await bench.decode(*each) for each in sizes.decodes]
        tick("requests")
        await self.warm_up()
        loads = [await self._load(*each) for each in LOADS]
        return Stages(
            render=render,
            encode=tuple(encode),
            prefill=tuple(prefill),
            decode=tuple(decode),
            pulls=tuple(pulls),
            pushes=tuple(pushes),
            loads=tuple(loads),
            idle_cores=idle,
            crowding=crowding,
        )

    async def warm_up(self) -> None:
        """Some requests, so that connections and helpers are there."""
        await self._load(*WARM_UPS)

    async def _idle(self) -> dict[str, float]:
        before, begin = profile_cpu.all_s(self._running), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        seconds = time.perf_counter() - begin
        used_s = profile_cpu.since(before, profile_cpu.all_s(self._running))
        return {name: round(each / seconds, 5) for name, each in used_s.items()}

    async def _load(self, rate_per_s: float, tokens: int, requests: int) -> Load:
        first, self._num_asked = self._num_asked, self._num_asked + requests
        planned = [
            Planned(
                (index - first) / rate_per_s,
                {
                    "messages": self._request(1 + index).messages,
                    "max_tokens": tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                },
            )
            for index in range(first, first + requests)
        ]
        self._span.expect(requests, self._used)
        samples = await run_in_process(
            self._running.address, self._running.deployment.name, planned
        )
        if not self._span.is_over or any(each.record.outcome != "completed" for each in samples):
            raise EngineError("requests failed; the engines' logs say why")
        cpu_s = {name: round(each, 6) for name, each in self._span.used_s.items()}
        return Load(
            rate_per_s=rate_per_s,
            requests=requests,
            tokens=tokens,
            wall_s=round(self._span.wall_s, 6),
            cpu_s=cpu_s,
        )
