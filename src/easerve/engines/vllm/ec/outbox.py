"""How an encoder hands its bundles over: one connection per prefill engine."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from easerve.engines.vllm.ec import connection, tcp
from easerve.engines.vllm.ec.connection import Connection
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    MAX_ITEMS,
    VERSION,
    Hello,
    Item,
    MessageError,
    Push,
    Read,
    Ready,
    inbox_path,
    layout,
)
from easerve.engines.vllm.ec.ring import Ring
from easerve.engines.vllm.ec.transport import Exporter

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.easerve.ec.outbox")


class Embedding(NamedTuple):
    """An embedding of ``shape`` (tokens, width); ``content`` gives its bytes in host memory."""

    key: str
    shape: tuple[int, int]
    dtype: str
    tensor: "torch.Tensor"
    content: Callable[[], memoryview]


@dataclass(slots=True)
class _Peer:
    connection: Connection
    reads_slots: bool = False


class Outbox:
    """Pushes to the prefill engines whose sockets are in ``inboxes``, and to tcp://host:port.

    ``exporter``: a buffer on the encoder's device, for those engines that can read it.
    """

    def __init__(self, inboxes: Path, token: str, exporter: Exporter | None = None) -> None:
        self._inboxes, self._token = inboxes, token
        self._peers: dict[str, _Peer] = {}
        self._exporter = exporter
        self._buffer = exporter.buffer if exporter is not None else None
        self._ring = Ring(self._buffer.num_bytes if self._buffer is not None else 0)

    def push(self, destination: str, embeddings: Sequence[Embedding], sent_ns: int) -> bool:
        """Send one bundle; whether it went. Who waits for one that did not gives up in time."""
        try:
            self._take_answers()
            for begin in range(0, len(embeddings), MAX_ITEMS):
                self._push(destination, embeddings[begin : begin + MAX_ITEMS], sent_ns)
        except Exception as error:  # whatever it is, the encoder goes on
            key, num = embeddings[0].key, len(embeddings)
            # The text alone: the error would keep the bundle's memory.
            logger.warning("%d from %s on not pushed to %s: %s", num, key, destination, repr(error))
            self._drop(destination)
            return False
        return True

    def _push(self, destination: str, embeddings: Sequence[Embedding], sent_ns: int) -> None:
        items, num_bytes = _laid_out(embeddings)
        push = Push(sent_ns, items)
        peer = self._peers.get(destination) or self._connect(destination)
        slot = self._ring.take(num_bytes, destination) if peer.reads_slots else None
        if slot is None or self._exporter is None:
            memory = Memory.of([embedding.content() for embedding in embeddings])
            peer.connection.send(push, memory)
            return
        tensors = [(item.offset, e.tensor) for item, e in zip(items, embeddings, strict=True)]
        try:
            self._exporter.write(slot.offset, tensors)
            peer.connection.send(replace(push, slot=slot))
        except BaseException:
            self._ring.give_back(destination, slot.number)  # who was not told does not read it
            raise

    def _take_answers(self) -> None:
        for name, peer in list(self._peers.items()):
            try:
                while peer.connection.is_readable():
                    match peer.connection.receive():
                        case Ready(), None:
                            peer.reads_slots = True
                        case Read(number), None:
                            self._ring.give_back(name, number)
                        case None:
                            raise ConnectionResetError
                        case _:
                            raise MessageError("that is not for us")
            except OSError:  # the engine is gone, maybe for another one
                self._drop(name)
            except Exception as error:
                logger.warning("%s: %s", name, repr(error))
                self._drop(name)
        for name in self._ring.late():
            logger.warning("%s reads nothing", name)
            self._drop(name)

    def _connect(self, destination: str) -> _Peer:
        if destination.startswith("tcp:"):
            new = tcp.connect(destination)
        else:
            new = connection.connect(inbox_path(self._inboxes, destination))
        try:
            new.send(Hello(VERSION, new.proof(self._token, is_engine=False), self._buffer))
        except BaseException:
            new.close()
            raise
        peer = self._peers[destination] = _Peer(new)
        return peer

    def _drop(self, destination: str) -> None:
        """Hang up on an engine, which uses nothing any more that it reads of our buffer."""
        peer = self._peers.pop(destination, None)
        if peer is not None:
            peer.connection.close(at_once=True)
        self._ring.forget(destination)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.connection.close()
        self._peers.clear()
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
