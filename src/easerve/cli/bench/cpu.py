"""``easerve bench cpu``: the real comparison on this machine's cores, in one run.

Systems take turns on the same cores, with the same model and requests: plain vLLM engines that do
everything (aggregated), EAServe that passes requests through as a proxy does, each of its
mechanisms alone, all of them. What the stages cost alone is measured in every round, too.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from easerve.bench import reference
from easerve.cli.bench.cpu_allowed import Allowed, Portions, by_easerve, by_plain, most_per_s
from easerve.cli.bench.cpu_alone import Alone
from easerve.cli.bench.cpu_rows import ALONE, IN_RUN, pooled, ratios
from easerve.cli.bench.cpu_runs import (
    Aggregated,
    Draw,
    Easerve,
    Load,
    Shape,
    System,
    checked,
)
from easerve.cli.bench.cpu_timeline import timeline
from easerve.cli.bench.others import Others
from easerve.config import Policy
from easerve.engines.protocol import EngineError
from easerve.goodput import TIERS, tier
from easerve.policy.knobs import NO_RULE
from easerve.workload.arrivals import Arrivals

PASS, WHEN, WHERE, HOW, ALL = "passthrough", "When", "Where", "How", "all"
WARM_UPS = 2  # rounds of all clients
MOST_ROUNDS_OF_CLIENTS, LEAST_ROUNDS_OF_CLIENTS = 12, 4
NUM_ALONE = 20
SLO_LOAD, TIMELINE_LOAD = 0.7, 0.8
Result = dict[str, Any]
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``run_s``: about as long takes a run of the slowest system. ``shares``: that are tried.

    ``slo_s``, ``timeline_s``: of a run with requests at some rate. ``attempts``: to measure a
    stage on a quiet machine.
    """

    shapes: Sequence[Shape]
    rounds: int
    concurrency: int
    run_s: float
    shares: Sequence[float]
    slo_s: float
    timeline_s: float
    seed: int
    attempts: int = 3

    @property
    def middle(self) -> Shape:
        """What is measured of one shape only is of this one."""
        return self.shapes[len(self.shapes) // 2]


def policies(policy: Policy, share: float) -> dict[str, Policy]:
    """Of each variant of EAServe; ``policy`` is the deployment's."""
    when = policy.when if policy.when != NO_RULE else Policy().when
    how = policy.how if policy.how != NO_RULE else Policy().how
    off = {"when": NO_RULE, "flow": False, "remote_share": 1.0, "how": NO_RULE}
    changes: dict[str, dict[str, Any]] = {
        PASS: off,
        WHEN: {**off, "when": when, "flow": policy.flow},
        WHERE: {**off, "remote_share": share},
        HOW: {**off, "remote_share": share, "how": how},
        ALL: {"when": when, "flow": policy.flow, "remote_share": share, "how": how},
    }
    return {name: policy.model_copy(update=each) for name, each in changes.items()}


class CpuBench:
    """``easerve``: the variants by name, ``plain``: vLLM's replicas. ``tick`` hears of each run."""

    def __init__(
        self,
        plan: Plan,
        easerve: Mapping[str, Easerve],
        plain: Sequence[Aggregated],
        tick: Tick,
    ) -> None:
        self._plan, self._easerve, self._plain, self._tick = plan, easerve, plain, tick
        self._draw = Draw(plan.seed)
        self._rng = random.Random(plan.seed)  # noqa: S311 (arrivals, not secrets)
        self._alone = Alone(self._draw, plan.concurrency, plan.attempts, tick)
        self._rows: dict[Shape, dict[str, list[Result]]] = {
            shape: {system.name: [] for system in self._systems} for shape in plan.shapes
        }

    @property
    def _systems(self) -> list[System]:
        return [*self._plain, *self._easerve.values()]

    async def run(self) -> Result:
        plan = self._plan
        num_requests = await self._warm_up()
        share, shares = await self._choose_share(num_requests)
        for number in range(plan.rounds):
            for shape in plan.shapes:
                for system in _in_turn(self._systems, number):
                    self._tick(f"{shape}, {system.name}, round {number + 1}")
                    row = await self._saturated(system, shape, num_requests[shape])
                    self._rows[shape][system.name].append(row)
            tokens = {shape: self._prompt_tokens(shape) for shape in plan.shapes}
            await self._alone.measure(tokens, self._easerve.values(), self._plain)
        best = self._best_plain(plan.middle)
        return {
            "rounds": plan.rounds,
            "concurrency": plan.concurrency,
            "seed": plan.seed,
            "systems": [system.name for system in self._systems],
            "remote_share": {"chosen": share, "tried": shares},
            "mixes": [self._explained(shape) for shape in plan.shapes],
            "stages": {
                "others_cores": self._alone.others_cores,
                "busy_cores": self._alone.cores(),
                "costs": self._alone.as_json(),
            },
            "slo": await self._promises(best),
            "timelines": await self._timelines(),
        }

    # Throughput -------------------------------------------------------------------------------

    async def _warm_up(self) -> dict[Shape, int]:
        """How many requests a run of each shape gets."""
        plan, least = self._plan, LEAST_ROUNDS_OF_CLIENTS * self._plan.concurrency
        for system in self._systems:
            self._tick(f"warm-up, {system.name}")
            await self._saturated(system, plan.middle, plan.concurrency)
        num: dict[Shape, int] = {}
        for shape in plan.shapes:
            self._tick(f"warm-up, {shape}")
            row = await self._saturated(self._easerve[PASS], shape, WARM_UPS * plan.concurrency)
            most = MOST_ROUNDS_OF_CLIENTS * plan.concurrency
            num[shape] = min(most, max(least, round(row["throughput_per_s"] * plan.run_s)))
        return num

    async def _choose_share(self, num_requests: Mapping[Shape, int]) -> tuple[float, Result]:
        """The share of remote prefills with which all mechanisms together answer most."""
        shape, tried = self._plan.middle, dict[float, list[float]]()
        everything = self._easerve[ALL]
        policy = everything.policy
        for _ in range(2 if len(self._plan.shares) > 1 else 0):
            for share in self._rng.sample(list(self._plan.shares), len(self._plan.shares)):
                self._tick(f"remote share {share:g}")
                everything.policy = policy.model_copy(update={"remote_share": share})
                row = await self._saturated(everything, shape, num_requests[shape])
                tried.setdefault(share, []).append(row["throughput_per_s"])
        chosen = self._plan.shares[0]
        if tried:
            chosen = max(tried, key=lambda share: median(tried[share]))
        for name, each in policies(policy, chosen).items():
            self._easerve[name].policy = each
        return chosen, {f"{share:g}": median(each) for share, each in sorted(tried.items())}

    async def _saturated(self, system: System, shape: Shape, num: int) -> Result:
        load = Load(await self._draw.pictures(shape, num), self._plan.concurrency)
        others = await asyncio.to_thread(Others)
        run = await system.run(load)
        others_cores = await asyncio.to_thread(others.cores)
        return checked(run, system).row() | {"others_cores": others_cores}

    def _best_plain(self, shape: Shape) -> Aggregated:
        """The one that answers most of this shape."""
        return max(self._plain, key=lambda system: self._throughput(shape, system.name))

    def _throughput(self, shape: Shape, name: str) -> float:
        return float(pooled(self._rows[shape][name])["throughput_per_s"])

    def _prompt_tokens(self, shape: Shape) -> int:
        """All that differs from request to request is the wording."""
        first, *_ = self._rows[shape][PASS]
        tokens: float = first["sizes"]["prompt_tokens"]
        return round(tokens)

    # Why --------------------------------------------------------------------------------------

    def _explained(self, shape: Shape) -> Result:
        """Of all rounds, with what the stages allow."""
        rows = {name: pooled(each) for name, each in self._rows[shape].items()}
        tokens, best = self._prompt_tokens(shape), self._best_plain(shape)
        allowed: dict[str, Allowed] = {}
        for name, system in self._easerve.items():
            sizes = rows[name]["sizes"]
            calls, steps = 1 / sizes["items_per_call"], sizes["steps"]
            portions = Portions(calls, steps, rows[name]["chunks"], tokens)
            allowed[name] = by_easerve(self._alone, system, shape, portions)
        allowed[best.name] = by_plain(self._alone, best, shape, tokens)
        most = {
            IN_RUN: {
                name: self._kept_busy(name, rows[name]["by_process"], each.cores)
                for name, each in allowed.items()
            },
            ALONE: {name: each.most_per_s for name, each in allowed.items()},
        }
        return {
            "name": shape.name,
            "num_images": shape.num_images,
            "num_tokens": shape.num_tokens,
            "prompt_tokens": tokens,
            "best_vllm": best.name,
            "systems": rows,
            "predicted": {
                name: {
                    "cpu_s": sum(each.costs.values()),
                    "most_per_s": each.most_per_s,
                    "by_process": each.costs,
                }
                for name, each in allowed.items()
            },
            "ratios": {each: ratios(rows, most, each) for each in (PASS, best.name)},
        }

    def _kept_busy(self, name: str, costs: dict[str, float], cores: float) -> float:
        """Requests/s with as many cores busy as the system keeps busy at its best."""
        (system,) = (each for each in self._systems if each.name == name)
        return most_per_s(costs, cores, system.num_engines)

    # At a rate --------------------------------------------------------------------------------

    async def _promises(self, best: Aggregated) -> Result:
        """Goodput at two rates, by tiers of what a request alone takes on vLLM."""
        plan, shape = self._plan, self._plan.middle
        alone = await self._one_by_one(best, shape)
        slos = {name: tier(name, alone["ttft_s"], alone["tpot_s"]) for name in TIERS}
        names = (PASS, ALL)
        rates = [SLO_LOAD * self._throughput(shape, name) for name in names]
        rows = []
        for rate_per_s, source in zip(rates, names, strict=True):
            seed = self._rng.random()
            compared: list[System] = [best, *(self._easerve[n] for n in (PASS, WHEN, ALL))]
            for system in compared:
                self._tick(f"{rate_per_s:.1f} requests/s, {system.name}")
                load = await self._at_rate(shape, rate_per_s, plan.slo_s, seed)
                row = (await system.run(load)).row(slos)
                rows.append(
                    {"system": system.name, "rate_per_s": rate_per_s, "rate_of": source, **row}
                )
        return {
            "shape": shape.name,
            "load": SLO_LOAD,
            "reference": alone,
            "slo": {name: {"ttft_s": s.ttft_s, "tpot_s": s.tpot_s} for name, s in slos.items()},
            "rows": rows,
        }

    async def _one_by_one(self, system: Aggregated, shape: Shape) -> Result:
        """One request at a time, each on the whole machine; medians, frozen for this run."""
        self._tick(f"one request at a time, {system.name}")
        shape = Shape(shape.num_images, max(2, shape.num_tokens))
        load = Load(await self._draw.pictures(shape, NUM_ALONE), concurrency=1)
        try:
            ttfts_s, tpots_s = reference.isolated((await system.alone(load)).records)
        except ValueError as error:
            raise EngineError(f"the reference cannot be measured: {error}") from None
        return {
            "system": system.name,
            "num_requests": NUM_ALONE,
            "ttft_s": median(ttfts_s),
            "tpot_s": median(tpots_s),
            "ttfts_s": ttfts_s,
            "tpots_s": tpots_s,
        }

    async def _timelines(self) -> list[Result]:
        """Encode beside prefill, of the shape with most pictures, on a device divided or not."""
        plan, found = self._plan, []
        shape = max(plan.shapes, key=lambda shape: (shape.num_images, -shape.num_tokens))
        everything = self._easerve[ALL]
        policy, seed = everything.policy, self._rng.random()
        rate_per_s = TIMELINE_LOAD * self._throughput(shape, ALL)
        for how in (policy.how, NO_RULE):
            self._tick(f"timeline, how: {how}")
            everything.policy = policy.model_copy(update={"how": how})
            load = await self._at_rate(shape, rate_per_s, plan.timeline_s, seed)
            seen = await timeline(everything, load)
            found.append({"how": how, "shape": shape.name, "rate_per_s": rate_per_s, **seen})
        everything.policy = policy
        return found

    async def _at_rate(self, shape: Shape, rate_per_s: float, seconds: float, seed: float) -> Load:
        num = max(2, round(rate_per_s * seconds))
        rng = random.Random(seed)  # noqa: S311
        times_s = Arrivals("poisson", rate_per_s).times(num, rng)
        return Load(await self._draw.pictures(shape, num), times_s=times_s)


def _in_turn(systems: Sequence[System], number: int) -> list[System]:
    """Another begins in each round, and every other round goes backwards."""
    at = number % len(systems)
    order = [*systems[at:], *systems[:at]]
    return order[::-1] if number % 2 else order
