"""Stands in for ``easerve.engines.vllm.transfer``: python -m tests.cli.dummy_transfer FD SETTINGS.

It says which settings it got and is ready; a transfer of 13 items ends it.
"""

import json
import socket
import sys
from typing import Any

from easerve.peer import Peer

peer, settings = Peer(socket.socket(fileno=int(sys.argv[1]))), json.loads(sys.argv[2])
connectors = {name: roles["producer"]["ec_connector"] for name, roles in settings.items()}
peer.send({"ready": True})
while (orders := peer.receive()) is not None:
    order: dict[str, Any]
    for order in orders:
        if order["num_items"] == 13:
            raise SystemExit("ValueError: thirteen is too much")
        connector, destination = connectors[order["connector"]], order["destination"]
        peer.send({"connector": connector, "destination": destination})
