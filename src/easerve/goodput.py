"""What a run was worth: times per request, service level objectives, goodput.

TTFT is the time to the first token, latency that to the last one, TPOT the time per output token
after the first, (latency - TTFT) / (output tokens - 1), as vLLM's bench defines them: from the
moment the request was sent. One that had to wait for a place among those in flight counts from when
it was due: such waiting is the server's slowness, not the client's. Goodput is the number of
requests that met their objective over the run's time. Everything that was sent counts: a request
that failed, was refused, given up or cancelled met nothing. ``docs/metrics.md`` has all of it.
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
PERCENTS = (50, 90, 99)
LIMITS: Mapping[str, str] = {
    "ttft": "ttft_s",
    "tpot": "tpot_s",
    "latency": "latency_s",
    "e2el": "latency_s",  # vLLM's word
    "time_to_first_token": "ttft_s",  # this and the next two: aiperf's
    "inter_token_latency": "tpot_s",
    "request_latency": "latency_s",
}
"""The field of an ``Slo`` by the name of a limit."""
SLO_PART = re.compile(
    rf"(?P<name>{'|'.join(LIMITS)})"
    r"(?:=(?P<number>[0-9.]+)(?P<unit>ms|s)|:(?P<number_ms>[0-9.]+))"
)


@dataclass(frozen=True, slots=True)
class Record:
    """One request, as its client saw it; all times in seconds on one clock.

    ``scheduled_s`` is when it was meant to be sent. ``end_s`` is when the last token came, or when
    a request ended that was not completed; it and ``first_token_s`` are None when that did not
    come. ``slot_wait_s``: for how long it waited, before it was sent, until fewer requests were in
    flight. Raises ValueError for times out of order, a negative number of tokens or wait, an
    unknown outcome, or a completed request without an end.
    """

    scheduled_s: float
    sent_s: float
    first_token_s: float | None
    end_s: float | None
    num_output_tokens: int
    outcome: Outcome
    slot_wait_s: float = 0.0

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"an outcome is one of {', '.join(OUTCOMES)}, not {self.outcome!r}")
        if self.outcome == "completed" and self.end_s is None:
            raise ValueError("a completed request has an end")
        if self.num_output_tokens < 0:
            raise ValueError(f"{self.num_output_tokens} output tokens cannot be")
        if not 0 <= self.slot_wait_s < math.inf:
            raise ValueError(f"a wait of {self.slot_wait_s} seconds cannot be")
        times = [time for time in (self.sent_s, self.first_token_s, self.end_s) if time is not None]
        if not all(map(math.isfinite, [self.scheduled_s, *times])) or times != sorted(times):
            raise ValueError(f"sent, first token and end must be in this order, not {times}")

    @property
    def lateness_s(self) -> float:
        """How much later than it could the client sent it: the client's own fault."""
        return self._due_s - self.scheduled_s

    @property
    def _due_s(self) -> float:
        """When it would have been sent if nobody had to wait for a place."""
        return self.sent_s - self.slot_wait_s

    @property
    def latency_s(self) -> float | None:
        return None if self.end_s is None else self.end_s - self._due_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self._due_s

    @property
    def tpot_s(self) -> float | None:
        """None for fewer than two tokens: there is no time between them."""
        if self.first_token_s is None or self.end_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level objective: the longest TTFT, TPOT and latency in seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "latency_s"):
            limit_s = getattr(self, name)
            if limit_s is not None and not 0 < limit_s < math.inf:
                raise ValueError(f"{name} must be more than 0 and finite, not {limit_s}")

    def met(self, record: Record) -> bool:
        """Only a completed request can; one of a single token has no TPOT to be judged by."""
        if record.outcome != "completed" or not _within(record.ttft_s, self.ttft_s):
            return False
        if not _within(record.latency_s, self.latency_s):
            return False
        return record.num_output_tokens < 2 or _within(record.tpot_s, self.tpot_s)


def _within(time_s: float | None, limit_s: float | None) -> bool:
    """A time that was not seen is within no limit."""
    return limit_s is None or (time_s is not None and time_s <= limit_s)


def parse_slo(text: str) -> Slo:
    """``ttft=2s,tpot=80ms,latency=10s``; vLLM's ``ttft:2000 tpot:80 e2el:10000`` or aiperf's
    ``time_to_first_token:2000 inter_token_latency:80``, both in milliseconds; any part may lack.

    Raises ValueError that names the part that is wrong.
    """
    limits_s: dict[str, float] = {}
    for part in re.split(r"[,\s]+", text.strip()):
        found = SLO_PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is not like ttft=2s, tpot=80ms or ttft:2000 (milliseconds)")
        name = LIMITS[found["name"]]
        if name in limits_s:
            raise ValueError(f"{part!r} says {name.removesuffix('_s')} a second time")
        limits_s[name] = _limit_s(part, found)
    return Slo(**limits_s)


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
    return sorted(values)[_rank(len(values), percent)] if values else None


def _rank(num_values: int, percent: int) -> int:
    """Counted from 0. Rounded up, in integers."""
    return -(-percent * num_values // 100) - 1


def is_small_sample(num_values: int, percent: int) -> bool:
    """Fewer values than one on average beyond the percentile: for the 99th, fewer than 100."""
    return num_values * (100 - percent) < 100


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds; None without values. Percentiles are by nearest rank."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread()
    ordered = sorted(values)
    return Spread(fmean(ordered), *(ordered[_rank(len(ordered), each)] for each in PERCENTS))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run. Each request is counted under one outcome, so the five add up to ``num_requests``.

    ``ttft_s``, ``tpot_s``, ``latency_s`` and ``output_tokens_per_s`` are those of completed
    requests, ``lateness_p99_s`` is of all. ``goodput_per_s`` and ``attainment`` have a value per
    objective: the requests that met it, over the duration and over all requests. None where there
    is nothing to divide by. ``small_sample`` names the percentiles that come from too few values
    to be trusted.
    """

    num_requests: int
    completed: int
    failed: int
    rejected: int
    timed_out: int
    cancelled: int
    duration_s: float
    throughput_per_s: float | None
    output_tokens_per_s: float | None
    goodput_per_s: Mapping[str, float | None]
    attainment: Mapping[str, float | None]
    ttft_s: Spread
    tpot_s: Spread
    latency_s: Spread
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
    times_s = {
        name: [time_s for record in completed if (time_s := getattr(record, name)) is not None]
        for name in ("ttft_s", "tpot_s", "latency_s")
    }
    latenesses_s = [record.lateness_s for record in records]
    small = [name for key, values in times_s.items() for name in small_samples(key, len(values))]
    if records and is_small_sample(len(records), 99):
        small.append("lateness_p99_s")
    return Summary(
        num_requests=len(records),
        completed=count["completed"],
        failed=count["failed"],
        rejected=count["rejected"],
        timed_out=count["timed_out"],
        cancelled=count["cancelled"],
        duration_s=duration_s,
        throughput_per_s=_over(count["completed"], duration_s),
        output_tokens_per_s=_over(sum(each.num_output_tokens for each in completed), duration_s),
        goodput_per_s={name: _over(num, duration_s) for name, num in num_met.items()},
        attainment={name: _over(num, len(records)) for name, num in num_met.items()},
        **{name: spread(values) for name, values in times_s.items()},
        lateness_p99_s=percentile(latenesses_s, 99),
        small_sample=tuple(small),
    )


def small_samples(name: str, num_values: int) -> list[str]:
    """Which percentiles of a spread are not to be trusted; without values they are None anyway."""
    percents = [each for each in PERCENTS if num_values and is_small_sample(num_values, each)]
    return [f"{name}.p{each}" for each in percents]


def _over(number: int, whole: float) -> float | None:
    return number / whole if whole else None
