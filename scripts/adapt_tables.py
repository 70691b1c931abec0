"""docs/adapt-tables.md: what ``policy.adapt`` is worth under a load that drifts, in virtual time.

Run as ``python -m scripts.adapt_tables > docs/adapt-tables.md``; some minutes.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress

from easerve import goodput
from easerve.goodput import Summary
from easerve.sim import scenario
from easerve.sim.simulate import simulate

SCENARIO = Path(__file__).parents[1] / "scenarios/drift.yaml"
SEEDS = (11, 12, 13)  # not those that constants were chosen with: 1 to 6
TIER = "S3"
ENGINES, POLICY = "systems.easerve", "systems.easerve.policy"
ADAPT, TRIM = {f"{POLICY}.adapt": True}, {f"{POLICY}.share_trim": True}
REMOTE_ONLY = {
    f"{ENGINES}.local_prefill": None,
    f"{ENGINES}.partition": None,
    f"{ENGINES}.prefill.replicas": 2,
    f"{ENGINES}.decode.replicas": 1,
    f"{POLICY}.remote_share": 1,
    f"{POLICY}.prefill_ahead_s": 3,
}
Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """``knob`` at each of ``values`` for the whole run, and from each of ``initial`` on with what
    adapts it.
    """

    title: str
    text: str
    changes: Changes
    knob: str
    values: Sequence[float]
    initial: Sequence[float]
    trims: bool = False

    def rows(self) -> Iterator[tuple[str, Changes]]:
        """Of the table, by name."""
        for value in self.values:
            yield f"{value}, fixed", {f"{POLICY}.{self.knob}": value}
        for value in self.initial:
            if self.trims:
                yield f"{value}, share_trim", {f"{POLICY}.{self.knob}": value, **TRIM}
            yield f"{value}, **adapt**", {f"{POLICY}.{self.knob}": value, **ADAPT}


CASES = (
    Case(
        "The share is set wrong, or right",
        "One local and one remote prefill engine, alike but for the encoders beside the local one.",
        {},
        "remote_share",
        (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7),
        (0.3, 0.5, 0.7),
        trims=True,
    ),
    Case(
        "A remote engine is gone from 300 s to 800 s",
        "Two remote prefill engines and a local one: the share that fits is 0.67, 0.5, and 0.67.",
        {
            f"{ENGINES}.prefill.replicas": 2,
            f"{ENGINES}.decode.replicas": 1,
            "failures": [{"worker": "p1", "at_s": 300, "back_s": 800}],
        },
        "remote_share",
        (0.5, 0.55, 0.6, 0.67),
        (0.67,),
        trims=True,
    ),
    Case(
        "Encoder calls are expensive: items of a batch",
        "One encoder that takes 0.6 s for a call besides its items, two remote prefill engines.",
        {**REMOTE_ONLY, f"{ENGINES}.encode": {"replicas": 1, "dispatch_s": 0.6}},
        "max_batch_items",
        (1, 2, 4, 8),
        (1, 8),
    ),
    Case(
        "Encoder calls are expensive: a window that is too long",
        "The same with 0.3 s for a call; rule `fixed`.",
        {
            **REMOTE_ONLY,
            f"{ENGINES}.encode": {"replicas": 1, "dispatch_s": 0.3},
            f"{POLICY}.when": "fixed",
        },
        "timeout_s",
        (0.05, 0.25, 1.0),
        (1.0,),
    ),
    Case(
        "Saturated: nothing to be won",
        "As the first, with 0.6 s for an encoder call: all engines together are hardly enough.",
        {f"{ENGINES}.encode.dispatch_s": 0.6},
        "remote_share",
        (0.45, 0.5, 0.55),
        (0.5,),
        trims=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Of one run."""

    summary: Summary
    num_changes: int

    @property
    def goodput_per_s(self) -> float:
        return self.summary.goodput_per_s[TIER] or 0.0


def run(changes: Changes, seed: int) -> Result:
    content = scenario.laid(scenario.read_content(SCENARIO), changes)
    drifting = scenario.build(content, str(SCENARIO)).at(seed=seed)
    found = simulate(drifting, "easerve")
    summary = goodput.summarise(found.records, found.end_s, drifting.slo.slos())
    return Result(summary, len(found.retuned))


def table(case: Case, tick: Progress) -> Iterator[str]:
    rows = list(case.rows())
    task = tick.add_task(case.title, total=len(rows) * len(SEEDS))
    results: dict[str, list[Result]] = {}
    for name, changes in rows:
        results[name] = []
        for seed in SEEDS:
            results[name].append(run({**case.changes, **changes}, seed))
            tick.advance(task)
    fixed = [name for name in results if name.endswith("fixed")]
    best = max(fixed, key=lambda name: fmean(each.goodput_per_s for each in results[name]))
    yield f"## {case.title}\n"
    yield f"{case.text} In hindsight the best fixed value is {best.partition(',')[0]}.\n"
    yield (
        f"| `{case.knob}` | goodput {TIER}, requests/s | against the best fixed (worst, best seed) "
        "| attainment | TTFT mean / P99, s | changes by adapt |"
    )
    yield "|---" * 6 + "|"
    for name, found in results.items():
        yield row(name, found, results[best])
    if case is not CASES[-1]:
        yield ""


def row(name: str, found: Sequence[Result], best: Sequence[Result]) -> str:
    """Means over the seeds; differences are of the same load."""
    pairs = zip(found, best, strict=True)
    differences = [each.goodput_per_s - other.goodput_per_s for each, other in pairs]
    attainment = fmean(each.summary.attainment[TIER] or 0.0 for each in found)
    mean_s = fmean(each.summary.ttft_s.mean or 0.0 for each in found)
    p99_s = fmean(each.summary.ttft_s.p99 or 0.0 for each in found)
    cells = (
        name,
        f"{fmean(each.goodput_per_s for each in found):.3f}",
        f"{fmean(differences):+.3f} ({min(differences):+.3f}, {max(differences):+.3f})",
        f"{attainment:.3f}",
        f"{mean_s:.2f} / {p99_s:.1f}",
        f"{fmean(each.num_changes for each in found):.1f}",
    )
    return f"| {' | '.join(cells)} |"


INTRODUCTION = f"""# What adapt is worth

Simulated: the server's own core over modelled engines, `scenarios/drift.yaml` (20 minutes of
virtual time, five phases of rate, size of pictures and share of texts), {len(SEEDS)} seeds; a seed
is the same load in every row. Means over the seeds. Made by `python -m scripts.adapt_tables`.
[What adapt does](adapt.md).
"""


def main() -> None:
    """The page on stdout, progress on stderr."""
    with Progress(console=Console(stderr=True)) as tick:
        print(INTRODUCTION)
        for case in CASES:
            print("\n".join(table(case, tick)), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
