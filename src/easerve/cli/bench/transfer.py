"""``easerve bench transfer``: how embeddings get to prefill, our connector against vLLM's example.

Parts, systems taking turns in each: ``data``, the connectors alone between two processes, from an
embedding that exists to one that prefill can use; ``engines``, an encoder and a prefill engine of
each system, from the encode call to prefill's first token.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from easerve.cli.bench.encode import Result
from easerve.cli.bench.others import Others
from easerve.cli.bench.transfer_engines import DataPlane, Pair, Progress, data_plane, pairs, planned
from easerve.cli.bench.transfer_folders import Storage
from easerve.config import Deployment
from easerve.engines.protocol import EncodeCall, EngineError, Media, Prefilled, Prompt
from easerve.serve.media import prepare
from easerve.workload import mix

PARTS = ("data", "engines")
PUSH, DISK, SHM = "push", "example-disk", "example-shm"
CONNECTORS = (PUSH, DISK, SHM)
AFTER = f"{PUSH}-after-encode"
GOAL_ITEMS, GOAL_RATIO = 4, 0.85
NUM_WARM_UPS = 2
MAX_ITEMS = 64
MAX_PIXELS = 1 << 24
LAST_DRAWS = 1 << 20  # more requests than a run has


Tick = Callable[[str], None]


class System(NamedTuple):
    """A connector; ``together``: prefill is dispatched at the same time as encode."""

    connector: str
    together: bool


class Case(NamedTuple):
    """An embedding's size and type."""

    num_tokens: int
    width: int
    dtype: str
    item_bytes: int


SYSTEMS: Mapping[str, System] = {
    PUSH: System(PUSH, together=True),
    AFTER: System(PUSH, together=False),
    SHM: System(SHM, together=False),
    DISK: System(DISK, together=False),
}
# Of models/tiny-llava, and of a model of 7 billion parameters with 576 tokens for a picture.
CASES: Mapping[str, Case] = {
    "small": Case(25, 128, "float32", 25 * 128 * 4),
    "large": Case(576, 4096, "bfloat16", 576 * 4096 * 2),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """``num_items``: of a transfer, of a request; each is a case of its own."""

    parts: Sequence[str]
    num_items: Sequence[int]
    num_rounds: int
    seed: int

    def num_runs(self, part: str) -> int:
        """For a progress bar."""
        cases = len(CASES) if part == "data" else 1
        return (self.num_rounds + NUM_WARM_UPS) * len(self.num_items) * cases


# What the deployment has to have for a pair of engines of each connector.
OVER: Mapping[str, Any] = {
    "encode": {"replicas": len(CONNECTORS), "cores": None},
    "prefill": {"replicas": len(CONNECTORS), "cores": None},
    "local_prefill": None,
    "policy": {"remote_share": 1},
}


class TransferBench:
    """The parts one by one: each has processes of its own, and nothing else runs meanwhile."""

    def __init__(self, plan: Plan, storage: Storage) -> None:
        self._plan, self._storage = plan, storage
        self._rng = random.Random(plan.seed)  # noqa: S311 (orders, not secrets)
        self._num_drawn = 0

    @asynccontextmanager
    async def started(
        self, part: str, deployment: Deployment, progress: Progress
    ) -> AsyncIterator[Callable[[Tick], Awaitable[Result]]]:
        """The part's processes run; the body may measure, which calls a function with a text before
        each turn of all systems. ``progress`` hears of the processes while they start.
        """
        storages = {PUSH: None, DISK: self._storage.disk, SHM: self._storage.shm}
        with planned(deployment, storages) as launch:
            if part == "data":
                async with data_plane(launch, progress) as plane:
                    yield partial(self._data, plane)
            else:
                async with pairs(launch, progress) as engines:
                    yield partial(self._engines, engines)

    # Data plane -------------------------------------------------------------------------------

    async def _data(self, plane: DataPlane, tick: Tick) -> Result:
        """A row for each case, number of items and connector."""
        rows, others = [], Others()
        for case in CASES:
            for num_items in self._plan.num_items:
                runs: dict[str, list[Result]] = {name: [] for name in CONNECTORS}
                for number in self._numbers:
                    tick(f"data plane, {num_items} {case}{_round(number)}")
                    for connector in self._rng.sample(CONNECTORS, len(CONNECTORS)):
                        run = await plane.run(self._order(connector, case, num_items))
                        self._storage.empty()
                        if number >= 0:
                            runs[connector].append(run)
                rows += [_data_row(case, num_items, name, each) for name, each in runs.items()]
        on_disk = {"folder": str(self._storage.disk_root), "file_system": self._storage.file_system}
        return {"data": rows, "disk": on_disk, "data_others_cores": others.cores()}

    @property
    def _numbers(self) -> range:
        """Of the rounds; those below zero warm up."""
        return range(-NUM_WARM_UPS, self._plan.num_rounds)

    def _order(self, connector: str, case: str, num_items: int) -> Result:
        self._num_drawn += 1
        size = CASES[case]
        return {
            "connector": connector,
            "num_items": num_items,
            "num_tokens": size.num_tokens,
            "width": size.width,
            "dtype": size.dtype,
            "seed": self._plan.seed * LAST_DRAWS + self._num_drawn,
        }

    # Engines ----------------------------------------------------------------------------------

    async def _engines(self, pairs: Mapping[str, Pair], tick: Tick) -> Result:
        """A row for each number of pictures and system, and the ratios."""
        rows, found, others = [], [], Others()
        for num_items in self._plan.num_items:
            runs: dict[str, list[Result]] = {name: [] for name in SYSTEMS}
            for number in self._numbers:
                tick(f"engines, {num_items} pictures{_round(number)}")
                for name, run in (await self._turn(pairs, num_items)).items():
                    if number >= 0:
                        runs[name].append(run)
            rows += [_engine_row(num_items, name, each) for name, each in runs.items()]
            firsts = {name: [run["first_token_s"] for run in each] for name, each in runs.items()}
            found.append(ratios(num_items, firsts))
        goal = [each for each in found if each["num_items"] == GOAL_ITEMS]
        figures = {name: goal[0][name] for name in ("push_s", "example_s", "ratio")} if goal else {}
        return {
            "engines": rows,
            "ratios": found,
            **figures,
            "engines_others_cores": others.cores(),
        }

    async def _turn(self, pairs: Mapping[str, Pair], num_items: int) -> dict[str, Result]:
        """Every system once, with the same new pictures under keys of its own.

        Raises EngineError when they do not draw the same token.
        """
        request = mix.request(mix.Mix({num_items: 1.0}), self._plan.seed, self._num_drawn)
        self._num_drawn += 1
        runs: dict[str, Result] = {}
        for name in self._rng.sample(list(SYSTEMS), len(SYSTEMS)):
            system = SYSTEMS[name]
            runs[name] = await _first_token(pairs[system.connector], request, name, system.together)
            self._storage.empty()
        if len({run["token"] for run in runs.values()}) > 1:
            tokens = {name: run["token"] for name, run in runs.items()}
            raise EngineError(f"the systems' first tokens differ: {tokens}")
        return runs


async def _first_token(pair: Pair, request: mix.Request, name: str, together: bool) -> Result:
    """Seconds from the encode call to prefill's first token; rendering comes before that."""
    prompt, calls = await _rendered(pair, request, name)
    ends: dict[str, float] = {}
    begin = time.perf_counter()

    async def encode() -> None:
        await pair.encoder.encode(calls)
        ends["encode_s"] = time.perf_counter() - begin

    async def prefill() -> Prefilled:
        coming = range(len(prompt.items)) if together else ()
        made = await pair.prefill.prefill(prompt, coming)
        ends["first_token_s"] = time.perf_counter() - begin
        return made

    if together:
        _, made = await asyncio.gather(encode(), prefill())
    else:
        await encode()
        made = await prefill()
    if made.answer is None:
        raise EngineError(f"{pair.prefill.worker_id} made no token")
    usable_s = [bundle.usable_s for bundle in made.bundles]
    return {
        **ends,
        "wait_s": made.wait_s,
        "usable_s": max(usable_s, default=None),
        "token": tuple(made.answer.token_ids),
    }


async def _rendered(pair: Pair, request: mix.Request, name: str) -> tuple[Prompt, list[EncodeCall]]:
    """What is asked of the engines; ``name`` gives the pictures keys of their own."""
    content, media = [], []
    for part in request.content:
        if part["type"] == "image_url":
            picture = prepare(part["image_url"]["url"], MAX_PIXELS, f"{name}|")
            media.append(Media(picture.key, "image_url", picture.url))
            part = {**part, "image_url": {"url": picture.url}, "uuid": picture.key}
        content.append(part)
    body = {
        "model": pair.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "temperature": 0,
    }
    prompt = await pair.encoder.render(body)
    destinations = (pair.prefill.worker_id,)
    calls = [
        EncodeCall(each, placeholder, destinations)
        for each, placeholder in zip(media, prompt.placeholders, strict=True)
    ]
    return prompt, calls


def _round(number: int) -> str:
    return ", warm-up" if number < 0 else f", {number + 1}"


def spread(values: Sequence[float]) -> Result:
    """The median and the quartiles, which are values that were measured."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.25, 0.75))
    return {"median": median(ordered), "low": low, "high": high}


def _spreads(runs: Sequence[Result], names: Sequence[str]) -> Result:
    """Of values that are there; None where one is not."""
    found: Result = {}
    for name in names:
        values = [run[name] for run in runs]
        found[name] = None if None in values else spread(values)
    return found


def _data_row(case: str, num_items: int, connector: str, runs: Sequence[Result]) -> Result:
    num_bytes = num_items * CASES[case].item_bytes
    times = _spreads(runs, ("sent_s", "usable_s", "read_s"))
    return {
        "case": case,
        "num_items": num_items,
        "num_bytes": num_bytes,
        "connector": connector,
        **times,
        "bytes_per_s": num_bytes / times["usable_s"]["median"],
    }


def _engine_row(num_items: int, name: str, runs: Sequence[Result]) -> Result:
    times = _spreads(runs, ("first_token_s", "encode_s", "wait_s", "usable_s"))
    return {"num_items": num_items, "system": name, **times}


def ratios(num_items: int, rounds: Mapping[str, Sequence[float]]) -> Result:
    """Push, dispatched together, over the better of the examples.

    ``ratio`` is that of the medians, ``ratio_in_round`` that of two runs next to each other, which
    is what to look at on a machine that others use.
    """
    example = min((SHM, DISK), key=lambda name: median(rounds[name]))
    push_s, example_s = median(rounds[PUSH]), median(rounds[example])
    return {
        "num_items": num_items,
        "example": example,
        "push_s": push_s,
        "example_s": example_s,
        "ratio": push_s / example_s,
        "ratio_in_round": spread(
            [ours / theirs for ours, theirs in zip(rounds[PUSH], rounds[example], strict=True)]
        ),
    }
