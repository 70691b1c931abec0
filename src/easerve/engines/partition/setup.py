"""What an engine is told of its device, in its environment, and what it says of it, in a file."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import msgspec

from easerve.engines.partition.cell import Cell
from easerve.engines.protocol import Division, Driven
from easerve.policy.partition import Gate, Layout, Levels
from easerve.types import Stage

SETUP = "EASERVE_PARTITION"
GATE = "gate"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """``cell``: path of the page. ``driver`` and ``why``: the rung that was chosen for the device.

    ``cores``: of a CPU, none for all that the process may use. ``min_prefill`` None: a granule.
    """

    cell: str
    driver: str
    why: str
    cores: tuple[int, ...] = ()
    min_prefill: int | None = None
    hold_s: float = 0.0
    patience_s: float = 0.0

    def to_environment(self) -> dict[str, str]:
        return {SETUP: msgspec.json.encode(self).decode()}


def read_setup(environment: Mapping[str, str] = os.environ) -> Setup | None:
    """None where the device is not divided."""
    text = environment.get(SETUP)
    return None if text is None else msgspec.json.decode(text, type=Setup)


def tell(setup: Setup, stage: Stage, driven: Driven) -> None:
    """Say which driver one side has."""
    path = _path(setup, stage)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(asdict(driven)))
    draft.replace(path)


def division(setup: Setup, cell: Cell) -> Division:
    """What both sides have said, and the counts of the cell; ``demanded`` as prefill rounds it."""
    encode, prefill = _told(setup, Stage.ENCODE), _told(setup, Stage.PREFILL)
    counts = asdict(cell.state())
    counts["demanded"] = 0 if prefill is None else _layout(prefill).round(counts["demanded"])
    return Division(encode, prefill, counts)


def _layout(driven: Driven) -> Layout:
    if driven.driver == GATE:
        return Gate(driven.total)
    return Levels(driven.total, levels=driven.parts)


def _told(setup: Setup, stage: Stage) -> Driven | None:
    try:
        return msgspec.json.decode(_path(setup, stage).read_bytes(), type=Driven)
    except FileNotFoundError:
        return None


def _path(setup: Setup, stage: Stage) -> Path:
    return Path(f"{setup.cell}.{stage}.json")
