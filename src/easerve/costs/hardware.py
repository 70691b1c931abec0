"""What costs need to know of a device: one YAML file each, every number with unit and source."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from easerve.config import Positive, Section, read_named
from easerve.costs.quantity import ByteRate, FlopRate, Number, Part, Size, Time

FOLDER = Path(__file__).parent / "hardware"
KERNELS = Path(__file__).parent / "kernels"
Text = Annotated[str, Field(min_length=1)]


class Link(Section):
    """From a device to each other one of its machine.

    ``bandwidth``: in one direction. ``nvlink``: all devices are connected by it. ``peer_to_peer``:
    a device reads another's memory itself.
    """

    bandwidth: ByteRate
    latency: Time
    nvlink: bool
    peer_to_peer: bool


class AllReduce(Section):
    """By the roofline: ``latency`` + 2 (n - 1) / n times the bytes over ``bandwidth``."""

    latency: Time
    bandwidth: ByteRate


class Efficiency(Section):
    """What share of its peak a device reaches, for the roofline: ``attention`` of a prompt.

    ``memory`` holds for measured kernels too: their tables have no element-wise operations.
    """

    gemm: Part
    attention: Part
    encoder: Part
    memory: Part


class Kernels(Section):
    """Tables of measured kernels: ``table`` is the device that they were measured on.

    ``memory_scale``: by which the times of kernels bound by memory get shorter here.
    """

    table: Text
    memory_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    source: Text

    @model_validator(mode="after")
    def _is_there(self) -> Self:
        known = sorted({path.name.split("-")[0] for path in KERNELS.glob("*.csv.gz")})
        if self.table not in known:
            raise ValueError(f"table must be one of {', '.join(known)}")
        return self


class Hardware(Section):
    """A device and what connects it to others of its kind.

    ``units``: what can be shared out, SMs or cores, in parts of ``granule``. ``flops``: of matrix
    products, dense, in the type that models are served in. ``memory``: what an engine can have of
    it. ``cache``: the last one before memory. ``all_reduce``: by the number of devices. ``kernels``
    None: none are measured, so that only the roofline is left.
    """

    title: Text
    kind: Literal["gpu", "cpu"]
    units: Number
    granule: Number
    flops: FlopRate
    memory: Size
    bandwidth: ByteRate
    cache: Size
    link: Link
    all_reduce: Mapping[Positive, AllReduce] = Field(default_factory=dict)
    efficiency: Efficiency
    kernels: Kernels | None = None

    @property
    def num_units(self) -> int:
        return round(self.units.si)

    @property
    def num_granule(self) -> int:
        """Units of the smallest part."""
        return round(self.granule.si)


def names() -> list[str]:
    """Of the devices that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read(name: str, folder: Path = Path()) -> Hardware:
    """The device of that name, or of that YAML file; a relative path is taken from ``folder``.

    Raises ConfigError, which names the file and the key.
    """
    return read_named(name, "hardware", FOLDER, folder, Hardware)
