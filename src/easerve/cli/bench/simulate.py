"""``easerve bench simulate``: what a simulated second costs."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from easerve.bench.report import Section, Table
from easerve.cli.bench.command import progress, show
from easerve.cli.simulate import OURS, once
from easerve.cli.simulate_shown import Result
from easerve.config import ConfigError
from easerve.sim import scenario as scenarios
from easerve.sim.scenario import Scenario

NUM_GPUS, TIMES_REAL_TIME = 8, 1000
"""The target for our system under a scenario's own load, on 8 GPUs."""
MANY_REQUESTS, MANY_S = 10_000, 10.0
"""The target for a long run."""
DEFAULT_SCENARIO = Path("scenarios/llava-34b-rtx6000ada.yaml")


def run(path: Path | None, num_requests: int, rounds: int, as_json: bool) -> int:
    """The exit code. Every system of the scenario under its own load, and its default system with
    ``num_requests``; medians of ``rounds``. Raises ConfigError.
    """
    if path is None and not DEFAULT_SCENARIO.exists():
        raise ConfigError(
            f"there is no {DEFAULT_SCENARIO} here: scenarios come with the repository, name a file"
        )
    path = path or DEFAULT_SCENARIO
    scenario = scenarios.read(path)
    many = scenarios.read(path, over=[f"workload.num_requests={num_requests}"])
    runs = [(scenario, system) for system in scenario.configs] + [(many, scenario.system)]
    rows = []
    with progress(Console(stderr=True), rounds * len(runs)) as tick:
        for load, system in runs:
            rows.append(_row(system, _rounds(load, system, rounds, tick)))
    targets = _targets(rows[:-1], rows[-1], scenario)
    if as_json:
        names = [row["system"] for row in rows[:-1]]
        systems = dict(zip(names, rows, strict=False))
        print(json.dumps({"systems": systems, "many": rows[-1], "targets": targets}))
        return 0
    columns = ("system", "requests", "simulated, s", "computed in, s", "times real time")
    cells = [
        (
            row["system"],
            row["num_requests"],
            row["simulated_s"],
            row["wall_s"],
            row["times_real_time"],
        )
        for row in rows
    ]
    title = f"{scenario.title}: median of {rounds}"
    text = "Reading the scenario and importing Python modules is not in it."
    goals = [(each["target"], each["measured"], _word(each["met"])) for each in targets]
    tables = [
        Table(title, columns, cells),
        Table("Targets", ("target", "in this run", "met"), goals),
    ]
    show([Section("Simulator", text, tables)], Console())
    return 0


def _targets(
    rows: Sequence[dict[str, Any]], many: dict[str, Any], scenario: Scenario
) -> list[dict[str, Any]]:
    """``met`` None: this run does not tell, as it is of something else."""
    ours = next((row for row in rows if row["system"] == OURS), None)
    speed = None if ours is None else ours["times_real_time"]
    fast = None if speed is None or scenario.num_gpus < NUM_GPUS else speed >= TIMES_REAL_TIME
    soon = many["wall_s"] < MANY_S
    return [
        {
            "target": f"{OURS} on {NUM_GPUS} GPUs: at least {TIMES_REAL_TIME:,} times real time",
            "measured": speed,
            "met": fast,
        },
        {
            "target": f"{MANY_REQUESTS:,} requests: computed in less than {MANY_S:g} s",
            "measured": many["wall_s"],
            "met": soon if many["num_requests"] >= MANY_REQUESTS else None,
        },
    ]


def _word(met: bool | None) -> str:
    return "–" if met is None else "yes" if met else "no"


def _rounds(scenario: Scenario, system: str, rounds: int, tick: Any) -> list[Result]:
    results = []
    for _ in range(rounds):
        tick(f"{system}, {scenario.workload.num_requests:,} requests")
        results.append(once(scenario, system))
    return results


def _row(system: str, results: list[Result]) -> dict[str, Any]:
    wall_s = median(result.wall_s for result in results)
    simulated_s = results[0].run.end_s
    return {
        "system": system,
        "num_requests": results[0].summary.num_requests,
        "simulated_s": simulated_s,
        "wall_s": wall_s,
        "times_real_time": simulated_s / wall_s,
    }
