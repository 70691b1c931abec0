"""The stages of EAServe one by one: CPU seconds by process, for ``cpu_alone``.

Each is asked for work without end by some callers, as it is when the whole server is busy, and
everything that it is asked is new to it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count

import msgspec

from easerve.cli import profile_cpu
from easerve.cli.bench.cpu_runs import Draw, Shape, num_steps
from easerve.cli.deploy import Service
from easerve.engines.protocol import EncodeCall, Engine, Media, Prompt
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
        self._decode = engines[Stage.DECODE]
        self._requests: list[tuple[Prompt, list[Picture]]] = []
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
            self._requests.clear()
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
        self._requests.append((prompt, pictures))
        self.item_tokens = prompt.items[0].num_tokens

    async def pictures_in_prefill(self, callers: int) -> Costs:
        """What the pictures of the requests just prepared add to a prefill of as many tokens.

        Their embeddings are there already; each prefill's KV cache is pulled, as in a run.
        """
        items = [
            (Media(picture.key, "image_url", picture.url), placeholder)
            for prompt, pictures in self._requests
            for picture, placeholder in zip(pictures, prompt.placeholders, strict=True)
        ]
        most = self.most_items
        batches = [items[at : at + most] for at in range(0, len(items), most)]
        await closed_loop([partial(self._push, batch) for batch in batches], NUM_CALLERS)
        prompts = [prompt for prompt, _ in self._requests]
        name = self._service.deployment.name
        texts = [
            await self._prefill.render({"model": name, **body})
            for body in self._draw.texts(len(prompts[0].token_ids), 2, len(prompts))
        ]
        filled, plain = [
            await self._measured([partial(self._fill, each) for each in some], callers)
            for some in (prompts, texts)
        ]
        return without(filled, plain)

    async def _fill(self, prompt: Prompt) -> None:
        await self._decode.release(prompt, (await self._prefill.prefill(prompt, ())).handle)

    async def render_text(self, num_prompt_tokens: int, num: int) -> Costs:
        """What a text of so many tokens costs before its prefill."""
        bodies = self._draw.texts(num_prompt_tokens, 1, num)
        name = self._service.deployment.name
        return await self._measured(
            [partial(self._prefill.render, {"model": name, **body}) for body in bodies]
        )

    async def encode(
        self, num_items: int, num: int, callers: int, demand: Demand = SHARED
    ) -> tuple[Costs, float]:
        """Of an item, in calls of ``num_items`` by so many ``callers``; ``num``: of the calls.

        The number is of the encoder's steps: calls that wait share one. Embeddings are pushed to
        the prefill engine, as in a run.
        """
        calls = [partial(self._encode, num_items, demand) for _ in range(num)]
        before = await num_steps(self._encoder)
        costs = times(await self._measured(calls, callers), 1 / num_items)
        return costs, (await num_steps(self._encoder) - before) / num / num_items

    @property
    def most_items(self) -> int:
        """Of one call, by their tokens."""
        return max(1, self._encoder.max_batch_tokens // self.item_tokens)

    async def _encode(self, num_items: int, demand: Demand) -> None:
        """Always the same picture, with other keys."""
        prompt, pictures = self._requests[0]
        media = (
            Media(f"bench-{next(self._keys)}", "image_url", pictures[0].url)
            for _ in range(num_items)
        )
        await self._push([(each, prompt.placeholders[0]) for each in media], demand)

    async def _push(self, items: Sequence[tuple[Media, int]], demand: Demand = SHARED) -> None:
        destinations = (self._prefill.worker_id,)
        await self._encoder.encode([EncodeCall(*each, destinations) for each in items], demand)

    async def _measured(self, calls: Sequence[Call], callers: int = NUM_CALLERS) -> Costs:
        """Of a call, in the mean."""
        before = profile_cpu.all_s(self._service)
        await closed_loop(calls, callers)
        used_s = profile_cpu.since(before, profile_cpu.all_s(self._service))
        return {name: each / len(calls) for name, each in used_s.items()}


async def closed_loop(calls: Sequence[Call], callers: int) -> None:
    """Each caller makes the next call when its last one has been answered.

    The first error ends the others, and is raised as it is.
    """
    waiting = iter(calls)

    async def work() -> None:
        for call in waiting:
            await call()

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(callers, len(calls))):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def added(*parts: Mapping[str, float]) -> Costs:
    """Process by process."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def times(costs: Mapping[str, float], number: float) -> Costs:
    return {name: number * each for name, each in costs.items()}


def without(costs: Mapping[str, float], less: Mapping[str, float]) -> Costs:
    """No process below 0: what is taken away was measured by itself."""
    return {name: max(0.0, each - less.get(name, 0.0)) for name, each in costs.items()}


def only(costs: Mapping[str, float], *processes: str) -> Costs:
    """Of these; what others use, they use with nothing to do, too."""
    return {name: each for name, each in costs.items() if name in processes}
