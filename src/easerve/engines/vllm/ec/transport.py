"""How a bundle may go from device to device: what every such way offers.

The encoder copies a bundle into a slot of a buffer on its device; a prefill engine reads the slot
and gives it back. Nothing of it is needed: without it, and whenever the buffer is full, bundles go
by host memory.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from easerve.engines.vllm.ec.memory import Memory, view_of
from easerve.engines.vllm.ec.messages import Buffer, Item, Slot

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.easerve.ec.transport")


class DeviceMemory:
    """A bundle in a tensor of bytes on a prefill engine's device."""

    def __init__(self, content: "torch.Tensor") -> None:
        self._content = content
        self.num_bytes = content.numel()

    def tensor(self, item: Item) -> "torch.Tensor":
        if self._content.is_cuda:
            import torch

            # Its memory may not be used anew before the step that reads it is through.
            self._content.record_stream(torch.cuda.current_stream())
        return view_of(self._content[item.offset : item.offset + item.num_bytes], item)


class Exporter(Protocol):
    """The encoder's end: a buffer that others may read, as ``buffer`` says."""

    @property
    def buffer(self) -> Buffer: ...

    def write(self, offset: int, tensors: "list[tuple[int, torch.Tensor]]") -> None:
        """Copy tensors to their places behind ``offset``; done when it returns."""
        ...

    def close(self) -> None: ...


class Importer(Protocol):
    """A prefill engine's end of one encoder's buffer."""

    def read(self, offset: int, num_bytes: int, *, to_host: bool) -> Memory | DeviceMemory: ...

    def close(self) -> None: ...


def read(importer: Importer, slot: Slot, *, to_host: bool) -> Memory | DeviceMemory:
    """What is in the slot; in host memory where the engine's device has no room for it."""
    import torch

    if not to_host:
        try:
            return importer.read(slot.offset, slot.num_bytes, to_host=False)
        except torch.OutOfMemoryError:
            logger.warning("no room on the device for a bundle of %d bytes", slot.num_bytes)
    return importer.read(slot.offset, slot.num_bytes, to_host=True)


Open = Callable[[Buffer], Importer]


def exporter_of(transport: str, num_bytes: int, device: str) -> Exporter | None:
    match transport:
        case "cuda-ipc":
            from easerve.engines.vllm.ec.cuda_ipc import CudaDriver, CudaIpcExporter

            return CudaIpcExporter(CudaDriver(), num_bytes)
        case "nixl":
            from easerve.engines.vllm.ec.nixl import NixlExporter

            return NixlExporter(num_bytes, device)
        case "memfd":
            return None
    raise ValueError(f"there is no transport {transport!r}")


def opens(transport: str, device: str) -> dict[str, Open]:
    """The ways in which a prefill engine can read an encoder's buffer, by kind."""
    match transport:
        case "cuda-ipc":
            from easerve.engines.vllm.ec.cuda_ipc import CudaDriver, CudaIpcImporter

            driver: Any = CudaDriver()
            return {transport: lambda buffer: CudaIpcImporter(driver, buffer, device)}
        case "nixl":
            from easerve.engines.vllm.ec.nixl import NixlReader

            return {transport: NixlReader(device).open}
        case "memfd":
            return {}
    raise ValueError(f"there is no transport {transport!r}")
