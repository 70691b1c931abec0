"""Which costs a source stands for, their defaults, and how fast they answer."""

import runpy
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from easerve.costs import hardware, models
from easerve.costs.analytic import RooflineCosts
from easerve.costs.base import Forward
from easerve.costs.build import Knobs, costs
from easerve.costs.measured import KernelCosts

ROOT = Path(__file__).parents[2]
LLAVA = models.read("llava-v1.6-34b")
ADA = hardware.read("rtx6000-ada")


def test_sources() -> None:
    assert isinstance(costs(LLAVA, ADA, 2), KernelCosts)
    assert isinstance(costs(LLAVA, ADA, 2, "roofline"), RooflineCosts)


def test_untuned_is_all_defaults() -> None:
    step = Forward(100, 5050, 1)
    assert costs(LLAVA, ADA, 2).forward(step) == costs(LLAVA, ADA, 2, knobs=Knobs()).forward(step)


@pytest.mark.parametrize(
    "knobs",
    [{"gemm_scale": 0}, {"step_overhead_s": -1}, {"bandwidth_knee": 2}, {"speed": 1}],
)
def test_knobs_that_are_none(knobs: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        Knobs(**knobs)


@pytest.mark.long
def test_a_step_costs_a_simulation_little() -> None:
    """About 4 us on an idle core; ten times as much is a mistake."""
    found = costs(LLAVA, ADA, 2)
    steps = [Forward(512 + i % 7, 450_000, 1, 20 + i % 5, 40_000 + i) for i in range(20_000)]
    begun = time.perf_counter()
    for step in steps:
        found.forward(step)
    assert (time.perf_counter() - begun) / len(steps) < 40e-6


@pytest.mark.long
def test_the_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "costs_tables.py"))["page"]()
    written = (ROOT / "docs" / "costs-tables.md").read_text()
    assert written == page + "\n", "run python -m scripts.costs_tables > docs/costs-tables.md"
