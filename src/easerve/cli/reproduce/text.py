"""Words and numbers of the page: labels of figures, cells, tables in Markdown."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from easerve.cli.reproduce.plan import Side
from easerve.goodput import Slo
from easerve.sim.scenario import Anchor

Cell = str | float | int | None


class Label(NamedTuple):
    """A figure is shown ``scale`` times its value, in ``unit``."""

    text: str
    unit: str
    scale: float


def label(metric: str) -> Label:
    name, _, part = metric.partition(".")
    word = "mean" if part == "mean" else part.upper()
    match name:
        case "ttft_s":
            return Label(f"{word} TTFT", "s", 1)
        case "tpot_s":
            return Label(f"{word} TPOT", "ms", 1000)
        case "goodput_per_s":
            return Label(f"goodput {part}", "req/s", 1)
        case "attainment":
            return Label(f"attainment {part}", "%", 100)
        case "utilisation":
            return Label(f"{part} busy", "%", 100)
        case "throughput_per_s":
            return Label("throughput", "req/s", 1)
    return Label(metric, "", 1)


def who(side: Side) -> str:
    return f"{side.system} ({side.variant})" if side.variant else side.system


def anchor_text(anchor: Anchor) -> str:
    """Whose figure it is, which, and when."""
    text, unit, _ = label(anchor.metric)
    own = Side(anchor.system, anchor.variant or "")
    when = "best rate" if anchor.rate_per_s is None else f"{anchor.rate_per_s:g}/s"
    if anchor.over is None:
        return f"{who(own)}: {text} at {when}, {unit}"
    other = Side(anchor.over.system or anchor.system, anchor.over.variant or "")
    if other.system != own.system:
        return f"{who(own)} ÷ {who(other)}: {text} at {when}"
    variants = " ÷ ".join(side.variant or "as it is" for side in (own, other))
    return f"{own.system}, {variants}: {text} at {when}"


def anchor_value(anchor: Anchor, value: float | None) -> Cell:
    if value is None:
        return None
    if anchor.over is not None:
        return f"{value:.3g} ×"
    return value * label(anchor.metric).scale


def limits(slo: Slo) -> str:
    ttft = [] if slo.ttft_s is None else [f"TTFT {number(slo.ttft_s)} s"]
    tpot = [] if slo.tpot_s is None else [f"TPOT {number(1000 * slo.tpot_s)} ms"]
    return ", ".join([*ttft, *tpot])


def number(value: float) -> str:
    """With three digits that count, none of them behind an exponent."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else f"{value:,.0f}"


def change(value: float | None, before: float | None) -> str | None:
    """As in +12 %, or 7.1 times; None where there is nothing to compare."""
    if value is None or not before:
        return None
    if value >= 3 * before:
        return f"{number(value / before)} times"
    return f"{100 * (value / before - 1):+.0f} %".replace("-", "−")


def cell(value: Cell) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else number(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    """Columns of numbers alone are set to the right. ValueError for a row of another length."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"{len(row)} cells for {len(columns)} columns")
    texts = [any(isinstance(row[at], str) for row in rows) for at in range(len(columns))]
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join('---' if text else '---:' for text in texts)}|"
    for row in rows:
        yield f"| {' | '.join(map(cell, row))} |"


def paragraph(text: str) -> str:
    """In lines of at most 100 characters."""
    return textwrap.fill(
        " ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False
    )


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
