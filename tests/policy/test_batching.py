from dataclasses import replace
from math import exp
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.config import Policy
from easerve.policy.batching import (
    HARD_TIMEOUT_NS,
    RULES,
    Fill,
    Fixed,
    Gap,
    Greedy,
    Hold,
    PassThrough,
    Rule,
    Slack,
    View,
    decide,
)
from easerve.types import NS_PER_S

from .scenario import DEFAULTS

MS = NS_PER_S // 1000
NOW = 10 * NS_PER_S
VIEW = View(
    now_ns=NOW,
    num_items=2,
    room=6,
    oldest_ns=NOW - 100 * MS,
    last_ns=NOW - 50 * MS,
    gap_s=0.2,
    cv=1.0,
    base_s=0.3,
    item_s=0.03,
    service_s=0.36,
    backlog_s=0.0,
    slo_ns=None,
)


def view(**changes: Any) -> View:
    return replace(VIEW, **changes)


class Until:
    """A rule that has made up its mind."""

    waits = True

    def __init__(self, until_ns: int) -> None:
        self.until_ns = until_ns

    def hold(self, view: View) -> Hold:
        return Hold(self.until_ns, "rule")


def make(name: str, **changes: Any) -> Rule:
    return RULES[name](replace(DEFAULTS, when=name, **changes))


# Rules --------------------------------------------------------------------------------------------


def test_every_rule_of_the_deployment_file_is_there() -> None:
    assert set(RULES) == set(get_args(Policy.model_fields["when"].annotation))


def test_all_rules_but_none_wait() -> None:
    assert [name for name in RULES if not make(name).waits] == ["none"]


def test_none_holds_nothing() -> None:
    assert PassThrough(DEFAULTS).hold(VIEW) == Hold(NOW, "pass-through")


def test_greedy_holds_nothing_back_from_an_idle_encoder() -> None:
    assert Greedy(DEFAULTS).hold(VIEW) == Hold(NOW, "encoder idle")


@pytest.mark.parametrize("timeout_s", [0.0, 0.05, 1.0])
def test_fixed_holds_for_a_window_that_the_first_item_opens(timeout_s: float) -> None:
    rule = Fixed(replace(DEFAULTS, timeout_s=timeout_s))
    assert rule.hold(VIEW) == Hold(VIEW.oldest_ns + int(timeout_s * NS_PER_S), "window")


@pytest.mark.parametrize(("gap_s", "wait_ms"), [(0.2, 1200), (0.01, 60), (0.0, 0), (None, 0)])
def test_fill_holds_for_the_time_that_the_missing_items_need(
    gap_s: float | None, wait_ms: int
) -> None:
    hold = Fill(DEFAULTS).hold(view(gap_s=gap_s))
    assert hold == Hold(VIEW.oldest_ns + wait_ms * MS, "fill")


@pytest.mark.parametrize(("gap_k", "wait_ms"), [(1.0, 200), (0.25, 50), (0.0, 0)])
def test_gap_holds_until_nothing_has_come_for_some_mean_gaps(gap_k: float, wait_ms: int) -> None:
    rule = Gap(replace(DEFAULTS, gap_k=gap_k))
    assert rule.hold(VIEW) == Hold(VIEW.last_ns + wait_ms * MS, "gap")
    assert rule.hold(view(gap_s=None)) == Hold(VIEW.last_ns, "gap")


@pytest.mark.parametrize("rule", [Fill(DEFAULTS), Gap(DEFAULTS), Slack(DEFAULTS)])
def test_a_rate_of_almost_nothing_makes_a_time_all_the_same(rule: Rule) -> None:
    assert rule.hold(view(gap_s=1e300)).until_ns <= NOW + 10**6 * NS_PER_S


def test_slack_waits_while_prefill_is_busy_for_longer_than_the_batch_takes() -> None:
    assert Slack(DEFAULTS).hold(view(backlog_s=0.46)) == Hold(NOW + 100 * MS, "slack")


@pytest.mark.parametrize("backlog_s", [0.0, 0.36])
def test_slack_sends_at_once_where_waiting_is_neither_free_nor_pays(backlog_s: float) -> None:
    assert Slack(DEFAULTS).hold(view(backlog_s=backlog_s)) == Hold(NOW, "slack")
    assert Slack(DEFAULTS).hold(view(backlog_s=backlog_s, gap_s=None)) == Hold(NOW, "slack")


def test_slack_waits_for_a_gap_where_calls_of_one_item_could_not_keep_up() -> None:
    crowded = view(num_items=1, service_s=0.33, gap_s=0.1, last_ns=NOW)
    assert Slack(DEFAULTS).hold(crowded) == Hold(NOW + 100 * MS, "gap")
    assert Slack(DEFAULTS).hold(replace(crowded, backlog_s=0.36)) == Hold(NOW + 100 * MS, "gap")
    assert Slack(DEFAULTS).hold(replace(crowded, backlog_s=0.53)) == Hold(NOW + 200 * MS, "slack")


def test_slack_does_not_count_on_a_mean_gap_after_a_burst() -> None:
    crowded = view(num_items=1, service_s=0.33, gap_s=0.1, last_ns=NOW, cv=3.0)
    assert Slack(DEFAULTS).hold(crowded) == Hold(NOW + 20 * MS, "gap")
    assert Slack(DEFAULTS).hold(replace(crowded, cv=0.1)) == Hold(NOW + 100 * MS, "gap")


def test_slack_takes_arrivals_without_gaps() -> None:
    assert Slack(DEFAULTS).hold(view(gap_s=0.0)) == Hold(NOW, "slack")


@settings(deadline=None)
@given(
    num_items=st.integers(1, 16),
    rate_per_s=st.floats(0.01, 1000),
    base_s=st.floats(0.001, 1),
    item_s=st.floats(0, 0.1),
    value=st.floats(0, 4),
)
def test_slack_waits_when_one_more_arrival_saves_more_than_it_costs(
    num_items: int, rate_per_s: float, base_s: float, item_s: float, value: float
) -> None:
    service_s = base_s + item_s * num_items
    expected_gain = (
        (1 + value) * base_s
        - num_items / rate_per_s
        - num_items * item_s
        - (1 - exp(-rate_per_s * service_s)) / rate_per_s
    )
    seen = view(
        num_items=num_items,
        last_ns=NOW,
        gap_s=1 / rate_per_s,
        base_s=base_s,
        item_s=item_s,
        service_s=service_s,
    )
    waits = make("slack", encoder_value=value).hold(seen).until_ns > NOW
    assert waits == (expected_gain > 0) or abs(expected_gain) < 1e-9


# Bounds -------------------------------------------------------------------------------------------


def test_what_a_rule_says_counts_within_its_bounds() -> None:
    until_ns = VIEW.oldest_ns + HARD_TIMEOUT_NS - 1
    assert decide(Until(until_ns), VIEW, draining=False) == Hold(until_ns, "rule")


def test_no_rule_holds_for_longer_than_a_second() -> None:
    assert HARD_TIMEOUT_NS == NS_PER_S
    hold = decide(Until(NOW + 10**15), VIEW, draining=False)
    assert hold == Hold(VIEW.oldest_ns + NS_PER_S, "hard timeout")


def test_a_promise_bounds_what_a_rule_says() -> None:
    promised = view(slo_ns=NOW + 5)
    assert decide(Until(NOW + 9), promised, draining=False) == Hold(NOW + 5, "slo")
    assert decide(Until(NOW + 3), promised, draining=False) == Hold(NOW + 3, "rule")


def test_a_promise_does_not_lift_the_bound_of_a_second() -> None:
    promised = view(slo_ns=NOW + 10**15)
    assert decide(Until(NOW + 10**15), promised, draining=False).reason == "hard timeout"


def test_nothing_waits_while_the_server_drains() -> None:
    assert decide(Until(NOW + 9), VIEW, draining=True) == Hold(NOW, "drain")


def test_the_reason_is_the_rules_where_it_holds_nothing() -> None:
    """What waited for a busy encoder has not been held by a rule."""
    late = view(oldest_ns=NOW - 5 * NS_PER_S, slo_ns=NOW - NS_PER_S)
    assert decide(Greedy(DEFAULTS), late, draining=False).reason == "encoder idle"
    assert decide(Until(NOW - 9), late, draining=False).reason == "rule"


def test_the_bound_of_a_second_comes_before_a_promise_that_is_late_as_well() -> None:
    late = view(oldest_ns=NOW - 5 * NS_PER_S, slo_ns=NOW - 6 * NS_PER_S)
    assert decide(Until(NOW + 9), late, draining=False).reason == "hard timeout"


@settings(deadline=None)
@given(
    name=st.sampled_from([name for name in RULES if name != "none"]),
    gap_s=st.none() | st.floats(0, 1e9),
    cv=st.floats(0, 100),
    room=st.integers(1, 1000),
    waited_ms=st.integers(0, 2000),
    quiet_ms=st.integers(0, 2000),
    backlog_s=st.floats(0, 1e6),
    slo_ms=st.none() | st.integers(-1000, 3000),
    gap_k=st.floats(0, 100),
    draining=st.booleans(),
)
def test_the_bounds_hold_for_every_rule(
    name: str,
    gap_s: float | None,
    cv: float,
    room: int,
    waited_ms: int,
    quiet_ms: int,
    backlog_s: float,
    slo_ms: int | None,
    gap_k: float,
    draining: bool,
) -> None:
    seen = view(
        gap_s=gap_s,
        cv=cv,
        room=room,
        oldest_ns=NOW - waited_ms * MS,
        last_ns=NOW - quiet_ms * MS,
        backlog_s=backlog_s,
        slo_ns=None if slo_ms is None else NOW + slo_ms * MS,
    )
    hold = decide(make(name, gap_k=gap_k), seen, draining)
    bounds = [seen.oldest_ns + NS_PER_S] + ([] if seen.slo_ns is None else [seen.slo_ns])
    assert hold.until_ns <= max(NOW, min(bounds))
    if draining:
        assert hold.until_ns == NOW
