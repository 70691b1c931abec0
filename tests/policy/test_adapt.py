"""Knobs that the core re-tunes: when, how far, why, and what brings them back."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.costs.linear import LinearCosts
from easerve.policy import events as ev
from easerve.policy.adapt import ADAPTED, Adapt
from easerve.policy.batching import HARD_TIMEOUT
from easerve.policy.estimates import Times
from easerve.policy.events import Retuned
from easerve.policy.knobs import Knobs
from easerve.types import NS_PER_S, RequestId, Side

from .scenario import D0, DEFAULTS, E0, FOREVER, L0, P0, Scenario

LOCAL, REMOTE = Side.LOCAL, Side.REMOTE
BOTH = {LOCAL: 1, REMOTE: 1}
PERIOD_NS = 10 * NS_PER_S
TOKENS = 1000


def knobs(**changes: Any) -> Knobs:
    return replace(DEFAULTS, **{"adapt": True, "remote_share": 0.5, **changes})


class Played:
    """An ``Adapt`` that is shown periods; prompts have 1000 tokens."""

    def __init__(self, local_s: float = 1.0, remote_s: float = 1.0, **changes: Any) -> None:
        self.adapt, self.now_ns = Adapt(knobs(**changes)), 0
        self.times = Times(LinearCosts(0.1, 0.0001, 0.5, 0.0, 0.0))
        for side, seconds in ((LOCAL, local_s), (REMOTE, remote_s)):
            if seconds:
                self.adapt.prefilled(side, seconds, TOKENS)

    def period(
        self,
        local: float = 0.0,
        remote: float = 0.0,
        calls: int = 0,
        busy_s: float = 0.0,
        items: int = 1,
        reason: str = "slack",
        wait_s: float = 0.0,
        sides: dict[Side, int] = BOTH,
        num_requests: int = 10,
        seconds: int = 10,
    ) -> list[Retuned]:
        """Ten requests that find so many prompts at each side; ``calls`` of so many items."""
        for _ in range(num_requests):
            tokens = {LOCAL: local * TOKENS, REMOTE: remote * TOKENS}
            self.adapt.asked({side: tokens[side] for side in sides}, self.now_ns)
        for _ in range(calls):
            self.adapt.closed(reason, wait_s)
            self.adapt.encoded(items, 100 * items, busy_s / calls)
        self.now_ns += seconds * NS_PER_S
        assert self.adapt.due_ns is not None
        assert self.adapt.due_ns <= self.now_ns
        return self.adapt.tick(sides, 1, self.times, self.now_ns)

    def knob(self, name: str) -> float:
        value: float = getattr(self.adapt.knobs, name)
        return value


# The share ----------------------------------------------------------------------------------------


def test_the_share_goes_to_what_the_speeds_ask_for_and_no_further() -> None:
    played = Played(local_s=3.0, remote_s=2.0)
    assert [played.period(local=1.0) for _ in range(2)] == [[], []]
    reason = "local has 3.00 s more work than remote, speeds fit 0.600"
    assert played.period(local=1.0) == [Retuned("remote_share", 0.5, 0.55, reason)]
    assert played.period(local=1.0) == [Retuned("remote_share", 0.55, 0.6, reason)]
    assert played.period(local=0.9) == []
    assert played.adapt.configured.remote_share == 0.5


def test_the_other_way_round() -> None:
    played = Played(local_s=2.0, remote_s=2.5)
    for _ in range(3):
        changes = played.period(remote=2.0)
    (change,) = changes
    assert (change.before, change.after) == (0.5, 0.45)
    assert change.reason.startswith("remote has 5.00 s more work than local")


def test_two_engines_of_a_side_are_worth_two() -> None:
    played = Played()
    for _ in range(3):
        changes = played.period(local=2.0, sides={LOCAL: 1, REMOTE: 2})
    assert changes[0].reason.endswith("speeds fit 0.667")


def test_a_side_that_starves_gets_more_than_the_speeds_say_but_not_for_ever() -> None:
    played = Played()
    shares = []
    for _ in range(12):
        played.period(local=2.0)
        shares.append(played.knob("remote_share"))
    assert shares[:5] == [0.5, 0.5, 0.52, 0.54, 0.56]
    assert 0.58 <= shares[-1] == shares[-2] <= 0.62


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, {"local": 0.4}),  # less than half a prompt
        ({}, {"local": 4.0, "remote": 9.0}),  # both have much
        ({}, {"local": 5.0, "num_requests": 4}),
        ({}, {"local": 5.0, "sides": {LOCAL: 1}}),
        ({"remote_s": 0.0}, {"local": 5.0}),  # nothing is known of it
        ({"where": "jsq"}, {"local": 5.0}),
        ({"remote_share": 1.0}, {"local": 5.0}),
        ({"remote_share": 0.0}, {"local": 5.0}),
        ({"adapt_share": 0.0}, {"local": 5.0}),
        ({"adapt_hold": 9}, {"local": 5.0}),
    ],
)
def test_the_share_stays(changes: dict[str, Any], shown: dict[str, Any]) -> None:
    played = Played(**{"local_s": 3.0, "remote_s": 1.0, **changes})
    assert [played.period(**shown) for _ in range(8)] == [[]] * 8


def test_evidence_must_hold_without_a_break() -> None:
    played = Played(local_s=3.0)
    for local in (5.0, 5.0, 0.0, 5.0, 5.0):
        assert played.period(local=local) == []
    played.adapt.prefilled(REMOTE, 1e6, TOKENS)  # now it is the slow one
    assert played.period(remote=5.0) == []
    assert played.period(remote=5.0) == []
    assert len(played.period(remote=5.0)) == 1


def test_time_without_work_tells_nothing() -> None:
    played = Played(local_s=3.0)
    for _ in range(2):
        played.period(local=5.0)
    assert played.period(local=5.0, seconds=20) == []
    assert played.adapt.due_ns is None
    assert [len(played.period(local=5.0)) for _ in range(3)] == [0, 0, 1]


# Batches ------------------------------------------------------------------------------------------


def test_encoders_that_hardly_keep_up_get_larger_batches_up_to_a_bound() -> None:
    played, sizes = Played(max_batch_items=4, adapt_factor=3), []
    for _ in range(9):
        played.period(calls=10, busy_s=9.0, items=4, reason="full")
        sizes.append(played.knob("max_batch_items"))
    assert sizes == [4, 4, 6, 6, 6, 9, 9, 9, 12]
    assert [played.period(calls=10, busy_s=9.0, items=12, reason="full") for _ in range(4)] == [
        []
    ] * 4


def test_calls_of_one_item_are_no_evidence_against_larger_ones() -> None:
    played = Played(max_batch_items=1)
    played.times = Times(LinearCosts(0.0, 0.0001, 0.5, 0.0, 0.0))
    for _ in range(3):
        changes = played.period(calls=10, busy_s=9.0, reason="full")
    assert changes == [Retuned("max_batch_items", 1, 2, "encoders are 90% busy with full batches")]
    for _ in range(3):
        assert played.period(calls=10, busy_s=9.0, items=2, reason="full") == []


def test_encoders_that_would_keep_up_get_smaller_batches() -> None:
    played = Played(max_batch_items=8)
    for _ in range(3):
        changes = played.period(calls=10, busy_s=3.0, items=8, reason="full")
    reason = "encoders would be 40% busy with smaller batches"
    assert changes == [Retuned("max_batch_items", 8, 5, reason)]


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, {"busy_s": 9.0}),  # not full
        ({}, {"busy_s": 9.0, "reason": "full", "calls": 4}),
        ({}, {"busy_s": 7.0, "reason": "full"}),
        ({}, {"busy_s": 3.0, "reason": "full", "local": 8.0, "remote": 8.0}),  # prefill is busy
        ({"when": "none"}, {"busy_s": 9.0, "reason": "full"}),
        ({"when": "greedy"}, {"busy_s": 3.0}),
        ({}, {"busy_s": 9.0, "reason": "full", "items": 0}),
    ],
)
def test_the_size_of_batches_stays(changes: dict[str, Any], shown: dict[str, Any]) -> None:
    played = Played(**{"max_batch_items": 8, **changes})
    if shown.get("items") == 0:  # calls that cost nothing
        played.times = Times(LinearCosts(0.0, 0.0, 0.0, 0.0, 0.0))
    shown = {"calls": 10, **shown, "items": 8}
    assert [played.period(**shown) for _ in range(5)] == [[]] * 5


# Waits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "name", "reason"),
    [
        ("fixed", "timeout_s", "window"),
        ("fixed", "timeout_s", HARD_TIMEOUT),
        ("gap", "gap_k", "gap"),
        ("slack", "gap_k", "gap"),
    ],
)
def test_waits_for_nobody_get_shorter_and_come_back(rule: str, name: str, reason: str) -> None:
    played = Played(when=rule, **{name: 0.9})
    for _ in range(3):
        changes = played.period(calls=10, busy_s=1.0, reason=reason, wait_s=0.2)
    (change,) = changes
    assert (change.knob, change.before) == (name, 0.9)
    assert change.after == pytest.approx(0.6)
    assert change.reason == "batches wait 0.200 s, encoders would be 10% busy one by one"
    for _ in range(20):
        played.period(calls=10, busy_s=1.0, reason=reason, wait_s=0.2)
    assert played.knob(name) == 0.9 / 4
    for _ in range(20):
        played.period(calls=10, busy_s=9.0)
    assert played.knob(name) == 0.9


def test_a_free_wait_is_not_shortened() -> None:
    played = Played()
    for reason in ("slack", HARD_TIMEOUT):
        for _ in range(4):
            assert played.period(calls=10, busy_s=1.0, reason=reason, wait_s=0.2) == []


def test_one_knob_moves_in_a_period_the_share_first() -> None:
    played = Played(local_s=3.0, max_batch_items=4)
    moved = []
    for _ in range(6):
        found = played.period(local=5.0, calls=10, busy_s=9.0, items=4, reason="full")
        moved += [change.knob for change in found]
    assert moved == ["remote_share"] * 4  # to 0.7; the speeds ask for 0.75
    played.period(calls=10, busy_s=9.0, items=4, reason="full")
    assert played.knob("max_batch_items") == 6


# The operator -------------------------------------------------------------------------------------


def moved() -> Played:
    """The share is at 0.6, the batches at 6 instead of 4."""
    played = Played(local_s=3.0, max_batch_items=4)
    for _ in range(4):
        played.period(local=5.0)
    for _ in range(3):
        played.period(calls=10, busy_s=9.0, items=4, reason="full")
    assert (played.knob("remote_share"), played.knob("max_batch_items")) == (0.6, 6)
    return played


def test_switched_off_the_configured_values_are_back_at_once() -> None:
    played = moved()
    changes = played.adapt.configure(knobs(max_batch_items=4, adapt=False))
    assert changes == [
        Retuned("remote_share", 0.6, 0.5, "adapt is off"),
        Retuned("max_batch_items", 6, 4, "adapt is off"),
    ]
    assert played.adapt.knobs == played.adapt.configured == knobs(max_batch_items=4, adapt=False)
    assert played.adapt.due_ns is None
    assert played.adapt.configure(knobs(max_batch_items=7, adapt=False)) == []
    assert played.adapt.configure(knobs(max_batch_items=7)) == []


def test_a_knob_that_is_set_is_a_new_centre_and_the_others_stay() -> None:
    played = moved()
    changes = played.adapt.configure(knobs(max_batch_items=16, gap_k=2.0))
    assert changes == [
        Retuned("max_batch_items", 6, 16, "configured"),
        Retuned("gap_k", 1.0, 2.0, "configured"),
    ]
    assert played.knob("remote_share") == 0.6
    assert played.adapt.due_ns is not None


def test_narrower_bounds_hold_at_once() -> None:
    played = moved()
    changes = played.adapt.configure(knobs(max_batch_items=4, adapt_share=0.04, adapt_factor=1))
    assert [(change.knob, change.after) for change in changes] == [
        ("remote_share", 0.54),
        ("max_batch_items", 4),
    ]


PERIODS = st.fixed_dictionaries(
    {
        "local": st.floats(0, 20),
        "remote": st.floats(0, 20),
        "calls": st.integers(0, 20),
        "busy_s": st.floats(0, 10),
        "items": st.integers(1, 64),
        "reason": st.sampled_from(["full", "gap", "window", "slack", HARD_TIMEOUT]),
        "wait_s": st.floats(0, 1),
        "num_requests": st.integers(1, 20),
        "seconds": st.integers(10, 25),
    }
)


@given(
    changes=st.fixed_dictionaries(
        {
            "local_s": st.floats(0, 5),
            "remote_s": st.floats(0, 5),
            "when": st.sampled_from(["none", "greedy", "fixed", "gap", "slack"]),
            "remote_share": st.floats(0, 1),
            "max_batch_items": st.integers(1, 1024),
            "timeout_s": st.floats(0, 1),
            "gap_k": st.floats(0, 100),
            "adapt_hold": st.integers(1, 3),
            "adapt_share": st.floats(0, 1),
            "adapt_factor": st.floats(1, 100),
        }
    ),
    periods=st.lists(PERIODS, min_size=1, max_size=12),
)
def test_knobs_stay_in_bounds_and_move_one_by_one(
    changes: dict[str, Any], periods: list[dict[str, Any]]
) -> None:
    played = Played(**changes)
    centre = played.adapt.configured
    for shown in periods:
        before = played.adapt.knobs
        found = played.period(**shown)
        after = played.adapt.knobs
        differ = [name for name in ADAPTED if getattr(before, name) != getattr(after, name)]
        assert [change.knob for change in found] == differ
        assert len(found) <= 1
        for change in found:
            assert change.after == getattr(after, change.knob)
            back: dict[str, Any] = {change.knob: change.before}
            assert replace(after, **back) == before
        assert abs(after.remote_share - centre.remote_share) <= centre.adapt_share + 1e-9
        least, most = min(0.05, centre.remote_share), max(0.95, centre.remote_share)
        assert least <= after.remote_share <= most
        assert 1 <= after.max_batch_items <= 1024
        factor = max(after.max_batch_items, centre.max_batch_items) / min(
            after.max_batch_items, centre.max_batch_items
        )
        assert factor <= centre.adapt_factor + 0.5
        for name in ("timeout_s", "gap_k"):
            value, most = getattr(after, name), getattr(centre, name)
            assert most / centre.adapt_factor <= value <= most


# In the core --------------------------------------------------------------------------------------


def busy_scenario(**changes: Any) -> Scenario:
    """A local and a remote engine; texts go to either, half and half."""
    return Scenario(
        E0, P0, L0, D0, knobs=knobs(when="greedy", flow=False, **changes), limits=FOREVER
    )


def ask(scenario: Scenario, second: int) -> list[ev.Action]:
    """A text a second. The remote engine answers at once, the local one never."""
    request_id = RequestId(f"r{second}")
    actions = scenario.wait(NS_PER_S) + scenario.start(request_id)
    for action in actions:
        if isinstance(action, ev.StartPrefill) and action.worker_id == P0:
            actions += scenario.tell(ev.PrefillFinished(action.request_id, 0, 0, final=True))
    return actions


def retuned(actions: list[ev.Action]) -> list[ev.Retuned]:
    return [action for action in actions if isinstance(action, ev.Retuned)]


def test_the_core_goes_by_the_new_share_from_that_step_on() -> None:
    scenario = busy_scenario()
    scenario.core._adapt.prefilled(LOCAL, 3.0, 10)
    scenario.core._adapt.prefilled(REMOTE, 1.0, 10)
    found = []
    for second in range(36):
        found += retuned(ask(scenario, second))
    (first, *_) = found
    assert (first.knob, first.before, first.after) == ("remote_share", 0.5, 0.55)
    assert scenario.core.knobs.remote_share == scenario.core.offload.share == found[-1].after
    off = replace(scenario.core._adapt.configured, adapt=False)
    (back,) = retuned(scenario.tell(ev.KnobsChanged(off)))
    assert (back.after, back.reason) == (0.5, "adapt is off")
    assert scenario.core.offload.share == 0.5


def test_it_wakes_for_the_end_of_a_period_only_while_something_is_open() -> None:
    scenario = busy_scenario()
    assert scenario.core.next_deadline() is None
    scenario.receive()
    assert scenario.deadline_ns == PERIOD_NS
    scenario.wait(PERIOD_NS)
    assert scenario.deadline_ns == 2 * PERIOD_NS
    scenario.tell(ev.ClientCancelled(RequestId("r")))
    assert scenario.core.next_deadline() is None
    scenario.wait(100 * PERIOD_NS)
    scenario.receive(RequestId("other"))
    assert scenario.core.next_deadline() is not None


def test_switched_off_it_never_wakes() -> None:
    scenario = busy_scenario(adapt=False)
    scenario.receive()
    assert scenario.deadline_ns > PERIOD_NS


def test_a_trim_leaves_the_share_to_adapt() -> None:
    scenario = busy_scenario(share_trim=True, adapt_hold=100)
    for second in range(40):
        ask(scenario, second)
    assert scenario.core.offload.share == 0.5
