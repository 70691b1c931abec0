"""What is said of devices that are divided, and what an engine that has ended leaves on them."""

from pathlib import Path
from typing import Any

import pytest

from easerve.cli import divide
from easerve.config import Deployment
from easerve.engines.partition.cell import IDLE, Cell
from easerve.engines.partition.facts import Facts
from easerve.engines.vllm.launch import EngineSpec
from easerve.types import Stage, WorkerId

ENCODER, LOCAL, REMOTE = map(WorkerId, ("encode-0", "local-prefill-0", "prefill-0"))


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """An encode of 3 units stands, beside a step that leaves 1."""
    path = tmp_path / "cell"
    Cell.create(path)
    made = Cell(path)
    made.announce(3, None)
    made.hold(1)
    return made


def specs(folder: Path) -> list[EngineSpec]:
    stages = {ENCODER: Stage.ENCODE, LOCAL: Stage.PREFILL, REMOTE: Stage.PREFILL}
    return [
        EngineSpec(
            name, stage, (), {}, folder, folder, cell=None if name == REMOTE else folder / "cell"
        )
        for name, stage in stages.items()
    ]


@pytest.mark.parametrize(
    ("ended", "demanded", "left"),
    [(ENCODER, 0, 1), (LOCAL, 3, IDLE), (REMOTE, 3, 1), (WorkerId("mps"), 3, 1)],
)
def test_an_engine_that_has_ended_demands_and_holds_nothing(
    cell: Cell, tmp_path: Path, ended: WorkerId, demanded: int, left: int
) -> None:
    divide.withdraw(specs(tmp_path), ended)
    assert (cell.demanded(), cell.left()) == (demanded, left)


def test_nothing_is_withdrawn_from_a_cell_that_is_gone(tmp_path: Path) -> None:
    for ended in (ENCODER, LOCAL):
        divide.withdraw(specs(tmp_path), ended)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, []),
        ({"partition": {"driver": "gate"}}, []),
        ({"partition": {}}, ["partition: not by cpu: a single core cannot be divided"]),
        (
            {"partition": {}, "device": "cuda"},
            [
                *(
                    f"partition: not by {rung}: there is no driver"
                    for rung in ("green-context", "mps-static", "priority", "gate")
                ),
                "partition: off: encode and prefill share the device",
            ],
        ),
    ],
)
def test_it_is_said_why_no_better_way_was_taken(
    monkeypatch: pytest.MonkeyPatch, content: dict[str, Any], said: list[str]
) -> None:
    facts = Facts("A CPU", (0,), (), {}, shm=True, uid=0, error="there is no driver")
    monkeypatch.setattr(divide, "facts_of", lambda _: facts)
    made = Deployment.model_validate({"model": "m", "local_prefill": {}, **content})
    assert divide.refusals(made) == said


def test_of_the_best_way_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts("A CPU", (0, 1), (), {}, shm=True, uid=0)
    monkeypatch.setattr(divide, "facts_of", lambda _: facts)
    made = Deployment.model_validate({"model": "m", "local_prefill": {}, "partition": {}})
    assert divide.refusals(made) == []
