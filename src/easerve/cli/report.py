"""``easerve report``: results in JSON as one page, as pictures, or as tables in the terminal."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from easerve.bench import report
from easerve.bench.drawings import png, results, runs
from easerve.bench.drawings.results import Capacity, Run
from easerve.bench.drawings.written import ResultError
from easerve.bench.report import Section
from easerve.cli.bench.command import check_writable, show
from easerve.config import ConfigError

Result = dict[str, Any]
COMPARED = ("bench", "goodput", "simulate")
"""Kinds whose runs are drawn beside each other."""
DRAWN_BY = {
    "bench-control": ("easerve.cli.bench.control_shown", "sections"),
    "bench-cpu": ("easerve.cli.bench.cpu_shown", "sections"),
    "bench-encode": ("easerve.cli.bench.shown", "of_encode"),
    "bench-flow": ("easerve.cli.bench.shown", "of_flow"),
    "bench-partition": ("easerve.cli.bench.partition", "sections"),
    "bench-transfer": ("easerve.cli.bench.transfer_shown", "of_transfer"),
    "bench-twin": ("easerve.cli.bench.twin_shown", "of_twin"),
    "profile": ("easerve.cli.profile_shown", "of_profile"),
    "search-space": ("easerve.cli.search.shown", "of_space"),
    "search": ("easerve.cli.search.shown", "sections"),
    "search-compare": ("easerve.cli.search.compare", "sections"),
}
"""Others, each on its own: module and function, imported when there is such a result."""
DEFAULT_TITLE = "EAServe report"


@dataclass(frozen=True, slots=True)
class Asked:
    """``html`` and ``png``: where to write; tables are shown if both are None."""

    paths: Sequence[Path]
    html: Path | None
    png: Path | None
    title: str | None


def run(asked: Asked) -> int:
    """The exit code. Raises ConfigError."""
    if asked.html is not None:
        if asked.html.resolve() in {path.resolve() for path in asked.paths}:
            raise ConfigError(f"--html: {asked.html} is one of the results")
        check_writable(asked.html)
    named = [(path, read(path)) for path in asked.paths]
    sections = drawn(named)
    console = Console()
    if asked.html is None and asked.png is None:
        _show(sections, console)
    if asked.html is not None:
        title = asked.title or _title([result for _, result in named])
        asked.html.write_text(report.html(title, sections), encoding="utf-8")
        console.print(f"report: {asked.html}", soft_wrap=True, markup=False)
    return 0 if asked.png is None else _write_png(asked.png, sections, console)


def read(path: Path) -> Result:
    """A result of one of our kinds. Raises ConfigError that names the file."""
    try:
        result = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: this is not JSON: {error}") from None
    known = ", ".join((*COMPARED, *DRAWN_BY))
    if not isinstance(result, dict) or "kind" not in result:
        raise ConfigError(f"{path}: no key 'kind'; a result has one of {known}")
    if result["kind"] not in (*COMPARED, *DRAWN_BY):
        raise ConfigError(f"{path}: kind {result['kind']!r} is none of {known}")
    return result


def drawn(named: Sequence[tuple[Path, Result]]) -> list[Section]:
    """Runs beside each other first, then the others as they come. Raises ConfigError."""
    found: list[Run] = []
    capacities: list[Capacity] = []
    others: list[Section] = []
    for path, result in named:
        draw = partial(_other, result)
        if result["kind"] in COMPARED:
            draw = partial(_compared, result, found, capacities)
        try:
            others += draw()
        except ResultError as error:
            raise ConfigError(f"{path}: {error}") from None
        except KeyError as error:
            raise ConfigError(f"{path}: no key {error}, which a {result['kind']} has") from None
        except (TypeError, ValueError, AttributeError, IndexError) as error:
            raise ConfigError(f"{path}: not as a {result['kind']} is written: {error}") from None
    return [*(runs.sections(found, capacities) if found or capacities else []), *others]


def _compared(result: Result, found: list[Run], capacities: list[Capacity]) -> list[Section]:
    if result["kind"] == "bench":
        found.append(results.of_bench(result))
    elif result["kind"] == "simulate":
        found.extend(results.of_simulate(result))
    else:
        capacity, probes = results.of_goodput(result)
        capacities.append(capacity)
        found.extend(probes)
    return []


def _other(result: Result) -> list[Section]:
    module, name = DRAWN_BY[result["kind"]]
    draw: Callable[[Result], list[Section]] = getattr(import_module(module), name)
    # Those that are older than kinds take every key for a part of the result.
    return draw(result if result["kind"] == "bench-cpu" else _without_kind(result))


def _without_kind(result: Result) -> Result:
    return {key: value for key, value in result.items() if key != "kind"}


def _title(found: Sequence[Result]) -> str:
    systems = list(dict.fromkeys(str(each["system"]) for each in found if "system" in each))
    return f"{DEFAULT_TITLE}: {' and '.join(systems)}" if 0 < len(systems) < 4 else DEFAULT_TITLE


def _show(sections: Sequence[Section], console: Console) -> None:
    """Sections without a table would be text alone about charts that are not there."""
    for section in sections:
        if section.alert:
            console.print(f"[bold red]{escape(section.alert)}[/]\n", highlight=False)
        if any(isinstance(part, report.Table) for part in section.parts):
            show([section], console)


def _write_png(folder: Path, sections: Sequence[Section], console: Console) -> int:
    try:
        written = png.write(folder, sections)
    except png.PngError as error:
        print(f"easerve: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        raise ConfigError(f"--png: {folder}: {error.strerror}") from None
    console.print(f"{len(written)} pictures: {folder}", soft_wrap=True, markup=False)
    return 0
