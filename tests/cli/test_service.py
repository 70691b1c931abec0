"""A deployment with local prefill as it lives: its engines are processes that only listen."""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from easerve.cli import deploy, divide
from easerve.cli.deploy import Service, service
from easerve.cli.serve import _serve
from easerve.cluster import restarts
from easerve.cluster.local import make_folders
from easerve.config import Deployment
from easerve.engines.partition.cell import IDLE, PAGE_BYTES, Cell, State
from easerve.engines.partition.facts import Facts
from easerve.engines.protocol import Division, Driven
from easerve.engines.vllm import launch
from easerve.types import Stage, WorkerId

from ..processes import is_alive, wait_until

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LOCAL, ALL = "local-prefill-0", ["encode-0", "local-prefill-0", "prefill-0", "decode-0"]
NO_COUNTS: dict[str, Any] = {each.name: 0 for each in fields(State)}
Exits = list[tuple[WorkerId, int, float | None]]
Serve = Callable[..., AbstractAsyncContextManager[Service]]


class Connected:
    """In place of VllmEngine: what it is made of, and whether somebody listens."""

    made: list["Connected"]
    divided: Division | None = None

    def __init__(
        self,
        worker_id: WorkerId,
        stage: Stage,
        socket: Path,
        model: str,
        media_at_prefill: bool,
        num_slots: int,
        max_batch_tokens: int,
        **more: Any,
    ) -> None:
        self.worker_id, self.stage, self.socket, self.num_slots = (
            worker_id,
            stage,
            socket,
            num_slots,
        )
        self.max_batch_tokens, self.beside, self.more = max_batch_tokens, more["beside"], more
        self.closed, self.num_asked = False, 0
        self.made.append(self)

    async def learn_limits(self) -> None:
        pass

    async def health(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.socket)) == 0

    async def division(self) -> Division | None:
        """Of an encoder, once a second."""
        assert self.stage is Stage.ENCODE
        self.num_asked += 1
        return self.divided

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def exits() -> Exits:
    """The ends of engines as they are told."""
    return []


@pytest.fixture
def make(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Deployment]]:
    """A deployment of local prefill; nothing of it is left at the end."""
    monkeypatch.setattr(Connected, "made", [], raising=False)
    monkeypatch.setattr(deploy, "VllmEngine", Connected)
    monkeypatch.setattr(deploy, "make_folders", partial(make_folders, tmp_path / "logs"))
    monkeypatch.setattr(launch, "ENTRY", "tests.cli.dummy_engine")
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "src"))))
    content = {
        "model": str(model),
        "server": {"port": 0},
        "engine": {"fork_server": False},
        "local_prefill": {"max_num_seqs": 7},
        "policy": {"remote_share": 0.5},
    }

    with tempfile.TemporaryDirectory(
        prefix="ea-", dir="/tmp"
    ) as folder:  # a socket's path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield lambda **more: Deployment.model_validate(content | more)
        assert not list(Path(folder).iterdir())


@pytest.fixture
def serve(make: Callable[..., Deployment], exits: Exits) -> Serve:
    def start(**more: Any) -> AbstractAsyncContextManager[Service]:
        return service(make(**more), lambda *_: None, lambda *exit: exits.append(exit))

    return start


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 (what is waited for has no event)
            await asyncio.sleep(0.02)


def joined(running: Service) -> list[str]:
    return sorted(engine.worker_id for engine in running.driver.engines())


async def kill(running: Service, name: str) -> int:
    pid = running.cluster.pids[name]
    os.kill(pid, signal.SIGKILL)
    await until(lambda: name not in joined(running))
    return pid


async def test_engines_are_connected_as_the_deployment_says(serve: Serve) -> None:
    async with serve() as running:
        assert joined(running) == sorted(ALL)
        assert [each.worker_id for each in Connected.made] == ALL
        encoder, local, prefill, _ = Connected.made
        assert (local.stage, local.num_slots, local.beside) == (Stage.PREFILL, 7, ("encode-0",))
        assert (prefill.num_slots, prefill.beside) == (256, ())
        assert local.more["inbox"] == local.socket.with_name("local-prefill-0.ec.sock")
        assert encoder.more["inbox"] is None
        tokens = {each.more["token"] for each in Connected.made}
        assert len(tokens) == 1
        assert len(tokens.pop()) == 64
        assert encoder.num_asked, "how its device is divided"
        assert not any(each.more["divided"] for each in Connected.made)
        assert not list(running.cluster.folders.run.glob("*.cell"))


async def test_two_engines_of_a_device_have_a_page_before_they_start(serve: Serve) -> None:
    async with serve(partition={"driver": "gate"}) as running:
        divided = [each.worker_id for each in Connected.made if each.more["divided"]]
        assert divided == ["encode-0", LOCAL]
        (page,) = running.cluster.folders.run.glob("*.cell")
        assert page.read_bytes() == bytes(PAGE_BYTES)
        assert {spec.cell for spec in running.cluster.specs} == {page, None}


async def test_what_a_local_prefill_that_was_killed_held_is_given_back(serve: Serve) -> None:
    async with serve(partition={"driver": "gate"}) as running:
        cell = Cell(next(running.cluster.folders.run.glob("*.cell")))
        cell.hold(0)
        await kill(running, LOCAL)
        await until(lambda: cell.left() == IDLE)
        cell.close()


async def test_the_server_says_why_devices_are_not_divided_better(
    make: Callable[..., Deployment],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gate = Driven("gate", "one core", 1, ())
    monkeypatch.setattr(Connected, "divided", Division(gate, gate, NO_COUNTS))
    facts = Facts("A CPU", (0,), (), {}, shm=True, uid=0)
    monkeypatch.setattr(divide, "facts_of", lambda _: facts)
    running = asyncio.create_task(_serve(make(partition={}), None))
    said: list[str] = []

    def is_said(text: str) -> bool:
        said.append(capsys.readouterr().err)
        return text in "".join(said)

    divided = "encode-0: device divided by gate (one core)\n"
    await until(lambda: running.done() or is_said(divided))
    assert not running.done(), running
    os.kill(os.getpid(), signal.SIGTERM)
    assert await running == 0
    assert "\npartition: not by cpu: a single core cannot be divided\n" in "".join(said)


async def test_no_two_deployments_have_the_same_secret(serve: Serve) -> None:
    for _ in range(2):
        async with serve():
            pass
    assert len({each.more["token"] for each in Connected.made}) == 2


async def test_a_local_prefill_engine_that_was_killed_comes_back(
    serve: Serve, exits: Exits, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as running:
        for count in (1, 2):
            before = await kill(running, LOCAL)
            await until(lambda: LOCAL in joined(running) and LOCAL in running.cluster.pids)
            assert running.cluster.pids[LOCAL] != before
            assert joined(running) == sorted(ALL)
            assert len(caplog.messages) >= count
        assert exits == [(LOCAL, -9, 0.1), (LOCAL, -9, 0.2)]
        first, second, third = (each for each in Connected.made if each.worker_id == LOCAL)
        assert (first.closed, second.closed, third.closed) == (True, True, False)
        (joined_now,) = (each for each in running.driver.engines() if each.beside)
        assert id(joined_now) == id(third)
    assert any(message.startswith(f"{LOCAL} is back after ") for message in caplog.messages)


@pytest.mark.parametrize("name", ["encode-0", "prefill-0"])
async def test_an_engine_of_another_stage_does_not(serve: Serve, exits: Exits, name: str) -> None:
    async with serve() as running:
        await kill(running, name)
        await asyncio.sleep(0.3)
        assert joined(running) == sorted({*ALL} - {name})
        assert exits == [(name, -9, None)]


@pytest.mark.parametrize("begun", [False, True])
async def test_a_restart_under_way_ends_with_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01 if begun else 60)
    async with serve() as running:
        pids = [*running.cluster.pids.values(), await kill(running, LOCAL)]
        if begun:
            await until(lambda: LOCAL in running.cluster.pids)
            pids.append(running.cluster.pids[LOCAL])
        assert LOCAL not in joined(running)
    wait_until(lambda: not any(map(is_alive, pids)))
    assert not running.cluster.pids
