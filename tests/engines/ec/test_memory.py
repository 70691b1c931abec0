import fcntl
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from easerve.engines.vllm.ec.memory import MAX_PIECES, Memory
from easerve.engines.vllm.ec.messages import Item, MessageError, layout


def memory_of(*contents: bytes) -> Memory:
    return Memory.of([memoryview(content) for content in contents])


def test_contents_are_where_the_layout_says() -> None:
    contents = [bytes([n % 256]) * (n % 200 + 1) for n in range(2 * MAX_PIECES)]
    memory = memory_of(*contents)
    offsets, num_bytes = layout([len(content) for content in contents])
    assert memory.num_bytes == num_bytes
    for offset, content in zip(offsets, contents, strict=True):
        assert memory.mapping[offset : offset + len(content)] == content


def test_a_write_that_ends_early_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.writev

    def writes_little(fd: int, pieces: list[memoryview]) -> int:
        return write(fd, [pieces[0][:7]])

    monkeypatch.setattr(os, "writev", writes_little)
    assert memory_of(b"a" * 70, b"b" * 3).mapping[:] == b"a" * 70 + bytes(58) + b"b" * 3


def test_nobody_can_change_it_any_more() -> None:
    memory = memory_of(b"abc")
    for change in (
        lambda: os.write(memory.fd, b"x"),
        lambda: os.ftruncate(memory.fd, 0),
        lambda: os.ftruncate(memory.fd, 1 << 20),
    ):
        with pytest.raises(PermissionError):
            change()
    memory.mapping[0] = 0  # a reader's own copy
    assert os.pread(memory.fd, 3, 0) == b"abc"


def test_sealed_memory_is_received() -> None:
    memory = memory_of(b"abc")
    assert Memory.received(os.dup(memory.fd)).mapping[:] == b"abc"


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW])
def test_memory_that_may_change_is_refused_and_closed(seals: int) -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(MessageError, match="no sealed memory"):
        Memory.received(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_file_is_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(MessageError, match="no sealed memory"):
        Memory.received(os.open(tmp_path / "file", os.O_RDWR))


def test_the_descriptor_goes_with_its_owner() -> None:
    memory = memory_of(b"abc")
    fd = memory.fd
    mapping = memory.mapping
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert mapping[:] == b"abc", "what is mapped stays"


def _read_in_child(connection: Connection) -> None:
    memory = pickle.loads(connection.recv_bytes())
    connection.send_bytes(memory.mapping[:])


def test_another_process_opens_it_by_proc() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_read_in_child, args=(theirs,))
    child.start()
    memory = memory_of(b"abc" * 1000)
    ours.send_bytes(pickle.dumps(memory))
    assert ours.poll(30)
    assert ours.recv_bytes() == b"abc" * 1000
    child.join()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_tensor_is_the_memory_and_keeps_its_mapping(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    values = torch.arange(12, dtype=getattr(torch, dtype)).view(3, 4)
    content = values.view(torch.uint8).numpy().tobytes()
    memory = memory_of(b"x", content)
    tensor = memory.tensor(Item("k", 64, (3, 4), dtype))  # type: ignore[arg-type]
    assert torch.equal(tensor, values)
    memory.mapping[64 : 64 + len(content)] = bytes(len(content))
    assert not tensor.any(), "nothing was copied"
    del memory
    assert tensor.sum() == 0
