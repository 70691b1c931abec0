"""A connection between an encoder and a prefill engine, and its kind within a host.

On a Unix socket of sequential packets each message is one packet, and a bundle in host memory is
the file descriptor that comes with it. ``tcp`` has the kind that goes to another host.
"""

import contextlib
import select
import socket
from pathlib import Path

from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    MAX_MESSAGE_BYTES,
    Message,
    MessageError,
    check_peer,
    decode,
    encode,
    new_socket,
)

MAX_WAIT_S = 2.0  # for a peer that stops within a message
MAX_HANDOVER_S = 0.2  # for an engine on this host; the encoder does nothing meanwhile


class Connection:
    """One end of it. A call that waits for longer than ``max_wait_s`` is a TimeoutError.

    ``takes_bundles``: whether the peer is welcome to send bytes in mass.
    """

    def __init__(self, end: socket.socket, max_wait_s: float) -> None:
        self.takes_bundles = False
        self._socket = end
        end.settimeout(max_wait_s)

    def proof(self, token: str, *, is_engine: bool) -> str:
        """What the encoder's Hello says for the token; both ends ask before it."""
        raise NotImplementedError

    def send(self, message: Message, memory: Memory | None = None) -> None:
        raise NotImplementedError

    def receive(self) -> tuple[Message, Memory | None] | None:
        """A message and the memory that came with it; None when the peer has hung up."""
        raise NotImplementedError

    def is_readable(self, timeout_s: float | None = 0.0) -> bool:
        """Whether there is something to receive, be it the end."""
        return self._poll(select.POLLIN, None if timeout_s is None else timeout_s * 1000)

    def has_ended(self) -> bool:
        """Whether the peer has hung up, though some of what it said may be unread."""
        return self._poll(select.POLLRDHUP, 0)

    def _poll(self, events: int, timeout_ms: float | None) -> bool:
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(timeout_ms))

    def hang_up(self) -> None:
        """Whoever waits for something on it wakes up."""
        hang_up(self._socket)

    def close(self, *, at_once: bool = False) -> None:
        """``at_once``: the peer shall not read what it has not read yet."""
        self._socket.close()


class UnixConnection(Connection):
    def proof(self, token: str, *, is_engine: bool) -> str:
        check_peer(self._socket)
        return token

    def send(self, message: Message, memory: Memory | None = None) -> None:
        descriptors = [memory.fd] if memory is not None else []
        socket.send_fds(self._socket, [encode(message)], descriptors)

    def receive(self) -> tuple[Message, Memory | None] | None:
        packet, descriptors, flags, _ = socket.recv_fds(
            self._socket, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        memory = Memory.received(descriptors[0]) if descriptors else None
        if not packet:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise MessageError("a message is too large")
        return decode(packet), memory


class UnixListener:
    """The socket ``path``, our user's alone. One that another engine has put there since stays."""

    def __init__(self, path: Path, backlog: int) -> None:
        self._path = path
        path.unlink(missing_ok=True)
        self._socket = new_socket()
        self._socket.bind(str(path))
        path.chmod(0o600)  # before anyone can connect
        self._inode = path.stat().st_ino
        self._socket.listen(backlog)

    def accept(self) -> Connection:
        return UnixConnection(self._socket.accept()[0], MAX_WAIT_S)

    def hang_up(self) -> None:
        hang_up(self._socket)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def connect(path: Path) -> Connection:
    end = new_socket()
    try:
        end.connect(str(path))  # at once, as on any Unix socket
    except BaseException:
        end.close()
        raise
    return UnixConnection(end, MAX_HANDOVER_S)


def hang_up(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
