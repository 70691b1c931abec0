"""Several runs of a system of ``easerve bench cpu`` as one row, and rows over each other."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from easerve.cli.bench.cpu_alone import grouped

IN_RUN, ALONE = "in_run", "alone"
"""Where the stage times come from that explain a ratio."""
TOLERANCE = 0.1
Result = dict[str, Any]


def merged(rows: Sequence[Result]) -> Result:
    """The mean of each value over several rows; None where one is None."""
    found: Result = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        given = [value for value in values if value is not None]
        if given and isinstance(given[0], dict):
            found[name] = merged(given)
        else:
            found[name] = fmean(given) if len(given) == len(values) else None
    return found


def pooled(rows: Sequence[Result]) -> Result:
    """Runs of as many requests each, as if they were one."""
    row, used = merged(rows), used_of(rows)
    throughput_per_s = row["num_requests"] / row["duration_s"]
    return row | {
        "throughput_per_s": throughput_per_s,
        "cores": row["cpu_s"] * throughput_per_s,
        "used_s": used,
        "by_process": grouped(used),
        "throughputs_per_s": [each["throughput_per_s"] for each in rows],
    }


def used_of(rows: Sequence[Result]) -> dict[str, float]:
    """Means of CPU seconds, where a process that was not there yet has used nothing."""
    names = dict.fromkeys(name for row in rows for name in row["used_s"])
    return {name: fmean(row["used_s"].get(name, 0.0) for row in rows) for name in names}


def ratios(
    rows: Mapping[str, Result], allowed: Mapping[str, Mapping[str, float]], against: str
) -> Result:
    """Of every system to one, measured and allowed: see ``verdict``.

    ``allowed``: requests/s of each system, by what explains them.
    """
    base = rows[against]["throughput_per_s"]
    found: Result = {}
    for name, row in rows.items():
        if name != against and all(name in most_per_s for most_per_s in allowed.values()):
            measured = row["throughput_per_s"] / base
            found[name] = {"measured": measured} | {
                by: verdict(measured, most_per_s[name] / most_per_s[against])
                for by, most_per_s in allowed.items()
            }
    return found


def verdict(measured: float, allowed: float) -> Result:
    """``reached``: of what is allowed; ``as_allowed``: within ``TOLERANCE`` of it."""
    reached = measured / allowed
    return {
        "allowed": allowed,
        "reached": reached,
        "as_allowed": abs(reached - 1) <= TOLERANCE,
    }
