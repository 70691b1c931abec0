"""``easerve bench simulate``: what a simulated second costs."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from easerve.bench.report import Section, Table
from easerve.cli.bench.command import progress, show
from easerve.cli.simulate import once
from easerve.cli.simulate_shown import Result
from easerve.config import ConfigError
from easerve.sim import scenario as scenarios
from easerve.sim.scenario import Scenario

DEFAULT_SCENARIO = Path(__file__).parents[4] / "scenarios/llava-34b-rtx6000ada.yaml"


def run(path: Path | None, num_requests: int, rounds: int, as_json: bool) -> int:
    """The exit code. Every system of the scenario under its own load, and its default system with
    ``num_requests``; medians of ``rounds``. Raises ConfigError.
    """
    if path is None and not DEFAULT_SCENARIO.exists():
        raise ConfigError("the scenarios come with the repository: name a scenario file")
    path = path or DEFAULT_SCENARIO
    scenario = scenarios.read(path)
    many = scenarios.read(path, over=[f"workload.num_requests={num_requests}"])
    runs = [(scenario, system) for system in scenario.configs] + [(many, scenario.system)]
    rows = []
    with progress(Console(stderr=True), rounds * len(runs)) as tick:
        for load, system in runs:
            rows.append(_row(system, _rounds(load, system, rounds, tick)))
    if as_json:
        names = [row["system"] for row in rows[:-1]]
        print(json.dumps({"systems": dict(zip(names, rows, strict=False)), "many": rows[-1]}))
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
    show([Section("Simulator", text, [Table(title, columns, cells)])], Console())
    return 0


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
