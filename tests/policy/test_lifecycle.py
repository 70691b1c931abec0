import runpy
from pathlib import Path

import pytest

from easerve.policy.lifecycle import LEG, REQUEST, IllegalMove, LegState, RequestState, Table
from easerve.policy.state import Leg

ROOT = Path(__file__).parents[2]
ENDS = {
    RequestState.COMPLETED,
    RequestState.FAILED,
    RequestState.CANCELLED,
    RequestState.REJECTED,
}


def test_a_request_begins_by_admission_or_refusal() -> None:
    assert REQUEST.enter("admitted") is RequestState.PREPARING
    assert REQUEST.enter("rejected") is RequestState.REJECTED


def test_nothing_begins_by_an_unknown_cause() -> None:
    with pytest.raises(IllegalMove, match="nothing begins by 'legs done'"):
        REQUEST.enter("legs done")


def test_an_illegal_move_raises_and_changes_nothing() -> None:
    leg = Leg(0, LegState.DECODING)
    with pytest.raises(IllegalMove, match="'prefilled' cannot happen in state 'decoding'"):
        leg.move("prefilled")
    assert leg == Leg(0, LegState.DECODING)


def test_a_leg_that_goes_back_to_prefill_is_a_new_attempt() -> None:
    leg = Leg(0, LegState.DECODING)
    leg.move("decode retried")
    assert leg == Leg(0, LegState.PREFILL_QUEUED, attempt=1)


def test_every_state_has_its_moves_and_only_ends_have_none() -> None:
    assert set(REQUEST.moves) == set(RequestState)
    assert {state for state, moves in REQUEST.moves.items() if not moves} == ENDS
    assert set(LEG.moves) == set(LegState)
    assert [state for state, moves in LEG.moves.items() if not moves] == [LegState.DONE]


@pytest.mark.parametrize("cause", ["failed", "timed out", "cancelled"])
def test_an_open_request_may_end_at_any_time(cause: str) -> None:
    for state in set(RequestState) - ENDS:
        assert REQUEST.next(state, cause) in ENDS


@pytest.mark.parametrize("state", ENDS)
def test_an_ended_request_moves_no_more(state: RequestState) -> None:
    with pytest.raises(IllegalMove):
        REQUEST.next(state, "cancelled")


def test_a_diagram_has_one_arrow_for_each_pair_of_states() -> None:
    decoding, done = LegState.DECODING, LegState.DONE
    table = Table({"go": decoding}, {decoding: {"good": done, "bad": done}, done: {}})
    assert table.mermaid().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> DECODING: go",
        "    DECODING --> DONE: good, bad",
        "    DONE --> [*]",
    ]


def test_the_page_of_diagrams_is_what_the_script_makes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "lifecycle_diagram.py"))
    page = script["page"]()
    assert (ROOT / "docs" / "lifecycle.md").read_text() == page, "run scripts/lifecycle_diagram.py"
    assert REQUEST.mermaid() in page
    assert LEG.mermaid() in page
