"""A run as a trace that Perfetto and chrome://tracing show: https://ui.perfetto.dev, "Open trace".

The format is Chrome's trace events in JSON; times are microseconds. A process is a stage, a thread
is an engine, or what goes on beside its work: transfers, preprocessing. A process ``requests`` has
a row for each request, from its arrival by its first token to its end, with marks at the core's
decisions about it, and counters of the requests that wait for a first token and that have it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any, TextIO

from easerve.goodput import Record
from easerve.sim.run import Run, Span
from easerve.types import NS_PER_S, Stage

Event = Mapping[str, Any]
NS_PER_US = 1000
REQUESTS_PID = 1
STAGE_PIDS = {stage: REQUESTS_PID + 1 + number for number, stage in enumerate(Stage)}
BESIDE = ("transfer", "preprocess", "lost")
"""Kinds of spans during which an engine may work as well."""


def write(run: Run, file: TextIO) -> int:
    """The trace of a run whose spans were kept, event by event; returns how many."""
    num = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    for event in events(run):
        file.write(",\n" if num else "\n")
        file.write(json.dumps(event, ensure_ascii=False))
        num += 1
    file.write("\n]}\n")
    return num


def events(run: Run) -> Iterator[Event]:
    yield from _process(REQUESTS_PID, "requests")
    for stage, pid in STAGE_PIDS.items():
        if stage in run.stages.values():
            yield from _process(pid, stage.value)
    threads = Threads(run.stages)
    for span in sorted(run.spans, key=lambda span: span.begin_ns):
        yield from threads.of(span)
    for name, record in zip(run.ids, run.records, strict=True):
        yield from _request(name, record)
    yield from _decisions(run)
    yield from _counters(run.records)


def _process(pid: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    sorting = {"sort_index": pid}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": sorting}


@dataclass(slots=True)
class Threads:
    """Spans of one thread must not overlap: what goes on beside work gets as many as it needs."""

    stages: Mapping[str, Stage]
    _tids: dict[str, int] = field(default_factory=dict)
    _lanes: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Of an engine and kind: when each of its threads is free (ns), and its name."""

    def of(self, span: Span) -> Iterator[Event]:
        """Spans must come in the order in which they begin."""
        pid = STAGE_PIDS[self.stages[span.engine]]
        name = self._thread(span) if span.kind in BESIDE else span.engine
        if name not in self._tids:
            tid = self._tids[name] = len(self._tids) + 1
            args = {"name": name}
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}
        yield {
            "ph": "X",
            "name": span.kind,
            "cat": span.kind,
            "pid": pid,
            "tid": self._tids[name],
            "ts": span.begin_ns / NS_PER_US,
            "dur": (span.end_ns - span.begin_ns) / NS_PER_US,
            "args": dict(span.args),
        }

    def _thread(self, span: Span) -> str:
        kind = f"{span.engine} {span.kind}"
        lanes = self._lanes.setdefault(kind, [])
        if lanes and lanes[0][0] <= span.begin_ns:
            _, name = heappop(lanes)
        else:
            name = f"{kind} {len(lanes) + 1}" if lanes else kind
        heappush(lanes, (span.end_ns, name))
        return name


def _request(name: str, record: Record) -> Iterator[Event]:
    """Two slices within one, on a row of its own."""
    end_s = record.end_s if record.end_s is not None else record.sent_s
    first_s = record.first_token_s if record.first_token_s is not None else end_s
    args = {"outcome": record.outcome, "output_tokens": record.num_output_tokens}
    yield _row(name, "b", f"request {name}", record.sent_s) | {"args": args}
    yield _row(name, "b", "to first token", record.sent_s)
    yield _row(name, "e", "to first token", first_s)
    if record.first_token_s is not None:
        yield _row(name, "b", "answer", first_s)
        yield _row(name, "e", "answer", end_s)
    yield _row(name, "e", f"request {name}", end_s)


def _decisions(run: Run) -> Iterator[Event]:
    """Which encoder and why then; which prefill engine and why there."""
    for at_ns, batch in run.batches:
        args = {
            "batch": batch.batch_id,
            "items": len(batch.items),
            "engine": batch.worker_id,
            "reason": batch.decision.reason,
        }
        for name in {waiter.request_id for item in batch.items for waiter in item.waiters}:
            yield _mark(name, f"encode on {batch.worker_id}", at_ns, args)
    for at_ns, action in run.prefills:
        args = {
            "engine": action.worker_id,
            "side": action.placement.side,
            "reason": action.reason,
        }
        yield _mark(action.request_id, f"prefill on {action.worker_id}", at_ns, args)


def _mark(request: str, name: str, at_ns: int, args: Mapping[str, Any]) -> Event:
    return {**_row(request, "n", name, at_ns / NS_PER_S), "args": args}


def _row(request: str, phase: str, name: str, at_s: float) -> dict[str, Any]:
    return {
        "ph": phase,
        "cat": "request",
        "id": request,
        "name": name,
        "pid": REQUESTS_PID,
        "tid": 0,
        "ts": round(at_s * NS_PER_S) / NS_PER_US,
    }


def _counters(records: Iterable[Record]) -> Iterator[Event]:
    """How many wait for a first token and how many have it, whenever that changes."""
    changes: list[tuple[float, int, int]] = []
    for record in records:
        end_s = record.end_s if record.end_s is not None else record.sent_s
        changes.append((record.sent_s, 1, 0))
        if record.first_token_s is None:
            changes.append((end_s, -1, 0))
        else:
            changes += [(record.first_token_s, -1, 1), (end_s, 0, -1)]
    waiting = answering = 0
    for at_s, group in groupby(sorted(changes), key=itemgetter(0)):
        for _, more_waiting, more_answering in group:
            waiting, answering = waiting + more_waiting, answering + more_answering
        yield {
            "ph": "C",
            "name": "requests",
            "pid": REQUESTS_PID,
            "tid": 0,
            "ts": round(at_s * NS_PER_S) / NS_PER_US,
            "args": {"waiting": waiting, "answering": answering},
        }
