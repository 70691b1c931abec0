from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.policy.partition import (
    ALL,
    HALF,
    MAX_UNITS,
    RULES,
    SHARED,
    Demand,
    Devices,
    Gate,
    Hold,
    Indivisible,
    Layout,
    Levels,
    MinUnits,
    Partition,
    Row,
    Surface,
)

from .scenario import DEFAULTS

TARGET_S = 0.025
SURFACE = Surface(
    item_tokens=100,
    rows=(
        (1, ((8, 0.020), (16, 0.012), (32, 0.010))),
        (2, ((8, 0.040), (16, 0.024), (32, 0.018))),
        (8, ((8, 0.160), (16, 0.090), (32, 0.060))),
    ),
)


def fewest(*latencies: tuple[int, float]) -> tuple[int, bool]:
    (row,) = MinUnits(Surface(1, ((1, latencies),)), TARGET_S).rows
    return row.units, row.met


# The table ----------------------------------------------------------------------------------------


def test_a_batch_gets_the_fewest_units_that_meet_the_target() -> None:
    table = MinUnits(SURFACE, TARGET_S)
    assert table.rows == [Row(1, 8, True), Row(2, 16, True), Row(8, 32, False)]


def test_the_target_itself_is_met() -> None:
    assert fewest((8, TARGET_S), (16, 0.01)) == (8, True)


def test_a_plateau_is_taken_from_its_near_end() -> None:
    assert fewest((8, 0.03), (16, 0.02), (24, 0.02), (32, 0.02)) == (16, True)


def test_fewer_units_do_not_do_if_more_miss_the_target() -> None:
    assert fewest((8, 0.020), (16, 0.026), (24, 0.024), (32, 0.02)) == (24, True)
    assert fewest((8, 0.020), (16, 0.026)) == (16, False), "not even the most"


def test_more_items_never_get_fewer_units() -> None:
    noisy = Surface(1, ((1, ((8, 0.03), (16, 0.02))), (2, ((8, 0.02), (16, 0.02)))))
    assert [row.units for row in MinUnits(noisy, TARGET_S).rows] == [16, 16]


@pytest.mark.parametrize(
    ("num_tokens", "batch"), [(0, 1), (1, 1), (100, 1), (101, 2), (201, 8), (800, 8), (9999, 8)]
)
def test_a_batch_that_was_not_measured_goes_by_the_next_larger(num_tokens: int, batch: int) -> None:
    assert MinUnits(SURFACE, TARGET_S).row(num_tokens).batch == batch


@settings(max_examples=50)
@given(
    latencies=st.lists(
        st.lists(st.floats(0.001, 0.1), min_size=4, max_size=4), min_size=1, max_size=6
    ),
    target_s=st.floats(0.001, 0.1),
)
def test_tables_are_monotone_and_hold_what_they_promise(
    latencies: list[list[float]], target_s: float
) -> None:
    levels = (8, 16, 24, 32)
    rows = tuple((2**at, tuple(zip(levels, row, strict=True))) for at, row in enumerate(latencies))
    table = MinUnits(Surface(1, rows), target_s)
    units = [row.units for row in table.rows]
    assert units == sorted(units)
    for row, (batch, measured) in zip(table.rows, rows, strict=True):
        assert row.batch == batch
        met_from = [k for k, _ in measured if all(s <= target_s for j, s in measured if j >= k)]
        assert row.met == bool(met_from)
        assert row.units >= min(met_from, default=32)
        assert table.row(batch) == row


# The rules ----------------------------------------------------------------------------------------


def partition(how: str, surface: Surface | None = SURFACE, **changes: Any) -> Partition:
    knobs = replace(DEFAULTS, how=how, encode_target_s=TARGET_S, **changes)
    return Partition(knobs, Devices(surface))


def test_dynamic_asks_for_what_the_table_says() -> None:
    rule = partition("dynamic")
    assert rule.demand(150) == Demand(16, False, "table, batch 2")
    assert rule.demand(900) == Demand(32, False, "over target, batch 8")
    assert rule.standing == SHARED


def test_dynamic_without_a_profile_asks_for_half() -> None:
    rule = partition("dynamic", surface=None)
    assert rule.table is None
    assert rule.demand(150) == Demand(HALF, False, "no profile")


@pytest.mark.parametrize(("units", "demanded"), [(None, HALF), (24, 24)])
def test_static_stands_between_batches(units: int | None, demanded: int) -> None:
    rule = partition("static", encode_units=units)
    assert rule.demand(150) == rule.standing == Demand(demanded, True, "static")


def test_gate_asks_for_everything_and_none_for_nothing() -> None:
    assert partition("gate").demand(150) == Demand(ALL, False, "gate")
    assert partition("none").demand(150) == SHARED
    assert partition("gate").standing == partition("none").standing == SHARED


@pytest.mark.parametrize("how", RULES)
def test_devices_that_are_not_divided_are_shared_whatever_the_rule(how: str) -> None:
    rule = Partition(replace(DEFAULTS, how=how), None)
    assert rule.demand(150) == rule.standing == SHARED


def test_another_target_makes_another_table() -> None:
    rule = partition("dynamic")
    rule.retune(replace(DEFAULTS, how="dynamic", encode_target_s=0.1))
    assert rule.demand(800) == Demand(16, False, "table, batch 8")


def test_every_rule_can_be_asked() -> None:
    assert {how: partition(how).demand(100).units for how in RULES} == {
        "dynamic": 8,
        "static": HALF,
        "gate": ALL,
        "none": 0,
    }


# The layout ---------------------------------------------------------------------------------------

GPU = Layout(132, granule=8, min_prefill=16)


@pytest.mark.parametrize(
    ("demanded", "units"),
    [(0, 0), (1, 8), (8, 8), (9, 16), (112, 112), (113, 112), (HALF, 64), (ALL, 132)],
)
def test_a_demand_comes_to_whole_granules(demanded: int, units: int) -> None:
    assert GPU.round(demanded) == units


@pytest.mark.parametrize(
    ("layout", "parts", "half"),
    [
        (GPU, tuple(range(8, 113, 8)), 64),
        (Layout(132, 8, 1), tuple(range(8, 129, 8)), 64),
        (Layout(132, 8, 80), (8, 16, 24, 32, 40, 48), 48),
        (Layout(2), (1,), 1),
        (Layout(5), (1, 2, 3, 4), 2),
        (Layout(8, 1, 0), (1, 2, 3, 4, 5, 6, 7), 4),
        (Levels(132, 8, 1, (8, 24, 40, 72, 120)), (8, 24, 40, 72, 120), 72),
        (Layout(1), (), 0),
        (Layout(8, 8, 8), (), 0),
        (Layout(4, 1, 9), (), 0),
        (Levels(132), (), 0),
        (Indivisible(132, 8), (), 0),
    ],
)
def test_parts_leave_prefill_what_it_keeps(
    layout: Layout, parts: tuple[int, ...], half: int
) -> None:
    assert layout.parts == parts
    most = max(parts, default=0)
    for units in range(1, layout.total + 1):
        assert layout.round(units) == min((each for each in parts if each >= units), default=most)
    special = {units: layout.round(units) for units in (0, HALF, ALL)}
    assert special == {0: 0, HALF: half, ALL: layout.total}


def test_a_gate_closes_for_any_demand() -> None:
    assert [Gate(4).round(units) for units in (0, 1, HALF, ALL)] == [0, 4, 4, 4]
    assert Gate(4).parts == ()


@settings(max_examples=50)
@given(
    total=st.integers(1, 300),
    granule=st.integers(1, 16),
    min_prefill=st.integers(0, 64),
    demands=st.lists(st.integers(0, HALF - 1), min_size=2, max_size=2),
)
def test_parts_nest_and_leave_prefill_its_least(
    total: int, granule: int, min_prefill: int, demands: list[int]
) -> None:
    layout = Layout(total, granule, min_prefill)
    most = max(layout.parts, default=0)
    less, more = map(layout.round, sorted(demands))
    assert 0 <= less <= more <= most <= layout.round(ALL)
    assert less % granule == 0
    assert less >= min(min(demands), most)
    assert not more or total - more >= max(1, min_prefill)


def test_meanings_of_their_own_are_beyond_any_device() -> None:
    assert MAX_UNITS == ALL > HALF > 1000


# The hold -----------------------------------------------------------------------------------------


def test_units_are_given_up_at_once_and_taken_back_after_the_hold() -> None:
    hold = Hold(100)
    assert [hold.leave(*each) for each in [(8, 0), (24, 10), (8, 20), (0, 109)]] == [8, 24, 24, 24]
    assert hold.leave(8, 110) == 8, "a hold after the last of the larger demand"
    assert hold.leave(0, 209) == 8
    assert hold.leave(0, 210) == 0


def test_a_demand_that_lasts_renews_the_hold() -> None:
    hold = Hold(100)
    assert [hold.leave(24, now) for now in (0, 90, 180)] == [24, 24, 24]
    assert [hold.leave(0, now) for now in (279, 280)] == [24, 0]


def test_without_a_hold_units_are_taken_back_at_once() -> None:
    hold = Hold(0)
    assert [hold.leave(units, 0) for units in (24, 8, 0)] == [24, 8, 0]


@settings(max_examples=50)
@given(
    hold_ns=st.integers(0, 50),
    demands=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=50),
)
def test_a_hold_never_leaves_less_than_is_demanded_nor_more_than_was(
    hold_ns: int, demands: list[tuple[int, int]]
) -> None:
    hold, now_ns, past = Hold(hold_ns), 0, list[tuple[int, int]]()
    for units, gap_ns in demands:
        now_ns += gap_ns
        past.append((now_ns, units))
        leaves = hold.leave(units, now_ns)
        assert leaves >= units
        assert leaves in [units, *(each for at, each in past if now_ns < at + hold_ns)]
