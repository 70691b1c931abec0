"""What the stages cost alone, measured in every round of ``easerve bench cpu``.

One stage at a time, while everything else has nothing to do. Nothing here is taken from the runs
that are explained by it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from easerve.cli import profile_cpu
from easerve.cli.bench.cpu_runs import (
    Aggregated,
    Draw,
    Easerve,
    Load,
    Run,
    Shape,
    System,
    checked,
)
from easerve.cli.bench.cpu_stages import Costs, StagesBench
from easerve.cli.bench.others import Others
from easerve.policy.knobs import NO_RULE
from easerve.policy.partition import SHARED, Demand, Devices, Partition
from easerve.serve.admin import knobs_of
from easerve.types import Stage

TEXTS = "/v1/completions"
NUM_ITEMS, LEAST_CALLS, NUM_RENDERED = 480, 6, 64
CALLS = "calls"
BATCHES = (1, 4, 16)
"""Pictures of a call, and as many as it holds."""
BATCH_CALLERS = 2  # one call runs, one has been sent ahead
SHORT = 2
"""Tokens of the shortest answer that decode has a part in."""
ROUNDS_OF_CLIENTS = 4
QUIET_CORES = 0.1
Key = tuple[str | int | float, ...]
Result = dict[str, Any]
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """Of a request, or of a picture where it is encoded.

    ``portions``: steps that it took, by stage, and calls to the encoder; ``chunks``: that its
    answer came in.
    """

    cost: Costs
    wall_s: float = 0.0
    portions: Mapping[str, float] = field(default_factory=dict)
    chunks: float = 0.0


class Alone:
    """``concurrency``: of the runs. ``attempts``: how often at most a stage is measured in a round,
    while other processes take part of the cores."""

    def __init__(self, draw: Draw, concurrency: int, attempts: int, tick: Tick) -> None:
        self._draw, self._tick, self._attempts = draw, tick, attempts
        self._all, self._fewer = concurrency, max(1, concurrency // 4)
        self._benches: dict[str, StagesBench] = {}
        self._found: dict[Key, list[Measured]] = {}
        self._in_round: set[Key] = set()
        self.others_cores = 0.0  # that other processes used at most, while a stage was measured

    async def measure(
        self,
        shapes: Mapping[Shape, int],
        easerve: Iterable[Easerve],
        plain: Iterable[Aggregated],
    ) -> None:
        """A round. ``shapes``: with the tokens of a prompt of each."""
        self._in_round.clear()
        for shape, tokens in shapes.items():
            for system in easerve:
                await self._prepare(system, shape)
                await self._render(system, tokens)
                await self._encode(system, shape)
                for num_tokens, at_once in (
                    (SHORT, self._all),
                    (shape.num_tokens, self._all),
                    (shape.num_tokens, self._fewer),
                ):
                    await self._text(system, tokens, num_tokens, at_once)
            for replicas in plain:
                await self._pictures(replicas, shape.num_images)
                for num_tokens in (shape.num_tokens, 1):
                    await self._text(replicas, tokens, num_tokens, self._all)

    # What was found: the means of all rounds --------------------------------------------------

    def preparation(self, system: Easerve, shape: Shape) -> Costs:
        return self._mean(("prepare", system.host, shape.num_images)).cost

    def pictures_in_prefill(self, system: Easerve, shape: Shape) -> Costs:
        return self._mean(("pictures in prefill", system.host, shape.num_images)).cost

    def rendering(self, system: Easerve, tokens: int) -> Costs:
        return self._mean(("render", system.host, tokens)).cost

    def encoding(self, system: Easerve) -> list[Measured]:
        """In calls of several sizes, each a step."""
        start = ("encode", system.host, _rule(system))
        return [
            self._mean(key) for key in self._found if key[:-2] == start and key[-1] == BATCH_CALLERS
        ]

    def encoding_in_a_crowd(self, system: Easerve, shape: Shape) -> Measured:
        """Each picture in a call, asked for by all clients, each with all that it has."""
        callers = self._all * shape.num_images
        return self._mean(("encode", system.host, _rule(system), 1, callers))

    def text(self, system: System, tokens: int, num_tokens: int, fewer: bool = False) -> Measured:
        at_once = self._fewer if fewer else self._all
        return self._mean(_text_key(system, tokens, num_tokens, at_once))

    def pictures(self, system: Aggregated, shape: Shape) -> Measured:
        """With one token for an answer."""
        return self._mean(("pictures", system.name, shape.num_images))

    def cores(self) -> float:
        """That EAServe keeps busy when all clients ask it for texts."""
        found = [
            self._mean(key)
            for key in self._found
            if key[0] == "text" and key[1] in self._benches and key[-1] == self._all
        ]
        return sum(sum(each.cost.values()) for each in found) / sum(each.wall_s for each in found)

    def _mean(self, key: Key) -> Measured:
        found = self._found[key]
        return Measured(
            _mean([each.cost for each in found]),
            fmean(each.wall_s for each in found),
            _mean([each.portions for each in found]),
            fmean(each.chunks for each in found),
        )

    def as_json(self) -> list[Result]:
        return [
            {"what": list(key), "rounds": len(found), **asdict(self._mean(key))}
            for key, found in self._found.items()
        ]

    # Stages, each measured once in a round ----------------------------------------------------

    async def _once(self, key: Key, measure: Callable[[], Awaitable[Measured]]) -> None:
        if key in self._in_round:
            return
        self._in_round.add(key)
        self._tick(f"alone: {', '.join(map(str, key))}")
        found: list[tuple[float, Measured]] = []
        while len(found) < self._attempts:
            others = await asyncio.to_thread(Others)
            measured = await measure()
            found.append((await asyncio.to_thread(others.cores), measured))
            if found[-1][0] <= QUIET_CORES:
                break
        others_cores, measured = min(found, key=lambda each: each[0])
        self.others_cores = max(self.others_cores, others_cores)
        self._found.setdefault(key, []).append(measured)

    def _bench(self, system: Easerve) -> StagesBench:
        if system.host not in self._benches:
            self._benches[system.host] = StagesBench(system.service, self._draw)
        system.turn()
        return self._benches[system.host]

    async def _prepare(self, system: Easerve, shape: Shape) -> None:
        bench, short = self._bench(system), Shape(shape.num_images, SHORT)
        num = max(2 * self._all, NUM_ITEMS // shape.num_images)

        async def prepare() -> Measured:
            return Measured(grouped(await bench.prepare(short, num)))

        async def pictures() -> Measured:
            return Measured(grouped(await bench.pictures_in_prefill(self._all)))

        await self._once(("prepare", system.host, shape.num_images), prepare)
        await self._once(("pictures in prefill", system.host, shape.num_images), pictures)

    async def _render(self, system: Easerve, tokens: int) -> None:
        bench = self._bench(system)

        async def render() -> Measured:
            return Measured(grouped(await bench.render_text(tokens, NUM_RENDERED)))

        await self._once(("render", system.host, tokens), render)

    async def _encode(self, system: Easerve, shape: Shape) -> None:
        bench = self._bench(system)
        most = min(bench.most_items, system.policy.max_batch_items)
        batches = sorted({min(each, most) for each in (*BATCHES, most)})
        for items, callers in (
            *((each, BATCH_CALLERS) for each in batches),
            (1, self._all * shape.num_images),
        ):
            num = max(LEAST_CALLS, NUM_ITEMS // items, 2 * callers)
            demand = _demand(system, items * bench.item_tokens)
            asked = partial(bench.encode, items, num, callers, demand)
            await self._once(
                ("encode", system.host, _rule(system), items, callers),
                partial(_encoded, asked, 1 / items),
            )

    async def _text(self, system: System, tokens: int, num_tokens: int, at_once: int) -> None:
        """The more at once, the fewer steps for each; the same for all variants on a host."""

        async def text() -> Measured:
            num = ROUNDS_OF_CLIENTS * max(at_once, self._fewer)
            bodies = self._draw.texts(tokens, num_tokens, num)
            return measured(checked(await system.run(Load(bodies, at_once, route=TEXTS)), system))

        await self._once(_text_key(system, tokens, num_tokens, at_once), text)

    async def _pictures(self, system: Aggregated, num_images: int) -> None:
        async def pictures() -> Measured:
            num = ROUNDS_OF_CLIENTS * self._all
            bodies = await self._draw.pictures(Shape(num_images, 1), num)
            return measured(checked(await system.run(Load(bodies, self._all)), system))

        await self._once(("pictures", system.name, num_images), pictures)


def _text_key(system: System, tokens: int, num_tokens: int, at_once: int) -> Key:
    share = system.policy.remote_share if isinstance(system, Easerve) else 1.0
    return "text", system.host, share, tokens, num_tokens, at_once


async def _encoded(ask: Callable[[], Awaitable[tuple[Costs, float]]], calls: float) -> Measured:
    cost, steps = await ask()
    return Measured(grouped(cost), portions={CALLS: calls, Stage.ENCODE: steps})


def _rule(system: Easerve) -> str:
    """By which encode and local prefill divide their device."""
    return system.policy.how if system.divides else NO_RULE


def _demand(system: Easerve, batch_tokens: int) -> Demand:
    if not system.divides:
        return SHARED
    return Partition(knobs_of(system.policy), Devices()).demand(batch_tokens)


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Name by name; what is not there is 0."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: fmean(row.get(name, 0.0) for row in rows) for name in names}


def measured(run: Run) -> Measured:
    """Of a request; the client is a process, too."""
    num = len(run.records)
    used = {name: each / num for name, each in run.used_s.items()}
    cost = grouped({**used, profile_cpu.CLIENT: run.client_s / num})
    steps = run.sizes.steps if run.sizes is not None else {}
    return Measured(cost, run.duration_s / num, steps, run.chunks)


GROUPS: Mapping[str, str] = {
    "local-": Stage.PREFILL,
    **{stage: stage for stage in Stage},
    "vllm": "vLLM",
}
"""What the names of engines begin with."""


def grouped(costs: Mapping[str, float]) -> Costs:
    """By what it is for, whatever engine does it."""
    found: Costs = {}
    for name, each in costs.items():
        found[group_of(name)] = found.get(group_of(name), 0.0) + each
    return found


def group_of(name: str) -> str:
    """``encode core`` for the process that runs the steps of encoders, ``encode`` for servers."""
    for start, group in GROUPS.items():
        if name.startswith(start):
            return f"{group} core" if name.endswith(" core") else str(group)
    return name
