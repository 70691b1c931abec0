"""Spaces by name."""

import pytest

from easerve.config import ConfigError
from easerve.search.space import SHARE, Allocation
from easerve.search.spaces import FEW_BATCHES, SHARES, space

PLAIN = Allocation("e1-p1-d1", {})
LOCAL = Allocation("e2-p2-d2", {}, {"local_prefill": {"tensor_parallel_size": 2}})
DIVIDED = Allocation("e2-p1-d1", {}, {"local_prefill": {}, "partition": {}})


def test_the_papers_space_is_shares_in_steps_and_batches() -> None:
    found = space("paper", [PLAIN, LOCAL], {})
    assert [each.path for each in found.knobs] == ["policy.max_batch_items", SHARE]
    assert SHARES[0] == 0.05
    assert SHARES[-1] == 1.0
    assert len(SHARES) == 20
    assert len(found) == len(FEW_BATCHES) * (1 + len(SHARES))


def test_a_rule_brings_its_own_knobs_and_no_others() -> None:
    found = space("full", [DIVIDED], {SHARE: [0.5, 1.0], "policy.max_batch_items": [8]})
    assert {each.get("policy.gap_k") for each in found if each["policy.when"] == "gap"} == {
        *(0.25, 0.5, 1.0, 2.0)
    }
    assert {each.get("policy.gap_k") for each in found if each["policy.when"] == "fixed"} == {None}
    alone = [each for each in found if each[SHARE] == 1]
    assert {each.get("policy.where") for each in alone} == {None}
    assert {each.get("policy.how") for each in alone} == {None}


def test_a_partition_is_not_searched_where_there_is_none() -> None:
    assert "policy.how" in [each.path for each in space("full", [LOCAL, DIVIDED], {}).knobs]
    assert "policy.how" not in [each.path for each in space("full", [LOCAL, PLAIN], {}).knobs]


def test_other_values_fix_a_knob_or_add_one() -> None:
    given = {"policy.max_batch_items": (4,), "policy.prefill_ahead_s": (0.5, 1.0)}
    found = space("paper", [PLAIN], given)
    assert len(found) == 2
    assert {each["policy.max_batch_items"] for each in found} == {4}


def test_rules_of_offload_are_searched_at_other_shares_as_well() -> None:
    found = space("full", [DIVIDED], {SHARE: (0.33, 1)})
    at = {share: [each for each in found if each[SHARE] == share] for share in (0.33, 1)}
    assert {each.get("policy.where") for each in at[1]} == {None}
    assert None not in {each.get("policy.where") for each in at[0.33]}
    assert None not in {each.get("policy.how") for each in at[0.33]}


@pytest.mark.parametrize(
    "path",
    ["encode.replicas", "prefill.tensor_parallel_size", "local_prefill.tensor_parallel_size"],
)
def test_what_an_allocation_says_is_no_knob(path: str) -> None:
    with pytest.raises(ConfigError, match=f"--knob {path}: allocations say it"):
        space("paper", [LOCAL], {path: (1, 2)})


def test_a_rule_of_a_partition_that_nothing_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.how: no allocation here can divide"):
        space("full", [LOCAL], {"policy.how": ("static",)})


def test_a_space_that_is_none() -> None:
    with pytest.raises(ConfigError, match="none of paper, full"):
        space("all", [PLAIN], {})
