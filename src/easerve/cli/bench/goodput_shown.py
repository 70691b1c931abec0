"""What ``easerve bench goodput`` tells: its JSON, a line for each run, tables."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from easerve.bench import result as results
from easerve.bench.reference import Reference, differences
from easerve.bench.report import Cell, Section, Table
from easerve.bench.run import Run
from easerve.bench.search import Found, Probe
from easerve.goodput import Slo

KIND = "goodput"
ALONE_KEYS = (
    *("num_requests", "completed", "attainment", "ttft_s", "tpot_s", "latency_s", "causes"),
)
PROBE_KEYS = (
    *("valid", "invalid_because", "num_requests", "completed", "failed", "rejected", "timed_out"),
    *("cancelled", "duration_s", "throughput_per_s", "output_tokens_per_s", "goodput_per_s"),
    *("attainment", "ttft_s", "tpot_s", "itl_s", "latency_s", "lateness_p99_s", "causes", "client"),
)
WORDS = {
    "found": "",
    "at least": "kept at the highest rate that was allowed",
    "client": "the client is too slow for more",
    "none": "not kept at the lowest rate",
    "alone": "not kept by requests alone",
    "unfinished": "ended before its time",
    "grid": "",
}
"""Verdicts of ``bench.search``, and of what no request alone keeps."""

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a search. ``alone``: objectives that no request alone keeps are not in
    ``found``. ``failure``: why it ended before its time, other than that it was stopped."""

    alone: Result
    found: Mapping[str, Found]
    probes: Sequence[Result]
    duration_s: float
    notes: Sequence[str]
    failure: str | None = None
    stopped: bool = False


def alone(run: Run, slos: Mapping[str, Slo]) -> Result:
    """One request at a time: no client is too slow for that."""
    told = results.result(run, slos, {}, late=True)
    return {key: told[key] for key in ALONE_KEYS}


def probe(at: Probe, run: Run, slos: Mapping[str, Slo], late: bool) -> Result:
    told = results.result(run, slos, {}, late)
    rest = {key: told[key] for key in PROBE_KEYS}
    return {"rate_per_s": at.rate_per_s, "seed": at.seed, **rest}


def line(told: Result) -> str:
    """A run, in a line."""
    if told["valid"] or not told["invalid_because"]:
        what = shares(told["attainment"])
    else:
        what = f"invalid, {'; '.join(told['invalid_because'])}"
    lost = told["num_requests"] - told["completed"]
    failed = f", {lost} not completed" if lost else ""
    where = f"{told['rate_per_s']:g}/s, seed {told['seed']}"
    return f"{where}: {what} ({told['num_requests']} requests{failed})"


def shares(attainment: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {percent(share)}" for name, share in attainment.items())


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.3g} %"


def result(
    told: Told,
    slos: Mapping[str, Slo],
    head: Mapping[str, Any],
    settings: Mapping[str, Any],
    reference: Reference | None,
) -> Result:
    """The JSON. ``head``: what was measured, on what load; ``settings``: of the search."""
    found = {name: told.found.get(name) for name in slos}
    kept = {name: each.at_kept if each else None for name, each in found.items()}
    because = list(_because(told))
    return {
        **head,
        "kind": KIND,
        **settings,
        "duration_s": told.duration_s,
        "valid": not because,
        "invalid_because": because,
        "max_rate_per_s": {name: each.kept if each else None for name, each in found.items()},
        "bracket_per_s": {
            name: [each.kept, each.broken] if each else [None, None] for name, each in found.items()
        },
        "verdict": {name: each.verdict if each else "alone" for name, each in found.items()},
        "attainment": {name: at.attainment if at else None for name, at in kept.items()},
        "goodput_per_s": {name: at.goodput_per_s if at else None for name, at in kept.items()},
        "best_goodput_per_s": {
            name: each.best_goodput_per_s if each else None for name, each in found.items()
        },
        "best_goodput_at_per_s": {
            name: each.best_at if each else None for name, each in found.items()
        },
        "slo": {name: asdict(slo) for name, slo in slos.items()},
        "reference": None if reference is None else reference.as_dict(),
        "notes": list(_notes(told, head, reference)),
        "alone": told.alone,
        "probes": list(told.probes),
    }


def _because(told: Told) -> Iterator[str]:
    """Why what was found is not all that was asked."""
    if told.failure is not None:
        yield told.failure
        return
    if told.stopped:
        yield "the search was stopped"
        return
    for verdict in ("client", "unfinished"):
        if names := [name for name, each in told.found.items() if each.verdict == verdict]:
            yield f"{', '.join(names)}: {WORDS[verdict]}"


def _notes(told: Told, head: Mapping[str, Any], reference: Reference | None) -> Iterator[str]:
    yield from told.notes
    for each in told.found.values():
        yield from each.notes
    if reference is not None:
        model, modality, workload = head["model"], head["modality"], head["workload"]
        for difference in differences(reference, model, modality, workload):
            yield f"the reference is of another load: {difference}"


def sections(found: Result) -> list[Section]:
    """Tables for a terminal."""
    wanted = percent(found["attainment_wanted"])
    rows = [_row(found, name) for name in found["slo"]]
    columns = ("promise", "max rate", "not kept at", "met", "goodput", "best", "at rate")
    title = f"{found['system']}: {found['model']}, rates at which {wanted} keep the promise, /s"
    return [Section("Goodput", "\n".join(_text(found)), [Table(title, columns, rows)])]


def _row(found: Result, name: str) -> Sequence[Cell]:
    rate, (_, broken) = found["max_rate_per_s"][name], found["bracket_per_s"][name]
    shown = "–" if rate is None else f"{'' if broken else '≥ '}{rate:.4g}"
    share = found["attainment"][name]
    return (
        name,
        shown,
        broken,
        None if share is None else percent(share),
        found["goodput_per_s"][name],
        found["best_goodput_per_s"][name],
        found["best_goodput_at_per_s"][name],
    )


def _text(found: Result) -> Iterator[str]:
    yield (
        "goodput: requests per second that kept the promise, at that rate; best: the most at any "
        f"rate. {len(found['probes'])} runs of {found['duration_s']:.0f} s or more, "
        f"{found['num_seeds']} seed{'s' * (found['num_seeds'] != 1)} at most."
    )
    for name, verdict in found["verdict"].items():
        if words := WORDS[verdict]:
            yield f"{name}: {words}"
    yield from (f"Note: {note}" for note in found["notes"])
