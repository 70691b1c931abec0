"""The server of a live search: what ``easerve serve`` runs, in a child that its parent can rely on.

Run as ``python -m easerve.cli.search.live_server FD``. FD is a stream socket with a JSON object per
line. The first has the ``content`` of a deployment file and its ``source``; whatever comes then
ends the server, without finishing its open requests. News:

* ``{"engine": name, "state"}``: while the engines start;
* ``{"address", "pids", "logs", "run"}``: requests are served;
* ``{"exited": name, "code", "log"}``: an engine ended that was not asked to;
* ``{"error": text}``: it cannot be served; the process ends.

When the socket closes, whoever gave the orders is gone, however it went: this process ends at once,
and the supervisor of the engines ends them (cluster/supervisor).
"""

import asyncio
import logging
import os
import socket
import sys

import uvloop

from easerve.cli.deploy import Service, raise_file_limit, service
from easerve.cluster.local import EngineStartError
from easerve.config import ConfigError, Deployment, build
from easerve.engines.protocol import EngineError
from easerve.peer import Peer
from easerve.types import WorkerId


async def serve(deployment: Deployment, peer: Peer) -> None:
    """Until it is told to end. Raises what ``deploy.service`` does."""
    main, stopped = asyncio.current_task(), asyncio.Event()
    assert main is not None
    running: Service | None = None

    def hear() -> None:
        if peer.receive() is None:
            os._exit(1)
        if running is None:
            main.cancel()
        elif not stopped.is_set():
            running.hurry()
        stopped.set()

    def starting(name: str, state: str) -> None:
        peer.send({"engine": name, "state": state})

    def exited(worker_id: WorkerId, code: int, _: float | None) -> None:
        if running is not None:  # before that it is an EngineStartError
            log = running.cluster.folders.logs / f"{worker_id}.log"
            peer.send({"exited": worker_id, "code": code, "log": str(log)})

    asyncio.get_running_loop().add_reader(peer.connection.fileno(), hear)
    try:
        async with service(deployment, starting, exited) as running:
            peer.send(_served(running))
            await stopped.wait()
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise


def _served(running: Service) -> dict[str, object]:
    folders = running.cluster.folders
    return {
        "address": running.address,
        "pids": running.cluster.pids,
        "logs": str(folders.logs),
        "run": str(folders.run),
    }


def main() -> int:
    """The exit code."""
    raise_file_limit()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    peer = Peer(socket.socket(fileno=int(sys.argv[1])))
    orders: list[dict[str, object]] | None = []
    while orders == []:
        orders = peer.receive()
    if orders is None:
        return 1
    content, source = orders[0]["content"], orders[0]["source"]
    assert isinstance(content, dict)
    try:
        uvloop.run(serve(build(content, str(source)), peer))
    except (ConfigError, EngineStartError, EngineError) as error:
        peer.send({"error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
