"""Units of numbers in data files."""

import pytest
from pydantic import ValidationError

from easerve.config import Section
from easerve.costs.quantity import UNITS, ByteRate, Part, Quantity, Size, Time


class Facts(Section):
    size: Size
    rate: ByteRate
    time: Time
    part: Part


def quantity(value: float, unit: str) -> dict[str, object]:
    return {"value": value, "unit": unit, "source": "here"}


FACTS = {
    "size": quantity(1.5, "GiB"),
    "rate": quantity(960, "GB/s"),
    "time": quantity(5, "us"),
    "part": quantity(80, "%"),
}


def test_si() -> None:
    facts = Facts.model_validate(FACTS)
    assert facts.size.si == 1.5 * (1 << 30)
    assert facts.rate.si == 960e9
    assert facts.time.si == pytest.approx(5e-6)
    assert facts.part.si == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("key", "value", "unit", "words"),
    [
        ("size", 1, "GB/s", "unit 'GB/s' is not one of a size: B, kB, MB, GB, KiB, MiB, GiB"),
        ("time", 1, "sec", "unit 'sec' is not one of a time: s, ms, us, ns"),
        ("rate", -1, "GB/s", "greater than 0"),
        ("rate", float("inf"), "GB/s", "finite"),
        ("part", 120, "%", "a share is at most 1 (got 120 %)"),
    ],
)
def test_what_is_no_such_quantity(key: str, value: float, unit: str, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Facts.model_validate({**FACTS, key: quantity(value, unit)})
    assert words in str(caught.value)


def test_a_source_must_be_there() -> None:
    with pytest.raises(ValidationError, match="source"):
        Quantity.model_validate({"value": 1, "unit": "s", "source": ""})


def test_each_unit_measures_one_thing() -> None:
    names = [unit for units in UNITS.values() for unit in units]
    assert len(names) == len(set(names))
