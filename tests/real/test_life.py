"""Nothing outlives the server, however it ends; an engine that ends is noticed and named."""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import httpx

from easerve.types import Stage

from ..processes import is_alive, wait_until
from .conftest import RealServer, descendants


def listening() -> dict[str, int]:
    """Every TCP socket of this host that listens: inode -> port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {line[9]: int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A"}


def sockets_of(pids: set[int]) -> set[str]:
    """Inodes of the sockets that these processes hold."""
    inodes = set()
    for fd in (fd for pid in pids for fd in Path(f"/proc/{pid}/fd").glob("*")):
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"^socket:\[(\d+)\]$", str(fd.readlink())))
    return inodes


def test_kill_9_of_the_server_leaves_nothing(start: Callable[..., RealServer]) -> None:
    before = set(Path("/dev/shm").iterdir())
    server = start("--port", "0").wait_ready()
    run_dir = server.run_dir
    family = descendants(server.process.pid)
    assert len(family) >= 7  # supervisor, fork server, three engines of two processes
    ours = sockets_of(family | {server.process.pid})
    assert len(ours & listening().keys()) > 3  # the server's, and those of the KV transfer
    port = int(server.url.rpartition(":")[2])
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(map(is_alive, family)), 5, "every engine gone")
    wait_until(lambda: not run_dir.exists(), 5, "folder gone")
    assert not ours & listening().keys()
    socket.create_server(("127.0.0.1", port)).close()
    assert set(Path("/dev/shm").iterdir()) <= before


def test_a_lost_engine_is_noticed_and_ctrl_c_ends_the_rest(
    start: Callable[..., RealServer],
) -> None:
    server = start("--port", "0", "--api-key", "secret").wait_ready()
    run_dir = server.run_dir
    family = descendants(server.process.pid)
    engine_cores = [
        pid for pid in family if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(engine_cores) == 3
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    header = {"authorization": "Bearer secret"}
    assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    for pid in engine_cores:
        os.kill(pid, signal.SIGKILL)
    # vLLM's API server looks after its engine core every five seconds.
    wait_until(lambda: all(f"{stage}-0 ended" in server.text for stage in Stage), 15, "the news")
    assert httpx.get(f"{server.url}/ready").status_code == 503
    body = {"model": "tiny-llava", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=header)
    assert answer.status_code == 503
    assert server.stop(signal.SIGINT) == 0
    assert not any(map(is_alive, family))
    assert not run_dir.exists()


def test_an_engine_that_cannot_start_is_an_error_that_names_its_log(
    start: Callable[..., RealServer],
) -> None:
    server = start("--port", "0", "--max-model-len", "100000")
    assert server.process.wait(120) == 1
    logs = re.findall(r"^log: (\S+)$", server.text, re.MULTILINE)
    assert logs, server.text
    assert Path(logs[0]).read_text()
    assert "max_model_len" in server.text
    assert list(server.runtime.glob("easerve-*")) == []


def test_ctrl_c_while_the_engines_start_leaves_nothing(start: Callable[..., RealServer]) -> None:
    server = start("--port", "0")
    wait_until(lambda: len(descendants(server.process.pid)) >= 2, 20, "starting")
    family = descendants(server.process.pid)
    assert server.stop(signal.SIGINT) == 0
    assert not any(map(is_alive, family))
    assert "before the engines were ready" in server.text
    assert list(server.runtime.glob("easerve-*")) == []
