"""The live objective of a search: real engines of a deployment file, under load.

A score is one window of load at one rate, by the client of ``easerve bench`` in a process of its
own. Arrivals depend on the seed alone, so every configuration meets the same; what is asked is new
each time, from the same distribution, as caches would answer for the engines.

Knobs of the policies are changed while the server runs (PATCH /admin/knobs). Anything else starts
it anew. Where an allocation can prefill beside its encoders, those engines stay while it is tried,
also for a remote share of 1: local prefill then gets nothing, and the device is not divided
(``policy.how: none``). So such engines hold their memory while that share is measured, which the
deployment that is written for it would not have.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from easerve import __version__
from easerve.bench.client import LoadError
from easerve.bench.job import OnProgress, Planned, Progress, Target
from easerve.bench.run import Run, measure
from easerve.cli import profile_here
from easerve.cli.search.live_load import PROMISE, Window, content_seed, scored
from easerve.cli.search.live_process import ServerLost, ServerProcess, Tell
from easerve.config import ConfigError, Deployment, build, merge, read_file, read_yaml
from easerve.engines.partition.facts import gather
from easerve.goodput import Slo
from easerve.policy.knobs import NO_RULE
from easerve.search import overlay
from easerve.search.objective import Score, Unworkable
from easerve.search.space import SHARE, Configuration, Space

DRAIN_S, DRAIN_POLL_S = 30.0, 0.05
ATTEMPTS = 3
"""Windows, until one is found in which the client kept up."""
Content = dict[str, Any]


class Running(Protocol):
    """A server, as ``live_process.ServerProcess``; its methods raise ServerLost."""

    @property
    def address(self) -> str: ...

    def turn(self, knobs: Mapping[str, Any]) -> None: ...
    def num_open(self) -> int: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


Serve = Callable[[Content, str, float, Tell], Running]
"""Of a deployment file: content, name, seconds that engines have; returns when they are ready."""


class Measure(Protocol):
    """As ``bench.run.measure``."""

    def __call__(
        self,
        target: Target,
        requests: Sequence[Planned],
        *,
        warmup: Sequence[Planned],
        slos: Mapping[str, Slo],
        on_progress: OnProgress,
    ) -> Coroutine[Any, Any, Run]: ...


class LiveObjective:
    """Scores of configurations of ``space`` on the engines of the deployment file ``path``.

    Use it in ``with``: leaving ends server and engines. ``practises``: new engines have a window
    that does not count. ``allow_late``: also where the client could not keep up, which is tried
    ``ATTEMPTS`` times. ``tell`` hears what is being done, in words.
    Raises ConfigError for a file that cannot be.
    """

    def __init__(
        self,
        path: Path,
        space: Space,
        window: Window,
        slo: Slo,
        *,
        seeds: tuple[int, ...] = (0, 1, 2),
        required: float = 0.9,
        allow_late: bool = False,
        practises: bool = True,
        tell: Tell = lambda _: None,
        serve: Serve = ServerProcess.start,
        measure: Measure = measure,
    ) -> None:
        self._path, self._space, self._window, self._slo = path, space, window, slo
        self.seeds, self.required, self._allow_late = seeds, required, allow_late
        self._tell, self._serve, self._measure = tell, serve, measure
        self._content = read_file(path)
        self.key = key_of(path, window, slo, allow_late)
        self._server: Running | None = None
        self._engines: Content = {}
        self._policy: Content = {}
        self._num_warmup = self._num_windows = 0
        self._is_new, self._practises = False, practises

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Returns when server and engines are gone. The next score starts them anew."""
        if self._server is not None:
            self._tell("ending the engines")
            server, self._server = self._server, None
            server.close()

    def score(self, configuration: Configuration, seed: int) -> Score:
        """One window. Requests that fail have not met the promise.

        Raises Unworkable for a configuration that is no deployment, whose engines do not start or
        end, or with which the client cannot keep up.
        """
        try:
            content = laid(self._content, self._space, configuration)
            deployment = build(content, str(self._path))
        except ConfigError as error:
            raise Unworkable(str(error)) from None
        try:
            server = self._served(content, deployment, configuration.allocation)
            return self._scored(server, deployment, seed)
        except (ServerLost, LoadError) as error:
            self.close()
            raise Unworkable(str(error)) from None

    # The server ----------------------------------------------------------------------------------

    def _served(self, content: Content, deployment: Deployment, allocation: str) -> Running:
        """The server, with this configuration in force and nothing to do."""
        policy = deployment.policy.model_dump(mode="json")
        server, stay = self._server, self._engines == engines_of(content)
        if server is not None and stay and self._is_idle(server):
            self._turn(server, policy)
            return server
        self.close()
        self._tell(f"starting the engines of {allocation}")
        timeout_s = deployment.engine.startup_timeout_s
        self._server = self._serve(private(content), str(self._path), timeout_s, self._tell)
        self._engines, self._policy = engines_of(content), policy
        self._num_warmup, self._is_new = self._window.num_warmup, True
        return self._server

    def _turn(self, server: Running, policy: Content) -> None:
        before = self._policy
        changed = {name: each for name, each in policy.items() if each != before[name]}
        if not changed:
            return
        told = (f"{name} {before[name]} -> {each}" for name, each in changed.items())
        self._tell(f"knobs: {', '.join(told)}")
        server.turn(changed)
        self._policy = policy
        self._num_warmup = max(self._num_warmup, self._window.num_warmup)

    def _is_idle(self, server: Running) -> bool:
        """Waits for it, as long as that is to be expected. Whether the server is of any use."""
        deadline_s = time.monotonic() + DRAIN_S
        try:
            server.check()
            while num_open := server.num_open():
                if time.monotonic() > deadline_s:
                    self._tell(f"the server does not finish {num_open} open requests")
                    return False
                self._tell(f"waiting for open requests: {num_open}")
                time.sleep(DRAIN_POLL_S)
        except ServerLost as error:  # which is not the fault of what comes next
            self._tell(str(error))
            return False
        return True

    # The load ------------------------------------------------------------------------------------

    def _scored(self, server: Running, deployment: Deployment, seed: int) -> Score:
        if self._is_new and self._practises:
            # Whatever comes for the first time, a batch of some size say, is slow.
            self._tell("a window that does not count")
            self._run(server, deployment, seed)
            self._num_warmup = 0
        self._is_new = False
        late: list[str] = []
        for _ in range(ATTEMPTS):
            run = self._run(server, deployment, seed)
            server.check()
            self._num_warmup = 0
            late = run.client_too_slow()
            if self._allow_late or not late:
                return scored(run, self._slo, self._window.rate_per_s)
            self._tell(f"once more: {'; '.join(late)}")
        raise Unworkable(f"the client did not keep up, {ATTEMPTS} times: {'; '.join(late)}")

    def _run(self, server: Running, deployment: Deployment, seed: int) -> Run:
        num_warmup = self._num_warmup
        self._num_windows += 1
        made = self._window.made(
            deployment.name, seed, content_seed(seed, self._num_windows), num_warmup
        )
        num = len(made.planned)

        def on_progress(progress: Progress) -> None:
            if progress.num_sent == 0:
                self._tell(f"warm-up: {progress.num_warm} of {num_warmup} requests answered")
            else:
                self._tell(f"measuring: {progress.num_done} of {num} requests answered")

        target = Target(server.address, deployment.name, timeout_s=self._window.timeout_s)
        return asyncio.run(
            self._measure(
                target,
                made.planned,
                warmup=made.warmup,
                slos={PROMISE: self._slo},
                on_progress=on_progress,
            )
        )


# Deployments --------------------------------------------------------------------------------------


def laid(content: Content, space: Space, configuration: Configuration) -> Content:
    """A configuration on the content of a deployment file, as it is measured.

    Engines beside encoders stay for a remote share of 1, so that it differs in knobs alone.
    """
    (allocation,) = (a for a in space.allocations if a.name == configuration.allocation)
    changes = space.changes(configuration)
    if allocation.offload is not None:
        changes = {**allocation.changes, **dict(configuration.values), **allocation.offload}
    made = overlay.laid(content, changes)
    if made.get("partition") is not None and configuration.get(SHARE) == 1:
        made = merge(made, {"policy": {"how": NO_RULE}})
    return made


def engines_of(content: Content) -> Content:
    """What cannot be changed while serving."""
    return {name: each for name, each in content.items() if name not in ("policy", "server")}


def private(content: Content) -> Content:
    """On a free port of loopback, with an administrator whom nobody else knows."""
    local = {"host": "127.0.0.1", "port": 0, "api_key": None}
    return merge(content, {"server": {**local, "admin_token": secrets.token_hex(32)}})


# What is measured ---------------------------------------------------------------------------------


def key_of(path: Path, window: Window, slo: Slo, allow_late: bool = False) -> str:
    """Of all that a score depends on besides configuration and seed, as far as that can be named:
    device, model, versions, the file (but for its server), load and promise. Raises ConfigError.

    The day is not among it: scores of two days on a machine that others use may not compare.
    """
    deployment = build(read_file(path), str(path))
    content = read_yaml(path)  # with paths as they are in it, wherever this process runs
    told: dict[str, Any] = {
        "easerve": __version__,
        "here": profile_here.here(deployment, gather(deployment.device)).model_dump(mode="json"),
        "deployment": {name: each for name, each in content.items() if name != "server"},
        "window": window.described(),
        "slo": asdict(slo),
    }
    if allow_late:  # its scores are no answers where a client has to keep up
        told["allow_late"] = True
    text = json.dumps(told, sort_keys=True, default=str)
    return f"live:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
