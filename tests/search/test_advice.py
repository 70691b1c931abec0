"""Verdicts on systems whose engines cost what a test says, and on small scenarios."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easerve.cli import advise_shown as shown
from easerve.config import ConfigError
from easerve.goodput import Slo
from easerve.search import advice as advice_
from easerve.search import trying
from easerve.search.advice import SPLIT, WHOLE, Advice, Capacity, advise, capacity, ladder
from easerve.search.contenders import (
    AGGREGATED,
    E_P_D,
    E_PD,
    OURS,
    Contender,
    Family,
    Machine,
    alone,
    families,
    machine_of,
)
from easerve.search.reason import reason
from easerve.search.trying import Candidate, Load, Outcome, Point, Steps, Task
from easerve.sim.config import SECTIONS, VllmEpdSystem
from easerve.sim.scenario import laid

from ..sim.scenarios import SMALL

SLO = Slo(ttft_s=10.0, tpot_s=0.1)
TEXT = {**SMALL, "workload": {"rate_per_s": 2, "items": [{}], "num_requests": 20}}
TWO_GPUS = {
    **{key: each for key, each in SMALL.items() if key != "systems"},
    "num_gpus": 2,
    "system": "vllm",
    "systems": {"vllm": {"replicas": 1, "tensor_parallel_size": 2}},
}


def content(**over: Any) -> dict[str, Any]:
    return {**SMALL, **over}


def fits(*degrees: int, whole: Sequence[int] | None = None, num: int = 8) -> Machine:
    """A machine whose engines may have so many devices, with an encoder ``whole`` of them."""

    def refuses(tp: int, with_encoder: bool) -> str | None:
        known = degrees if whole is None or not with_encoder else whole
        return None if tp in known else f"{tp} is too few"

    return Machine(num, (1, 2, 4, 8), refuses)


def named(machine: Machine, over: Mapping[str, Any] | None = None) -> dict[str, list[str]]:
    found = families(over or SMALL, machine, chunks=())
    return {family.name: [each.name for each in family.contenders] for family in found}


# Who is compared ----------------------------------------------------------------------------------


def test_all_topologies_that_use_the_machine_are_there() -> None:
    found = named(fits(2, 4))
    assert found[AGGREGATED] == ["tp2x4", "tp4x2"]
    assert found[E_PD] == ["e6-pd2", "e4-pd2x2", "e2-pd2x3", "e4-pd4"]
    assert found[E_P_D] == ["e4-p2-d2", "e2-p2-d2x2", "e2-p2-d4", "e2-p2x2-d2", "e2-p4-d2"]
    assert [name for name in found[OURS] if "share" not in name] == found[E_P_D]
    assert sum("share" in name for name in found[OURS]) == len(found[E_P_D])


def test_without_room_beside_an_encoder_all_prefill_is_remote() -> None:
    found = named(fits(2, 4, whole=[8]))
    assert found[AGGREGATED] == ["tp8"]
    assert found[OURS] == found[E_P_D]


def test_what_is_left_of_devices_idles_only_with_whole_engines() -> None:
    found = named(fits(2, num=7))
    assert found[AGGREGATED] == ["tp2x3"]
    assert "e1-pd2x3" in found[E_PD]
    assert not any("share" in name and name.startswith("e1") for name in found[OURS])


def test_engines_on_a_cpu_need_not_be_as_many_as_they_may() -> None:
    machine = Machine(3, (1,), lambda tp, with_encoder: None, shares=True)
    found = named(machine)
    assert found[AGGREGATED] == ["tp1", "tp1x2", "tp1x3"]
    assert found[E_PD] == ["e1-pd1", "e2-pd1", "e1-pd1x2"]
    assert found[E_P_D] == ["e1-p1-d1"]


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 5), st.sets(st.sampled_from((1, 2, 4))))
def test_nobody_has_more_devices_than_there_are(num: int, degrees: set[int]) -> None:
    base = {**TWO_GPUS, "num_gpus": num, "systems": {}, "model": "tiny-llava"}
    machine = Machine(num, (1, 2, 4), lambda tp, whole: None if tp in degrees else "no")
    for family in families(base, machine, chunks=(256,)):
        assert bool(family.contenders) or family.refused
        names = [each.name for each in family.contenders]
        assert len(names) == len(set(names))
        for each in family.contenders:
            section = laid({}, each.changes)["systems"][each.system]
            used = SECTIONS[each.system].model_validate(section).num_gpus
            assert used <= num
            assert family.name == AGGREGATED or used == num


def test_whole_engines_are_tried_with_other_steps() -> None:
    whole, e_pd, *_ = families(SMALL, fits(4), chunks=(256, 2048))
    assert [each.name for each in whole.contenders] == ["tp4x2", "tp4x2 chunk 256"]
    scenario = alone(SMALL, e_pd.contenders[1])
    config = scenario.configs["vllm-epd"]
    assert isinstance(config, VllmEpdSystem)
    assert (config.prefill, config.decode.max_num_batched_tokens) == (None, 256)
    assert scenario.configs.keys() == {"vllm-epd"}


def test_a_machine_says_why_engines_do_not_fit() -> None:
    machine = machine_of(SMALL)
    assert machine.num_devices == 8
    assert "an engine needs 70.4 GB" in (machine.refuses(1, False) or "")
    assert machine.refuses(2, True) is None
    long = content(workload={**SMALL["workload"], "text_tokens": 100_000})
    assert "a request has up to" in (machine_of(long).refuses(2, True) or "")


def test_failures_are_not_compared() -> None:
    with pytest.raises(ConfigError, match=r"failures: .*--set failures=\[\]"):
        machine_of(content(failures=[{"worker": "e0", "at_s": 1}]))


# The highest rate that is kept --------------------------------------------------------------------


def point(rate: float, attainment: float) -> Point:
    return Point(rate, rate * attainment, attainment)


@pytest.mark.parametrize(
    ("attainments", "expected"),
    [
        ([1.0, 1.0, 0.8], Capacity(2.5, 2.2)),
        ([1.0, 0.9, 0.8], Capacity(2.0, 1.8)),
        ([1.0, 1.0, 1.0], Capacity(3.0, 3.0, at_least=True)),
        ([0.5, 0.2, 0.1], None),
    ],
)
def test_a_capacity_is_between_rates(
    attainments: Sequence[float], expected: Capacity | None
) -> None:
    found = capacity([point(rate, each) for rate, each in enumerate(attainments, 1)])
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.rate_per_s == pytest.approx(expected.rate_per_s)
    assert found.goodput_per_s == pytest.approx(expected.goodput_per_s)
    assert found.at_least is expected.at_least


@given(st.floats(1e-3, 1e4))
def test_a_ladder_has_round_rungs_to_the_top(top: float) -> None:
    rates = ladder(top)
    assert 4 <= len(rates) <= 9
    assert rates[-1] >= 1.1 * top * 0.999
    assert rates[-2] < 1.1 * top
    steps = [high - low for low, high in zip((0.0, *rates), rates, strict=False)]
    assert steps == pytest.approx([rates[0]] * len(rates), rel=1e-3)


class World:
    """Each family keeps all of what is offered up to its capacity, and then falls off."""

    broken_from: float | None = None
    """A share of the capacity; None: all of it."""

    def __init__(self, capacities: Mapping[str, float], **outcome: Any) -> None:
        self.capacities, self.outcome = capacities, outcome
        self.tasks: list[tuple[str, float, int]] = []

    def run(self, task: Task) -> Outcome:
        workload = task.scenario.workload
        rate = workload.rate_per_s or 0.0
        name = task.scenario.title
        self.tasks.append((name, rate, workload.seed))
        most = self.capacities[name] * (1.0 if self.broken_from is None else self.broken_from)
        most = max(most, 1e-6)
        attainment = 1.0 if rate <= most else max(0.0, 1 - 3 * (rate - most) / most)
        broken = round(100 * (1 - attainment))
        given = {
            "num_media": 100,
            "num_late": 0,
            "num_slow": broken,
            "ttft_s": 1.0,
            "tpot_s": 0.12,
            "utilisation": {"encode": 0.02, "prefill": 0.97, "decode": 1.0},
            "steps": Steps(0.8, 0.05, 0.4),
            **self.outcome,
        }
        return Outcome(
            num_requests=100, goodput_per_s=rate * attainment, attainment=attainment, **given
        )


def told(
    monkeypatch: pytest.MonkeyPatch, capacities: Mapping[str, float], **outcome: Any
) -> tuple[Advice, World]:
    """Families whose one topology has the name of the family."""
    world = World(capacities, **outcome)
    monkeypatch.setattr(trying, "run", world.run)

    def made(name: str, scenario: Any, variants: Any = ()) -> Candidate:
        titled = scenario.model_copy(update={"title": name})
        return Candidate(name, titled, 1.2 * capacities[name])

    monkeypatch.setattr(trying, "candidate", made)
    refused = [] if AGGREGATED in capacities else [Family(AGGREGATED, (), ["8 GPUs are too few"])]
    some = [Family(name, [Contender(name, "easerve", {})]) for name in capacities]
    return advise(SMALL, [*refused, *some], Load(SLO), (1, 2)), world


def test_a_split_that_keeps_more_wins_from_the_break_even_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advice, world = told(monkeypatch, {AGGREGATED: 2.0, E_PD: 1.0, E_P_D: 2.4, OURS: 3.0})
    assert (advice.verdict, advice.winner.name) == (SPLIT, OURS)
    assert advice.break_even_per_s == pytest.approx(2.0, rel=0.06)
    assert len(world.tasks) < 250
    found = {each.name: each.capacity for each in advice.servings}
    for name, most in world.capacities.items():
        kept = found[name]
        assert kept is not None
        assert kept.rate_per_s == pytest.approx(most * (1 + 0.1 / 3), rel=0.01)
    assert reason(advice, SLO).startswith(
        "aggregated engines break the TPOT promise first: at 2.12/s steps with prompts, 800 ms "
        "each, hold decodes up (steps of decodes alone take 50 ms), so that the P90 TPOT reaches "
        "120 ms where 100 ms is promised; EAServe (EAServe) decodes apart"
    ), reason(advice, SLO)


def test_late_requests_are_a_broken_ttft(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities = {AGGREGATED: 2.0, OURS: 3.0}
    advice, _ = told(monkeypatch, capacities, num_late=200, ttft_s=12.0)
    assert "aggregated engines break the TTFT promise first" in reason(advice, SLO)
    assert "the P90 TTFT reaches 12 s where 10 s is promised" in reason(advice, SLO)


def test_what_is_as_good_and_simpler_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    advice, _ = told(monkeypatch, {AGGREGATED: 3.0, E_PD: 1.0, OURS: 3.01})
    assert (advice.verdict, advice.winner.name) == (WHOLE, AGGREGATED)
    assert advice.break_even_per_s is None
    simple, _ = told(monkeypatch, {AGGREGATED: 1.0, E_PD: 3.0, OURS: 3.01})
    assert simple.winner.name == E_PD


def test_the_bottleneck_of_a_split_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    late = {"num_late": 300, "num_slow": 0}
    advice, _ = told(monkeypatch, {AGGREGATED: 3.0, OURS: 2.0}, **late)
    said = reason(advice, SLO)
    assert "the prefill engines, busy for 97 % of the time, of EAServe (EAServe) hold it up" in said
    assert "its encoders are busy for 2 % of the time" in said


def test_text_alone_has_nothing_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    advice, _ = told(monkeypatch, {AGGREGATED: 3.0, OURS: 2.0}, num_media=0)
    assert "no request has media" in reason(advice, SLO)


def test_where_whole_engines_do_not_fit_a_split_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    advice, _ = told(monkeypatch, {OURS: 2.0})
    assert (advice.verdict, advice.winner.name) == (SPLIT, OURS)
    assert advice.break_even_per_s == advice.rates_per_s[0]
    assert reason(advice, SLO) == "whole engines cannot be: 8 GPUs are too few"


def test_a_promise_that_nobody_keeps_is_no_reason_to_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(World, "broken_from", 0.0)
    advice, _ = told(monkeypatch, {AGGREGATED: 2.0, OURS: 3.0})
    assert (advice.verdict, advice.winner.name) == (WHOLE, AGGREGATED)
    assert [each.capacity for each in advice.servings] == [None, None]
    assert "whole engines keep the promise at no rate" in reason(advice, SLO)


def test_where_only_a_split_can_be_it_is_no_reason_against_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although nothing keeps the promise."""
    monkeypatch.setattr(World, "broken_from", 0.0)
    advice, _ = told(monkeypatch, {OURS: 3.0})
    assert (advice.verdict, advice.winner.name) == (SPLIT, OURS)
    assert advice.break_even_per_s is None
    said = " ".join(shown.verdict(shown.About("t", 8, "S3", SLO, False, Load(SLO)), advice))
    assert "Break-even: none" in said
    assert "EAServe keeps the promise at no rate that was tried" in said


def test_a_contender_that_cannot_be_is_no_end_of_the_others() -> None:
    one, *others = families(SMALL, machine_of(SMALL), chunks=())
    good = one.contenders[0]
    bad = Contender("bad", good.system, {f"systems.{good.system}.replicas": 0})
    found, _ = advice_._possible(SMALL, [Family("f", [bad, good])], map, lambda *_: None)
    assert [each.name for each in found["f"]] == [good.name]
    assert others


def test_without_anything_that_fits_all_reasons_are_given() -> None:
    none = Machine(1, (1, 2), lambda tp, with_encoder: f"{tp} is too few")
    with pytest.raises(ConfigError, match="no system can serve this:\n1 is too few\n2 is too few"):
        advise(TWO_GPUS, families(TWO_GPUS, none), Load(SLO), (1,))


# Which topology -----------------------------------------------------------------------------------


def test_topologies_are_tried_only_where_they_can_be_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capacities = {"good": 3.0, "twin": 3.0, "worse": 1.0, "hopeless": 2.0, "variant": 3.5}
    world = World(capacities)
    monkeypatch.setattr(trying, "run", world.run)
    scenario = alone(SMALL, Contender("", "easerve", {}))
    made = {
        name: Candidate(name, scenario.model_copy(update={"title": name}), bound)
        for name, bound in {"good": 4.0, "twin": 3.9, "worse": 3.8, "hopeless": 2.1}.items()
    }
    variants = (("variant", scenario.model_copy(update={"title": "variant"})),)
    made["good"] = Candidate("good", made["good"].scenario, 4.0, variants)
    chosen = trying.choose([*made.values()], Load(SLO), seed=1, floor_per_s=0.25)
    assert chosen.candidate.name == "variant"
    assert chosen.rate_per_s == pytest.approx(3.5, rel=0.06)
    assert chosen.pruned.keys() == {"good", "twin", "worse", "hopeless"}
    assert chosen.pruned["hopeless"] == "its engines can do 2.1/s at best"
    assert "of requests keep the promise" in chosen.pruned["worse"]
    tried = [name for name, _, _ in world.tasks]
    assert (tried.count("twin"), tried.count("worse"), tried.count("hopeless")) == (1, 1, 0)


def test_where_none_keeps_the_promise_the_most_goodput_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World({"worse": 0.8, "better": 0.9})
    monkeypatch.setattr(trying, "run", world.run)
    scenario = alone(SMALL, Contender("", "easerve", {}))
    some = [
        Candidate(name, scenario.model_copy(update={"title": name}), 2.0)
        for name in world.capacities
    ]
    chosen = trying.choose(some, Load(SLO), seed=1, floor_per_s=1.0)
    assert (chosen.candidate.name, chosen.rate_per_s) == ("better", None)
    assert chosen.pruned.keys() == {"worse"}


def test_a_run_lasts_long_enough_to_tell() -> None:
    scenario = alone(SMALL, Contender("", "easerve", {}))
    load = Load(SLO, max_requests=500)
    numbers = [load.at(scenario, rate, 3).workload.num_requests for rate in (0.1, 2.0, 100.0)]
    assert numbers == [200, 245, 500]
    assert load.unseen(4.0) == pytest.approx(0.0976, rel=1e-3)
    assert load.unseen(100.0) == float("inf")


# With the simulator -------------------------------------------------------------------------------


def test_a_run_counts_which_promise_was_broken() -> None:
    scenario = alone(SMALL, Contender("", "easerve", {}))
    loose, strict = (
        trying.run(Task(scenario, slo, traced=True)) for slo in (Slo(100.0, 10.0), Slo(1e-3, 1e-3))
    )
    assert (loose.attainment, loose.num_late, loose.num_slow) == (1.0, 0, 0)
    assert (strict.attainment, strict.num_late, strict.num_slow) == (0.0, 20, 20)
    assert loose.num_media == 20
    assert loose.steps is not None
    assert 0 < (loose.steps.decodes_s or 0) < (loose.steps.with_prompts_s or 0)
    assert 0 < loose.steps.prompts_share < 1


def test_two_gpus_hold_no_split() -> None:
    found = families(TWO_GPUS, machine_of(TWO_GPUS), chunks=())
    advice = advise(TWO_GPUS, found, Load(Slo(10.0, 0.2), max_requests=20), (1,))
    assert (advice.verdict, advice.winner.name) == (WHOLE, AGGREGATED)
    assert advice.impossible.keys() == {E_PD, E_P_D, OURS}
    assert "an engine of each kind needs 3 devices in all, and there are 2" in reason(advice, SLO)


def test_a_verdict_repeats() -> None:
    found = families(TWO_GPUS, machine_of(TWO_GPUS), chunks=())
    load = Load(Slo(10.0, 0.2), max_requests=5)
    first, again = (advise(TWO_GPUS, found, load, (1,), [0.5, 1.0]) for _ in range(2))
    assert first == again
    assert first.rates_per_s == (0.5, 1.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("base", "chunks", "expected"), [(SMALL, (), SPLIT), (TEXT, (256,), WHOLE)]
)
def test_pictures_are_worth_a_split_and_text_is_not(
    base: dict[str, Any], chunks: Sequence[int], expected: str
) -> None:
    """Pictures with vLLM's default of a step's tokens, text with fewer as well."""
    tight = Slo(12.0, 0.0962)
    found = families(base, machine_of(base), chunks)
    some = [each for each in found if each.name in (AGGREGATED, OURS)]
    advice = advise(base, some, Load(tight, max_requests=300), (1,))
    assert advice.verdict == expected, reason(advice, tight)
