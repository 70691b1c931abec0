"""A run over its time: each request where it was sent, and what the server told meanwhile.

The charts of a run stand under each other with one time axis.
"""

from collections.abc import Iterator, Sequence
from math import ceil

from easerve.bench.drawings.labels import unit_of
from easerve.bench.drawings.parts import Chart, Series
from easerve.bench.drawings.results import Run
from easerve.bench.drawings.written import Columns, Timeline, TimelineChart

MAX_POINTS = 1000
TIME = "time since the start, s"


def charts(run: Run) -> list[Chart]:
    """None for a run that tells neither requests nor a timeline."""
    found = [*_of_requests(run.requests), *_of_timeline(run.timeline)]
    ends = [x for chart in found for each in chart.lines for x in each.x]
    last = max((x for x in ends if isinstance(x, int | float)), default=0.0)
    return [_until(chart, last) for chart in found if last > 0]


def _until(chart: Chart, last_s: float) -> Chart:
    return Chart(
        chart.title,
        chart.x_title,
        chart.y_title,
        chart.series,
        chart.kind,
        x_range=(0, 1.02 * last_s),
        aligned=True,
    )


def _of_requests(requests: Columns | None) -> Iterator[Chart]:
    if requests is None or not requests.outcome:
        return
    yield _scatter(requests)
    yield _in_flight(requests)


def _scatter(requests: Columns) -> Chart:
    """Those that are not completed lie at the bottom: they have no time that would count."""
    rows = list(zip(requests.scheduled_s, requests.ttft_s, requests.outcome, strict=True))
    good = [(x, y) for x, y, how in rows if how == "completed" and y is not None]
    lost = [x for x, _, how in rows if how != "completed"]
    unit = unit_of(y for _, y in good)
    drawn = _thinned(good)
    series = [Series("completed", [x for x, _ in drawn], [unit.of(y) for _, y in drawn])]
    if lost:
        at = _thinned([(x, 0.0) for x in lost])
        series.append(Series("not completed", [x for x, _ in at], [y for _, y in at]))
    part = "" if len(drawn) == len(good) else f" (every {ceil(len(good) / MAX_POINTS)}th request)"
    title = f"TTFT by when a request was to be sent{part}"
    return Chart(title, TIME, f"TTFT, {unit.name}", series, "scatter")


def _in_flight(requests: Columns) -> Chart:
    """Requests that were sent and not answered yet; one without an end is not drawn.

    Latency counts from when a request was due, which is before it was sent if it had to wait.
    """
    changes: list[tuple[float, int]] = []
    waits = requests.slot_wait_s or [0.0] * len(requests.sent_s)
    for sent, latency, wait in zip(requests.sent_s, requests.latency_s, waits, strict=True):
        if sent is not None and latency is not None:
            changes += [(sent, 1), (max(sent, sent - wait + latency), -1)]
    now, steps = 0, []
    for time, change in sorted(changes):
        now += change
        steps.append((time, float(now)))
    drawn = _thinned(steps)
    line = Series("in flight", [x for x, _ in drawn], [y for _, y in drawn])
    return Chart("Requests in flight", TIME, "requests", [line], "step")


def _of_timeline(timeline: Timeline | None) -> Iterator[Chart]:
    if timeline is not None:
        yield from (_told(timeline.times_s, chart) for chart in timeline.charts)


def _told(times_s: Sequence[float], chart: TimelineChart) -> Chart:
    step = max(1, ceil(len(times_s) / MAX_POINTS))
    series = [
        Series(name, times_s[::step], values[::step]) for name, values in chart.series.items()
    ]
    return Chart(chart.title, TIME, chart.unit, series)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    return points[:: max(1, ceil(len(points) / MAX_POINTS))]
