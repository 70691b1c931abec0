"""What any queue must do: known waiting times, Little's law, no idling with work, no magic.

The engines are fed by Poisson arrivals; every number is drawn from a seed, so a run is the same
whenever it is repeated. Tolerances are a few standard errors of the mean over that many arrivals.
"""

import os
import random
import subprocess
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import fmean

import pytest

from easerve.costs.base import Media
from easerve.policy.batching import RULES
from easerve.sim import sequences
from easerve.sim.bound import bound_per_s
from easerve.sim.clock import Effect
from easerve.sim.encoder import Call, EncodeEngine, EncodeLimits
from easerve.sim.llm import LlmEngine, LlmLimits
from easerve.sim.oracle import pollaczek_khinchine_s
from easerve.sim.run import Request, Run, Span
from easerve.sim.scenario import read
from easerve.sim.sharing import Own
from easerve.sim.simulate import make_world, simulate
from easerve.types import NS_PER_S, Modality, Stage

from .modelled import Costs, Setup, simulated, with_policy
from .play import play
from .scenarios import SCENARIOS, write

pytestmark = pytest.mark.long

# A forward takes as many milliseconds as the item has tokens, a prompt as it has.
COSTS = Costs(0.0, 0.001, 0.0, 0.001, 0.01, 0.0)
TOKENS = (20, 40, 180)
"""Of an item or a prompt: 80 ms on average, with a standard deviation of 71 ms."""


def arrivals_s(rng: random.Random, rate_per_s: float, num: int) -> list[float]:
    return list(accumulate(rng.expovariate(rate_per_s) for _ in range(num)))


class Queue(ABC):
    """An engine that does one thing at a time: when each came, and when it was done (s)."""

    def __init__(self) -> None:
        self.run = Run(traced=True)
        self.came_s: dict[int, float] = {}
        self.done_s: dict[int, float] = {}

    @abstractmethod
    def submit(self, number: int, tokens: int, now_ns: int) -> Iterable[Effect]: ...

    def done(self, number: int, now_ns: int) -> Iterator[Effect]:
        self.done_s[number] = now_ns / NS_PER_S
        yield from ()

    def play(self, times_s: Sequence[float], tokens: Sequence[int]) -> None:
        self.came_s = dict(enumerate(times_s))
        play(
            *(
                (at_s, partial(self.submit, number, each))
                for number, (at_s, each) in enumerate(zip(times_s, tokens, strict=True))
            )
        )

    def mean_wait_s(self, tokens: Sequence[int]) -> float:
        """Until service begins."""
        return fmean(
            self.done_s[number] - self.came_s[number] - 0.001 * each
            for number, each in enumerate(tokens)
        )


class EncodeQueue(Queue):
    def __init__(self) -> None:
        super().__init__()
        self._engine = EncodeEngine("x", COSTS, Own(), EncodeLimits(), self.run)

    def submit(self, number: int, tokens: int, now_ns: int) -> Iterable[Effect]:
        call = Call([Media(Modality.IMAGE, tokens)], partial(self.done, number))
        return self._engine.submit(call, now_ns)


class PrefillQueue(Queue):
    def __init__(self) -> None:
        super().__init__()
        limits = LlmLimits(1 << 40, 1 << 30, 1 << 30, chunked=False, max_prompts=1)
        self._engine = LlmEngine("x", Stage.PREFILL, COSTS, Own(), limits, self.run)

    def submit(self, number: int, tokens: int, now_ns: int) -> Iterable[Effect]:
        sequence = sequences.Sequence(number, tokens, 1, partial(self.done, number))
        return self._engine.submit(sequence, now_ns)


every_queue = pytest.mark.parametrize("make", [EncodeQueue, PrefillQueue])


def test_the_formula_is_half_the_busy_share_for_services_that_are_alike() -> None:
    assert pollaczek_khinchine_s(5.0, [0.1]) == pytest.approx(0.5 * 0.1 / (2 * 0.5))
    with pytest.raises(ValueError, match="work comes to one"):
        pollaczek_khinchine_s(12.0, [0.1])


def mean_wait_s(make: Callable[[], Queue], load: float, num: int, tokens: Sequence[int]) -> float:
    """The mean, after every single wait was compared: what is there is what was there, and came,
    less what has been done since (Lindley's recursion).
    """
    rng, queue = random.Random(1), make()
    drawn = [rng.choice(tokens) for _ in range(num)]
    times_s = arrivals_s(rng, load / 0.08, num)
    queue.play(times_s, drawn)
    wait_s = last_s = 0.0
    for number, (at_s, each) in enumerate(zip(times_s, drawn, strict=True)):
        wait_s = max(0.0, wait_s - (at_s - last_s))
        assert queue.done_s[number] == pytest.approx(at_s + wait_s + 0.001 * each, abs=1e-6)
        wait_s, last_s = wait_s + 0.001 * each, at_s
    return queue.mean_wait_s(drawn)


by_load = pytest.mark.parametrize("load", [0.5, 0.8])
by_tokens = pytest.mark.parametrize("tokens", [(80,), TOKENS], ids=["M/D/1", "M/G/1"])


def expected_s(load: float, tokens: Sequence[int]) -> float:
    return pollaczek_khinchine_s(load / 0.08, [0.001 * each for each in tokens])


@every_queue
@by_load
@by_tokens
def test_waiting_is_what_pollaczek_and_khinchine_say(
    make: Callable[[], Queue], load: float, tokens: Sequence[int]
) -> None:
    assert mean_wait_s(make, load, 4000, tokens) == pytest.approx(
        expected_s(load, tokens), rel=0.25
    )


@pytest.mark.long
@every_queue
@by_load
@by_tokens
def test_waiting_is_what_pollaczek_and_khinchine_say_in_the_long_run(
    make: Callable[[], Queue], load: float, tokens: Sequence[int]
) -> None:
    found_s = mean_wait_s(make, load, 100_000, tokens)
    assert found_s == pytest.approx(expected_s(load, tokens), rel=0.06)


@every_queue
def test_no_engine_idles_while_there_is_work(make: Callable[[], Queue]) -> None:
    """It begins when something comes, or at once with what waits, and does all of it."""
    rng, queue = random.Random(3), make()
    drawn = [rng.choice(TOKENS) for _ in range(2000)]
    queue.play(arrivals_s(rng, 10, 2000), drawn)
    assert queue.run.busy_s["x"] == pytest.approx(0.001 * sum(drawn))
    spans = queue.run.spans
    came_ns = {round(at_s * NS_PER_S) for at_s in queue.came_s.values()}
    assert spans[0].begin_ns in came_ns
    for before, after in pairwise(spans):
        assert after.begin_ns == before.end_ns or after.begin_ns in came_ns
        if after.begin_ns > before.end_ns:  # it had nothing left
            assert _num_there(queue, before.end_ns) == 0


def _num_there(queue: Queue, at_ns: int) -> int:
    at_s = at_ns / NS_PER_S
    came = bisect_right(list(queue.came_s.values()), at_s)
    return came - sum(each <= at_s for each in queue.done_s.values())


# A whole deployment -------------------------------------------------------------------------------


def poisson(seed: int, rate_per_s: float, num: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            at_s,
            tuple(Media(Modality.IMAGE, rng.choice((100, 300))) for _ in range(rng.randint(0, 2))),
            rng.randint(20, 200),
            rng.choice((1, 10, 40)),
        )
        for at_s in arrivals_s(rng, rate_per_s, num)
    ]


def test_little_is_right() -> None:
    """The mean number in the system is the rate by the mean time in it: counted apart."""
    requests = poisson(1, 8, 400)
    story = simulated(Setup(), requests, [])
    ends_ns = [end.end_ns for _, end in sorted(story.ends.items())]
    begins_ns = [round(request.at_s * NS_PER_S) for request in requests]
    changes = sorted([(at, 1) for at in begins_ns] + [(at, -1) for at in ends_ns])
    area, there = 0, 0
    for (at, change), (following, _) in pairwise(changes):
        there += change
        area += there * (following - at)
    mean_s = fmean(b - a for a, b in zip(begins_ns, ends_ns, strict=True)) / NS_PER_S
    length_s = (changes[-1][0] - changes[0][0]) / NS_PER_S
    mean_there = area / NS_PER_S / length_s
    assert mean_there == pytest.approx(len(requests) / length_s * mean_s)


@pytest.mark.parametrize("when", RULES)
def test_whatever_the_rule_every_stage_does_its_work_once(when: str) -> None:
    """Busy times are the sums of the services; no engine does two things at a time."""
    requests = poisson(2, 12, 150)
    setup = with_policy(Setup(), when=when)
    run = simulated(setup, requests, []).run
    num_items = sum(len(request.items) for request in requests)
    assert run.num_items == num_items
    tokens = sum(item.num_tokens for request in requests for item in request.items)
    busy_s = {
        stage: sum(run.busy_s[name] for name in run.stages if run.stages[name] is stage)
        for stage in Stage
    }
    costs = setup.costs
    worked_s = costs.encode_base_s * run.num_calls + costs.encode_token_s * tokens
    assert busy_s[Stage.ENCODE] == pytest.approx(worked_s)
    prompts = sum(request.num_prompt_tokens for request in requests)
    worked_s = costs.prefill_base_s * len(requests) + costs.prefill_token_s * prompts
    assert busy_s[Stage.PREFILL] == pytest.approx(worked_s)
    assert run.num_preempted == 0


def test_engines_do_one_thing_at_a_time(tmp_path: Path) -> None:
    scenario = read(write(tmp_path / "x.yaml", workload={"rate_per_s": 4}))
    for system in scenario.configs:
        spans = simulate(scenario, system, traced=True).spans
        work = [span for span in spans if span.kind in ("encode", "prefill", "decode", "mixed")]
        assert work
        for engine in {span.engine for span in work}:
            assert _overlaps(span for span in work if span.engine == engine) == 0


def _overlaps(spans: Iterable[Span]) -> int:
    ordered = sorted(spans, key=lambda span: (span.begin_ns, span.end_ns))
    return sum(after.begin_ns < before.end_ns for before, after in pairwise(ordered))


@pytest.mark.parametrize("change", [{}, {"local_prefill": None, "partition": None}])
@pytest.mark.parametrize("max_num_seqs", [4, 256])
def test_no_run_does_more_than_the_bound(
    tmp_path: Path, change: dict[str, None], max_num_seqs: int
) -> None:
    """Everything is there at the beginning, so that batches are as full as they get."""
    policy = {"remote_share": 1.0 if change else 0.5, "max_queue_s": 1e6}
    scenario = read(
        write(
            tmp_path / "x.yaml",
            workload={"rate_per_s": 1000, "num_requests": 60},
            systems={"easerve": {**change, "policy": policy}},
        ),
        over=[f"systems.easerve.decode.max_num_seqs={max_num_seqs}"],
    )
    run = simulate(scenario, "easerve")
    bound = bound_per_s(scenario.configs["easerve"], make_world(scenario, Run()))
    assert {record.outcome for record in run.records} == {"completed"}
    assert 0.2 * bound < len(run.records) / run.end_s <= bound


# Determinism --------------------------------------------------------------------------------------

DIGEST = """
import hashlib, sys
from pathlib import Path
from easerve.sim.scenario import read
from easerve.sim.simulate import simulate
scenario = read(Path(sys.argv[1]), over=["workload.num_requests=40", "costs.source=roofline"])
for system in scenario.configs:
    run = simulate(scenario, system, traced=True)
    text = repr((run.records, run.ids, run.spans, run.batches, sorted(run.busy_ns.items())))
    print(system, hashlib.sha256(text.encode()).hexdigest())
"""


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml")
    first, second, other = (
        simulate(read(path, over=over), "easerve", traced=True)
        for over in ((), (), ["workload.seed=2"])
    )
    assert (first.records, first.spans) == (second.records, second.spans)
    assert first.records != other.records


@pytest.mark.long
def test_no_run_depends_on_how_python_hashes() -> None:
    path = SCENARIOS / "llava-34b-rtx6000ada.yaml"
    found = [
        subprocess.run(
            [sys.executable, "-c", DIGEST, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert len(found[0].splitlines()) >= 3
