"""A deployment that is served by a child, as its parent sees it.

Nothing is left of it, however the parent ends: see ``live_server``.
"""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from easerve.peer import Peer

SERVER = ("-m", "easerve.cli.search.live_server")
START_SLACK_S = 60.0
"""More than what the engines have to become ready: for imports, and for what else there is."""
STOP_S, GONE_S, POLL_S = 30.0, 15.0, 0.05
ADMIN_TIMEOUT_S = 30.0
TAIL_BYTES = 2000
Tell = Callable[[str], None]


class ServerLost(Exception):
    """The server, or one of its engines, did not start or has ended; the text says why."""


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says of itself. ``run``: a folder that is there as long as its engines are."""

    address: str
    pids: Mapping[str, int]
    logs: Path
    run: Path


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class ServerProcess:
    """``start`` makes one. ``token``: of the server's administrator."""

    served: Served

    def __init__(self, token: str, server: tuple[str, ...] = SERVER) -> None:
        self._token = token
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *server, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for us, and we end it
            )
        self._peer = Peer(ours)
        self._lost: str | None = None

    @property
    def address(self) -> str:
        return self.served.address

    @classmethod
    def start(
        cls,
        content: Mapping[str, Any],
        source: str,
        timeout_s: float,
        tell: Tell,
        server: tuple[str, ...] = SERVER,
    ) -> Self:
        """Serve the content of a deployment file; ``tell`` hears of each engine.

        The content has the administrator's token. Raises ServerLost.
        """
        process = cls(content["server"]["admin_token"], server)
        try:
            process._peer.send({"content": content, "source": source})
            process._wait(time.monotonic() + timeout_s + START_SLACK_S, tell)
        except BaseException:
            process.close()
            raise
        return process

    def _wait(self, deadline_s: float, tell: Tell) -> None:
        while True:
            for each in self._news(max(0.01, deadline_s - time.monotonic())):
                if "address" in each:
                    paths = {name: Path(each[name]) for name in ("logs", "run")}
                    self.served = Served(each["address"], each["pids"], **paths)
                    return
                tell(f"{each['engine']}: {each['state']}")
            if time.monotonic() > deadline_s:
                raise ServerLost(f"the server was not ready in time{self._tail()}")

    def check(self) -> None:
        """Raises ServerLost when the server or an engine of it has ended since it was ready."""
        self._news(0.0)

    def _news(self, timeout_s: float) -> list[dict[str, Any]]:
        """What has come by then, none if nothing has. Raises ServerLost, once for all."""
        self._peer.connection.settimeout(timeout_s)
        news: list[dict[str, Any]] | None = []
        if self._lost is None:
            with contextlib.suppress(TimeoutError, BlockingIOError):
                news = self._peer.receive()
            self._lost = self._ended() if news is None else self._bad(news)
        if self._lost is not None:
            raise ServerLost(self._lost)
        return news or []

    @staticmethod
    def _bad(news: list[dict[str, Any]]) -> str | None:
        for each in news:
            if "error" in each:
                return str(each["error"])
            if "exited" in each:
                return f"{each['exited']} ended with {_how(each['code'])}\nlog: {each['log']}"
        return None

    def _ended(self) -> str:
        """Without a word."""
        return f"the server ended with {_how(self._process.wait(STOP_S))}{self._tail()}"

    def _tail(self) -> str:
        """What it has printed last, wherever it goes on printing."""
        fd = self._said.fileno()
        size = os.fstat(fd).st_size
        text = os.pread(fd, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        return f"; it printed:\n{text.strip()}" if text.strip() else ""

    # The administrator's routes ------------------------------------------------------------------

    def turn(self, knobs: Mapping[str, Any]) -> None:
        """Change knobs of the policies; in force when this returns. Raises ServerLost."""
        self._ask("PATCH", "/admin/knobs", knobs)

    def num_open(self) -> int:
        """Requests that the server has. Raises ServerLost."""
        return int(self._ask("GET", "/admin/state")["open"])

    def _ask(self, method: str, path: str, content: Any = None) -> Any:
        """On this host and without a proxy, whatever the environment says."""
        host = self.served.address.removeprefix("http://")
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        body = None if content is None else json.dumps(content)
        connection = http.client.HTTPConnection(host, timeout=ADMIN_TIMEOUT_S)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            answer = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            self.check()
            raise ServerLost(f"{method} {path}: {type(error).__name__}: {error}") from None
        finally:
            connection.close()
        if response.status != 200:
            raise ServerLost(f"{method} {path}: HTTP {response.status}: {answer}")
        return json.loads(answer)

    # The end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Returns when the server and its engines are gone; requests under way are given up."""
        self._peer.connection.settimeout(STOP_S)
        self._peer.send({"op": "stop"})
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()  # nothing, for one that has ended
            self._process.wait()
            self._peer.connection.close()
            self._said.close()
        self._until_gone()

    def _until_gone(self) -> None:
        """Of a server that had to be killed, the supervisor ends the engines."""
        deadline_s = time.monotonic() + GONE_S
        while hasattr(self, "served") and self.served.run.exists():
            if time.monotonic() > deadline_s:
                return  # the next start sweeps the folder
            time.sleep(POLL_S)
