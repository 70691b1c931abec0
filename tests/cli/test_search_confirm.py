"""The winner beside the file as it is."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from easerve.cli.search.confirm import AS_IT_IS, UNCHANGED, Side, confirmed, in_words, section
from easerve.search.objective import Score
from easerve.search.space import Configuration


@dataclass
class Given:
    """An objective that says what it is told to, and when it was asked."""

    name: str
    goodput_per_s: float
    asked: list[str]
    key: str = ""
    seeds: tuple[int, ...] = ()
    required: float = 0.9
    noise: dict[int, float] = field(default_factory=dict)

    def score(self, configuration: Configuration, seed: int) -> Score:
        self.asked.append(f"{self.name} {seed}")
        return Score(self.goodput_per_s + self.noise.get(seed, 0.0), 1.0, 5.0)


def told(before: float, winner: float) -> dict[str, Any]:
    asked: list[str] = []
    sides = [Given("before", before, asked), Given("winner", winner, asked, noise={4: 0.5})]
    one, other = (Side(each, AS_IT_IS, nullcontext()) for each in sides)
    found = confirmed(one, other, [4, 5, 6], lambda _: None)
    assert asked == ["before 4", "winner 4", "winner 5", "before 5", "before 6", "winner 6"]
    return found


def test_who_begins_alternates_and_the_ratio_has_an_interval() -> None:
    found = told(2.0, 3.0)
    assert found["ratio"] == pytest.approx((3.5 + 3 + 3) / 6)
    half = found["ratio_confidence"]
    assert isinstance(half, float)
    assert half == pytest.approx(4.303 * 0.2887 / 3**0.5 / 2, rel=1e-3)
    assert in_words(found, "f.yaml") == (
        "1.583 ± 0.36 times the goodput of f.yaml as it is, in 3 rounds under new loads"
    )
    assert "nothing shows" not in section(found, "f.yaml", 0.9).text


def test_what_is_within_the_noise_is_said_to_be() -> None:
    assert "nothing shows that it is better" in section(told(2.0, 2.0), "f.yaml", 0.9).text


def test_a_file_that_is_worth_nothing_has_no_ratio() -> None:
    found = told(0.0, 3.0)
    assert found["ratio"] is None
    assert section(found, "f.yaml", 0.9).text == (
        "The winner has a goodput of 3.17 req/s in 3 rounds under new loads, where f.yaml as it is "
        "has none."
    )
    found["rounds"] = found["rounds"][:1]
    assert "in 1 round " in in_words(found, "f.yaml")


def test_what_speaks_against_the_winner_is_said() -> None:
    worse = section(told(3.0, 2.0), "f.yaml", 0.9).text
    assert "worse than the source" in worse
    assert "noise" not in worse
    assert "100 % keep the promise" not in worse
    broken = section(told(2.0, 3.0), "f.yaml", 1.01).text
    assert "Of its requests 100 % keep the promise under these loads, less than the 101 %" in broken


def test_nothing_is_changed() -> None:
    assert UNCHANGED.changes(AS_IT_IS) == {}
    assert list(UNCHANGED) == [AS_IT_IS]
