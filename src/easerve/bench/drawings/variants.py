"""One system under different loads is drawn as two."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from easerve.bench.drawings.facts import words
from easerve.bench.drawings.results import Capacity, Run

What = Mapping[str, str]


def distinguished(
    runs: Sequence[Run], found: Sequence[Capacity]
) -> tuple[list[Run], list[Capacity]]:
    """All with names of systems that say in what model or workload they differ, if they do."""
    told: dict[str, list[What]] = defaultdict(list)
    for system, facts in [(run.system, run.facts) for run in runs] + [
        (each.system, each.facts) for each in found
    ]:
        told[system].append(_what(facts))
    differing = {system: _differing(list(filter(None, whats))) for system, whats in told.items()}

    def name(each: Run | Capacity) -> str:
        what = _what(each.facts)
        parts = [f"{key} {what[key]}" for key in differing[each.system] if key in what]
        return f"{each.system} ({', '.join(parts)})" if parts else each.system

    return (
        [replace(run, system=name(run)) for run in runs],
        [replace(capacity, system=name(capacity)) for capacity in found],
    )


def _what(facts: Mapping[str, Any]) -> What:
    """Empty where a result does not tell, as those of simulations do not."""
    workload = facts.get("workload")
    flat = {key: facts.get(key) for key in ("model", "modality")}
    flat |= workload if isinstance(workload, Mapping) else {"workload": workload}
    return {key: words(value) for key, value in flat.items() if value is not None}


def _differing(whats: Sequence[What]) -> list[str]:
    keys: Iterable[str] = dict.fromkeys(key for what in whats for key in what)
    return [key for key in keys if len({what.get(key) for what in whats}) > 1]
