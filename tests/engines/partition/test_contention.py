import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest

from easerve.config import Policy
from easerve.engines.partition import sweep
from easerve.engines.partition.contention import (
    CASES,
    HOLD_NS,
    MIX,
    NOTICE_S,
    Row,
    Setting,
    Trace,
    compare,
    draw,
)
from easerve.engines.partition.sides import LEASE_NS, DriverError
from easerve.engines.partition.sweep import Runs
from easerve.policy.partition import Layout, Surface
from easerve.serve.admin import knobs_of
from easerve.types import NS_PER_S, Stage

MS = 1_000_000
ITEM_TOKENS = 10
FORWARD_S = {4: 0.02, 8: 0.01, 12: 0.008}
"""By units, of every batch, on a device of 16."""
WHOLE_S = 0.005


class Launched(NamedTuple):
    at_ns: int
    stage: Stage
    units: int
    preferred: bool


class Device:
    """Forwards last by their units, chunks 1 ms; neither minds the other."""

    name = "fake"
    source = "fake"
    levels: Sequence[int] = tuple(FORWARD_S)
    item_tokens = ITEM_TOKENS

    def __init__(self) -> None:
        self.layout = Layout(16, 4)
        self.launched: list[Launched] = []
        self.refuses = False
        self._now_ns = 0
        self._units = dict.fromkeys(Stage, 0)
        self._ends_ns: dict[Stage, int] = {}
        self._preferred = False

    def close(self) -> None:
        pass

    def now_ns(self) -> int:
        return self._now_ns

    def confine(self, stage: Stage, units: int) -> None:
        if self.refuses and units:
            raise DriverError("refused")
        self._units[stage] = units

    def prefer_encode(self, preferred: bool) -> None:
        self._preferred = preferred

    def encode(self, batch: int) -> Callable[[], bool]:
        units = self._units[Stage.ENCODE]
        return self._launch(Stage.ENCODE, FORWARD_S[units] if units else WHOLE_S)

    def prefill(self, chunks: int) -> Callable[[], bool]:
        return self._launch(Stage.PREFILL, chunks * 0.001)

    def wait(self, seconds: float) -> None:
        ends_ns = [end_ns for end_ns in self._ends_ns.values() if end_ns > self._now_ns]
        self._now_ns = min([self._now_ns + round(seconds * NS_PER_S), *ends_ns])

    def _launch(self, stage: Stage, seconds: float) -> Callable[[], bool]:
        assert self._ends_ns.get(stage, 0) <= self._now_ns, "one at a time"
        end_ns = self._ends_ns[stage] = self._now_ns + round(seconds * NS_PER_S)
        launched = Launched(self._now_ns, stage, self._units[stage], self._preferred)
        self.launched.append(launched)
        return lambda: self._now_ns >= end_ns

    def units(self, stage: Stage) -> list[tuple[int, int]]:
        """Of what was launched: when, in ms, and on how many units."""
        return [(each.at_ns // MS, each.units) for each in self.launched if each.stage is stage]


def setting(steps: dict[str, int] | None = None) -> Setting:
    rows = tuple((batch, tuple(FORWARD_S.items())) for batch in MIX)
    knobs = dataclasses.replace(knobs_of(Policy()), encode_target_s=0.012)
    return Setting(
        Surface(ITEM_TOKENS, rows), dict.fromkeys(MIX, WHOLE_S), knobs, steps or {"fine": 2}
    )


def trace(*ready_ms: int, notice_ms: int = 4, duration_ms: int = 100) -> Trace:
    arrivals = tuple((each * MS, 1) for each in ready_ms)
    return Trace(arrivals, notice_ms * MS, duration_ms * MS)


def run(case: str, given: Trace, chunks: int = 2) -> tuple[Row, Device]:
    """One case, on a device of its own, which nothing ran on before but prefill alone."""
    (chosen,) = [each for each in CASES if each.name == case]
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("easerve.engines.partition.contention.CASES", (chosen,))
        (row,) = compare(device, setting({"fine": chunks}), given, lambda _: None)
    return row, device


def test_prefill_alone_has_everything_all_the_time() -> None:
    row, device = run("alone", trace(10))
    assert (row.encodes, row.p95_ms, row.in_target, row.late) == (0, None, None, None)
    assert row.prefill_per_s == pytest.approx(1000)
    assert {units for _, units in device.units(Stage.PREFILL)} == {0}


def test_dynamic_gives_the_units_of_the_table_from_the_notice_to_the_end() -> None:
    row, device = run("dynamic", trace(50))
    assert device.units(Stage.ENCODE) == [(50, 8)]
    narrow = [at for at, units in device.units(Stage.PREFILL) if units == 8]
    assert narrow == list(range(46, 60, 2))
    assert (row.encodes, row.late, row.p50_ms) == (1, 0, 10)
    assert (row.in_target, row.forwards_in_target) == (1, 1)
    assert (row.p50_x_alone, row.latencies_ms) == (2, (10.0,))


def test_hold_keeps_prefill_narrow_for_a_while() -> None:
    device = run("dynamic+hold", trace(50))[1]
    narrow = [at for at, units in device.units(Stage.PREFILL) if units]
    last_demand = 58
    assert narrow[0] == 46
    assert narrow[-1] * MS == pytest.approx(last_demand * MS + HOLD_NS, abs=2 * MS)


def test_batches_wait_for_one_another_and_that_counts() -> None:
    row = run("dynamic", trace(50, 51))[0]
    assert list(row.latencies_ms) == [10, 19]
    assert (row.in_target, row.forwards_in_target) == (0.5, 1)


def test_a_step_that_began_before_the_announcement_makes_the_encode_late() -> None:
    row, device = run("dynamic", trace(50, notice_ms=0), chunks=20)
    assert row.late == 1
    assert device.units(Stage.PREFILL)[:4] == [(0, 0), (20, 0), (40, 0), (60, 0)]


def test_a_gate_stops_prefill_until_the_encode_is_done() -> None:
    row, device = run("gate", trace(50))
    assert device.units(Stage.ENCODE) == [(50, 0)]
    assert list(row.latencies_ms) == [5]
    begins = [at for at, _ in device.units(Stage.PREFILL)]
    assert not [at for at in begins if 46 <= at < 55]
    assert row.prefill_per_s == pytest.approx(910, abs=20)


def test_a_static_split_stands_between_encodes() -> None:
    device = run("static, half", trace(50))[1]
    assert {units for _, units in device.units(Stage.PREFILL)} == {8}
    assert device.units(Stage.ENCODE) == [(50, 8)]


def test_the_other_static_split_has_the_most_units_of_the_table() -> None:
    assert run("static, most", trace(50))[1].units(Stage.ENCODE) == [(50, 8)]


def test_priority_and_none_share_everything() -> None:
    for case, preferred in (("priority", True), ("none", False)):
        device = run(case, trace(50))[1]
        assert {(each.units, each.preferred) for each in device.launched} == {(0, preferred)}


def test_announcements_are_renewed_while_a_batch_waits() -> None:
    """For longer than a lease."""
    lease_ms = LEASE_NS // MS
    device = run("dynamic", trace(2 * lease_ms, notice_ms=2 * lease_ms, duration_ms=1100))[1]
    assert {units for at, units in device.units(Stage.PREFILL) if at <= 2 * lease_ms} == {8}


def test_all_cases_run_on_one_device_and_shares_are_of_prefill_alone() -> None:
    ticks: list[str] = []
    steps = {"fine": 2, "coarse": 8}
    rows = list(compare(Device(), setting(steps), trace(20, 50), ticks.append))
    assert [(row.case, row.step) for row in rows] == [
        (case.name, step) for step in steps for case in CASES
    ]
    assert len(ticks) == len(rows)
    for row in rows:
        if row.case == "alone":
            alone_per_s = row.prefill_per_s
        assert row.prefill_share == row.prefill_per_s / alone_per_s


def test_a_driver_that_fails_ends_the_run() -> None:
    device = Device()
    device.refuses = True
    with pytest.raises(DriverError, match="refused"):
        list(compare(device, setting(), trace(50), lambda _: None))


def test_the_load_is_what_the_table_makes_of_the_mix() -> None:
    drawn = draw(setting(), random.Random(0), 100.0, load=0.4)
    assert len(drawn.arrivals) == pytest.approx(0.4 * 100.0 / FORWARD_S[8], rel=0.05)
    times = [at_ns for at_ns, _ in drawn.arrivals]
    assert times == sorted(times)
    assert times[0] >= NOTICE_S * NS_PER_S
    assert {batch for _, batch in drawn.arrivals} == set(MIX)
    assert draw(setting(), random.Random(0), 100.0, load=0.4) == drawn


def test_a_sweep_runs_every_cell_and_beside_prefill_what_is_not_too_long() -> None:
    device = Device()
    runs = list(sweep.sweep(device, (1, 2), chunks=2, most_s=0.015, num_runs=4))
    alone = [(each.batch, each.units) for each in runs if not each.beside]
    assert alone == [(batch, units) for batch in (1, 2) for units in (0, 4, 8, 12)]
    beside = [(each.batch, each.units) for each in runs if each.beside]
    assert beside == [(batch, units) for batch in (1, 2) for units in (8, 12)]
    for each in runs:
        assert each.seconds == (FORWARD_S[each.units] if each.units else WHOLE_S,) * 4


def test_prefill_is_busy_on_the_other_units_in_a_sweep() -> None:
    device = Device()
    list(sweep.sweep(device, (1,), chunks=2, most_s=0.009, num_runs=4))
    prefills = device.units(Stage.PREFILL)
    assert {units for _, units in prefills} == {12}
    gaps = {later - at for (at, _), (later, _) in pairwise(prefills)}
    assert gaps == {2}


def test_the_surface_is_the_p95_beside_prefill_where_there_is_one() -> None:
    seconds = tuple(map(float, range(1, 21)))
    runs = [
        Runs(1, 0, False, seconds),
        Runs(1, 8, False, seconds),
        Runs(1, 4, False, (50.0,)),
        Runs(1, 8, True, tuple(2 * each for each in seconds)),
    ]
    assert sweep.surface(runs, ITEM_TOKENS).rows == ((1, ((4, 50.0), (8, 38.0))),)
    assert sweep.alone_s(runs) == {1: 10.0}
