"""The simulator and the server's driver decide alike: the same steps, at the same nanosecond.

Of each step of the core: when it was, what it was told, what it decided. An instant is one step of
what happened at it, but for what the driver steps at once (an engine that joins or is lost, the end
of an answer), which then come in the order in which they happened. Steps in which nothing was told
nor decided are not counted: the driver has some more of them. Beside the steps, every client gets
its first and last token at the same nanosecond on both sides, and no KV block is left taken.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeAlias

import pytest

from easerve.costs.base import Media
from easerve.policy import events as ev
from easerve.policy.core import Limits
from easerve.serve.driver import Driver
from easerve.serve.job import Job
from easerve.sim.encoder import EncodeLimits
from easerve.sim.llm import LlmLimits
from easerve.sim.run import Request
from easerve.sim.systems.served import Failure
from easerve.types import NS_PER_S, Modality, WorkerId

from .modelled import Costs, Setup, Story, driven, simulated, with_policy

pytestmark = pytest.mark.long

Trace: TypeAlias = tuple[Setup, list[Request], list[Failure]]
Kind: TypeAlias = Callable[[random.Random], Trace]
NUM_SEEDS = 20
SIZES = (100, 200, 400)


def pictures(rng: random.Random, most: int = 3, sizes: Sequence[int] = SIZES) -> tuple[Media, ...]:
    return tuple(Media(Modality.IMAGE, rng.choice(sizes)) for _ in range(rng.randint(1, most)))


def poisson(rng: random.Random, rate_per_s: float, num: int) -> list[Request]:
    """Pictures, one to three, some texts, some answers of one token."""
    times_s = accumulate(rng.expovariate(rate_per_s) for _ in range(num))
    return [
        Request(
            at_s,
            pictures(rng) if rng.random() < 0.8 else (),
            rng.randint(10, 300),
            rng.choice((1, 2, 8, 30)),
        )
        for at_s in times_s
    ]


# In seconds that are multiples of one unit, everything ties.
UNIT_S = 1.0
EVEN = Setup(
    costs=Costs(UNIT_S, 0.0, UNIT_S, 0.0, UNIT_S, 0.0, 0.0),
    prepare_s=UNIT_S,
    prefill=LlmLimits(20_000, token_budget=1 << 20, chunked=False, max_prompts=1, holds=True),
)


def ties(rng: random.Random, num: int, keys: int = 0) -> list[Request]:
    """Everything comes at whole seconds and takes whole seconds; ``keys``: so many pictures."""
    requests = []
    for at_s in sorted(rng.randint(0, num) for _ in range(num)):
        items = pictures(rng, sizes=(100,)) if rng.random() < 0.8 else ()
        names = tuple(f"k{rng.randrange(keys)}" for _ in items) if keys else ()
        requests.append(Request(float(at_s), items, 20, rng.choice((1, 2, 3)), names))
    return requests


def lost(rng: random.Random, setup: Setup, end_s: float, step_s: float) -> list[Failure]:
    """Every stage loses engines, sometimes all of them, at multiples of ``step_s``."""

    def at_s(after_s: float) -> float:
        return after_s + step_s * rng.randrange(1, max(2, round(end_s / step_s / 3)))

    failures = []
    for worker in rng.sample(setup.workers, rng.randint(1, len(setup.workers))):
        time_s = at_s(0.0)
        for _ in range(rng.randint(1, 3)):
            back_s = at_s(time_s)
            failures.append(Failure(WorkerId(worker), time_s, back_s))
            time_s = at_s(back_s)
    return failures


def light(rng: random.Random) -> Trace:
    rule = rng.choice(("slack", "gap", "fixed", "fill"))
    return with_policy(Setup(), when=rule), poisson(rng, 0.2, 8), []


def medium(rng: random.Random) -> Trace:
    rule = rng.choice(("slack", "gap", "fixed", "fill", "greedy", "none"))
    return with_policy(Setup(), when=rule, ttft_slo_s=2.0), poisson(rng, 5, 20), []


def heavy(rng: random.Random) -> Trace:
    """Too much for the engines; decodes run out of blocks."""
    setup = with_policy(Setup(decode=LlmLimits(1800, max_num_seqs=8)), tpot_slo_s=0.02)
    return replace(setup, encode=EncodeLimits(0.01, 0.01)), poisson(rng, 40, 25), []


def tied(rng: random.Random) -> Trace:
    rule, ahead_s = rng.choice(("slack", "greedy", "none")), rng.choice((0.5, 1.0, 3.0))
    workers = rng.choice((EVEN.workers, ("e0", "p0", "d0")))
    setup = with_policy(replace(EVEN, workers=workers), when=rule, prefill_ahead_s=ahead_s)
    return setup, ties(rng, 15), []


def bursts(rng: random.Random) -> Trace:
    requests = poisson(rng, 5, 20)
    return Setup(), [replace(each, at_s=float(each.at_s // 2)) for each in requests], []


def shared(rng: random.Random) -> Trace:
    """Few pictures, which many ask about."""
    requests = [
        replace(each, keys=tuple(f"k{rng.randrange(5)}" for _ in each.items))
        for each in poisson(rng, 10, 20)
    ]
    size = {f"k{number}": Media(Modality.IMAGE, 100 * (1 + number % 3)) for number in range(5)}
    requests = [replace(each, items=tuple(size[key] for key in each.keys)) for each in requests]
    return replace(Setup(), costs=replace(Setup().costs, transfer_token_s=1e-4)), requests, []


def offloaded(rng: random.Random) -> Trace:
    workers = ("e0", "e1", "l0", "l1", "p0", "d0")
    how = rng.choice(("dynamic", "static", "gate", "none"))
    where = rng.choice(("deficit", "deficit-tokens", "band", "bernoulli", "jsq"))
    setup = with_policy(
        Setup(workers, divided=True), remote_share=0.4, how=how, where=where, share_trim=True
    )
    return setup, poisson(rng, rng.choice((2, 10)), 20), []


def adapted(rng: random.Random) -> Trace:
    """Far from the share that fits, and with short periods."""
    setup, requests, _ = offloaded(rng)
    setup = with_policy(
        setup,
        adapt=True,
        remote_share=rng.choice((0.2, 0.8)),
        adapt_period_s=1,
        adapt_hold=1,
        max_batch_items=2,
    )
    requests = poisson(rng, 10, 60)
    return setup, requests, lost(rng, setup, 4.0, 0.01) if rng.random() < 0.3 else []


def failing(rng: random.Random) -> Trace:
    setup, requests, _ = rng.choice((medium, heavy, offloaded, shared))(rng)
    setup = replace(setup, limits=Limits(2, 1000 * NS_PER_S, NS_PER_S))
    return setup, requests, lost(rng, setup, max(requests[-1].at_s, 2.0), 0.01)


def failing_in_ties(rng: random.Random) -> Trace:
    """Engines are lost at the very instants at which they are done."""
    workers = rng.choice((EVEN.workers, ("e0", "p0", "d0"), ("e0", "e1", "l0", "l1", "p0", "d0")))
    setup = replace(EVEN, workers=workers, limits=Limits(3, 1000 * NS_PER_S, 4 * NS_PER_S))
    setup = with_policy(setup, remote_share=0.5 if "l0" in workers else 1.0)
    return setup, ties(rng, 12, keys=rng.choice((0, 4))), lost(rng, setup, 30.0, UNIT_S)


def cut_off(rng: random.Random) -> Trace:
    """Encoders are lost while their embeddings are on their way."""
    setup, requests, _ = rng.choice((medium, shared, offloaded))(rng)
    costs = replace(setup.costs, transfer_token_s=1e-3)
    setup = replace(setup, costs=costs, limits=Limits(3, 1000 * NS_PER_S))
    failures = []
    for worker in ("e0", "e1"):
        times_s = accumulate(rng.uniform(0.1, 1.0) for _ in range(12))
        pairs = zip(times_s, times_s, strict=True)
        failures += [Failure(WorkerId(worker), lost_s, back_s) for lost_s, back_s in pairs]
    return setup, requests, failures


def late(rng: random.Random) -> Trace:
    """Requests time out wherever they are, and more come than are let in."""
    setup, requests, _ = rng.choice((heavy, shared, offloaded, tied))(rng)
    even = setup.costs == EVEN.costs
    timeout_ns = round(rng.choice((4.0, 7.0) if even else (0.2, 0.5, 1.0)) * NS_PER_S)
    setup = replace(setup, limits=Limits(2, timeout_ns), max_requests=rng.choice((4, 12)))
    return setup, requests, []


def too_long(rng: random.Random) -> Trace:
    """Some prompts for the engines of prefill, some answers for those of decode."""
    setup, requests, failures = rng.choice((medium, shared, offloaded, failing))(rng)
    long = 5000
    requests = [
        replace(each, num_text_tokens=rng.choice((10, long)), num_tokens=rng.choice((1, long)))
        if rng.random() < 0.3
        else each
        for each in requests
    ]
    prefill = replace(setup.prefill, kv_tokens=long)
    return replace(setup, prefill=prefill, decode=replace(prefill, holds=False)), requests, failures


TRACES: Sequence[Kind] = (
    light,
    medium,
    heavy,
    tied,
    bursts,
    shared,
    offloaded,
    adapted,
    failing,
    failing_in_ties,
    cut_off,
    late,
    too_long,
)
by_trace = pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
LENGTHY = (medium, heavy, bursts, offloaded, cut_off)
by_trace_with_marks = pytest.mark.parametrize(
    "trace",
    [pytest.param(each, marks=[pytest.mark.long] * (each in LENGTHY)) for each in TRACES],
    ids=lambda trace: trace.__name__,
)


def differ(simulated: Story, driven: Story) -> str:
    """The first difference; empty where there is none."""
    for number, (one, other) in enumerate(zip(simulated.steps, driven.steps, strict=False)):
        if one != other:
            return f"step {number}:\nsimulated {one}\ndriven    {other}"
    if len(simulated.steps) != len(driven.steps):
        return f"{len(simulated.steps)} steps were simulated, {len(driven.steps)} driven"
    return "" if simulated.ends == driven.ends else f"{simulated.ends}\n{driven.ends}"


@dataclass(slots=True)
class Seen:
    """What has happened in the traces of a kind, by name."""

    names: Counter[str]
    num_steps: int = 0
    num_at_one_instant: int = 0
    """Steps at the instant of the step before."""

    def add(self, story: Story) -> None:
        steps = story.steps
        self.num_steps += len(steps)
        self.num_at_one_instant += sum(one.now_ns == other.now_ns for one, other in pairwise(steps))
        for step in steps:
            self.names.update(type(each).__name__ for each in (*step.events, *step.actions))
            sent = [each for each in step.actions if isinstance(each, ev.StartEncode)]
            self.names["sent again"] += sum(not each.forward for each in sent)
        self.names["preempted"] += story.run.num_preempted
        self.names.update(end.outcome for end in story.ends.values())


USUAL = {"StartEncode", "StartPrefill", "StartDecode", "FirstToken", "Complete"}
LOSSES = {"WorkerLost", "failed", "rejected", "sent again"}
SEEN: dict[str, set[str]] = {
    "heavy": {"preempted"},
    "shared": {"sent again"},
    "offloaded": {"Divide"},
    "adapted": {"Retuned"},
    "failing": {*LOSSES, "DecodeFailed", "CancelEncode"},
    "too_long": {"failed", "PrefillFailed", "DecodeFailed"},
    "failing_in_ties": {*LOSSES, "DecodeFailed", "PrepareFailed"},
    "cut_off": {"EmbeddingMissing", "CancelEncode"},
    "late": {"Cancel", "CancelEncode", "Reject"},
}
"""What a kind of trace must bring to be worth anything."""


def both(trace: Trace) -> Story:
    """The simulated side, after it was compared."""
    setup, requests, failures = trace
    stories = simulated(setup, requests, failures), driven(setup, requests, failures)
    assert not differ(*stories)
    for story in stories:
        assert len(story.ends) == len(requests)
        assert (story.core.num_open, story.leaks()) == (0, {})
    return stories[0]


@by_trace_with_marks
def test_both_decide_alike(trace: Kind) -> None:
    seen = Seen(Counter())
    for seed in range(NUM_SEEDS):
        seen.add(both(trace(random.Random(seed))))
    missing = (USUAL | SEEN.get(trace.__name__, set())) - set(+seen.names)
    assert not missing
    assert seen.num_at_one_instant > seen.num_steps * (0.3 if "tie" in trace.__name__ else 0.05)


@pytest.mark.long
@by_trace
def test_both_decide_alike_over_many_seeds(trace: Kind) -> None:
    for seed in range(NUM_SEEDS, 5 * NUM_SEEDS):
        both(trace(random.Random(seed)))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_both_decide_alike_for_long(seed: int) -> None:
    setup, _, failures = failing(random.Random(seed))
    both((setup, poisson(random.Random(seed), 20, 500), failures))


# Faults that have to be found ---------------------------------------------------------------------


class Forgetful(Driver):
    """Does not arm its timer again."""

    def _flush(self) -> None:
        super()._flush()
        if self._timer is not None:
            self._timer.cancel()


class Hasty(Driver):
    """Steps the core for each event, whatever the instant still brings."""

    def _post(self, event: ev.Event) -> None:
        self._events.append(event)
        self._flush()


class Careless(Driver):
    """Lets run what a request does not need any more."""

    def _stop(self, job: Job) -> None:
        """Nothing is stopped."""


def light_and_fixed(rng: random.Random) -> Trace:
    setup, requests, failures = light(rng)
    return with_policy(setup, when="fixed"), requests, failures


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "trace", "num_found"),
    [(Forgetful, light_and_fixed, NUM_SEEDS), (Hasty, tied, NUM_SEEDS), (Careless, late, 10)],
)
def test_a_driver_with_a_fault_is_found_out(
    kind: type[Driver], trace: Kind, num_found: int
) -> None:
    found = 0
    for seed in range(NUM_SEEDS):
        setup, requests, failures = trace(random.Random(seed))
        one = simulated(setup, requests, failures)
        found += bool(differ(one, driven(setup, requests, failures, kind)))
    assert found >= num_found
