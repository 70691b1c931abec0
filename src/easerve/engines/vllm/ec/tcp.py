"""The way to a prefill engine on another host: messages with their sizes before them.

The engine begins with a random challenge; the Hello that answers it has the token's HMAC of it in
place of the token. What follows is neither secret nor protected, so the network has to be trusted.
A bundle goes by NIXL where both ends can, else its bytes follow its message. Clocks of hosts
differ: a bundle is counted from when its first byte came.
"""

import hmac
import re
import secrets
import socket
import struct
import time

from msgspec.structs import replace

from easerve.engines.vllm.ec.connection import MAX_WAIT_S, Connection, hang_up
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    MAX_MESSAGE_BYTES,
    Message,
    MessageError,
    Push,
    decode,
    encode,
)

ADDRESS = re.compile(r"tcp://([A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
HEADER = struct.Struct("!IQ")  # bytes of the message, bytes that follow it
CHALLENGE_BYTES = 32
MAX_BUNDLE_BYTES = 1 << 30
RESET = struct.pack("2i", 1, 0)  # linger not at all: what was not sent is dropped


def host_and_port(address: str) -> tuple[str, int]:
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is no address: tcp://host:port")
    return match[1].strip("[]"), int(match[2])


class TcpConnection(Connection):
    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, MAX_WAIT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def proof(self, token: str, *, is_engine: bool) -> str:
        if is_engine:
            challenge = secrets.token_bytes(CHALLENGE_BYTES)
            self._socket.sendall(challenge)
        else:
            challenge = bytes(self._received(CHALLENGE_BYTES))
        return hmac.new(token.encode(), challenge, "sha256").hexdigest()

    def send(self, message: Message, memory: Memory | None = None) -> None:
        packet = encode(message)
        num_bytes = memory.num_bytes if memory is not None else 0
        self._socket.sendall(HEADER.pack(len(packet), num_bytes) + packet)
        if memory is not None:
            with open(memory.fd, "rb", closefd=False) as content:
                self._socket.sendfile(content)

    def receive(self) -> tuple[Message, Memory | None] | None:
        if not self._socket.recv(1, socket.MSG_PEEK):
            return None
        began_ns = time.monotonic_ns()
        size, num_bytes = HEADER.unpack(self._received(HEADER.size))
        if size > MAX_MESSAGE_BYTES or num_bytes > MAX_BUNDLE_BYTES * self.takes_bundles:
            raise MessageError("a message is too large")
        message = decode(bytes(self._received(size)))
        if isinstance(message, Push):
            message = replace(message, sent_ns=began_ns)
        elif num_bytes:
            raise MessageError("only a bundle has bytes after it")
        return message, Memory.of([self._received(num_bytes)]) if num_bytes else None

    def _received(self, num_bytes: int) -> memoryview:
        content = memoryview(bytearray(num_bytes))
        filled = 0
        while filled < num_bytes:
            received = self._socket.recv_into(content[filled:])
            if not received:
                raise MessageError("the peer hung up within a message")
            filled += received
        return content

    def close(self, *, at_once: bool = False) -> None:
        if at_once:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        super().close()


class TcpListener:
    def __init__(self, address: str) -> None:
        host, port = host_and_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port: int = self._socket.getsockname()[1]

    def accept(self) -> Connection:
        return TcpConnection(self._socket.accept()[0])

    def hang_up(self) -> None:
        hang_up(self._socket)

    def close(self) -> None:
        self._socket.close()


def connect(address: str) -> Connection:
    return TcpConnection(socket.create_connection(host_and_port(address), MAX_WAIT_S))
