"""The tables of docs/bench-tools.md."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from scripts.bench_tools.cases import PARTS, TIMES, Case, Figures

BEGIN, END = "<!-- tables: scripts/bench_tools -->", "<!-- end of tables -->"
SCRIPT, OURS = "script", "EAServe"
AGREEMENT = 0.03
"""How far from the script a tool that agrees may be, as a share."""
LABELS = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "latency_s": "latency"}
ROWS = {
    **{f"{name}.{part}": f"{LABELS[name]} {part}, ms" for name in TIMES for part in PARTS},
    "throughput_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "goodput_per_s": "goodput, requests/s",
    "completed": "completed",
    "failed": "failed",
}
Results = Sequence[tuple[Case, Mapping[str, Figures]]]
"""By name of the tool; the script is one of them."""


class PageError(Exception):
    """The page has no place for the tables."""


def write(page: Path, head: Sequence[str], results: Results) -> None:
    tables = "\n".join((BEGIN, *head, "", *lines(results), END))
    text, num = re.subn(f"{BEGIN}.*{END}", lambda _: tables, page.read_text(), flags=re.DOTALL)
    if num != 1:
        raise PageError(f"{page}: expected one place between {BEGIN} and {END}")
    page.write_text(text)


def disagreements(results: Results) -> list[str]:
    """Where a tool says other than the script and should not."""
    return [
        f"{case.title}: {tool}: {ROWS[name]}: {figures[name]}, by the script {by_script[name]}"
        for case, by_tool in results
        for by_script in (by_tool[SCRIPT],)
        for tool, figures in by_tool.items()
        for name in ROWS
        if name in case.agreed and not agrees(figures[name], by_script[name])
    ]


def agrees(figure: float | None, expected: float | None) -> bool:
    """Within ``AGREEMENT``; what the script does not say is agreed with."""
    if expected is None or figure is None:
        return expected is None
    return abs(figure - expected) <= AGREEMENT * expected


def lines(results: Results) -> Iterator[str]:
    for case, by_tool in results:
        others = [tool for tool in by_tool if tool not in (SCRIPT, OURS)]
        yield f"### {case.title}"
        yield ""
        yield case.text
        yield ""
        yield _row("", [*by_tool, *(f"{tool} / {OURS}" for tool in others)])
        yield _row("---", ["---:"] * (len(by_tool) + len(others)))
        for name, label in ROWS.items():
            expected = by_tool[SCRIPT][name]
            cells = [_cell(name, figures[name], expected) for figures in by_tool.values()]
            ratios = [_ratio(by_tool[tool][name], by_tool[OURS][name]) for tool in others]
            yield _row(label, [*cells, *ratios])
        yield ""


def _row(label: str, cells: Sequence[str]) -> str:
    return f"| {' | '.join((label, *cells))} |"


def _cell(name: str, figure: float | None, expected: float | None) -> str:
    """In bold what differs from the script."""
    if figure is None:
        return "–"
    if name in ("completed", "failed"):
        text = f"{figure:g}"
    else:
        text = f"{1e3 * figure:.1f}" if name.split(".")[0] in TIMES else f"{figure:.2f}"
    return text if agrees(figure, expected) else f"**{text}**"


def _ratio(figure: float | None, ours: float | None) -> str:
    return "–" if figure is None or not ours else f"{figure / ours:.3f}"
