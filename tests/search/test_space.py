from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.search.space import SHARE, Allocation, Configuration, Knob, Space, Value, is_at_work

BATCH, WHEN, WHERE = "policy.max_batch_items", "policy.when", "policy.where"
WITH = Allocation("e2-p2-d4", {"encode.replicas": 2}, {"local_prefill": {}, "partition": {}})
WITHOUT = Allocation("e1-p2-d4", {"encode.replicas": 1})
KNOBS = (
    Knob(BATCH, (1, 4, 8)),
    Knob(SHARE, (0.5, 0.75, 1.0)),
    Knob(WHEN, ("greedy", "gap")),
    Knob("policy.gap_k", (0.5, 1.0), (WHEN, ("gap",))),
    Knob(WHERE, ("deficit", "jsq"), (SHARE, (0.5, 0.75))),
)
SPACE = Space([WITH, WITHOUT], KNOBS)
ALL: dict[str, Value] = {
    BATCH: 4,
    SHARE: 0.5,
    WHEN: "gap",
    "policy.gap_k": 1.0,
    WHERE: "jsq",
}


def knobs() -> st.SearchStrategy[list[Knob]]:
    """A few, each perhaps at work with some values of the one before it alone."""

    def chained(sizes: list[tuple[int, int | None]]) -> list[Knob]:
        made: list[Knob] = []
        for number, (size, num) in enumerate(sizes):
            only_if = None
            if num is not None and made:
                only_if = (made[-1].path, made[-1].values[:num])
            values = (*(step / 10 for step in range(size)), 1.0)
            path = SHARE if number == 0 else f"policy.knob_{number}"
            made.append(Knob(path, values, only_if))
        return made

    sizes = st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3))
    return st.lists(sizes, max_size=4).map(chained)


def test_a_knob_of_numbers_has_neighbours_and_one_of_names_or_flags_has_none() -> None:
    assert Knob("a", (1, 2.5)).is_ordered
    others: list[tuple[Value, ...]] = [("a", "b"), (False, True), (False,), (1, None)]
    assert not any(Knob("a", values).is_ordered for values in others)


def test_knobs_that_do_nothing_are_left_out() -> None:
    made = SPACE.configuration(WITH.name, ALL | {WHEN: "greedy", SHARE: 1.0})
    assert made == Configuration(WITH.name, ((BATCH, 4), (SHARE, 1.0), (WHEN, "greedy")))
    assert made[BATCH] == 4
    assert made.get(WHERE) is None
    with pytest.raises(KeyError):
        made[WHERE]


def test_where_nothing_can_run_beside_an_encoder_all_prefill_is_remote() -> None:
    made = SPACE.configuration(WITHOUT.name, ALL)
    assert made.get(SHARE) == 1
    assert made.get(WHERE) is None
    assert made in set(SPACE.of(WITHOUT.name))


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(KeyError, match=BATCH):
        SPACE.configuration(WITH.name, {})


def test_every_configuration_is_there_once() -> None:
    per_rule = 1 + 2  # greedy; gap with two values of k
    assert len(list(SPACE.of(WITH.name))) == 3 * per_rule * (2 * 2 + 1)
    assert len(list(SPACE.of(WITHOUT.name))) == 3 * per_rule
    assert len(SPACE) == len(set(SPACE)) == 3 * per_rule * 6


@given(knobs())
def test_configurations_are_those_of_the_product_without_what_does_nothing(
    made: list[Knob],
) -> None:
    space = Space([WITH, WITHOUT], made)
    for allocation in (WITH, WITHOUT):
        expected: dict[Configuration, None] = {}
        for values in product(*(knob.values for knob in space.knobs_of(allocation.name))):
            chosen = dict(zip((knob.path for knob in made), values, strict=True))
            expected[space.configuration(allocation.name, chosen)] = None
        assert list(space.of(allocation.name)) == list(expected)
    for configuration in space:
        assert space.configuration(configuration.allocation, dict(configuration.values)) == (
            configuration
        )


def test_a_knob_whose_condition_is_not_at_work_itself_does_nothing() -> None:
    assert not is_at_work(Knob("b", (1,), ("a", (1,))), {})
    assert not is_at_work(Knob("b", (1,), ("a", (1,))), {"a": 2})
    assert is_at_work(Knob("b", (1,), ("a", (1,))), {"a": 1})
    assert is_at_work(Knob("b", (1,)), {})


def test_a_restricted_space_has_the_order_that_it_was_asked_for() -> None:
    asked = SPACE.restricted([WITHOUT.name, WITH.name])
    assert list(asked.allocations) == [WITHOUT, WITH]
    with pytest.raises(KeyError):
        SPACE.restricted(["e9-p9-d9"])


REMOTE: dict[str, Any] = {"local_prefill": None, "partition": None, SHARE: 1.0}


def test_changes_lay_offload_only_where_something_is_offloaded() -> None:
    offloaded = SPACE.changes(SPACE.configuration(WITH.name, ALL))
    assert offloaded == {"encode.replicas": 2, **ALL, "local_prefill": {}, "partition": {}}
    remote = SPACE.changes(SPACE.configuration(WITH.name, ALL | {SHARE: 1.0}))
    assert remote.items() >= REMOTE.items()


def test_changes_without_offload_take_its_sections_away_though_no_knob_says_so() -> None:
    """Or they would stay as a file has them."""
    space = Space([WITH, WITHOUT], [Knob(BATCH, (1,))])
    changes = space.changes(space.configuration(WITHOUT.name, {BATCH: 1}))
    assert changes == {"encode.replicas": 1, BATCH: 1, **REMOTE}
    beside = space.changes(space.configuration(WITH.name, {BATCH: 1}))
    assert beside["local_prefill"] == {}
