"""How an encoder hands its bundles over: one connection per prefill engine."""

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    VERSION,
    Hello,
    Item,
    MessageError,
    Push,
    Read,
    Ready,
    Slot,
    check_peer,
    decode,
    encode,
    inbox_path,
    layout,
    new_socket,
)
from easerve.engines.vllm.ec.ring import Ring
from easerve.engines.vllm.ec.tcp import TcpSender
from easerve.engines.vllm.ec.transport import Exporter

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.easerve.ec.outbox")
MAX_WAIT_S = 0.2  # for an engine that does not read; the encoder does nothing meanwhile


class Embedding(NamedTuple):
    """An embedding of ``shape`` (tokens, width); ``content`` gives its bytes in host memory."""

    key: str
    shape: tuple[int, int]
    dtype: str
    tensor: "torch.Tensor"
    content: Callable[[], memoryview]


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    reads_slots: bool = False


class Outbox:
    """Pushes to the prefill engines whose sockets are in ``inboxes``, and to tcp://host:port.

    ``exporter``: a buffer on the encoder's device, for those engines that can read it.
    """

    def __init__(self, inboxes: Path, token: str, exporter: Exporter | None = None) -> None:
        self._inboxes, self._token = inboxes, token
        self._peers: dict[str, _Peer] = {}
        self._others: dict[str, TcpSender] = {}  # on other hosts
        self._exporter = exporter
        self._buffer = exporter.buffer if exporter is not None else None
        self._ring = Ring(self._buffer.num_bytes if self._buffer is not None else 0)

    def push(self, destination: str, embeddings: Sequence[Embedding], sent_ns: int) -> bool:
        """Send one bundle; whether it went. Who waits for one that did not gives up in time."""
        try:
            for begin in range(0, len(embeddings), MAX_ITEMS):
                self._push(destination, embeddings[begin : begin + MAX_ITEMS], sent_ns)
        except Exception as error:  # whatever it is, the encoder goes on
            keys = ", ".join(embedding.key for embedding in embeddings)
            logger.warning("not pushed to %s: %s (%r)", destination, keys, error)
            self._drop(destination)
            return False
        return True

    def _push(self, destination: str, embeddings: Sequence[Embedding], sent_ns: int) -> None:
        items, num_bytes = _laid_out(embeddings)
        if destination.startswith("tcp:"):
            contents = [embedding.content() for embedding in embeddings]
            self._sender(destination).push(items, contents, num_bytes, sent_ns)
            return
        for name in list(self._peers):
            try:
                self._take_answers(name)
            except MessageError as error:
                logger.warning("%s: %s", name, error)
                self._drop(name)
        slot = self._put(destination, embeddings, items, num_bytes)
        if slot is not None:
            try:
                _send(self._peers[destination].connection, encode(Push(sent_ns, items, slot)))
                return
            except ConnectionError:  # the engine has started again
                self._part(destination)
        packet = encode(Push(sent_ns, items))
        memory = Memory.of([embedding.content() for embedding in embeddings])
        if destination in self._peers:
            try:
                _send(self._peers[destination].connection, packet, memory)
                return
            except ConnectionError:
                self._part(destination)
        self._peers[destination] = _Peer(self._connect(destination))
        _send(self._peers[destination].connection, packet, memory)

    def _sender(self, destination: str) -> TcpSender:
        if destination in self._others and self._others[destination].is_closed():
            self._drop(destination)
        if destination not in self._others:
            self._others[destination] = TcpSender(destination, self._token)
        return self._others[destination]

    def _put(
        self,
        destination: str,
        embeddings: Sequence[Embedding],
        items: Sequence[Item],
        num_bytes: int,
    ) -> Slot | None:
        """Copy the bundle into a slot, where there is room and an engine that reads it."""
        peer = self._peers.get(destination)
        if self._exporter is None or peer is None or not peer.reads_slots:
            return None
        slot = self._ring.take(num_bytes, destination)
        if slot is not None:
            tensors = [(item.offset, e.tensor) for item, e in zip(items, embeddings, strict=True)]
            self._exporter.write(slot.offset, tensors)
        return slot

    def _take_answers(self, name: str) -> None:
        peer = self._peers[name]
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while packet := peer.connection.recv(MAX_MESSAGE_BYTES):
                match decode(packet):
                    case Ready():
                        peer.reads_slots = True
                    case Read() as read:
                        self._ring.give_back(name, read.number)
                    case message:
                        raise MessageError(f"{type(message).__name__} is not for us")

    def _connect(self, destination: str) -> socket.socket:
        connection = new_socket()
        try:
            connection.setblocking(False)
            connection.connect(str(inbox_path(self._inboxes, destination)))
            check_peer(connection)
            connection.send(encode(Hello(VERSION, self._token, self._buffer)))
        except BaseException:
            connection.close()
            raise
        return connection

    def _part(self, destination: str) -> None:
        """From an engine that has hung up, so that it reads none of its slots any more."""
        self._drop(destination)
        self._ring.forget(destination)

    def _drop(self, destination: str) -> None:
        peer = self._peers.pop(destination, None)
        if peer is not None:
            peer.connection.close()
        if destination in self._others:
            self._others.pop(destination).close()

    def close(self) -> None:
        for destination in [*self._peers, *self._others]:
            self._drop(destination)
        if self._exporter is not None:
            self._exporter.close()


def _laid_out(embeddings: Sequence[Embedding]) -> tuple[tuple[Item, ...], int]:
    """The items of a bundle, and its size."""
    sizes = [Item(e.key, 0, e.shape, e.dtype).num_bytes for e in embeddings]  # type: ignore[arg-type]
    offsets, num_bytes = layout(sizes)
    items = tuple(
        Item(e.key, offset, e.shape, e.dtype)  # type: ignore[arg-type]
        for e, offset in zip(embeddings, offsets, strict=True)
    )
    return items, num_bytes


def _send(connection: socket.socket, packet: bytes, memory: Memory | None = None) -> None:
    descriptors = [memory.fd] if memory is not None else []
    until = time.monotonic() + MAX_WAIT_S
    while True:
        try:
            socket.send_fds(connection, [packet], descriptors)
            return
        except BlockingIOError:
            left_s = until - time.monotonic()
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise TimeoutError("the engine does not read") from None
