import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvloop

from easerve.engines.vllm import http
from easerve.engines.vllm.http import MAX_UNREAD, HttpError, Pool

PATIENCE_S = 5.0
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Server:
    """On a Unix socket: ``requests`` are what came, ``answer`` is what it does with the next."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.num_connections = self.num_closed = 0
        self.answer: Handler = self.reply(OK)

    def reply(self, *pieces: bytes, close: bool = False) -> Handler:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            if close:
                writer.close()

        return answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                self.requests.append(head + await reader.readexactly(length))
                await self.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_closed += 1
        finally:
            writer.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_unix_server(server.serve, tmp_path / "s")
    yield server
    listening.close()


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Pool]:
    pool = Pool(tmp_path / "s", keepalive_s=60.0)
    yield pool
    await pool.close()
    await asyncio.sleep(0)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_call(server: Server, pool: Pool) -> None:
    assert await pool.call("POST", "/x", b"body", {"a": "b"}) == (200, b"hi")
    (request,) = server.requests
    assert request.startswith(b"POST /x HTTP/1.1\r\n")
    assert b"\r\na: b\r\n" in request
    assert request.endswith(b"\r\ncontent-length: 4\r\n\r\nbody")


async def test_one_after_the_other_is_one_connection(server: Server, pool: Pool) -> None:
    for _ in range(5):
        await pool.call("GET", "/")
    assert server.num_connections == 1


async def test_at_once_is_one_connection_each(server: Server, pool: Pool) -> None:
    await asyncio.gather(*(pool.call("GET", "/") for _ in range(5)))
    assert server.num_connections == 5
    await asyncio.gather(*(pool.call("GET", "/") for _ in range(5)))
    assert server.num_connections == 5


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END, PIECE = b"0\r\n\r\n", MAX_UNREAD // 4
BODIES = {
    "in one piece": ([OK], b"hi"),
    "byte by byte": ([bytes([byte]) for byte in OK], b"hi"),
    "chunked": ([CHUNKED, b"2\r\nhi\r\n", b"3\r\n yo\r\n0\r\n\r\n"], b"hi yo"),
    "large": (
        [CHUNKED, *[b"%x\r\n%b\r\n" % (PIECE, bytes(PIECE))] * 16, END],
        bytes(16 * PIECE),
    ),
    "empty": ([b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], b""),
    "no content": ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"], b""),
}


@pytest.mark.parametrize(("pieces", "body"), BODIES.values(), ids=BODIES)
async def test_bodies_whole_and_streamed(
    server: Server, pool: Pool, pieces: list[bytes], body: bytes
) -> None:
    server.answer = server.reply(*pieces)
    assert await pool.call("GET", "/") == (200, body)
    streamed = [each async for each in pool.stream("/", b"")]
    assert {status for status, _ in streamed} == {200}
    assert b"".join(piece for _, piece in streamed) == body
    assert server.num_connections == 1


async def test_an_error_has_its_status_and_its_body(server: Server, pool: Pool) -> None:
    server.answer = server.reply(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")
    assert await pool.call("GET", "/") == (503, b"")
    assert [each async for each in pool.stream("/", b"")] == [(503, b"")]


async def test_a_connection_that_is_to_be_closed_is_not_used_again(
    server: Server, pool: Pool
) -> None:
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi"
    server.answer = server.reply(closing)
    await pool.call("GET", "/")
    await pool.call("GET", "/")
    assert server.num_connections == 2


async def test_one_that_the_server_has_closed_is_not_used_again(server: Server, pool: Pool) -> None:
    server.answer = server.reply(OK, close=True)
    await pool.call("GET", "/")
    await asyncio.sleep(0.02)
    assert await pool.call("GET", "/") == (200, b"hi")


async def test_one_that_has_been_idle_for_long_is_not_used_again(
    server: Server, tmp_path: Path
) -> None:
    pool = Pool(tmp_path / "s", keepalive_s=0.0)
    await pool.call("GET", "/")
    await pool.call("GET", "/")
    assert server.num_connections == 2
    await pool.close()


BROKEN = {
    "before the reply": (b"", ConnectionResetError),
    "in its headers": (OK[:20], ConnectionResetError),
    "in its body": (OK[:-1], ConnectionResetError),
    "no HTTP": (b"what?\r\n\r\n", HttpError),
}


@pytest.mark.parametrize(("sent", "error"), BROKEN.values(), ids=BROKEN)
async def test_a_reply_that_breaks_off(
    server: Server, pool: Pool, sent: bytes, error: type[Exception]
) -> None:
    server.answer = server.reply(sent, close=True)
    with pytest.raises(error):
        await pool.call("GET", "/")
    with pytest.raises(error):
        async for _ in pool.stream("/", b""):
            pass
    server.answer = server.reply(OK)
    assert await pool.call("GET", "/") == (200, b"hi")


async def test_who_is_cancelled_cancels_the_request(server: Server, pool: Pool) -> None:
    forever = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""  # the connection's end
        server.num_closed += 1
        forever.set()

    server.answer = hang
    call = asyncio.create_task(pool.call("GET", "/"))
    await until(lambda: server.requests)
    call.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await forever.wait()


async def test_who_leaves_a_stream_cancels_the_request(server: Server, pool: Pool) -> None:
    server.answer = server.reply(CHUNKED, b"2\r\nhi\r\n")
    stream = pool.stream("/", b"")
    assert await anext(stream) == (200, b"")
    assert await anext(stream) == (200, b"hi")
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: server.num_closed)


async def test_who_is_cancelled_when_the_reply_has_come_leaves_nothing_behind(
    server: Server, pool: Pool
) -> None:
    """In that very instant: the reply is here, and nobody has taken it."""
    server.answer = server.reply()
    call = asyncio.create_task(pool.call("GET", "/"))
    await until(lambda: server.requests)
    (connection,) = pool._used
    connection.data_received(OK)
    assert connection.complete
    call.cancel()
    await asyncio.wait([call])
    server.answer = server.reply(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nother")
    assert await pool.call("GET", "/") == (200, b"other")


@pytest.mark.parametrize("num_taken", [1, 2])
async def test_who_leaves_a_stream_that_has_ended_leaves_nothing_behind(
    server: Server, pool: Pool, num_taken: int
) -> None:
    chunks = b"2\r\nhi\r\n2\r\nyo\r\n0\r\n\r\n"
    server.answer = server.reply(CHUNKED, chunks)
    stream = pool.stream("/", b"")
    await anext(stream)
    await until(lambda: all(each.complete for each in pool._used))
    for _ in range(num_taken - 1):
        await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    server.answer = server.reply(OK)
    assert await pool.call("GET", "/") == (200, b"hi")


async def test_a_reader_that_is_slow_slows_the_engine_down(server: Server, pool: Pool) -> None:
    piece, sent = b"%x\r\n%b\r\n" % (1 << 16, bytes(1 << 16)), 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(CHUNKED)
        for _number in range(256):
            writer.write(piece)
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")

    server.answer = flood
    stream = pool.stream("/", b"")
    _, first = await anext(stream)
    await asyncio.sleep(0.05)
    held = sent
    await asyncio.sleep(0.05)
    assert sent == held < 128
    size = len(first) + sum([len(piece) async for _, piece in stream])
    assert (sent, size) == (256, 256 << 16)


async def test_nobody_listens(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "nobody", 60.0)
    with pytest.raises(FileNotFoundError):
        await pool.call("GET", "/")


@contextmanager
def deaf(path: Path) -> Iterator[socket.socket]:
    """A socket whose queue of connections is soon full."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        yield listener


# On the loop that serves: asyncio's own takes a full queue for a connection that is being made.


def test_a_full_queue_of_connections_is_waited_for(tmp_path: Path) -> None:
    async def calls() -> None:
        with deaf(tmp_path / "s") as listener:
            pool = Pool(tmp_path / "s", 60.0)
            calls = [asyncio.create_task(pool.call("GET", "/")) for _ in range(4)]
            await asyncio.sleep(0.05)
            assert not any(call.done() for call in calls)  # none has failed
            server = Server()
            listening = await asyncio.start_unix_server(server.serve, sock=listener)
            assert await asyncio.gather(*calls) == [(200, b"hi")] * 4
            listening.close()
            await pool.close()
            await until(lambda: server.num_closed == server.num_connections)

    uvloop.run(calls())


def test_one_that_does_not_listen_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECT_TIMEOUT_S", 0.05)

    async def calls() -> None:
        with deaf(tmp_path / "s"):
            pool = Pool(tmp_path / "s", 60.0)
            calls = [asyncio.create_task(pool.call("GET", "/")) for _ in range(4)]
            done, waiting = await asyncio.wait(calls, timeout=0.5)
            assert {type(call.exception()) for call in done} == {TimeoutError}
            for call in waiting:
                call.cancel()
            await asyncio.wait(waiting)
            await pool.close()

    uvloop.run(calls())


async def test_closing_ends_what_is_under_way(server: Server, tmp_path: Path) -> None:
    pool = Pool(tmp_path / "s", 60.0)
    server.answer = server.reply()
    call = asyncio.create_task(pool.call("GET", "/"))
    await until(lambda: server.requests)
    await pool.close()
    with pytest.raises(ConnectionError):
        await call
    with pytest.raises(ConnectionError):
        await pool.call("GET", "/")
