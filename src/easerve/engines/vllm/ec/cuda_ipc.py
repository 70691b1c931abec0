"""From device to device on one host: the encoder's buffer, mapped by CUDA into other processes."""

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING, Any

from easerve.engines.vllm.ec.memory import Memory
from easerve.engines.vllm.ec.messages import Buffer
from easerve.engines.vllm.ec.transport import DeviceMemory

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64
ANY_DIRECTION = 4  # CUDA sees it from the addresses
LAZY_PEER_ACCESS = 1
LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """The few calls of the CUDA runtime that it takes, on the current device."""

    def __init__(self) -> None:
        import torch

        torch.cuda.init()  # it has loaded the library that it was built with
        self._library = _loaded()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()  # else torch takes it for one of its own
            raise OSError(f"{name} failed with CUDA error {code}")

    def allocate(self, num_bytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        assert pointer.value is not None
        return pointer.value

    def free(self, pointer: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(pointer))

    def export(self, pointer: int) -> bytes:
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(pointer))
        return bytes(memoryview(handle))

    def open(self, handle: bytes) -> int:
        pointer = ctypes.c_void_p()
        given = _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(LAZY_PEER_ACCESS)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), given, flags)
        assert pointer.value is not None
        return pointer.value

    def close(self, pointer: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Within the current stream of torch."""
        self._call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(to),
            ctypes.c_void_p(source),
            ctypes.c_size_t(num_bytes),
            ctypes.c_int(ANY_DIRECTION),
            ctypes.c_void_p(self._stream().cuda_stream),
        )

    def synchronize(self) -> None:
        self._stream().synchronize()

    def new_stream(self) -> Any:
        import torch

        return torch.cuda.stream(torch.cuda.Stream())

    def _stream(self) -> Any:
        import torch

        return torch.cuda.current_stream()


def _loaded() -> ctypes.CDLL:
    """The CUDA runtime that the process has already, else one that is installed."""
    for mode in (os.RTLD_NOLOAD | os.RTLD_NOW, os.RTLD_NOW):
        for name in LIBRARIES:
            with contextlib.suppress(OSError):
                return ctypes.CDLL(name, mode=mode)
    raise OSError("there is no CUDA runtime library")


class CudaIpcExporter:
    def __init__(self, driver: Any, num_bytes: int) -> None:
        self._driver, self._num_bytes = driver, num_bytes
        self._pointer = driver.allocate(num_bytes)

    @property
    def buffer(self) -> Buffer:
        return Buffer("cuda-ipc", self._num_bytes, self._driver.export(self._pointer))

    def write(self, offset: int, tensors: "list[tuple[int, torch.Tensor]]") -> None:
        for place, tensor in tensors:
            content = tensor.detach().contiguous()
            to = self._pointer + offset + place
            self._driver.copy(to, content.data_ptr(), content.nbytes)
        self._driver.synchronize()

    def close(self) -> None:
        self._driver.free(self._pointer)


class CudaIpcImporter:
    """Reads in a stream of its own, whose memory is kept apart by torch's allocator."""

    def __init__(self, driver: Any, buffer: Buffer, device: str) -> None:
        if len(buffer.descriptor) != HANDLE_BYTES:
            raise ValueError("the buffer has no handle of CUDA's")
        self._driver, self._device = driver, device
        self._pointer = driver.open(buffer.descriptor)
        self._stream = driver.new_stream()

    def read(self, offset: int, num_bytes: int, *, to_host: bool) -> Memory | DeviceMemory:
        import torch

        device = "cpu" if to_host else self._device
        with self._stream:
            content = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._driver.copy(content.data_ptr(), self._pointer + offset, num_bytes)
            self._driver.synchronize()
        return Memory.of([memoryview(content.numpy())]) if to_host else DeviceMemory(content)

    def close(self) -> None:
        self._driver.close(self._pointer)
