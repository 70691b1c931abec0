"""Forks CPU engines from one process that has imported vLLM already.

Importing vLLM takes about 14 CPU-seconds, twice per engine; a fork takes none and shares the
pages. For CPU engines only: an initialised CUDA context does not survive a fork.

Run by the supervisor as ``python -m easerve.engines.vllm.forkserver FD ARCHITECTURE MODEL_TYPE``.
FD is a stream socket with a JSON object per line. The server writes ``{"ready": true}`` once; each
``{"name", "argv", "env", "log"}`` it reads asks for one engine, answered by ``{"name", "pid"}``
and, when that engine ends, ``{"exited": pid, "code"}``.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing.context import BaseContext
from typing import Any

from easerve.peer import Peer

PRELOAD = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.scale_out.factories",
    "vllm.entrypoints.scale_out.token_in_token_out.serving",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.utils",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector",
    "easerve.engines.vllm.executor",
    "easerve.engines.vllm.cpu_worker",
    "easerve.engines.vllm.ec.connector",
)


def preload(architecture: str, model_type: str) -> None:
    """Import what every engine of this model will need."""
    for name in (*PRELOAD, f"transformers.models.{model_type}.processing_{model_type}"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from vllm.model_executor.models.registry import ModelRegistry

    registered: Any = ModelRegistry.models.get(architecture)
    if registered is not None:
        # A class is inspected here; a name would be inspected by each engine in a new process.
        ModelRegistry.register_model(architecture, registered.load_model_cls())


def fork_engine_cores() -> None:
    """Make vLLM fork its engine core too; its CPU platform would spawn (and import) it."""

    def fork_context() -> BaseContext:
        return multiprocessing.get_context("fork")

    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and "get_mp_context" in vars(module):
            vars(module)["get_mp_context"] = fork_context


def run_engine(request: dict[str, Any]) -> None:
    """Become the engine: its log, environment and arguments, then vLLM's own entry point."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(request["env"])
    if cores := os.environ.get("EASERVE_CORES"):  # as site/sitecustomize does
        os.sched_setaffinity(0, map(int, cores.split(",")))
    sys.argv = ["vllm", *request["argv"]]
    from vllm.entrypoints.launchers.api_server.entry import main

    main()


def fork_engine(request: dict[str, Any], control: socket.socket) -> int:
    """Fork one engine; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        control.close()
        run_engine(request)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reap() -> Iterator[dict[str, int]]:
    """The engines that have ended since the last call."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            yield {"exited": ended[0], "code": os.waitstatus_to_exitcode(ended[1])}


def main() -> None:
    control = Peer(socket.socket(fileno=int(sys.argv[1])))
    preload(sys.argv[2], sys.argv[3])
    fork_engine_cores()
    gc.collect()
    gc.freeze()
    if threading.active_count() > 1:
        raise SystemExit(f"cannot fork safely: {threading.enumerate()} are running")
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)

    control.send({"ready": True})
    while True:
        readable, _, _ = select.select([control.connection, woken], [], [])
        if woken in readable:
            with contextlib.suppress(BlockingIOError):
                woken.recv(4096)
            for ended in reap():
                control.send(ended)
        if control.connection in readable:
            requests = control.receive()
            if requests is None:
                return
            for request in requests:
                pid = fork_engine(request, control.connection)
                control.send({"name": request["name"], "pid": pid})


if __name__ == "__main__":
    main()
