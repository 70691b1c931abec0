import math
from dataclasses import replace
from pathlib import Path

import pytest

from easerve.cli.reproduce import fit as fits
from easerve.cli.reproduce.book import Book
from easerve.cli.reproduce.fit import Fit, pruned, search, squared_log_error
from easerve.cli.reproduce.plan import FITTED, UNTUNED, Point, Side, read
from easerve.cli.reproduce.runner import run
from easerve.cli.reproduce.verdicts import Results
from easerve.config import ConfigError
from easerve.sim.scenario import Anchor
from tests.cli import reproduction


def test_a_bowl_is_searched_to_its_bottom() -> None:
    tried: list[tuple[int, ...]] = []

    def error(places: tuple[int, ...]) -> float:
        tried.append(places)
        x, y, z = places
        return (x - 3) ** 2 + (y - 1) ** 2 + 0.5 * (x - 3) * (y - 1) + abs(z - 2)

    assert search([5, 3, 4], [0, 0, 0], error) == ((3, 1, 2), 0.0)
    assert len(tried) < 5 * 3 * 4  # not every combination


def test_of_equal_errors_nothing_changes() -> None:
    assert search([3, 3], [0, 0], lambda _: 1.0) == ((0, 0), 1.0)


def test_changes_are_those_of_the_chosen(tmp_path: Path) -> None:
    fit, _ = reproduction.studies(reproduction.folder(tmp_path))
    assert fit.changes([0]) == {}
    assert fit.changes(fit.chosen) == {"costs.knobs.gemm_scale": 1.5}


def test_a_fit_is_written_as_it_is_read(tmp_path: Path) -> None:
    fit, _ = reproduction.studies(reproduction.folder(tmp_path))
    path = tmp_path / "fitted.yaml"
    fits.write(fit.with_chosen([0]), path)
    assert fits.read(path).chosen == (0,)
    assert fits.read(path).knobs["speed"].why == fit.knobs["speed"].why
    assert path.read_text().startswith("# Knobs that are fitted")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scenarios: []", "scenarios: .*at least 1 item"),
        ("scenarios: [a]\nknob: {}", "knob: unknown key; did you mean 'knobs'"),
        (
            "scenarios: [a]\nknobs: {k: {why: x, choices: [{}], chosen: 1}}",
            "k.*chosen 1.* 1 choices",
        ),
        ("scenarios: [a]\nknobs: {k: {why: x, choices: [{a: 1}]}}", "k.*first one must be {}"),
        ("scenarios: [a]\nknobs: {k: {why: x, choice: []}}", "knobs.k.choice: unknown key"),
        ("scenarios: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_an_error_with_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fitted.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s)fitted.yaml.*{message}"):
        fits.read(path)


def test_a_knob_by_which_the_published_figures_were_made_is_found_again(tmp_path: Path) -> None:
    slow = {"costs.knobs.gemm_scale": 4.0}
    (study,) = read(reproduction.folder(tmp_path), slow, ["systems"])
    side = Side("easerve", "")
    point = Point(study.name, FITTED, side.variant, side.system, 2, study.seeds[0])
    book = Book(runs={point: run([study], [point], 1)[point].figures})
    anchors = tuple(
        Anchor(
            system=side.system,
            rate_per_s=2,
            metric=metric,
            published=Results(book).value(study, FITTED, side, 2, metric) or 0,
            source="a run",
        )
        for metric in ("ttft_s.p50", "tpot_s.p99")
    )
    made = replace(study, scenario=study.scenario.model_copy(update={"anchors": anchors}))
    choices = [{}, {"costs.knobs.gemm_scale": 2.0}, slow]
    knobs = {
        "speed": {"why": "a test", "choices": choices},
        "useless": {"why": "a test", "choices": [{}, {"systems.dynamo.hold_kv": False}]},
    }
    fit = Fit.model_validate({"scenarios": ["systems"], "knobs": knobs})
    fitted, before, after = fits.fitted(fit, [made], 1, lambda _: None)
    assert fitted.chosen == (2, 0)
    assert after == pytest.approx(0, abs=1e-6)
    assert before > 0.1


def test_a_figure_far_off_counts_as_a_factor_of_two(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    study = page.studies[1]
    # Of the anchors that are no ratios one is met and the other is twice as large.
    far = study.scenario.anchors[1].model_copy(update={"published": 0.001})
    for anchors in (study.scenario.anchors, (study.scenario.anchors[0], far)):
        scenario = study.scenario.model_copy(update={"anchors": anchors})
        error = squared_log_error(page.results, [replace(study, scenario=scenario)], UNTUNED)
        assert error == pytest.approx((math.log(2) ** 2 + math.log(1.01) ** 2) / 2)


def test_knobs_that_bring_too_little_are_left_alone() -> None:
    errors: dict[tuple[int, ...], float]
    errors = {(1, 1, 1): 1.0, (0, 1, 1): 2.0, (1, 0, 1): 1.04, (1, 1, 0): 1.02}
    errors |= {(1, 0, 0): 1.5, (0, 1, 0): 3.0}
    assert pruned((1, 1, 1), 1.0, errors.__getitem__) == ((1, 1, 0), 1.02)
