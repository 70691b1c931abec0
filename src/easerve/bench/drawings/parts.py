"""Parts of a report as plain values: tables, charts, and sections of them.

Units belong into titles. Colours are numbers, so that a system has the same one in every chart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Cell = str | int | float | None
Kind = Literal["line", "step", "area", "scatter", "bar", "spans", "parallel"]


@dataclass(frozen=True, slots=True)
class Table:
    """A cell that is None is shown as a dash. ValueError unless all rows are as long as columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} cells for {len(self.columns)} columns")


@dataclass(frozen=True, slots=True)
class Series:
    """A named line, or the bars of one colour. ``x`` are numbers, or texts; y of None is a gap.

    ``low`` and ``high`` draw a band around a line, or whiskers on bars. ``colour`` counts from 0,
    None takes the place in the chart; ``dashed`` is for what was not measured, ``muted`` (grey) for
    what is only there to compare with.
    """

    name: str
    x: Sequence[str] | Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    colour: int | None = None
    dashed: bool = False
    muted: bool = False

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"{len(self.x)} x and {len(self.y)} y of {self.name!r}")
        if (self.low is None) != (self.high is None):
            raise ValueError(f"{self.name!r} has one of low and high, not both")
        for edge in (self.low, self.high):
            if edge is not None and len(edge) != len(self.x):
                raise ValueError(f"{len(self.x)} x and {len(edge)} edges of {self.name!r}")


@dataclass(frozen=True, slots=True)
class Spans:
    """Intervals of one colour, each in the row (a text) of its number in ``rows``.

    ``begin`` and ``end`` are numbers of the x axis. ValueError unless all three are as long, and no
    interval ends before it begins.
    """

    name: str
    rows: Sequence[str]
    begin: Sequence[float]
    end: Sequence[float]
    colour: int | None = None

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.begin) == len(self.end):
            raise ValueError(
                f"{len(self.rows)} rows, {len(self.begin)} begins and {len(self.end)} ends of "
                f"{self.name!r}"
            )
        if any(end < begin for begin, end in zip(self.begin, self.end, strict=True)):
            raise ValueError(f"an interval of {self.name!r} ends before it begins")


@dataclass(frozen=True, slots=True)
class Axis:
    """One of parallel axes. ``values``: of each line; None is a place of its own."""

    name: str
    values: Sequence[Cell]


@dataclass(frozen=True, slots=True)
class Limit:
    """A line across the chart at a value of one axis, with a short name beside it."""

    value: float
    name: str = ""
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True, slots=True)
class Chart:
    """``series`` are Spans where ``kind`` is spans (rows from the top, as they come), Axes where it
    is parallel (lines are as dark as their number on the last one is high), else Series.

    A step holds its value until the next x; areas are stacked. ``limit`` is a short form of one
    nameless Limit on y. ``x_range`` and ``y_range`` are from, to. ``aligned`` charts under each
    other have their plots of one width. ValueError for series of the wrong type.
    """

    title: str
    x_title: str
    y_title: str
    series: Sequence[Series] | Sequence[Spans] | Sequence[Axis]
    kind: Kind = "line"
    limit: float | None = None
    limits: Sequence[Limit] = ()
    x_log: bool = False
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    aligned: bool = False

    def __post_init__(self) -> None:
        wanted = {"spans": Spans, "parallel": Axis}.get(self.kind, Series)
        if not all(isinstance(each, wanted) for each in self.series):
            raise ValueError(f"a chart of kind {self.kind} is made of {wanted.__name__}")

    @property
    def lines(self) -> Sequence[Series]:
        """The series, unless they are spans."""
        return [each for each in self.series if isinstance(each, Series)]

    @property
    def spans(self) -> Sequence[Spans]:
        return [each for each in self.series if isinstance(each, Spans)]

    @property
    def axes(self) -> Sequence[Axis]:
        return [each for each in self.series if isinstance(each, Axis)]

    @property
    def marked(self) -> Sequence[Limit]:
        """All limits."""
        return [*self.limits, *([] if self.limit is None else [Limit(self.limit)])]


@dataclass(frozen=True, slots=True)
class Section:
    """Empty lines part the paragraphs of ``text``; ``alert`` is what nobody may overlook."""

    title: str
    text: str = ""
    parts: Sequence[Table | Chart] = ()
    alert: str = ""


def shown(cell: Cell) -> str:
    """Fractions have four digits that count, or none behind the point."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return str(cell)
