"""Stand-ins for libcuda and for torch's streams: what they do with SMs, and what was asked."""

# ruff: noqa: N802 (the names are the driver's)

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from easerve.engines.partition.cuda import SM, Attribute, Resource

FIRST_SM, MASK_BYTES = 8, 84  # where the fake keeps a resource's SMs, as a bit mask


def mask_of(resource: Resource) -> int:
    return int.from_bytes(bytes(resource._internal)[FIRST_SM : FIRST_SM + MASK_BYTES], "little")


def fill(resource: Resource, sms: Sequence[int], granule: int, alignment: int) -> None:
    mask = sum(1 << sm for sm in sms)
    internal = bytes(FIRST_SM) + mask.to_bytes(MASK_BYTES, "little")
    resource._internal[:] = list(internal)
    resource.type, resource.num_sms = (SM if sms else 0), len(sms)
    resource.min_part, resource.alignment = granule, alignment


class Error(NamedTuple):
    code: int
    name: bytes


class FakeCuda:
    """A driver with one GPU. ``fail``: the error of the named call, or of its nth (from 0).

    ``merges_rest`` False: a remainder cannot be in one part with others. ``given``: how many SMs a
    part really gets, of those that were asked for.
    """

    def __init__(
        self,
        num_sms: int = 132,
        min_part: int = 8,
        alignment: int = 8,
        version: int = 13000,
        capability: tuple[int, int] = (9, 0),
        merges_rest: bool = True,
        given: Callable[[int], int] = lambda asked: asked,
    ) -> None:
        self.num_sms, self.min_part, self.alignment = num_sms, min_part, alignment
        self.version, self.capability = version, capability
        self.merges_rest, self.given = merges_rest, given
        self.fail: dict[str, Error] = {}
        self.fail_nth: dict[tuple[str, int], Error] = {}
        self.calls: list[str] = []
        self.retained = 0
        self.descriptors: dict[int, frozenset[int]] = {}
        self.contexts: dict[int, frozenset[int]] = {}
        self.streams: dict[int, int] = {}
        self._split: list[int] = []
        self._rest = 0
        self._next = 0x1000

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if not name.startswith("cu") or name == "cuGetErrorName":
            return attribute
        nth = self.calls.count(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            error = self.fail.get(name) or self.fail_nth.get((name, nth))
            return error.code if error else attribute(*arguments) or 0

        return call

    def _address(self) -> int:
        self._next += 0x10
        return self._next

    def cuGetErrorName(self, code: Any, name: Any) -> int:
        errors = [*self.fail.values(), *self.fail_nth.values()]
        names = {error.code: error.name for error in errors if error.name}
        names |= {1: b"CUDA_ERROR_INVALID_VALUE", 915: b"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"}
        name._obj.value = names.get(code.value)
        return 0 if code.value in names else 1

    def cuInit(self, flags: Any) -> None:
        assert flags.value == 0

    def cuDriverGetVersion(self, version: Any) -> None:
        version._obj.value = self.version

    def cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = 1

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = 70 + ordinal.value
        return 101 if ordinal.value else 0

    def cuDeviceGetName(self, name: Any, length: Any, device: Any) -> None:
        assert (length.value, device.value) == (len(name), 70)
        name.value = b"Fake H200"

    def cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> None:
        assert device.value == 70
        uuid._obj[:] = list(range(16))

    def cuDeviceGetAttribute(self, value: Any, which: Any, device: Any) -> int:
        assert device.value == 70
        values = {
            Attribute.NUM_SMS: self.num_sms,
            Attribute.CAPABILITY_MAJOR: self.capability[0],
            Attribute.CAPABILITY_MINOR: self.capability[1],
        }
        if which.value == Attribute.MPS:
            value._obj.value = 1
            return 0 if self.version >= 12040 else 1
        value._obj.value = values[Attribute(which.value)]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        assert device.value == 70
        context._obj.value = 0x10
        self.retained += 1

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> None:
        assert device.value == 70
        self.retained -= 1

    def cuDeviceGetDevResource(self, device: Any, resource: Any, which: Any) -> None:
        assert (device.value, which.value) == (70, SM)
        fill(resource._obj, range(self.num_sms), self.min_part, self.alignment)

    def cuDevSmResourceSplitByCount(
        self, groups: Any, number: Any, whole: Any, rest: Any, flags: Any, least: Any
    ) -> None:
        """As the hardware rounds: up to the smallest part, then to the alignment."""
        assert flags.value == 0
        at_least = max(least.value, self.min_part or 2)
        step = self.alignment or 2
        size = -(-at_least // step) * step
        most = min(number._obj.value, whole._obj.num_sms // size)
        sms = [sm for sm in range(self.num_sms) if mask_of(whole._obj) >> sm & 1]
        for index in range(most):
            fill(groups[index], sms[index * size : (index + 1) * size], size, step)
        fill(rest._obj, sms[most * size :], size, step)
        self._split = [mask_of(group) for group in groups[:most]]
        self._rest = mask_of(rest._obj)
        number._obj.value = most

    def cuDevResourceGenerateDesc(self, descriptor: Any, parts: Any, number: Any) -> int:
        masks = [mask_of(part) for part in parts]
        assert number.value == len(masks)
        assert len(set(masks)) == len(masks)
        if not set(masks) <= {*self._split, self._rest}:
            return 915
        if self._rest in masks and len(masks) > 1 and not self.merges_rest:
            return 915
        mask = sum(masks)
        descriptor._obj.value = self._address()
        sms = frozenset(sm for sm in range(self.num_sms) if mask >> sm & 1)
        self.descriptors[descriptor._obj.value] = sms
        return 0

    def cuGreenCtxCreate(self, context: Any, descriptor: Any, device: Any, flags: Any) -> int:
        if self.retained < 1 or device.value != 70 or flags.value != 1:
            return 1
        context._obj.value = self._address()
        sms = self.descriptors[descriptor.value]
        self.contexts[context._obj.value] = frozenset(sorted(sms)[: self.given(len(sms))])
        return 0

    def cuGreenCtxGetDevResource(self, context: Any, resource: Any, which: Any) -> None:
        assert which.value == SM
        sms = sorted(self.contexts[context.value])
        fill(resource._obj, sms, self.min_part, self.alignment)

    def cuGreenCtxStreamCreate(self, stream: Any, context: Any, flags: Any, priority: Any) -> int:
        if flags.value != 1 or context.value not in self.contexts:
            return 1
        assert priority.value == 0
        stream._obj.value = self._address()
        self.streams[stream._obj.value] = context.value
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        return 0 if stream.value in self.streams else 709

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        if self.streams.get(stream.value) not in self.contexts:
            return 709
        del self.streams[stream.value]
        return 0

    def cuGreenCtxDestroy(self, context: Any) -> int:
        if context.value in self.streams.values():
            return 709
        return 0 if self.contexts.pop(context.value, None) else 709

    def sms(self, stream: Any) -> frozenset[int]:
        """Those that a stream's kernels run on."""
        return self.contexts[self.streams[stream.address]]


class FakeStream:
    def __init__(self, name: str, address: int = 0) -> None:
        self.name, self.address = name, address

    def __repr__(self) -> str:
        return self.name


class FakeStreams:
    """``log``: every wait and switch, in order. ``broken``: the next switch raises."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.home = self.now = FakeStream("home")
        self.broken = False

    def current(self) -> FakeStream:
        return self.now

    def make_current(self, stream: FakeStream) -> None:
        if self.broken:
            self.broken = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.log.append(("current", stream.name))
        self.now = stream

    def wait(self, stream: FakeStream, other: FakeStream) -> None:
        self.log.append(("wait", stream.name, other.name))

    def external(self, address: int) -> FakeStream:
        assert isinstance(address, int)
        return FakeStream(f"{address:#x}", address)

    def first(self) -> FakeStream:
        return FakeStream("first")
