"""How in the core: what each call to an encoder demands of its device, and what stands between."""

from dataclasses import replace
from typing import Any

import pytest

from easerve.policy import events as ev
from easerve.policy.partition import ALL, HALF, SHARED, Demand, Devices
from easerve.types import RequestId

from .scenario import (
    D0,
    E0,
    E1,
    L0,
    NONE,
    P0,
    PAIRS,
    SURFACE,
    R,
    S,
    Scenario,
    T,
    batches,
    finished,
    for_good,
    item,
    joined,
)

U = RequestId("u")
PROFILED, UNPROFILED = Devices(SURFACE), Devices()
STATIC = Demand(HALF, True, "static")


def divided(devices: Devices | None = PROFILED, **knobs: Any) -> Scenario:
    return Scenario(E0, P0, L0, D0, knobs=replace(NONE, **knobs), devices=devices)


def demands(actions: list[ev.Action]) -> list[Demand]:
    return [batch.demand for batch in batches(actions)]


def divides(actions: list[ev.Action]) -> list[ev.Divide]:
    return [action for action in actions if isinstance(action, ev.Divide)]


@pytest.mark.parametrize(
    ("devices", "knobs", "demand"),
    [
        (PROFILED, {}, Demand(8, False, "table, batch 1")),
        (PROFILED, {"encode_target_s": 0.015}, Demand(16, False, "table, batch 1")),
        (PROFILED, {"encode_target_s": 0.001}, Demand(16, False, "over target, batch 1")),
        (UNPROFILED, {}, Demand(HALF, False, "no profile")),
        (UNPROFILED, {"how": "static"}, STATIC),
        (UNPROFILED, {"how": "static", "encode_units": 3}, Demand(3, True, "static")),
        (PROFILED, {"how": "gate"}, Demand(ALL, False, "gate")),
        (PROFILED, {"how": "none"}, SHARED),
        *((None, {"how": how}, SHARED) for how in ("dynamic", "static", "gate", "none")),
    ],
    ids=str,
)
def test_a_batch_demands_what_the_rule_says(
    devices: Devices | None, knobs: dict[str, Any], demand: Demand
) -> None:
    assert demands(divided(devices, **knobs).start(num_items=1)) == [demand]


def test_a_larger_batch_demands_more() -> None:
    pairs = Scenario(knobs=PAIRS, devices=PROFILED)
    assert demands(pairs.start(num_items=2)) == [Demand(16, False, "over target, batch 2")]


def test_what_is_at_the_encoder_already_counts_until_it_is_encoded() -> None:
    scenario = divided(encode_target_s=0.04)
    assert demands(scenario.start(R, num_items=1)) == [Demand(8, False, "table, batch 1")]
    assert demands(scenario.start(S, num_items=1)) == [Demand(16, False, "table, batch 2")]
    scenario.tell(finished(1))
    assert demands(scenario.start(T, num_items=1)) == [Demand(16, False, "table, batch 2")]
    scenario.tell(finished(2), finished(3))
    assert demands(scenario.start(U, num_items=1)) == [Demand(8, False, "table, batch 1")]


def test_what_is_at_another_encoder_does_not_count() -> None:
    scenario = Scenario(E0, E1, P0, D0, devices=PROFILED)
    assert demands(scenario.start(num_items=2)) == [Demand(8, False, "table, batch 1")] * 2


def test_what_is_encoded_in_parts_after_a_failure_demands_less() -> None:
    pairs = Scenario(knobs=PAIRS, devices=PROFILED)
    pairs.start(num_items=2)
    assert demands(pairs.tell(for_good(1))) == [Demand(8, False, "table, batch 1")]


@pytest.mark.parametrize(
    ("how", "stands"),
    [("dynamic", SHARED), ("gate", SHARED), ("none", SHARED), ("static", STATIC)],
)
def test_what_is_sent_again_leaves_what_stands(how: str, stands: Demand) -> None:
    scenario = divided(how=how)
    assert scenario.start(num_items=1)
    scenario.tell(finished(1))
    missing = ev.EmbeddingMissing(R, 0, 0, (item(R, 0).key,))
    (sent,) = batches(scenario.tell(missing))
    assert (sent.forward, sent.demand) == (False, stands)


# Between batches ----------------------------------------------------------------------------------


def test_an_encoder_that_joins_is_told_what_stands() -> None:
    scenario = divided(how="static")
    assert divides(scenario.tell(joined(E1))) == [ev.Divide(E1, STATIC)]
    assert divides(scenario.tell(joined(E1))) == [ev.Divide(E1, STATIC)], "it has lost what it had"
    assert divides(scenario.tell(joined(P0), joined(D0), joined(L0))) == []


@pytest.mark.parametrize("how", ["dynamic", "none", "gate"])
def test_an_encoder_is_told_nothing_where_nothing_stands(how: str) -> None:
    assert divides(divided(how=how).tell(joined(E1))) == []


def test_all_encoders_are_told_what_stands_from_now_on() -> None:
    scenario = Scenario(E0, E1, P0, D0, devices=UNPROFILED)
    assert divides(scenario.tune(how="static")) == [ev.Divide(E0, STATIC), ev.Divide(E1, STATIC)]
    assert divides(scenario.tune(how="static", encode_target_s=1.0)) == []
    four = Demand(4, True, "static")
    assert divides(scenario.tune(encode_units=4)) == [ev.Divide(E0, four), ev.Divide(E1, four)]
    assert divides(scenario.tune(how="gate")) == [ev.Divide(E0, SHARED), ev.Divide(E1, SHARED)]
    for how in ("none", "dynamic"):
        assert divides(scenario.tune(how=how, encode_units=2)) == []


def test_the_next_batch_goes_by_the_new_rule() -> None:
    scenario = divided()
    scenario.start(R, num_items=1)
    assert divides(scenario.tune(how="static")) == [ev.Divide(E0, STATIC)]
    scenario.tell(finished(1))
    assert demands(scenario.start(S, num_items=1)) == [STATIC]
    scenario.tell(finished(2))
    scenario.tune(how="dynamic", encode_target_s=0.01)
    assert demands(scenario.start(T, num_items=1)) == [Demand(16, False, "table, batch 1")]


def test_devices_that_are_not_divided_are_told_nothing() -> None:
    scenario = divided(None, how="static")
    assert divides(scenario.tell(joined(E1))) == []
    assert divides(scenario.tune(encode_units=1)) == []
