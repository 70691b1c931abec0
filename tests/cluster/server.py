"""A server to be killed: ``python -m tests.cluster.server LOG_ROOT WORDS ...``.

Starts a dummy engine for each WORDS (forked when the first is ``fork``), prints its folders and
pids as JSON, and stays.
"""

import asyncio
import json
import sys
from pathlib import Path

from easerve.cluster.local import LocalCluster, make_folders
from easerve.engines.vllm import launch

from . import dummies


async def main(log_root: Path, engines: list[str]) -> None:
    launch.ENTRY = dummies.ENTRY
    forked = engines[0] == "fork"
    folders = make_folders(log_root)
    specs = dummies.engine_specs(folders, *engines[forked:])
    cluster = LocalCluster(folders, specs, dummies.fork_server() if forked else None)
    await cluster.start(dummies.healthy, timeout_s=10)
    assert cluster._process is not None
    report = {
        "run": str(folders.run),
        "supervisor": cluster._process.pid,
        "pids": list(cluster.pids.values()) + [p for s in specs for p in dummies.pids_in(s.log)],
    }
    print(json.dumps(report), flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
