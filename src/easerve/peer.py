"""Messages between our own processes on one host: a JSON object per line on a stream socket."""

import contextlib
import json
import socket
from typing import Any


class Peer:
    """A stream socket that carries a JSON object per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._rest = connection, b""

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come whole by now, after waiting for something; None when the peer closed."""
        try:
            received = self.connection.recv(1 << 16)
        except ConnectionError:
            return None
        *lines, self._rest = (self._rest + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a peer that is gone is noticed by receive
            self.connection.sendall(json.dumps(message).encode() + b"\n")
