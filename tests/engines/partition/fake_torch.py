"""As much of torch as dividing a GPU needs, on no GPU: streams, and products that are counted."""

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any


class Stream:
    def __init__(self, name: str, torch: "FakeTorch") -> None:
        self.name, self.torch = name, torch

    def wait_stream(self, other: "Stream") -> None:
        self.torch.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.torch.log.append(f"synchronize {self.name}")


class FakeTorch(ModuleType):
    bfloat16 = "bfloat16"

    def __init__(self) -> None:
        super().__init__("torch")
        self.log: list[str] = []
        self.now = Stream("home", self)
        self.cuda = SimpleNamespace(
            current_stream=self._current,
            set_stream=self._set,
            ExternalStream=lambda address, device: Stream(f"{address} on {device}", self),
            Stream=lambda device, priority: Stream(f"new on {device}, {priority}", self),
            synchronize=lambda index: self.log.append(f"synchronize {index}"),
            stream=self._within,
        )

    def device(self, kind: str, index: int) -> str:
        return f"{kind}:{index}"

    def _current(self, device: str = "cuda:0") -> Stream:
        assert device.startswith("cuda:")
        return self.now

    def _set(self, stream: Stream) -> None:
        self.log.append(f"set {stream.name}")
        self.now = stream

    @contextlib.contextmanager
    def _within(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def zeros(self, rows: int, columns: int, dtype: str, device: int | str) -> str:
        return f"zeros {rows} by {columns} {dtype} on {device}"

    def empty(self, rows: int, columns: int, dtype: str, device: int) -> str:
        return f"empty {rows} by {columns} {dtype} on {device}"

    def mm(self, left: Any, right: Any, out: Any = None) -> None:
        self.log.append(f"multiply in {self.now.name}")
