"""The calls of the CUDA driver that it takes to divide a GPU. Each is checked (``CudaError``).

Nothing is declared of the library's functions; every argument has its C type where it is passed,
so that any object with functions of these names will do for a library.
"""

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from uuid import UUID

from easerve.engines.partition.sides import DriverError

LIBRARY = "libcuda.so.1"
GREEN_CUDA = 12040
"""The version of the driver's API that brought green contexts."""
SM = 1  # CU_DEV_RESOURCE_TYPE_SM
DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM, required
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, required
NAME_BYTES = 256


class Code(IntEnum):
    """Of CUresult, those that something can be done about."""

    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    STUB_LIBRARY = 34
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    NOT_SUPPORTED = 801
    SYSTEM_DRIVER_MISMATCH = 803
    MPS_CONNECTION_FAILED = 805
    MPS_RPC_FAILURE = 806
    MPS_SERVER_NOT_READY = 807
    MPS_CLIENT_TERMINATED = 810
    INVALID_RESOURCE_TYPE = 914
    INVALID_RESOURCE_CONFIGURATION = 915


_RESTART_MPS = "end every process that uses MPS on this GPU, then start its daemon again"
ADVICE = {
    Code.INVALID_VALUE: "the driver cannot cut this GPU so; update it, or ask for other parts",
    Code.OUT_OF_MEMORY: "every part takes memory; lower the engines' share of it",
    Code.STUB_LIBRARY: "a stub of the driver was loaded; take its folder out of LD_LIBRARY_PATH",
    Code.DEVICE_UNAVAILABLE: "another process has the GPU to itself; use MPS or compute mode "
    "Default",
    Code.NO_DEVICE: "check CUDA_VISIBLE_DEVICES, and that a container is given the GPU",
    Code.INVALID_DEVICE: "check CUDA_VISIBLE_DEVICES",
    Code.NOT_SUPPORTED: "this GPU or its driver has no green contexts; driver 550 brought them",
    Code.SYSTEM_DRIVER_MISMATCH: "the kernel's part of the driver has another version; restart",
    Code.MPS_CONNECTION_FAILED: _RESTART_MPS,
    Code.MPS_RPC_FAILURE: _RESTART_MPS,
    Code.MPS_SERVER_NOT_READY: "MPS recovers from a fault or starts; end its clients, try again",
    Code.MPS_CLIENT_TERMINATED: "a fault ended every client of MPS; start both engines again",
    Code.INVALID_RESOURCE_TYPE: "the driver does not know SMs as a resource; update it",
    Code.INVALID_RESOURCE_CONFIGURATION: "these SMs cannot be one part; or MPS hands out static "
    "partitions and CUDA_MPS_SM_PARTITION is not set",
}


class CudaError(DriverError):
    """``call`` failed with ``code``; the text says what can be done about it, where we know."""

    def __init__(self, call: str, code: int, name: str) -> None:
        advice = f"; {ADVICE[Code(code)]}" if code in ADVICE else ""
        super().__init__(f"{call} failed with {name} ({code}){advice}")
        self.call, self.code = call, code


class Attribute(IntEnum):
    """Of CUdevice_attribute."""

    NUM_SMS = 16
    CAPABILITY_MAJOR = 75
    CAPABILITY_MINOR = 76
    MPS = 133


class Resource(ctypes.Structure):
    """CUdevResource, of which the SMs are read: 144 bytes, ``sm`` at 96 (cuda.h 13.0 and 13.1).

    ``min_part`` and ``alignment`` of a device: SMs of the smallest part, and what every part is a
    multiple of; 0 where the driver does not say.
    """

    _fields_ = (
        ("type", c_uint),
        ("_internal", c_ubyte * 92),
        ("num_sms", c_uint),
        ("min_part", c_uint),
        ("alignment", c_uint),
        ("_more", c_ubyte * 36),
    )


@dataclass(frozen=True, slots=True)
class Device:
    """``index``: among those that the process sees, as torch counts. ``mps``: None: not told."""

    index: int
    handle: int
    name: str
    uuid: str
    capability: tuple[int, int]
    num_sms: int
    mps: bool | None


class Cuda:
    """Raises CudaError, or DriverError where there is no driver or it lacks a call.

    Contexts and streams are their addresses.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = _load() if library is None else library

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise DriverError(
                f"the driver has no {name}; driver 550 (CUDA 12.4) or newer has"
            ) from None
        code = function(*arguments)
        if code:
            raise CudaError(name, code, self._name(code))

    def _name(self, code: int) -> str:
        name = c_char_p()
        self._library.cuGetErrorName(c_int(code), byref(name))
        return (name.value or b"an unknown error").decode()

    # Devices ------------------------------------------------------------------------------------

    def version(self) -> int:
        """Of the driver's API: 13000 for 13.0."""
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return version.value

    def num_devices(self) -> int:
        self._call("cuInit", c_uint(0))
        number = c_int()
        self._call("cuDeviceGetCount", byref(number))
        return number.value

    def device(self, index: int) -> Device:
        self._call("cuInit", c_uint(0))
        handle, name, uuid = c_int(), (c_char * NAME_BYTES)(), (c_ubyte * 16)()
        self._call("cuDeviceGet", byref(handle), c_int(index))
        self._call("cuDeviceGetName", name, c_int(NAME_BYTES), handle)
        self._call("cuDeviceGetUuid_v2", byref(uuid), handle)
        major, minor, num_sms = (
            self._attribute(handle, which)
            for which in (Attribute.CAPABILITY_MAJOR, Attribute.CAPABILITY_MINOR, Attribute.NUM_SMS)
        )
        try:
            mps = bool(self._attribute(handle, Attribute.MPS))
        except CudaError:
            mps = None
        text = f"GPU-{UUID(bytes=bytes(uuid))}"
        return Device(index, handle.value, name.value.decode(), text, (major, minor), num_sms, mps)

    def _attribute(self, handle: c_int, which: Attribute) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(which), handle)
        return value.value

    def retain(self, device: Device) -> None:
        """The primary context, which torch uses too, and every green context needs."""
        self._call("cuDevicePrimaryCtxRetain", byref(c_void_p()), c_int(device.handle))

    def release(self, device: Device) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", c_int(device.handle))

    # Parts --------------------------------------------------------------------------------------

    def sms(self, device: Device) -> Resource:
        """All of them."""
        resource = Resource()
        self._call("cuDeviceGetDevResource", c_int(device.handle), byref(resource), c_int(SM))
        return resource

    def split(self, whole: Resource, num_sms: int) -> tuple[list[Resource], Resource]:
        """Into as many groups as there are of at least ``num_sms``, and what is left over."""
        most = max(1, whole.num_sms // num_sms)
        groups, number, rest = (Resource * most)(), c_uint(most), Resource()
        self._call(
            "cuDevSmResourceSplitByCount",
            groups,
            byref(number),
            byref(whole),
            byref(rest),
            c_uint(0),
            c_uint(num_sms),
        )
        return list(groups)[: number.value], rest

    def create_context(self, device: Device, parts: Sequence[Resource]) -> int:
        """A green context that has all of ``parts``, which come from one split."""
        array = (Resource * len(parts))(*parts)
        descriptor, context = c_void_p(), c_void_p()
        self._call("cuDevResourceGenerateDesc", byref(descriptor), array, c_uint(len(parts)))
        self._call(
            "cuGreenCtxCreate",
            byref(context),
            descriptor,
            c_int(device.handle),
            c_uint(DEFAULT_STREAM),
        )
        return _address(context)

    def num_sms(self, context: int) -> int:
        """Those that it was given."""
        resource = Resource()
        self._call("cuGreenCtxGetDevResource", c_void_p(context), byref(resource), c_int(SM))
        return int(resource.num_sms)

    def create_stream(self, context: int) -> int:
        stream = c_void_p()
        self._call(
            "cuGreenCtxStreamCreate",
            byref(stream),
            c_void_p(context),
            c_uint(NON_BLOCKING),
            c_int(0),
        )
        return _address(stream)

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", c_void_p(stream))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", c_void_p(stream))

    def destroy_context(self, context: int) -> None:
        """After all of its streams."""
        self._call("cuGreenCtxDestroy", c_void_p(context))


def _address(pointer: c_void_p) -> int:
    assert pointer.value is not None
    return pointer.value


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(f"there is no CUDA driver: {error}") from None
