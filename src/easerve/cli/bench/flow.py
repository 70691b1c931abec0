"""``easerve bench flow``: what a fast Encode does to decode, and what credits do about it.

The same burst of requests for three systems: pass-through, batches of eight without credits, and
with them under a TPOT promise. Once on engines that run, once on modelled ones in virtual time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from easerve.cli.bench.encode import Result, medians
from easerve.cli.bench.load import Bench
from easerve.config import Policy
from easerve.costs.linear import LinearCosts
from easerve.goodput import summarise
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.serve.admin import knobs_of
from easerve.sim import plain
from easerve.types import NS_PER_S, WorkerId
from easerve.workload.arrivals import Arrivals

BATCH_ITEMS = 8
ITEM_TOKENS = 25
BURST = 4.0  # times what the modelled encoder can take item by item
ALONE = "one request at a time"
NO_REFUSALS_S = 1e6
# An encoder that, item by item, is just what decode can take; not a measurement of anything.
COSTS = LinearCosts(
    encode_base_s=0.055,
    encode_token_s=0.005 / 25,
    prefill_base_s=0.01,
    prefill_token_s=1e-4,
    decode_token_s=0.01,
    decode_crowding=0.1,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """``promise``: of TPOT, as a multiple of what one request alone has."""

    policy: Policy
    num_requests: int
    rate_per_s: float
    num_tokens: int
    promise: float
    num_rounds: int
    seed: int

    @property
    def num_runs(self) -> int:
        """For a progress bar."""
        return 1 + 3 * self.num_rounds

    def systems(self, tpot_slo_s: float) -> Iterator[tuple[str, Policy]]:
        fixed = {"when": "fixed", "max_batch_items": BATCH_ITEMS, "max_queue_s": NO_REFUSALS_S}
        free = {"flow": False, "max_queue_s": NO_REFUSALS_S}
        yield "pass-through", self._changed(when="none", **free)
        yield "batches of 8, no credits", self._changed(**fixed | free)
        yield "batches of 8, credits", self._changed(**fixed, flow=True, tpot_slo_s=tpot_slo_s)

    def _changed(self, **changes: Any) -> Policy:
        return self.policy.model_copy(update=changes)


async def on_engines(plan: Plan, bench: Bench, tick: Callable[[str], None]) -> Result:
    """Medians of the rounds; the systems take turns."""
    tick("one request at a time")
    alone = await bench.run(plan.policy, bench.requests(16), concurrency=1)
    tpot_s = alone.summary.tpot_s.p50
    assert tpot_s is not None, "every answer has several tokens"
    rows: dict[str, list[Result]] = {ALONE: [alone.row()]}
    for number in range(plan.num_rounds):
        times_s = _times_s(plan, number)
        for name, policy in plan.systems(plan.promise * tpot_s):
            tick(f"{name}, {number + 1}")
            run = await bench.run(policy, bench.requests(plan.num_requests), times_s)
            rows.setdefault(name, []).append(run.row())
    return {
        "tpot_alone_s": tpot_s,
        "tpot_promise_s": plan.promise * tpot_s,
        "systems": {name: medians(each) for name, each in rows.items()},
    }


def modelled(plan: Plan) -> Result:
    """The same in virtual time: the server's own core over engines with ``COSTS``."""
    tpot_s, rows = COSTS.step_s(1), {}
    rng = random.Random(plan.seed)  # noqa: S311
    burst_s = Arrivals("poisson", BURST / COSTS.encode_s(1, ITEM_TOKENS)).times(
        plan.num_requests, rng
    )
    systems = [(ALONE, plan.policy, [0.0])]
    systems += [(*each, burst_s) for each in plan.systems(plan.promise * tpot_s)]
    for name, policy, times_s in systems:
        core = Core(
            knobs_of(policy),
            Admission(plan.num_requests, 1 << 60),
            COSTS,
            Limits(request_timeout_ns=10**6 * NS_PER_S),
        )
        requests = [plain.request(at_s, [ITEM_TOKENS], 35, plan.num_tokens) for at_s in times_s]
        run = plain.simulate(core, COSTS, ["e0", "p0", "d0"], requests)
        summary = summarise(run.records, run.end_s, {}).as_dict()
        rows[name] = {
            "ttft_s": summary["ttft_s"],
            "tpot_s": summary["tpot_s"],
            "throughput_per_s": summary["throughput_per_s"],
            "batch_mean": run.mean_batch,
            "busy_share": run.busy_s[WorkerId("e0")] / run.end_s,
            "not_completed": summary["num_requests"] - summary["completed"],
        }
    return {"tpot_alone_s": tpot_s, "tpot_promise_s": plan.promise * tpot_s, "systems": rows}


def _times_s(plan: Plan, number: int) -> Sequence[float]:
    rng = random.Random(plan.seed + number)  # noqa: S311
    return Arrivals("poisson", plan.rate_per_s).times(plan.num_requests, rng)
