"""The rules that divide a device, side by side on real engines: an encoder and its local prefill.

Batches arrive by one trace, whatever the rule, and go to the encoder one after the other; prefill
has texts without end. The rules take turns, so that what else the machine does meets all of them.
"""

import asyncio
import dataclasses
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from easerve.bench.report import Section
from easerve.cli import gpu_shown
from easerve.cli.bench import partition_cell
from easerve.cli.profile_engines import EnginesBench, division_of
from easerve.engines.partition.contention import row_of
from easerve.policy.knobs import Knobs
from easerve.policy.partition import SHARED, Devices, Partition

PARTS = ("cell", "engines")
ALONE = "alone"
BATCHES = (1, 2, 4)
SIZE = (60, 60)
NUM_ALONE = 7
STEP = "vLLM's"
COUNTS = ("late", "forwards", "paused_s", "encode_switches", "prefill_switches", "prefill_switch_s")


@dataclass(frozen=True, slots=True)
class Plan:
    """``load``: share of the time that the encoder would work if it had the device to itself."""

    rules: Sequence[str]
    knobs: Knobs
    devices: Devices
    duration_s: float
    rounds: int
    load: float
    seed: int

    @property
    def num_runs(self) -> int:
        return (len(self.rules) + 1) * self.rounds


def sections(result: dict[str, Any]) -> list[Section]:
    found = []
    if "cell" in result:
        found.append(partition_cell.section(result))
    if "engines" in result:
        driven, switch_us = result["driven"], result["switch_us"]
        source = f"real engines, {driven['total']} units, divided by {driven['driver']}"
        shown = gpu_shown.contention(
            {
                "source": source,
                "contention": result["engines"],
                "target_s": result["target_s"],
                "work": "tokens",
            }
        )
        cost = "none" if switch_us is None else f"{switch_us:.0f} us each"
        text = f"{shown.text}\n\nSwitches of prefill's part: {cost}."
        found.append(Section(shown.title, text, shown.parts))
    return found


@dataclass(slots=True)
class Seen:
    """Of one rule, over all rounds. ``latency_s``: of each batch, from arrival to answer."""

    batches: list[int] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0.0))


async def compare(bench: EnginesBench, plan: Plan, tick: Callable[[str], None]) -> dict[str, Any]:
    """``engines``: a row for each rule, as contention.Row; ``switch_us``: of prefill's cores."""
    alone_s = {batch: await _alone_s(bench, batch) for batch in BATCHES}
    rules = [ALONE, *plan.rules]
    seen = {rule: Seen() for rule in rules}
    for number in range(plan.rounds):
        for rule in rules[number % len(rules) :] + rules[: number % len(rules)]:
            tick(rule)
            trace = _trace(plan, alone_s, number) if rule != ALONE else []
            await _run(bench, plan, rule, trace, seen[rule])
    await bench.encoder.divide(SHARED)
    alone_per_s = seen[ALONE].prefill_tokens / seen[ALONE].prefill_s
    rows = []
    for rule, each in seen.items():
        row = row_of(
            rule,
            STEP,
            each.batches,
            each.latency_s,
            each.forward_s,
            alone_s,
            plan.knobs.encode_target_s,
            each.counts["late"] / each.counts["forwards"] if each.counts["forwards"] else None,
            each.prefill_tokens / each.prefill_s,
        )
        rows.append(dataclasses.replace(row, prefill_share=row.prefill_per_s / alone_per_s))
    num = sum(each.counts["prefill_switches"] for each in seen.values())
    switch_s = sum(each.counts["prefill_switch_s"] for each in seen.values())
    return {
        "engines": [dataclasses.asdict(row) for row in rows],
        "switch_us": 1e6 * switch_s / num if num else None,
        "target_s": plan.knobs.encode_target_s,
        "driven": dataclasses.asdict(bench.driven),
        "counts": {rule: each.counts for rule, each in seen.items()},
    }


async def _alone_s(bench: EnginesBench, batch: int) -> float:
    samples = [(await bench.encode(bench.total, batch)).wall_s for _ in range(NUM_ALONE)]
    return median(samples[2:])


def _trace(plan: Plan, alone_s: Mapping[int, float], number: int) -> list[tuple[float, int]]:
    """When a batch arrives, and of how many items."""
    rng = random.Random(f"{plan.seed} {number}")  # noqa: S311 (a trace, not a secret)
    mean_s = sum(alone_s.values()) / len(alone_s)
    trace, at_s = [], rng.expovariate(plan.load / mean_s)
    while at_s < plan.duration_s:
        trace.append((at_s, rng.choice(BATCHES)))
        at_s += rng.expovariate(plan.load / mean_s)
    return trace


async def _run(
    bench: EnginesBench, plan: Plan, rule: str, trace: Sequence[tuple[float, int]], seen: Seen
) -> None:
    knobs = plan.knobs if rule == ALONE else dataclasses.replace(plan.knobs, how=rule)
    partition = Partition(knobs, plan.devices)
    await bench.encoder.divide(partition.standing if rule != ALONE else SHARED)
    before = (await division_of(bench.encoder)).counts
    begin = time.perf_counter()
    async with bench.prefilling() as tokens:
        await _encode(bench, partition, trace, begin, seen)
        await asyncio.sleep(max(0.0, begin + plan.duration_s - time.perf_counter()))
        seen.prefill_s += time.perf_counter() - begin
        seen.prefill_tokens += tokens()
    after = (await division_of(bench.encoder)).counts
    for name in COUNTS:
        seen.counts[name] += after[name] - before[name]


async def _encode(
    bench: EnginesBench,
    partition: Partition,
    trace: Sequence[tuple[float, int]],
    begin: float,
    seen: Seen,
) -> None:
    """First come, first served; what waits counts for the demand of the next."""
    waiting = deque(trace)
    while waiting:
        at_s, batch = waiting.popleft()
        await asyncio.sleep(max(0.0, begin + at_s - time.perf_counter()))
        now_s = time.perf_counter() - begin
        items = batch + sum(more for later_s, more in waiting if later_s <= now_s)
        await bench.call(partition.demand(items * bench.item_tokens), batch)
        seen.latency_s.append(time.perf_counter() - begin - at_s)
        seen.forward_s.append((await division_of(bench.encoder)).counts["encode_s"])
        seen.batches.append(batch)
