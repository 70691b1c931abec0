"""What engines are told of their device, and what they say of it."""

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from easerve.engines.partition.cell import Cell
from easerve.engines.partition.setup import SETUP, Setup, division, read_setup, tell
from easerve.engines.protocol import Division, Driven
from easerve.policy.partition import ALL, HALF
from easerve.types import Stage

CPU = Driven("cpu", "cores by affinity", 4, (1, 2, 3))
GREEN = Driven("green-context", "SMs", 132, (8, 24, 40, 72, 120))
STATIC = Driven("mps-static", "its partition", 64, ())
GATE = Driven("gate", "cpu: one core cannot be divided", 1, ())


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    path = tmp_path / "encode-0.cell"
    Cell.create(path)
    return Setup(cell=str(path), driver="cpu", why="cores by affinity")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"cores": (0, 2), "min_prefill": 8, "hold_s": 0.25, "patience_s": 0.5, "why": "ünlike"},
    ],
    ids=str,
)
def test_a_setup_is_read_as_it_was(setup: Setup, more: dict[str, object]) -> None:
    told = msgspec.structs.replace(setup, **more)
    environment = told.to_environment()
    assert list(environment) == [SETUP]
    assert read_setup(environment | {"OTHER": "x"}) == told


def test_an_engine_that_has_its_device_alone_is_told_nothing() -> None:
    assert read_setup({}) is None
    assert read_setup() is None, "nobody has set it for this process"


@pytest.mark.parametrize("text", ["", "{}", '{"cell": 1}'])
def test_a_setup_that_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_setup({SETUP: text})


def test_what_the_sides_say_is_known_as_soon_as_they_say_it(setup: Setup) -> None:
    cell = Cell(Path(setup.cell))
    counts = asdict(cell.state())
    assert division(setup, cell) == Division(None, None, counts)
    tell(setup, Stage.ENCODE, CPU)
    assert division(setup, cell) == Division(CPU, None, counts)
    tell(setup, Stage.PREFILL, CPU)
    tell(setup, Stage.PREFILL, GATE)  # it was started again
    assert division(setup, cell) == Division(CPU, GATE, counts)
    cell.announce(5, None)
    assert division(setup, cell).counts == counts | {"demanded": 1}
    cell.close()


@pytest.mark.parametrize(
    ("prefill", "demanded"),
    [
        (CPU, [0, 1, 3, 3, 2, 4]),
        (GREEN, [0, 8, 8, 40, 72, 132]),
        (STATIC, [0, 0, 0, 0, 0, 64]),
        (GATE, [0, 1, 1, 1, 1, 1]),
        (None, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_a_demand_is_told_in_units_that_prefill_leaves(
    setup: Setup, prefill: Driven | None, demanded: list[int]
) -> None:
    cell = Cell(Path(setup.cell))
    tell(setup, Stage.ENCODE, CPU)
    if prefill is not None:
        tell(setup, Stage.PREFILL, prefill)
    seen = []
    for units in (0, 1, 3, 30, HALF, ALL):
        cell.announce(units, None)
        seen.append(division(setup, cell).counts["demanded"])
    assert seen == demanded
    cell.close()


def test_what_is_said_is_in_one_file_for_each_side_beside_the_page(setup: Setup) -> None:
    page = Path(setup.cell)
    tell(setup, Stage.ENCODE, CPU)
    tell(setup, Stage.PREFILL, GATE)
    others = {path.name for path in page.parent.iterdir()} - {page.name}
    assert others == {"encode-0.cell.encode.json", "encode-0.cell.prefill.json"}
    content = json.loads(page.with_name("encode-0.cell.prefill.json").read_text())
    assert content == asdict(GATE) | {"parts": []}
