"""What a run was: all that is needed to make it again, and what went wrong in it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from easerve.bench.drawings.labels import INVALID, labels, rounded, systems
from easerve.bench.drawings.parts import Cell, Table, shown
from easerve.bench.drawings.results import Run
from easerve.bench.drawings.written import Limits

FACTS = {
    "system": "system",
    "url": "server",
    "model": "model",
    "modality": "modality",
    "workload": "workload",
    "arrival": "arrivals",
    "seed": "seed",
    "num_requests": "requests",
    "num_warmup": "warm-up requests",
    "duration_s": "duration, s",
    "command": "command",
    "easerve": "EAServe",
    "reference": "reference",
    "tokens": "tokens",
    "client": "client",
    "lateness_p99_s": "lateness P99, s",
    "utilisation": "busy share",
}
MAX_VALUES = 6
MAX_ALERTS = 5
"""Of runs that are not valid; all are marked where they stand."""
COMPARED = ("model", "modality", "workload")
"""What should be alike for a comparison of systems to be one."""


def tables(runs: Sequence[Run]) -> Iterator[Table]:
    """One of each system: what its results tell, in words; where its runs differ, all values."""
    groups: dict[str, list[Run]] = {}
    for name, run in zip(systems(runs), runs, strict=True):
        groups.setdefault(name, []).append(run)
    for name, group in groups.items():
        yield Table(f"What was run: {name}", ("", "value"), list(_rows(group)))


def _rows(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    for key, title in FACTS.items():
        told = [run.load if key == "arrival" else run.facts.get(key) for run in runs]
        values = list(dict.fromkeys(words(value) for value in told if value not in (None, {}, [])))
        if len(values) > MAX_VALUES:
            values = [*values[:MAX_VALUES], f"and {len(values) - MAX_VALUES} more"]
        if values:
            yield title, "; ".join(values)


def words(value: Any) -> str:
    """A value of JSON, flat: mappings as ``key value``, lists with commas."""
    if isinstance(value, Mapping):
        parts = (f"{key} {words(each)}" for key, each in value.items() if each is not None)
        return ", ".join(parts)
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return " ".join(words(each) for each in value)
    return "yes" if value is True else "no" if value is False else shown(value)


def outcomes(runs: Sequence[Run]) -> Table:
    """How many requests came to what (done: completed); what came to none is left out."""
    others = dict.fromkeys(name for run in runs for name, number in run.counts.items() if number)
    columns = ["run", "requests", "done", *others, "done/s", "tokens/s"]
    rows: list[list[Cell]] = [
        [
            label,
            run.num_requests,
            run.completed,
            *(run.counts.get(name) for name in others),
            rounded(run.throughput_per_s),
            rounded(run.output_tokens_per_s),
        ]
        for label, run in zip(labels(runs), runs, strict=True)
    ]
    kept = [at for at, _ in enumerate(columns) if any(row[at] is not None for row in rows)]
    kept_rows = [[row[at] for at in kept] for row in rows]
    return Table("Requests", [columns[at] for at in kept], kept_rows)


def causes(runs: Sequence[Run]) -> Table | None:
    """Why requests were not completed, the most frequent first; None if all were."""
    rows = [
        (label, cause, number)
        for label, run in zip(labels(runs), runs, strict=True)
        for cause, number in sorted(run.causes.items(), key=lambda item: -item[1])
    ]
    return Table("Causes of failure", ("run", "cause", "requests"), rows) if rows else None


def alerts(runs: Sequence[Run]) -> Iterator[str]:
    """Runs that do not count, and comparisons that are none."""
    invalid = [
        f"{INVALID}: {label.replace(f', {INVALID}', '')}: {'; '.join(run.invalid_because)}"
        for label, run in zip(labels(runs), runs, strict=True)
        if run.invalid_because
    ]
    yield from invalid[:MAX_ALERTS]
    if len(invalid) > MAX_ALERTS:
        yield f"{INVALID}: {len(invalid) - MAX_ALERTS} more runs"
    for key in COMPARED:
        told: dict[str, set[str]] = {}
        for run in runs:
            if value := run.facts.get(key):
                told.setdefault(str(run.facts.get("system")), set()).add(words(value))
        if len(set(map(frozenset, told.values()))) > 1:
            each = (f"{name} {' and '.join(sorted(values))}" for name, values in told.items())
            yield f"Not the same {key}: {'; '.join(each)}"
    for name, limits in promised(runs).items():
        if len(limits) > 1:
            each = (words(msgspec.to_builtins(limit)) for limit in limits)
            yield f"Not the same limits of {name}: {'; '.join(each)}"


def promised(runs: Sequence[Run]) -> dict[str, list[Limits]]:
    """Of each tier its limits; more than one where runs do not agree."""
    found: dict[str, list[Limits]] = {}
    for run in runs:
        for name, limits in run.slo.items():
            if limits not in found.setdefault(name, []):
                found[name].append(limits)
    return found


def notes(runs: Sequence[Run]) -> Iterator[str]:
    """What a reader should know before trusting a figure."""
    for label, run in zip(labels(runs), runs, strict=True):
        if run.small_sample:
            yield f"Too few requests to trust, {label}: {', '.join(run.small_sample)}."
