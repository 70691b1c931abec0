"""``easerve bench encode``: batching rules side by side, on engines that run.

Parts, rules taking turns in each: ``stage``, the encode stage at saturation with all that follows a
stub; ``call``, one call of a full batch, made directly and by the stage; ``server``, the whole
server at saturation, explained by what the stage saves; ``low``, low load; ``rates``, offered load
against rule; ``windows``, a fixed waiting window against TTFT.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from easerve.cli.bench.load import Bench, LoadRun
from easerve.cli.bench.stage import EncodeStage
from easerve.config import Policy
from easerve.serve.admin import knobs_of
from easerve.serve.media import Picture, prepare
from easerve.workload import shapes
from easerve.workload.arrivals import Arrivals

NONE = "none"
PARTS = ("stage", "call", "server", "low", "rates", "windows")
FILL_S = 1.0  # a window that lets every batch of the part "call" fill
MAX_PIXELS = 1 << 24
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """``policy`` is the deployment's: the others are it with another rule.

    Sizes: ``num_pictures`` for the stage, ``num_requests`` for the server with ``concurrency``
    clients, ``duration_s`` for a run at some rate. ``num_rounds``: how often those take turns that
    are compared one to one.
    """

    policy: Policy
    parts: Sequence[str]
    rules: Sequence[str]
    rates_per_s: Sequence[float]
    windows_s: Sequence[float]
    low_rate_per_s: float
    window_rate_per_s: float
    duration_s: float
    num_pictures: int
    num_requests: int
    concurrency: int
    num_rounds: int
    seed: int

    def changed(self, **changes: Any) -> Policy:
        return self.policy.model_copy(update=changes)

    def pair(self) -> Iterator[tuple[str, Policy]]:
        """Those compared one to one: pass-through and ``rule``."""
        yield NONE, self.changed(when=NONE)
        yield self.rule, self.changed(when=self.rule)

    @property
    def rule(self) -> str:
        """The deployment's own rule, or the default one if that is pass-through."""
        return self.policy.when if self.policy.when != NONE else Policy().when

    @property
    def num_runs(self) -> int:
        """For a progress bar."""
        runs = {
            "stage": 2 * self.num_rounds,
            "call": 2 * self.num_rounds,
            "server": 2 * self.num_rounds + 1,
            "low": 2 * self.num_rounds,
            "rates": len(self.rules) * len(self.rates_per_s),
            "windows": len(self.windows_s),
        }
        return sum(runs[part] for part in self.parts)


class EncodeBench:
    """``tick`` is called with a text before each run."""

    def __init__(
        self, plan: Plan, stage: EncodeStage, bench: Bench, tick: Callable[[str], None]
    ) -> None:
        self._plan, self._stage, self._bench, self._tick = plan, stage, bench, tick
        self._rng = random.Random(plan.seed)  # noqa: S311 (pictures, not secrets)

    async def run(self) -> Result:
        """What was asked for, by part; and the ratios that follow from them."""
        parts = {
            "stage": self._saturated_stage,
            "call": self._one_call,
            "server": self._saturated_server,
            "low": self._low_load,
            "rates": self._rates,
            "windows": self._windows,
        }
        result = {part: await parts[part]() for part in PARTS if part in self._plan.parts}
        return result | ratios(result, self._plan.rule)

    def _pictures(self, num: int) -> list[Picture]:
        urls = (shapes.data_url(shapes.draw(self._rng).picture) for _ in range(num))
        return [prepare(url, MAX_PIXELS) for url in urls]

    async def _saturated_stage(self) -> Result:
        runs: dict[str, list[Result]] = {}
        for number in range(self._plan.num_rounds):
            for rule, policy in self._plan.pair():
                self._tick(f"encode stage alone, {rule}, {number + 1}")
                run = await self._stage.saturate(
                    knobs_of(policy), self._pictures(self._plan.num_pictures)
                )
                runs.setdefault(rule, []).append(
                    {
                        "items_per_s": run.items_per_s,
                        "cpu_s": run.cpu_s,
                        "batch_mean": run.encode.batch_mean,
                        "busy_share": run.encode.busy_share,
                    }
                )
        return {rule: medians(each) for rule, each in runs.items()}

    async def _one_call(self) -> Result:
        """By the stage: from the batch's start until all its embeddings are handed over."""
        size = min(self._plan.policy.max_batch_items, self._stage.most_items)
        alone = knobs_of(self._plan.changed(when="fixed", timeout_s=FILL_S, run_ahead=0))
        calls_s, batches_s = [], []
        for number in range(self._plan.num_rounds):
            self._tick(f"one call of {size}, directly, {number + 1}")
            calls_s.append(await self._stage.call(self._pictures(size)))
            self._tick(f"one call of {size}, by the stage, {number + 1}")
            run = await self._stage.saturate(alone, self._pictures(size))
            batches_s += run.encode.calls_s
        return {
            "num_items": size,
            "direct_s": median(calls_s),
            "stage_s": median(batches_s),
            "ratio": median(batches_s) / median(calls_s),
        }

    async def _saturated_server(self) -> Result:
        plan, runs = self._plan, dict[str, list[Result]]()
        self._tick("whole server, warm-up")
        await self._bench.run(plan.policy, self._bench.requests(plan.concurrency), concurrency=8)
        for number in range(plan.num_rounds):
            for rule, policy in plan.pair():
                self._tick(f"whole server, {plan.concurrency} clients, {rule}, {number + 1}")
                requests = self._bench.requests(plan.num_requests)
                run = await self._bench.run(policy, requests, concurrency=plan.concurrency)
                runs.setdefault(rule, []).append(run.row())
        return {rule: medians(each) for rule, each in runs.items()}

    async def _low_load(self) -> Result:
        """Both get the same gaps, round for round."""
        plan, runs = self._plan, dict[str, list[LoadRun]]()
        for number in range(plan.num_rounds):
            seed = self._rng.random()
            for rule, policy in plan.pair():
                self._tick(f"low load, {plan.low_rate_per_s:g}/s, {rule}, {number + 1}")
                run = await self._at_rate(policy, plan.low_rate_per_s, seed)
                runs.setdefault(rule, []).append(run)
        return {rule: medians([run.row() for run in each]) for rule, each in runs.items()}

    async def _rates(self) -> Result:
        rows: Result = {rule: {} for rule in self._plan.rules}
        for rate_per_s in self._plan.rates_per_s:
            seed = self._rng.random()
            for rule in self._rng.sample(self._plan.rules, len(self._plan.rules)):
                self._tick(f"{rate_per_s:g}/s, {rule}")
                run = await self._at_rate(self._plan.changed(when=rule), rate_per_s, seed)
                rows[rule][f"{rate_per_s:g}"] = run.row()
        return rows

    async def _windows(self) -> Result:
        rows, seed = {}, self._rng.random()
        for window_s in self._plan.windows_s:
            self._tick(f"a window of {1e3 * window_s:g} ms")
            policy = self._plan.changed(when="fixed", timeout_s=window_s)
            run = await self._at_rate(policy, self._plan.window_rate_per_s, seed)
            rows[f"{window_s:g}"] = run.row()
        return rows

    async def _at_rate(self, policy: Policy, rate_per_s: float, seed: float) -> LoadRun:
        num = max(2, round(rate_per_s * self._plan.duration_s))
        rng = random.Random(seed)  # noqa: S311
        times_s = Arrivals("poisson", rate_per_s).times(num, rng)
        return await self._bench.run(policy, self._bench.requests(num), times_s)


def medians(rows: Sequence[Result]) -> Result:
    """Of each value over several rows of one form; None where one is None."""
    merged: Result = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(value, dict):
            merged[name] = medians(values)
        else:
            merged[name] = None if None in values else median(values)
    return merged


def ratios(result: Result, rule: str) -> Result:
    """The figures of merit, as far as their parts were run; ``rule`` over pass-through.

    ``server_ratio_expected`` explains the server's ratio by what was measured of the stage alone:
    at saturation the cores are the bottleneck, and batching saves a request that much of them.
    """
    found: Result = {}
    if "stage" in result:
        stage = result["stage"]
        found["encode_stage_ratio"] = stage[rule]["items_per_s"] / stage[NONE]["items_per_s"]
    if "call" in result:
        found["one_call_ratio"] = result["call"]["ratio"]
    if "server" in result:
        server = result["server"]
        found["server_ratio"] = server[rule]["throughput_per_s"] / server[NONE]["throughput_per_s"]
        if "stage" in result:
            saved_s = stage[NONE]["cpu_s"] - stage[rule]["cpu_s"]
            before_s = server[NONE]["cpu_s"]
            found["server_ratio_expected"] = before_s / (before_s - saved_s)
    if "low" in result:
        low = result["low"]
        found["low_load_ttft_ratio"] = low[rule]["ttft_s"]["mean"] / low[NONE]["ttft_s"]["mean"]
    if "rates" in result:
        last = {rule: list(rows.values())[-1] for rule, rows in result["rates"].items()}
        found["systems"] = {
            rule: last[rule] | {"by_rate": rows} for rule, rows in result["rates"].items()
        }
    return found
