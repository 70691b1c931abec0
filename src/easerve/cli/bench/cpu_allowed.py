"""What the measured stages allow: ``easerve bench cpu`` explains its ratios by it.

When every core is busy, cores are what requests compete for, and a system answers as many as their
CPU time lets it, unless one process is busy all the time before. So a ratio of throughputs should
be that of CPU seconds a request, which are
predicted from what the stages cost alone (``cpu_stages``), in portions as in the run: a request is
its pictures read, decoded and rendered, then encoded in calls of so many, and what a text of as
many tokens costs behind its rendering with so many steps of prefill and of decode. What is taken
from the run is the portions, never what it cost.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from easerve.cli import profile_cpu
from easerve.cli.bench.cpu_runs import Aggregated, Draw, Easerve, Load, Run, Shape, System
from easerve.cli.bench.cpu_stages import Costs, StagesBench, added, times, without
from easerve.cli.bench.others import Others
from easerve.policy.knobs import NO_RULE
from easerve.policy.partition import SHARED, Devices, Partition
from easerve.serve.admin import knobs_of
from easerve.types import Stage

TEXTS = "/v1/completions"
NUM_ITEMS, LEAST_CALLS, NUM_RENDERED = 240, 6, 64
CALLS = (1, 4, 16)
"""Pictures of a call, and as many as it holds."""
BATCH_CALLERS = 2  # one call runs, one has been sent ahead
AT_ONCE = (2, 8)
"""Texts, and as many as there are clients."""
TOLERANCE = 0.1
QUIET_CORES = 0.1
T = TypeVar("T")
Result = dict[str, Any]
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Portions:
    """Of a run: calls to the encoder for a picture, steps for a request, tokens of a prompt."""

    calls: float
    steps: Mapping[str, float]
    prompt_tokens: float


@dataclass(frozen=True, slots=True)
class Point:
    """``cost`` of a picture or a request, in portions of this size."""

    portions: Mapping[str, float]
    cost: Costs


class Allowed:
    """Measures each stage, and adds them up. ``concurrency``: of the runs.

    ``attempts``: how often at most, while other processes take part of the cores.
    """

    def __init__(self, draw: Draw, concurrency: int, attempts: int, tick: Tick) -> None:
        self._draw, self._concurrency, self._tick = draw, concurrency, tick
        self._attempts = attempts
        self._stages: dict[str, StagesBench] = {}
        self._costs: dict[tuple[object, ...], Costs] = {}
        self._points: dict[tuple[object, ...], list[Point]] = {}
        self.others_cores = 0.0  # that other processes used at most, while a stage was measured

    async def easerve(self, system: Easerve, shape: Shape, portions: Portions) -> Costs:
        """CPU seconds that a request should cost, by process."""
        tokens = round(portions.prompt_tokens)
        prepared = await self._prepare(system, shape)
        encoded = at(await self._encode(system), {"": portions.calls})
        text = at(await self._texts(system, tokens, shape.num_tokens), portions.steps)
        rendered = await self._render(system, tokens)
        return added(without(text, rendered), prepared, times(encoded, shape.num_images))

    async def plain(self, system: Aggregated, shape: Shape, prompt_tokens: float) -> Costs:
        """Of engines that do all: pictures cost what they add to an answer of one token."""
        tokens = round(prompt_tokens)
        text, first = [
            await self._text(system, tokens, each, self._concurrency)
            for each in (shape.num_tokens, 1)
        ]
        pictures = await self._pictures(system, shape.num_images)
        return added(text.cost, without(pictures, first.cost))

    def measured(self) -> list[Result]:
        """Every stage, for JSON; seconds of a request, of a picture where it is encoded."""
        found: list[Result] = [
            {"what": list(key), "cpu_s": cost} for key, cost in self._costs.items()
        ]
        for key, points in self._points.items():
            for each in points:
                portions = dict(each.portions)
                found.append({"what": list(key), "portions": portions, "cpu_s": each.cost})
        return found

    # Stages, each measured once ---------------------------------------------------------------

    def _bench(self, system: Easerve) -> StagesBench:
        if system.host not in self._stages:
            self._stages[system.host] = StagesBench(system.service, self._draw)
        system.turn()
        return self._stages[system.host]

    async def _once(
        self, key: tuple[object, ...], said: str, measure: Callable[[], Awaitable[Costs]]
    ) -> Costs:
        if key not in self._costs:
            self._costs[key] = grouped(await self._undisturbed(said, measure))
        return self._costs[key]

    async def _undisturbed(self, said: str, measure: Callable[[], Awaitable[T]]) -> T:
        """Once more where other processes took part of the cores: that costs everybody caches."""
        found: list[tuple[float, T]] = []
        self._tick(f"alone: {said}")
        while len(found) < self._attempts:
            others = await asyncio.to_thread(Others)
            value = await measure()
            found.append((await asyncio.to_thread(others.cores), value))
            if found[-1][0] <= QUIET_CORES:
                break
        others_cores, value = min(found, key=lambda each: each[0])
        self.others_cores = max(self.others_cores, others_cores)
        return value

    async def _prepare(self, system: Easerve, shape: Shape) -> Costs:
        bench, one = self._bench(system), Shape(shape.num_images, 1)
        num = max(16, NUM_ITEMS // 2 // shape.num_images)
        key = "prepare", system.host, shape.num_images
        said = f"prepare, {shape.num_images} pictures"
        return await self._once(key, said, lambda: bench.prepare(one, num))

    async def _render(self, system: Easerve, tokens: int) -> Costs:
        bench, key = self._bench(system), ("render", system.host, tokens)
        said = f"render, {tokens} tokens"
        return await self._once(key, said, lambda: bench.render_text(tokens, NUM_RENDERED))

    async def _pictures(self, system: Aggregated, num_images: int) -> Costs:
        async def measure() -> Costs:
            num = 2 * self._concurrency
            bodies = await self._draw.pictures(Shape(num_images, 1), num)
            return costs(await system.run(Load(bodies, self._concurrency)))

        key = "pictures", system.name, num_images
        return await self._once(key, f"{num_images} pictures, one token, {system.name}", measure)

    async def _encode(self, system: Easerve) -> list[Point]:
        """Of a picture, by calls for a picture."""
        rule = system.policy.how if system.divides else NO_RULE
        key = "encode", system.host, rule
        if key not in self._points:
            bench, points = self._bench(system), []
            most = min(bench.most_items, system.policy.max_batch_items)
            for items in sorted({min(each, most) for each in (*CALLS, most)}):
                demand = SHARED
                if system.divides:
                    partition = Partition(knobs_of(system.policy), Devices())
                    demand = partition.demand(items * bench.item_tokens)
                callers = self._concurrency if items == 1 else BATCH_CALLERS
                num = max(LEAST_CALLS, NUM_ITEMS // items)
                cost = await self._undisturbed(
                    f"encode, calls of {items}, how: {rule}",
                    partial(bench.encode, items, num, callers, demand),
                )
                points.append(Point({"": 1 / items}, grouped(cost)))
            self._points[key] = points
        return self._points[key]

    async def _texts(self, system: Easerve, tokens: int, num_tokens: int) -> list[Point]:
        """The more at once, the fewer steps for each; the same for all variants on a host."""
        key = "text", system.host, system.policy.remote_share, tokens, num_tokens
        if key not in self._points:
            at_once = sorted({min(each, self._concurrency) for each in (*AT_ONCE, 1 << 20)})
            self._points[key] = [
                await self._text(system, tokens, num_tokens, each) for each in at_once
            ]
        return self._points[key]

    async def _text(self, system: System, tokens: int, num_tokens: int, at_once: int) -> Point:
        async def measure() -> Point:
            bodies = self._draw.texts(tokens, num_tokens, max(32, 2 * at_once))
            run = await system.run(Load(bodies, at_once, route=TEXTS))
            return Point(run.sizes.steps if run.sizes is not None else {}, costs(run))

        said = f"{tokens} + {num_tokens} tokens, {at_once} at once, {system.name}"
        return await self._undisturbed(said, measure)


def at(points: Sequence[Point], portions: Mapping[str, float]) -> Costs:
    """On the line through the points, process by process.

    Each process goes by the portions of its own stage, or else by those of decode.
    """
    found: Costs = {}
    for process in dict.fromkeys(name for point in points for name in point.cost):
        name = next((each for each in portions if each and process.startswith(each)), None)
        name = name or list(portions)[-1]
        line = sorted((each.portions[name], each.cost.get(process, 0.0)) for each in points)
        found[process] = between(line, portions[name])
    return found


def between(line: Sequence[tuple[float, float]], x: float) -> float:
    """The value at ``x`` of the line through some points, rising in x.

    Beyond them it goes on as it goes on the whole: a step has a price, and so has the rest.
    """
    (first_x, first_y), (last_x, last_y) = line[0], line[-1]
    if first_x <= x <= last_x:
        for (x0, y0), (x1, y1) in pairwise(line):
            if x <= x1:
                return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    slope = (last_y - first_y) / (last_x - first_x) if last_x > first_x else 0.0
    end_x, end_y = (first_x, first_y) if x < first_x else (last_x, last_y)
    return max(0.0, end_y + slope * (x - end_x))


def costs(run: Run) -> Costs:
    """Of a request; the client is a process, too."""
    num = len(run.records)
    used = {name: each / num for name, each in run.used_s.items()}
    return grouped({**used, profile_cpu.CLIENT: run.client_s / num})


def most_per_s(costs: Costs, num_cores: int, num_engines: Mapping[str, float]) -> float:
    """Requests that so much CPU time lets through: all cores are busy, or one process is.

    A process does nearly all in one thread. ``num_engines``: how many share a stage's work, where
    it is not one.
    """
    slowest_s = max(
        each / num_engines.get(name.removesuffix(" core"), 1.0) for name, each in costs.items()
    )
    return min(num_cores / sum(costs.values()), 1 / slowest_s)


def verdict(measured: float, allowed: float) -> Result:
    """``reached``: of what is allowed; ``as_allowed``: within ``TOLERANCE`` of it."""
    reached = measured / allowed
    return {
        "measured": measured,
        "allowed": allowed,
        "reached": reached,
        "as_allowed": abs(reached - 1) <= TOLERANCE,
    }


def grouped(costs: Mapping[str, float]) -> Costs:
    """By what it is for, whatever engine does it."""
    found: Costs = {}
    for name, each in costs.items():
        found[group_of(name)] = found.get(group_of(name), 0.0) + each
    return found


GROUPS: Mapping[str, str] = {
    "local-": Stage.PREFILL,
    **{stage: stage for stage in Stage},
    "vllm": "vLLM",
}
"""What the names of engines begin with."""


def group_of(name: str) -> str:
    """``encode core`` for the process that runs the steps of encoders, ``encode`` for servers."""
    for start, group in GROUPS.items():
        if name.startswith(start):
            return f"{group} core" if name.endswith(" core") else str(group)
    return name
