import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from easerve.engines.partition import gpu
from easerve.engines.partition.cell import Cell
from easerve.engines.partition.gpu import GpuDevice
from easerve.engines.partition.green import PROFILED, GreenDriver, Part
from easerve.engines.partition.probe import Verdict
from easerve.types import Stage


class Graph:
    """Remembers where it was captured; that it is not replayed elsewhere is the device's affair."""

    def __init__(self) -> None:
        self.stream: object = None
        self.replays: list[object] = []


class Event:
    def __init__(self) -> None:
        self.done = False

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.done


class Torch:
    """What of torch.cuda a device calls; nothing is computed."""

    __version__ = "2"

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.events: list[Event] = []
        self.now: object = None
        self.cuda = self
        self.num_streams = 0

    def init(self) -> None: ...

    def synchronize(self) -> None: ...

    def get_device_name(self) -> str:
        return "Card"

    def graph_pool_handle(self) -> object:
        return object()

    def Stream(self) -> str:  # noqa: N802
        self.num_streams += 1
        return f"free {self.num_streams}"

    def Event(self) -> Event:  # noqa: N802
        self.events.append(Event())
        return self.events[-1]

    def CUDAGraph(self) -> Graph:  # noqa: N802
        graph = Graph()
        self.graphs.append(graph)
        graph.replay = lambda: graph.replays.append(self.now)  # type: ignore[attr-defined]
        return graph

    @contextmanager
    def inference_mode(self) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    @contextmanager
    def graph(self, graph: Graph, pool: object, stream: object) -> Iterator[None]:
        graph.stream = stream
        with self.stream(stream):
            yield


class Driver:
    """Streams are named by their part."""

    def __init__(self) -> None:
        self.layout = SimpleNamespace(levels=(8, 16), total=132, granule=8, round=lambda _: 8)
        self.parts = {(Stage.ENCODE, 8): Part("", 8, 0.002, 0.001)}
        self.counts = {(Stage.ENCODE, 8): 8}
        self.idle_sms = 4
        self.confined: list[int] = []
        self.closed = False

    def stream(self, stage: Stage, units: int) -> str:
        return f"{stage} {units}"

    def confine(self, stage: Stage, units: int) -> None:
        self.confined.append(units)

    def close(self) -> None:
        self.closed = True


class Model:
    def __init__(self, _: Torch) -> None:
        self.runs: list[int] = []

    def input(self, size: int) -> int:
        return size

    def __call__(self, size: int) -> None:
        self.runs.append(size)


class Streams:
    def first(self) -> str:
        return "first"

    def current(self) -> str:
        return "home"

    def make_current(self, stream: str) -> None:
        self.now = stream


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(gpu, "_Vit", Model)
    monkeypatch.setattr(gpu, "_LlamaLayer", Model)
    monkeypatch.setattr(gpu, "TorchStreams", Streams)
    return torch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(gpu, "make_driver", lambda: driver)
    return driver


@pytest.fixture
def device(torch: Torch, driver: Driver) -> GpuDevice:
    return GpuDevice()


def test_it_is_named_by_the_card(device: GpuDevice) -> None:
    assert (device.source, device.levels) == ("Card", (8, 16))


def test_work_runs_on_the_part_where_its_graph_was_captured(
    device: GpuDevice, torch: Torch
) -> None:
    device.confine(Stage.ENCODE, 8)
    device.confine(Stage.PREFILL, 16)
    device.encode(4)
    device.prefill(3)
    device.confine(Stage.ENCODE, 0)
    device.encode(4)
    assert [(graph.stream, graph.replays) for graph in torch.graphs] == [
        ("encode 8", ["encode 8"]),
        ("prefill 16", ["prefill 16"] * 3),
        ("free 1", ["free 1"]),
    ]


def test_an_encoder_that_is_preferred_has_the_stream_of_highest_priority(
    device: GpuDevice, torch: Torch
) -> None:
    device.prefer_encode(True)
    device.encode(1)
    device.prefill(1)
    device.prefer_encode(False)
    device.encode(1)
    assert [graph.stream for graph in torch.graphs] == ["first", "free 2", "free 1"]


def test_graphs_are_captured_beforehand_and_once(device: GpuDevice, torch: Torch) -> None:
    device.prepare((1, 2))
    num = 3 * (2 + 1) + 2
    assert len(torch.graphs) == num
    device.confine(Stage.ENCODE, 16)
    device.encode(2)
    assert len(torch.graphs) == num


def test_waiting_ends_with_what_is_done_and_not_yet_seen(device: GpuDevice, torch: Torch) -> None:
    done = device.encode(1)
    device.prefill(1)
    _wait_returns(device, at_once=False)
    torch.events[0].done = True
    _wait_returns(device, at_once=True)
    assert done()
    _wait_returns(device, at_once=False)
    assert done()


def _wait_returns(device: GpuDevice, at_once: bool) -> None:
    seconds = 5.0 if at_once else 0.01
    begin = time.monotonic()
    device.wait(seconds)
    assert (time.monotonic() - begin < seconds) is at_once


def test_closing_ends_the_driver(device: GpuDevice, driver: Driver) -> None:
    device.close()
    assert driver.closed


def test_a_card_tells_what_it_is_before_it_is_divided(
    torch: Torch, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "Cuda", lambda: SimpleNamespace(version=lambda: 13000))
    told = gpu.card()
    assert next(told) == {"source": "Card", "torch": "2"}
    parts = next(told)
    assert (parts["num_sms"], parts["cuda"], parts["granule"]) == (132, 13000, 8)
    assert next(told)["confine_us"] > 0
    assert not driver.closed
    assert list(told) == []
    assert driver.closed


def test_what_parts_cost() -> None:
    found = gpu.creation(cast(GreenDriver, Driver()))
    assert found["context_ms"] == [2.0]
    assert found["stream_ms"] == [1.0]
    assert found["part_sms"] == {"encode 8": 8}
    assert (found["granule"], found["idle_sms"]) == (8, 4)


def test_what_a_switch_costs(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "NUM_SWITCHES", 3)
    driver = Driver()
    found = gpu.switching(cast(GreenDriver, driver))
    assert found.keys() == {"set_stream_us", "confine_us"}
    assert all(value > 0 for value in found.values())
    assert driver.confined == [8, 16, 8, 0]


def test_a_side_proves_with_its_own_driver(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def prove(cell: Cell, stage: Stage, work: object, *, meet_s: float) -> Verdict:
        asked.extend((stage, work, meet_s))
        return Verdict(True, "seen")

    monkeypatch.setattr(gpu, "prove", prove)
    monkeypatch.setattr(gpu, "Gemm", lambda driver, units: (driver, units))
    Cell.create(tmp_path / "cell")
    assert gpu.prove_side(tmp_path / "cell", Stage.PREFILL) == Verdict(True, "seen")
    assert asked == [Stage.PREFILL, (driver, 8), gpu.MEET_S]
    assert driver.closed


def test_a_driver_for_both_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(
        gpu, "GreenDriver", lambda stages, **options: made.update(stages=stages, **options)
    )
    gpu.make_driver()
    assert made == {"stages": (Stage.ENCODE, Stage.PREFILL), "levels": PROFILED}
