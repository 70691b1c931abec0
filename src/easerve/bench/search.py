"""The highest rate at which a system keeps a promise, found by trying: which run is the next.

No I/O, no clock, no randomness: what was measured goes in, the next run comes out. A run is a rate
and a seed. Rates double (or halve) from a first one until one is kept and one is not, then the
geometric middle is tried until the two are within a tolerance. At each rate the same seeds are
used, so that systems that are compared see the same arrivals.

A rate is kept when the share of its requests that met the objective, pooled over its seeds, is as
high as wanted (0.9). Seeds are added until that is clear: one side of the Wilson interval is beyond
the wanted share, or all seeds are used and the share itself decides. Requests of one run wait for
each other and so fail together; a run of n counts as n / ``design_effect`` independent ones.

Objectives share their runs: each is decided at every rate at which what was run is enough for it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

WANTED = 0.9
MAX_LOST_RATES = 3
"""At which the client was too slow; then the search ends."""
Verdict = Literal["found", "at least", "client", "none", "unfinished", "grid"]


@dataclass(frozen=True, slots=True)
class Plan:
    """``slos``: names of the objectives. Rates are requests per second.

    The search ends when a rate that is kept and one that is not are within ``tolerance`` (0.05: a
    factor of 1.05), for each objective, or after ``max_probes`` runs. ``confidence``: of an
    interval's one side. ValueError for what cannot be.
    """

    slos: tuple[str, ...]
    start_rate_per_s: float
    min_rate_per_s: float
    max_rate_per_s: float
    wanted: float = WANTED
    tolerance: float = 0.05
    num_seeds: int = 3
    first_seed: int = 0
    max_probes: int = 60
    confidence: float = 0.95
    design_effect: float = 4.0

    def __post_init__(self) -> None:
        rates = (self.min_rate_per_s, self.start_rate_per_s, self.max_rate_per_s)
        if not (0 < rates[0] <= rates[1] <= rates[2] < math.inf):
            raise ValueError(f"0 < min rate <= start rate <= max rate does not hold: {rates}")
        for name, least, most in (
            ("wanted", 0.0, 1.0),
            ("tolerance", 0.0, 1.0),
            ("confidence", 0.5, 1.0),
        ):
            if not least < getattr(self, name) < most:
                raise ValueError(f"{name} must be between {least:g} and {most:g}")
        for name in ("num_seeds", "max_probes", "design_effect"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 1 or more")
        if not self.slos:
            raise ValueError("there is no objective to search for")

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.num_seeds)


@dataclass(frozen=True, slots=True)
class Probe:
    """One run."""

    rate_per_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run. ``num_met``: requests that met each objective.

    ``invalid_because``: why it says nothing of the server, for the client was the bottleneck.
    """

    probe: Probe
    num_requests: int
    num_met: Mapping[str, int]
    duration_s: float
    invalid_because: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pooled:
    """All valid runs at one rate, for one objective."""

    num_met: int
    num_requests: int
    num_runs: int
    duration_s: float

    @property
    def attainment(self) -> float:
        return self.num_met / self.num_requests

    @property
    def goodput_per_s(self) -> float | None:
        return self.num_met / self.duration_s if self.duration_s else None


@dataclass(frozen=True, slots=True)
class Found:
    """What holds for an objective. Rates are per second.

    ``kept``: the highest rate that was kept with none below it that was not; ``broken``: the lowest
    that was not. ``at_kept``: the runs there. ``best_goodput_per_s``: requests that met the
    objective per second, at the rate where they were most, ``best_at``.

    ``verdict``: ``found``: both are within the tolerance. ``at least``: kept up to the highest
    rate allowed. ``client``: above, the client is the bottleneck. ``none``: not even the lowest
    rate allowed is kept. ``unfinished``: it was ended before; what there is holds. ``grid``: rates
    were given, not searched for; between kept and broken, nobody tried.
    """

    verdict: Verdict
    kept: float | None
    broken: float | None
    at_kept: Pooled | None
    best_goodput_per_s: float | None
    best_at: float | None
    notes: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The rate as a person reads it."""
        if self.kept is None:
            return "–" if self.broken is None else f"< {self.broken:.4g}"
        return f"{'' if self.broken else '≥ '}{self.kept:.4g}"


def wilson(share: float, num: float, z: float) -> tuple[float, float]:
    """The Wilson score interval of a share of ``num`` trials, which need not be whole.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    if num <= 0:
        return 0.0, 1.0
    weight = z * z / num
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / num + weight / (4 * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def least_duration_s(ttft_limit_s: float, tolerance: float, wanted: float = WANTED) -> float:
    """How long a run must be to tell a rate that is ``tolerance`` beyond what a system can do.

    A queue that is fed (1 + tolerance) times as fast as it drains is late by t x tolerance /
    (1 + tolerance) for a request that comes at t. For a share 1 - wanted of the requests to be
    later than the limit, the last of the others must be so. In a shorter run the queue does not
    grow long enough, and the rate looks as if it were kept.
    """
    return ttft_limit_s * (1 + tolerance) / (tolerance * wanted)


def num_requests(rate_per_s: float, duration_s: float, least: int) -> int:
    """Of a run: as many as come in ``duration_s``, and so many at least."""
    return max(least, math.ceil(rate_per_s * duration_s))


@dataclass(slots=True)
class Search:
    """``next_probe`` says what to run, ``tell`` what came of it; all else follows from these."""

    plan: Plan
    results: list[Result] = field(default_factory=list)

    def tell(self, result: Result) -> None:
        """Of the probe that was asked for last."""
        self.results.append(result)

    def next_probe(self) -> Probe | None:
        """None: it is over. An invalid run is tried once more before its rate is given up."""
        if len(self.results) >= self.plan.max_probes or self._is_lost:
            return None
        for slo in self.plan.slos:
            rate = self._next_rate(slo)
            if rate is not None:
                return Probe(rate, self._next_seed(rate))
        return None

    def found(self) -> dict[str, Found]:
        """What holds so far, for each objective."""
        return {slo: self._found(slo) for slo in self.plan.slos}

    def pooled(self, slo: str, rate_per_s: float) -> Pooled | None:
        runs = [each for each in self._valid() if each.probe.rate_per_s == rate_per_s]
        return pooled(runs, slo)

    def rates(self) -> list[float]:
        """Those with a valid run, rising."""
        return sorted({each.probe.rate_per_s for each in self._valid()})

    def decided(self, slo: str, rate_per_s: float) -> bool | None:
        """Whether the rate is kept; None: the runs so far do not say."""
        found = self.pooled(slo, rate_per_s)
        return None if found is None else decided(self.plan, found)

    def bracket(self, slo: str) -> tuple[float | None, float | None]:
        """The rate that is kept and the one that is not, which the search is between."""
        verdicts = {rate: self.decided(slo, rate) for rate in self.rates()}
        broken = min((rate for rate, kept in verdicts.items() if kept is False), default=None)
        below = math.inf if broken is None else broken
        kept = [rate for rate, kept in verdicts.items() if kept and rate < below]
        return max(kept, default=None), broken

    def _valid(self) -> Iterable[Result]:
        return (each for each in self.results if not each.invalid_because and each.num_requests)

    def _lost_rates(self) -> set[float]:
        """Those at which the client was the bottleneck, twice with the same seed."""
        lost = [each.probe for each in self.results if each.invalid_because]
        return {probe.rate_per_s for number, probe in enumerate(lost) if probe in lost[:number]}

    @property
    def _is_lost(self) -> bool:
        """It is not the rate: the client has no peace at any."""
        return len(self._lost_rates()) >= MAX_LOST_RATES

    def _ceiling(self) -> float | None:
        return min(self._lost_rates(), default=None)

    def _next_seed(self, rate_per_s: float) -> int:
        used = {each.probe.seed for each in self._valid() if each.probe.rate_per_s == rate_per_s}
        return next(seed for seed in self.plan.seeds if seed not in used)

    def _next_rate(self, slo: str) -> float | None:
        """Where this objective is to be tried next; None: nowhere."""
        plan, (kept, broken), ceiling = self.plan, self.bracket(slo), self._ceiling()
        closed = min((each for each in (broken, ceiling) if each is not None), default=None)
        if kept is None:
            if closed is None:
                return plan.start_rate_per_s
            lower = max(rounded(closed / 2), plan.min_rate_per_s)
            return lower if lower < closed else None
        if closed is None:
            higher = min(rounded(2 * kept), plan.max_rate_per_s)
            return higher if higher > kept else None
        if closed / kept <= 1 + plan.tolerance:
            return None
        middle = self._begun(slo, kept, closed) or rounded(math.sqrt(kept * closed))
        return middle if kept < middle < closed else None

    def _begun(self, slo: str, kept: float, closed: float) -> float | None:
        """A rate in the middle half of a bracket that was tried for another objective."""
        quarter = (closed / kept) ** 0.25
        for rate in self.rates():
            if kept * quarter <= rate <= closed / quarter and self.decided(slo, rate) is None:
                return rate
        return None

    def _found(self, slo: str) -> Found:
        kept, broken = self.bracket(slo)
        best = max(
            ((at.goodput_per_s or 0.0, -rate) for rate, at in self._all_pooled(slo)), default=None
        )
        return Found(
            self._verdict(slo, kept, broken),
            kept,
            broken,
            None if kept is None else self.pooled(slo, kept),
            None if best is None else best[0],
            None if best is None else -best[1],
            tuple(self._notes(slo, broken)),
        )

    def _all_pooled(self, slo: str) -> Iterable[tuple[float, Pooled]]:
        for rate in self.rates():
            if (at := self.pooled(slo, rate)) is not None:
                yield rate, at

    def _verdict(self, slo: str, kept: float | None, broken: float | None) -> Verdict:
        ceiling = self._ceiling()
        if self._next_rate(slo) is not None:
            return "client" if self._is_lost else "unfinished"
        if ceiling is not None and (broken is None or ceiling < broken):
            return "client"
        if kept is None:
            return "none"
        return "at least" if broken is None else "found"

    def _notes(self, slo: str, broken: float | None) -> Iterable[str]:
        if broken is None:
            return
        above = [rate for rate in self.rates() if rate > broken and self.decided(slo, rate)]
        if above:
            rates = ", ".join(f"{rate:.4g}" for rate in above)
            yield (
                f"{slo} is kept at {rates} requests/s but not at {broken:.4g}: chance (more seeds, "
                "longer runs), or the system is not monotone; the lower rate counts"
            )


@dataclass(slots=True)
class Grid(Search):
    """Given rates instead of a search: the curve of goodput over the rate. All seeds at each."""

    rates_per_s: Sequence[float] = ()

    def next_probe(self) -> Probe | None:
        """One after the other; an invalid run is not tried again."""
        probes = [Probe(rate, seed) for rate in self.rates_per_s for seed in self.plan.seeds]
        return probes[len(self.results)] if len(self.results) < len(probes) else None

    def decided(self, slo: str, rate_per_s: float) -> bool | None:
        """By all its runs: nobody waits for an answer."""
        found = self.pooled(slo, rate_per_s)
        return None if found is None else found.attainment >= self.plan.wanted

    def _verdict(self, slo: str, kept: float | None, broken: float | None) -> Verdict:
        return "grid" if self.next_probe() is None else "unfinished"


def pooled(results: Sequence[Result], slo: str) -> Pooled | None:
    """None without a request."""
    num = sum(each.num_requests for each in results)
    if not num:
        return None
    met, duration_s = sum(each.num_met[slo] for each in results), sum(r.duration_s for r in results)
    return Pooled(met, num, len(results), duration_s)


def decided(plan: Plan, at: Pooled) -> bool | None:
    """Whether a rate is kept, by the runs there; None: another seed is to be tried."""
    z = NormalDist().inv_cdf(plan.confidence)
    low, high = wilson(at.attainment, at.num_requests / plan.design_effect, z)
    if low >= plan.wanted:
        return True
    if high < plan.wanted:
        return False
    return None if at.num_runs < plan.num_seeds else at.attainment >= plan.wanted


def rounded(rate_per_s: float) -> float:
    """To four digits: what is written is what was run."""
    return float(f"{rate_per_s:.4g}")
