"""The process that owns the engines of one host.

Run as ``python -m easerve.cluster.supervisor FD RUN_DIR``. FD is a stream socket with a JSON object
per line. Orders:

* ``{"op": "fork server", "argv", "env", "log"}``: start the process that CPU engines fork from;
* ``{"op": "start", "name", "argv", "env", "log", "fork"}``: start an engine, forked or not;
* ``{"op": "kill", "name"}``: end an engine at once;
* ``{"op": "stop", "grace_s"}``: end every engine, then this process.

News: ``{"started": name, "pid"}``, ``{"exited": name, "code"}`` (code: minus the signal number
when a signal ended it), ``{"forking": true}``, ``{"stopped": true}``.

The lock of RUN_DIR is inherited as an open file. When the socket closes, whoever gave the orders
is gone, however it went: every engine is killed.
When this process itself is killed, the kernel kills the engines (``site/sitecustomize.py``) and
whatever else was started here.
Nothing survives in RUN_DIR either way, or at the next start (``sweep``).
"""

import contextlib
import ctypes
import fcntl
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from easerve.peer import Peer

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None)
PARENT_PID = "EASERVE_PARENT_PID"  # as in site/sitecustomize.py
PREFIX = "easerve-"
LOCK = "lock"
FORK_SERVER, MPS = "fork server", "mps"  # what engines need as long as they run


class Supervisor:
    def __init__(self, control: socket.socket, run_dir: Path) -> None:
        self._control, self._run_dir = Peer(control), run_dir
        self._names: dict[int, str] = {}  # pid -> engine or fork server
        self._forker: Peer | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._end(grace_s=0))
        self._selector.register(self._control.connection, selectors.EVENT_READ, self._take_orders)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._reap(woken))
        try:
            while True:
                for key, _ in self._selector.select():
                    act: Callable[[], None] = key.data
                    act()
        except Exception:
            traceback.print_exc()
        finally:
            self._end(grace_s=0)

    # Orders -----------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        orders = self._control.receive()
        if orders is None:
            self._end(grace_s=0)
        for order in orders or ():
            match order["op"]:
                case "fork server":
                    self._start_fork_server(order)
                case "start" if order["fork"]:
                    assert self._forker is not None, "the fork server comes first"
                    self._forker.send(order)
                case "start":
                    self._spawn(order, order["name"])
                case "kill":
                    self._kill(order["name"])
                case "stop":
                    self._end(order["grace_s"])

    def _spawn(self, order: dict[str, Any], name: str, pass_fds: tuple[int, ...] = ()) -> None:
        with Path(order["log"]).open("ab") as log:
            process = subprocess.Popen(
                order["argv"],
                env={**os.environ, **order["env"], PARENT_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=_die_with_parent,
            )
        process.returncode = 0  # reaped here, by pid
        self._names[process.pid] = name
        self._control.send({"started": name, "pid": process.pid})

    def _start_fork_server(self, order: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            order["argv"] = [arg.replace("{fd}", str(theirs.fileno())) for arg in order["argv"]]
            self._spawn(order, FORK_SERVER, (theirs.fileno(),))
        self._forker = Peer(ours)
        self._selector.register(ours, selectors.EVENT_READ, self._hear_fork_server)

    def _hear_fork_server(self) -> None:
        assert self._forker is not None
        heard = self._forker.receive()
        if heard is None:
            self._selector.unregister(self._forker.connection)
        for news in heard or ():
            if "ready" in news:
                self._control.send({"forking": True})
            elif "exited" in news:
                self._ended(news["exited"], news["code"])
            else:
                self._names[news["pid"]] = news["name"]
                self._control.send({"started": news["name"], "pid": news["pid"]})

    # Ends -------------------------------------------------------------------------------------

    def _reap(self, woken: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self._ended(ended[0], os.waitstatus_to_exitcode(ended[1]))

    def _ended(self, pid: int, code: int) -> None:
        name = self._names.pop(pid, None)
        if name is not None:
            _kill_group(pid)  # what an engine leaves behind goes with it
            self._control.send({"exited": name, "code": code})

    def _kill(self, name: str) -> None:
        for pid in [pid for pid, each in self._names.items() if each == name]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _end(self, grace_s: float) -> None:
        """End every engine and this process; remove what they kept on this host."""
        deadline = time.monotonic() + grace_s
        pids = [pid for pid, name in self._names.items() if name not in (FORK_SERVER, MPS)]
        if grace_s > 0:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            while time.monotonic() < deadline and any(_is_alive(pid) for pid in pids):
                time.sleep(0.05)
        for pid in sorted(self._names, key=lambda pid: self._names[pid] == MPS):
            _kill_group(pid)
        _reap_all()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        self._control.send({"stopped": True})
        os._exit(0)


def _die_with_parent() -> None:
    """Whatever the program is; engines see to it by themselves as well."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _kill_group(pid: int) -> None:
    """Kill an engine's processes. Its resource tracker ends by itself when they are gone, and
    removes what they left in shared memory."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            member = int(folder.name)
            if os.getpgid(member) == pid and not _is_resource_tracker(member):
                os.kill(member, signal.SIGKILL)


def _is_resource_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _reap_all(patience_s: float = 3.0) -> None:
    """Wait for the killed; as a subreaper this process inherits and kills their orphans too."""
    begin = time.monotonic()
    with contextlib.suppress(ChildProcessError):
        while (waited := time.monotonic() - begin) < patience_s:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                for child in _children():
                    if waited > patience_s / 2 or not _is_resource_tracker(child):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(child, signal.SIGKILL)
                time.sleep(0.02)


def _children() -> list[int]:
    files = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def make_run_dir(run_root: Path) -> tuple[Path, int]:
    """A private folder and its lock, which is held while this descriptor or a copy is open."""
    run_dir = Path(tempfile.mkdtemp(prefix=PREFIX, dir=run_root))
    new = run_dir / f"{LOCK}.new"
    lock = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(run_dir / LOCK)  # nobody ever sees it unlocked
    return run_dir, lock


def sweep(run_root: Path) -> None:
    """Remove what a supervisor that was killed left: its lock is free."""
    for run_dir in run_root.glob(f"{PREFIX}*"):
        try:
            with (run_dir / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # alive, somebody else's, or just being made
        shutil.rmtree(run_dir, ignore_errors=True)


def main() -> None:
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])).run()


if __name__ == "__main__":
    main()
