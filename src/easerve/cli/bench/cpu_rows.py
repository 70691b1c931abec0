"""Several runs of a system of ``easerve bench cpu`` as one row, and rows over each other."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from easerve.cli.bench.cpu_allowed import grouped, verdict

Result = dict[str, Any]


def merged(rows: Sequence[Result]) -> Result:
    """The median of each value over several rows; None where one is None."""
    found: Result = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        given = [value for value in values if value is not None]
        if given and isinstance(given[0], dict):
            found[name] = merged(given)
        else:
            found[name] = median(given) if len(given) == len(values) else None
    return found


def used_of(rows: Sequence[Result]) -> Result:
    """Medians of CPU seconds, where a process that was not there yet has used nothing."""
    names = dict.fromkeys(name for row in rows for name in row["used_s"])
    used = {name: median(row["used_s"].get(name, 0.0) for row in rows) for name in names}
    return {"used_s": used, "by_process": grouped(used)}


def rounds_of(rows: Sequence[Result]) -> Result:
    """What is shown of every round."""
    return {"throughputs_per_s": [row["throughput_per_s"] for row in rows]}


def ratios(rows: Mapping[str, Result], most_per_s: Mapping[str, float], against: str) -> Result:
    """Of every system to one: measured, allowed, and why not as allowed.

    ``most_per_s``: what each is predicted to answer. ``by_cpu``: by CPU seconds a request in the
    very runs, ``by_cores``: by the cores that were busy in them; but for medians, the product of
    the two is what was measured.
    """
    base = rows[against]
    return {
        name: verdict(
            row["throughput_per_s"] / base["throughput_per_s"],
            most_per_s[name] / most_per_s[against],
        )
        | {"by_cpu": base["cpu_s"] / row["cpu_s"], "by_cores": row["cores"] / base["cores"]}
        for name, row in rows.items()
        if name != against and name in most_per_s
    }
