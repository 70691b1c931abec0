"""The file that keeps what every run came to, and what of it no longer holds."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easerve.cli.reproduce.plan import UNTUNED, Knobs, Point, Study, point
from easerve.cli.reproduce.runner import Figures, Outcome, Quantiles
from easerve.config import ConfigError

TOLERANCE = 0.005
"""Between machines whose mathematical functions round differently."""
SPREAD_RATE_PER_S = 2.0
"""The rate at which distributions are kept."""
MADE_BY = "easerve reproduce"
POINT_COLUMNS = ("rate_per_s", "seed")


@dataclass(frozen=True, slots=True)
class Book:
    """``digests``: of the studies that it has runs of; ``knobs``: of the fitted set."""

    knobs: Knobs = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    runs: Mapping[Point, Figures] = field(default_factory=dict)
    quantiles: Mapping[Point, Quantiles] = field(default_factory=dict)


def keeps_quantiles(study: Study, made: Point) -> bool:
    """Of studies that compare systems, untuned, one seed, no other topology."""
    return (
        made.rate_per_s == SPREAD_RATE_PER_S
        and made.knobs == UNTUNED
        and made.seed == study.seeds[0]
        and made.variant not in study.topologies
        and study.is_comparison
    )


def made(studies: Sequence[Study], outcomes: Mapping[Point, Outcome], knobs: Knobs) -> Book:
    by_name = {study.name: study for study in studies}
    return Book(
        knobs,
        {study.name: study.digest() for study in studies},
        {point: outcome.figures for point, outcome in outcomes.items()},
        {
            point: outcome.quantiles
            for point, outcome in outcomes.items()
            if keeps_quantiles(by_name[point.study], point)
        },
    )


def joined(old: Book, new: Book) -> Book:
    """New studies in place of the old of the same names."""
    kept = {name: digest for name, digest in old.digests.items() if name not in new.digests}
    return Book(
        new.knobs,
        {**kept, **new.digests},
        {**{each: old.runs[each] for each in old.runs if each.study in kept}, **new.runs},
        {
            **{each: old.quantiles[each] for each in old.quantiles if each.study in kept},
            **new.quantiles,
        },
    )


def write(book: Book, path: Path) -> None:
    """A line a run, in the order of series, rates and seeds. Raises OSError."""
    columns = sorted({name for figures in book.runs.values() for name in figures})
    series: dict[str, list[str]] = {}
    for each in sorted(book.runs):
        row = [book.runs[each].get(name) for name in columns]
        series.setdefault(each.series, []).append(_line([each.rate_per_s, each.seed, *row]))
    head = {
        "made_by": MADE_BY,
        "knobs": dict(book.knobs),
        "scenarios": dict(sorted(book.digests.items())),
        "columns": [*POINT_COLUMNS, *columns],
    }
    spread = {
        each.series: [_line([each.rate_per_s, each.seed, book.quantiles[each]])]
        for each in sorted(book.quantiles)
    }
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    parts += [f'"runs": {_lines(series)}', f'"quantiles": {_lines(spread)}']
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _line(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _lines(content: Mapping[str, Sequence[str]]) -> str:
    parts = (f"{json.dumps(key)}: [\n" + ",\n".join(content[key]) + "\n]" for key in content)
    return "{\n" + ",\n".join(parts) + "\n}"


def read(path: Path) -> Book:
    """Raises ConfigError."""
    try:
        content = json.loads(path.read_text())
        columns = content["columns"][len(POINT_COLUMNS) :]
        return Book(
            content["knobs"],
            content["scenarios"],
            {
                point(series, rate, seed): dict(zip(columns, row, strict=True))
                for series, rows in content["runs"].items()
                for rate, seed, *row in rows
            },
            {
                point(series, rate, seed): each
                for series, rows in content["quantiles"].items()
                for rate, seed, each in rows
            },
        )
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: not what {MADE_BY} writes: {error!r}") from None


def stale_studies(book: Book, studies: Sequence[Study], knobs: Knobs) -> Iterator[str]:
    """What the book says of other scenarios than there are now, a line each."""
    if dict(book.knobs) != dict(knobs):
        yield f"knobs: fitted {dict(knobs)}, but its runs were made with {dict(book.knobs)}"
    for study in studies:
        if study.name not in book.digests:
            yield f"{study.name}: no runs of it"
        elif book.digests[study.name] != study.digest():
            yield f"{study.name}: the scenario has changed since"


def stale_runs(book: Book, outcomes: Mapping[Point, Outcome]) -> Iterator[str]:
    """Figures that come out otherwise now, a line each."""
    for each, outcome in outcomes.items():
        kept = book.runs.get(each)
        if kept is None:
            yield f"{each.key}: no such run"
            continue
        for name, value in outcome.figures.items():
            if not _alike(kept.get(name), value):
                yield f"{each.key}: {name} was {kept.get(name)}, is {value}"


def _alike(kept: float | None, value: float | None) -> bool:
    if kept is None or value is None:
        return kept is value
    return math.isclose(kept, value, rel_tol=TOLERANCE, abs_tol=1e-9)
