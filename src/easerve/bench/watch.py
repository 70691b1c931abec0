"""What a server says of itself while a load runs: its Prometheus metrics, as lines over time.

Polled on one connection; of an answer, only the lines that are drawn are kept, and they are parsed
when the run is over. A server without metrics, or one that does not show them, has no timeline.
"""

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

INTERVAL_S = 0.2
WINDOW_S = 1.0
"""Over which rates and means are taken: in a single interval there is often no batch at all."""
TIMEOUT_S = 2.0
MAX_BYTES = 8 << 20
MAX_SCRAPES = 1000
"""Beyond these every second one is dropped, and the interval doubled."""
IDLE_TIMEOUT_S, IDLE_INTERVAL_S, COOL_DOWN_S = 60.0, 0.1, 1.0
OPEN_REQUESTS = ("easerve_requests_open", "vllm:num_requests_running", "vllm:num_requests_waiting")
STEM_SUFFIXES = ("/chat/completions", "/completions", "/v1")

Kind = Literal["now", "rate", "mean"]
Values = Mapping[tuple[str, str], float]
"""By name of a sample, and by the label that its metric is drawn by."""


@dataclass(frozen=True, slots=True)
class Line:
    """A metric in a chart: one line called ``name``, or one for each value of ``label``.

    ``now``: a gauge as it is. ``rate``: what a counter grew by per second. ``mean``: of what a
    histogram saw. Samples that differ in other labels are added up.
    """

    chart: str
    unit: str
    metric: str
    kind: Kind = "now"
    name: str = ""
    label: str = ""

    @property
    def samples(self) -> tuple[str, ...]:
        """The names of its samples."""
        if self.kind == "mean":
            return f"{self.metric}_sum", f"{self.metric}_count"
        return (self.metric,)


QUEUES, OPEN, TOKENS = "Queue lengths", "Open requests", "Output tokens"
SHARE, ENGINE = "Remote share of prefills", "Requests in the engine"
LINES = (
    Line(QUEUES, "requests", "easerve_queue_length", label="stage"),
    Line(OPEN, "requests", "easerve_requests_open", name="open"),
    Line("Encode batch size", "items", "easerve_encode_batch_items", "mean", "mean of 1 s"),
    Line(
        "Encoder busy share", "share", "easerve_encode_busy_seconds_total", "rate", label="worker"
    ),
    Line("Arrival rate", "requests/s", "easerve_encode_arrivals_per_second", name="with media"),
    Line(SHARE, "share", "easerve_offload_share_ratio", name="in force"),
    Line(SHARE, "share", "easerve_offload_realised_share_ratio", name="realised"),
    Line("Demanded units", "units", "easerve_partition_demanded_units", label="worker"),
    Line("Prefill backlog", "s", "easerve_prefill_backlog_seconds", label="side"),
    Line(TOKENS, "tokens/s", "easerve_output_tokens_total", "rate", "output"),
    Line(ENGINE, "requests", "vllm:num_requests_running", name="running"),
    Line(ENGINE, "requests", "vllm:num_requests_waiting", name="waiting"),
    Line("KV cache usage", "share", "vllm:kv_cache_usage_perc", label="engine"),
    Line("Preemptions", "1/s", "vllm:num_preemptions_total", "rate", "preemptions"),
    Line(TOKENS, "tokens/s", "vllm:generation_tokens_total", "rate", "output"),
)
LABELS = {sample: line.label for line in LINES for sample in line.samples}
WANTED = tuple(f"{sample}{end}" for sample in LABELS for end in "{ ")


@dataclass(frozen=True, slots=True)
class Scrape:
    """``at_s``: when it was asked for, on the monotonic clock. ``text``: what is drawn of it."""

    at_s: float
    text: str


class Watch:
    """What was seen; complete when ``watching`` has ended. ``ended``: why there is no more."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.scrapes: list[Scrape] = []
        self.interval_s = interval_s
        self.ended: str | None = None

    def add(self, scrape: Scrape) -> None:
        self.scrapes.append(scrape)
        if len(self.scrapes) > MAX_SCRAPES:
            del self.scrapes[1::2]
            self.interval_s *= 2

    def timeline(self, origin_s: float | None = None) -> dict[str, Any] | None:
        """For a run's JSON: ``times_s`` and ``charts``; None when the server showed nothing.

        Times are seconds from ``origin_s`` on the monotonic clock, or from the first scrape; what
        was before (warm-ups) is left out.
        """
        if not self.scrapes:
            return None
        begin_s = self.scrapes[0].at_s if origin_s is None else origin_s
        times_s = [scrape.at_s - begin_s for scrape in self.scrapes]
        charts = list(charts_of(times_s, [values_of(scrape.text) for scrape in self.scrapes]))
        first = sum(time_s < 0 for time_s in times_s)
        if not charts or first == len(times_s):
            return None
        for chart in charts:
            chart["series"] = {name: line[first:] for name, line in chart["series"].items()}
        return {"times_s": [round(time_s, 3) for time_s in times_s[first:]], "charts": charts}


@contextlib.asynccontextmanager
async def watching(
    url: str, api_key: str | None = None, interval_s: float = INTERVAL_S
) -> AsyncIterator[Watch]:
    """Poll the server at ``url`` meanwhile. What goes wrong with that is no error of the run."""
    watch = Watch(interval_s)
    task = asyncio.create_task(_poll(watch, metrics_url(url), api_key))
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def metrics_url(url: str) -> str:
    """Where a server shows its metrics: beside ``/v1``, whatever route of it ``url`` names."""
    parsed = URL(url)
    path = parsed.path.rstrip("/")
    for suffix in STEM_SUFFIXES:
        path = path.removesuffix(suffix)
    return str(parsed.with_path(f"{path}/metrics"))


async def wait_idle(
    url: str, api_key: str | None = None, timeout_s: float = IDLE_TIMEOUT_S
) -> bool | None:
    """Until the server has no request any more: True; False when it still has after so long.

    None, after ``COOL_DOWN_S``, for a server that does not say.
    """
    async with _session(api_key) as session:
        end_s = time.monotonic() + timeout_s
        while True:
            seen = Watch()
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                await _scrape(seen, session, metrics_url(url))
            num_open = num_open_of(seen.scrapes[0].text) if seen.scrapes else None
            if num_open is None:
                await asyncio.sleep(min(COOL_DOWN_S, timeout_s))
                return None
            if num_open == 0 or time.monotonic() >= end_s:
                return num_open == 0
            await asyncio.sleep(IDLE_INTERVAL_S)


def num_open_of(text: str) -> float | None:
    """Requests that a server has, as its metrics say; None: they do not."""
    values = values_of(text)
    found = [value for (name, _), value in values.items() if name in OPEN_REQUESTS]
    return sum(found) if found else None


async def _poll(watch: Watch, url: str, api_key: str | None) -> None:
    async with _session(api_key) as session:
        next_s = time.monotonic()
        while watch.ended is None:
            # One that is busy, or gone, is shown by the run itself.
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                await _scrape(watch, session, url)
            # A scrape that took long is not made up for.
            next_s = max(next_s + watch.interval_s, time.monotonic() + watch.interval_s / 2)
            await asyncio.sleep(next_s - time.monotonic())


def _session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=1),
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
    )


async def _scrape(watch: Watch, session: aiohttp.ClientSession, url: str) -> None:
    at_s = time.monotonic()
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            if response.status < 500:
                watch.ended = f"HTTP {response.status}"
            return
        content = await _read(response.content)
    if content is None:
        watch.ended = f"more than {MAX_BYTES >> 20} MiB of metrics"
    elif text := drawn(content.decode(errors="replace")):
        watch.add(Scrape(at_s, text))
    else:
        watch.ended = "no metrics that are known here"


async def _read(stream: aiohttp.StreamReader) -> bytes | None:
    """None: too much."""
    content = bytearray()
    async for piece in stream.iter_any():
        content += piece
        if len(content) > MAX_BYTES:
            return None
    return bytes(content)


def drawn(text: str) -> str:
    """The lines of an exposition that are drawn."""
    return "".join(f"{line}\n" for line in text.splitlines() if line.startswith(WANTED))


def values_of(text: str) -> Values:
    """What a text of ``drawn`` says; empty for one that cannot be read."""
    values: dict[tuple[str, str], float] = defaultdict(float)
    with contextlib.suppress(ValueError):
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                values[name, labels.get(LABELS.get(name, ""), "")] += value
    return dict(values)


def charts_of(times_s: Sequence[float], scrapes: Sequence[Values]) -> Iterator[dict[str, Any]]:
    """A chart for each title of which the server shows something."""
    charts: dict[str, dict[str, Any]] = {}
    for line in LINES:
        for key in sorted(
            {key for values in scrapes for key in values if key[0] == line.samples[0]}
        ):
            chart = {"title": line.chart, "unit": line.unit, "series": {}}
            points = [_finite(value) for value in _points(line, key[1], times_s, scrapes)]
            charts.setdefault(line.chart, chart)["series"][key[1] or line.name] = points
    yield from charts.values()


def _points(
    line: Line, label: str, times_s: Sequence[float], scrapes: Sequence[Values]
) -> Iterator[float | None]:
    """At each scrape; None where there is nothing to say."""
    begin = 0
    for now, values in enumerate(scrapes):
        while times_s[now] - times_s[begin] > WINDOW_S and begin < now - 1:
            begin += 1
        if line.kind == "now":
            yield values.get((line.metric, label))
        elif now == 0 or (line.samples[0], label) not in values:
            yield None
        else:
            # What was not there had not happened.
            top, *rest = (
                values.get((sample, label), 0) - scrapes[begin].get((sample, label), 0)
                for sample in line.samples
            )
            bottom = rest[0] if rest else times_s[now] - times_s[begin]
            yield top / bottom if top >= 0 and bottom > 0 else None  # less: it was restarted


def _finite(value: float | None) -> float | None:
    return round(value, 6) if value is not None and math.isfinite(value) else None
