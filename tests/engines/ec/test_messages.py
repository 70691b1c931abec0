import contextlib
import random
import socket
from pathlib import Path

import pytest

from easerve.engines.vllm.ec.messages import (
    ALIGNMENT,
    MAX_ITEMS,
    MAX_MESSAGE_BYTES,
    VERSION,
    Hello,
    Item,
    MessageError,
    Missing,
    Push,
    Query,
    check_items,
    check_peer,
    decode,
    encode,
    inbox_path,
    layout,
)

ITEM = Item("k", 64, (2, 8), "float32")


@pytest.mark.parametrize(
    "message", [Hello(VERSION, "t"), Push(5, (ITEM,)), Query(("k",)), Missing(())]
)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    assert decode(encode(message)) == message


def test_the_largest_messages_fit_a_packet() -> None:
    key, most = "k" * 200, 1 << 40
    items = tuple(Item(key, most, (most, most), "bfloat16") for _ in range(MAX_ITEMS))
    for message in (Push(1 << 62, items), Missing((key,) * MAX_ITEMS)):
        packet = encode(message)
        assert decode(packet) == message
        assert len(packet) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "packet",
    [
        b"",
        b"\xc1",
        encode(5),
        encode({"type": "other"}),
        encode({"type": "hello", "version": 1}),
        encode(Hello(1, "t" * 1001)),
        encode(Push(5, ())),
        encode(Push(5, (ITEM,) * (MAX_ITEMS + 1))),
        encode(Push("now", (ITEM,))),  # type: ignore[arg-type]
        encode(Push(5, (Item("", 0, (1, 1), "float32"),))),
        encode(Push(5, (Item("k" * 201, 0, (1, 1), "float32"),))),
        encode(Push(5, (Item("k", -64, (1, 1), "float32"),))),
        encode(Push(5, (Item("k", 0, (0, 1), "float32"),))),
        encode(Push(5, (Item("k", 0, (1 << 41, 1), "float32"),))),
        encode(Push(5, (Item("k", 0, (1, 1, 1), "float32"),))),  # type: ignore[arg-type]
        encode(Push(5, (Item("k", 0, (1, 1), "object"),))),  # type: ignore[arg-type]
        encode(Query(("k",) * (MAX_ITEMS + 1))),
    ],
)
def test_what_is_malformed_or_too_large_is_an_error(packet: bytes) -> None:
    with pytest.raises(MessageError):
        decode(packet)


def test_no_bytes_at_all_make_it_fail_in_another_way() -> None:
    draw = random.Random(0)
    valid = encode(Push(5, (ITEM,)))
    for _ in range(2000):
        packet = bytearray(valid)
        for _ in range(draw.randrange(1, 4)):
            packet[draw.randrange(len(packet))] = draw.randrange(256)
        with contextlib.suppress(MessageError):
            decode(bytes(packet[: draw.randrange(len(packet) + 1)]))


def test_only_the_token_and_the_version_are_welcome() -> None:
    assert Hello(VERSION, "sécret").is_welcome("sécret")
    assert not Hello(VERSION, "secre").is_welcome("secret")
    assert not Hello(VERSION + 1, "secret").is_welcome("secret")


def test_items_are_laid_out_one_after_the_other_and_aligned() -> None:
    assert layout([10, 64, 65, 1]) == ([0, 64, 128, 256], 257)
    assert layout([]) == ([], 0)


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_an_item_ends_within_its_bundle(dtype: str, size: int) -> None:
    item = Item("k", ALIGNMENT, (3, 5), dtype)  # type: ignore[arg-type]
    assert item.num_bytes == 15 * size
    check_items([item], ALIGNMENT + 15 * size)
    with pytest.raises(MessageError, match="k does not lie within"):
        check_items([item], ALIGNMENT + 15 * size - 1)


def test_an_item_that_is_not_aligned_is_an_error() -> None:
    with pytest.raises(MessageError):
        check_items([Item("k", 4, (1, 1), "float32")], 100)


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "prefill-0\n", "x" * 3 + "."])
def test_a_name_cannot_lead_out_of_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        inbox_path(Path("/run"), name)


def test_an_inbox_has_its_engines_name() -> None:
    assert inbox_path(Path("/run"), "prefill-0") == Path("/run/prefill-0.ec.sock")


def test_a_peer_of_our_own_user_is_fine_and_another_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = socket.socketpair()
    with one, other:
        check_peer(one)
        monkeypatch.setattr(
            "easerve.engines.vllm.ec.messages.PEER_CREDENTIALS", _Credentials(12345)
        )
        with pytest.raises(MessageError, match="user 12345"):
            check_peer(one)


class _Credentials:
    size = 12

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def unpack(self, _: bytes) -> tuple[int, int, int]:
        return 1, self._uid, 1
