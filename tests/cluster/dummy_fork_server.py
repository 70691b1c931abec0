"""A fork server without vLLM: speaks the protocol of ``easerve.engines.vllm.forkserver``.

Run as ``python -m tests.cluster.dummy_fork_server FD [WORD ...]``.
"""

import os
import select
import socket
import sys
import time

from easerve.peer import Peer

from .dummy_engine import main as run_engine


def fork(request: dict[str, object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    log = os.open(str(request["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    argv = request["argv"]
    assert isinstance(argv, list)
    sys.argv = ["dummy", *argv]
    try:
        run_engine()
    except SystemExit as end:
        os._exit(int(str(end.code)))
    os._exit(0)


def main() -> None:
    words = sys.argv[2:]
    if "exit" in words:
        print("ImportError: no vllm here", flush=True)
        sys.exit(4)
    if "silent" in words:
        print("importing", flush=True)
        time.sleep(60)
    control = Peer(socket.socket(fileno=int(sys.argv[1])))
    control.send({"ready": True})
    engines: set[int] = set()
    while True:
        readable, _, _ = select.select([control.connection], [], [], 0.05)
        if readable:
            requests = control.receive()
            if requests is None:
                return
            for request in requests:
                pid = fork(request)
                engines.add(pid)
                control.send({"name": request["name"], "pid": pid})
        for pid in list(engines):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                engines.remove(pid)
                code = os.waitstatus_to_exitcode(status)
                control.send({"exited": pid, "code": code})


if __name__ == "__main__":
    main()
