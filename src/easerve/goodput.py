"""What a run was worth: times per request, service level objectives, goodput.

TTFT is the time to the first token, TPOT the time per output token after it, both as vLLM's bench
defines them: from the moment the request was sent, and (latency - TTFT) / (output tokens - 1).
Goodput is the number of requests that met their objective over the run's time. Everything that
was sent counts: a request that failed, was refused, given up or cancelled met nothing.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

Outcome = Literal["completed", "failed", "rejected", "timed_out", "cancelled"]
OUTCOMES: tuple[str, ...] = get_args(Outcome)
SLO_PART = re.compile(
    r"(?P<name>ttft|tpot)(?:=(?P<number>[0-9.]+)(?P<unit>ms|s)|:(?P<number_ms>[0-9.]+))"
)


@dataclass(frozen=True, slots=True)
class Record:
    """One request, as its client saw it; all times in seconds on one clock.

    ``scheduled_s`` is when it was meant to be sent. ``first_token_s`` and ``end_s`` are None when
    that did not come. Raises ValueError for times out of order, a negative number of tokens, an
    unknown outcome, or a completed request without an end.
    """

    scheduled_s: float
    sent_s: float
    first_token_s: float | None
    end_s: float | None
    num_output_tokens: int
    outcome: Outcome

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"an outcome is one of {', '.join(OUTCOMES)}, not {self.outcome!r}")
        if self.outcome == "completed" and self.end_s is None:
            raise ValueError("a completed request has an end")
        if self.num_output_tokens < 0:
            raise ValueError(f"{self.num_output_tokens} output tokens cannot be")
        times = [time for time in (self.sent_s, self.first_token_s, self.end_s) if time is not None]
        if not all(map(math.isfinite, [self.scheduled_s, *times])) or times != sorted(times):
            raise ValueError(f"sent, first token and end must be in this order, not {times}")

    @property
    def lateness_s(self) -> float:
        """How much later than meant the client sent it: the client's own fault."""
        return self.sent_s - self.scheduled_s

    @property
    def latency_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for fewer than two tokens: there is no time between them."""
        if self.first_token_s is None or self.end_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level objective: the longest TTFT and TPOT, in seconds; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, limit_s in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if limit_s is not None and not 0 < limit_s < math.inf:
                raise ValueError(f"{name} must be more than 0 and finite, not {limit_s}")

    def met(self, record: Record) -> bool:
        """Only a completed request can; one of a single token is judged by its TTFT alone."""
        if record.outcome != "completed" or not _within(record.ttft_s, self.ttft_s):
            return False
        return record.num_output_tokens < 2 or _within(record.tpot_s, self.tpot_s)


def _within(time_s: float | None, limit_s: float | None) -> bool:
    """A time that was not seen is within no limit."""
    return limit_s is None or (time_s is not None and time_s <= limit_s)


def parse_slo(text: str) -> Slo:
    """``ttft=2s,tpot=80ms``, or vLLM's ``ttft:2000 tpot:80`` in milliseconds; either part may lack.

    Raises ValueError that names the part that is wrong.
    """
    limits_s: dict[str, float] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        found = SLO_PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is not like ttft=2s, tpot=80ms or ttft:2000 (milliseconds)")
        if found["name"] in limits_s:
            raise ValueError(f"{part!r} says {found['name']} a second time")
        limits_s[found["name"]] = _limit_s(part, found)
    return Slo(limits_s.get("ttft"), limits_s.get("tpot"))


def _limit_s(part: str, found: re.Match[str]) -> float:
    try:
        number = float(found["number"] or found["number_ms"])
    except ValueError:
        raise ValueError(f"{part!r} has no number that can be read") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{part!r} must be more than 0 and finite")
    return number if found["unit"] == "s" else number / 1000


class Multiples(NamedTuple):
    """Of the TTFT and the TPOT of a request that has the system to itself."""

    ttft: float
    tpot: float


# From strict to loose. Chosen, not measured: with references of 1.0 s and 52 ms (LLaVA-v1.6-34B on
# 48 GB cards), S3 is the paper's medium level, as far as its results tell.
TIERS: Mapping[str, Multiples] = {
    "S1": Multiples(3, 1.25),
    "S2": Multiples(6, 1.5),
    "S3": Multiples(12, 1.85),
    "S4": Multiples(20, 2.5),
    "S5": Multiples(40, 4),
}


def tier(name: str, ttft_ref_s: float, tpot_ref_s: float) -> Slo:
    """The objective of a tier, from the TTFT and TPOT (seconds) of a request without load.

    Raises ValueError for a name that is no tier, or a time that is not more than 0.
    """
    if name not in TIERS:
        raise ValueError(f"a tier is one of {', '.join(TIERS)}, not {name!r}")
    return Slo(TIERS[name].ttft * ttft_ref_s, TIERS[name].tpot * tpot_ref_s)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The nearest rank: the smallest value that at least ``percent`` % of the values do not exceed.

    It is always one of the values, never between two; None without values. ``percent`` is 1 to 100.
    """
    if not 1 <= percent <= 100:
        raise ValueError(f"a percentile is 1 to 100, not {percent}")
    rank = -(-percent * len(values) // 100)  # rounded up, in integers
    return sorted(values)[rank - 1] if values else None


def is_small_sample(num_values: int, percent: int) -> bool:
    """Fewer values than one on average beyond the percentile: for the 99th, fewer than 100."""
    return num_values * (100 - percent) < 100


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds; None without values. Percentiles are by nearest rank."""

    mean: float | None
    p50: float | None
    p99: float | None


def spread(values: Sequence[float]) -> Spread:
    mean = fmean(values) if values else None
    return Spread(mean, percentile(values, 50), percentile(values, 99))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run. Each request is counted under one outcome, so the five add up to ``num_requests``.

    ``ttft_s`` and ``tpot_s`` are those of completed requests, ``lateness_p99_s`` is of all.
    ``goodput_per_s`` and ``attainment`` have a value per objective: the requests that met it, over
    the duration and over all requests. None where there is nothing to divide by. ``small_sample``
    names the percentiles that come from too few values to be trusted.
    """

    num_requests: int
    completed: int
    failed: int
    rejected: int
    timed_out: int
    cancelled: int
    duration_s: float
    throughput_per_s: float | None
    goodput_per_s: Mapping[str, float | None]
    attainment: Mapping[str, float | None]
    ttft_s: Spread
    tpot_s: Spread
    lateness_p99_s: float | None
    small_sample: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the keys are the names of the fields."""
        return {**dataclasses.asdict(self), "small_sample": list(self.small_sample)}


def summarise(records: Sequence[Record], duration_s: float, slos: Mapping[str, Slo]) -> Summary:
    """A run of ``duration_s`` seconds, judged by each objective.

    Raises ValueError for a duration that is negative or not finite.
    """
    if not 0 <= duration_s < math.inf:
        raise ValueError(f"a run of {duration_s} seconds cannot be")
    count = Counter(record.outcome for record in records)
    num_met = {name: sum(map(slo.met, records)) for name, slo in slos.items()}
    completed = [record for record in records if record.outcome == "completed"]
    ttfts_s = [record.ttft_s for record in completed if record.ttft_s is not None]
    tpots_s = [record.tpot_s for record in completed if record.tpot_s is not None]
    latenesses_s = [record.lateness_s for record in records]
    percentiles = {
        "ttft_s.p50": (ttfts_s, 50),
        "ttft_s.p99": (ttfts_s, 99),
        "tpot_s.p50": (tpots_s, 50),
        "tpot_s.p99": (tpots_s, 99),
        "lateness_p99_s": (latenesses_s, 99),
    }
    return Summary(
        num_requests=len(records),
        completed=count["completed"],
        failed=count["failed"],
        rejected=count["rejected"],
        timed_out=count["timed_out"],
        cancelled=count["cancelled"],
        duration_s=duration_s,
        throughput_per_s=_over(count["completed"], duration_s),
        goodput_per_s={name: _over(num, duration_s) for name, num in num_met.items()},
        attainment={name: _over(num, len(records)) for name, num in num_met.items()},
        ttft_s=spread(ttfts_s),
        tpot_s=spread(tpots_s),
        lateness_p99_s=percentile(latenesses_s, 99),
        small_sample=tuple(
            name
            for name, (values, percent) in percentiles.items()
            if values and is_small_sample(len(values), percent)  # a None speaks for itself
        ),
    )


def _over(number: int, whole: float) -> float | None:
    return number / whole if whole else None
