"""The simulator as an objective."""

import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easerve.goodput import Slo
from easerve.search.objective import Score, Unworkable
from easerve.search.simulated import SimulatedObjective, ladder, on_ladder
from easerve.search.space import SHARE, Allocation, Knob, Space
from easerve.sim import scenario as scenarios
from easerve.sim.config import EaserveSystem

IMAGES = Path(__file__).parents[2] / "scenarios/llava-34b-rtx6000ada.yaml"
CHANGES = {"encode.replicas": 2, "prefill.replicas": 2, "decode.replicas": 1}
OFFLOAD = {"local_prefill": {"tensor_parallel_size": 2}, "partition": None}
SPACE = Space([Allocation("e2-p2x2-d2", CHANGES, OFFLOAD)], [Knob(SHARE, (0.5, 1.0))])
SLO = Slo(12.0, 0.0962)
RATES = ladder(1.0, 4.0)


def objective(**over: int | str) -> SimulatedObjective:
    content = scenarios.laid(scenarios.read_content(IMAGES), {"workload.num_requests": 60, **over})
    return SimulatedObjective(content, SPACE, SLO, (2.0,), (1, 2))


def falling(knee: float) -> Callable[[float], Score]:
    """Everything is kept up to a rate, then less and less."""

    def at(rate_per_s: float) -> Score:
        attainment = min(1.0, (knee / rate_per_s) ** 4)
        return Score(rate_per_s * attainment, attainment, rate_per_s)

    return at


def test_a_ladder_goes_from_end_to_end_in_even_steps() -> None:
    assert RATES[0] == 1.0
    assert RATES[-1] == pytest.approx(4.0)
    steps = [higher / lower for lower, higher in pairwise(RATES)]
    assert max(steps) <= 1.1
    assert max(steps) - min(steps) < 1e-9


@given(st.floats(1.05, 3.5))
def test_halving_finds_what_trying_every_rate_would(knee: float) -> None:
    at, asked = falling(knee), list[float]()

    def counted(rate_per_s: float) -> Score:
        asked.append(rate_per_s)
        return at(rate_per_s)

    found = on_ladder(RATES, 0.9, counted)
    kept = max(rate for rate in RATES if at(rate).attainment >= 0.9)
    assert kept <= found.rate_per_s <= kept * 1.1
    assert found.rate_per_s == pytest.approx(knee / 0.9**0.25, rel=0.025), "a kink between rates"
    assert len(asked) <= 6
    assert len(set(asked)) == len(asked)


def test_the_ends_of_a_ladder() -> None:
    lowest = on_ladder(RATES, 0.9, falling(0.5))
    assert lowest.rate_per_s == 1.0
    assert lowest.attainment == pytest.approx(0.0625)
    assert on_ladder(RATES, 0.9, falling(9.0)).rate_per_s == pytest.approx(4.0)
    assert on_ladder((2.0,), 0.9, falling(9.0)) == Score(2.0, 1.0, 2.0)


def test_a_configuration_is_simulated_as_its_changes_say() -> None:
    asked = objective()
    half, whole = SPACE
    assert asked.scenario(half).configs["easerve"].num_gpus == 8
    alone = asked.scenario(whole).configs["easerve"]
    assert isinstance(alone, EaserveSystem)
    assert alone.local_prefill is None
    assert asked.score(half, 1) == asked.score(half, 1)
    assert asked.score(half, 1) != asked.score(half, 2)
    assert asked.score(half, 1).attainment > 0.9


def test_it_is_known_by_all_that_decides_a_score(tmp_path: Path) -> None:
    asked = objective()
    assert asked.key == objective().key
    assert asked.key != objective(**{"workload.num_requests": 61}).key
    assert asked.key != objective(**{"systems.easerve.prepare_s": 1}).key
    assert asked.key == objective(title=1).key
    profile = tmp_path / "profile.yaml"
    profile.write_text("one")
    measured = {"costs.source": "profile", "costs.profile": str(profile)}
    before = objective(**measured).key
    profile.write_text("two")
    assert objective(**measured).key != before
    assert pickle.loads(pickle.dumps(asked)).key == asked.key


def test_what_cannot_be_simulated_says_why() -> None:
    changes = {**CHANGES, "prefill.tensor_parallel_size": 1}
    space = Space([Allocation("e2-p1-d2", changes)], SPACE.knobs)
    content = scenarios.read_content(IMAGES)
    asked = SimulatedObjective(content, space, SLO, (2.0,), (1,))
    with pytest.raises(Unworkable, match="tensor_parallel_size 1: an engine needs"):
        asked.score(next(iter(space)), 1)
