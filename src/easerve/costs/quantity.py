"""Numbers of a data file: a value, its unit and where it is from."""

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field

from easerve.config import Section

# A unit in units of SI, by what it measures.
UNITS: dict[str, dict[str, float]] = {
    "rate of computing": {"GFLOP/s": 1e9, "TFLOP/s": 1e12},
    "rate of transfer": {"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12},
    "size": {
        "B": 1,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "KiB": 1 << 10,
        "MiB": 1 << 20,
        "GiB": 1 << 30,
    },
    "time": {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "number": {"SMs": 1, "cores": 1},
    "share": {"%": 1e-2, "of 1": 1},
}


class Quantity(Section):
    """``source``: a document, a table, or the word assumed."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    unit: str
    source: Annotated[str, Field(min_length=1)]

    @property
    def si(self) -> float:
        """In FLOP/s, bytes/s, bytes, seconds, or as a plain number."""
        return self.value * next(units[self.unit] for units in UNITS.values() if self.unit in units)


def _measured_in(kind: str) -> Callable[[Quantity], Quantity]:
    def check(quantity: Quantity) -> Quantity:
        if quantity.unit not in UNITS[kind]:
            legal = ", ".join(UNITS[kind])
            raise ValueError(f"unit {quantity.unit!r} is not one of a {kind}: {legal}")
        return quantity

    return check


def _at_most_one(quantity: Quantity) -> Quantity:
    if quantity.si > 1:
        raise ValueError(f"a share is at most 1 (got {quantity.value:g} {quantity.unit})")
    return quantity


FlopRate = Annotated[Quantity, AfterValidator(_measured_in("rate of computing"))]
ByteRate = Annotated[Quantity, AfterValidator(_measured_in("rate of transfer"))]
Size = Annotated[Quantity, AfterValidator(_measured_in("size"))]
Time = Annotated[Quantity, AfterValidator(_measured_in("time"))]
Number = Annotated[Quantity, AfterValidator(_measured_in("number"))]
Part = Annotated[Quantity, AfterValidator(_measured_in("share")), AfterValidator(_at_most_one)]
