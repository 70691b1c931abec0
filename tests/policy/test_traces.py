"""Whole traces through the core: what must hold at any rate, for every rule; see ``invariants``."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from easerve.costs.linear import LinearCosts
from easerve.policy.batching import RULES
from easerve.policy.knobs import Knobs
from easerve.policy.share import RULES as SIDES
from easerve.types import NS_PER_S, MediaItem, Modality

from .scenario import D0, DEFAULTS, E0, E1, L0, P0, P1, joined, shape_of
from .virtual import Arrival, World, gamma_gaps_s

pytestmark = pytest.mark.long
NUM_REQUESTS = 60
COSTS = LinearCosts(
    encode_base_s=0.1,
    encode_token_s=0.001,
    prefill_base_s=0.02,
    prefill_token_s=0.0005,
    decode_token_s=0.01,
)
TOKENS = [30, 30, 30, 60, 300]


def steady(rate_per_s: float, cv: float = 1.0) -> Callable[[Random], Iterable[float]]:
    return lambda random: gamma_gaps_s(random, rate_per_s, cv)


def silence(random: Random) -> Iterable[float]:
    busy = list(islice(gamma_gaps_s(random, 20), NUM_REQUESTS // 2))
    return [*busy, 100.0, *busy]


def steps(random: Random) -> Iterable[float]:
    rates = [1.0, 10.0, 0.5, 50.0]
    each = NUM_REQUESTS // len(rates)
    return [gap for rate in rates for gap in islice(gamma_gaps_s(random, rate), each)]


TRACES: Mapping[str, Callable[[Random], Iterable[float]]] = {
    "rare": steady(0.1),
    "light": steady(2),
    "busy": steady(8),
    "flood": steady(1000),
    "bursts": steady(5, cv=2),
    "great bursts": steady(5, cv=4),
    "silence": silence,
    "steps": steps,
}


def arrivals(trace: str, random: Random) -> list[Arrival]:
    """Mostly pictures, some shared; some requests are texts."""
    made, at_s = [], 0.0
    for gap_s in islice(TRACES[trace](random), NUM_REQUESTS):
        at_s += gap_s
        keys = random.sample(range(200), random.choice([0, 1, 1, 1, 2, 4]))
        items = (MediaItem(str(key), Modality.IMAGE, TOKENS[key % len(TOKENS)]) for key in keys)
        made.append(Arrival(int(at_s * NS_PER_S), shape_of(*items)))
    return made


def knobs_for(rule: str, random: Random) -> Knobs:
    return replace(
        DEFAULTS,
        when=rule,
        max_batch_items=random.choice([2, 4, 16]),
        gap_k=random.choice([0.25, 1.0, 4.0]),
        timeout_s=random.choice([0.02, 0.2]),
        spread=random.random() < 0.5,
        run_ahead=random.choice([0, 1, 2]),
        group_by_size=random.random() < 0.5,
        flow=random.random() < 0.5,
        ttft_slo_s=random.choice([None, 2.0]),
        tpot_slo_s=random.choice([None, 0.02]),
        max_queue_s=1e6,
        where=random.choice(list(SIDES)),
        remote_share=random.choice([0.0, 0.4, 1.0]),
    )


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("rule", RULES)
def test_everything_is_served_and_nothing_waits_in_vain(rule: str, trace: str) -> None:
    random = Random(f"{rule} {trace}")
    encoders = [joined(E0, max_batch_tokens=400), joined(E1, max_batch_tokens=2048)]
    decode = joined(D0, num_slots=random.choice([3, 256]))
    prefills = [joined(P0), random.choice([joined(P1), joined(L0)])]
    engines = [*encoders[: random.choice([1, 2])], *prefills, decode]
    world = World(knobs_for(rule, random), COSTS, engines)
    world.run(arrivals(trace, random))
    assert list(world.model.ends.values()) == ["complete"] * NUM_REQUESTS
    assert world.num_steps < 50 * NUM_REQUESTS
