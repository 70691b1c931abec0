"""The server of a live search with engines that are made up: ``... FD``, as ``live_server``.

The server is the real one. Engines answer in its process, and each has a process besides that only
listens, so that there is something to start, to lose and to end. What goes wrong is told by the
environment: ``STAND_IN`` is ``mute`` (nothing is said) or ``stuck`` (it does not end when told to).
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from easerve.cli import deploy
from easerve.cli.search import live_server
from easerve.engines.fake import Fabric, FakeEngine
from easerve.engines.vllm import launch
from easerve.types import Stage, WorkerId

FABRIC = Fabric()
HOLD_S = 60


class Engine(FakeEngine):
    def __init__(
        self,
        worker_id: WorkerId,
        stage: Stage,
        socket: Path,
        model: str,
        media_at_prefill: bool,
        num_slots: int,
        max_batch_tokens: int,
        *,
        beside: tuple[WorkerId, ...] = (),
        **_: Any,
    ) -> None:
        super().__init__(
            worker_id,
            stage,
            FABRIC,
            num_slots=num_slots,
            max_batch_tokens=max_batch_tokens,
            beside=beside,
        )

    async def learn_limits(self) -> None:
        pass


if __name__ == "__main__":
    vars(deploy)["VllmEngine"] = Engine
    launch.ENTRY = "tests.cli.dummy_engine"
    how = os.environ.get("STAND_IN")
    if how == "mute":
        time.sleep(HOLD_S)
    code = live_server.main()
    if how == "stuck":
        time.sleep(HOLD_S)
    sys.exit(code)
