"""What ``easerve reproduce`` does: all of it, the quick form, a check, a fit."""

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from itertools import islice
from pathlib import Path

from rich.console import Console

from easerve.bench.report import Section, Table
from easerve.cli.bench.command import check_writable, progress, show
from easerve.cli.reproduce import book as books
from easerve.cli.reproduce import fit as fits
from easerve.cli.reproduce import page as pages
from easerve.cli.reproduce import pictures
from easerve.cli.reproduce.book import Book
from easerve.cli.reproduce.fit import Fit
from easerve.cli.reproduce.page import Page
from easerve.cli.reproduce.plan import (
    KNOB_SETS,
    KNOBS_FILE,
    Point,
    Study,
    points,
    quick_points,
    read,
)
from easerve.cli.reproduce.runner import Outcome, run
from easerve.cli.reproduce.text import anchor_text, anchor_value, cell
from easerve.cli.reproduce.verdicts import Compared, Results, Verdict, compared
from easerve.config import ConfigError

BOOK = "reproduction.json"
PAGE = "reproduction.md"
MAX_SHOWN = 20
NO_BREAK = "\u00a0"
MARKS = {Verdict.WITHIN: "=", Verdict.DIRECTION: "~", Verdict.NOT: "≠"}
VERDICTS = ", ".join(f"{mark} {verdict.value}" for verdict, mark in MARKS.items())
PAGES: Mapping[str, Callable[[Page], str]] = {
    PAGE: pages.main,
    pages.TABLES_PAGE: pages.all_tables,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """``names``: scenarios of the folder, without ending; none: all. ``out``: where pages lie."""

    names: Sequence[str]
    scenarios: Path
    out: Path
    jobs: int
    quick: bool
    check: bool
    pages: bool
    fit: bool
    figures: bool
    as_json: bool


def execute(asked: Asked) -> int:
    """The exit code: 1 if a check finds something stale. Raises ConfigError."""
    if sum([asked.fit, asked.pages, asked.quick or asked.check]) > 1:
        raise ConfigError("of --fit, --pages, and --quick or --check: give one")
    if asked.names and (asked.fit or asked.pages):
        raise ConfigError("--fit and --pages are of all scenarios: name none")
    fit = fits.read(asked.scenarios / KNOBS_FILE)
    if asked.fit:
        return _fit(asked, fit)
    studies = read(asked.scenarios, fit.changes(fit.chosen), asked.names)
    if asked.check:
        return _check(asked, fit, studies)
    if asked.quick:
        outcomes = _quick(asked, studies)
        figures = {point: outcome.figures for point, outcome in outcomes.items()}
        _print(Results(Book(runs=figures)), studies, asked.as_json)
        return 0
    return _all(asked, fit, studies)


def _all(asked: Asked, fit: Fit, studies: Sequence[Study]) -> int:
    out = asked.out
    if not out.is_dir():
        raise ConfigError(f"{out} is no folder")
    if asked.figures:
        pictures.check()
    for name in (BOOK, *PAGES):
        check_writable(out / name)
    named = {study.name for study in studies}
    kept = _kept(asked, fit, set() if asked.pages else named)
    if not asked.pages:
        outcomes = _run(asked, studies, [point for study in studies for point in points(study)])
        new = books.made(studies, outcomes, fit.changes(fit.chosen))
        books.write(books.joined(kept, new), out / BOOK)
    page = _page(asked, fit)
    paths = [out / BOOK, *_written(out, page, asked.figures)]
    _print(page.results, [study for study in page.studies if study.name in named], asked.as_json)
    if not asked.as_json:
        print("\n".join(f"written: {path}" for path in paths))
    return 0


def _kept(asked: Asked, fit: Fit, anew: Collection[str]) -> Book:
    """What earlier runs came to that stay, when some studies are run anew.

    Raises ConfigError if these do not hold either.
    """
    path = asked.out / BOOK
    if not asked.pages and not (asked.names and path.exists()):
        return Book()
    page = _page(asked, fit)
    others = [study for study in page.studies if study.name not in anew]
    for line in books.stale_studies(page.results.book, others, fit.changes(fit.chosen)):
        raise ConfigError(f"{path} is stale, name this as well, or none: {line}")
    return page.results.book


def _page(asked: Asked, fit: Fit) -> Page:
    """Of what the book has, of whatever scenarios that is."""
    book = books.read(asked.out / BOOK)
    every = read(asked.scenarios, fit.changes(fit.chosen))
    return Page([study for study in every if study.name in book.digests], fit, Results(book))


def _written(out: Path, page: Page, figures: bool) -> list[Path]:
    for name, made in PAGES.items():
        (out / name).write_text(made(page))
    drawn = pictures.write(out / pages.FIGURES, page.results, page.studies) if figures else []
    return [*(out / name for name in PAGES), *drawn]


def _quick(asked: Asked, studies: Sequence[Study]) -> dict[Point, Outcome]:
    found = [point for study in studies for point in quick_points(study)]
    if not found:
        raise ConfigError("no anchor in these scenarios: nothing that --quick could run")
    return _run(asked, studies, found)


def _run(asked: Asked, studies: Sequence[Study], wanted: Sequence[Point]) -> dict[Point, Outcome]:
    console = Console(stderr=True)
    with progress(console, len(wanted)) as tick:
        shown = tick if console.is_terminal else printing(len(wanted))
        return run(studies, wanted, asked.jobs, shown)


def printing(num_runs: int) -> Callable[[str], None]:
    """A line for each tenth of many runs, where there is no terminal to show a bar."""
    done = 0

    def tick(text: str) -> None:
        nonlocal done
        done += 1
        if done * 10 // num_runs > (done - 1) * 10 // num_runs and num_runs >= 100:
            print(f"{done:,} of {num_runs:,} runs; {text}", file=sys.stderr, flush=True)

    return tick


def _check(asked: Asked, fit: Fit, studies: Sequence[Study]) -> int:
    """Says what is stale. Raises ConfigError if there is nothing to compare with."""
    book = books.read(asked.out / BOOK)
    stale = list(books.stale_studies(book, studies, fit.changes(fit.chosen)))
    stale += stale_pages(asked.out, _page(asked, fit))
    outcomes = _quick(asked, studies)
    stale += books.stale_runs(book, outcomes)
    if asked.as_json:
        print(json.dumps({"stale": stale, "num_runs": len(outcomes)}))
    else:
        for line in stale[:MAX_SHOWN]:
            print(f"stale: {line}")
        if len(stale) > MAX_SHOWN:
            print(f"and {len(stale) - MAX_SHOWN:,} more")
        print(f"{len(outcomes):,} runs made again, {len(stale):,} things stale")
    return 1 if stale else 0


def stale_pages(folder: Path, page: Page) -> Iterator[str]:
    """Lines of pages that would be written otherwise now."""
    for name, made in PAGES.items():
        path = folder / name
        try:
            old = path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        changes = unified_diff(old, made(page).splitlines(), lineterm="", n=0)
        for line in islice(changes, 3, None):
            if not line.startswith("@@"):
                yield f"{name}: {line}"


def _fit(asked: Asked, fit: Fit) -> int:
    path = asked.scenarios / KNOBS_FILE
    check_writable(path)
    studies = read(asked.scenarios, {}, fit.scenarios)
    with progress(Console(stderr=True), 0) as tick:
        fitted, before, after = fits.fitted(fit, studies, asked.jobs, tick)
    fits.write(fitted, path)
    changes = fitted.changes(fitted.chosen)
    if asked.as_json:
        print(json.dumps({"knobs": dict(changes), "error_before": before, "error": after}))
        return 0
    for key, value in changes.items():
        print(f"{key}: {value}")
    print(f"error {before:.4g} without, {after:.4g} with them; written: {path}")
    return 0


def _print(results: Results, studies: Sequence[Study], as_json: bool) -> None:
    found = [each for study in studies for each in compared(results, study)]
    if as_json:
        print(json.dumps({"anchors": [each.as_dict() for each in found]}))
        return
    columns = ["", "published", *KNOB_SETS]
    tables = [
        Table(study.scenario.title, columns, [_row(each) for each in found if each.study is study])
        for study in studies
        if study.scenario.anchors
    ]
    show([Section("Anchors", VERDICTS, tables)], Console())


def _row(each: Compared) -> list[str]:
    anchor = each.anchor
    published = cell(anchor_value(anchor, anchor.published)).replace(" ", NO_BREAK)
    row = [anchor_text(anchor), published]
    for knobs in KNOB_SETS:
        value = cell(anchor_value(anchor, each.simulated[knobs]))
        row.append(f"{value} {MARKS[each.verdicts[knobs]]}".replace(" ", NO_BREAK))
    return row
