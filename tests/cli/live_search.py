"""A live search to be killed: ``... FILE`` scores once and prints the pids of its engines."""

import json
import sys
import time
from functools import partial
from pathlib import Path

from easerve.cli.bench import asked
from easerve.cli.search.live import LiveObjective
from easerve.cli.search.live_load import Window
from easerve.cli.search.live_process import ServerProcess
from easerve.goodput import Slo
from easerve.search.space import SHARE, Allocation, Knob, Space

STAND_IN = ("-m", "tests.cli.live_stand_in")
SPACE = Space(
    [
        Allocation("e1-p1-d1", {"prefill.replicas": 1}, {"local_prefill": {"max_num_seqs": 7}}),
        Allocation("e1-p1x2-d1", {"prefill.replicas": 2}),
    ],
    [Knob("policy.when", ("none", "greedy")), Knob(SHARE, (0.5, 1.0))],
)
TEXT = asked.source("text", text_tokens="4", output_tokens="4")
SLO = Slo(ttft_s=5.0)
start = partial(ServerProcess.start, server=STAND_IN)


def main(path: Path) -> None:
    window = Window(TEXT, 20.0, 0.2, num_warmup=2)
    with LiveObjective(
        path, SPACE, window, SLO, serve=start, allow_late=True, practises=False
    ) as objective:
        objective.score(next(iter(SPACE)), 0)
        server = objective._server
        assert isinstance(server, ServerProcess)
        pids = [*server.served.pids.values(), server._process.pid]
        print(json.dumps({"pids": pids, "run": str(server.served.run)}), flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
