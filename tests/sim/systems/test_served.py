"""The core over modelled engines: what becomes of a request, by hand."""

from dataclasses import replace
from itertools import pairwise

import pytest

from easerve.costs.base import Media
from easerve.policy import events as ev
from easerve.policy.core import Limits
from easerve.sim import clock
from easerve.sim.llm import LlmLimits
from easerve.sim.run import Request, Run
from easerve.sim.systems.served import Failure, Served
from easerve.types import NS_PER_S, Modality, Stage, WorkerId

from ..modelled import Costs, End, Setup, Story, simulated, with_policy

# To prepare a picture 0.25 s, a forward 1 s, a prompt 2 s, a token 0.5 s.
SETUP = with_policy(
    Setup(
        ("e0", "p0", "d0"),
        costs=Costs(1.0, 0.0, 2.0, 0.0, 0.5, 0.0),
        prefill=LlmLimits(16_000, chunked=False, max_prompts=1, holds=True),
        prepare_s=0.25,
        num_preparations=1,
    ),
    when="none",
)
PICTURE = Media(Modality.IMAGE, 100)
ASKED = Request(1.0, (PICTURE,), 10, 3)


def seconds(end: End) -> tuple[float | None, float, str]:
    first_s = None if end.first_ns is None else end.first_ns / NS_PER_S
    return first_s, end.end_ns / NS_PER_S, end.outcome


def run(*requests: Request, setup: Setup = SETUP, failures: tuple[Failure, ...] = ()) -> Story:
    """Nothing is left of it."""
    story = simulated(setup, requests, failures)
    assert (story.core.num_open, story.leaks()) == (0, {})
    return story


def end_of(
    request: Request, setup: Setup = SETUP, failures: tuple[Failure, ...] = ()
) -> tuple[float | None, float, str]:
    (end,) = run(request, setup=setup, failures=failures).ends.values()
    return seconds(end)


@pytest.mark.parametrize(
    ("request_", "first_s", "end_s"),
    [
        (ASKED, 1 + 0.25 + 1 + 2 + 0.5, 5.75),
        (replace(ASKED, num_tokens=1), 4.25, 4.25),  # the only token is prefill's
        (replace(ASKED, items=()), 3.5, 4.5),  # text
        (replace(ASKED, items=(PICTURE,) * 3), 1 + 3 * 0.25 + 3 + 2 + 0.5, 8.25),
        (replace(ASKED, items=(PICTURE,) * 3, keys=("a", "b", "a")), 6.25, 7.25),
    ],
)
def test_a_request_takes_what_its_stages_take(
    request_: Request, first_s: float, end_s: float
) -> None:
    assert end_of(request_) == (first_s, end_s, "completed")


def test_pictures_are_prepared_by_so_many_workers() -> None:
    setup = replace(SETUP, num_preparations=2)
    first_s, _, _ = end_of(replace(ASKED, items=(PICTURE,) * 3), setup)
    assert first_s == 1 + 2 * 0.25 + 3 + 2 + 0.5


@pytest.mark.parametrize(("first_at", "first_s"), [(Stage.PREFILL, 4.25), (Stage.DECODE, 4.75)])
def test_a_client_sees_the_first_token_of_prefill_or_of_decode(
    first_at: Stage, first_s: float
) -> None:
    run = Run()
    served = Served(
        SETUP.core(), SETUP.fleet(run), SETUP.joins(), [ASKED], run, 0.25, first_at=first_at
    )
    assert clock.run(served, served.start()) == 5.75 * NS_PER_S
    (record,) = run.records
    assert (record.first_token_s, record.end_s, record.num_output_tokens) == (first_s, 5.75, 3)
    assert [at_ns / NS_PER_S for at_ns, _ in run.batches] == [1.25]
    assert [at_ns / NS_PER_S for at_ns, _ in run.prefills] == [1.25]
    assert run.ids == ["r0"]


def test_who_asks_about_a_picture_that_is_there_does_not_wait_for_it() -> None:
    requests = [replace(ASKED, at_s=at_s, keys=("same",)) for at_s in (1.0, 10.0)]
    story = run(*requests)
    assert seconds(story.ends["r1"]) == (10 + 0.25 + 2 + 0.5, 13.75, "completed")
    assert story.run.num_items == 1


# What the core is told, and when ------------------------------------------------------------------


def test_an_instant_is_a_step_but_for_joins_losses_and_ends_of_answers() -> None:
    requests = [replace(ASKED, at_s=float(at_s), items=(), num_tokens=2) for at_s in (1, 1, 1)]
    failures = (Failure(WorkerId("e0"), 1.0, 2.0),)
    steps = run(*requests, failures=failures).steps
    told = [(step.now_ns / NS_PER_S, [type(each) for each in step.events]) for step in steps]
    assert told[:3] == [(0.0, [ev.WorkerJoined])] * 3
    # Requests were to come before the engine was to be lost.
    assert told[3] == (1.0, [ev.WorkerLost, *[ev.RequestReceived] * 3])
    assert told[4] == (1.0, [ev.Prepared] * 3)
    assert (2.0, [ev.WorkerJoined]) in told
    ends = [step for step in steps if any(isinstance(e, ev.DecodeFinished) for e in step.events)]
    assert all(len(step.events) <= 2 for step in ends)


def test_no_step_comes_twice_without_news() -> None:
    steps = run(*[replace(ASKED, at_s=float(at_s)) for at_s in range(5)]).steps
    for before, after in pairwise(steps):
        assert before.now_ns < after.now_ns or after.events


# Too long -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_text", "num_tokens"), [(16_000, 3), (10, 20_000)])
def test_a_request_that_an_engine_cannot_hold_fails_alone(num_text: int, num_tokens: int) -> None:
    long = replace(ASKED, num_text_tokens=num_text, num_tokens=num_tokens)
    story = run(long, replace(ASKED, at_s=20.0))
    assert story.ends["r0"].outcome == "failed"
    assert seconds(story.ends["r1"]) == (24.75 - 1, 24.75, "completed")


# Losses -------------------------------------------------------------------------------------------


def lose(worker: str, at_s: float, back_s: float | None) -> tuple[Failure, ...]:
    return (Failure(WorkerId(worker), at_s, back_s),)


@pytest.mark.parametrize(
    ("worker", "at_s", "back_s", "first_s"),
    [
        ("e0", 1.1, 2.0, 2 + 1 + 2 + 0.5),  # nobody can render its prompt when it is decoded
        ("e0", 1.5, 2.0, 2 + 1 + 2 + 0.5),  # it is encoded once more
        ("e0", 2.5, 3.0, 4.75),  # nothing is lost that was sent
        ("p0", 1.5, 2.0, 2.25 + 2 + 0.5),  # its embedding waits for its engine
        ("p0", 3.0, 3.5, 3.5 + 2 + 0.5),  # sent again, prefilled again
        ("p0", 5.0, 5.5, 4.75),  # it has been pulled
        ("d0", 3.0, 3.5, 4.75),  # it had nothing to do
        ("d0", 3.0, 8.0, 8.0 + 2 + 0.5),  # the cache does not keep: prefilled again
        ("d0", 4.5, 5.0, 5.0 + 2 + 0.5),  # before its first token
    ],
)
def test_an_engine_is_lost_and_comes_back(
    worker: str, at_s: float, back_s: float, first_s: float
) -> None:
    found = end_of(ASKED, failures=lose(worker, at_s, back_s))
    assert found == (first_s, first_s + 1.0, "completed")


def test_an_answer_that_has_begun_is_not_begun_again() -> None:
    assert end_of(ASKED, failures=lose("d0", 5.0, 5.5)) == (4.75, 5.0, "failed")


def test_who_waits_for_an_engine_that_does_not_come_gives_up() -> None:
    setup = replace(SETUP, limits=Limits(worker_wait_ns=2 * NS_PER_S))
    assert end_of(ASKED, setup, lose("p0", 2.0, None)) == (None, 4.0, "failed")
    assert end_of(ASKED, setup, lose("p0", 0.5, None)) == (None, 1.0, "rejected")


def test_what_was_known_to_happen_first_happens_first() -> None:
    """The loss was known from the beginning, that of the step's end only since the step began."""
    assert end_of(ASKED, failures=lose("d0", 5.75, None)) == (4.75, 5.75, "failed")


@pytest.mark.parametrize("at_s", [0.1, 0.5, 1.5, 2.8, 3.4, 4.0])
def test_a_request_that_times_out_leaves_nothing_behind(at_s: float) -> None:
    setup = replace(SETUP, limits=Limits(request_timeout_ns=round(at_s * NS_PER_S)))
    first_s, end_s, outcome = end_of(ASKED, setup)
    assert (end_s, outcome) == (1 + at_s, "failed")
    assert first_s == (4.75 if at_s == 4.0 else None)


def test_a_server_that_is_full_lets_nobody_in() -> None:
    setup = replace(SETUP, max_requests=1)
    story = run(ASKED, replace(ASKED, at_s=2.0), setup=setup)
    assert seconds(story.ends["r1"]) == (None, 2.0, "rejected")
