"""What is said on the socket of a prefill engine: one msgpack message per packet.

Within a host a sequential-packet socket keeps them apart and a descriptor travels with its message.
Each connection begins with Hello. An encoder goes on with Push, each with the descriptor of a
bundle's memory; who wants to know which items an engine lacks asks Query and gets Missing. An
encoder with a buffer on its device says so in its Hello; an engine that can read it says Ready, and
from then on a Push may name a slot of the buffer instead, which the engine gives back by Read.

Nothing of a peer is trusted: every message is bounded and checked, one that is wrong ends its
connection.
"""

import hmac
import math
import os
import re
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

VERSION = 1
ALIGNMENT = 64  # bytes; of each item within its bundle
MAX_MESSAGE_BYTES = 1 << 16
MAX_ITEMS = 256  # of one message, so that it fits at the longest keys
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
NAME = re.compile(r"[a-z0-9-]+")

Key = Annotated[str, Meta(min_length=1, max_length=200)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_ITEMS)]
Size = Annotated[int, Meta(ge=1, le=1 << 40)]


class MessageError(Exception):
    """A peer said something that it may not say."""


class Item(Struct, frozen=True, array_like=True):
    """An embedding of ``shape`` (tokens, width) that begins at ``offset`` of its bundle."""

    key: Key
    offset: Annotated[int, Meta(ge=0, le=1 << 40)]
    shape: tuple[Size, Size]
    dtype: Literal["float16", "bfloat16", "float32"]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Buffer(Struct, frozen=True, array_like=True):
    """Memory on an encoder's device; what ``descriptor`` says of it depends on ``kind``."""

    kind: Annotated[str, Meta(max_length=20)]
    num_bytes: Size
    descriptor: Annotated[bytes, Meta(max_length=MAX_MESSAGE_BYTES // 2)]


class Slot(Struct, frozen=True, array_like=True):
    """A bundle's place in its encoder's buffer; no two have one ``number``."""

    number: int
    offset: Annotated[int, Meta(ge=0, le=1 << 40)]
    num_bytes: Size


class Hello(Struct, frozen=True, tag="hello"):
    version: int
    token: Annotated[str, Meta(max_length=1000)]
    buffer: Buffer | None = None

    def is_welcome(self, token: str) -> bool:
        return self.version == VERSION and hmac.compare_digest(self.token.encode(), token.encode())


class Push(Struct, frozen=True, tag="push"):
    """A bundle. ``sent_ns``: when its sender began, on the host's monotonic clock."""

    sent_ns: int
    items: Annotated[tuple[Item, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    slot: Slot | None = None


class Ready(Struct, frozen=True, tag="ready"):
    """The engine reads the encoder's buffer."""


class Read(Struct, frozen=True, tag="read"):
    """The engine has read the slot of this number."""

    number: int


class Query(Struct, frozen=True, tag="query"):
    keys: Keys


class Missing(Struct, frozen=True, tag="missing"):
    keys: Keys


Message = Hello | Push | Ready | Read | Query | Missing
_decoder = msgspec.msgpack.Decoder(Message)
encode = msgspec.msgpack.encode


def decode(packet: bytes) -> Message:
    try:
        return _decoder.decode(packet)
    except msgspec.MsgspecError as error:
        raise MessageError(str(error)) from None


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where items of these many bytes begin in a bundle, one after the other; its whole size."""
    offsets, end = [], 0
    for size in sizes:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(begin)
        end = begin + size
    return offsets, end


def check_items(items: Sequence[Item], num_bytes: int) -> None:
    """Each item lies within the bundle's ``num_bytes``, aligned."""
    for item in items:
        if item.offset % ALIGNMENT or item.offset + item.num_bytes > num_bytes:
            raise MessageError(f"item {item.key} does not lie within its bundle")


def inbox_path(inboxes: Path, name: str) -> Path:
    """The socket of the prefill engine of this name."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an engine")
    return inboxes / f"{name}.ec.sock"


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def check_peer(connection: socket.socket) -> None:
    """The other end belongs to our own user, or to root."""
    size = PEER_CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    _, uid, _ = PEER_CREDENTIALS.unpack(credentials)
    if uid not in (0, os.geteuid()):
        raise MessageError(f"the peer is user {uid}")
