"""The stages of EAServe one by one: CPU seconds by process, for ``cpu_allowed``.

Each is asked for work without end by some callers, as it is when the whole server is busy, and
everything that it is asked is new to it. Nothing here is taken from the runs that are explained.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count

import msgspec

from easerve.cli import profile_cpu
from easerve.cli.bench.cpu_runs import Draw, Shape
from easerve.cli.deploy import Service
from easerve.engines.protocol import EncodeCall, Engine, Media
from easerve.policy.partition import SHARED, Demand
from easerve.serve import chat
from easerve.serve.media import Picture
from easerve.serve.preparation import PreparationPool
from easerve.types import Stage

NUM_CALLERS = 8
Costs = dict[str, float]
"""CPU seconds by process."""
Call = Callable[[], Awaitable[object]]


class StagesBench:
    """On the engines of a service that runs and has nothing else to do."""

    def __init__(self, service: Service, draw: Draw) -> None:
        self._service, self._draw = service, draw
        engines = {stage: self._first(stage) for stage in Stage}
        self._encoder, self._prefill = engines[Stage.ENCODE], engines[Stage.PREFILL]
        self._picture: tuple[Picture, int] | None = None
        self.item_tokens = 1
        self._keys = count()

    def _first(self, stage: Stage) -> Engine:
        """Not a local one."""
        engines = self._service.driver.engines()
        return next(each for each in engines if each.stage is stage and not each.beside)

    async def prepare(self, shape: Shape, num: int) -> Costs:
        """Of a request: its body read, its pictures decoded and checked, its prompt rendered."""
        limits = self._service.deployment.limits
        pool = PreparationPool(limits.preparation_workers, limits.max_image_pixels)
        bodies = [
            msgspec.json.encode({"model": self._service.deployment.name, **body})
            for body in await self._draw.pictures(shape, num + NUM_CALLERS)
        ]
        try:
            calls = [partial(self._prepare, pool, body) for body in bodies]
            await asyncio.gather(*(call() for call in calls[num:]))  # its processes start
            return await self._measured(calls[:num])
        finally:
            await pool.close()

    async def _prepare(self, pool: PreparationPool, body: bytes) -> None:
        name = self._service.deployment.name
        asked = chat.parse(msgspec.json.decode(body), name, 1 << 10, False)
        pictures = await asyncio.gather(*(pool.prepare(part.url) for part in asked.media_parts))
        for part, picture in zip(asked.media_parts, pictures, strict=True):
            url = {"url": picture.url}
            part.part.update(type="image_url", image_url=url, uuid=picture.key)
        (rendered,) = asked.bodies
        prompt = await self._encoder.render(rendered)
        if self._picture is None:
            self._picture = pictures[0], prompt.placeholders[0]
            self.item_tokens = prompt.items[0].num_tokens

    async def render_text(self, num_prompt_tokens: int, num: int) -> Costs:
        """What a text of so many tokens costs before its prefill."""
        bodies = self._draw.texts(num_prompt_tokens, 1, num)
        name = self._service.deployment.name
        return await self._measured(
            [partial(self._prefill.render, {"model": name, **body}) for body in bodies]
        )

    async def encode(
        self, num_items: int, num: int, callers: int, demand: Demand = SHARED
    ) -> Costs:
        """Of an item, in calls of ``num_items`` by so many ``callers``; ``num``: of the calls.

        Embeddings are pushed to the prefill engine, as in a run.
        """
        calls = [partial(self._encode, num_items, demand) for _ in range(num)]
        costs = await self._measured(calls, callers)
        return {name: each / num_items for name, each in costs.items()}

    @property
    def most_items(self) -> int:
        """Of one call, by their tokens."""
        return max(1, self._encoder.max_batch_tokens // self.item_tokens)

    async def _encode(self, num_items: int, demand: Demand) -> None:
        assert self._picture is not None, "prepare comes first"
        picture, placeholder = self._picture
        destinations = (self._prefill.worker_id,)
        media = (
            Media(f"bench-{next(self._keys)}", "image_url", picture.url) for _ in range(num_items)
        )
        await self._encoder.encode(
            [EncodeCall(each, placeholder, destinations) for each in media], demand
        )

    async def _measured(self, calls: Sequence[Call], callers: int = NUM_CALLERS) -> Costs:
        """Of a call, in the mean."""
        before = profile_cpu.all_s(self._service)
        await closed_loop(calls, callers)
        used_s = profile_cpu.since(before, profile_cpu.all_s(self._service))
        return {name: each / len(calls) for name, each in used_s.items()}


async def closed_loop(calls: Sequence[Call], callers: int) -> None:
    """Each caller makes the next call when its last one has been answered."""
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(callers, len(calls))):
            group.create_task(work())


def added(*parts: Mapping[str, float]) -> Costs:
    """Process by process."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def times(costs: Mapping[str, float], number: float) -> Costs:
    return {name: number * each for name, each in costs.items()}


def without(costs: Mapping[str, float], less: Mapping[str, float]) -> Costs:
    """No process below 0: what is taken away was measured by itself."""
    return {name: max(0.0, each - less.get(name, 0.0)) for name, each in costs.items()}
