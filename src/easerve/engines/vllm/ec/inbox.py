"""Where a prefill engine listens: encoders push bundles, the router asks what is missing."""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from easerve.engines.vllm.ec.connection import Connection, UnixListener
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    Buffer,
    Hello,
    MessageError,
    Missing,
    Push,
    Query,
    Read,
    Ready,
    Slot,
    check_items,
)
from easerve.engines.vllm.ec.store import Store
from easerve.engines.vllm.ec.tcp import TcpListener
from easerve.engines.vllm.ec.transport import DeviceMemory, Importer, Open, read

logger = logging.getLogger("vllm.easerve.ec.inbox")
MAX_CONNECTIONS = 256
BETWEEN_HOSTS = ("nixl",)  # what can read the buffer of another host


@dataclass(slots=True)
class _Peer:
    """Who is at the other end; ``buffer`` that it said it has, and we can read."""

    connection: Connection
    buffer: Importer | None = None
    num_bytes: int = 0


class Inbox:
    """Puts what encoders push to ``place``, a Unix socket or tcp://host:port, into ``store``.

    A thread per connection. ``arrived`` is set at each bundle. ``opens``: the kinds of buffers on
    encoders' devices that this engine can read; while the store has more than ``device_bytes`` what
    is read of them goes to host memory.
    """

    def __init__(
        self,
        place: Path | str,
        token: str,
        store: Store,
        opens: Mapping[str, Open] | None = None,
        device_bytes: int = 1 << 62,
        arrived: threading.Event | None = None,
    ) -> None:
        self.arrived = arrived or threading.Event()
        self._token, self._store = token, store
        is_near = isinstance(place, Path)
        self._opens = {k: o for k, o in (opens or {}).items() if is_near or k in BETWEEN_HOSTS}
        self._device_bytes = device_bytes
        self._lock = threading.Lock()
        self._serving: dict[Connection, threading.Thread] = {}
        self._is_closed = False
        self.listener = (
            UnixListener(place, MAX_CONNECTIONS) if isinstance(place, Path) else TcpListener(place)
        )
        self._thread = threading.Thread(target=self._run, daemon=True, name="easerve-ec-inbox")
        self._thread.start()

    def close(self) -> None:
        self._is_closed = True
        self.listener.hang_up()
        self._thread.join()
        self.listener.close()
        with self._lock:
            serving = dict(self._serving)
            for connection in serving:
                connection.hang_up()
        for thread in serving.values():
            thread.join()

    def _run(self) -> None:
        while True:
            try:
                connection = self.listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                logger.warning("no connection taken: %s", error)
                time.sleep(0.01)  # we may be out of descriptors
                continue
            with self._lock:
                if len(self._serving) >= MAX_CONNECTIONS:
                    logger.warning("too many connections")
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._serving[connection] = thread
                thread.start()

    def _serve(self, connection: Connection) -> None:
        """Whatever is wrong with a message ends this connection and nothing else."""
        peer = _Peer(connection)
        try:
            self._welcome(peer)
            while connection.is_readable(None) and self._take(peer):
                pass
        except (MessageError, OSError) as error:
            # The text alone: the error would keep what came with the message.
            logger.warning("connection given up: %s", str(error))
        except Exception:
            logger.exception("connection given up")
        finally:
            with self._lock:
                del self._serving[connection]
                connection.close()
            if peer.buffer is not None:
                with contextlib.suppress(Exception):  # its owner may be gone
                    peer.buffer.close()

    def _welcome(self, peer: _Peer) -> None:
        proof = peer.connection.proof(self._token, is_engine=True)
        match peer.connection.receive():
            case Hello() as hello, None if hello.is_welcome(proof):
                peer.connection.takes_bundles = True
                if hello.buffer is not None and hello.buffer.kind in self._opens:
                    self._open(peer, hello.buffer)
            case None:
                pass
            case _:
                raise MessageError("the peer speaks another version or has not our token")

    def _open(self, peer: _Peer, buffer: Buffer) -> None:
        """Without our Ready the encoder sends host memory."""
        try:
            peer.buffer = self._opens[buffer.kind](buffer)
        except Exception as error:  # as of a device that this engine does not see
            logger.warning("an encoder's bundles come by host memory: %r", str(error))
            return
        peer.num_bytes = buffer.num_bytes
        peer.connection.send(Ready())

    def _take(self, peer: _Peer) -> bool:
        """Whether the connection goes on."""
        match peer.connection.receive():
            case None:
                return False
            case Push(slot=None) as push, Memory() as memory:
                self._add(push, memory)
            case Push(slot=Slot() as slot) as push, None:
                self._read(peer, push, slot)
            case Query(keys), None:
                peer.connection.send(Missing(self._store.missing(keys)))
            case message, _:
                raise MessageError(f"{type(message).__name__} is not for us")
        return True

    def _read(self, peer: _Peer, push: Push, slot: Slot) -> None:
        if peer.buffer is None or slot.offset + slot.num_bytes > peer.num_bytes:
            raise MessageError("the peer has no such slot")
        try:
            is_full = self._store.num_bytes > self._device_bytes
            memory = read(peer.buffer, slot, to_host=is_full)
            # An encoder uses slots anew of which we say nothing, but hangs up on us before.
            if peer.connection.has_ended():
                raise MessageError("a bundle was read too late and is dropped")
            self._add(push, memory)
        finally:
            with contextlib.suppress(OSError):
                peer.connection.send(Read(slot.number))

    def _add(self, push: Push, memory: Memory | DeviceMemory) -> None:
        check_items(push.items, memory.num_bytes)
        usable_s = max(0.0, (time.monotonic_ns() - push.sent_ns) / 1e9)
        gone = self._store.add(memory, push.items, usable_s)
        self.arrived.set()
        del gone  # while the engine goes on
