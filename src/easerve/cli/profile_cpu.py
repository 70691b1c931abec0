"""CPU seconds of the processes of a running service, by what they do.

An engine's core counts with its main thread alone, which runs the steps; what its other threads do
goes on whether there is work or not, and is measured with nothing to do. Seconds are those of the
scheduler (/proc/<pid>/task/<tid>/schedstat), to the nanosecond.
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from easerve.bench.cpu import children, scheduled_s, thread_s
from easerve.cli.deploy import Service

ROUTER, PREPARATION, CLIENT = "router", "preparation", "client"
OURS = {"easerve.serve.media": PREPARATION, "easerve.bench.client": CLIENT}


def core(worker_id: str) -> str:
    """The name of an engine's core; that of its API server is the engine's."""
    return f"{worker_id} core"


def used_s(service: Service) -> Mapping[str, float]:
    """So far: of the router, its helpers, each engine's API server and its core's main thread."""
    found: defaultdict[str, float] = defaultdict(float)
    found[ROUTER] = scheduled_s(os.getpid())
    for pid in children(os.getpid()):
        if (name := _name(pid)) is not None:
            found[name] += scheduled_s(pid)
    for worker_id, pid in _engines(service):
        found[worker_id] += scheduled_s(pid)
        found[core(worker_id)] += sum(thread_s(child, child) for child in children(pid))
    return found


def all_s(service: Service) -> Mapping[str, float]:
    """The same, with all threads of the cores."""
    found = dict(used_s(service))
    for worker_id, pid in _engines(service):
        found[core(worker_id)] = sum(map(scheduled_s, children(pid)))
    return found


def since(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What each has used between the two."""
    return {name: max(0.0, after[name] - before.get(name, 0.0)) for name in after}


def _engines(service: Service) -> Iterator[tuple[str, int]]:
    engines = {engine.worker_id for engine in service.driver.engines()}
    return (each for each in service.cluster.pids.items() if each[0] in engines)


def _name(pid: int) -> str | None:
    """Of a child of ours, by its module."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return next((OURS[word] for word in words if word in OURS), None)
    return None
