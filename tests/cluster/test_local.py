import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
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
from easerve.engines.vllm import launch
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
    (cluster.folders.run / "inbox").touch()
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


# Restart --------------------------------------------------------------------------------------


@pytest.fixture(params=[None, dummies.fork_server()], ids=["spawned", "forked"])
def fork(request: pytest.FixtureRequest) -> ForkServerSpec | None:
    found: ForkServerSpec | None = request.param
    return found


async def kill(cluster: Deployed, name: str = "decode-0") -> None:
    """End an engine and wait until that is known."""
    os.kill(cluster.pids[name], signal.SIGKILL)
    await until(lambda: name not in cluster.pids)


DECODE_0 = WorkerId("decode-0")


async def test_an_engine_that_ended_is_started_again_where_it_was(
    deploy: Make, fork: ForkServerSpec | None
) -> None:
    cluster = deploy("child", "", fork=fork)
    await cluster.up()
    before, first = cluster.specs[0], cluster.pids["decode-0"]
    other = cluster.pids["decode-1"]
    await kill(cluster)
    assert before.socket.exists(), "the next one could not bind it"
    await cluster.restart(DECODE_0, dummies.healthy, TIMEOUT_S)
    assert await dummies.healthy(before)
    assert first != cluster.pids["decode-0"]
    assert cluster.pids["decode-1"] == other
    spec = cluster.specs[0]
    assert (spec.socket, spec.log) == (before.socket, before.log)
    assert spec.env[launch.SIDE_CHANNEL_PORT] != before.env.get(launch.SIDE_CHANNEL_PORT)
    told = dummies.pids_in(spec.log)
    assert {first, cluster.pids["decode-0"]} <= set(told), "its log goes on"
    assert cluster.exits == [("decode-0", -9)]
    pids = cluster.every_pid()
    await cluster.stop(grace_s=0.2)
    cluster.assert_gone(pids)


async def test_an_engine_may_end_and_be_started_again_many_times(deploy: Make) -> None:
    cluster = deploy("")
    await cluster.up()
    for _ in range(3):
        await kill(cluster)
        await cluster.restart(DECODE_0, dummies.healthy, TIMEOUT_S)
    assert cluster.exits == [("decode-0", -9)] * 3


async def test_an_engine_that_ends_while_it_is_started_again_is_an_error_and_told(
    deploy: Make,
) -> None:
    cluster = deploy("")
    await cluster.up()
    await kill(cluster)
    cluster.specs[0] = replace(cluster.specs[0], argv=(*cluster.specs[0].argv, "exit"))
    with pytest.raises(EngineStartError) as error:
        await cluster.restart(DECODE_0, dummies.healthy, TIMEOUT_S)
    assert str(error.value).startswith("decode-0 ended with exit code 3 before it was ready\n")
    assert cluster.exits == [("decode-0", -9), ("decode-0", 3)]


async def test_an_engine_that_is_late_is_killed(deploy: Make, fork: ForkServerSpec | None) -> None:
    async def healthy(spec: EngineSpec) -> bool:
        return not cluster.exits

    cluster = deploy("stubborn child", fork=fork)
    await cluster.up(healthy=healthy)
    await kill(cluster)
    with pytest.raises(EngineStartError, match=r"^decode-0 was not ready after 0\.5 s\nlog: "):
        await cluster.restart(DECODE_0, healthy, 0.5)
    await until(lambda: len(cluster.exits) == 2)
    assert cluster.exits[1] == ("decode-0", -9)
    await until(lambda: not any(map(is_alive, dummies.pids_in(cluster.specs[0].log))))


@pytest.mark.long
@pytest.mark.parametrize("when", ["at once", "while it starts", "when it listens"])
async def test_stop_during_a_restart_leaves_nothing(
    deploy: Make, fork: ForkServerSpec | None, when: str
) -> None:
    async def never(_: EngineSpec) -> bool:
        return False

    cluster = deploy("stubborn child session", fork=fork)
    await cluster.up()
    await kill(cluster)
    restarting = asyncio.create_task(cluster.restart(DECODE_0, never, TIMEOUT_S))
    await asyncio.sleep(0)  # the order is given
    if when == "while it starts":
        await until(lambda: "decode-0" in cluster.pids)
    elif when == "when it listens":
        await until(cluster.specs[0].socket.exists)
    restarting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restarting
    await cluster.stop(grace_s=0.2)
    pids = [*cluster.every_pid(), *dummies.pids_in(cluster.specs[0].log)]
    cluster.assert_gone(pids)


async def test_nothing_is_started_again_after_stop(deploy: Make) -> None:
    cluster = deploy("")
    await cluster.up()
    await kill(cluster)
    could = cluster.can_start
    await cluster.stop(grace_s=0)
    assert (could, cluster.can_start) == (True, False)
    with pytest.raises(EngineStartError, match="decode-0 cannot be started again"):
        await cluster.restart(DECODE_0, dummies.healthy, TIMEOUT_S)


async def test_nothing_is_started_again_without_a_parent(
    deploy: Make, fork: ForkServerSpec | None
) -> None:
    cluster = deploy("", fork=fork)
    await cluster.up()
    assert cluster._process is not None
    if fork is None:
        cluster._process.kill()
    else:
        os.kill(cluster.pids["fork server"], signal.SIGKILL)
    await until(lambda: cluster.exits and not cluster.can_start)
    with pytest.raises(EngineStartError, match="its parent has ended"):
        await cluster.restart(DECODE_0, dummies.healthy, TIMEOUT_S)


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
    return [*pids, *(path for path in (report["run"],) if Path(path).exists())]


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
        assert cluster.folders.run.exists()
    await second.stop(grace_s=0)
    assert await dummies.healthy(first.specs[0])
    assert not first.exits


def test_folders_are_private_and_of_one_name(folders: Folders) -> None:
    assert folders.logs.name.endswith(folders.run.name.removeprefix(supervisor.PREFIX))
    for folder in (folders.run, folders.logs):
        assert folder.stat().st_mode & 0o777 == 0o700
    os.close(folders.lock)


def test_a_runtime_folder_that_cannot_be_written_is_not_used(
    tmp_path: Path, run_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nosuch"))
    monkeypatch.setattr("tempfile.tempdir", str(run_root))
    made = make_folders(tmp_path / "logs")
    assert made.run.parent == run_root
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
