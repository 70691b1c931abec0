"""Bundles from device to device: slots between outbox and inbox, CUDA's calls on a stand-in."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from easerve.engines.vllm.ec import inbox as inbox_module
from easerve.engines.vllm.ec import outbox as outbox_module
from easerve.engines.vllm.ec.cuda_ipc import CudaDriver, CudaIpcExporter, CudaIpcImporter
from easerve.engines.vllm.ec.inbox import Inbox
from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import (
    VERSION,
    Buffer,
    Hello,
    Item,
    Push,
    Slot,
    encode,
    inbox_path,
    new_socket,
)
from easerve.engines.vllm.ec.outbox import Embedding, Outbox
from easerve.engines.vllm.ec.producer import HostCopies
from easerve.engines.vllm.ec.store import Store
from easerve.engines.vllm.ec.transport import DeviceMemory, exporter_of, opens

torch = pytest.importorskip("torch")
TOKEN, NAME = "secret", "prefill-0"
RING_BYTES = 4096


class FakeDriver:
    """Memory of this process in place of a device's."""

    def __init__(self) -> None:
        self.buffers: dict[int, Any] = {}
        self.log: list[str] = []

    def allocate(self, num_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free(self, pointer: int) -> None:
        del self.buffers[pointer]

    def export(self, pointer: int) -> bytes:
        return pointer.to_bytes(64, "little")

    def open(self, handle: bytes) -> int:
        pointer = int.from_bytes(handle, "little")
        if pointer not in self.buffers:
            raise OSError("cudaIpcOpenMemHandle failed with CUDA error 1")
        self.log.append("open")
        return pointer

    def close(self, pointer: int) -> None:
        self.log.append("close")

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        self.log.append("copy")
        ctypes.memmove(to, source, num_bytes)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def new_stream(self) -> Any:
        return contextlib.nullcontext()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def embeddings(*keys: str, value: float = 1.0, width: int = 8) -> list[Embedding]:
    step = HostCopies({key: torch.full((2, width), float(value)) for key in keys})
    return [step.embedding(key) for key in keys]


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def store() -> Store:
    return Store(1 << 20, 1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return inbox_path(tmp_path, NAME)


@pytest.fixture
def inbox(path: Path, store: Store, driver: FakeDriver) -> Iterator[Inbox]:
    kinds = {"cuda-ipc": lambda buffer: CudaIpcImporter(driver, buffer, "cpu")}
    inbox = Inbox(path, TOKEN, store, kinds)
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(tmp_path: Path, driver: FakeDriver) -> Iterator[Outbox]:
    outbox = Outbox(tmp_path, TOKEN, CudaIpcExporter(driver, RING_BYTES))
    yield outbox
    outbox.close()
    assert not driver.buffers


def way_of(store: Store, key: str) -> type:
    until(lambda: store.get(key))
    placed = store.get(key)
    assert placed is not None
    return type(placed.memory)


def ready(outbox: Outbox, store: Store, key: str = "first") -> None:
    """The first bundle goes by host memory, whatever there is; by then the engine is ready."""
    assert outbox.push(NAME, embeddings(key), time.monotonic_ns())
    assert way_of(store, key) is Memory


def test_a_bundle_goes_from_device_to_device_once_the_engine_is_ready(
    inbox: Inbox, outbox: Outbox, store: Store, driver: FakeDriver
) -> None:
    ready(outbox, store)
    for number in range(100):  # many times round the ring
        keys = [f"{number}-{n}" for n in range(3)]
        assert outbox.push(NAME, embeddings(*keys, value=number), time.monotonic_ns())
        for key in keys:
            assert way_of(store, key) is DeviceMemory
            placed = store.get(key)
            assert placed is not None
            tensor = placed.memory.tensor(placed.item)
            assert torch.equal(tensor, torch.full((2, 8), float(number)))
    assert driver.log[-2:] == ["copy", "synchronize"]
    assert len(store.take_news()[0]) == 101


def test_a_bundle_larger_than_the_buffer_goes_by_host_memory(
    inbox: Inbox, outbox: Outbox, store: Store
) -> None:
    ready(outbox, store)
    assert outbox.push(NAME, embeddings("a", width=RING_BYTES), time.monotonic_ns())
    assert way_of(store, "a") is Memory


def test_bundles_go_by_host_memory_while_nobody_gives_slots_back(
    inbox: Inbox, outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(outbox, store)
    monkeypatch.setattr(inbox_module, "_answer", lambda *_: None)
    ways = []
    for number in range(4):
        key = str(number)
        assert outbox.push(NAME, embeddings(key, width=200), time.monotonic_ns())
        ways.append(way_of(store, key))
    assert ways == [DeviceMemory, DeviceMemory, Memory, Memory]


def test_what_is_read_after_its_life_is_dropped(
    inbox: Inbox, outbox: Outbox, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    ready(outbox, store)
    assert outbox.push(NAME, embeddings("a"), time.monotonic_ns() - 6_000_000_000)
    until(lambda: "read too late" in caplog.text)
    assert store.get("a") is None


def test_an_engine_that_cannot_read_the_buffer_gets_host_memory(
    path: Path, outbox: Outbox, store: Store
) -> None:
    inbox = Inbox(path, TOKEN, store)
    for key in "ab":
        assert outbox.push(NAME, embeddings(key), time.monotonic_ns())
        assert way_of(store, key) is Memory
    inbox.close()


def test_a_buffer_that_does_not_open_is_a_warning(
    inbox: Inbox, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = Outbox(tmp_path, TOKEN, CudaIpcExporter(FakeDriver(), RING_BYTES))
    for key in "ab":
        assert outbox.push(NAME, embeddings(key), time.monotonic_ns())
        assert way_of(store, key) is Memory
    assert "no way to an encoder's device" in caplog.text
    outbox.close()


def test_slots_of_an_engine_that_may_yet_read_them_are_not_used_anew(
    inbox: Inbox, outbox: Outbox, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is slow, not gone: what it was sent it will read."""
    ready(outbox, store)
    with monkeypatch.context() as patch:
        patch.setattr(outbox_module, "_send", _times_out)
        for key in "ab":
            assert not outbox.push(NAME, embeddings(key, width=400), time.monotonic_ns())
    ready(outbox, store, "again")
    ways = []
    for key, width in {"c": 400, "d": 8}.items():
        assert outbox.push(NAME, embeddings(key, width=width), time.monotonic_ns())
        ways.append(way_of(store, key))
    assert ways == [Memory, DeviceMemory]


def _times_out(*_: object) -> None:
    raise TimeoutError


def test_an_engine_that_has_started_again_is_asked_anew(
    path: Path, outbox: Outbox, store: Store, driver: FakeDriver
) -> None:
    kinds = {"cuda-ipc": lambda buffer: CudaIpcImporter(driver, buffer, "cpu")}
    first = Inbox(path, TOKEN, store, kinds)
    ready(outbox, store)
    first.close()
    until(lambda: driver.log[-1] == "close")
    again = Store(1 << 20, 100)
    second = Inbox(path, TOKEN, again, kinds)
    ready(outbox, again)
    assert outbox.push(NAME, embeddings("b"), time.monotonic_ns())
    assert way_of(again, "b") is DeviceMemory
    second.close()


@pytest.mark.parametrize(
    ("buffer", "slot"),
    [
        (None, Slot(5, 0, 64)),
        (Buffer("cuda-ipc", 64, bytes(64)), Slot(5, 0, 64)),
        (Buffer("other", 64, b""), Slot(5, 0, 64)),
        ("ours", Slot(5, RING_BYTES - 64, 128)),
        ("ours", Slot(5, 0, 32)),
    ],
)
def test_a_slot_that_is_not_the_peers_ends_the_connection(
    inbox: Inbox, path: Path, store: Store, driver: FakeDriver, buffer: Any, slot: Slot
) -> None:
    if buffer == "ours":
        buffer = CudaIpcExporter(driver, RING_BYTES).buffer
    push = Push(time.monotonic_ns(), (Item("a", 0, (1, 16), "float32"),), slot)
    with new_socket() as connection:
        connection.connect(str(path))
        connection.settimeout(5)
        connection.send(encode(Hello(VERSION, TOKEN, buffer)))
        connection.send(encode(push))
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(100):
                pass
    assert store.get("a") is None


def test_host_memory_needs_neither_end() -> None:
    assert exporter_of("memfd", 1, "cpu") is None
    assert opens("memfd", "cpu") == {}


def test_an_unknown_transport_is_an_error() -> None:
    for make in (lambda: exporter_of("pigeon", 1, "cpu"), lambda: opens("pigeon", "cpu")):
        with pytest.raises(ValueError, match="no transport 'pigeon'"):
            make()


def test_an_engine_that_talks_nonsense_is_left_and_the_others_are_served(
    inbox: Inbox, outbox: Outbox, store: Store, tmp_path: Path
) -> None:
    with new_socket() as listener:
        listener.bind(str(inbox_path(tmp_path, "other")))
        listener.listen()
        assert outbox.push("other", embeddings("x"), time.monotonic_ns())
        connection, _ = listener.accept()
        with connection:
            connection.send(b"nonsense")
            assert outbox.push(NAME, embeddings("a"), time.monotonic_ns())
            assert way_of(store, "a") is Memory
            for _ in range(2):  # Hello, Push
                connection.recv(1000)
            assert connection.recv(1000) == b""


def fake_runtime() -> Any:
    """The C functions, called as ctypes calls them."""

    def malloc(pointer: Any, num_bytes: Any) -> int:
        pointer._obj.value = 4096
        return 0 if num_bytes.value < 1 << 40 else 2

    def get_handle(handle: Any, pointer: Any) -> int:
        assert pointer.value == 4096
        ctypes.memmove(handle, bytes(range(64)), 64)
        return 0

    def open_handle(pointer: Any, handle: Any, flags: Any) -> int:
        assert bytes(memoryview(handle)) == bytes(range(64))
        pointer._obj.value = 8192
        return 0

    def close(pointer: Any) -> int:
        return 0 if pointer.value == 8192 else 1

    return SimpleNamespace(
        cudaMalloc=malloc,
        cudaIpcGetMemHandle=get_handle,
        cudaIpcOpenMemHandle=open_handle,
        cudaIpcCloseMemHandle=close,
        cudaFree=close,
    )


def test_cudas_calls_have_its_arguments_and_say_what_went_wrong() -> None:
    driver = CudaDriver.__new__(CudaDriver)
    driver._library = fake_runtime()
    pointer = driver.allocate(100)
    handle = driver.export(pointer)
    assert handle == bytes(range(64)), "zeros in it as well"
    driver.close(driver.open(handle))
    with pytest.raises(OSError, match="cudaMalloc failed with CUDA error 2"):
        driver.allocate(1 << 40)
    with pytest.raises(OSError, match="cudaFree failed with CUDA error 1"):
        driver.free(pointer)
