"""The steps of ``easerve doctor --gpu-bench``, each in a process of its own: torch, no vLLM.

``python -m easerve.cli.gpu_steps STEP`` reads what the steps before have found from stdin, and
writes what it finds to stdout, a JSON object a line, so that a step which is killed has said what
it knew.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from easerve.config import Policy
from easerve.engines.partition import contention, facts, gpu, mps, sweep
from easerve.engines.partition.cell import scratch
from easerve.engines.partition.sides import DriverError
from easerve.engines.partition.sweep import Device, Runs
from easerve.serve.admin import knobs_of
from easerve.types import Stage

Record = dict[str, Any]
Found = Mapping[str, Sequence[Record]]
"""Of each step, what it wrote."""
BATCHES = tuple(contention.MIX)
STEP_CHUNKS = {"fine": 8, "coarse": 32}
"""Layers over 2048 tokens: a quarter of a pass through an 8B model, and a whole one."""
NUM_CASES = len(STEP_CHUNKS) * len(contention.CASES)
MOST_TARGETS = 4
"""A batch that takes so many targets alone is not run beside prefill as well."""
RUN_S = 2.5
SEED = 0
START_S = 10.0
MODULE = "easerve.cli.gpu_steps"


def surface(device: Device) -> Iterator[Runs]:
    most_s = MOST_TARGETS * Policy().encode_target_s
    return sweep.sweep(device, BATCHES, STEP_CHUNKS["fine"], most_s)


def setting(runs: Sequence[Runs], item_tokens: int) -> contention.Setting:
    measured = sweep.surface(runs, item_tokens)
    return contention.Setting(measured, sweep.alone_s(runs), knobs_of(Policy()), STEP_CHUNKS)


def rows(
    device: Device, runs: Sequence[Runs], seconds: float, tick: Callable[[str], None]
) -> Iterator[contention.Row]:
    """Of every case, on one trace of so many seconds."""
    common = setting(runs, device.item_tokens)
    trace = contention.draw(common, random.Random(SEED), seconds)  # noqa: S311
    return contention.compare(device, common, trace, tick)


def runs_of(found: Found) -> list[Runs]:
    return [
        Runs(**{**each, "seconds": tuple(each["seconds"])}) for each in found.get("surface", ())
    ]


# On a GPU ---------------------------------------------------------------------------------------


def _card(found: Found) -> Iterator[Record]:
    yield {"driver": facts.gather("cuda").driver}
    yield from gpu.card()


def _threads(found: Found) -> Iterator[Record]:
    """Two threads of one process, each with contexts of its own."""
    with scratch() as path, ThreadPoolExecutor() as pool:
        verdicts = list(pool.map(lambda stage: gpu.prove_side(path, stage), gpu.STAGES))
    yield dataclasses.asdict(verdicts[0])


def _processes(found: Found) -> Iterator[Record]:
    """Two processes behind an MPS daemon: the one that is there, else one of our own."""
    with _mps() as environment, scratch() as path:
        sides = [_side(path, stage, environment) for stage in gpu.STAGES]
        said = [side.communicate()[0] for side in sides]
    if not said[0]:
        raise RuntimeError(f"the encoder's process ended with {sides[0].returncode}")
    yield json.loads(said[0])


def _side(path: Path, stage: Stage, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", MODULE, "side", str(path), stage]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@contextmanager
def _mps() -> Iterator[dict[str, str]]:
    """The environment of its clients. Raises DriverError where there is none."""
    pipes = mps.pipes_of()
    if mps.alive(pipes):
        yield mps.client_environment(os.environ, pipes, pipes)
        return
    if shutil.which(mps.CONTROL) is None:
        raise DriverError(f"{mps.CONTROL} is not installed: two processes take turns")
    with tempfile.TemporaryDirectory(prefix="easerve-mps-") as folder:
        pipes = Path(folder)
        environment = mps.daemon_environment(os.environ, pipes, pipes)
        daemon = subprocess.Popen(mps.command(static=False), env=environment)
        try:
            deadline = time.monotonic() + START_S
            while not mps.alive(pipes):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise DriverError("the MPS daemon does not start")
                time.sleep(0.05)
            yield mps.client_environment(os.environ, pipes, pipes)
        finally:
            _end(daemon, pipes)


def _end(daemon: subprocess.Popen[bytes], pipes: Path) -> None:
    with contextlib.suppress(DriverError):
        mps.Control(pipes).quit()
    try:
        daemon.wait(START_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _surface(found: Found) -> Iterator[Record]:
    with _device() as device:
        yield from map(dataclasses.asdict, surface(device))


def _contention(found: Found) -> Iterator[Record]:
    runs = runs_of(found)
    if not any(each.units for each in runs):
        raise DriverError("there is no surface to go by")
    with _device() as device:
        compared = rows(device, runs, RUN_S, lambda _: None)
        yield from map(dataclasses.asdict, compared)


@contextmanager
def _device() -> Iterator[gpu.GpuDevice]:
    """With every graph captured."""
    device = gpu.GpuDevice()
    try:
        device.prepare(BATCHES)
        yield device
    finally:
        device.close()


STEPS: Mapping[str, Callable[[Found], Iterator[Record]]] = {
    "card": _card,
    "threads": _threads,
    "processes": _processes,
    "surface": _surface,
    "contention": _contention,
}


def main(arguments: Sequence[str]) -> None:
    name, *rest = arguments
    if name == "side":
        path, stage = rest
        print(json.dumps(dataclasses.asdict(gpu.prove_side(Path(path), Stage(stage)))))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # what was begun is cleaned up
    try:
        for record in STEPS[name](json.load(sys.stdin)):
            print(json.dumps(record), flush=True)
    except DriverError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
