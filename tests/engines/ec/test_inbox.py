"""Inbox, outbox and query on real sockets."""

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.vllm.ec import connection as connection_module
from easerve.engines.vllm.ec import inbox as inbox_module
from easerve.engines.vllm.ec.inbox import Inbox
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    VERSION,
    Hello,
    Item,
    MessageError,
    Missing,
    Push,
    Query,
    encode,
    inbox_path,
    new_socket,
)
from easerve.engines.vllm.ec.outbox import Embedding, Outbox
from easerve.engines.vllm.ec.query import missing_items
from easerve.engines.vllm.ec.store import Store

TOKEN, NAME = "secret", "prefill-0"


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def embedding(key: str, content: bytes = b"abcdefgh") -> Embedding:
    tensor: Any = content  # that nobody looks at
    shape = (1, len(content) // 4)
    return Embedding(key, shape, "float32", tensor, lambda: memoryview(content))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return inbox_path(tmp_path, NAME)


@pytest.fixture
def store() -> Store:
    return Store(1 << 20, 1000)


@pytest.fixture
def inbox(path: Path, store: Store) -> Iterator[Inbox]:
    inbox = Inbox(path, TOKEN, store)
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    outbox = Outbox(tmp_path, TOKEN)
    yield outbox
    outbox.close()


def content_of(store: Store, key: str) -> bytes:
    placed = store.get(key)
    assert placed is not None
    assert isinstance(placed.memory, Memory)
    begin = placed.item.offset
    return placed.memory.mapping[begin : begin + placed.item.num_bytes]


def test_a_bundle_is_one_arrival_and_its_items_are_there(
    inbox: Inbox, outbox: Outbox, store: Store
) -> None:
    sent_ns = time.monotonic_ns()
    assert outbox.push(NAME, [embedding("a"), embedding("b", b"12345678" * 20)], sent_ns)
    assert inbox.arrived.wait(5)
    assert content_of(store, "a") == b"abcdefgh"
    assert content_of(store, "b") == b"12345678" * 20
    ((num_items, num_bytes, usable_s),) = store.take_news()[0]
    assert (num_items, num_bytes) == (2, 64 + 160)
    assert 0 < usable_s < 5


def test_more_items_than_a_message_may_have_are_several_bundles(
    inbox: Inbox, outbox: Outbox, store: Store
) -> None:
    keys = [f"k{n}" for n in range(MAX_ITEMS + 1)]
    assert outbox.push(NAME, [embedding(key) for key in keys], 0)
    until(lambda: not store.missing(keys))
    assert [arrival.num_items for arrival in store.take_news()[0]] == [MAX_ITEMS, 1]


def test_several_encoders_push_at_once(inbox: Inbox, tmp_path: Path, store: Store) -> None:
    def pushes(encoder: int) -> None:
        outbox = Outbox(tmp_path, TOKEN)
        for number in range(50):
            assert outbox.push(NAME, [embedding(f"{encoder}-{number}")], 0)
        outbox.close()

    threads = [threading.Thread(target=pushes, args=(encoder,)) for encoder in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not store.missing(f"{e}-{n}" for e in range(4) for n in range(50)))


def test_no_descriptor_is_left_behind(inbox: Inbox, tmp_path: Path, store: Store) -> None:
    before = open_descriptors()
    outbox = Outbox(tmp_path, TOKEN)
    for _ in range(50):
        outbox.push(NAME, [embedding("a")], 0)
    outbox.close()
    until(lambda: store.get("a") and open_descriptors() == before + 1)
    assert content_of(store, "a") == b"abcdefgh"


def test_the_socket_is_its_owners_alone_and_goes_at_the_end(path: Path, store: Store) -> None:
    path.write_text("left by one that was killed")
    inbox = Inbox(path, TOKEN, store)
    assert path.stat().st_mode & 0o777 == 0o600
    inbox.close()
    assert not path.exists()


def test_an_engine_that_ends_late_leaves_its_successors_socket(path: Path, store: Store) -> None:
    first = Inbox(path, TOKEN, store)
    second = Inbox(path, TOKEN, store)
    first.close()
    assert path.exists()
    second.close()


def test_a_push_reaches_an_engine_that_has_started_again(
    path: Path, outbox: Outbox, store: Store
) -> None:
    first = Inbox(path, TOKEN, Store(1 << 20, 1000))
    assert outbox.push(NAME, [embedding("a")], 0)
    first.close()
    assert not outbox.push(NAME, [embedding("b")], 0), "nobody is there"
    second = Inbox(path, TOKEN, store)
    assert outbox.push(NAME, [embedding("c")], 0)
    until(lambda: not store.missing(["c"]))
    second.close()
    third = Inbox(path, TOKEN, store)
    assert outbox.push(NAME, [embedding("d")], 0), "without having noticed"
    until(lambda: not store.missing(["d"]))
    third.close()


def test_an_encoder_that_starts_again_is_a_new_connection(
    inbox: Inbox, tmp_path: Path, store: Store
) -> None:
    for key in "ab":
        outbox = Outbox(tmp_path, TOKEN)
        assert outbox.push(NAME, [embedding(key)], 0)
        outbox.close()
    until(lambda: not store.missing("ab"))


@pytest.mark.parametrize("destination", ["nobody", "../x", ""])
def test_a_bundle_for_nobody_is_dropped_with_a_word(
    outbox: Outbox, caplog: pytest.LogCaptureFixture, destination: str
) -> None:
    assert not outbox.push(destination, [embedding("a")], 0)
    assert "a" in caplog.text


def test_an_engine_that_does_not_read_holds_the_encoder_up_only_so_long(
    path: Path, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_HANDOVER_S", 0.05)
    with new_socket() as listener:
        listener.bind(str(path))
        listener.listen()
        begin = time.monotonic()
        for _ in range(10_000):
            if not outbox.push(NAME, [embedding("a")], 0):
                break
        else:
            raise AssertionError
        assert time.monotonic() - begin < 3


# What a peer may not do -----------------------------------------------------------------------


def connect(path: Path, token: str | None = TOKEN, version: int = VERSION) -> socket.socket:
    connection = new_socket()
    connection.connect(str(path))
    connection.settimeout(5)
    if token is not None:
        connection.send(encode(Hello(version, token)))
    return connection


def was_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


PUSH = Push(0, (Item("a", 0, (1, 2), "float32"),))


def memfd(content: bytes = b"12345678") -> int:
    memory = Memory.of([memoryview(content)])
    return os.dup(memory.fd)


@pytest.mark.parametrize(
    ("token", "version"), [("wrong", VERSION), ("", VERSION), (TOKEN, VERSION + 1)]
)
def test_who_has_not_our_token_or_version_is_refused(
    inbox: Inbox, path: Path, store: Store, token: str, version: int
) -> None:
    with connect(path, token, version) as connection:
        assert was_ended(connection)


@pytest.mark.parametrize("message", [PUSH, Query(("a",))])
def test_nothing_goes_before_hello(inbox: Inbox, path: Path, store: Store, message: object) -> None:
    with connect(path, token=None) as connection:
        descriptor = memfd()
        socket.send_fds(connection, [encode(message)], [descriptor])
        os.close(descriptor)
        assert was_ended(connection)
    assert store.missing("a") == ("a",)


WRONG: dict[str, tuple[bytes, Callable[[], list[int]]]] = {
    "garbage": (b"\xff" * 10, list),
    "too large": (bytes(MAX_MESSAGE_BYTES + 1), list),
    "no memory": (encode(PUSH), list),
    "not sealed": (encode(PUSH), lambda: [os.memfd_create("x", os.MFD_ALLOW_SEALING)]),
    "too small": (encode(PUSH), lambda: [memfd(b"1234567")]),
    "two descriptors": (encode(PUSH), lambda: [memfd(), memfd()]),
    "an answer": (encode(Missing(())), list),
}


@pytest.mark.parametrize(("packet", "descriptors"), WRONG.values(), ids=WRONG)
def test_a_wrong_message_ends_its_connection_and_no_other(
    inbox: Inbox,
    path: Path,
    store: Store,
    outbox: Outbox,
    caplog: pytest.LogCaptureFixture,
    packet: bytes,
    descriptors: Callable[[], list[int]],
) -> None:
    assert outbox.push(NAME, [embedding("b")], 0)
    until(lambda: not store.missing("b"))
    before = open_descriptors()
    with caplog.at_level(logging.WARNING), connect(path) as connection:
        given = descriptors()
        socket.send_fds(connection, [packet], given)
        for descriptor in given:
            os.close(descriptor)
        assert was_ended(connection)
    assert "connection given up" in caplog.text
    until(lambda: open_descriptors() == before)
    assert store.missing("a") == ("a",)
    assert outbox.push(NAME, [embedding("c")], 0)
    until(lambda: not store.missing("c"))


def test_an_unexpected_failure_ends_the_connection_only(
    inbox: Inbox, path: Path, store: Store, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, connect(path) as connection:
        patch.setattr(connection_module, "decode", lambda _: 1 / 0)
        connection.send(encode(PUSH))
        assert was_ended(connection)
    assert outbox.push(NAME, [embedding("c")], 0)
    until(lambda: not store.missing("c"))


def test_there_are_only_so_many_connections(
    inbox: Inbox, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module, "MAX_CONNECTIONS", 1)
    with connect(path), connect(path, token=None) as second:
        assert was_ended(second)


# Query ----------------------------------------------------------------------------------------


async def test_the_engine_says_what_it_lacks(
    inbox: Inbox, path: Path, outbox: Outbox, store: Store
) -> None:
    outbox.push(NAME, [embedding("b")], 0)
    await asyncio.to_thread(until, lambda: not store.missing("b"))
    keys = ["a", "b", *(f"k{n}" for n in range(MAX_ITEMS))]
    missing = await missing_items(path, TOKEN, keys)
    assert missing == tuple(key for key in keys if key != "b")


async def test_an_engine_that_refuses_has_no_answer(inbox: Inbox, path: Path) -> None:
    with pytest.raises(OSError, match=r"hung up|reset|Broken pipe"):
        await missing_items(path, "wrong", ["a"])


@pytest.mark.parametrize("exists", [True, False])
async def test_an_engine_that_is_gone_has_no_answer(path: Path, exists: bool) -> None:
    if exists:
        with new_socket() as left:
            left.bind(str(path))
    with pytest.raises(OSError, match=r"refused|No such file"):
        await missing_items(path, TOKEN, ["a"])


@pytest.mark.parametrize("packet", [b"\xff", encode(Query(("a",)))])
async def test_an_answer_that_is_none_is_an_error(path: Path, packet: bytes) -> None:
    def answers(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.recv(1000)
            connection.send(packet)

    with new_socket() as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=answers, args=(listener,))
        thread.start()
        with pytest.raises(MessageError):
            await missing_items(path, TOKEN, ["a"])
        thread.join()
