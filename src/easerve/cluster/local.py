"""Engines on this host: started in parallel under a supervisor, watched until they are ready."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from easerve.cluster import supervisor
from easerve.config import ConfigError
from easerve.engines.partition.sides import DriverError
from easerve.engines.vllm.launch import EngineSpec
from easerve.engines.vllm.mps_daemon import MpsDaemon
from easerve.types import WorkerId

MPS = WorkerId(supervisor.MPS)
HEALTH_POLL_S = 0.1
STARTED_POLL_S = 0.005
STOP_GRACE_S = 3.0
STOP_PATIENCE_S = STOP_GRACE_S + 7.0
KEPT_LOG_DIRS = 10
LOG_TAIL_LINES = 12
EXCEPTION = re.compile(r"^(?:\(.+?\) ERROR .+?\] )?(\w*(?:Error|Exception): .+)")
LOG_ROOT = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "easerve/logs"


class EngineStartError(Exception):
    """An engine did not become ready; the text names its log and shows the end of it."""


@dataclass(frozen=True, slots=True)
class ForkServerSpec:
    """The process that CPU engines are forked from; ``{fd}`` in argv becomes its socket."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Folders:
    """``run``: sockets and temporary files, ``logs``: kept afterwards."""

    run: Path
    logs: Path
    lock: int

    def remove(self) -> None:
        """Everything but the logs."""
        shutil.rmtree(self.run, ignore_errors=True)


def make_folders(log_root: Path = LOG_ROOT) -> Folders:
    """Private folders of one deployment; what killed ones left behind is swept first.

    Raises ConfigError where they cannot be made.
    """
    try:
        log_root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _make_folders(log_root)
    except OSError as error:
        raise ConfigError(f"cannot make the folders of engines: {error}") from None


def _make_folders(log_root: Path) -> Folders:
    run_root = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(run_root, os.W_OK):
        run_root = Path(tempfile.gettempdir())
    supervisor.sweep(run_root)
    run, lock = supervisor.make_run_dir(run_root)
    stamp = time.strftime("%Y%m%d-%H%M%S-") + run.name.removeprefix(supervisor.PREFIX)
    logs = log_root / stamp
    logs.mkdir(mode=0o700)
    running = {folder.name.removeprefix(supervisor.PREFIX) for folder in run_root.iterdir()}
    for old in sorted(log_root.iterdir())[:-KEPT_LOG_DIRS]:
        if old.name.rpartition("-")[2] not in running:
            shutil.rmtree(old, ignore_errors=True)
    return Folders(run, logs, lock)


class LocalCluster:
    """Starts and ends the engines of one deployment.

    ``on_exit(worker_id, code)`` is called when an engine ends that was not asked to.
    """

    def __init__(
        self,
        folders: Folders,
        specs: Sequence[EngineSpec],
        fork_server: ForkServerSpec | None,
        on_exit: Callable[[WorkerId, int], None] = lambda worker_id, code: None,
        mps: MpsDaemon | None = None,
    ) -> None:
        self.folders, self.specs = folders, list(specs)
        self._fork_server, self._on_exit, self._mps = fork_server, on_exit, mps
        self.pids: dict[str, int] = {}
        self._exited: dict[str, int] = {}
        self._ready: set[str] = set()
        self._forking = asyncio.Event()
        self._stopping, self._supervised, self._serving_mps = False, False, False
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._news: asyncio.Task[None] | None = None

    async def start(
        self,
        healthy: Callable[[EngineSpec], Awaitable[bool]],
        timeout_s: float,
        progress: Callable[[str, str], None] = lambda name, state: None,
    ) -> None:
        """Start every engine and return when all are healthy.

        ``healthy(spec)`` is awaited for a bool. ``progress(name, state)`` hears of every change.
        """
        await self._start_supervisor()
        try:
            async with asyncio.timeout(timeout_s):
                await self._start_engines(healthy, progress)
        except TimeoutError:
            late = {
                spec.worker_id: spec.log for spec in self.specs if spec.worker_id not in self._ready
            }
            if self._fork_server is not None and not self._forking.is_set():
                late = {WorkerId(supervisor.FORK_SERVER): self._fork_server_log}
            if self._mps is not None and not self._serving_mps:
                late = {MPS: self._mps_log}
            raise EngineStartError(
                "\n".join(_late(name, timeout_s, log) for name, log in late.items())
            ) from None

    async def _start_engines(
        self, healthy: Callable[[EngineSpec], Awaitable[bool]], progress: Callable[[str, str], None]
    ) -> None:
        for spec in self.specs:
            progress(spec.worker_id, "waiting for vLLM" if self._fork_server else "starting")
        if self._mps is not None:
            await self._start_mps(self._mps)
        if self._fork_server is not None:
            await self._start_fork_server(progress)
        for spec in self.specs:
            progress(spec.worker_id, "loading the model")
            self._order_start(spec)
        waits = [self._until_healthy(spec, healthy, progress) for spec in self.specs]
        await _all_or_first_error(waits)
        for spec in self.specs:  # one may have ended while another still loaded
            self._check(spec.worker_id, spec.log)

    @property
    def can_start(self) -> bool:
        """Whether an engine could be started now."""
        forks = self._fork_server is not None
        forker_ended = forks and supervisor.FORK_SERVER in self._exited
        mps_ended = MPS in self._exited  # whoever starts without it takes turns with the others
        return self._supervised and not (self._stopping or forker_ended or mps_ended)

    async def restart(
        self,
        worker_id: WorkerId,
        healthy: Callable[[EngineSpec], Awaitable[bool]],
        timeout_s: float,
    ) -> None:
        """Start an engine whose process has ended again; returns when it is healthy.

        Raises EngineStartError. An engine that is late is killed, which ``on_exit`` then hears of.
        """
        if not self.can_start:
            raise EngineStartError(f"{worker_id} cannot be started again: its parent has ended")
        assert worker_id not in self.pids, "there are never two of an engine"
        index = next(i for i, spec in enumerate(self.specs) if spec.worker_id == worker_id)
        spec = self.specs[index] = self.specs[index].again()
        for address in filter(None, (spec.socket, spec.inbox)):
            address.unlink(missing_ok=True)
        self._exited.pop(worker_id)
        self._order_start(spec)
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_healthy(spec, healthy, lambda *_: None)
                # Its word that it answers may be quicker than its parent's that it has begun.
                while worker_id not in self.pids and worker_id not in self._exited:  # noqa: ASYNC110
                    await asyncio.sleep(STARTED_POLL_S)
        except TimeoutError:
            self._order(op="kill", name=worker_id)
            raise EngineStartError(_late(spec.worker_id, timeout_s, spec.log)) from None

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the engines; returns when nothing of them is left."""
        self._stopping = True
        if self._process is not None and self._writer is not None and self._news is not None:
            self._order(op="stop", grace_s=grace_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_PATIENCE_S):
                    await self._news
            self._writer.close()
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        # The supervisor has removed them unless it was killed, or never started.
        self.folders.remove()

    @property
    def _mps_log(self) -> Path:
        return self.folders.logs / f"{MPS}.log"

    @property
    def _fork_server_log(self) -> Path:
        return self.folders.logs / "fork-server.log"

    # Supervisor -------------------------------------------------------------------------------

    async def _start_supervisor(self) -> None:
        self._supervised = True
        reader, self._writer = await asyncio.open_connection(sock=self._spawn_supervisor())
        self._news = asyncio.create_task(self._hear(reader))

    def _spawn_supervisor(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs, (self.folders.logs / "supervisor.log").open("wb") as log:
            fd = theirs.fileno()
            module = "easerve.cluster.supervisor"
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(fd), str(self.folders.run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(fd, self.folders.lock),
                start_new_session=True,  # Ctrl-C is for the server, which then gives the order
            )
        os.close(self.folders.lock)
        return ours

    async def _start_fork_server(self, progress: Callable[[str, str], None]) -> None:
        assert self._fork_server is not None
        log = self._fork_server_log
        progress(supervisor.FORK_SERVER, "importing vLLM")
        self._order(
            op="fork server",
            argv=list(self._fork_server.argv),
            env=dict(self._fork_server.env),
            log=str(log),
        )
        while not self._forking.is_set():
            self._check(supervisor.FORK_SERVER, log)
            await asyncio.sleep(HEALTH_POLL_S)
        progress(supervisor.FORK_SERVER, "ready")

    async def _start_mps(self, daemon: MpsDaemon) -> None:
        """Ends with everything else: who is killed leaves no server, as orphans are ended too."""
        log = self._mps_log
        if daemon.argv:
            daemon.pipes.mkdir(mode=0o700)
            env, argv = dict(daemon.env), list(daemon.argv)
            self._order(op="start", name=MPS, argv=argv, env=env, log=str(log), fork=False)
        while not await asyncio.to_thread(daemon.is_ready):
            self._check(MPS, log)
            await asyncio.sleep(HEALTH_POLL_S)
        try:
            self.specs = await asyncio.to_thread(daemon.clients, self.specs)
        except DriverError as error:
            raise EngineStartError(f"{error}\n{tail(log)}") from None
        self._serving_mps = True

    async def _until_healthy(
        self,
        spec: EngineSpec,
        healthy: Callable[[EngineSpec], Awaitable[bool]],
        progress: Callable[[str, str], None],
    ) -> None:
        while not (spec.socket.exists() and await healthy(spec)):
            self._check(spec.worker_id, spec.log)
            await asyncio.sleep(HEALTH_POLL_S)
        self._ready.add(spec.worker_id)
        progress(spec.worker_id, "ready")

    def _check(self, name: str, log: Path) -> None:
        """Raise when an engine has ended that should become ready."""
        if self._news is None or self._news.done():
            log = self.folders.logs / "supervisor.log"
            raise EngineStartError(f"the supervisor of the engines ended\n{tail(log)}")
        if (code := self._exited.get(name)) is not None:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise EngineStartError(f"{name} ended with {how} before it was ready\n{tail(log)}")

    def _order_start(self, spec: EngineSpec) -> None:
        self._order(
            op="start",
            name=spec.worker_id,
            argv=list(spec.argv) if self._fork_server else spec.command(),
            env=dict(spec.env),
            log=str(spec.log),
            fork=self._fork_server is not None,
        )

    def _order(self, **order: Any) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(order).encode() + b"\n")

    async def _hear(self, reader: asyncio.StreamReader) -> None:
        """Take in the supervisor's news until it ends."""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                news = json.loads(line)
                if "started" in news:
                    self.pids[news["started"]] = news["pid"]
                elif "forking" in news:
                    self._forking.set()
                elif "exited" in news:
                    self._exit(news["exited"], news["code"])
        self._supervised = False
        for name in list(self.pids):
            self._exit(name, -9)

    def _exit(self, name: str, code: int) -> None:
        self.pids.pop(name, None)
        self._exited[name] = code
        if not self._stopping and name != supervisor.FORK_SERVER:
            self._on_exit(WorkerId(name), code)


async def _all_or_first_error(waits: Sequence[Awaitable[None]]) -> None:
    """Await all; the first exception cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _late(name: str, timeout_s: float, log: Path) -> str:
    return f"{name} was not ready after {timeout_s:g} s\n{tail(log)}"


def tail(log: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """What a log says of an end: its name, the first exception in it, its last lines."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"log: {log} ({error.strerror})"
    causes = (match.group(1) for match in map(EXCEPTION.search, lines) if match)
    shown = [f"log: {log}", *(f"  | {line}" for line in lines[-num_lines:])]
    return "\n".join([*(f"cause: {cause}" for cause in islice(causes, 1)), *shown])
