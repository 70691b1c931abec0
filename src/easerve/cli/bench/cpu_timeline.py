"""Encode and prefill beside each other: a run seen every few milliseconds, and call by call."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from easerve.bench.cpu import children
from easerve.bench.sampler import sampling
from easerve.cli.bench.cpu_runs import Easerve, Load
from easerve.cli.bench.cpu_watch import Interval
from easerve.types import Stage

PERIOD_S = 0.002
RUNS = 0.5  # of a period: an engine that used less of a core did not work in it
SHOWN_S = 1.0
Samples = Sequence[tuple[float, Mapping[str, float]]]
Result = dict[str, Any]
Span = tuple[float, float]


async def timeline(system: Easerve, load: Load) -> Result:
    """One run. Seconds are from its first call to an engine."""
    engines = {str(each.worker_id): each for each in system.service.driver.engines()}
    of_cluster = system.service.cluster.pids
    processes = {name: [of_cluster[name], *children(of_cluster[name])] for name in engines}
    threads = [pid for pids in processes.values() for pid in pids]
    async with sampling(threads, PERIOD_S) as moments:
        run = await system.run(load)
    samples = [(now_s, _by_engine(processes, used)) for now_s, used in moments]
    encodes, prefills = system.watch.encodes, system.watch.prefills
    begin_s = min((each.begin_s for each in [*encodes, *prefills]), default=0.0)
    end_s = max((each.end_s for each in [*encodes, *prefills]), default=0.0)
    times_s, shares = busy(samples, begin_s, end_s)
    stages = {name: engine.stage for name, engine in engines.items()}
    return {
        "system": system.name,
        "row": run.row(),
        "times_s": times_s,
        "busy": shares,
        "calls": {
            "encode": _spans(encodes, begin_s),
            **{name: _spans(prefills, begin_s, name) for name, s in stages.items() if _is(s)},
        },
        "beside": {"calls": beside_by_calls(encodes, prefills), **beside(shares, stages)},
    }


def _by_engine(processes: Mapping[str, Sequence[int]], used_s: Sequence[float]) -> dict[str, float]:
    """CPU seconds of the processes' first threads, which come in this order."""
    left = iter(used_s)
    return {name: sum(next(left) for _ in pids) for name, pids in processes.items()}


def _is(stage: Stage) -> bool:
    return stage is Stage.PREFILL


def busy(samples: Samples, begin_s: float, end_s: float) -> tuple[list[float], Result]:
    """Times, and the cores that each engine used since the time before, server and core."""
    within = [each for each in samples if begin_s <= each[0] <= end_s]
    times_s: list[float] = []
    shares: dict[str, list[float]] = {name: [] for name in (within[0][1] if within else ())}
    for (before_s, before), (now_s, now) in pairwise(within):
        times_s.append(round(now_s - begin_s, 4))
        for name, used_s in now.items():
            share = (used_s - before[name]) / (now_s - before_s)
            shares[name].append(round(max(0.0, share), 3))
    return times_s, shares


def beside(shares: Mapping[str, Sequence[float]], stages: Mapping[str, Stage]) -> Result:
    """Shares of the periods: an encoder ran, prefill ran, both did.

    ``of_encode``: of those in which an encoder ran; None where none did.
    """
    rows = list(zip(*shares.values(), strict=True))
    names = list(shares)
    runs = [
        {stages[name] for name, share in zip(names, row, strict=True) if share >= RUNS}
        for row in rows
    ]
    encode = sum(Stage.ENCODE in each for each in runs)
    prefill = sum(Stage.PREFILL in each for each in runs)
    both = sum({Stage.ENCODE, Stage.PREFILL} <= each for each in runs)
    num = max(1, len(runs))
    return {
        "encode": encode / num,
        "prefill": prefill / num,
        "both": both / num,
        "of_encode": both / encode if encode else None,
    }


def beside_by_calls(encodes: Sequence[Interval], prefills: Sequence[Interval]) -> float | None:
    """Of the time in which a call to an encoder was open, the share with one to prefill, too."""
    encode, prefill = union(encodes), union(prefills)
    whole_s = sum(end - begin for begin, end in encode)
    both_s = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in encode
        for other_begin, other_end in prefill
    )
    return both_s / whole_s if whole_s else None


def union(intervals: Iterable[Interval]) -> list[Span]:
    """Without overlaps, rising."""
    merged: list[Span] = []
    for begin, end in sorted((each.begin_s, each.end_s) for each in intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _spans(calls: Iterable[Interval], begin_s: float, name: str | None = None) -> list[Span]:
    return [
        (round(each.begin_s - begin_s, 4), round(each.end_s - begin_s, 4))
        for each in calls
        if name is None or each.worker_id == name
    ]
