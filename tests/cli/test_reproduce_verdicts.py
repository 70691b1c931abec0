from pathlib import Path

import pytest

from easerve.cli.reproduce.plan import FITTED, UNTUNED, Side
from easerve.cli.reproduce.verdicts import (
    Best,
    Elsewhere,
    Verdict,
    compared,
    consistencies,
    is_within,
    verdict,
)
from easerve.sim.scenario import Anchor, Rival
from tests.cli import reproduction


def anchor(
    published: float, metric: str = "ttft_s.p99", system: str = "easerve", over: str | None = None
) -> Anchor:
    rival = None if over is None else Rival(system=over)
    return Anchor(
        system=system,
        rate_per_s=2,
        metric=metric,
        published=published,
        source="abstract",
        over=rival,
    )


@pytest.mark.parametrize(
    ("published", "simulated", "within"),
    [(10, 12.5, True), (10, 7.5, True), (10, 12.6, False), (10, 7.4, False), (10, 10, True)],
)
def test_within_a_quarter(published: float, simulated: float, within: bool) -> None:
    assert is_within(anchor(published), simulated) is within


@pytest.mark.parametrize(
    ("published", "simulated", "within"),
    [
        (4.3, 5.1, True),  # the change is 3.3, a quarter of it 0.825
        (4.3, 5.2, False),
        (1.7, 1.54, True),
        (1.7, 1.5, False),  # near as a ratio, but the gain is less than three quarters of it
        (0.97, 0.961, True),  # a hundredth is forgiven
        (0.97, 0.99, False),
    ],
)
def test_of_a_ratio_the_change_is_judged(published: float, simulated: float, within: bool) -> None:
    assert is_within(anchor(published, over="vllm"), simulated) is within


def test_direction_needs_the_sign_and_a_third_of_the_size() -> None:
    ours, theirs = anchor(10.8), anchor(233.8, system="dynamo")
    assert verdict(ours, 4.0, [(theirs, 150.0)]) is Verdict.DIRECTION
    assert verdict(theirs, 150.0, [(ours, 4.0)]) is Verdict.DIRECTION
    assert verdict(ours, 4.0, [(theirs, 8.0)]) is Verdict.NOT  # 2 times, published were 22
    assert verdict(ours, 150.0, [(theirs, 4.0)]) is Verdict.NOT


def test_direction_needs_every_rival_and_one_at_all() -> None:
    ours, dynamo, vllm = anchor(10), anchor(200, system="dynamo"), anchor(50, system="vllm")
    assert verdict(ours, 4.0, []) is Verdict.NOT
    assert verdict(ours, 4.0, [(dynamo, 100.0), (vllm, 30.0)]) is Verdict.DIRECTION
    assert verdict(ours, 4.0, [(dynamo, 100.0), (vllm, 3.0)]) is Verdict.NOT
    assert verdict(ours, 4.0, [(dynamo, None)]) is Verdict.NOT


def test_equal_published_figures_have_no_direction() -> None:
    assert verdict(anchor(10), 4.0, [(anchor(10, system="vllm"), 9.0)]) is Verdict.NOT


@pytest.mark.parametrize(
    ("simulated", "expected"),
    [(1.8, Verdict.WITHIN), (1.3, Verdict.DIRECTION), (1.05, Verdict.NOT), (0.6, Verdict.NOT)],
)
def test_a_ratio_is_its_own_difference(simulated: float, expected: Verdict) -> None:
    assert verdict(anchor(1.7, over="vllm"), simulated, []) is expected


@pytest.mark.parametrize("simulated", [None, 0.0])
def test_no_figure_is_not_reproduced(simulated: float | None) -> None:
    assert verdict(anchor(1.7), simulated, []) is Verdict.NOT


def test_figures_are_medians_at_the_best_rate(tmp_path: Path) -> None:
    made = reproduction.page(tmp_path)
    study = made.studies[1]
    assert study.name == "systems"
    # Seeds 1, 2 and 3 give 1, 1.01 and 1.02 times the rate.
    value = made.results.value(study, UNTUNED, Side("easerve", ""), 1, "throughput_per_s")
    assert value == pytest.approx(1.01)
    best, other, ratio = compared(made.results, study)
    assert best.simulated[UNTUNED] == pytest.approx(2 * 1.01)
    assert best.simulated[FITTED] == pytest.approx(2 * 0.9 * 1.01)
    assert other.simulated[UNTUNED] == pytest.approx(1.01)
    assert ratio.simulated[UNTUNED] == pytest.approx(2)
    assert best.verdicts[UNTUNED] is Verdict.WITHIN
    assert other.verdicts[UNTUNED] is Verdict.DIRECTION  # 2 times, published were 4
    assert ratio.verdicts[UNTUNED] is Verdict.WITHIN


def test_a_baselines_verdict_at_its_best_topology(tmp_path: Path) -> None:
    made = reproduction.page(tmp_path)
    ours, dynamo, ratio = compared(made.results, made.studies[1])
    assert ours.elsewhere is None
    assert ratio.elsewhere is None  # vLLM is no better with the other engines
    assert dynamo.elsewhere == Elsewhere("p2", 3.0, Verdict.NOT)
    assert dynamo.depends
    assert not ratio.depends
    assert dynamo.as_dict()["best_topology"] == {
        "topology": "p2",
        "simulated": 3.0,
        "verdict": "not reproduced",
    }


def test_a_ratios_baseline_is_at_its_best_whichever_side_it_is(tmp_path: Path) -> None:
    made = reproduction.page(tmp_path)
    study = made.studies[1]
    over = anchor(2, "throughput_per_s", over="dynamo")
    under = anchor(2, "ttft_s.p99", system="dynamo", over="easerve")
    anchors = {"anchors": (over, under)}
    object.__setattr__(study, "scenario", study.scenario.model_copy(update=anchors))
    found = [each.elsewhere for each in compared(made.results, study)]
    assert [each and each.topology for each in found] == ["p2", "p2"]
    # Ours is the median over seeds, 1.01.
    assert found[0] is not None
    assert found[0].simulated == pytest.approx(1.01 / 1.5)
    assert found[1] is not None
    assert found[1].simulated == pytest.approx(1.01 / 1.5)


def test_of_times_the_least_is_best(tmp_path: Path) -> None:
    made = reproduction.page(tmp_path)
    study = made.studies[1]
    best = made.results.best_topology(study, "dynamo", [1, 2], "ttft_s.p99")
    assert best == Best(3 / 1.5, "p2", 1)
    best = made.results.best_topology(study, "vllm", [1, 2], "throughput_per_s")
    assert best == Best(1.0, "", 2)
    assert made.results.best_topology(study, "vllm", [3], "throughput_per_s") is None


def test_a_variant_that_changes_nothing_for_a_system_is_the_scenario_as_it_is(
    tmp_path: Path,
) -> None:
    made = reproduction.page(tmp_path)
    study = made.studies[1]
    same = [
        made.results.value(study, UNTUNED, Side("vllm", variant), 1, "throughput_per_s")
        for variant in ("", "paper")
    ]
    assert same[0] == same[1] is not None


def test_published_figures_are_held_against_each_other(tmp_path: Path) -> None:
    fast = anchor(4.91, "throughput_per_s").model_copy(update={"rate_per_s": 5.0})
    slow = anchor(29).model_copy(update={"rate_per_s": 5.0})
    study = reproduction.page(tmp_path).studies[1]
    workload = study.scenario.workload.model_copy(update={"num_requests": 500})
    anchors = {"anchors": (fast, slow), "workload": workload}
    object.__setattr__(study, "scenario", study.scenario.model_copy(update=anchors))
    (found,) = consistencies(study)
    assert found.ttft_p99_s == pytest.approx(495 * (1 / 4.91 - 1 / 5))  # 1.8 s, not 29
    assert found.rate_per_s == pytest.approx(1 / (1 / 4.91 - 29 / 495))  # 6.9
