"""Where a prefill engine listens: encoders push bundles, the router asks what is missing."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    MAX_MESSAGE_BYTES,
    Hello,
    Message,
    MessageError,
    Missing,
    Push,
    Query,
    Read,
    Ready,
    check_items,
    check_peer,
    decode,
    encode,
    new_socket,
)
from easerve.engines.vllm.ec.ring import SLOT_LIFE_NS
from easerve.engines.vllm.ec.store import Store
from easerve.engines.vllm.ec.transport import DeviceMemory, Importer, Open

logger = logging.getLogger("vllm.easerve.ec.inbox")
MAX_CONNECTIONS = 256


@dataclass(slots=True)
class _Peer:
    """Who is at the other end; ``buffer`` that it said it has, and we can read."""

    is_welcome: bool = False
    buffer: Importer | None = None
    num_bytes: int = 0


class Inbox:
    """A thread that puts what encoders push into ``store``; ``arrived`` is set at each bundle.

    ``opens``: the kinds of buffers on encoders' devices that this engine can read.
    """

    def __init__(
        self, path: Path, token: str, store: Store, opens: Mapping[str, Open] | None = None
    ) -> None:
        self.arrived = threading.Event()
        self._path, self._token, self._store = path, token, store
        self._opens = opens or {}
        self._peers: dict[socket.socket, _Peer] = {}
        path.unlink(missing_ok=True)
        self._listener = new_socket()
        self._listener.bind(str(path))
        path.chmod(0o600)  # before anyone can connect
        self._inode = path.stat().st_ino
        self._listener.listen(MAX_CONNECTIONS)
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for one in (self._listener, self._woken):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, daemon=True, name="easerve-ec-inbox")
        self._thread.start()

    def close(self) -> None:
        """Stop listening; a socket that another engine has put in our place stays."""
        self._wake.close()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._woken:
                    for connection in list(self._peers):
                        self._part(connection)
                    self._listener.close()
                    self._woken.close()
                    self._selector.close()
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._serve(key.fileobj)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            logger.warning("no connection taken: %s", error)
            time.sleep(0.01)  # we may be out of descriptors
            return
        if len(self._peers) >= MAX_CONNECTIONS:
            logger.warning("too many connections")
            connection.close()
            return
        connection.setblocking(False)
        self._peers[connection] = _Peer()
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, connection: socket.socket) -> None:
        """Take one message; whatever is wrong with it ends this connection and nothing else."""
        try:
            if self._take(connection):
                return
        except BlockingIOError:
            return
        except (MessageError, OSError) as error:
            # The text alone: the error would keep what came with the message.
            logger.warning("connection given up: %s", str(error))
        except Exception:
            logger.exception("connection given up")
        self._part(connection)

    def _part(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()
        buffer = self._peers.pop(connection).buffer
        if buffer is not None:
            with contextlib.suppress(Exception):  # its owner may be gone
                buffer.close()

    def _take(self, connection: socket.socket) -> bool:
        """Whether the connection goes on."""
        packet, descriptors, flags, _ = socket.recv_fds(
            connection, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        memory = Memory.received(descriptors[0]) if descriptors else None
        if not packet:
            return False
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise MessageError("a message is too large")
        peer = self._peers[connection]
        match decode(packet):
            case Hello() as hello:
                check_peer(connection)
                if peer.is_welcome or not hello.is_welcome(self._token):
                    raise MessageError("the peer speaks another version or has not our token")
                peer.is_welcome = True
                self._open(connection, hello)
            case _ if not peer.is_welcome:
                raise MessageError("the peer has not said hello")
            case Push(slot=None) as push if memory is not None:
                self._add(push, memory)
            case Push() as push if push.slot is not None and memory is None:
                self._read(connection, push)
            case Query() as query:
                _answer(connection, Missing(self._store.missing(query.keys)))
            case message:
                raise MessageError(f"{type(message).__name__} is not for us")
        return True

    def _add(self, push: Push, memory: Memory | DeviceMemory) -> None:
        check_items(push.items, memory.num_bytes)
        usable_s = max(0.0, (time.monotonic_ns() - push.sent_ns) / 1e9)
        gone = self._store.add(memory, push.items, usable_s)
        self.arrived.set()
        del gone  # while the engine goes on

    def _open(self, connection: socket.socket, hello: Hello) -> None:
        """Without our Ready the encoder sends host memory."""
        if hello.buffer is None or hello.buffer.kind not in self._opens:
            return
        peer = self._peers[connection]
        try:
            peer.buffer = self._opens[hello.buffer.kind](hello.buffer)
        except Exception:
            logger.warning("no way to an encoder's device", exc_info=True)
            return
        peer.num_bytes = hello.buffer.num_bytes
        _answer(connection, Ready())

    def _read(self, connection: socket.socket, push: Push) -> None:
        peer, slot = self._peers[connection], push.slot
        assert slot is not None
        if peer.buffer is None or slot.offset + slot.num_bytes > peer.num_bytes:
            raise MessageError("the peer has no such slot")
        memory = peer.buffer.read(slot.offset, slot.num_bytes)
        if time.monotonic_ns() > push.sent_ns + SLOT_LIFE_NS:
            logger.warning("a bundle was read too late and is dropped")
            return
        _answer(connection, Read(slot.number))
        self._add(push, memory)


def _answer(connection: socket.socket, message: Message) -> None:
    try:
        connection.send(encode(message))
    except BlockingIOError:
        raise MessageError("the peer does not read") from None
