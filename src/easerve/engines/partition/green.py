"""A GPU's drivers: parts by green contexts, and priority of streams where there are no parts.

A green context is a set of SMs; kernels launched into a stream of it run on those alone. A process
makes its contexts once, and switches from stream to stream. All parts are unions of the granules
of one split, taken in the order in which the driver gives them, so that the encoder's part of 24
SMs lies within its part of 64, and shares nothing with prefill's part beside 64. That the same
granules are the same SMs in two processes is promised nowhere: see probe.py. A CUDA graph runs
where it was captured, whatever the stream that it is launched in.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from easerve.engines.partition.cuda import (
    GREEN_CUDA,
    Code,
    Cuda,
    CudaError,
    Device,
    Resource,
)
from easerve.engines.partition.sides import DriverError, Undivided
from easerve.policy.partition import Indivisible, Levels
from easerve.types import Stage

LEVELS = (8, 24, 40, 72)
"""SMs of the encoder's parts, and the largest part there can be. Few: torch keeps the memory of
each stream apart, so that a process has the memory of a step once for every level.
"""
PROFILED = (8, 16, 24, 32, 48, 64, 96)
"""Levels to measure the encoder at."""
REFUSED = frozenset(
    {
        Code.INVALID_VALUE,
        Code.NOT_SUPPORTED,
        Code.INVALID_RESOURCE_TYPE,
        Code.INVALID_RESOURCE_CONFIGURATION,
    }
)
HIGHEST = -100
"""As priority: the highest there is."""


class Streams(Protocol):
    """What it takes to send work to a stream, on one device and from one thread."""

    def current(self) -> Any: ...

    def make_current(self, stream: Any) -> None: ...

    def wait(self, stream: Any, other: Any) -> None:
        """What comes into ``stream`` from now on begins after all that is in ``other``."""
        ...

    def external(self, address: int) -> Any:
        """A stream of the driver's."""
        ...

    def first(self) -> Any:
        """A new stream whose kernels are scheduled before others."""
        ...


class TorchStreams:
    """``set_stream`` is looked up at every call: vLLM puts its own in that place."""

    def __init__(self, index: int = 0) -> None:
        import torch

        self._cuda, self._device = torch.cuda, torch.device("cuda", index)

    def current(self) -> Any:
        return self._cuda.current_stream(self._device)

    def make_current(self, stream: Any) -> None:
        self._cuda.set_stream(stream)

    def wait(self, stream: Any, other: Any) -> None:
        stream.wait_stream(other)

    def external(self, address: int) -> Any:
        return self._cuda.ExternalStream(address, self._device)

    def first(self) -> Any:
        return self._cuda.Stream(self._device, HIGHEST)


def _ignore(stream: Any) -> None:
    pass


class _Switch:
    """Makes another stream current, behind all work of the one that was: memory that passes from
    one stream to the next is never used by both at once. ``on_switch`` hears of the new one.
    """

    def __init__(self, streams: Streams, on_switch: Callable[[Any], None]) -> None:
        self._streams, self._on_switch = streams, on_switch

    def to(self, stream: Any) -> None:
        self._streams.wait(stream, self._streams.current())
        self._streams.make_current(stream)
        self._on_switch(stream)


# Granules ----------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """A GPU in granules of ``granule`` SMs each; ``rest``: what did not make another one."""

    device: Device
    total: int
    granule: int
    granules: list[Resource]
    rest: Resource

    def layout(self, levels: Iterable[int], min_prefill: int) -> Levels:
        """Of the largest part and, of ``levels``, the smaller ones, in whole granules."""
        granules = min(
            (self.total - min_prefill) // self.granule,
            len(self.granules) - 1,
        )
        if granules < 1:
            raise DriverError(
                f"{self.device.name}: of {self.total} SMs in granules of {self.granule}, none is "
                f"left beside {min_prefill} for prefill"
            )
        most = granules * self.granule
        rounded = {-(-level // self.granule) * self.granule for level in levels}
        smaller = {level for level in rounded if 0 < level < most}
        return Levels(self.total, self.granule, min_prefill, (*sorted(smaller), most))


def cut(cuda: Cuda, index: int = 0) -> Cut:
    """The granule is what the driver makes of the smallest part that it says it can."""
    version = cuda.version()
    if version < GREEN_CUDA:
        raise DriverError(
            f"the driver offers CUDA {version // 1000}.{version % 1000 // 10}; green contexts need "
            "12.4, driver 550 or newer"
        )
    device = cuda.device(index)
    whole = cuda.sms(device)
    granules, rest = cuda.split(whole, max(whole.min_part, whole.alignment, 1))
    sizes = {part.num_sms for part in granules}
    if len(sizes) != 1:
        raise DriverError(f"{device.name}: the driver gives granules of {sorted(sizes)} SMs")
    return Cut(device, whole.num_sms, sizes.pop(), granules, rest)


def smallest_part(cuda: Cuda, index: int = 0) -> int:
    """SMs of a green context of one granule, made, read back and destroyed."""
    made = cut(cuda, index)
    with contextlib.ExitStack() as stack:
        cuda.retain(made.device)
        stack.callback(cuda.release, made.device)
        context = cuda.create_context(made.device, made.granules[:1])
        stack.callback(cuda.destroy_context, context)
        return cuda.num_sms(context)


# Drivers -----------------------------------------------------------------------------------------


class Part(NamedTuple):
    """A green context: its stream, the SMs that it has, and what it took to make the two."""

    stream: Any
    num_sms: int
    context_s: float
    stream_s: float


class GreenDriver:
    """Makes the parts of ``stages``, one for each level: an engine has one stage, a bench both.

    To be made, used and closed in the thread that launches kernels, once warm-up is over. ``index``
    of the device: as torch counts. Every process that shares the device has to be given the same
    ``min_prefill`` and ``levels``.
    """

    name = "green-context"

    def __init__(
        self,
        stages: Iterable[Stage],
        *,
        index: int = 0,
        min_prefill: int = 1,
        levels: Iterable[int] = LEVELS,
        on_switch: Callable[[Any], None] = _ignore,
        cuda: Cuda | None = None,
        streams: Streams | None = None,
    ) -> None:
        self._cuda = Cuda() if cuda is None else cuda
        self._cut = cut(self._cuda, index)
        self.layout = self._cut.layout(levels, min_prefill)
        self._streams = TorchStreams(index) if streams is None else streams
        self._switch = _Switch(self._streams, on_switch)
        self._rest = [self._cut.rest] if self._cut.rest.num_sms else []
        self._home: Any = None
        self._at: tuple[Stage, int] | None = None
        self.parts: dict[tuple[Stage, int], Part] = {}
        self._made = contextlib.ExitStack()
        try:
            self._cuda.retain(self._cut.device)
            self._made.callback(self._cuda.release, self._cut.device)
            for stage in stages:
                for level in self.layout.levels:
                    self.stream(stage, level)
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> Device:
        return self._cut.device

    @property
    def counts(self) -> dict[tuple[Stage, int], int]:
        """SMs of every part, as read back."""
        return {key: part.num_sms for key, part in self.parts.items()}

    @property
    def idle_sms(self) -> int:
        """Those that no part has, as the driver does not let the rest of a split be merged."""
        return 0 if self._rest else int(self._cut.rest.num_sms)

    def stream(self, stage: Stage, units: int) -> Any:
        """Of the encoder's part of ``units``, or prefill's beside it; made if there is none yet."""
        part = self.parts.get((stage, units))
        if part is None:
            part = self.parts[stage, units] = self._make(stage, units)
        return part.stream

    def _make(self, stage: Stage, units: int) -> Part:
        if units not in self.layout.levels:
            raise DriverError(f"there is no part of {units} SMs, only of {self.layout.levels}")
        begin = time.perf_counter()
        number = units // self.layout.granule
        if stage is Stage.ENCODE:
            context, num_sms = self._context(self._cut.granules[:number], [])
        else:
            context, num_sms = self._context(self._cut.granules[number:], self._rest)
        middle = time.perf_counter()
        address = self._cuda.create_stream(context)
        self._made.callback(self._cuda.destroy_stream, address)
        self._made.callback(self._cuda.synchronize, address)
        end = time.perf_counter()
        return Part(self._streams.external(address), num_sms, middle - begin, end - middle)

    def _context(self, granules: list[Resource], rest: list[Resource]) -> tuple[int, int]:
        """With ``rest`` if the driver lets it be merged; the SMs that were read back."""
        parts = [*granules, *rest]
        asked = sum(part.num_sms for part in parts)
        try:
            context = self._cuda.create_context(self._cut.device, parts)
            self._made.callback(self._cuda.destroy_context, context)
            given = self._cuda.num_sms(context)
            if given != asked:
                raise DriverError(f"a part of {asked} SMs was asked for, and one of {given} made")
        except DriverError as error:
            if not rest or (isinstance(error, CudaError) and error.code not in REFUSED):
                raise
            self._rest = []
            return self._context(granules, [])
        return context, given

    def confine(self, stage: Stage, units: int) -> None:
        """0: to the stream that was current before there was a level."""
        at = (stage, units) if units else None
        if at == self._at:
            return
        try:
            if at is None:
                self._switch.to(self._home)
            else:
                self._enter(at)
        except (DriverError, RuntimeError) as error:
            self._leave()
            raise DriverError(f"{stage}, level {units}: {error}") from error
        self._at = at

    def _enter(self, at: tuple[Stage, int]) -> None:
        if at not in self.parts:
            raise DriverError(f"no such part; there are {sorted(self.parts)}")
        if self._at is None:
            self._home = self._streams.current()
        self._switch.to(self.parts[at].stream)

    def _leave(self) -> None:
        self._at = None
        if self._home is not None:
            with contextlib.suppress(RuntimeError):
                self._switch.to(self._home)

    def close(self) -> None:
        if self._at is not None:
            self._leave()
        self.parts.clear()
        with contextlib.suppress(DriverError):
            self._made.close()


class PriorityDriver(Undivided):
    """The encoder's kernels are scheduled first where both engines wait for SMs.

    Nothing is preempted (cuGreenCtxStreamCreate in cuda.h): a block that runs, runs to its end, and
    the kernels of a prefill step that were scheduled before are waited for. So the encoder gains
    little beside long kernels, and nothing is promised. Streams of two processes are not compared;
    between those it is the priority of MPS clients that counts (``mps.client_environment``).
    """

    def __init__(
        self,
        stage: Stage,
        num_sms: int,
        *,
        index: int = 0,
        on_switch: Callable[[Any], None] = _ignore,
        streams: Streams | None = None,
    ) -> None:
        super().__init__("priority", Indivisible(num_sms))
        streams = TorchStreams(index) if streams is None else streams
        self._switch = _Switch(streams, on_switch)
        self._home: Any = None
        if stage is Stage.ENCODE:
            self._home = streams.current()
            self._switch.to(streams.first())

    def close(self) -> None:
        if self._home is not None:
            self._switch.to(self._home)
            self._home = None
