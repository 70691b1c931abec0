import socket
from collections.abc import Iterator

import pytest

from easerve.peer import Peer


@pytest.fixture
def ends() -> Iterator[tuple[Peer, socket.socket]]:
    """A peer and the other end of its socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Peer(ours), theirs


def test_what_one_sends_the_other_receives(ends: tuple[Peer, socket.socket]) -> None:
    peer, other = ends
    Peer(other).send({"text": "line\nbreak", "number": 1})
    assert peer.receive() == [{"text": "line\nbreak", "number": 1}]


def test_joined_lines_are_messages_of_their_own(ends: tuple[Peer, socket.socket]) -> None:
    peer, other = ends
    other.sendall(b'{"a": 1}\n{"b": 2}\n')
    assert peer.receive() == [{"a": 1}, {"b": 2}]


def test_a_split_line_waits_for_its_rest(ends: tuple[Peer, socket.socket]) -> None:
    peer, other = ends
    other.sendall(b'{"a": 1}\n{"b"')
    assert peer.receive() == [{"a": 1}]
    other.sendall(b": ")
    assert peer.receive() == []
    other.sendall(b'2}\n{"c": 3}\n')
    assert peer.receive() == [{"b": 2}, {"c": 3}]


def test_a_message_may_be_larger_than_one_read(ends: tuple[Peer, socket.socket]) -> None:
    peer, other = ends
    text = "x" * 100_000
    Peer(other).send({"text": text})
    received = [peer.receive(), peer.receive()]
    assert received == [[], [{"text": text}]]


def test_a_closed_peer_is_none_whatever_it_left_unfinished(
    ends: tuple[Peer, socket.socket],
) -> None:
    peer, other = ends
    other.sendall(b'{"a"')
    other.close()
    assert peer.receive() == []
    assert peer.receive() is None


def test_sending_to_a_closed_peer_is_no_error(ends: tuple[Peer, socket.socket]) -> None:
    peer, other = ends
    other.close()
    peer.send({"a": 1})
    peer.send({"a": 2})
    assert peer.receive() is None
