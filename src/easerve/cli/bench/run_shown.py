"""What a person sees of ``easerve bench``: how far it is, then tables for 80 columns."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from easerve.bench import job
from easerve.bench.report import Cell, Section, Table
from easerve.goodput import TIERS

WINDOW_S = 5.0
TOO_SLOW = (
    "figures are withheld, for they may be the client's: lower the rate, give the client cores of "
    "its own, or say --allow-late"
)
Result = Mapping[str, Any]
SPREADS = (
    ("TTFT, ms", "ttft_s"),
    ("TPOT, ms", "tpot_s"),
    ("ITL, ms", "itl_s"),
    ("latency, ms", "latency_s"),
    ("wait for a place, ms", "slot_wait_s"),
)
OUTCOMES = ("failed", "rejected", "timed_out", "cancelled")


# Progress ----------------------------------------------------------------------------------------


@contextmanager
def making(console: Console, num: int) -> Iterator[Callable[[], None]]:
    """Call it for each request that was made."""
    with _bar(console) as bar:
        task = bar.add_task("making requests", total=num)
        yield lambda: bar.advance(task)


@contextmanager
def sending(console: Console, num: int, num_warmup: int) -> Iterator[job.OnProgress]:
    live = Live()
    with _bar(console) as bar:
        task = bar.add_task("starting", total=num)

        def on_progress(progress: job.Progress) -> None:
            live.add(time.monotonic(), progress)
            warming = progress.num_sent == 0 and progress.num_warm < num_warmup
            text = f"warm-up {progress.num_warm}/{num_warmup}" if warming else live.text()
            bar.update(task, description=text, completed=progress.num_done)

        yield on_progress


def _bar(console: Console) -> Progress:
    columns = (BarColumn(bar_width=12), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(
        TextColumn("{task.description}"),
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class Live:
    """The last seconds of a run."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, job.Progress]] = deque()

    def add(self, now_s: float, progress: job.Progress) -> None:
        self._seen.append((now_s, progress))
        while now_s - self._seen[0][0] > WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()

    def text(self) -> str:
        """In flight, failures; of the first and the last objective: met per second, their share."""
        (begin_s, first), (end_s, last) = self._seen[0], self._seen[-1]
        parts = [f"{last.num_sent - last.num_done} in flight"]
        num_done = last.num_done - first.num_done
        if end_s > begin_s and num_done:
            if not last.met:
                parts.append(f"{num_done / (end_s - begin_s):.1f}/s")
            for name in dict.fromkeys([*last.met][:1] + [*last.met][-1:]):
                met = last.met[name] - first.met.get(name, 0)
                title = name if name in TIERS else "met"
                parts.append(f"{title} {met / (end_s - begin_s):.1f}/s {met / num_done:.0%}")
        if failures := sum(last.causes.values()):
            parts.append(f"{failures} not completed")
        return ", ".join(parts)


# Tables ------------------------------------------------------------------------------------------


def sections(found: Result) -> list[Section]:
    """Of a result of ``bench.result``."""
    tables = [_times(found)]
    if found["slo"]:
        tables.append(_objectives(found))
    return [Section("Run", "\n".join(_notes(found)), tables)]


def _times(found: Result) -> Table:
    rows: list[Sequence[Cell]] = []
    for title, key in SPREADS:
        spread = found[key]
        if key == "slot_wait_s" and "max_in_flight" not in found["arrival"]:
            continue
        rows.append((title, *(_ms(spread[part]) for part in ("mean", "p50", "p90", "p99"))))
    title = f"{found['system']}: {found['model']}, {arrivals(found['arrival'])}"
    return Table(title, ("", "mean", "P50", "P90", "P99"), rows)


def arrivals(arrival: Mapping[str, Any]) -> str:
    """In a few words."""
    if arrival["kind"] == "closed":
        return f"{arrival['concurrency']} at a time"
    if arrival["kind"] == "immediate":
        return "all at once"
    rate = f" {arrival['rate_per_s']:g}/s" if "rate_per_s" in arrival else ""
    end = f" to {arrival['end_rate_per_s']:g}/s" if "end_rate_per_s" in arrival else ""
    cv = f", cv {arrival['cv']:g}" if "cv" in arrival else ""
    limit = arrival.get("max_in_flight")
    most = f", {limit} in flight at most" if limit is not None else ""
    return f"{arrival['kind']}{rate}{end}{cv}{most}"


def _ms(time_s: float | None) -> Cell:
    return None if time_s is None else 1000 * time_s


def _objectives(found: Result) -> Table:
    rows = []
    for name, slo in found["slo"].items():
        share = found["attainment"][name]
        limits = [
            f"{title} {_limit(slo[key])}"
            for title, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("latency", "latency_s"))
            if slo[key] is not None
        ]
        percent = None if share is None else 100 * share
        tier = [f"{name}:"] if name in TIERS else []
        promise = " ".join([*tier, ", ".join(limits)])
        rows.append((promise, percent, found["goodput_per_s"][name]))
    return Table("Promises", ("at most", "met, %", "goodput, /s"), rows)


def _limit(time_s: float) -> str:
    return f"{time_s:g} s" if time_s >= 1 else f"{1000 * time_s:.4g} ms"


def _notes(found: Result) -> Iterator[str]:
    others = [f"{found[name]} {name.replace('_', ' ')}" for name in OUTCOMES if found[name]]
    counts = ", ".join([f"{found['completed']} of {found['num_requests']} completed", *others])
    yield f"{counts}, in {found['duration_s']:.2f} s"
    yield from (f"  {number} x {cause}" for cause, number in found["causes"].items())
    if found["throughput_per_s"] is not None:
        yield (
            f"{found['throughput_per_s']:.4g} requests/s and "
            f"{found['output_tokens_per_s']:.4g} output tokens/s"
        )
    yield from _tokens(found["tokens"])
    client = found["client"]
    lag_s, late_s = client["loop_lag_p99_s"], found["lateness_p99_s"]
    late = "" if late_s is None else f", sent {1000 * late_s:.2f} ms late (P99)"
    lag = "" if lag_s is None else f", read {1000 * lag_s:.2f} ms late (P99)"
    yield f"Client: {client['cpu_share']:.0%} of a core{late}{lag}"
    if found["small_sample"]:
        yield f"Too few requests to trust: {', '.join(found['small_sample'])}"
    yield from found["notes"]
    if not found["valid"]:
        yield f"NOT VALID: {'; '.join(found['invalid_because'])}"


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _tokens(tokens: Mapping[str, int]) -> Iterator[str]:
    if tokens["by_usage"] or tokens["prompt"]:
        yield (
            f"{tokens['by_usage']} output tokens and {tokens['prompt']} prompt tokens, as the "
            "server counts"
        )
    if tokens["differing"]:
        yield (
            f"They came in {tokens['by_chunks']} chunks: bundled, or miscounted, in "
            f"{_number(tokens['differing'], 'stream')}"
        )
    if tokens["without_usage"]:
        yield f"{_number(tokens['without_usage'], 'answer')} without usage: chunks were counted"
