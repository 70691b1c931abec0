import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from easerve.cli.main import app
from easerve.cli.reproduce import book as books
from easerve.cli.reproduce import fit as fits
from easerve.cli.reproduce.command import printing
from easerve.cli.reproduce.plan import (
    FITTED,
    KNOB_SETS,
    UNTUNED,
    Point,
    points,
    quick_points,
    read,
)
from easerve.cli.reproduce.runner import NUM_QUANTILES, run
from easerve.cli.reproduce.verdicts import Results, Verdict, compared
from easerve.config import ConfigError
from tests.cli import reproduction

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["reproduce", *arguments])
    return found.exit_code, found.stdout, found.stderr


def options(folder: Path) -> list[str]:
    return ["--scenarios", str(folder), "--out", str(folder), "--jobs", "1", "--no-figures"]


def test_runs_are_of_every_system_rate_seed_and_variant_that_changes_it(tmp_path: Path) -> None:
    _, (grid, systems, variants) = reproduction.studies(reproduction.folder(tmp_path))
    found = [each for each in points(systems) if each.knobs == UNTUNED]
    chosen = [each for each in found if each.variant in systems.topologies]
    found = [each for each in found if each not in chosen]
    assert len(found) == 3 * 2 * 3 + 2 * 3  # the variant makes a difference to one of three
    assert len(list(points(systems))) == len(KNOB_SETS) * len(found) + len(chosen)
    assert {each.knobs for each in points(grid)} == {UNTUNED}
    assert {each.variant for each in points(variants)} == {"", "paper", "greedy", "eager", "bursts"}
    names = {each.variant for each in points(grid)}
    assert names == {"", "paper", "e1 b1", "e1 b2", "e2 b1", "e2 b2"}


def test_topologies_are_run_untuned_with_one_seed_where_systems_are_compared(
    tmp_path: Path,
) -> None:
    _, (grid, systems, variants) = reproduction.studies(reproduction.folder(tmp_path))
    found = [each[1:] for each in points(systems) if each.variant in ("p2", "2x4")]
    assert found == [
        (UNTUNED, topology, system, rate_per_s, 1)
        for topology, system in (("2x4", "vllm"), ("p2", "easerve"), ("p2", "dynamo"))
        for rate_per_s in (1, 2)
    ]
    for study in (grid, variants):
        assert "p2" in study.experiment.topologies  # of the base
        assert not study.topologies


def test_the_quick_form_is_what_anchors_need(tmp_path: Path) -> None:
    _, (_, systems, _) = reproduction.studies(reproduction.folder(tmp_path))
    found = [each[2:] for each in quick_points(systems) if each.knobs == FITTED]
    assert found == [
        ("paper", "easerve", 1, 1),
        ("paper", "easerve", 2, 1),
        ("", "dynamo", 1, 1),
        ("", "dynamo", 2, 1),
        ("", "easerve", 2, 1),
        ("", "vllm", 2, 1),
    ]


def test_a_name_that_is_no_scenario_is_an_error_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no scenario 'video'; there are: grid, systems, variant"):
        read(reproduction.folder(tmp_path), {}, ["video"])
    with pytest.raises(ConfigError, match="no folder of scenarios"):
        read(tmp_path / "none", {})


def test_what_is_the_same_runs_once_and_knobs_make_a_difference(tmp_path: Path) -> None:
    _, studies = reproduction.studies(reproduction.folder(tmp_path))
    plain = Point("systems", UNTUNED, "", "easerve", 2, 1)
    same, slow = plain._replace(study="variants"), plain._replace(knobs=FITTED)
    steps: list[str] = []
    found = run(studies, [plain, same, slow], 1, steps.append)
    assert list(found) == [plain, same, slow]
    assert steps == ["Three systems: easerve, 2/s"] * 3
    assert found[plain] is found[same]
    figures = [found[each].figures for each in (slow, plain)]
    assert (figures[0]["ttft_s.p50"] or 0) > (figures[1]["ttft_s.p50"] or 0) > 0
    assert figures[0]["num_requests"] == 12
    assert len(found[plain].quantiles["ttft_s"]) == NUM_QUANTILES + 1
    assert not any("wall" in name for name in figures[0])


@pytest.mark.long
def test_the_number_of_processes_makes_no_difference(tmp_path: Path) -> None:
    _, studies = reproduction.studies(reproduction.folder(tmp_path))
    wanted = [each for each in points(studies[1]) if each.system == "easerve"]
    alone, together = (run(studies, wanted, jobs) for jobs in (1, 2))
    assert list(alone.items()) == list(together.items())


def test_a_long_run_says_how_far_it_is_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ticks = {num: printing(num) for num in (99, 100, 1234)}
    for num, tick in ticks.items():
        for _ in range(num):
            tick("vllm, 2/s")
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (0 if num < 100 else 10)
        assert not lines or lines[-1] == f"{num:,} of {num:,} runs; vllm, 2/s"


@pytest.mark.long
def test_all_of_it_and_then_nothing_is_stale(tmp_path: Path) -> None:
    folder = reproduction.folder(tmp_path)
    code, out, err = invoke(*options(folder), "--json")
    assert code == 0, err
    anchors = json.loads(out)["anchors"]
    assert [each["scenario"] for each in anchors] == ["systems"] * 3
    assert set(anchors[0]["verdict"]) == set(KNOB_SETS)
    code, out, _ = invoke(*options(folder), "--check")
    assert code == 0
    assert out.endswith("12 runs made again, 0 things stale\n")
    pages = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, out, err = invoke(*options(folder), "grid")  # one study anew, the others stay
    assert code == 0, err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == pages

    code, out, err = invoke(*options(folder), "--pages")
    assert code == 0, err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == pages
    variants = folder / "variants.yaml"
    variants.write_text(variants.read_text().replace("greedy", "fill"))
    code, _, err = invoke(*options(folder), "grid")
    assert code == 2
    assert "name this as well, or none: variants: the scenario has changed since" in err
    variants.write_bytes(pages[variants.name])

    path = folder / "reproduction.json"
    book = books.read(path)
    point = Point("systems", UNTUNED, "paper", "easerve", 1, 1)
    book.runs[point]["completed"] = 11  # type: ignore[index]
    books.write(book, path)
    code, out, _ = invoke(*options(folder), "--check")
    assert code == 1
    assert "stale: systems | untuned | paper | easerve | 1 | 1: completed was 11, is 12" in out
    code, out, _ = invoke(*options(folder), "--check", "--json")
    assert code == 1
    assert json.loads(out)["num_runs"] == 12


def test_the_quick_form_prints_anchors_and_writes_nothing(tmp_path: Path) -> None:
    folder = reproduction.folder(tmp_path)
    before = sorted(folder.iterdir())
    code, out, _ = invoke(*options(folder), "--quick", "systems")
    assert code == 0
    assert "goodput S3 at best rate" in out
    assert "= within 25 %" in out
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["video"], "no scenario 'video'"),
        (["--quick", "grid"], "no anchor in these scenarios"),
        (["--fit", "--quick"], "of --fit, --pages, and --quick or --check: give one"),
        (["--pages", "grid"], "--fit and --pages are of all scenarios"),
        (["--pages"], "reproduction.json: No such file"),
        (["--out", "/nowhere"], "/nowhere is no folder"),
        (["--check"], "reproduction.json: No such file"),
    ],
)
def test_what_is_asked_wrongly_has_exit_code_2(
    tmp_path: Path, arguments: Sequence[str], message: str
) -> None:
    code, out, err = invoke(*options(reproduction.folder(tmp_path)), *arguments)
    assert code == 2
    assert message in err
    assert not out


def test_a_fit_is_written(tmp_path: Path) -> None:
    folder = reproduction.folder(tmp_path)
    code, out, err = invoke(*options(folder), "--fit", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["error"] <= found["error_before"]
    assert "chosen:" in (folder / "fitted.yaml").read_text()


@pytest.mark.long
def test_the_page_is_what_the_simulator_says_now() -> None:
    arguments = ["--scenarios", str(ROOT / "scenarios"), "--out", str(ROOT / "docs")]
    code, out, err = invoke(*arguments, "--quick", "--check")
    assert code == 0, out + err


@pytest.mark.long
def test_every_anchor_that_is_not_reproduced_says_why() -> None:
    fit = fits.read(ROOT / "scenarios/fitted.yaml")
    results = Results(books.read(ROOT / "docs/reproduction.json"))
    for study in read(ROOT / "scenarios", fit.changes(fit.chosen)):
        for each in compared(results, study):
            if Verdict.NOT in each.verdicts.values():
                assert each.anchor.note, each
