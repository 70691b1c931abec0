"""The way to a prefill engine on another host: a bundle's bytes follow its message.

The engine begins with a random challenge; the Hello that answers it has the token's HMAC of it in
place of the token. What follows is neither secret nor protected, so the network has to be trusted.
Clocks of hosts differ: a bundle is counted from when its first byte came.
"""

import contextlib
import hmac
import logging
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    ALIGNMENT,
    MAX_MESSAGE_BYTES,
    VERSION,
    Hello,
    Item,
    MessageError,
    Push,
    check_items,
    decode,
    encode,
)
from easerve.engines.vllm.ec.store import Store

logger = logging.getLogger("vllm.easerve.ec.tcp")
ADDRESS = re.compile(r"tcp://([A-Za-z0-9.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
HEADER = struct.Struct("!IQ")  # bytes of the message, bytes that follow it
CHALLENGE_BYTES = 32
MAX_BUNDLE_BYTES = 1 << 30
MAX_CONNECTIONS = 64
MAX_WAIT_S = 2.0  # of an encoder, for a connection and for each item


def host_and_port(address: str) -> tuple[str, int]:
    match = ADDRESS.fullmatch(address)
    if match is None:
        raise ValueError(f"{address!r} is no address: tcp://host:port")
    return match[1].strip("[]"), int(match[2])


def _answer_of(token: str, challenge: bytes | memoryview) -> str:
    return hmac.new(token.encode(), challenge, "sha256").hexdigest()


def _received(connection: socket.socket, num_bytes: int) -> memoryview:
    content = memoryview(bytearray(num_bytes))
    filled = 0
    while filled < num_bytes:
        received = connection.recv_into(content[filled:])
        if not received:
            raise MessageError("the peer hung up")
        filled += received
    return content


class TcpSender:
    """A connection to the engine at ``address``. Raises OSErrors, MessageErrors, ValueErrors."""

    def __init__(self, address: str, token: str) -> None:
        self._connection = socket.create_connection(host_and_port(address), MAX_WAIT_S)
        try:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            challenge = _received(self._connection, CHALLENGE_BYTES)
            packet = encode(Hello(VERSION, _answer_of(token, challenge)))
            self._connection.sendall(HEADER.pack(len(packet), 0) + packet)
        except BaseException:
            self.close()
            raise

    def is_closed(self) -> bool:
        """Whether the engine has hung up: it never says anything after its challenge."""
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def push(
        self, items: Sequence[Item], contents: Sequence[memoryview], num_bytes: int, sent_ns: int
    ) -> None:
        packet = encode(Push(sent_ns, tuple(items)))
        self._connection.sendall(HEADER.pack(len(packet), num_bytes) + packet)
        for number, content in enumerate(contents, 1):
            self._connection.sendall(content)
            if number < len(contents):
                self._connection.sendall(bytes(-content.nbytes % ALIGNMENT))

    def close(self) -> None:
        self._connection.close()


class TcpInbox:
    """Listens at ``address`` and puts what comes into ``store``; a thread per encoder."""

    def __init__(self, address: str, token: str, store: Store, arrived: threading.Event) -> None:
        self._token, self._store, self._arrived = token, store, arrived
        host, port = host_and_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="easerve-ec-tcp")
        self._thread.start()

    def close(self) -> None:
        _hang_up(self._listener)
        self._thread.join()
        with self._lock:
            serving = dict(self._connections)
            for connection in serving:
                _hang_up(connection)
        for thread in serving.values():
            thread.join()

    def _run(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    return
                with self._lock:
                    if len(self._connections) >= MAX_CONNECTIONS:
                        logger.warning("too many connections")
                        connection.close()
                        continue
                    thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                    self._connections[connection] = thread
                    thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._welcome(connection)
            while self._take(connection):
                pass
        except (MessageError, OSError) as error:
            logger.warning("connection given up: %s", str(error))
        except Exception:
            logger.exception("connection given up")
        finally:
            with self._lock:
                del self._connections[connection]
                connection.close()

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(MAX_WAIT_S)
        challenge = secrets.token_bytes(CHALLENGE_BYTES)
        connection.sendall(challenge)
        message, num_bytes, _ = self._message(connection)
        proof = _answer_of(self._token, challenge)
        if num_bytes or not isinstance(message, Hello) or not message.is_welcome(proof):
            raise MessageError("the peer speaks another version or has not our token")

    def _take(self, connection: socket.socket) -> bool:
        """Whether the connection goes on."""
        connection.settimeout(None)  # until the next bundle
        if not connection.recv(1, socket.MSG_PEEK):
            return False
        connection.settimeout(MAX_WAIT_S)
        message, num_bytes, began = self._message(connection)
        if not isinstance(message, Push) or message.slot is not None:
            raise MessageError(f"{type(message).__name__} is not for us")
        if num_bytes > MAX_BUNDLE_BYTES:
            raise MessageError("a bundle is too large")
        check_items(message.items, num_bytes)
        memory = Memory.of([_received(connection, num_bytes)])
        self._store.add(memory, message.items, time.monotonic() - began)
        self._arrived.set()
        return True

    def _message(self, connection: socket.socket) -> tuple[object, int, float]:
        """A message, the bytes that follow it, and when it began."""
        began = time.monotonic()
        size, num_bytes = HEADER.unpack(_received(connection, HEADER.size))
        if size > MAX_MESSAGE_BYTES:
            raise MessageError("a message is too large")
        return decode(bytes(_received(connection, size))), num_bytes, began


def _hang_up(connection: socket.socket) -> None:
    """Whoever waits for something on it wakes up."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
