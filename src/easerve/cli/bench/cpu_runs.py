"""One run of load on one of the systems of ``easerve bench cpu``, by clients of their own."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Protocol

from easerve.bench.client import in_process
from easerve.bench.job import Planned, Target, encoded
from easerve.bench.sample import Seen
from easerve.cli import profile_cpu
from easerve.cli.bench.cpu_systems import Plain, Turns
from easerve.cli.bench.cpu_watch import Sizes, Watch
from easerve.cli.deploy import Service
from easerve.cli.profile_stages import cells
from easerve.config import Policy
from easerve.engines.protocol import Engine, EngineError
from easerve.goodput import Record, Slo, summarise
from easerve.policy.knobs import NO_RULE
from easerve.serve.admin import knobs_of
from easerve.types import Stage
from easerve.workload import mix

GREEDY: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True}
TIMEOUT_S = 120.0
FIRST_TOKEN_ID = 16  # behind what tokenizers keep for themselves
STEPS = "iteration_tokens_total_count"
"""vLLM's metric with an entry for each step."""
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """What each request of a run asks: so many pictures, so many tokens of an answer."""

    num_images: int
    num_tokens: int

    @property
    def name(self) -> str:
        return f"{self.num_images}x{self.num_tokens}"

    def __str__(self) -> str:
        s = "" if self.num_images == 1 else "s"
        return f"{self.num_images} picture{s}, {self.num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Load:
    """Bodies at ``times_s``, or in a closed loop of ``concurrency`` clients.

    ``route``: of the API, chats unless said otherwise.
    """

    bodies: Sequence[dict[str, Any]]
    concurrency: int | None = None
    times_s: Sequence[float] | None = None
    route: str = ""

    def planned(self, part: int = 0, parts: int = 1) -> list[Planned]:
        """Every ``parts``-th request from number ``part`` on."""
        times_s = self.times_s or [0.0] * len(self.bodies)
        each = zip(times_s, self.bodies, strict=True)
        return [Planned(at_s, body) for at_s, body in each][part::parts]


@dataclass(frozen=True, slots=True)
class Run:
    """Records are on one clock. ``used_s``: CPU seconds of the servers' processes, in all.

    ``client_s``: of the clients. ``chunks``: that an answer came in. ``sizes``: of EAServe only.
    """

    records: Sequence[Record]
    used_s: Mapping[str, float]
    client_s: float
    chunks: float
    sizes: Sizes | None = None

    @property
    def duration_s(self) -> float:
        """From the first request sent to the last answer."""
        begin_s = min(record.sent_s for record in self.records)
        return max(record.end_s or record.sent_s for record in self.records) - begin_s

    @property
    def cpu_s(self) -> float:
        """Of servers and clients, for a request."""
        return (sum(self.used_s.values()) + self.client_s) / len(self.records)

    def row(self, slos: Mapping[str, Slo] | None = None) -> Result:
        """For JSON; CPU seconds are for a request, ``cores`` are those that were busy."""
        summary = summarise(self.records, self.duration_s, slos or {})
        num = len(self.records)
        used = {name: each / num for name, each in self.used_s.items()}
        row: Result = {
            "num_requests": num,
            "not_completed": num - summary.completed,
            "duration_s": self.duration_s,
            "throughput_per_s": summary.throughput_per_s,
            "ttft_s": asdict(summary.ttft_s),
            "tpot_s": asdict(summary.tpot_s),
            "cpu_s": self.cpu_s,
            "used_s": {**used, profile_cpu.CLIENT: self.client_s / num},
            "cores": self.cpu_s * num / self.duration_s,
            "chunks": self.chunks,
            "sizes": asdict(self.sizes) if self.sizes is not None else None,
        }
        if slos:
            row["goodput_per_s"] = dict(summary.goodput_per_s)
            row["attainment"] = dict(summary.attainment)
        return row


class System(Protocol):
    """``host``: the group of processes that it runs on, for ``Turns``.

    ``num_engines``: that share a stage's work, by stage, where it is not one.
    """

    name: str
    host: str

    @property
    def num_engines(self) -> dict[str, float]: ...

    async def run(self, load: Load) -> Run: ...


class Easerve:
    """A policy in force on a deployment that runs."""

    def __init__(
        self, name: str, host: str, service: Service, watch: Watch, policy: Policy, turns: Turns
    ) -> None:
        self.name, self.host, self.service, self.policy = name, host, service, policy
        self.watch, self._turns = watch, turns

    @property
    def num_engines(self) -> dict[str, float]:
        """How many engines share a stage's work; of unequal shares the larger one counts."""
        share = self.policy.remote_share
        alone = self.service.deployment.local_prefill is None
        return {} if alone else {Stage.PREFILL: 1 / max(share, 1 - share)}

    @property
    def divides(self) -> bool:
        """Encode and local prefill divide their device."""
        return self.service.deployment.partition is not None and self.policy.how != NO_RULE

    def turn(self) -> None:
        """This policy is in force, and nobody else runs."""
        self._turns.to(self.host)
        self.service.driver.turn(knobs_of(self.policy))

    async def run(self, load: Load) -> Run:
        self.turn()
        before = await self._steps()
        self.watch.expect(len(load.bodies), lambda: profile_cpu.all_s(self.service))
        seen = await _ask(self.service.address, self.service.deployment.name, load)
        used_s = self.watch.used_s()
        used_s.pop(profile_cpu.CLIENT, None)  # the client says it itself, without its start
        steps = profile_cpu.since(before, await self._steps())
        return _run([seen], used_s, self.watch.sizes(steps))

    async def _steps(self) -> dict[str, float]:
        """That all engines have made so far, by stage."""
        found: dict[str, float] = {}
        for engine in self.service.driver.engines():
            found[engine.stage] = found.get(engine.stage, 0.0) + await num_steps(engine)
        return found


async def num_steps(engine: Engine) -> float:
    """That it has made so far."""
    return cells(await engine.metrics()).get(STEPS, 0.0)


class Aggregated:
    """Plain vLLM. Each replica has a client of its own and every so-many-th request.

    In a closed loop all replicas then have as many open requests as each other all the time, which
    is what the best router could do.
    """

    def __init__(self, plain: Plain, model: str, turns: Turns) -> None:
        self.name = self.host = plain.name
        self.plain, self._model, self._turns = plain, model, turns
        self.num_engines: dict[str, float] = {"vLLM": float(len(plain.engines))}

    async def run(self, load: Load) -> Run:
        self._turns.to(self.host)
        urls, before = self.plain.urls, self.plain.used()
        parts = [_part(load, index, len(urls)) for index in range(len(urls))]
        seen = await asyncio.gather(
            *(_ask(url, self._model, part) for url, part in zip(urls, parts, strict=True))
        )
        used_s = profile_cpu.since(before, self.plain.used())
        return _run(seen, used_s)

    async def alone(self, load: Load) -> Run:
        """On the first replica."""
        self._turns.to(self.host)
        return _run([await _ask(self.plain.urls[0], self._model, load)], {})


def checked(run: Run, system: System) -> Run:
    """Raises EngineError when requests of a closed loop failed: its throughput means nothing."""
    lost = sum(record.outcome != "completed" for record in run.records)
    if lost:
        raise EngineError(
            f"{system.name}: {lost} of {len(run.records)} requests were not completed; "
            "the engines' logs say why"
        )
    return run


def _part(load: Load, index: int, num: int) -> Load:
    """What one of several replicas gets of it."""
    return replace(
        load,
        bodies=load.bodies[index::num],
        times_s=load.times_s and load.times_s[index::num],
        concurrency=load.concurrency and max(1, load.concurrency // num),
    )


async def _ask(url: str, model: str, load: Load) -> Seen:
    target = Target(f"{url}{load.route}", model, timeout_s=TIMEOUT_S)
    job, bodies = encoded(target, load.planned(), concurrency=load.concurrency)
    return await in_process(job, bodies)


def _run(parts: Sequence[Seen], used_s: Mapping[str, float], sizes: Sizes | None = None) -> Run:
    """``parts``: what each client saw."""
    chunks = fmean(sample.num_chunks for seen in parts for sample in seen.samples)
    return Run(_records(parts), used_s, sum(map(_client_s, parts)), chunks, sizes)


def _records(parts: Sequence[Seen]) -> list[Record]:
    """On the clock of the first."""
    return [
        _later(sample.record, seen.start_s - parts[0].start_s)
        for seen in parts
        for sample in seen.samples
    ]


def _later(record: Record, by_s: float) -> Record:
    first_s, end_s = record.first_token_s, record.end_s
    return replace(
        record,
        scheduled_s=record.scheduled_s + by_s,
        sent_s=record.sent_s + by_s,
        first_token_s=None if first_s is None else first_s + by_s,
        end_s=None if end_s is None else end_s + by_s,
    )


def _client_s(seen: Seen) -> float:
    return seen.health.cpu_share * seen.wall_s


# What is asked ------------------------------------------------------------------------------------


class Draw:
    """Requests, each with pictures or tokens that nobody has asked of before."""

    def __init__(self, seed: int) -> None:
        self._seed, self._num_drawn = seed, 0
        self._rng = random.Random(seed)  # noqa: S311 (prompts, not secrets)

    async def pictures(self, shape: Shape, num: int) -> list[dict[str, Any]]:
        """Off the event loop, which has engines to look after."""
        return await asyncio.to_thread(self._pictures, shape, num)

    def _pictures(self, shape: Shape, num: int) -> list[dict[str, Any]]:
        asked = mix.Mix({shape.num_images: 1.0}, num_output_tokens=(shape.num_tokens,) * 2)
        first, self._num_drawn = self._num_drawn, self._num_drawn + num
        drawn = (mix.request(asked, self._seed, first + index) for index in range(num))
        return [
            {"messages": each.messages, "max_tokens": each.max_tokens, **GREEDY} for each in drawn
        ]

    def texts(self, num_prompt_tokens: int, num_tokens: int, num: int) -> list[dict[str, Any]]:
        """Prompts of tokens, for /v1/completions."""
        ids = range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + 256)
        return [
            {
                "prompt": self._rng.choices(ids, k=num_prompt_tokens),
                "max_tokens": num_tokens,
                **GREEDY,
            }
            for _ in range(num)
        ]
