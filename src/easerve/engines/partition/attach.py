"""In an engine: from its environment to its side of the cell, with a driver that works."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easerve.engines.partition.cell import Cell
from easerve.engines.partition.cpu import CpuDriver
from easerve.engines.partition.green import GreenDriver, PriorityDriver
from easerve.engines.partition.probe import Gemm, Verdict, decline, prove
from easerve.engines.partition.setup import GATE, Setup, tell
from easerve.engines.partition.sides import (
    Driver,
    DriverError,
    EncodeSide,
    PrefillSide,
    Undivided,
)
from easerve.engines.protocol import Driven
from easerve.policy.partition import HALF, Gate, Indivisible
from easerve.types import NS_PER_S, Stage

logger = logging.getLogger("vllm.easerve.partition")


@dataclass(frozen=True, slots=True)
class Tools:
    """What an engine's worker lends: ``set_num_threads`` of OpenMP on a CPU; on a GPU
    ``on_switch``, which hears of the stream that is current from now on.
    """

    set_num_threads: Callable[[int], None] = lambda _: None
    on_switch: Callable[[Any], None] = lambda _: None


def attach_encode(setup: Setup, tools: Tools) -> EncodeSide:
    cell, driver = _open(setup, Stage.ENCODE, tools)
    return EncodeSide(cell, driver, _failed, round(setup.patience_s * NS_PER_S))


def attach_prefill(setup: Setup, tools: Tools) -> PrefillSide:
    cell, driver = _open(setup, Stage.PREFILL, tools)
    return PrefillSide(cell, driver, _failed, round(setup.hold_s * NS_PER_S))


def _failed(error: DriverError) -> None:
    logger.error("the device is not divided any more: %s", error)


def _open(setup: Setup, stage: Stage, tools: Tools) -> tuple[Cell, Driver]:
    """With the driver that was chosen or, where it fails, the one that needs nothing."""
    cell = Cell(Path(setup.cell))
    why = setup.why
    try:
        driver, seen = _make(setup, stage, tools, cell)
        why = "; ".join(filter(None, (why, seen)))
    except DriverError as error:
        why = f"{setup.driver}: {error}"
        logger.error("the device is not divided, prefill pauses instead: %s", why)
        driver = Undivided(GATE, Gate(1))
    layout = driver.layout
    tell(setup, stage, Driven(driver.name, why, layout.total, layout.parts))
    logger.info("%s: partition driver %s (%s), %s", stage, driver.name, why, layout)
    return cell, driver


def _make(setup: Setup, stage: Stage, tools: Tools, cell: Cell) -> tuple[Driver, str]:
    """The driver, and what was seen of it."""
    min_prefill = setup.min_prefill or 1
    match setup.driver:
        case "cpu":
            cores = setup.cores or os.sched_getaffinity(0)
            return CpuDriver(cores, tools.set_num_threads, min_prefill), ""
        case "green-context":
            try:
                green = GreenDriver([stage], min_prefill=min_prefill, on_switch=tools.on_switch)
                return green, _prove(green, cell, stage)
            except DriverError:
                decline(cell, stage)  # else the other engine would wait for it
                raise
        case "mps-static":
            return Undivided(setup.driver, Indivisible(_num_sms())), ""
        case "priority":
            return PriorityDriver(stage, _num_sms(), on_switch=tools.on_switch), ""
        case "gate":
            return Undivided(GATE, Gate(1)), ""
        case unknown:
            raise DriverError(f"there is no driver {unknown!r}")


def _prove(driver: GreenDriver, cell: Cell, stage: Stage) -> str:
    """That its parts are disjoint from the other engine's; DriverError where they are not."""
    level = driver.layout.round(HALF)
    try:
        verdict = prove(cell, stage, Gemm(driver, level))
    except RuntimeError as error:  # torch's
        verdict = Verdict(False, str(error))
    if not verdict.ok:
        driver.close()
        raise DriverError(f"the two engines do not compute apart: {verdict.why}")
    return verdict.why


def _num_sms() -> int:
    """Of the GPU, or of the part of it that this process sees."""
    import torch

    return int(torch.cuda.get_device_properties(0).multi_processor_count)
