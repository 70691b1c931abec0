"""A page of what commands have measured or simulated, from what they have written.

Run as ``python -m scripts.bench_page RESULT.json ... docs/bench-results.md`` (``make docs-bench``),
or with ``docs/search-results.md`` (``make docs-search``).
The tables and sentences are those of ``easerve report``; nothing on the page is typed.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from easerve.bench.report import Cell, Section, Table, shown
from easerve.cli.report import drawn, read
from easerve.config import ConfigError

COMMANDS = {
    "bench-cpu": "make bench-cpu ROUNDS={rounds}",
    "bench-control": "easerve bench control --router PATH --json",
    "goodput": "easerve bench goodput",
    "search": "{command}",
    "search-compare": "{command}",
}
HEADS = {
    "bench-results": """\
# What was measured on one CPU

Written by `make docs-bench` from measurements; [bench.md](bench.md) says how they are made,
[metrics.md](metrics.md) what each word means. Everything here ran on CPU cores, with the tiny
model: it tells what the mechanisms do, not what a GPU would.
""",
    "search-results": """\
# Methods of search beside trying everything

Written by `make docs-search`; [search.md](search.md) says what is searched and what a configuration
is worth. **Everything here is simulated**, by kernels that were measured on an L40S; nothing was
measured on the cards that are named. Every configuration of the grid was tried with the same loads;
a method is asked how many trials it needs to come within 2 % of the best of them. Scores are looked
up for that, so that it says nothing about time; a study that looks nothing up is timed beside it.
""",
}


def main() -> None:
    *results, page = map(Path, sys.argv[1:])
    try:
        text = "\n".join((HEADS[page.stem], *(line for path in results for line in _of(path))))
    except ConfigError as error:
        sys.exit(str(error))
    page.write_text(text)


def _of(path: Path) -> Iterator[str]:
    result = read(path)
    command = COMMANDS.get(result["kind"], f"easerve {result['kind'].replace('-', ' ')}")
    yield f"Made by `{command.format_map(result)}`:\n"
    for section in drawn([(path, result)]):
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    tables = [part for part in section.parts if isinstance(part, Table)]
    if not tables and not section.text:
        return
    yield f"## {section.title}\n"
    if section.alert:
        yield f"**{_plain(section.alert)}**\n"
    if section.text:
        yield f"{_plain(section.text)}\n"
    for table in tables:
        yield from _table(table)


def _table(table: Table) -> Iterator[str]:
    texts = {at for row in table.rows for at, cell in enumerate(row) if isinstance(cell, str)}
    rules = ("---" if at in texts else "---:" for at in range(len(table.columns)))
    yield f"**{_plain(table.title)}**\n"
    yield _row(table.columns)
    yield f"| {' | '.join(rules)} |"
    yield from map(_row, table.rows)
    yield ""


def _row(cells: Sequence[Cell]) -> str:
    return f"| {' | '.join(_plain(shown(cell)) for cell in cells)} |"


def _plain(text: str) -> str:
    """Without what Markdown would take for its own."""
    return re.sub(r"([|*_<>`])", r"\\\1", text)


if __name__ == "__main__":
    main()
