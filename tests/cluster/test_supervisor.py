import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.cluster.supervisor import FORK_SERVER, LOCK, MPS, make_run_dir, sweep
from easerve.peer import Peer

from ..processes import is_alive, wait_until
from . import dummies

PATIENCE_S = 5.0


class Orders:
    """A supervisor, and the end of its socket that gives orders and hears news."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "easerve.cluster.supervisor", str(theirs.fileno())]
            self.process = subprocess.Popen(
                [*command, str(self.run_dir)],
                pass_fds=(theirs.fileno(),),
                stderr=subprocess.PIPE,
            )
        ours.settimeout(PATIENCE_S)
        self.peer = Peer(ours)
        self._news: list[dict[str, Any]] = []

    def give(self, **order: Any) -> None:
        self.peer.send(order)

    def hear(self) -> dict[str, Any]:
        """The next news."""
        while not self._news:
            received = self.peer.receive()
            assert received is not None, "the supervisor is gone"
            self._news += received
        return self._news.pop(0)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def run(self, name: str, *argv: str, fork: bool = False) -> int:
        """Order a program; its pid."""
        log = str(self.log(name))
        self.give(op="start", name=name, argv=argv, env=dummies.ENV, log=log, fork=fork)
        started = self.hear()
        assert started["started"] == name
        return int(started["pid"])

    def start(self, name: str, words: str = "", fork: bool = False) -> int:
        """Order an engine and wait until it listens; its pid."""
        address = str(self.run_dir / f"{name}.sock")
        python = [] if fork else [sys.executable, "-m", dummies.ENTRY]
        pid = self.run(name, *python, address, *words.split(), fork=fork)
        if not {"exit", "silent"} & set(words.split()):
            wait_until(lambda: Path(address).exists())
        return pid

    def start_fork_server(self, *words: str) -> int:
        spec = dummies.fork_server(*words)
        log = str(self.log("fork-server"))
        self.give(op="fork server", argv=list(spec.argv), env=dict(spec.env), log=log)
        started = self.hear()
        assert started["started"] == FORK_SERVER
        return int(started["pid"])

    def assert_ended(self, *pids: int) -> None:
        """It has ended, nothing of the given processes and of the folder is left."""
        assert self.process.wait(PATIENCE_S) == 0
        assert not [pid for pid in pids if is_alive(pid)]
        assert not self.run_dir.exists()


@pytest.fixture
def orders() -> Iterator[Orders]:
    with tempfile.TemporaryDirectory(prefix="ea-", dir="/tmp") as folder:
        made = Orders(Path(folder))
        yield made
        made.peer.connection.close()
        made.process.communicate(timeout=PATIENCE_S)


# One engine -----------------------------------------------------------------------------------


def test_an_engine_is_started_with_its_arguments_environment_and_log(orders: Orders) -> None:
    pid = orders.start("decode-0", "env")
    log = orders.log("decode-0").read_text()
    assert log == f"pid {pid}\nenv set\n"
    assert os.getpgid(pid) == os.getsid(pid) == pid


@pytest.mark.parametrize(
    ("words", "number", "code"), [("exit", None, 3), ("", signal.SIGKILL, -9), ("", 15, -15)]
)
def test_an_engine_that_ends_is_told_with_its_code(
    orders: Orders, words: str, number: int | None, code: int
) -> None:
    pid = orders.start("decode-0", words)
    if number is not None:
        os.kill(pid, number)
    assert orders.hear() == {"exited": "decode-0", "code": code}


def test_what_an_engine_leaves_behind_ends_with_it(orders: Orders) -> None:
    pid = orders.start("decode-0", "child child")
    _, *children = dummies.pids_in(orders.log("decode-0"))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(child) for child in children))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_shared_memory_that_an_engine_leaves_is_removed(orders: Orders, how: str) -> None:
    """By its resource tracker, which therefore outlives it."""
    pid = orders.start("decode-0", "shm")
    name = orders.log("decode-0").read_text().split()[-1]
    segment = Path("/dev/shm") / name.lstrip("/")
    assert segment.exists()
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        orders.give(op="stop", grace_s=0)
    wait_until(lambda: not segment.exists())


def test_the_end_of_one_engine_is_not_the_end_of_another(orders: Orders) -> None:
    first, second = orders.start("decode-0"), orders.start("decode-1")
    os.kill(first, signal.SIGKILL)
    assert orders.hear()["exited"] == "decode-0"
    assert is_alive(second)


@pytest.mark.parametrize("fork", [False, True])
def test_an_engine_may_be_killed_and_started_again_by_order(orders: Orders, fork: bool) -> None:
    if fork:
        orders.start_fork_server()
        orders.hear()
    orders.start("decode-0", fork=fork)
    stubborn = orders.start("decode-1", "stubborn child", fork=fork)
    pids = dummies.pids_in(orders.log("decode-1"))
    orders.give(op="kill", name="decode-1")
    assert orders.hear() == {"exited": "decode-1", "code": -9}
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    orders.give(op="kill", name="nosuch")
    (orders.run_dir / "decode-1.sock").unlink()
    again = orders.start("decode-1", fork=fork)
    assert again != stubborn
    assert is_alive(again)


# The end of all -------------------------------------------------------------------------------


def test_stop_ends_engines_in_their_own_time(orders: Orders) -> None:
    pids = [orders.start("decode-0"), orders.start("decode-1", "child")]
    pids += dummies.pids_in(orders.log("decode-1"))
    orders.give(op="stop", grace_s=5)
    assert orders.hear() == {"stopped": True}
    orders.assert_ended(*pids)


def test_the_mps_daemon_ends_after_the_engines(orders: Orders) -> None:
    daemon = orders.run(MPS, "sleep", "60")
    first, last = orders.start("decode-0"), orders.start("decode-1", "stubborn")
    orders.give(op="stop", grace_s=0.5)
    wait_until(lambda: not is_alive(first))
    assert is_alive(daemon)
    orders.assert_ended(daemon, first, last)


@pytest.mark.parametrize("how", ["stop", "close", "SIGTERM", "nonsense"])
def test_nothing_survives_its_end_however_it_comes(orders: Orders, how: str) -> None:
    """Not even what ignores SIGTERM and what hides in other sessions."""
    orders.start("decode-0", "stubborn child child session")
    pids = dummies.pids_in(orders.log("decode-0"))
    assert len(pids) == 3
    match how:
        case "stop":
            orders.give(op="stop", grace_s=0.2)
        case "close":
            orders.peer.connection.close()
        case "SIGTERM":
            orders.process.terminate()
        case _:
            orders.give(op="start")
    orders.assert_ended(*pids)


def holders(path: Path) -> list[int]:
    """The processes that have a file open."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if link.readlink() == path:
                found.append(int(link.parts[2]))
    return found


@pytest.mark.parametrize("how", ["stop", "close", "kill"])
@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("after_s", [0, 0.02])
def test_an_engine_that_is_only_just_started_does_not_survive_its_end(
    orders: Orders, how: str, fork: bool, after_s: float
) -> None:
    if fork:
        orders.start_fork_server()
        orders.hear()
    address, log = str(orders.run_dir / "x.sock"), orders.log("x")
    argv = [address, "stubborn", *(("child", "session") if how != "kill" else ())]
    argv = argv if fork else [sys.executable, "-m", dummies.ENTRY, *argv]
    orders.give(op="start", name="x", argv=argv, env=dummies.ENV, log=str(log), fork=fork)
    time.sleep(after_s)
    match how:
        case "stop":
            orders.give(op="stop", grace_s=0.1)
        case "close":
            orders.peer.connection.close()
        case _:
            orders.process.kill()
    orders.process.wait(PATIENCE_S)
    if how == "kill":  # the kernel ends one after the other
        wait_until(lambda: not holders(log))
    time.sleep(0.05)
    assert not holders(log)
    assert not any(map(is_alive, dummies.pids_in(log)))


def test_an_interrupt_from_the_keyboard_is_not_for_it(orders: Orders) -> None:
    pid = orders.start("decode-0")
    orders.process.send_signal(signal.SIGINT)
    second = orders.start("decode-1")
    assert is_alive(pid)
    assert is_alive(second)


def test_engines_of_a_killed_supervisor_are_killed_by_the_kernel(orders: Orders) -> None:
    pids = [orders.start("decode-0"), orders.start("decode-1", "stubborn python-child")]
    pids += dummies.pids_in(orders.log("decode-1"))
    orders.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_any_program_of_a_killed_supervisor_is_killed_by_the_kernel(orders: Orders) -> None:
    pid = orders.run(MPS, "sleep", "60")
    orders.process.kill()
    wait_until(lambda: not is_alive(pid))


# Fork server ----------------------------------------------------------------------------------


def test_engines_are_forked_when_the_fork_server_is_ready(orders: Orders) -> None:
    server = orders.start_fork_server()
    assert orders.hear() == {"forking": True}
    pid = orders.start("decode-0", fork=True)
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) == server
    os.kill(pid, signal.SIGKILL)
    assert orders.hear() == {"exited": "decode-0", "code": -9}
    assert is_alive(server)


def test_the_end_of_the_fork_server_is_told(orders: Orders) -> None:
    orders.start_fork_server("exit")
    assert orders.hear() == {"exited": FORK_SERVER, "code": 4}


@pytest.mark.parametrize("how", ["stop", "close"])
def test_forked_engines_and_their_server_end_with_it(orders: Orders, how: str) -> None:
    server = orders.start_fork_server()
    orders.hear()
    orders.start("decode-0", "stubborn child session", fork=True)
    pids = dummies.pids_in(orders.log("decode-0"))
    if how == "stop":
        orders.give(op="stop", grace_s=0.2)
    else:
        orders.peer.connection.close()
    orders.assert_ended(server, *pids)


def test_the_end_of_a_fork_server_is_the_end_of_its_engines(orders: Orders) -> None:
    server = orders.start_fork_server()
    orders.hear()
    pid = orders.start("decode-0", fork=True)
    os.kill(server, signal.SIGKILL)
    news = [orders.hear(), orders.hear()]
    assert {"exited": FORK_SERVER, "code": -9} in news
    assert {"exited": "decode-0", "code": -9} in news
    assert not is_alive(pid)


# Folders --------------------------------------------------------------------------------------


def test_sweep_removes_what_nobody_holds(tmp_path: Path) -> None:
    left, lock = make_run_dir(tmp_path)
    (left / "decode-0.sock").touch()
    os.close(lock)
    sweep(tmp_path)
    assert not left.exists()


def test_sweep_leaves_what_is_held_and_what_is_not_ours(tmp_path: Path) -> None:
    _, lock = make_run_dir(tmp_path)
    (tmp_path / "easerve-not-locked-yet").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / LOCK).touch()
    before = sorted(tmp_path.iterdir())
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    os.close(lock)


def test_a_run_folder_is_held_while_any_copy_of_its_lock_is_open(tmp_path: Path) -> None:
    run_dir, lock = make_run_dir(tmp_path)
    copy = os.dup(lock)
    os.close(lock)
    with (run_dir / LOCK).open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(copy)
    sweep(tmp_path)
    assert not run_dir.exists()


def test_run_folders_are_private_and_different(tmp_path: Path) -> None:
    (one, first), (other, second) = make_run_dir(tmp_path), make_run_dir(tmp_path)
    assert one != other
    assert one.stat().st_mode & 0o777 == 0o700
    os.close(first)
    os.close(second)
