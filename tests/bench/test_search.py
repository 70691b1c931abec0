import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.bench.search import (
    Grid,
    Plan,
    Pooled,
    Probe,
    Result,
    Search,
    decided,
    least_duration_s,
    num_requests,
    wilson,
)
from easerve.goodput import Slo
from easerve.sim import scenario as scenarios
from easerve.sim.simulate import simulate

System = Callable[[Probe], Result]
ROOT = Path(__file__).parents[2]
DURATION_S, LEAST = 30, 100


def plan(*slos: str, **over: float) -> Plan:
    made = Plan(slos or ("S",), 4.0, 0.25, 256.0)
    return replace(made, **over)  # type: ignore[arg-type]


def searched(plan: Plan, system: System) -> Search:
    search = Search(plan)
    while (probe := search.next_probe()) is not None:
        search.tell(system(probe))
    return search


def step(*limits: float, num: int = 100) -> System:
    """Every request meets the objective up to a rate, and none beyond."""
    names = [f"S{number}" for number in range(1, len(limits) + 1)]

    def system(probe: Probe) -> Result:
        met = {
            name: num * (probe.rate_per_s <= limit)
            for name, limit in zip(names, limits, strict=True)
        }
        return Result(probe, num, met, num / probe.rate_per_s)

    return system


def independent(limit: float, steepness: float, num: int, name: str = "S") -> System:
    """Each request by itself meets it with a chance that falls from 1 to 0, through 0.9."""

    def system(probe: Probe) -> Result:
        chance = 1 / (1 + (probe.rate_per_s / limit) ** steepness / 9)
        rng = random.Random(f"{probe.seed}:{probe.rate_per_s}")
        met = sum(rng.random() < chance for _ in range(num))
        return Result(probe, num, {name: met}, num / probe.rate_per_s)

    return system


def one_server(service_s: float, limits_s: Mapping[str, float]) -> System:
    """M/D/1, which begins empty: one server, Poisson arrivals, latencies with limits."""

    def system(probe: Probe) -> Result:
        rng = random.Random(probe.seed)
        num = num_requests(probe.rate_per_s, DURATION_S, LEAST)
        at_s = free_s = 0.0
        met = dict.fromkeys(limits_s, 0)
        for _ in range(num):
            at_s += rng.expovariate(probe.rate_per_s)
            free_s = max(at_s, free_s) + service_s
            for name, limit_s in limits_s.items():
                met[name] += free_s - at_s <= limit_s
        return Result(probe, num, met, free_s)

    return system


# One objective ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.3, 1, 3.99, 4, 4.01, 17, 63, 255])
def test_a_sharp_limit_is_found_within_the_tolerance(limit: float) -> None:
    search = searched(plan("S1"), step(limit))
    found = search.found()["S1"]
    assert found.verdict == "found"
    assert found.kept is not None
    assert found.broken is not None
    assert found.kept <= limit < found.broken <= 1.0501 * found.kept
    # Doubled 6 times at most, then halved until a factor of 2 is one of 1.05; one seed is enough.
    assert len(search.results) <= 7 + 4
    assert found.notes == ()
    assert found.at_kept is not None
    assert found.at_kept.attainment == 1


def test_the_same_results_ask_for_the_same_runs() -> None:
    runs = [searched(plan(), independent(7, 20, 100)).results for _ in range(2)]
    assert runs[0] == runs[1]


def test_every_rate_is_run_with_the_same_seeds_in_the_same_order() -> None:
    search = searched(plan(first_seed=40, num_seeds=4), independent(7, 20, 60))
    for rate in search.rates():
        seeds = [each.probe.seed for each in search.results if each.probe.rate_per_s == rate]
        assert seeds == list(range(40, 40 + len(seeds)))
        assert len(seeds) <= 4


@pytest.mark.parametrize("steepness", [10, 40])
def test_the_rate_is_found_in_noise(steepness: float) -> None:
    """Half of the seeds within the tolerance or the noise, nearly all within twice as much."""
    ratios = []
    for seed in range(60):
        search = searched(plan(first_seed=100 * seed), independent(9, steepness, 200))
        kept = search.found()["S"].kept
        assert kept is not None
        ratios.append(kept / 9)
        assert len(search.results) <= 24
    # 600 requests have a standard error of 0.0122; the share falls by 0.09 x steepness per rate.
    allowed = 0.05 + 0.0122 / (0.09 * steepness)
    off = sorted(abs(ratio - 1) for ratio in ratios)
    assert off[30] <= allowed
    assert off[56] <= 2 * allowed


def test_the_rate_of_a_queue_is_found_as_well_as_its_runs_allow() -> None:
    """30 s of arrivals, three times: the queue itself is a matter of chance, some ±10 %."""
    true = 7.55  # of a long run: latency within 0.5 s for 90 %, by 10⁵ requests
    kept = []
    for seed in range(30):
        search = searched(plan(first_seed=10 * seed), one_server(0.1, {"S": 0.5}))
        found = search.found()["S"]
        assert found.kept is not None
        assert len(search.results) <= 20
        kept.append(found.kept / true)
    kept.sort()
    assert 0.97 < kept[15] < 1.05
    assert 0.8 < kept[1] < kept[28] < 1.2


def test_common_arrivals_compare_systems_better_than_either_is_known() -> None:
    """One is 10 % faster: with the same seeds, that is what comes out."""
    ratios = []
    for seed in range(20):
        rates = []
        for service_s in (0.1, 0.1 / 1.1):
            system = one_server(service_s, {"S": 5 * service_s})
            search = searched(plan(first_seed=10 * seed, tolerance=0.02), system)
            rates.append(search.found()["S"].kept or math.nan)
        ratios.append(rates[1] / rates[0])
    ratios.sort()
    assert 1.05 < ratios[10] < 1.15


# Limits -------------------------------------------------------------------------------------------


def test_what_never_fails_is_at_least_the_highest_rate() -> None:
    found = searched(plan("S1"), step(1e9)).found()["S1"]
    assert (found.verdict, found.kept, found.broken) == ("at least", 256, None)
    assert found.shown == "≥ 256"


def test_what_is_never_kept_is_below_the_lowest_rate() -> None:
    found = searched(plan("S1"), step(0.0)).found()["S1"]
    assert (found.verdict, found.kept, found.broken) == ("none", None, 0.25)
    assert found.shown == "< 0.25"
    assert found.best_goodput_per_s == 0


def test_runs_are_bounded() -> None:
    search = searched(plan("S1", max_probes=4), step(30))
    assert len(search.results) == 4
    found = search.found()["S1"]
    assert (found.verdict, found.kept, found.broken) == ("unfinished", 16, 32)
    assert Search(plan()).found()["S"].verdict == "unfinished"
    assert Search(plan()).found()["S"].shown == "–"


def saturated_client(system: System, most: float) -> System:
    """The client is too slow beyond a rate."""

    def both(probe: Probe) -> Result:
        late = () if probe.rate_per_s < most else ("late",)
        return replace(system(probe), invalid_because=late)

    return both


def test_a_client_that_is_the_bottleneck_ends_the_search_there() -> None:
    search = searched(plan("S1"), saturated_client(step(100), 20))
    found = search.found()["S1"]
    assert found.verdict == "client"
    assert found.kept is not None
    assert found.broken is None
    assert 16 <= found.kept < 20
    assert found.shown == f"≥ {found.kept:.4g}"
    invalid = [each.probe.rate_per_s for each in search.results if each.invalid_because]
    assert sorted(invalid) == sorted(2 * list(set(invalid)))  # each was given a second chance


def test_below_the_client_s_limit_the_search_goes_on() -> None:
    found = searched(plan("S1"), saturated_client(step(18), 30)).found()["S1"]
    assert found.verdict == "found"
    assert found.kept is not None
    assert 18 / 1.05 <= found.kept <= 18


def test_one_invalid_run_is_forgiven() -> None:
    seen: list[Probe] = []

    def once_late(probe: Probe) -> Result:
        seen.append(probe)
        return replace(step(18)(probe), invalid_because=("late",) if len(seen) == 2 else ())

    found = searched(plan("S1"), once_late).found()["S1"]
    assert found.verdict == "found"
    assert seen[1] == seen[2]


def test_a_client_that_is_always_the_bottleneck_tells_nothing() -> None:
    search = searched(plan("S1"), saturated_client(step(18), 0))
    found = search.found()["S1"]
    assert (found.verdict, found.kept, found.broken, found.shown) == ("client", None, None, "–")
    assert [each.probe.rate_per_s for each in search.results] == [4, 4, 2, 2, 1, 1]


def test_what_is_not_monotone_is_said() -> None:
    search = Search(plan("S1", "S2"))
    for rate, met in ((4, 100), (8, 0), (16, 100)):
        search.tell(Result(Probe(rate, 0), 100, {"S1": met, "S2": 100}, 10))
    found = search.found()
    assert (found["S1"].kept, found["S1"].broken) == (4, 8)
    (note,) = found["S1"].notes
    assert "S1 is kept at 16 requests/s but not at 8" in note
    assert found["S2"].notes == ()


def test_given_rates_are_all_run_with_all_seeds() -> None:
    search = Grid(plan("S1", num_seeds=2), rates_per_s=(2, 8, 4))
    asked = []
    while (probe := search.next_probe()) is not None:
        asked.append((probe.rate_per_s, probe.seed))
        search.tell(replace(step(5)(probe), invalid_because=("late",) if len(asked) == 1 else ()))
    assert asked == [(2, 0), (2, 1), (8, 0), (8, 1), (4, 0), (4, 1)]
    found = search.found()["S1"]
    assert (found.verdict, found.kept, found.broken) == ("grid", 4, 8)
    assert search.pooled("S1", 2) == Pooled(100, 100, 1, 50)
    assert Grid(plan("S1"), rates_per_s=(1,)).found()["S1"].verdict == "unfinished"


# Several objectives -------------------------------------------------------------------------------


def test_objectives_share_their_runs() -> None:
    limits = (3, 5, 9, 17, 33)
    together = searched(plan("S1", "S2", "S3", "S4", "S5"), step(*limits))
    for number, limit in enumerate(limits, 1):
        found = together.found()[f"S{number}"]
        assert found.verdict == "found"
        assert found.kept is not None
        assert limit / 1.0501 <= found.kept <= limit
    alone = sum(len(searched(plan("S1"), step(limit)).results) for limit in limits)
    assert len(together.results) <= 0.75 * alone


def test_objectives_that_a_queue_parts_are_ordered() -> None:
    limits_s = {"S1": 0.25, "S2": 0.5, "S3": 2.0}
    search = searched(plan(*limits_s), one_server(0.1, limits_s))
    kept = [found.kept or 0 for found in search.found().values()]
    assert kept == sorted(kept)
    assert 0 < kept[0] < kept[2] < 12
    assert len(search.results) <= 40


def test_the_best_goodput_may_be_beyond_the_rate_that_is_kept() -> None:
    """80 % of 8 is more than all of 5."""

    def system(probe: Probe) -> Result:
        met = 100 if probe.rate_per_s < 6 else 80 if probe.rate_per_s <= 8 else 0
        return Result(probe, 100, {"S": met}, 100 / probe.rate_per_s)

    found = searched(plan(), system).found()["S"]
    assert found.kept is not None
    assert found.kept < 6
    assert found.best_at == 8
    assert found.best_goodput_per_s == pytest.approx(6.4)


rates = st.floats(0.05, 500)


@settings(max_examples=40, deadline=None)
@given(
    limits=st.lists(rates, min_size=1, max_size=3).map(sorted),
    steepness=st.sampled_from([2.0, 8.0, 100.0]),
    tolerance=st.sampled_from([0.02, 0.05, 0.3]),
    num_seeds=st.integers(1, 4),
    lossy=st.booleans(),
)
def test_a_search_ends_and_keeps_its_word(
    limits: list[float], steepness: float, tolerance: float, num_seeds: int, lossy: bool
) -> None:
    names = tuple(f"S{number}" for number in range(len(limits)))

    def system(probe: Probe) -> Result:
        met: dict[str, int] = {}
        for name, limit in zip(names, limits, strict=True):
            met |= independent(limit, steepness, 50, name)(probe).num_met
        lost = lossy and random.Random(f"{probe}").random() < 0.1
        return Result(probe, 50, met, 50 / probe.rate_per_s, ("late",) if lost else ())

    asked = plan(*names, tolerance=tolerance, num_seeds=num_seeds, max_probes=1000)
    search = searched(asked, system)
    # 7 doublings or 5 halvings, and 7 bisections per objective at most; twice for what is lost.
    assert len(search.results) <= 2 * num_seeds * (12 + 7 * len(names))
    probes = [each.probe for each in search.results if not each.invalid_because]
    assert len(probes) == len(set(probes))
    assert all(asked.min_rate_per_s <= probe.rate_per_s <= 256 for probe in probes)
    for name, found in search.found().items():
        assert found.verdict != "unfinished"
        if found.verdict == "found":
            assert found.kept is not None
            assert found.broken is not None
            assert found.kept < found.broken <= (1 + tolerance) * found.kept * 1.0003
        if found.kept is not None:
            assert search.decided(name, found.kept)
        if found.broken is not None:
            assert search.decided(name, found.broken) is False


# Parts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_met", "num", "runs", "verdict"),
    [
        (100, 100, 1, True),
        (90, 100, 1, None),
        (95, 100, 2, None),
        (95, 100, 3, True),
        (270, 300, 3, True),
        (269, 300, 3, False),
        (79, 100, 1, False),
        (20, 20, 1, None),
    ],
)
def test_seeds_are_added_until_it_is_clear(
    num_met: int, num: int, runs: int, verdict: bool | None
) -> None:
    assert decided(plan(), Pooled(num_met, num, runs, 10)) is verdict


def test_wilson_intervals_are_those_of_the_literature() -> None:
    """Newcombe 1998, table I: 81 of 263 and 15 of 148, at 95 % of both sides."""
    assert wilson(81 / 263, 263, 1.96) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(15 / 148, 148, 1.96) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson(1.0, 0, 1.96) == (0.0, 1.0)


def test_a_run_of_the_least_duration_tells_an_overload() -> None:
    """Fed evenly at 1.05 times what it can do: just so long, and 90 % are within the limit."""
    limit_s, tolerance = 2.0, 0.05
    for factor, kept in ((0.9, True), (1.1, False)):
        num = int(10 * (1 + tolerance) * factor * least_duration_s(limit_s, tolerance))
        late = sum(
            (number + 1) / 10 - number / 10 / (1 + tolerance) > limit_s for number in range(num)
        )
        assert (1 - late / num >= 0.9) is kept


def test_a_run_is_as_long_as_asked_and_has_enough_requests() -> None:
    assert num_requests(0.5, 30, 100) == 100
    assert num_requests(10.01, 30, 100) == 301


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"start_rate_per_s": 0.1}, "0 < min rate <= start rate <= max rate does not hold"),
        ({"max_rate_per_s": math.inf}, "does not hold"),
        ({"wanted": 1.0}, "wanted must be between 0 and 1"),
        ({"tolerance": 0}, "tolerance must be between"),
        ({"confidence": 0.5}, "confidence must be between 0.5 and 1"),
        ({"num_seeds": 0}, "num_seeds must be 1 or more"),
        ({"slos": ()}, "no objective"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(over: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**over)


# A system -----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("system", ["easerve", "vllm"])
def test_the_simulator_s_systems_are_searched_as_servers_are(system: str) -> None:
    """A run five times as long keeps a rate a bit below what is found, and none a bit above."""
    scenario = scenarios.read(ROOT / "scenarios/llava-34b-rtx6000ada.yaml")
    slo, tolerance = Slo(ttft_s=6.0), 0.1
    duration_s = least_duration_s(6.0, tolerance)

    def run(probe: Probe, num: int) -> Result:
        at = scenario.at(rate_per_s=probe.rate_per_s, seed=probe.seed)
        workload = at.workload.model_copy(update={"num_requests": num})
        records = simulate(at.model_copy(update={"workload": workload}), system).records
        return Result(probe, num, {"S": sum(map(slo.met, records))}, 1.0)

    search = searched(
        Plan(("S",), 1.0, 0.05, 64.0, tolerance=tolerance),
        lambda probe: run(probe, num_requests(probe.rate_per_s, duration_s, 100)),
    )
    found = search.found()["S"]
    assert found.verdict == "found"
    assert found.kept is not None
    assert len(search.results) <= 20
    low, high = (
        run(Probe(factor * found.kept, 99), num_requests(found.kept, 5 * duration_s, 100))
        for factor in (0.8, 1.25)
    )
    assert low.num_met["S"] >= 0.9 * low.num_requests
    assert high.num_met["S"] < 0.9 * high.num_requests
