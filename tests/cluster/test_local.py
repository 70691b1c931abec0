import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.cluster import supervisor
from easerve.cluster.local import (
    KEPT_LOG_DIRS,
    LOG_TAIL_LINES,
    EngineStartError,
    Folders,
    ForkServerSpec,
    LocalCluster,
    make_folders,
    tail,
)
from easerve.engines.vllm.launch import EngineSpec
from easerve.types import WorkerId

from ..processes import is_alive, wait_until
from . import dummies

TIMEOUT_S = 5.0
Make = Callable[..., "Deployed"]


class Deployed(LocalCluster):
    """A cluster of dummies that notes what it tells."""

    def __init__(self, folders: Folders, *engines: str, fork: ForkServerSpec | None = None) -> None:
        self.exits: list[tuple[WorkerId, int]] = []
        self.states: list[tuple[str, str]] = []
        specs = dummies.engine_specs(folders, *engines)
        super().__init__(folders, specs, fork, lambda name, code: self.exits.append((name, code)))

    async def up(self, timeout_s: float = TIMEOUT_S, healthy: Any = dummies.healthy) -> None:
        await self.start(healthy, timeout_s, lambda name, state: self.states.append((name, state)))

    def states_of(self, name: str) -> list[str]:
        return [state for who, state in self.states if who == name]

    def every_pid(self) -> list[int]:
        """The supervisor and all that the engines have told of."""
        assert self._process is not None
        found = [self._process.pid, *self.pids.values()]
        return found + [pid for spec in self.specs for pid in dummies.pids_in(spec.log)]

    def assert_gone(self, pids: list[int]) -> None:
        assert not [pid for pid in pids if is_alive(pid)]
        assert not self.folders.run.exists()
        assert not self.folders.shm.exists()


@pytest.fixture
async def deploy(folders: Folders) -> AsyncIterator[Make]:
    """Makes clusters (one, unless given folders) and ends those that are left."""
    made: list[Deployed] = []

    def make(*engines: str, folders: Folders = folders, **more: Any) -> Deployed:
        made.append(Deployed(folders, *engines, **more))
        return made[-1]

    yield make
    for cluster in made:
        await cluster.stop(grace_s=0)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.02)


# Start ----------------------------------------------------------------------------------------


async def test_start_returns_when_every_engine_is_healthy(deploy: Make) -> None:
    cluster = deploy("", "env")
    await cluster.up()
    assert sorted(cluster.pids) == ["decode-0", "decode-1"]
    for spec in cluster.specs:
        assert await dummies.healthy(spec)
        assert cluster.states_of(spec.worker_id) == ["starting", "loading the model", "ready"]
        assert dummies.pids_in(spec.log) == [cluster.pids[spec.worker_id]]
    assert "env set" in cluster.specs[1].log.read_text()
    assert not cluster.exits


async def test_an_engine_is_asked_until_it_is_healthy(deploy: Make) -> None:
    asked: list[str] = []

    async def healthy(spec: EngineSpec) -> bool:
        assert spec.socket.exists()
        asked.append(spec.worker_id)
        return len(asked) > 2

    cluster = deploy("")
    await cluster.up(healthy=healthy)
    assert asked == ["decode-0"] * 3


async def test_an_engine_that_ends_after_it_was_ready_and_before_the_others_is_an_error(
    deploy: Make,
) -> None:
    async def healthy(spec: EngineSpec) -> bool:
        if spec.worker_id == "decode-0":
            return True
        if "decode-0" in cluster.pids:
            os.kill(cluster.pids["decode-0"], signal.SIGKILL)
        return bool(cluster.exits)

    cluster = deploy("", "")
    with pytest.raises(EngineStartError, match="decode-0 ended with signal 9"):
        await cluster.up(healthy=healthy)


async def test_an_engine_that_ends_at_once_is_an_error_with_the_end_of_its_log(
    deploy: Make,
) -> None:
    cluster = deploy("", "exit")
    with pytest.raises(EngineStartError) as error:
        await cluster.up()
    text = str(error.value)
    assert text.startswith("decode-1 ended with exit code 3 before it was ready\n")
    assert f"log: {cluster.specs[1].log}" in text
    assert "  | ValueError: no such weights" in text
    assert cluster.exits == [("decode-1", 3)]


async def test_an_engine_that_is_killed_while_it_starts_is_an_error(deploy: Make) -> None:
    cluster = deploy("silent")
    starting = asyncio.create_task(cluster.up())
    await until(lambda: cluster.pids)
    os.kill(cluster.pids["decode-0"], signal.SIGKILL)
    with pytest.raises(EngineStartError, match="decode-0 ended with signal 9 before it was ready"):
        await starting


async def test_engines_that_are_never_ready_are_an_error_that_names_them(deploy: Make) -> None:
    cluster = deploy("silent", "")
    with pytest.raises(EngineStartError) as error:
        await cluster.up(timeout_s=0.6)
    text = str(error.value)
    assert text.startswith("decode-0 was not ready after 0.6 s\n")
    assert f"log: {cluster.specs[0].log}" in text
    assert "  | thinking" in text
    assert "decode-1" not in text


async def test_without_its_supervisor_a_start_fails_at_once(
    deploy: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(EngineStartError, match=r"^the supervisor .* ended\nlog: .*supervisor\.log"):
        await deploy("").up()


# Life and end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_engine_that_ends_later_is_told_once(deploy: Make, number: signal.Signals) -> None:
    cluster = deploy("", "")
    await cluster.up()
    os.kill(cluster.pids["decode-1"], number)
    await until(lambda: cluster.exits)
    assert cluster.exits == [("decode-1", -number)]
    assert list(cluster.pids) == ["decode-0"]
    await cluster.stop(grace_s=0)
    assert cluster.exits == [("decode-1", -number)], "an engine that is stopped has not failed"


async def test_the_end_of_the_supervisor_is_the_end_of_every_engine(deploy: Make) -> None:
    cluster = deploy("", "python-child")
    await cluster.up()
    pids = cluster.every_pid()
    assert cluster._process is not None
    cluster._process.kill()
    await until(lambda: len(cluster.exits) == 2)
    assert sorted(cluster.exits) == [("decode-0", -9), ("decode-1", -9)]
    await until(lambda: not [pid for pid in pids if is_alive(pid)])
    await cluster.stop()
    cluster.assert_gone(pids)


async def test_stop_leaves_no_process_and_no_file_but_the_logs(deploy: Make) -> None:
    cluster = deploy("child", "stubborn child session")
    await cluster.up()
    pids = cluster.every_pid()
    assert len(set(pids)) == 5
    (cluster.folders.shm / "embedding").touch()
    await cluster.stop(grace_s=0.2)
    cluster.assert_gone(pids)
    assert cluster.specs[0].log.exists()


@pytest.mark.parametrize("engine", ["exit", "silent"])
async def test_stop_after_a_failed_start_leaves_nothing(deploy: Make, engine: str) -> None:
    cluster = deploy(engine, "child session")
    with pytest.raises(EngineStartError):
        await cluster.up(timeout_s=0.6)
    pids = cluster.every_pid()
    await cluster.stop(grace_s=0.2)
    cluster.assert_gone(pids)


async def test_stop_after_a_cancelled_start_leaves_nothing(deploy: Make) -> None:
    cluster = deploy("silent")
    starting = asyncio.create_task(cluster.up())
    await until(lambda: dummies.pids_in(cluster.specs[0].log))
    pids = cluster.every_pid()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await cluster.stop(grace_s=0.2)
    cluster.assert_gone(pids)


async def test_stop_without_a_start_removes_the_folders(deploy: Make) -> None:
    cluster = deploy("")
    await cluster.stop()
    assert not cluster.folders.run.exists()
    assert not cluster.folders.shm.exists()


# Fork server ----------------------------------------------------------------------------------


async def test_forked_engines_start_when_the_fork_server_is_ready(deploy: Make) -> None:
    cluster = deploy("", "child", fork=dummies.fork_server())
    await cluster.up()
    assert cluster.states_of("fork server") == ["importing vLLM", "ready"]
    for spec in cluster.specs:
        states = ["waiting for vLLM", "loading the model", "ready"]
        assert cluster.states_of(spec.worker_id) == states
    os.kill(cluster.pids["decode-0"], signal.SIGKILL)
    await until(lambda: cluster.exits)
    assert cluster.exits == [("decode-0", -9)]
    pids = cluster.every_pid()
    await cluster.stop(grace_s=0.2)
    cluster.assert_gone(pids)


async def test_a_fork_server_that_ends_is_an_error_with_the_end_of_its_log(deploy: Make) -> None:
    with pytest.raises(EngineStartError) as error:
        await deploy("", fork=dummies.fork_server("exit")).up()
    text = str(error.value)
    assert text.startswith("fork server ended with exit code 4 before it was ready\n")
    assert "fork-server.log" in text
    assert "  | ImportError: no vllm here" in text


async def test_a_fork_server_that_is_never_ready_is_named(deploy: Make) -> None:
    with pytest.raises(EngineStartError) as error:
        await deploy("", fork=dummies.fork_server("silent")).up(timeout_s=0.6)
    text = str(error.value)
    assert text.startswith("fork server was not ready after 0.6 s\n")
    assert "fork-server.log" in text
    assert "  | importing" in text


async def test_the_end_of_the_fork_server_is_the_end_of_its_engines(deploy: Make) -> None:
    cluster = deploy("", "", fork=dummies.fork_server())
    await cluster.up()
    os.kill(cluster.pids["fork server"], signal.SIGKILL)
    await until(lambda: len(cluster.exits) == 2)
    assert sorted(cluster.exits) == [("decode-0", -9), ("decode-1", -9)]


# Killed from outside --------------------------------------------------------------------------


@contextlib.contextmanager
def server(log_root: Path, *engines: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A server with dummy engines, and its report; it is killed in the end."""
    command = [sys.executable, "-m", "tests.cluster.server", str(log_root), *engines]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=dummies.ROOT) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


def left_of(report: Any) -> list[object]:
    """What is there yet of a server's processes and folders."""
    pids = [pid for pid in (report["supervisor"], *report["pids"]) if is_alive(pid)]
    return [*pids, *(path for path in (report["run"], report["shm"]) if Path(path).exists())]


@pytest.mark.parametrize(
    "engines",
    [("", "stubborn child child session python-child"), ("fork", "", "stubborn child session")],
    ids=["spawned", "forked"],
)
@pytest.mark.usefixtures("run_root")
def test_a_killed_server_leaves_nothing(tmp_path: Path, engines: tuple[str, ...]) -> None:
    with server(tmp_path / "logs", *engines) as (process, report):
        assert len(left_of(report)) >= 5
        process.kill()
        wait_until(lambda: not left_of(report))


def test_what_a_killed_supervisor_leaves_is_swept_by_the_next_start(
    tmp_path: Path, run_root: Path
) -> None:
    with server(tmp_path / "logs", "", "stubborn python-child") as (process, report):
        os.kill(report["supervisor"], signal.SIGKILL)
        process.kill()
        wait_until(lambda: not [pid for pid in report["pids"] if is_alive(pid)])
        assert Path(report["run"]).exists()
        supervisor.sweep(run_root)
        assert not left_of(report)


# Folders --------------------------------------------------------------------------------------


async def test_two_deployments_do_not_sweep_each_other(
    deploy: Make, folders: Folders, run_root: Path, tmp_path: Path
) -> None:
    first = deploy("")
    await first.up()
    second = deploy("", folders=make_folders(tmp_path / "logs"))
    await second.up()
    supervisor.sweep(run_root)
    for cluster in (first, second):
        assert await dummies.healthy(cluster.specs[0])
        assert cluster.folders.shm.exists()
    await second.stop(grace_s=0)
    assert await dummies.healthy(first.specs[0])
    assert not first.exits


def test_folders_are_private_and_of_one_name(folders: Folders) -> None:
    assert folders.shm == supervisor.SHM_ROOT / folders.run.name
    assert folders.logs.name.endswith(folders.run.name.removeprefix(supervisor.PREFIX))
    for folder in (folders.run, folders.shm, folders.logs):
        assert folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(folders.shm)
    os.close(folders.lock)


def test_a_runtime_folder_that_cannot_be_written_is_not_used(
    tmp_path: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nosuch"))
    monkeypatch.setattr("tempfile.tempdir", str(run_root))
    made = make_folders(tmp_path / "logs")
    assert made.run.parent == run_root
    made.shm.rmdir()
    os.close(made.lock)


@pytest.mark.usefixtures("run_root")
def test_the_logs_of_the_last_deployments_are_kept(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for number in range(KEPT_LOG_DIRS + 3):
        (logs / f"2020{number:04}-000000-x").mkdir(parents=True)
    made = make_folders(logs)
    kept = sorted(logs.iterdir())
    assert len(kept) == KEPT_LOG_DIRS
    assert kept[-1] == made.logs
    assert kept[0].name == "20200004-000000-x"
    made.shm.rmdir()
    os.close(made.lock)


# Log tails ------------------------------------------------------------------------------------


def test_a_tail_is_the_end_of_a_log_under_its_name(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(100)))
    *_, first, _ = lines = tail(log).splitlines()[-LOG_TAIL_LINES - 1 :]
    assert lines[0] == f"log: {log}"
    assert lines[-1] == "  | line 99 �"
    assert first == "  | line 98 �"
    assert len(lines) == LOG_TAIL_LINES + 1


def test_the_first_exception_of_a_log_is_shown_as_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    warning = "(core pid=12) WARNING 11-29 [util.py:1] this may cause OSError: too many files"
    early = "(core pid=12) ERROR 11-29 [core.py:1] ValueError: no such weights"
    late = "RuntimeError: the core did not start"
    log.write_text("\n".join([warning, early, *map(str, range(30)), late]))
    text = tail(log)
    assert text.startswith("cause: ValueError: no such weights\nlog: ")
    assert text.endswith(f"  | {late}")


def test_a_log_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    assert tail(tmp_path / "x.log") == f"log: {tmp_path / 'x.log'} (No such file or directory)"
