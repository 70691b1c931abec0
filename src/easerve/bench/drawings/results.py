"""Runs as they are drawn, whichever command's result they come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from easerve.bench.drawings import written
from easerve.bench.drawings.written import (
    Columns,
    Counted,
    Json,
    Limits,
    Measured,
    Probe,
    Searched,
    Simulated,
    Spread,
    Timeline,
)

Source = Literal["measured", "simulated"]
SPREADS = ("ttft_s", "tpot_s", "itl_s", "latency_s", "slot_wait_s")
LOST = ("failed", "rejected", "timed_out", "cancelled")
UNTOLD = "it does not say why"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one system. ``load`` says in words what was offered; ``facts`` is the result as
    it was read; ``counts`` are the outcomes that are not completed, by name.
    """

    system: str
    source: Source
    rate_per_s: float | None
    load: str
    seed: int | None
    num_requests: int
    completed: int
    goodput_per_s: Mapping[str, float | None]
    attainment: Mapping[str, float | None]
    spreads: Mapping[str, Spread]
    slo: Mapping[str, Limits]
    facts: Json
    duration_s: float | None = None
    throughput_per_s: float | None = None
    output_tokens_per_s: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    invalid_because: Sequence[str] = ()
    small_sample: Sequence[str] = ()
    causes: Mapping[str, int] = field(default_factory=dict)
    requests: Columns | None = None
    timeline: Timeline | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a search for the highest rate found, by tier. A bracket is the highest rate that was
    kept and the lowest that was not; None instead of the latter: none failed. ``best``: the most
    goodput at any rate, and that rate. ``invalid_because``: why there may be more to find.
    """

    system: str
    attainment_wanted: float
    max_rate_per_s: Mapping[str, float | None]
    bracket_per_s: Mapping[str, tuple[float | None, float | None]]
    best: Mapping[str, tuple[float | None, float | None]] = field(default_factory=dict)
    invalid_because: Sequence[str] = ()
    notes: Sequence[str] = ()
    facts: Json = field(default_factory=dict)


def of_bench(result: Json) -> Run:
    """Raises ResultError."""
    read = written.read(result, Measured)
    rate = read.arrival.get("rate_per_s")
    return Run(
        **_common(read),
        system=read.system,
        slo=read.slo,
        source="measured",
        rate_per_s=rate if isinstance(rate, int | float) else None,
        load=load_of(read.arrival),
        facts=result,
        invalid_because=() if read.valid else read.invalid_because or [UNTOLD],
        causes=read.causes,
        requests=read.requests,
        timeline=read.timeline,
    )


def of_simulate(result: Json) -> list[Run]:
    """Of one run, of systems by name, or of many runs in a list. Raises ResultError."""
    if isinstance(result.get("systems"), dict):
        rows = list(result["systems"].values())
    else:
        rows = result["runs"] if isinstance(result.get("runs"), list) else [result]
    return [_simulated(row) for row in rows]


def _simulated(result: Json) -> Run:
    read = written.read(result, Simulated)
    load = "trace" if read.rate_per_s is None else f"{read.rate_per_s:.4g}/s"
    return Run(
        **_common(read),
        system=read.system,
        slo=read.slo,
        source="simulated",
        rate_per_s=read.rate_per_s,
        load=load,
        facts=result,
    )


def of_goodput(result: Json) -> tuple[Capacity, list[Run]]:
    """What was found, and its probes. Raises ResultError."""
    read = written.read(result, Searched)
    facts = {key: value for key, value in result.items() if key != "probes"}
    at = read.best_goodput_at_per_s
    capacity = Capacity(
        read.system,
        read.attainment_wanted,
        read.max_rate_per_s,
        {name: _bracket(ends) for name, ends in read.bracket_per_s.items()},
        {name: (best, at.get(name)) for name, best in read.best_goodput_per_s.items()},
        () if read.valid else read.invalid_because or [UNTOLD],
        read.notes,
        facts,
    )
    return capacity, [_probe(read, probe, facts) for probe in read.probes]


def _bracket(ends: Sequence[float | None] | None) -> tuple[float | None, float | None]:
    if ends is None or len(ends) != 2:
        return None, None
    return ends[0], ends[1]


def _probe(searched: Searched, probe: Probe, facts: Json) -> Run:
    return Run(
        **_common(probe),
        system=searched.system,
        slo=searched.slo,
        source="measured",
        rate_per_s=probe.rate_per_s,
        load=load_of({**searched.arrival, "rate_per_s": probe.rate_per_s}),
        facts=facts,
        invalid_because=() if probe.valid else probe.invalid_because or [UNTOLD],
        causes=probe.causes,
    )


def _common(read: Counted | Probe) -> dict[str, Any]:
    spreads = {name: getattr(read, name) for name in SPREADS}
    return {
        "seed": read.seed,
        "num_requests": read.num_requests,
        "completed": read.completed,
        "goodput_per_s": read.goodput_per_s or {},
        "attainment": read.attainment or {},
        "spreads": {name: spread for name, spread in spreads.items() if spread is not None},
        "duration_s": read.duration_s,
        "throughput_per_s": read.throughput_per_s,
        "output_tokens_per_s": read.output_tokens_per_s,
        "counts": {name.replace("_", " "): getattr(read, name) for name in LOST},
        "small_sample": read.small_sample,
    }


def load_of(arrival: Json) -> str:
    """What was offered, in a few words: ``5/s``, if not Poisson then ``5/s gamma, cv 2``."""
    kind = str(arrival.get("kind", ""))
    rate, clients = arrival.get("rate_per_s"), arrival.get("concurrency")
    if clients is not None:
        words = f"{clients} clients"
    elif isinstance(rate, int | float):
        words = f"{rate:.4g}/s" + ("" if kind in ("", "poisson") else f" {kind}")
    else:
        words = kind or "unknown arrivals"
    others = [
        f"{key.removesuffix('_per_s')} {value}"
        for key, value in arrival.items()
        if key not in ("kind", "rate_per_s", "concurrency") and isinstance(value, int | float | str)
    ]
    return ", ".join([words, *others])
