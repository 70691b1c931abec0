"""docs/batching-tables.md: the batching rules in virtual time, and how far they are from optimal.

Run as ``python -m scripts.batching_tables > docs/batching-tables.md``; some minutes.
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean, median

from rich.console import Console
from rich.progress import Progress

from easerve.config import Policy
from easerve.costs.linear import LinearCosts
from easerve.goodput import spread
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.serve.admin import knobs_of
from easerve.sim import plain
from easerve.sim.oracle import best_mean_ttft_s
from easerve.sim.run import Run
from easerve.types import NS_PER_S, WorkerId
from easerve.workload.arrivals import Arrivals

ITEM_TOKENS = 100
NUM_REQUESTS, SEED = 4000, 1
WARM_UP = 0.1  # of the requests, left out
NUM_TINY, TINY_REQUESTS = 300, 8
RULES: dict[str, dict[str, object]] = {
    "none": {"when": "none"},
    "greedy": {"when": "greedy"},
    "fixed 50 ms": {"when": "fixed", "timeout_s": 0.05},
    "fixed 200 ms": {"when": "fixed", "timeout_s": 0.2},
    "fill": {"when": "fill"},
    "gap": {"when": "gap"},
    "**slack**": {"when": "slack"},
}


@dataclass(frozen=True, slots=True)
class Regime:
    """One encoder, ``base_s + b item_s`` for a call of ``b`` of at most ``max_items`` items."""

    name: str
    base_s: float
    item_s: float
    max_items: int
    prefill_s: float
    num_prefills: int
    rates_per_s: tuple[float, ...]

    @property
    def costs(self) -> LinearCosts:
        return LinearCosts(self.base_s, self.item_s / ITEM_TOKENS, self.prefill_s, 0.0, 0.0)

    @property
    def workers(self) -> list[str]:
        return ["e0", *(f"p{number}" for number in range(self.num_prefills)), "d0"]

    def limits(self) -> str:
        """Requests per second that each can take."""
        one, full = self.base_s + self.item_s, self.base_s + self.max_items * self.item_s
        return (
            f"one by one {1 / one:.2f}, batched {self.max_items / full:.2f}, "
            f"prefill {self.num_prefills / self.prefill_s:.2f} requests/s"
        )


REGIMES = (
    Regime("Overhead-dominated encoder", 0.30, 0.03, 8, 0.45, 2, (1, 2, 3, 4)),
    Regime("Encoder near the roofline", 0.06, 0.022, 8, 0.45, 2, (1, 2, 4)),
    Regime("Audio: tiny encoder", 0.06, 0.01, 16, 0.18, 2, (2, 5, 10)),
)


def simulate(regime: Regime, rule: dict[str, object], times_s: list[float]) -> Run:
    """No credits, no running ahead: the rule alone."""
    policy = Policy(max_batch_items=regime.max_items, flow=False, run_ahead=0)
    knobs = replace(knobs_of(policy.model_copy(update=rule)), max_queue_s=1e9)
    limits = Limits(request_timeout_ns=10**6 * NS_PER_S)
    core = Core(knobs, Admission(1 << 60, 1 << 60), regime.costs, limits)
    requests = [plain.request(at_s, [ITEM_TOKENS], 0, 1) for at_s in times_s]
    return plain.simulate(core, regime.costs, regime.workers, requests)


def times(rate_per_s: float, cv: float, num: int, seed: int) -> list[float]:
    return Arrivals("gamma", rate_per_s, cv).times(num, random.Random(seed))  # noqa: S311


def cell(regime: Regime, rule: str, rate_per_s: float, cv: float) -> str:
    one_by_one = 1 / (regime.base_s + regime.item_s)
    if rule == "none" and rate_per_s >= one_by_one:
        return f"unstable ({one_by_one:.2f} at most)"
    run = simulate(regime, RULES[rule], times(rate_per_s, cv, NUM_REQUESTS, SEED))
    kept = run.records[int(WARM_UP * len(run.records)) :]
    ttft = spread([record.ttft_s for record in kept if record.ttft_s is not None])
    busy = run.busy_s[WorkerId("e0")] / run.end_s
    return f"{ttft.mean:.2f} / {ttft.p99:.2f} · {run.mean_batch:.1f} · {busy:.2f}"


def table(regime: Regime, tick: Progress) -> Iterator[str]:
    task = tick.add_task(regime.name, total=2 * len(regime.rates_per_s) * len(RULES))
    yield f"### {regime.name}\n"
    yield (
        f"a = {regime.base_s:g} s, c = {regime.item_s:g} s, batches of at most "
        f"{regime.max_items}; {regime.num_prefills} prefill engines of {regime.prefill_s:g} s. "
        f"Limits: {regime.limits()}.\n"
    )
    yield f"| rate, CV | {' | '.join(RULES)} |"
    yield "|---" * (len(RULES) + 1) + "|"
    for cv in (1.0, 2.0):
        for rate_per_s in regime.rates_per_s:
            cells = []
            for rule in RULES:
                cells.append(cell(regime, rule, rate_per_s, cv))
                tick.advance(task)
            yield f"| {rate_per_s:g}, {cv:g} | {' | '.join(cells)} |"
    yield ""


def over_optimum(regime: Regime, rule: str, rate_per_s: float, cv: float) -> list[float]:
    """Mean TTFT over the clairvoyant optimum, for each of many tiny cases."""
    found = []
    for seed in range(NUM_TINY):
        times_s = times(rate_per_s, cv, TINY_REQUESTS, seed)
        run = simulate(regime, RULES[rule], times_s)
        mean_s = fmean(record.ttft_s for record in run.records if record.ttft_s is not None)
        best_s = best_mean_ttft_s(
            times_s,
            regime.base_s,
            regime.item_s,
            regime.max_items,
            regime.prefill_s,
            regime.num_prefills,
        )
        found.append(mean_s / best_s)
    return found


def optimum(regime: Regime, tick: Progress) -> Iterator[str]:
    rules = [rule for rule in RULES if rule != "none"]
    task = tick.add_task("optimum", total=4 * len(rules))
    yield f"| rate, CV | {' | '.join(rules)} |"
    yield "|---" * (len(rules) + 1) + "|"
    for rate_per_s, cv in ((1, 1.0), (2, 1.0), (4, 1.0), (4, 2.0)):
        cells = []
        for rule in rules:
            found = over_optimum(regime, rule, rate_per_s, cv)
            cells.append(f"{fmean(found):.3f} ({median(found):.3f}, {max(found):.2f})")
            tick.advance(task)
        yield f"| {rate_per_s:g}, {cv:g} | {' | '.join(cells)} |"


INTRODUCTION = f"""# The batching rules in virtual time

Simulated: the server's own core over modelled engines, {NUM_REQUESTS} requests with one picture,
seed {SEED}; CV is that of the gaps between arrivals. Credits and running ahead are off, so that the
rule alone counts. Cells: TTFT mean / P99 in s · pictures a call · busy share of the encoder. Made
by `make docs-batching`; on real engines: `easerve bench encode`. [What the rules are](batching.md).
"""
OPTIMUM = f"""
## How far from optimal

Simulated: {NUM_TINY} tiny cases of {TINY_REQUESTS} requests (first regime), each against the least
mean TTFT that any way of cutting its arrivals into calls has, found by trying all, the future
known. Cells: mean TTFT over the optimum, mean (median, worst). A short case is no steady state: it
shows the price of deciding without knowing the future.
"""


def main() -> None:
    """The page on stdout, progress on stderr."""
    with Progress(console=Console(stderr=True)) as tick:
        print(INTRODUCTION)
        for regime in REGIMES:
            print("\n".join(table(regime, tick)))
        print(OPTIMUM)
        print("\n".join(optimum(REGIMES[0], tick)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
