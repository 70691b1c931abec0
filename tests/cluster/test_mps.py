"""A cluster whose engines are clients of an MPS daemon, which is a process of a few lines here."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from easerve.cluster.local import EngineStartError, Folders, LocalCluster
from easerve.engines.partition import mps
from easerve.engines.partition.sides import DriverError
from easerve.engines.vllm.mps_daemon import MpsDaemon
from easerve.types import WorkerId

from ..processes import is_alive
from . import dummies

LISTENS = """
import os, socket, time
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
    listener.listen()
    print("pid", os.getpid(), flush=True)
    time.sleep(60)
"""
FAILS = "raise SystemExit('cannot find libcuda')"
Make = Callable[..., LocalCluster]


@pytest.fixture
async def make(folders: Folders) -> AsyncIterator[Make]:
    """A cluster of one engine of a divided device and one of none; ``script``: of its daemon."""
    made: list[LocalCluster] = []

    def make(script: str, exits: list[tuple[WorkerId, int]]) -> LocalCluster:
        pipes = folders.run / "mps"
        daemon = MpsDaemon(
            (sys.executable, "-c", script),
            mps.daemon_environment({}, pipes, folders.logs),
            pipes,
            folders.logs,
            static=False,
            by_priority=False,
            encode_sms=None,
            uuids=(),
        )
        first, second = dummies.engine_specs(folders, "", "")
        specs = [replace(first, cell=folders.run / "cell"), second]
        cluster = LocalCluster(folders, specs, None, lambda *exit: exits.append(exit), daemon)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        await cluster.stop(grace_s=0)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.01)


def daemon_of(folders: Folders) -> int:
    (pid,) = dummies.pids_in(folders.logs / "mps.log")
    return pid


def environment_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def test_the_daemon_listens_before_its_clients_start_and_ends_with_them(
    make: Make, folders: Folders
) -> None:
    cluster = make(LISTENS, [])
    await cluster.start(dummies.healthy, 5)
    client, other = cluster.specs
    assert client.env[mps.PIPES] == str(folders.run / "mps")
    assert mps.PIPES not in other.env
    assert f"{mps.PIPES}={folders.run}/mps" in environment_of(cluster.pids[client.worker_id])
    assert (folders.run / "mps").stat().st_mode & 0o777 == 0o700
    daemon = daemon_of(folders)
    assert is_alive(daemon)
    await cluster.stop(grace_s=0)
    assert not is_alive(daemon)


async def test_a_daemon_that_does_not_start_is_an_error_with_its_words(make: Make) -> None:
    exits: list[tuple[WorkerId, int]] = []
    with pytest.raises(EngineStartError, match=r"mps ended[^|]*(.|\n)*cannot find libcuda"):
        await make(FAILS, exits).start(dummies.healthy, 5)
    assert exits == [("mps", 1)]


async def test_a_daemon_that_refuses_is_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DriverError("MPS: lspart: the daemon said 'nothing'")

    monkeypatch.setattr(MpsDaemon, "clients", refuse)
    with pytest.raises(EngineStartError, match="MPS: lspart: the daemon said 'nothing'"):
        await make(LISTENS, []).start(dummies.healthy, 5)


async def test_the_end_of_the_daemon_is_no_engines(make: Make, folders: Folders) -> None:
    exits: list[tuple[WorkerId, int]] = []
    cluster = make(LISTENS, exits)
    await cluster.start(dummies.healthy, 5)
    pids = [cluster.pids[spec.worker_id] for spec in cluster.specs]
    os.kill(daemon_of(folders), signal.SIGKILL)
    await until(lambda: exits)
    assert all(map(is_alive, pids))
    await cluster.stop()
    assert exits == [("mps", -9)]


async def test_no_engine_is_started_again_without_the_daemon(make: Make, folders: Folders) -> None:
    exits: list[tuple[WorkerId, int]] = []
    cluster = make(LISTENS, exits)
    await cluster.start(dummies.healthy, 5)
    before = cluster.can_start
    client = cluster.specs[0].worker_id
    for pid in (daemon_of(folders), cluster.pids[client]):
        os.kill(pid, signal.SIGKILL)
    await until(lambda: len(exits) == 2)
    assert (before, cluster.can_start) == (True, False)
    with pytest.raises(EngineStartError, match=f"{client} cannot be started again"):
        await cluster.restart(client, dummies.healthy, 5)
