"""A deployment whose devices are divided: by what, what the core knows of them, their cells."""

import contextlib
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from easerve.cli.profile_here import here
from easerve.config import ConfigError, Deployment
from easerve.costs import profile
from easerve.engines.partition import ladder
from easerve.engines.partition.cell import IDLE, Cell
from easerve.engines.partition.facts import Facts, gather
from easerve.engines.partition.ladder import Choice
from easerve.engines.partition.sides import DriverError
from easerve.engines.vllm.launch import EngineSpec
from easerve.engines.vllm.mps_daemon import MpsDaemon, mps_daemon
from easerve.policy.partition import Devices, Surface
from easerve.types import Stage, WorkerId

logger = logging.getLogger("easerve.divide")


def devices(deployment: Deployment) -> Devices | None:
    """What the core is to know of the devices that are divided."""
    if deployment.partition is None:
        return None
    if deployment.partition.profile is None:
        return Devices()
    try:
        measured = profile.read(Path(deployment.partition.profile))
    except ConfigError as error:
        raise ConfigError(f"partition.profile: {error}") from None
    differs = profile.mismatch(measured.key, here(deployment, facts_of(deployment.device)))
    if differs is not None:
        _warn(
            f"{deployment.partition.profile}: {differs}. Until easerve profile has measured "
            "anew, each batch gets half of the device"
        )
        return Devices()
    return Devices(Surface(measured.item_tokens, measured.rows()))


@cache
def _warn(text: str) -> None:
    """Once."""
    logger.warning(text)


@cache
def facts_of(device: str) -> Facts:
    """What this machine has; it takes seconds to ask a GPU's driver."""
    return gather(device)


def choose(deployment: Deployment) -> tuple[Facts, Choice] | None:
    """By what the devices are divided; ConfigError where the file wants what cannot be."""
    if deployment.partition is None:
        return None
    facts = facts_of(deployment.device)
    return facts, ladder.choose(facts, deployment.device, deployment.partition.driver)


def refusals(deployment: Deployment) -> list[str]:
    """Why no better way of dividing the devices was taken, a line each."""
    chosen = choose(deployment)
    if chosen is None or deployment.partition is None or deployment.partition.driver != "auto":
        return []
    _, choice = chosen
    tried = [f"partition: not by {each.rung}: {each.why}" for each in choice.tried]
    off = choice.rung == ladder.OFF.name
    return [*tried, "partition: off: encode and prefill share the device"] if off else tried


def daemon(
    deployment: Deployment, chosen: tuple[Facts, Choice] | None, run_dir: Path, log_dir: Path
) -> MpsDaemon | None:
    """Of MPS, where the way that was ``chosen`` takes it."""
    try:
        return chosen and mps_daemon(deployment, *chosen, run_dir, log_dir)
    except DriverError as error:
        raise ConfigError(str(error)) from None


def make_cells(specs: Sequence[EngineSpec]) -> None:
    for cell in {spec.cell for spec in specs if spec.cell is not None}:
        Cell.create(cell)


def withdraw(specs: Sequence[EngineSpec], worker_id: WorkerId) -> None:
    """What an engine that has ended had said and cannot take back: what stands, what it holds."""
    for spec in specs:
        if spec.worker_id == worker_id and spec.cell is not None:
            with contextlib.suppress(FileNotFoundError):  # everything ends
                cell = Cell(spec.cell)
                if spec.stage is Stage.ENCODE:
                    cell.announce(0, None)
                else:
                    cell.hold(IDLE)
                cell.close()
