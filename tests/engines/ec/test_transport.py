"""Bundles from device to device: slots between outbox and inbox, CUDA's calls on a stand-in."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from easerve.engines.vllm.ec import nixl, tcp
from easerve.engines.vllm.ec import ring as ring_module
from easerve.engines.vllm.ec.connection import UnixConnection, connect
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
from easerve.engines.vllm.ec.ring import Ring
from easerve.engines.vllm.ec.store import Store
from easerve.engines.vllm.ec.tcp import TcpConnection, TcpListener
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


class Exporter(CudaIpcExporter):
    """Of a kind that is read from other hosts as well."""

    @property
    def buffer(self) -> Buffer:
        return replace(super().buffer, kind="nixl")


class Importer(CudaIpcImporter):
    """Reads once it may; ``fails`` at that, on the device or at all."""

    may_read = threading.Event()
    fails: Exception | None = None
    also_to_host = False

    def read(self, offset: int, num_bytes: int, *, to_host: bool) -> Memory | DeviceMemory:
        assert self.may_read.wait(5)
        if self.fails is not None and (self.also_to_host or not to_host):
            raise self.fails
        return super().read(offset, num_bytes, to_host=to_host)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def store() -> Store:
    return Store(1 << 20, 1000)


@pytest.fixture
def importer() -> type[Importer]:
    class Own(Importer):
        may_read = threading.Event()

    Own.may_read.set()
    return Own


Start = Callable[..., tuple[Inbox, str]]


@pytest.fixture(params=["within a host", "between hosts"])
def start(
    request: pytest.FixtureRequest, tmp_path: Path, driver: FakeDriver, importer: type[Importer]
) -> Iterator[Start]:
    """Starts an engine: its inbox, and what an encoder calls it."""
    inboxes = []

    def start(store: Store, place: str = "tcp://127.0.0.1:0", **more: Any) -> tuple[Inbox, str]:
        opens = {"nixl": lambda buffer: importer(driver, buffer, "cpu")}
        is_near = request.param == "within a host"
        where = inbox_path(tmp_path, NAME) if is_near else place
        inbox = Inbox(where, TOKEN, store, opens, **more)
        inboxes.append(inbox)
        if isinstance(inbox.listener, TcpListener):
            return inbox, f"tcp://127.0.0.1:{inbox.listener.port}"
        return inbox, NAME

    yield start
    for inbox in inboxes:
        inbox.close()


@pytest.fixture
def destination(start: Start, store: Store) -> str:
    return start(store)[1]


@pytest.fixture
def outbox(tmp_path: Path, driver: FakeDriver) -> Iterator[Outbox]:
    outbox = Outbox(tmp_path, TOKEN, Exporter(driver, RING_BYTES))
    yield outbox
    outbox.close()
    assert not driver.buffers


def way_of(store: Store, key: str) -> type:
    until(lambda: store.get(key))
    placed = store.get(key)
    assert placed is not None
    return type(placed.memory)


def ready(outbox: Outbox, store: Store, destination: str, key: str = "first") -> None:
    """The first bundle goes by host memory, whatever there is; by then the engine is ready."""
    assert outbox.push(destination, embeddings(key), time.monotonic_ns())
    assert way_of(store, key) is Memory


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_bundle_goes_from_device_to_device_once_the_engine_is_ready(
    outbox: Outbox, store: Store, driver: FakeDriver, destination: str
) -> None:
    ready(outbox, store, destination)
    for number in range(100):  # many times round the ring
        keys = [f"{number}-{n}" for n in range(3)]
        assert outbox.push(destination, embeddings(*keys, value=number), time.monotonic_ns())
        for key in keys:
            assert way_of(store, key) is DeviceMemory
            placed = store.get(key)
            assert placed is not None
            tensor = placed.memory.tensor(placed.item)
            assert torch.equal(tensor, torch.full((2, 8), float(number)))
    assert driver.log[-2:] == ["copy", "synchronize"]
    arrivals = store.take_news()[0]
    assert len(arrivals) == 101
    assert all(0 < arrival.usable_s < 5 for arrival in arrivals)


def test_a_bundle_larger_than_the_buffer_goes_by_host_memory(
    outbox: Outbox, store: Store, destination: str
) -> None:
    ready(outbox, store, destination)
    assert outbox.push(destination, embeddings("a", width=RING_BYTES), time.monotonic_ns())
    assert way_of(store, "a") is Memory


def test_bundles_go_by_host_memory_while_nobody_gives_slots_back(
    outbox: Outbox, store: Store, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready(outbox, store, destination)
    monkeypatch.setattr(Ring, "give_back", lambda *_: None)
    ways = []
    for number in range(4):
        key = str(number)
        assert outbox.push(destination, embeddings(key, width=200), time.monotonic_ns())
        ways.append(way_of(store, key))
    assert ways == [DeviceMemory, DeviceMemory, Memory, Memory]


def test_an_engine_that_reads_nothing_for_long_is_left_and_uses_nothing_of_it(
    outbox: Outbox,
    store: Store,
    destination: str,
    importer: type[Importer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ready(outbox, store, destination)
    importer.may_read.clear()
    assert outbox.push(destination, embeddings("a", width=400), time.monotonic_ns())
    monkeypatch.setattr(ring_module, "SLOT_LIFE_NS", 20_000_000)
    time.sleep(0.03)
    assert outbox.push(destination, embeddings("b"), time.monotonic_ns())
    assert f"{destination} reads nothing" in caplog.text
    assert way_of(store, "b") is Memory, "on a new connection"
    importer.may_read.set()
    until(lambda: "read too late" in caplog.text)
    assert store.get("a") is None
    time.sleep(0.03)
    assert outbox.push(destination, embeddings("c", width=400), time.monotonic_ns())
    assert way_of(store, "c") is DeviceMemory, "where the other was"


def test_an_engine_that_has_read_all_is_not_left_after_a_pause(
    outbox: Outbox,
    store: Store,
    destination: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ready(outbox, store, destination)
    assert outbox.push(destination, embeddings("a"), time.monotonic_ns())
    assert way_of(store, "a") is DeviceMemory
    monkeypatch.setattr(ring_module, "SLOT_LIFE_NS", 20_000_000)
    time.sleep(0.05)
    assert outbox.push(destination, embeddings("b"), time.monotonic_ns())
    assert way_of(store, "b") is DeviceMemory
    assert not caplog.records


def test_an_engine_that_cannot_read_the_buffer_gets_host_memory(
    tmp_path: Path, outbox: Outbox, store: Store
) -> None:
    inbox = Inbox(inbox_path(tmp_path, NAME), TOKEN, store)
    for key in "ab":
        assert outbox.push(NAME, embeddings(key), time.monotonic_ns())
        assert way_of(store, key) is Memory
    inbox.close()


def test_a_buffer_that_does_not_open_is_one_short_warning(
    destination: str, tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a device that the engine does not see."""
    outbox = Outbox(tmp_path, TOKEN, Exporter(FakeDriver(), RING_BYTES))
    for key in "abc":
        assert outbox.push(destination, embeddings(key), time.monotonic_ns())
        assert way_of(store, key) is Memory
    (record,) = caplog.records
    assert "host memory" in record.getMessage()
    assert "CUDA error 1" in record.getMessage()
    assert record.exc_info is None
    outbox.close()


def test_while_the_store_is_full_of_what_requests_hold_slots_are_read_to_the_host(
    outbox: Outbox, start: Start
) -> None:
    store = Store(200, 1000)
    _, destination = start(store, device_bytes=200)
    ready(outbox, store, destination)
    store.hold("request", ["first", *"abcde"])
    ways = []
    for key in "abcde":  # 64 bytes each, as the first
        assert outbox.push(destination, embeddings(key, value=ord(key)), time.monotonic_ns())
        ways.append(way_of(store, key))
        placed = store.get(key)
        assert placed is not None
        assert (placed.memory.tensor(placed.item) == ord(key)).all()
    assert ways == [DeviceMemory, DeviceMemory, DeviceMemory, Memory, Memory]
    store.release("request")
    assert outbox.push(destination, embeddings("f"), time.monotonic_ns())
    assert way_of(store, "f") is DeviceMemory


def test_a_device_without_room_is_spared_and_the_slot_given_back(
    outbox: Outbox, store: Store, destination: str, importer: type[Importer]
) -> None:
    ready(outbox, store, destination)
    importer.fails = torch.OutOfMemoryError("CUDA out of memory.")
    for key in "abcd":  # two at a time fit the buffer
        assert outbox.push(destination, embeddings(key, width=200), time.monotonic_ns())
        assert way_of(store, key) is Memory
        until(lambda: not given_out(outbox))


def given_out(outbox: Outbox) -> int:
    outbox._take_answers()
    return sum(slot.free_ns is None for slot in outbox._ring._slots)


def test_a_slot_that_cannot_be_read_at_all_is_given_back_and_the_connection_ends(
    outbox: Outbox,
    store: Store,
    destination: str,
    importer: type[Importer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    ready(outbox, store, destination)
    importer.fails, importer.also_to_host = OSError("reading by NIXL ended in ERR"), True
    assert outbox.push(destination, embeddings("a"), time.monotonic_ns())
    until(lambda: "ended in ERR" in caplog.text)
    until(lambda: not given_out(outbox) and not outbox._peers)
    assert outbox._ring.take(RING_BYTES, "anyone") is not None
    ready(outbox, store, destination, "again")


def test_a_push_that_fails_leaves_nothing_behind_and_one_line(
    outbox: Outbox,
    store: Store,
    destination: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ready(outbox, store, destination)
    for times in range(3):
        before = open_descriptors()
        with monkeypatch.context() as patch:
            patch.setattr(Exporter, "write", _fails)
            assert not outbox.push(destination, embeddings("a", width=400), time.monotonic_ns())
        until(lambda: open_descriptors() <= before - 2)  # noqa: B023 (both ends)
        ready(outbox, store, destination, f"again-{times}")
        with monkeypatch.context() as patch:
            patch.setattr(UnixConnection, "send", _fails)
            patch.setattr(TcpConnection, "send", _fails)
            large = embeddings("a", width=4000)
            assert not outbox.push(destination, large, time.monotonic_ns())
        until(lambda: open_descriptors() <= before - 1)  # noqa: B023
        ready(outbox, store, destination, f"and-again-{times}")
    assert not given_out(outbox)
    assert outbox.push(destination, embeddings("b", width=400), time.monotonic_ns())
    assert way_of(store, "b") is DeviceMemory
    lines = [r.getMessage() for r in caplog.records if r.name.endswith("outbox")]
    assert len(lines) == 6
    assert all("\n" not in line and "1 from a on" in line for line in lines)


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("it does not\nwork")


def test_an_engine_that_has_started_again_is_asked_anew(
    start: Start, outbox: Outbox, store: Store, driver: FakeDriver
) -> None:
    first, destination = start(store)
    ready(outbox, store, destination)
    first.close()
    until(lambda: driver.log[-1] == "close")
    again = Store(1 << 20, 100)
    start(again, destination)
    ready(outbox, again, destination)
    assert outbox.push(destination, embeddings("b"), time.monotonic_ns())
    assert way_of(again, "b") is DeviceMemory


def test_an_encoder_that_is_lost_takes_its_buffer_along(
    tmp_path: Path, destination: str, store: Store, driver: FakeDriver, importer: type[Importer]
) -> None:
    outbox = Outbox(tmp_path, TOKEN, Exporter(driver, RING_BYTES))
    ready(outbox, store, destination)
    importer.may_read.clear()
    assert outbox.push(destination, embeddings("a"), time.monotonic_ns())
    outbox.close()
    importer.may_read.set()
    until(lambda: driver.log[-1] == "close")
    assert store.get("a") is None


@pytest.mark.parametrize(
    ("buffer", "slot"),
    [
        (None, Slot(5, 0, 64)),
        (Buffer("nixl", 64, bytes(64)), Slot(5, 0, 64)),
        (Buffer("other", 64, b""), Slot(5, 0, 64)),
        ("ours", Slot(5, RING_BYTES - 64, 128)),
        ("ours", Slot(5, 0, 32)),
    ],
)
def test_a_slot_that_is_not_the_peers_ends_the_connection(
    start: Start, store: Store, driver: FakeDriver, tmp_path: Path, buffer: Any, slot: Slot
) -> None:
    if buffer == "ours":
        buffer = Exporter(driver, RING_BYTES).buffer
    _, destination = start(store)
    push = Push(time.monotonic_ns(), (Item("a", 0, (1, 16), "float32"),), slot)
    is_near = destination == NAME
    end = connect(inbox_path(tmp_path, NAME)) if is_near else tcp.connect(destination)
    end.send(Hello(VERSION, end.proof(TOKEN, is_engine=False), buffer))
    end.send(push)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while end.is_readable(5) and end.receive():
            pass
    end.close()
    assert store.get("a") is None


def test_what_is_read_to_the_host_needs_nothing_on_the_device(driver: FakeDriver) -> None:
    exporter = CudaIpcExporter(driver, RING_BYTES)
    exporter.write(64, [(0, torch.arange(16, dtype=torch.uint8))])
    memory = CudaIpcImporter(driver, exporter.buffer, "meta").read(64, 16, to_host=True)
    assert isinstance(memory, Memory)
    assert memory.mapping[:] == bytes(range(16))


class FakeAgent:
    """As of NIXL; a read copies nothing and ends in ``state``."""

    state = "DONE"

    def __init__(self) -> None:
        self.registered: list[Any] = []

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def register_memory(self, tensor: Any) -> Any:
        self.registered.append(tensor)
        return tensor

    def deregister_memory(self, tensor: Any) -> None:
        self.registered = [one for one in self.registered if one is not tensor]

    def get_xfer_descs(self, places: list[tuple[int, int, int]], _: str) -> object:
        return places

    def initialize_xfer(self, *given: object) -> object:
        return given

    def transfer(self, _: object) -> str:
        if self.state == "gone":
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return self.state

    check_xfer_state = transfer

    def release_xfer_handle(self, handle: object) -> None: ...


@pytest.mark.parametrize("state", ["PROC", "ERR", "gone"])
def test_where_a_read_by_nixl_failed_no_other_lands(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """It may go on and write there at any time."""
    agent = FakeAgent()
    monkeypatch.setattr(nixl, "_new_agent", lambda _: agent)
    monkeypatch.setattr(nixl, "MAX_READ_S", 0.01)
    descriptor = encode((b"encoder", 0, "VRAM", 0))
    importer = nixl.NixlReader("cpu").open(Buffer("nixl", 4096, descriptor))
    importer.read(0, 64, to_host=False)
    importer.read(0, 32, to_host=True)
    assert len(agent.registered) == 1, "used again"
    importer.read(0, 128, to_host=True)
    assert [len(tensor) for tensor in agent.registered] == [128]
    agent.state = state
    with pytest.raises(OSError, match="reading by NIXL failed"):
        importer.read(0, 64, to_host=True)
    agent.state = "DONE"
    importer.read(0, 64, to_host=True)
    first, second = agent.registered
    assert first.data_ptr() != second.data_ptr()


def test_host_memory_needs_neither_end() -> None:
    assert exporter_of("memfd", 1, "cpu") is None
    assert opens("memfd", "cpu") == {}


def test_an_unknown_transport_is_an_error() -> None:
    for make in (lambda: exporter_of("pigeon", 1, "cpu"), lambda: opens("pigeon", "cpu")):
        with pytest.raises(ValueError, match="no transport 'pigeon'"):
            make()


def test_an_engine_that_talks_nonsense_is_left_and_the_others_are_served(
    destination: str, outbox: Outbox, store: Store, tmp_path: Path
) -> None:
    with new_socket() as listener:
        listener.bind(str(inbox_path(tmp_path, "other")))
        listener.listen()
        assert outbox.push("other", embeddings("x"), time.monotonic_ns())
        connection, _ = listener.accept()
        with connection:
            connection.send(b"nonsense")
            assert outbox.push(destination, embeddings("a"), time.monotonic_ns())
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
        cudaGetLastError=lambda: 0,
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
