"""From device to device by NIXL: a prefill engine reads out of the encoder's buffer."""

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import Buffer, MessageError
from easerve.engines.vllm.ec.transport import DeviceMemory

if TYPE_CHECKING:
    import torch

MAX_READ_S = 2.0
POLL_S = 0.00005


class _Descriptor(msgspec.Struct, frozen=True, array_like=True):
    agent: bytes
    address: int
    memory: str
    device: int


def _new_agent(name: str) -> Any:
    from nixl._api import nixl_agent

    return nixl_agent(f"easerve-{name}-{os.getpid()}")


def _memory_of(tensor: "torch.Tensor") -> tuple[str, int]:
    """NIXL's kind of memory, and the number of the device."""
    return ("VRAM", tensor.get_device()) if tensor.is_cuda else ("DRAM", 0)


class NixlExporter:
    def __init__(self, num_bytes: int, device: str) -> None:
        import torch

        self._agent = _new_agent("encoder")
        self._content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._registered = self._agent.register_memory(self._content)

    @property
    def buffer(self) -> Buffer:
        memory, device = _memory_of(self._content)
        descriptor = _Descriptor(
            self._agent.get_agent_metadata(), self._content.data_ptr(), memory, device
        )
        return Buffer("nixl", self._content.numel(), msgspec.msgpack.encode(descriptor))

    def write(self, offset: int, tensors: "list[tuple[int, torch.Tensor]]") -> None:
        import torch

        for place, tensor in tensors:
            content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            begin = offset + place
            self._content[begin : begin + content.numel()].copy_(content)
        if self._content.is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlReader:
    """One agent for all encoders; what is read lands in a registered buffer, then moves on."""

    def __init__(self, device: str) -> None:
        self._agent = _new_agent("prefill")
        self._device = device
        self._lock = threading.Lock()  # of the agent and of where it lands
        self._landings: dict[str, tuple[torch.Tensor, Any]] = {}  # by device; and registered as
        self._abandoned: object = None

    def open(self, buffer: Buffer) -> "NixlImporter":
        try:
            descriptor = msgspec.msgpack.decode(buffer.descriptor, type=_Descriptor)
        except msgspec.MsgspecError as error:
            raise MessageError(str(error)) from None
        with self._lock:
            return NixlImporter(self, self._agent.add_remote_agent(descriptor.agent), descriptor)

    def close(self, peer: str) -> None:
        with self._lock:
            self._agent.remove_remote_agent(peer)

    def read(
        self, peer: str, place: _Descriptor, offset: int, num_bytes: int, *, to_host: bool
    ) -> Memory | DeviceMemory:
        with self._lock:
            to = "cpu" if to_host else self._device
            content = self._landed(peer, place, offset, num_bytes, to)
            if not content.is_cuda:
                return Memory.of([memoryview(content.numpy())])
            import torch

            made = DeviceMemory(content.clone())
            torch.cuda.current_stream().synchronize()  # before the next read lands
            return made

    def _landed(
        self, peer: str, place: _Descriptor, offset: int, num_bytes: int, to: str
    ) -> "torch.Tensor":
        landing = self._landing_of(num_bytes, to)
        memory, device = _memory_of(landing)
        agent = self._agent
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([(landing.data_ptr(), num_bytes, device)], memory),
            agent.get_xfer_descs([(place.address + offset, num_bytes, place.device)], place.memory),
            peer,
        )
        try:
            self._finish(handle)
        except Exception as error:  # NIXL has many kinds
            self._abandoned = self._landings.pop(to)  # something may land there yet
            raise OSError(f"reading by NIXL failed: {error!r}") from None
        finally:
            agent.release_xfer_handle(handle)
        return landing[:num_bytes]

    def _finish(self, handle: Any) -> None:
        until = time.monotonic() + MAX_READ_S
        state = self._agent.transfer(handle)
        while state == "PROC" and time.monotonic() < until:
            time.sleep(POLL_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise TimeoutError(state)

    def _landing_of(self, num_bytes: int, device: str) -> "torch.Tensor":
        import torch

        if device in self._landings and self._landings[device][0].numel() < num_bytes:
            self._agent.deregister_memory(self._landings.pop(device)[1])
        if device not in self._landings:
            landing = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._landings[device] = landing, self._agent.register_memory(landing)
        return self._landings[device][0]


class NixlImporter:
    def __init__(self, reader: NixlReader, peer: str, place: _Descriptor) -> None:
        self._reader, self._peer, self._place = reader, peer, place

    def read(self, offset: int, num_bytes: int, *, to_host: bool) -> Memory | DeviceMemory:
        return self._reader.read(self._peer, self._place, offset, num_bytes, to_host=to_host)

    def close(self) -> None:
        self._reader.close(self._peer)
