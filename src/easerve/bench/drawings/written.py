"""Results as they are written: `easerve bench`, `bench goodput` and `simulate` in JSON.

Keys that are not known are left alone, so that a newer result can be drawn; one that is missing or
of another type is named.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

Json = Mapping[str, Any]
Read = TypeVar("Read")


class ResultError(ValueError):
    """A result lacks a key, or has something else there; the message names it."""


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float | None
    p50: float | None
    p99: float | None
    p90: float | None = None


class Limits(msgspec.Struct, frozen=True):
    """The longest times of a service level objective; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None


class Columns(msgspec.Struct, frozen=True):
    """A value per request, all in one order."""

    scheduled_s: list[float]
    sent_s: list[float | None]
    ttft_s: list[float | None]
    tpot_s: list[float | None]
    latency_s: list[float | None]
    outcome: list[str]
    slot_wait_s: list[float] | None = None

    def __post_init__(self) -> None:
        columns = (getattr(self, name) for name in self.__struct_fields__)
        if len({len(column) for column in columns if column is not None}) > 1:
            raise ValueError("the columns are not of one length")


class TimelineChart(msgspec.Struct, frozen=True):
    title: str
    unit: str
    series: dict[str, list[float | None]]


class Timeline(msgspec.Struct, frozen=True):
    """Values of all charts at the same times."""

    times_s: list[float]
    charts: list[TimelineChart]

    def __post_init__(self) -> None:
        for chart in self.charts:
            for name, values in chart.series.items():
                if len(values) != len(self.times_s):
                    raise ValueError(
                        f"{name!r} of {chart.title!r} has {len(values)} values for "
                        f"{len(self.times_s)} times"
                    )


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """What every run tells, measured or simulated; None is a figure that is withheld."""

    system: str
    seed: int | None = None
    num_requests: int
    completed: int
    failed: int
    rejected: int
    timed_out: int
    cancelled: int
    duration_s: float
    throughput_per_s: float | None
    goodput_per_s: dict[str, float | None] | None
    attainment: dict[str, float | None] | None
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None = None
    latency_s: Spread | None = None
    slot_wait_s: Spread | None = None
    small_sample: list[str] = []
    output_tokens_per_s: float | None = None
    slo: dict[str, Limits] = {}


class Measured(Counted, frozen=True, kw_only=True):
    arrival: dict[str, Any]
    valid: bool
    invalid_because: list[str] = []
    causes: dict[str, int] = {}
    requests: Columns | None = None
    timeline: Timeline | None = None


class Simulated(Counted, frozen=True, kw_only=True):
    rate_per_s: float | None
    utilisation: dict[str, float] = {}


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    rate_per_s: float
    seed: int
    num_requests: int
    completed: int
    failed: int = 0
    rejected: int = 0
    timed_out: int = 0
    cancelled: int = 0
    attainment: dict[str, float | None] | None
    goodput_per_s: dict[str, float | None] | None
    duration_s: float | None = None
    throughput_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_s: Spread | None = None
    tpot_s: Spread | None = None
    itl_s: Spread | None = None
    latency_s: Spread | None = None
    slot_wait_s: Spread | None = None
    small_sample: list[str] = []
    valid: bool = True
    invalid_because: list[str] = []
    causes: dict[str, int] = {}


class Searched(msgspec.Struct, frozen=True, kw_only=True):
    system: str
    attainment_wanted: float
    max_rate_per_s: dict[str, float | None]
    bracket_per_s: dict[str, list[float | None] | None]
    best_goodput_per_s: dict[str, float | None] = {}
    best_goodput_at_per_s: dict[str, float | None] = {}
    probes: list[Probe]
    slo: dict[str, Limits] = {}
    arrival: dict[str, Any] = {}
    valid: bool = True
    invalid_because: list[str] = []
    notes: list[str] = []


def read(result: Json, kind: type[Read]) -> Read:
    """Raises ResultError."""
    try:
        return msgspec.convert(result, kind)
    except msgspec.ValidationError as error:
        raise ResultError(str(error)) from None
