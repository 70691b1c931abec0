"""docs/search-suite.json: what allocations are worth, by simulating all of them.

Run as ``nice python -m scripts.search_suite``; ten minutes of one core. What is written stays, so
that it goes on where it was stopped. A test holds the pruning of ``easerve search`` against it.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from easerve.search.simulated import SimulatedObjective, ladder
from easerve.search.space import SHARE, Allocation, Knob, Space
from easerve.sim import scenario as scenarios

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "search-suite.json"
MODELS = ("llava-34b", "qwen2.5-vl-32b", "ultravox-27b")
TIER, NUM_REQUESTS, SEED, MAX_ITEMS = "S3", 300, 1, 8
RATES_PER_S = ladder(0.5, 40.0)
BATCH = "policy.max_batch_items"


@dataclass(frozen=True, slots=True)
class Engines:
    """Of an allocation: encoders, prefill and decode engines, and how many devices each has.

    ``local``: devices of a prefill engine beside encoders; None: there is none.
    """

    encoders: int
    prefill: tuple[int, int]
    decode: tuple[int, int]
    local: int | None

    @property
    def allocation(self) -> Allocation:
        changes: dict[str, Any] = {"encode.replicas": self.encoders}
        for stage, (count, tp) in (("prefill", self.prefill), ("decode", self.decode)):
            changes |= {f"{stage}.replicas": count, f"{stage}.tensor_parallel_size": tp}
        offload = None if self.local is None else _offload(self.local)
        name = f"e{self.encoders}-p{_name(*self.prefill)}-d{_name(*self.decode)}"
        return Allocation(name, changes, offload)


def _offload(tp: int) -> dict[str, Any]:
    """Devices are divided under engines of one alone."""
    local = {"tensor_parallel_size": tp}
    return {"local_prefill": local, "partition": {} if tp == 1 else None}


def _name(count: int, tp: int) -> str:
    return f"{tp}x{count}" if count > 1 else str(tp)


IN_TWOS = (
    Engines(2, (1, 2), (2, 2), 2),
    Engines(2, (1, 2), (1, 4), 2),
    Engines(2, (1, 4), (1, 2), 2),
    Engines(2, (2, 2), (1, 2), 2),
    Engines(4, (1, 2), (1, 2), 2),
)
"""All that fit on eight cards of 48 GB."""
SINGLE = (
    Engines(1, (4, 1), (3, 1), 1),
    Engines(1, (5, 1), (2, 1), 1),
    Engines(2, (4, 1), (2, 1), 1),
    Engines(2, (3, 1), (3, 1), 1),
    Engines(2, (2, 1), (2, 2), 1),
    Engines(2, (4, 1), (1, 2), 1),
    Engines(2, (1, 2), (4, 1), 1),
    Engines(2, (2, 2), (2, 1), 1),
    Engines(3, (3, 1), (2, 1), 1),
    Engines(4, (2, 1), (2, 1), 1),
    Engines(4, (1, 2), (2, 1), 1),
)
"""Some of those that cards of 80 GB allow besides."""
SUITE = {
    "rtx6000ada": (IN_TWOS, (0.3, 0.45, 0.55, 0.7, 0.85, 1.0)),
    "a100": ((*(replace(each, local=1) for each in IN_TWOS), *SINGLE), (0.3, 0.55, 0.7, 1.0)),
}
"""Allocations and remote shares, by the machine in a scenario's name."""


def main() -> None:
    found = json.loads(PATH.read_text()) if PATH.exists() else {}
    for machine, (engines, shares) in SUITE.items():
        for model in MODELS:
            of_scenario = found.setdefault(f"{model}-{machine}", {})
            for each in engines:
                allocation = each.allocation
                if allocation.name not in of_scenario:
                    of_scenario[allocation.name] = _entry(
                        ROOT / "scenarios" / f"{model}-{machine}.yaml", allocation, shares
                    )
                    PATH.write_text(json.dumps(found, indent=1) + "\n")
                    print(f"{model}-{machine} {allocation.name}", file=sys.stderr, flush=True)


def _entry(path: Path, allocation: Allocation, shares: tuple[float, ...]) -> dict[str, Any]:
    """``goodput_per_s``: by remote share."""
    space = Space([allocation], [Knob(SHARE, shares), Knob(BATCH, (MAX_ITEMS,))])
    content = scenarios.laid(scenarios.read_content(path), {"workload.num_requests": NUM_REQUESTS})
    slo = scenarios.build(content, str(path)).slo.slos()[TIER]
    objective = SimulatedObjective(content, space, slo, RATES_PER_S, (SEED,))
    scores = {each[SHARE]: objective.score(each, SEED) for each in space}
    goodputs = {str(share): round(score.goodput_per_s, 4) for share, score in scores.items()}
    return asdict(allocation) | {"goodput_per_s": goodputs}


if __name__ == "__main__":
    main()
