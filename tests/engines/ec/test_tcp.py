import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.vllm.ec import tcp
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import VERSION, Hello, Item, Push, Query, Slot, encode
from easerve.engines.vllm.ec.outbox import Embedding, Outbox
from easerve.engines.vllm.ec.store import Store
from easerve.engines.vllm.ec.tcp import CHALLENGE_BYTES, HEADER, TcpInbox, host_and_port

TOKEN = "secret"


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
def arrived() -> threading.Event:
    return threading.Event()


@pytest.fixture
def inbox(store: Store, arrived: threading.Event) -> Iterator[TcpInbox]:
    inbox = TcpInbox("tcp://127.0.0.1:0", TOKEN, store, arrived)
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    outbox = Outbox(tmp_path, TOKEN)
    yield outbox
    outbox.close()


def address(inbox: TcpInbox) -> str:
    return f"tcp://127.0.0.1:{inbox.port}"


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


def test_a_bundle_goes_to_another_host(
    inbox: TcpInbox, outbox: Outbox, store: Store, arrived: threading.Event
) -> None:
    large = bytes(range(256)) * 10_000
    contents = {"a": b"abcdefgh", "b": large, "c": b"1234"}
    bundle = [embedding(key, content) for key, content in contents.items()]
    assert outbox.push(address(inbox), bundle, 0)
    assert arrived.wait(5)
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


def test_a_push_reaches_an_engine_that_has_started_again(
    outbox: Outbox, store: Store, arrived: threading.Event
) -> None:
    first = TcpInbox("tcp://127.0.0.1:0", TOKEN, Store(1 << 20, 10), arrived)
    where = address(first)
    assert outbox.push(where, [embedding("a")], 0)
    first.close()
    assert not outbox.push(where, [embedding("b")], 0), "nobody is there"
    second = TcpInbox(where, TOKEN, store, arrived)
    assert outbox.push(where, [embedding("c")], 0)
    until(lambda: store.get("c"))
    second.close()


def test_an_encoder_without_the_token_is_refused(
    inbox: TcpInbox, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
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


@pytest.mark.parametrize(
    "content",
    [
        framed(Query(("a",))),
        framed(PUSH, 7) + bytes(7),
        framed(Push(0, PUSH.items, Slot(0, 0, 64)), 8) + bytes(8),
        framed(PUSH, 1 << 40),
        HEADER.pack(1 << 30, 0),
        HEADER.pack(3, 0) + b"\xff" * 3,
    ],
)
def test_what_is_wrong_ends_the_connection_and_no_other(
    inbox: TcpInbox, outbox: Outbox, store: Store, content: bytes
) -> None:
    assert outbox.push(address(inbox), [embedding("b")], 0)
    with socket.create_connection(("127.0.0.1", inbox.port), 5) as connection:
        challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        proof = tcp._answer_of(TOKEN, challenge)
        connection.sendall(framed(Hello(VERSION, proof)) + content)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert store.get("a") is None
    assert outbox.push(address(inbox), [embedding("c")], 0)
    until(lambda: store.get("c"))


@pytest.mark.parametrize("said", [b"", b"x"])
def test_who_stops_within_a_message_is_given_up(
    inbox: TcpInbox, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(tcp, "MAX_WAIT_S", 0.05)
    with socket.create_connection(("127.0.0.1", inbox.port), 5) as connection:
        connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        connection.sendall(said)
        assert connection.recv(1) == b""


def test_there_are_only_so_many_connections(
    inbox: TcpInbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "MAX_CONNECTIONS", 1)
    where = ("127.0.0.1", inbox.port)
    with socket.create_connection(where, 5) as one, socket.create_connection(where, 5) as other:
        assert len(one.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)) == CHALLENGE_BYTES
        assert other.recv(1) == b""
