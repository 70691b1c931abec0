"""HTTP to an engine on this host: requests over pooled connections on its Unix socket.

An engine gets several calls for each request and sends a small piece for each token, so this is
where a router's time goes. The parser is httptools, on asyncio's transports: about a quarter of the
CPU time that a general HTTP client takes. It knows what it talks to: HTTP/1.1, no redirects, no
cookies, no compression, and replies that are trusted to fit into memory.

What goes wrong on the way is an OSError, or an HttpError for what is no HTTP.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import cast

import httptools

CONNECT_TIMEOUT_S = 5.0
BUSY_S = 0.005
MAX_UNREAD = 1 << 18  # bytes of a stream that wait for their reader; then the engine has to wait
NO_HEADERS: Mapping[str, str] = {}


class HttpError(Exception):
    """What came is no HTTP, or no reply to what was asked."""


class Pool:
    """Connections to one socket. A call has one to itself; then another can have it.

    ``keepalive_s``: how long an idle one is kept. It must be less than the server keeps it.
    """

    def __init__(self, socket: Path, keepalive_s: float) -> None:
        self._socket, self._keepalive_s = str(socket), keepalive_s
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._used: set[_Connection] = set()
        self._closed = False

    async def call(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[int, bytes]:
        """Status and body of the reply. Who is cancelled meanwhile cancels the request."""
        connection = await self._take()
        pieces = []
        try:
            connection.send(method, path, body, headers)
            while not connection.complete:
                await connection.more()
                pieces.append(connection.take())  # or a large one would wait for its reader
            return connection.status, b"".join(pieces)
        finally:
            self._give_back(connection)

    async def stream(self, path: str, body: bytes) -> AsyncIterator[tuple[int, bytes]]:
        """Post; then the status with what has come since the last piece, again and again.

        Leaving before the whole reply has come closes the connection, which cancels the request.
        """
        connection = await self._take()
        try:
            connection.send("POST", path, body, NO_HEADERS)
            while not connection.status:
                await connection.more()
            yield connection.status, connection.take()  # an empty one has a status, too
            while True:
                if piece := connection.take():
                    yield connection.status, piece
                elif connection.complete:
                    return
                else:
                    await connection.more()
        finally:
            self._give_back(connection)

    async def close(self) -> None:
        """Close all connections, in the midst of what they do."""
        self._closed = True
        for connection in [*self._used, *(each for _, each in self._idle)]:
            connection.abort()
        self._idle.clear()

    async def _take(self) -> "_Connection":
        """The one that was used last: the others can grow old."""
        if self._closed:
            raise ConnectionError("the connections are closed")
        oldest = time.monotonic() - self._keepalive_s
        while self._idle and self._idle[0][0] < oldest:
            self._idle.popleft()[1].abort()
        connection: _Connection | None = None
        while self._idle and connection is None:
            _, last = self._idle.pop()
            connection = last if last.reusable else None
        connection = connection or await self._connect()
        self._used.add(connection)
        return connection

    def _give_back(self, connection: "_Connection") -> None:
        self._used.discard(connection)
        if connection.reusable and not self._closed:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.abort()

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while True:
                try:
                    return (await loop.create_unix_connection(_Connection, self._socket))[1]
                except BlockingIOError:  # more are waiting there than its queue takes
                    await asyncio.sleep(BUSY_S)


class _Connection(asyncio.Protocol):
    """One request at a time. httptools calls the ``on_`` methods."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._lost: Exception | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._num_unread = 0
        self._keeps_alive = True
        self.status, self.complete = 0, True

    @property
    def reusable(self) -> bool:
        """Whether it can take another request: nothing of the last one is under way or left."""
        return (
            self.complete
            and not self._body
            and self._transport is not None
            and not self._transport.is_closing()
            and self._keeps_alive
        )

    def send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.status, self.complete = 0, False
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: engine\r\ncontent-type: application/json\r\n"
            f"{lines}content-length: {len(body)}\r\n\r\n"
        )
        if self._transport is None:
            raise self._lost or ConnectionResetError("the connection is closed")
        self._transport.writelines([head.encode(), body])

    async def more(self) -> None:
        """Wait for something new. Raises what ended the connection."""
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> bytes:
        """What of the body has come and has not been taken."""
        if not self._body:
            return b""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body, self._num_unread = [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return body

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, error: Exception) -> None:
        if self._lost is None:
            self._lost = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._lost)

    # asyncio's side -----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but not by class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.complete:
            self._end(exc or ConnectionResetError("the engine closed the connection"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(HttpError(str(error)))
            self.abort()
            return
        self._wake()
        if self._num_unread > MAX_UNREAD and not self.complete and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    # httptools' side ----------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._num_unread += len(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self._keeps_alive = self._parser.should_keep_alive()
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
