"""A measured run: warm-ups, the load by a client of its own process, what the server showed."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from easerve.bench import health
from easerve.bench.client import LoadError, in_process
from easerve.bench.job import OnProgress, Planned, Target, encoded
from easerve.bench.sample import Health, Sample, Seen
from easerve.bench.watch import watching
from easerve.goodput import Record, Slo, Summary, percentile, summarise


@dataclass(frozen=True, slots=True)
class Run:
    """Times in seconds from the start. ``duration_s``: until the last token, or end, of a request;
    of a run that was ``stopped``, until then.

    ``mean_gap_s``: between requests, None where they had no times of their own. ``timeline``: of
    the server's metrics, None where it shows none.
    """

    samples: Sequence[Sample]
    warmup: Sequence[Sample]
    duration_s: float
    health: Health
    mean_gap_s: float | None = None
    stopped: bool = False
    timeline: dict[str, Any] | None = None

    @property
    def records(self) -> list[Record]:
        return [sample.record for sample in self.samples]

    def summary(self, slos: Mapping[str, Slo]) -> Summary:
        return summarise(self.records, self.duration_s, slos)

    def client_too_slow(self) -> list[str]:
        """Why its figures may be those of the client; empty when they are the server's."""
        lateness_s = percentile([record.lateness_s for record in self.records], 99)
        return list(health.too_slow(self.health, lateness_s, self.mean_gap_s))


async def measure(
    target: Target,
    requests: Sequence[Planned],
    *,
    warmup: Sequence[Planned] = (),
    slos: Mapping[str, Slo] | None = None,
    concurrency: int | None = None,
    max_in_flight: int | None = None,
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
    watch: bool = False,
) -> Run:
    """Send the warm-ups, then the requests: an open loop, or a closed one of ``concurrency``.

    ``slos`` are for ``on_progress``, which is told how many requests met each. ``stop`` ends it
    early. ``watch``: read the server's metrics meanwhile. Raises LoadError when no warm-up is
    completed or the client's process fails, ValueError for arguments that cannot be.
    """
    job, bodies = encoded(
        *(target, requests, warmup),
        max_in_flight=max_in_flight,
        concurrency=concurrency,
        slos=slos,
    )
    watched = watching(target.url, target.api_key) if watch else nullcontext()
    async with watched as watching_it:
        seen = await in_process(job, bodies, on_progress, stop)
    if warmup and not seen.samples and not seen.stopped and requests:
        raise LoadError(f"none of {len(warmup)} warm-up requests was answered: {_causes(seen)}")
    return Run(
        seen.samples,
        seen.warmup,
        _duration_s(seen),
        seen.health,
        None if concurrency is not None else mean_gap_s(job.times_s),
        seen.stopped,
        None if watching_it is None else watching_it.timeline(seen.start_s),
    )


def _duration_s(seen: Seen) -> float:
    if seen.stopped:
        return seen.wall_s
    return max((end_s for each in seen.samples if (end_s := each.record.end_s)), default=0.0)


def _causes(seen: Seen) -> str:
    return "; ".join(dict.fromkeys(each.cause for each in seen.warmup if each.cause is not None))


def mean_gap_s(times_s: Sequence[float]) -> float | None:
    """None for what is to be sent all at once."""
    if len(times_s) < 2:
        return None
    return (max(times_s) - min(times_s)) / (len(times_s) - 1) or None
