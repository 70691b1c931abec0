import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.vllm.ec import inbox as inbox_module
from easerve.engines.vllm.ec import tcp
from easerve.engines.vllm.ec.inbox import Inbox
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    VERSION,
    Buffer,
    Hello,
    Item,
    Missing,
    Push,
    Query,
    Ready,
    Slot,
    encode,
)
from easerve.engines.vllm.ec.outbox import Embedding, Outbox
from easerve.engines.vllm.ec.store import Store
from easerve.engines.vllm.ec.tcp import (
    CHALLENGE_BYTES,
    HEADER,
    TcpConnection,
    TcpListener,
    host_and_port,
)

TOKEN = "secret"
BUFFER = Buffer("cuda-ipc", 4096, bytes(64))


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def embedding(key: str, content: bytes = b"abcdefgh") -> Embedding:
    tensor: Any = content
    shape = (1, len(content) // 4)
    return Embedding(key, shape, "float32", tensor, lambda: memoryview(content))


@pytest.fixture
def store() -> Store:
    return Store(1 << 24, 1000)


@pytest.fixture
def inbox(store: Store) -> Iterator[Inbox]:
    inbox = Inbox("tcp://127.0.0.1:0", TOKEN, store)
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    outbox = Outbox(tmp_path, TOKEN)
    yield outbox
    outbox.close()


def port(inbox: Inbox) -> int:
    assert isinstance(inbox.listener, TcpListener)
    return inbox.listener.port


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def address(inbox: Inbox) -> str:
    return f"tcp://127.0.0.1:{port(inbox)}"


@pytest.mark.parametrize(
    ("text", "parts"),
    [("tcp://a-b.c:80", ("a-b.c", 80)), ("tcp://[::1]:5", ("::1", 5))],
)
def test_an_address_is_a_host_and_a_port(text: str, parts: tuple[str, int]) -> None:
    assert host_and_port(text) == parts


@pytest.mark.parametrize("text", ["a:80", "tcp://a", "tcp://:80", "tcp://a/b:80", "tcp://a:80\n"])
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="is no address"):
        host_and_port(text)


def test_a_bundle_goes_to_another_host(inbox: Inbox, outbox: Outbox, store: Store) -> None:
    large = bytes(range(256)) * 10_000
    contents = {"a": b"abcdefgh", "b": large, "c": b"1234"}
    bundle = [embedding(key, content) for key, content in contents.items()]
    assert outbox.push(address(inbox), bundle, 0)
    assert inbox.arrived.wait(5)
    for key, content in contents.items():
        placed = store.get(key)
        assert placed is not None
        assert isinstance(placed.memory, Memory)
        begin = placed.item.offset
        assert placed.memory.mapping[begin : begin + placed.item.num_bytes] == content
    ((num_items, num_bytes, usable_s),) = store.take_news()[0]
    assert (num_items, num_bytes) == (3, 64 + len(large) + 4)
    assert 0 < usable_s < 5
    assert outbox.push(address(inbox), [embedding("d")], 0)
    until(lambda: store.get("d"))


def test_a_push_reaches_an_engine_that_has_started_again(outbox: Outbox, store: Store) -> None:
    first = Inbox("tcp://127.0.0.1:0", TOKEN, Store(1 << 20, 10))
    where = address(first)
    assert outbox.push(where, [embedding("a")], 0)
    first.close()
    assert not outbox.push(where, [embedding("b")], 0), "nobody is there"
    second = Inbox(where, TOKEN, store)
    assert outbox.push(where, [embedding("c")], 0)
    until(lambda: store.get("c"))
    second.close()


def test_an_encoder_without_the_token_is_refused(
    inbox: Inbox, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(tmp_path, "other")
    outbox.push(address(inbox), [embedding("a")], 0)
    until(lambda: "has not our token" in caplog.text)
    assert store.get("a") is None
    outbox.close()


def framed(message: object, num_bytes: int = 0) -> bytes:
    packet = encode(message)
    return HEADER.pack(len(packet), num_bytes) + packet


PUSH = Push(0, (Item("a", 0, (1, 2), "float32"),))


def said(inbox: Inbox, *contents: bytes, token: str | None = TOKEN) -> tuple[bytes, bool]:
    """What the engine answers to this, and whether it hangs up."""
    with socket.create_connection(("127.0.0.1", port(inbox)), 5) as end:
        connection = TcpConnection(end)
        proof = connection.proof(token or "", is_engine=False)
        hello = framed(Hello(VERSION, proof, BUFFER)) if token is not None else b""
        with contextlib.suppress(ConnectionError):
            end.sendall(hello + b"".join(contents))
        answer = b""
        try:
            while received := end.recv(1000):
                answer += received
        except TimeoutError:
            return answer, False
        except ConnectionResetError:
            pass
        return answer, True


@pytest.mark.parametrize(
    "content",
    [
        framed(Ready()),
        framed(PUSH),
        framed(PUSH, 7) + bytes(7),
        framed(Push(0, PUSH.items, Slot(0, 0, 64))),
        framed(Push(0, PUSH.items, Slot(0, 0, 64)), 8) + bytes(8),
        framed(PUSH, 1 << 40),
        framed(Query(("a",)), 8) + bytes(8),
        HEADER.pack(1 << 30, 0),
        HEADER.pack(3, 0) + b"\xff" * 3,
    ],
)
def test_what_is_wrong_ends_the_connection_and_no_other(
    inbox: Inbox, outbox: Outbox, store: Store, content: bytes
) -> None:
    assert outbox.push(address(inbox), [embedding("b")], 0)
    assert said(inbox, content)[1]
    assert store.get("a") is None
    assert outbox.push(address(inbox), [embedding("c")], 0)
    until(lambda: store.get("c"))


@pytest.mark.parametrize("content", [framed(PUSH, 8) + bytes(8), framed(PUSH, 1 << 29)])
def test_nothing_goes_before_hello(inbox: Inbox, store: Store, content: bytes) -> None:
    begin = time.monotonic()
    assert said(inbox, content, token=None) == (b"", True)
    assert time.monotonic() - begin < 1, "it does not wait for the bytes"
    assert store.get("a") is None


def test_an_engine_on_another_host_says_what_it_lacks(
    inbox: Inbox, outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_WAIT_S", 0.2)
    assert outbox.push(address(inbox), [embedding("a")], 0)
    until(lambda: store.get("a"))
    assert said(inbox, framed(Query(("a", "b")))) == (framed(Missing(("b",))), False)


def test_a_buffer_of_cudas_is_not_read_from_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "MAX_WAIT_S", 0.2)
    opened: list[object] = []
    opens: Any = {"cuda-ipc": opened.append}
    inbox = Inbox("tcp://127.0.0.1:0", TOKEN, Store(1 << 20, 10), opens)
    assert said(inbox) == (b"", False)
    assert not opened
    inbox.close()


@pytest.mark.parametrize("content", [b"", b"x"])
def test_who_stops_within_a_message_is_given_up(
    inbox: Inbox, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(tcp, "MAX_WAIT_S", 0.05)
    with socket.create_connection(("127.0.0.1", port(inbox)), 5) as connection:
        connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        connection.sendall(content)
        assert connection.recv(1) == b""


def test_an_encoder_may_say_nothing_for_long(
    inbox: Inbox, outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_WAIT_S", 0.05)
    assert outbox.push(address(inbox), [embedding("a")], 0)
    connection = outbox._peers[address(inbox)].connection
    time.sleep(0.2)
    begin = time.monotonic()
    assert outbox.push(address(inbox), [embedding("b")], 0)
    assert time.monotonic() - begin < 0.05, "it does not wait for answers"
    assert outbox._peers[address(inbox)].connection is connection
    until(lambda: store.get("b"))


def test_an_engine_that_does_not_read_is_given_up(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_WAIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert not outbox.push(where, [embedding("a")], 0), "it has sent no challenge"
        ends = [listener.accept()[0]]

        def accepts() -> None:
            ends.append(listener.accept()[0])
            ends[-1].sendall(bytes(CHALLENGE_BYTES))

        thread = threading.Thread(target=accepts)
        thread.start()
        before = open_descriptors()
        assert not outbox.push(where, [embedding("a", bytes(64 << 20))], 0)
        thread.join()
        assert ends[1].recv(1), "it was told, but not all"
        with contextlib.suppress(ConnectionResetError):
            while ends[1].recv(1 << 20):
                pass
            raise AssertionError("what it has not read yet is gone")
        assert open_descriptors() == before + 1, "the engine's end"
        for end in ends:
            end.close()


def test_there_are_only_so_many_connections(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "MAX_CONNECTIONS", 1)
    where = ("127.0.0.1", port(inbox))
    with socket.create_connection(where, 5) as one, socket.create_connection(where, 5) as other:
        assert len(one.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        assert other.recv(1) == b""
