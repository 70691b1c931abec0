from dataclasses import replace
from pathlib import Path

import pytest

from easerve.cli.reproduce import page as pages
from easerve.cli.reproduce import pictures
from easerve.cli.reproduce.text import anchor_text, change, number, table
from easerve.sim.scenario import Anchor, Rival
from tests.cli import reproduction


def test_every_anchor_has_a_row_with_both_sets_and_verdicts(tmp_path: Path) -> None:
    text = pages.main(reproduction.page(tmp_path))
    assert (
        "| easerve (paper): goodput S3 at best rate, req/s | 2 | abstract "
        "| 2.02 | within 25 % | 1.82 | within 25 % |" in text
    )
    assert (
        "| dynamo: goodput S3 at best rate, req/s [1] | 0.5 | digest "
        "| 1.01 | direction only | 0.909 | direction only |" in text
    )
    assert "[1] Its queue is not known.  " in text
    assert (
        "| easerve ÷ vllm: throughput at 2/s | 2 × | abstract "
        "| 2 × | within 25 % | 2 × | within 25 % |" in text
    )


@pytest.mark.parametrize(
    ("over", "shown"),
    [
        (None, "easerve (paper): P99 TPOT at 2/s, ms"),
        (Rival(system="vllm"), "easerve (paper) ÷ vllm: P99 TPOT at 2/s"),
        (Rival(), "easerve, paper ÷ as it is: P99 TPOT at 2/s"),
    ],
)
def test_an_anchor_is_named_in_short(over: Rival | None, shown: str) -> None:
    anchor = Anchor(
        system="easerve",
        variant="paper",
        rate_per_s=2,
        metric="tpot_s.p99",
        over=over,
        published=1,
        source="abstract",
    )
    assert anchor_text(anchor) == shown


def test_verdicts_are_counted_by_what_was_fitted(tmp_path: Path) -> None:
    lines = pages.main(reproduction.page(tmp_path)).splitlines()
    assert "| fitted on, untuned | 3 | 2 | 1 | 0 |" in lines
    assert not any(line.startswith("| held out") for line in lines)


def test_systems_variants_and_the_grid_are_there(tmp_path: Path) -> None:
    lines = pages.main(reproduction.page(tmp_path)).splitlines()
    assert any(line.startswith("| easerve (paper) | 2.02 |") for line in lines)
    assert "| greedy | 2 | 2 | 3 | 60 |" in lines
    assert "| all | 4 | 2 | 2 | 2 |" in lines
    assert "| e2 | 2 | 2 | 2 | 2 |" in lines
    assert "### Three systems (S3: TTFT 6 s, TPOT 92.5 ms)" in lines
    assert any("`costs.knobs.gemm_scale: 1.5`" in line for line in lines)


def test_the_tables_page_has_every_rate_of_both_sets(tmp_path: Path) -> None:
    text = pages.all_tables(reproduction.page(tmp_path))
    for knobs in ("untuned", "with named knobs"):
        assert f"## Three systems, {knobs}" in text
    assert text.count("| vllm | 1 |") == text.count("| vllm | 2 |") == 2


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (0.072, "0.072"), (1.926, "1.93"), (233.8, "234"), (12345.6, "12,346"), (2, "2")],
)
def test_numbers_have_three_digits_that_count(value: float, shown: str) -> None:
    assert number(value) == shown


def test_what_was_inferred_from_the_results_is_counted_apart(tmp_path: Path) -> None:
    made = reproduction.page(tmp_path)
    study = made.studies[1]
    experiment = study.experiment.model_copy(update={"implied": "the prompts."})
    scenario = study.scenario.model_copy(update={"experiment": experiment})
    studies = [replace(study, scenario=scenario)]
    fit = made.fit.model_copy(update={"scenarios": ("another",)})
    lines = pages.main(made._replace(studies=studies, fit=fit)).splitlines()
    assert "| no check, untuned | 3 | 2 | 1 | 0 |" in lines
    assert "Inferred from the published results: the prompts." in lines


def test_changes_are_per_cents() -> None:
    assert change(0.75, 1.0) == "−25 %"
    assert change(1.1, 1.0) == "+10 %"
    assert change(7.0, 2.0) == "3.5 times"
    assert change(1.1, 0.0) is None


def test_a_row_of_another_length_is_refused() -> None:
    assert list(table(["a", "b"], [["x", 1.0], ["y", None]])) == [
        "| a | b |",
        "|---|---:|",
        "| x | 1 |",
        "| y | – |",
    ]
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        list(table(["a", "b"], [["x"]]))


@pytest.mark.long
def test_figures_are_the_same_bytes_again(tmp_path: Path) -> None:
    made = reproduction.page(tmp_path)
    first = pictures.write(tmp_path / "one", made.results, made.studies)
    again = pictures.write(tmp_path / "two", made.results, made.studies)
    assert [path.name for path in first] == [
        "goodput-a100-80.svg",
        "ttft.svg",
        "tpot.svg",
        "utilisation.svg",
    ]
    for one, two in zip(first, again, strict=True):
        assert one.read_bytes() == two.read_bytes()
        assert "easerve (paper)" in one.read_text()
