"""The pruning, and the configurations to begin with, on hand-made stages and on simulated truth."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.goodput import Slo
from easerve.search.bottleneck import Lacking, Site
from easerve.search.capacity import Row, Table
from easerve.search.modelled import capacities
from easerve.search.pruning import BATCH, SLOTS, Pruning, prune, starts
from easerve.search.space import SHARE, Allocation, Knob, Space
from easerve.search.spaces import space as named
from easerve.sim.scenario import read
from easerve.types import Stage
from tests.sim.scenarios import ROOT, SCENARIOS

E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE
TRUTH: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads(
    (ROOT / "docs" / "search-suite.json").read_text()
)
TIER, MAX_ITEMS = "S3", 8
"""Of the truth."""
ROWS = (
    Row(E, 1, 1, 10.0, 0.1),
    Row(E, 1, 4, 15.0, 0.25),
    Row(E, 1, 16, 15.2, 1.0),
    Row(P, 1, 1, 1.0, 1.0),
    Row(D, 1, 16, 1.5, 0.05),
    Row(D, 1, 64, 4.0, 0.08),
)
SITE = Site(Table(ROWS), Slo(ttft_s=4.0, tpot_s=0.07))
SHARES = tuple(step / 20 for step in range(1, 21))
KNOBS = (Knob(BATCH, (1, 2, 4, 8, 16, 32)), Knob(SHARE, SHARES))


def allocation(encoders: int, prefills: int, decodes: int, local: bool = True) -> Allocation:
    counts = {"encode": encoders, "prefill": prefills, "decode": decodes}
    return Allocation(
        f"e{encoders}-p1x{prefills}-d1x{decodes}",
        {f"{stage}.replicas": count for stage, count in counts.items()},
        {"local_prefill": {}, "partition": {}} if local else None,
    )


def pruned(*allocations: Allocation, site: Site = SITE, **how: Any) -> Pruning:
    return prune(Space(allocations, KNOBS), site, **how)


def test_the_slowest_stage_decides_and_is_named() -> None:
    """Decode does 1.5 + 2.5 x 2 / 3 per engine, two thirds of the way from 50 to 80 ms."""
    found = pruned(allocation(3, 3, 2), allocation(1, 1, 6), allocation(1, 6, 1))
    assert [each.allocation for each in found.kept] == ["e3-p1x3-d1x2"]
    assert {each.allocation: each.why for each in found.pruned} == {
        "e1-p1x6-d1x1": "decode 3.17/s is the bottleneck, best is 5.45/s",
        "e1-p1x1-d1x6": "prefill 1.82/s is the bottleneck, best is 5.45/s",
    }


def test_no_more_are_kept_than_asked_for() -> None:
    same = [replace(allocation(2, 4, 1), name=f"a{number}") for number in range(5)]
    found = pruned(*same)
    assert [each.allocation for each in found.kept] == ["a0", "a1", "a2"]
    why = "decode 3.17/s is the bottleneck, 3 others do as much or more"
    assert [each.why for each in found.pruned] == [why, why]
    assert len(pruned(*same, max_kept=5).kept) == 5


def test_where_the_slowest_are_alike_the_next_stage_decides() -> None:
    found = pruned(allocation(1, 3, 1), allocation(1, 6, 1), max_kept=1)
    assert [each.allocation for each in found.kept] == ["e1-p1x6-d1x1"]


def test_where_all_share_the_cores_more_engines_are_no_better() -> None:
    few, many = allocation(1, 1, 1), allocation(2, 2, 2)
    found = pruned(few, many, site=replace(SITE, cores=0.5), max_kept=1)
    assert [each.allocation for each in found.kept] == [few.name]
    assert found.pruned[0].why.startswith("machine 0.36")


def test_one_that_cannot_keep_the_promise_is_never_kept() -> None:
    found = pruned(allocation(1, 1, 1), site=replace(SITE, slo=Slo(tpot_s=0.01)))
    assert not found.kept
    assert found.pruned[0].why == "decode on 1: no step is as short as the TPOT promise"


COUNTS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.booleans())


@settings(max_examples=20)
@given(st.sets(COUNTS, min_size=1, max_size=4), st.integers(1, 4), st.floats(0, 0.5))
def test_each_is_kept_or_pruned_and_the_best_is_kept(
    counts: set[tuple[int, int, int, bool]], max_kept: int, tolerance: float
) -> None:
    every = [
        replace(allocation(*each), name=str(number)) for number, each in enumerate(sorted(counts))
    ]
    found = pruned(*every, max_kept=max_kept, tolerance=tolerance)
    names = [each.allocation for each in found.kept] + [each.allocation for each in found.pruned]
    assert sorted(names) == sorted(each.name for each in every)
    assert 1 <= len(found.kept) <= max_kept
    best = max(pruned(each).kept[0].per_s for each in every)
    assert found.kept[0].per_s == best
    assert all(each.per_s >= (1 - tolerance) * best for each in found.kept)


def in_order(found: Allocation, *knobs: Knob, site: Site = SITE, **how: Any) -> list[Any]:
    space = Space([found], knobs or KNOBS)
    begun = starts(found, space, site, **how)
    assert len({*begun}) == len(begun)
    assert {*begun} <= {*space}
    return [tuple(dict(each.values).values()) for each in begun]


def test_the_balanced_share_comes_first() -> None:
    """Batches of 4 do as much as any."""
    assert in_order(allocation(2, 2, 3))[0] == (4, 0.55)


def test_as_much_remote_as_costs_nothing_is_tried() -> None:
    """Decode does 3.17 per second: 4 remote engines could do all of it."""
    begun = in_order(allocation(2, 4, 1))
    assert begun == [(4, 0.7), (4, 1.0)]


def test_without_offload_all_is_remote() -> None:
    assert in_order(allocation(2, 2, 3, local=False)) == [(4, 1.0)]


def test_calls_that_take_too_long_for_the_promise_are_not_tried() -> None:
    site = replace(SITE, slo=Slo(ttft_s=1.6))
    assert {batch for batch, _ in in_order(allocation(2, 2, 3), site=site)} == {4}


def test_other_knobs_are_as_the_file_has_them_or_by_default() -> None:
    knobs = [
        *KNOBS,
        Knob("policy.when", ("gap", "slack")),
        Knob("policy.gap_k", (0.25, 0.5), ("policy.when", ("gap",))),
        Knob("policy.where", ("deficit", "band")),
    ]
    found = allocation(2, 2, 3)
    assert in_order(found, *knobs)[0] == (4, 0.55, "slack", "deficit")
    said = {"policy.when": "gap", "policy.where": "jsq"}
    assert in_order(found, *knobs, given=said)[0] == (4, 0.55, "gap", 0.25, "deficit")


@pytest.mark.parametrize(("tpot_s", "slots"), [(0.07, 32), (None, 128), (0.051, 32)])
def test_decode_slots_keep_the_promise(tpot_s: float | None, slots: int) -> None:
    site = replace(SITE, slo=Slo(ttft_s=4.0, tpot_s=tpot_s))
    knobs = [Knob(SLOTS, (32, 64, 128)), Knob(SHARE, (1.0,))]
    assert in_order(allocation(1, 1, 1), *knobs, site=site)[0] == (slots, 1.0)


def test_a_space_without_the_usual_knobs_has_a_start() -> None:
    assert in_order(allocation(1, 1, 1), Knob("policy.when", ("slack",))) == [("slack",)]


def test_what_cannot_serve_has_no_start() -> None:
    with pytest.raises(Lacking):
        in_order(allocation(1, 1, 1), site=replace(SITE, slo=Slo(ttft_s=0.5)))


@cache
def site(scenario: str) -> Site:
    found = read(SCENARIOS / f"{scenario}.yaml")
    tps = (1, 2, 4) if "a100" in scenario else (2, 4)
    return Site(capacities(found, tps), found.slo.slos()[TIER])


def simulated(scenario: str, shares: tuple[float, ...] | None = None) -> Space:
    """The allocations whose truth is known; ``shares`` None: those that it is known of."""
    every = TRUTH[scenario].values()
    grid = shares or tuple(map(float, next(iter(every))["goodput_per_s"]))
    allocations = [Allocation(each["name"], each["changes"], each["offload"]) for each in every]
    return Space(allocations, [Knob(SHARE, grid), Knob(BATCH, (MAX_ITEMS,))])


def truth(scenario: str, allocation: str) -> Mapping[float, float]:
    """Goodput by remote share."""
    found = TRUTH[scenario][allocation]["goodput_per_s"]
    return {float(share): per_s for share, per_s in found.items()}


@pytest.mark.parametrize("grid", [None, SHARES], ids=["same shares", "finer shares"])
@pytest.mark.parametrize("scenario", TRUTH)
def test_one_within_2_percent_of_the_best_is_kept(
    scenario: str, grid: tuple[float, ...] | None
) -> None:
    found = prune(simulated(scenario, grid), site(scenario))
    best = max(max(truth(scenario, name).values()) for name in TRUTH[scenario])
    kept = {each.allocation: max(truth(scenario, each.allocation).values()) for each in found.kept}
    assert max(kept.values()) >= 0.98 * best
    assert len(kept) <= 3


@pytest.mark.parametrize("scenario", TRUTH)
def test_the_starts_of_what_is_kept_come_near_the_best(scenario: str) -> None:
    """Of the shares whose truth is known one is within 3 % of the best."""
    space, here = simulated(scenario), site(scenario)
    best = max(max(truth(scenario, name).values()) for name in TRUTH[scenario])
    begun = [
        truth(scenario, each.allocation)[float(str(start[SHARE]))]
        for each in prune(space, here).kept
        for start in starts(_named(space, each.allocation), space, here)
    ]
    assert max(begun) >= 0.97 * best


def _named(space: Space, name: str) -> Allocation:
    return next(each for each in space.allocations if each.name == name)


def test_the_named_spaces_have_starts() -> None:
    scenario = "llava-34b-rtx6000ada"
    allocations = simulated(scenario).allocations
    for name in ("paper", "full"):
        space = named(name, allocations, {})
        for each in allocations:
            begun = starts(each, space, site(scenario))
            assert 1 <= len(begun) <= 2
            assert {start.allocation for start in begun} == {each.name}


def test_the_stored_truth_is_of_the_suite() -> None:
    assert {*TRUTH} == {
        f"{model}-{machine}"
        for model in ("llava-34b", "qwen2.5-vl-32b", "ultravox-27b")
        for machine in ("rtx6000ada", "a100")
    }
    assert all(len(of) >= 5 for of in TRUTH.values())
    assert Path(SCENARIOS / "llava-34b-a100.yaml").exists()
