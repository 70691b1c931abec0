"""The search of ``easerve bench goodput``: its settings, and one run after the other.

Requests are asked alone first, which warms the server up and says where to begin. Then runs at one
rate and one seed each, as ``bench/search`` asks for them. At each rate the seeds, and so the
arrivals, are the same, but no picture and no text comes twice: a server may keep what it has seen.
"""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import NamedTuple

from easerve.bench import result as results
from easerve.bench import search
from easerve.bench.client import LoadError
from easerve.bench.run import Run
from easerve.bench.search import Grid, Probe, Search
from easerve.cli.bench import goodput_shown
from easerve.cli.bench.goodput_shown import Result, Told
from easerve.config import ConfigError
from easerve.goodput import Slo

RATE_SPAN = 64
"""The lowest and the highest rate that are tried, by default: so many times less, and more, than
what one client alone gets."""
MIN_DURATION_S, MAX_DURATION_S = 30.0, 120.0
"""Of a run, unless it is given."""
ALONE_CONFIDENCE = 0.99
"""That no more requests alone would keep a promise, for it to be given up."""


class Load(NamedTuple):
    """One run. ``rate_per_s`` None: one request after the other. ``content_seed``: of what is
    asked, ``seed``: of when."""

    rate_per_s: float | None
    num_requests: int
    seed: int
    content_seed: int


Ask = Callable[[Load, Mapping[str, Slo]], Awaitable[Run]]
Idle = Callable[[], Awaitable[bool | None]]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """``rates_per_s``: a grid instead of a search. Rates of the search that are None follow from
    the latency of a request alone, a duration that is None from the promises.

    ``num_requests``: of a run, at least. Others as ``search.Plan``. ConfigError for what cannot be.
    """

    rates_per_s: tuple[float, ...] = ()
    start_rate_per_s: float | None = None
    min_rate_per_s: float | None = None
    max_rate_per_s: float | None = None
    tolerance: float = 0.05
    wanted: float = search.WANTED
    num_seeds: int = 3
    seed: int = 0
    max_probes: int = 60
    duration_s: float | None = None
    num_requests: int = 100
    num_alone: int = 10
    allow_late: bool = False

    def __post_init__(self) -> None:
        try:
            self.search(("S",), 1.0)
        except ValueError as error:
            raise ConfigError(f"the search cannot be: {error}") from None
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise ConfigError("--duration: it must be more than 0 and finite")

    def search(self, slos: Sequence[str], alone_per_s: float) -> Search:
        """``alone_per_s``: requests that one client alone gets answered per second.

        What is given bounds what is not. Raises ValueError.
        """
        least, most = self.min_rate_per_s, self.max_rate_per_s
        start = self.start_rate_per_s
        if start is None:
            start = max(search.rounded(alone_per_s), least or 0.0)
            start = start if most is None else min(start, most)
        asked = search.Plan(
            tuple(slos),
            start,
            search.rounded(start / RATE_SPAN) if least is None else least,
            search.rounded(start * RATE_SPAN) if most is None else most,
            self.wanted,
            self.tolerance,
            self.num_seeds,
            self.seed,
            self.max_probes,
        )
        return Grid(asked, rates_per_s=self.rates_per_s) if self.rates_per_s else Search(asked)

    def alone(self) -> Load:
        return Load(None, self.num_alone, self.seed, content_seed(self.seed, None))

    def load(self, probe: Probe, duration_s: float) -> Load:
        num = search.num_requests(probe.rate_per_s, duration_s, self.num_requests)
        seed = content_seed(probe.seed, probe.rate_per_s)
        return Load(probe.rate_per_s, num, probe.seed, seed)

    def worth_it(
        self, slos: Mapping[str, Slo], alone: Mapping[str, float | None], num_alone: int
    ) -> dict[str, Slo]:
        """The promises that requests alone keep often enough, as far as so few can tell: the others
        would be searched for down to the lowest rate. Of a grid, all: it is run anyway."""
        z = NormalDist().inv_cdf(ALONE_CONFIDENCE)
        highs = {name: search.wilson(alone[name] or 0.0, num_alone, z)[1] for name in slos}
        return {
            name: slo
            for name, slo in slos.items()
            if self.rates_per_s or highs[name] >= self.wanted
        }

    def settings(self) -> Result:
        """For JSON."""
        return {
            "seed": self.seed,
            "num_seeds": self.num_seeds,
            "least_requests": self.num_requests,
            "tolerance": self.tolerance,
            "attainment_wanted": self.wanted,
        }

    def duration_for(self, slos: Mapping[str, Slo]) -> float:
        """Of a run, in seconds."""
        if self.duration_s is not None:
            return self.duration_s
        return min(MAX_DURATION_S, max(MIN_DURATION_S, *self.needed_s(slos).values()))

    def needed_s(self, slos: Mapping[str, Slo]) -> dict[str, float]:
        """How long a run must be for each promise, see ``search.least_duration_s``; 0: any."""
        waits_s = {
            name: min((t for t in (slo.ttft_s, slo.latency_s) if t is not None), default=0.0)
            for name, slo in slos.items()
        }
        return {
            name: search.least_duration_s(wait_s, self.tolerance, self.wanted)
            for name, wait_s in waits_s.items()
        }

    def too_short(self, slos: Mapping[str, Slo]) -> list[str]:
        """A sentence for the promises that runs are too short for."""
        duration_s, needed_s = self.duration_for(slos), self.needed_s(slos)
        short = [name for name, need_s in needed_s.items() if need_s > duration_s * 1.001]
        if not short or self.rates_per_s:
            return []
        longest_s = math.ceil(max(needed_s[name] for name in short))
        return [
            f"runs of {duration_s:.0f} s are too short for {', '.join(short)}: an overload of "
            f"{100 * self.tolerance:.0f} % does not make requests late enough in that time, and "
            f"rates come out too high. --duration {longest_s}, or a larger --tolerance, would do"
        ]


def content_seed(seed: int, rate_per_s: float | None) -> int:
    """Of what is asked at a rate: the same for every system, another at every rate."""
    rate = "alone" if rate_per_s is None else float(rate_per_s)
    digest = hashlib.sha256(f"{seed}:{rate}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


async def searched(
    plan: Plan, slos: Mapping[str, Slo], ask: Ask, idle: Idle, say: Say, stop: asyncio.Event
) -> Told:
    """Ask alone, then search. ``idle`` waits until the server is; ``say`` gets a line per run.

    Raises LoadError when not even a request alone is answered.
    """
    run = await ask(plan.alone(), slos)
    alone = goodput_shown.alone(run, slos)
    if not alone["completed"] and not run.stopped:
        raise LoadError(f"no request alone was answered: {_cause(run)}")
    duration_s, notes = plan.duration_for(slos), plan.too_short(slos)
    kept = plan.worth_it(slos, alone["attainment"], len(run.samples))
    say(f"alone: {goodput_shown.shares(alone['attainment'])} ({len(run.samples)} requests)")
    probes: list[Result] = []
    failure = None
    if not kept or run.stopped:
        return Told(alone, {}, probes, duration_s, notes, stopped=run.stopped)
    searching = plan.search(tuple(kept), _per_s(run))
    while not stop.is_set() and (probe := searching.next_probe()) is not None:
        if await idle() is False:
            notes.append(f"the server was not idle before the run at {probe.rate_per_s:g}/s")
        try:
            run = await ask(plan.load(probe, duration_s), slos)
        except (ConfigError, LoadError) as error:  # a data set that is too short, too many bytes
            failure = f"no run at {probe.rate_per_s:g}/s: {error}"
            break
        if run.stopped:
            break
        told = goodput_shown.probe(probe, run, slos, plan.allow_late)
        probes.append(told)
        say(goodput_shown.line(told))
        if not told["completed"]:
            failure = f"no request at {probe.rate_per_s:g}/s was answered: {_cause(run)}"
            break
        searching.tell(_told(probe, run, kept, plan.allow_late))
    return Told(alone, searching.found(), probes, duration_s, notes, failure, stop.is_set())


def _per_s(run: Run) -> float:
    """Requests that are answered per second, one after the other."""
    latencies_s = [each.latency_s for each in run.records if each.latency_s]
    return 1 / fmean(latencies_s) if latencies_s else 1.0


def _told(probe: Probe, run: Run, slos: Mapping[str, Slo], late: bool) -> search.Result:
    records = run.records
    met = {name: sum(map(slo.met, records)) for name, slo in slos.items()}
    because = () if late else tuple(run.client_too_slow())
    return search.Result(probe, len(records), met, run.duration_s, because)


def _cause(run: Run) -> str:
    return "; ".join(results.causes(run.samples)) or "nothing came back"
