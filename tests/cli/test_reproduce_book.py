from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from easerve.cli.reproduce import book as books
from easerve.cli.reproduce.command import PAGES, stale_pages
from easerve.cli.reproduce.page import Page
from easerve.cli.reproduce.plan import Point, point
from easerve.cli.reproduce.runner import Outcome, rounded
from easerve.config import ConfigError
from tests.cli import reproduction

pytestmark = pytest.mark.long

POINT = Point("systems", "untuned", "e2 b1", "vllm-epd", 2.5, 3)


def test_a_key_is_read_again() -> None:
    assert POINT.key == "systems | untuned | e2 b1 | vllm-epd | 2.5 | 3"
    for each in (POINT, POINT._replace(variant="")):
        assert point(each.series, each.rate_per_s, each.seed) == each


@pytest.mark.parametrize("value", [1.23456789, 123456.789, 0.000123456, 0.0])
def test_five_digits_count(value: float) -> None:
    assert rounded(value) == pytest.approx(value, rel=5e-5)
    assert len(f"{rounded(value):g}".strip("0.")) <= 6


def test_what_is_written_is_read_again_and_written_alike(tmp_path: Path) -> None:
    book = reproduction.page(tmp_path).results.book
    path, again = tmp_path / "one.json", tmp_path / "two.json"
    books.write(book, path)
    found = books.read(path)
    assert found == book
    books.write(replace(found, runs=dict(reversed(list(found.runs.items())))), again)
    assert path.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"columns": []}', '{"columns": ["rate_per_s", "seed"], "runs": {"x": []}}']
)
def test_another_file_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reproduction.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"reproduction\.json: not what easerve reproduce writes"):
        books.read(path)
    with pytest.raises(ConfigError, match="No such file"):
        books.read(tmp_path / "none.json")


def outcomes(page: Page, change: Mapping[str, float]) -> dict[Point, Outcome]:
    """A run of the book once more, with changes."""
    made, figures = next(iter(page.results.book.runs.items()))
    return {made: Outcome({**figures, **change}, {})}


def test_a_figure_that_comes_out_otherwise_is_stale(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    book = page.results.book
    assert not list(books.stale_runs(book, outcomes(page, {})))
    assert not list(books.stale_runs(book, outcomes(page, {"ttft_s.p99": 3 * 1.004})))
    (line,) = books.stale_runs(book, outcomes(page, {"ttft_s.p99": 3 * 1.006}))
    assert line.endswith("| easerve | 2 | 1: ttft_s.p99 was 3.0, is 3.018")
    (line,) = books.stale_runs(book, {POINT: Outcome({}, {})})
    assert line == f"{POINT.key}: no such run"


def test_other_knobs_and_scenarios_are_stale(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    book = page.results.book
    assert not list(books.stale_studies(book, page.studies, book.knobs))
    (line,) = books.stale_studies(book, page.studies, {})
    assert line.startswith("knobs: fitted {}, but")
    path = tmp_path / "variants.yaml"
    path.write_text(path.read_text().replace("greedy", "fill"))
    _, changed = reproduction.studies(tmp_path)
    assert list(books.stale_studies(book, changed, book.knobs)) == [
        "variants: the scenario has changed since"
    ]
    digests = {name: book.digests[name] for name in ("systems", "variants")}
    some = replace(book, digests=digests)
    assert list(books.stale_studies(some, page.studies, book.knobs)) == ["grid: no runs of it"]


def test_titles_and_anchors_do_not_make_runs_stale(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    path = tmp_path / "systems.yaml"
    path.write_text(
        path.read_text().replace("Three", "3").replace("published: 0.5", "published: 1")
    )
    _, changed = reproduction.studies(tmp_path)
    book = page.results.book
    assert not list(books.stale_studies(book, changed, book.knobs))


def test_topologies_make_runs_stale_only_where_they_are_run(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    path = tmp_path / "systems.yaml"
    path.write_text(path.read_text().replace("p2:", "prefill-2:"))
    _, changed = reproduction.studies(tmp_path)
    book = page.results.book
    assert list(books.stale_studies(book, changed, book.knobs)) == [
        "systems: the scenario has changed since"
    ]
    assert not any(each.variant in ("p2", "2x4") for each in book.quantiles)


def test_a_page_with_another_number_is_stale(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    for name, made in PAGES.items():
        (tmp_path / name).write_text(made(page))
    assert not list(stale_pages(tmp_path, page))
    path = tmp_path / "reproduction.md"
    path.write_text(path.read_text().replace("| 2 × | abstract", "| 3 × | abstract"))
    lines = list(stale_pages(tmp_path, page))
    assert len(lines) == 2
    assert all(line.startswith("reproduction.md: ") for line in lines)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        list(stale_pages(tmp_path, page))


def test_studies_run_anew_take_the_place_of_the_old(tmp_path: Path) -> None:
    page = reproduction.page(tmp_path)
    old = page.results.book
    mine = {each: {"x": 1.0} for each in old.runs if each.study == "grid"}
    new = books.Book(old.knobs, {"grid": "other"}, mine)
    joined = books.joined(old, new)
    assert joined.digests == {**old.digests, "grid": "other"}
    assert {each: joined.runs[each] for each in mine} == mine
    assert len(joined.runs) == len(old.runs)
