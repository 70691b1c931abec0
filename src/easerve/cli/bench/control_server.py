"""Our control plane alone, over the engines of ``engines.fake_server`` in a folder.

``python -m easerve.cli.bench.control_server FOLDER CORES`` prints its port. Everything is as
``easerve serve`` has it but that nobody starts or watches the engines. Pictures are decoded by
processes on ``CORES``, numbers with commas in between. It ends when standard input ends.
"""

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from easerve.cli.deploy import http_server, listen, raise_file_limit, rare_collections, recipe
from easerve.config import Deployment, build
from easerve.engines.fake_server import MODEL, STAGES
from easerve.engines.vllm.client import VllmEngine
from easerve.serve.driver import Driver
from easerve.serve.metrics import Metrics
from easerve.serve.preparation import PreparationPool
from easerve.types import Stage, WorkerId

NUM_SLOTS = 1 << 14  # engines that take whatever comes: none of the waiting is theirs


def deployment() -> Deployment:
    """Pass-through: these engines take any number of calls at once, so no batch has to wait."""
    content = {"model": MODEL, "device": "cpu", "served_model_name": MODEL}
    policy = {"when": "none", "flow": False, "max_queue_s": 1e6}
    limits = {"max_requests": NUM_SLOTS}
    return build({**content, "limits": limits, "policy": policy}, "bench control")


class Beside(PreparationPool):
    """Its processes run on cores of their own."""

    cores: frozenset[int]

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await super()._start()
        os.sched_setaffinity(worker.pid, self.cores)
        return worker


async def serve(folder: Path, cores: frozenset[int]) -> None:
    asked = deployment()
    limits = asked.limits
    preparation = Beside(limits.preparation_workers, limits.max_image_pixels)
    preparation.cores = cores
    driver = Driver(recipe(asked).make_core(), preparation, Metrics(), int(limits.max_decoded))
    listener = listen("127.0.0.1", 0)
    server = http_server(asked, driver)
    serving = asyncio.create_task(server.serve([listener]))
    engines = [
        VllmEngine(WorkerId(name), stage, folder / f"{name}.sock", MODEL, num_slots=NUM_SLOTS)
        for name, stage in zip(STAGES, Stage, strict=True)
    ]
    for engine in engines:
        driver.add_engine(engine)
    print(listener.getsockname()[1], flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
    with rare_collections():
        await ended.wait()
    server.should_exit = True
    await serving
    await driver.close()
    for engine in engines:
        await engine.close()


if __name__ == "__main__":
    raise_file_limit()
    uvloop.run(serve(Path(sys.argv[1]), frozenset(map(int, sys.argv[2].split(",")))))
