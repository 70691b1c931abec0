from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from easerve.cli.reproduce import page as pages
from easerve.cli.reproduce import pictures
from easerve.cli.reproduce.text import anchor_text, change, number, table
from easerve.cli.reproduce.topologies import configurations, engines
from easerve.cli.reproduce.verdicts import Results
from easerve.sim.config import SECTIONS
from easerve.sim.scenario import Anchor, Rival
from tests.cli import reproduction

pytestmark = pytest.mark.long


def test_every_anchor_has_a_row_with_both_sets_and_verdicts(tmp_path: Path) -> None:
    text = pages.main(reproduction.page(tmp_path))
    assert (
        "| easerve (paper): goodput S3 at best rate, req/s | 2 | abstract "
        "| 2.02 | within 25 % | 1.82 | within 25 % |" in text
    )
    assert (
        "| dynamo: goodput S3 at best rate, req/s [1] | 0.5 | digest "
        "| 1.01 | direction only † | 0.909 | direction only |" in text
    )
    assert (
        "† At its best topology: dynamo: goodput S3 at best rate, req/s: 3 (`p2`), "
        "not reproduced.  " in text
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
    assert "| eager, greedy | 2 | 2 | 3 | 60 |" in lines  # which run alike
    assert not any(line.startswith("| greedy") for line in lines)
    assert "| all | 4 | 2 | 2 | 2 |" in lines
    assert "| e2 | 2 | 2 | 2 | 2 |" in lines
    assert "### Three systems (S3: TTFT 6 s, TPOT 92.5 ms)" in lines
    assert any("`costs.knobs.gemm_scale: 1.5`" in line for line in lines)


def test_each_system_is_shown_at_its_best_topology(tmp_path: Path) -> None:
    text = pages.main(reproduction.page(tmp_path))
    start = "| {} | E 1 × TP1 + P {} × TP1 + D 1 × TP1 | 2 |"
    assert f"| easerve | 2 {start.format('as it is', 1)} 2 | 2 | 2 | 3 | – | – | 2 |" in text
    assert (
        f"| dynamo | 2 {start.format('p2', 2)} 3 | 1 | 3 | 2 | 0.667 × | 4 × "
        "| 3 | 0.667 × | – |" in text
    )
    assert (
        "| vllm | 2 | as it is | EPD 4 × TP2 | 2 | 1 | 1 | 1 | 6 | 2 × | – | 1 | 2 × | 2 × |"
        in (text)
    )
    assert (
        "2 anchors are of a baseline or a ratio to one. The verdicts (untuned) of 1 of them "
        "depend" in text.replace("\n", " ")
    )
    order = ["## How many", "## Each system", "## Configurations", "## Anchors"]
    assert [line for line in order if line in text] == sorted(order, key=text.index)
    assert "| 2x4 | EPD 2 × TP4 |" in pages.all_tables(reproduction.page(tmp_path))


def test_without_other_topologies_the_page_says_that_none_were_tried(tmp_path: Path) -> None:
    made = reproduction.page(tmp_path)
    studies = [study for study in made.studies if not study.topologies]
    text = pages.main(made._replace(studies=studies))
    assert "no others were tried" in text.replace("\n", " ")
    assert "## Each system" not in text


@pytest.mark.parametrize(
    ("system", "section", "shown"),
    [
        (
            "easerve",
            {
                "encode": {"replicas": 4},
                "local_prefill": {"tensor_parallel_size": 2},
                "prefill": {"tensor_parallel_size": 2},
                "decode": {"replicas": 2},
                "policy": {"remote_share": 0.5},
            },
            "E 4 × TP1 + P 1 × TP2 + D 2 × TP1, local P 2 × TP2 on the GPUs of E, remote share 0.5",
        ),
        (
            "epdserve",
            {"encode": {}, "prefill": {}, "decode": {"replicas": 2, "max_batch": 256}},
            "E 1 × TP1, batch 1 + P 1 × TP1, batch 1 + D 2 × TP1, batch 256",
        ),
        (
            "hydrainfer",
            {"ed": {"replicas": 2}, "p": {"tensor_parallel_size": 2}},
            "P 1 × TP2 + ED 2 × TP1",
        ),
    ],
)
def test_engines_in_short(system: str, section: dict[str, Any], shown: str) -> None:
    assert engines(SECTIONS[system].model_validate(section)) == shown


def test_a_source_of_engines_is_named(tmp_path: Path) -> None:
    studies = reproduction.page(tmp_path).studies
    assert configurations(studies[1:2]).rows[1] == ["systems", "vllm", "EPD 4 × TP2", "assumed"]
    origins = {"vllm": "its default"}
    experiment = studies[1].experiment.model_copy(update={"origins": origins})
    scenario = studies[1].scenario.model_copy(update={"experiment": experiment})
    assert configurations([replace(studies[1], scenario=scenario)]).rows[1][-1] == "its default"


def test_gains_and_losses_stand_apart_and_what_holding_costs(tmp_path: Path) -> None:
    path = tmp_path / "variants.yaml"
    folder = reproduction.folder(tmp_path)
    content = yaml.safe_load(path.read_text())
    names = {"when-none": 2.0, "no-flow": 1.5, "greedy": 0.5, "bursts": 0.0}
    content["experiment"]["rates_per_s"] = [1, 2]
    variants = {
        name: {"systems.easerve.policy.max_batch_items": at} for at, name in enumerate(names, 2)
    }
    content["experiment"]["variants"] = variants
    path.write_text(yaml.safe_dump(content))
    fit, studies = reproduction.studies(folder)
    book = reproduction.book(studies, fit)
    for point in book.runs:
        if point.study == "variants" and point.variant in names:
            book.runs[point]["goodput_per_s.S3"] *= names[point.variant]  # type: ignore[index, operator]
    text = " ".join(pages.main(pages.Page(studies, fit, Results(book))).split())
    assert (
        "- variants, 2/s: goodput S3: largest gains when-none +100 %, no-flow +50 %; largest "
        "losses bursts −100 %, greedy −50 %. P99 TTFT: largest gains none of 1 %; largest losses "
        "none of"
    ) in text
    assert (
        "Requests that the rules hold back cost goodput near saturation: without the rule it is, "
        "at the last rate, no-flow +50 % and when-none +100 % in variants."
    ) in text


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
