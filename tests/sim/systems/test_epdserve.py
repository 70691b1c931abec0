from typing import Any

import pytest

from easerve.sim.systems.epdserve import EpdServe
from easerve.types import Stage

from .simulated import NO_HOST, pictures, simulate, text


def section(**over: Any) -> dict[str, Any]:
    return {"encode": {}, "prefill": {}, "decode": {}, **NO_HOST, **over}


def outcomes(**over: Any) -> list[str]:
    done = simulate("epdserve", section(**over), [pictures(2), text()])
    records = dict(zip(done.run.ids, done.run.records, strict=True))
    return [records[name].outcome for name in sorted(records)]


def test_items_are_encoded_apart_and_pulled_one_after_another() -> None:
    done = simulate("epdserve", section(encode={"replicas": 2}), [pictures(2)])
    assert done.spans("e0", "encode") == done.spans("e1", "encode") == [(0, 2)]
    assert done.spans("p0", "transfer") == [(2, 2.5), (2.5, 3)]
    assert done.times_s == {"r0": (4, 4.45)}  # prefill's token; a pull, then two more


def test_items_may_stay_together() -> None:
    done = simulate("epdserve", section(encode={"replicas": 2}, irp=False), [pictures(2)])
    assert done.spans("e1", "encode") == [(0, 3)]
    assert done.times_s == {"r0": (4.5, 4.95)}


def test_the_host_prepares_an_encoders_step_before_its_forward() -> None:
    done = simulate("epdserve", section(item_s=0.5, dispatch_s=0.25), [pictures(), pictures()])
    assert done.spans("e0", "encode") == [(0.5, 2.75), (3.25, 5.5)]


def test_a_step_encodes_as_many_requests_as_a_batch_holds() -> None:
    requests = [pictures() for _ in range(3)]
    done = simulate("epdserve", section(encode={"max_batch": 2}), requests)
    assert done.spans("e0", "encode") == [(0, 3), (3, 5)]


@pytest.mark.parametrize(
    ("cached", "encodes"), [(1, [(0, 2), (2.5, 4.5), (5, 7)]), (9, [(0, 2), (2, 4), (4, 6)])]
)
def test_an_encoder_whose_cache_is_full_waits_for_a_pull(
    cached: int, encodes: list[tuple[float, float]]
) -> None:
    done = simulate("epdserve", section(encode={"max_cached_items": cached}), [pictures()] * 3)
    assert done.spans("e0", "encode") == encodes


def test_prefill_accepts_little_more_than_its_next_step() -> None:
    """Of a cache of three prompts: one waits at most, and the others stay where they were made."""
    requests = [text(num_prompt=1000, num_tokens=1) for _ in range(4)]
    over = {"prefill": {"kv_cache_tokens": 3024}}
    done = simulate("epdserve", section(**over), requests)
    assert [end for _, end in done.spans("p0", "prefill")] == [1, 2, 3, 4]
    pulled = [begin for begin, _ in done.spans("p0", "transfer")]
    assert pulled == [0, 1, 2, 3]


def test_prefill_holds_its_blocks_until_decode_has_pulled_them() -> None:
    done = simulate("epdserve", section(prefill={"kv_cache_tokens": 1008}), [text(), text()])
    assert done.spans("p0", "prefill") == [(0, 1), (1.25, 2.25)]


def test_prompts_are_prefilled_whole_and_one_by_one() -> None:
    done = simulate("epdserve", section(), [text(num_prompt=5000), text(num_prompt=3000)])
    assert done.spans("p0", "prefill") == [(0, 5), (5, 8)]
    both = simulate("epdserve", section(prefill={"max_batch": 2}), [text(), text()])
    assert both.spans("p0", "prefill") == [(0, 2)]


def test_decode_does_not_step_while_it_pulls() -> None:
    done = simulate("epdserve", section(), [text(num_tokens=20), text(num_tokens=3)])
    # r0's steps from 1.25 on; r1 is prefilled at 2, pulled from the end of a step on.
    assert done.spans("d0", "transfer") == [(1, 1.25), (2.05, 2.3)]
    assert done.times_s == {"r0": (1, 3.4), "r1": (2, 2.5)}


def test_decode_takes_as_many_as_a_batch_holds() -> None:
    done = simulate("epdserve", section(decode={"max_batch": 1}), [text(num_tokens=20), text()])
    assert done.times_s["r0"] == (1.0, 3.4)
    assert done.times_s["r1"] == (2, 3.6)  # pulled at 2.3, and waits


def test_decode_accepts_no_more_than_two_batches() -> None:
    """One is decoded and three wait; who comes then stays at prefill until the first is done."""
    requests = [text(num_prompt=16, num_tokens=100), *[text(num_prompt=16) for _ in range(6)]]
    done = simulate("epdserve", section(decode={"max_batch": 1}), requests)
    pulls = [begin for begin, _ in done.spans("d0", "transfer")]
    ended_s = done.times_s["r0"][1]
    assert sum(begin < ended_s for begin in pulls) == 4
    assert len(pulls) == 7


def test_decode_reserves_the_longest_answer() -> None:
    requests = [text(num_prompt=100, num_tokens=500), text(num_prompt=100, num_tokens=500)]
    done = simulate("epdserve", section(decode={"kv_cache_tokens": 1120}), requests)
    assert done.run.num_preempted == 0
    assert done.times_s["r1"][1] > done.times_s["r0"][1] + 40  # one at a time


def test_its_first_token_may_be_decodes() -> None:
    done = simulate("epdserve", section(first_token_at="decode"), [text()])
    assert done.times_s == {"r0": (1.35, 1.55)}


def test_what_an_engine_can_never_hold_fails_and_holds_nobody_up() -> None:
    assert outcomes(encode={"max_cached_items": 1}, irp=False) == ["failed", "completed"]
    assert outcomes(encode={"max_cached_items": 1}) == ["completed", "completed"]
    assert outcomes(prefill={"kv_cache_tokens": 1000}) == ["failed", "failed"]
    assert outcomes(decode={"kv_cache_tokens": 1000}) == ["failed", "failed"]


def test_a_prompt_that_fills_the_cache_of_decode_fails() -> None:
    """It would be accepted if there were a block more than it needs."""
    requests = [text(num_prompt=1006, num_tokens=1)]
    over = section(decode={"kv_cache_tokens": 1008}, first_token_at="decode")
    assert simulate("epdserve", over, requests).run.records[0].outcome == "failed"


# Roles ----------------------------------------------------------------------------------------

SWITCH: dict[str, Any] = {"role_switch": {}}


def test_an_engine_moves_to_the_longest_queue_when_it_is_empty() -> None:
    """Pictures wait for the one encoder; the decision of 5 s is carried out at 6 s."""
    requests = [pictures(num_prompt=200, num_tokens=1) for _ in range(9)]
    done = simulate("epdserve", section(prefill={"replicas": 2}, **SWITCH), requests)
    system = done.system
    assert isinstance(system, EpdServe)
    assert (len(system.encoders), len(system.prefills), len(system.decodes)) == (2, 1, 1)
    assert done.run.spent_ns == {"p1": 6_000_000_000}
    assert done.run.joined_ns["e1"] == 6_000_000_000
    assert done.run.stages["e1"] is Stage.ENCODE
    assert done.spans("e1", "encode")[0] == (6, 8)
    alone = simulate("epdserve", section(prefill={"replicas": 2}), requests)
    assert done.run.end_s < alone.run.end_s


def test_it_counts_as_what_it_was_for_as_long_as_it_was_that() -> None:
    requests = [pictures(num_prompt=200, num_tokens=1) for _ in range(9)]
    run = simulate("epdserve", section(prefill={"replicas": 2}, **SWITCH), requests).run
    there_s = {"encode": 2 * run.end_s - 6, "prefill": run.end_s + 6}
    for stage, seconds in there_s.items():
        worked_s = sum(run.busy_s[name] for name, at in run.stages.items() if at.value == stage)
        assert run.utilisation()[stage] == pytest.approx(worked_s / seconds)


def test_an_encoder_that_leaves_gives_away_what_waits_for_it() -> None:
    """Decode's queue is the longest: an encoder goes there, and nothing is lost."""
    requests = [pictures(at_s=each * 0.1, num_prompt=116, num_tokens=200) for each in range(30)]
    over = section(encode={"replicas": 3, "max_batch": 4}, decode={"max_batch": 1}, **SWITCH)
    done = simulate("epdserve", over, requests)
    assert {record.outcome for record in done.run.records} == {"completed"}
    assert done.run.stages["d1"] is Stage.DECODE
    assert "e2" in done.run.spent_ns


def test_no_engine_moves_that_is_the_last_of_its_stage() -> None:
    done = simulate("epdserve", section(**SWITCH), [pictures(num_tokens=1)] * 12)
    assert not done.run.spent_ns


def test_the_run_ends_with_its_last_request() -> None:
    """Whatever would be decided after it."""
    assert simulate("epdserve", section(**SWITCH), [text()]).run.end_s == 1.45
