"""The fork server itself, with a vLLM of a few lines in place of the real one."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.vllm.launch import fork_server_command
from easerve.peer import Peer

from ..processes import is_alive, wait_until

SOURCES = Path(__file__).parents[2] / "src"
ENTRY = """
import json, os, sys, time
print("imported by", os.getpid(), flush=True)

def main():
    from vllm.v1 import cores
    seen = {
        "argv": sys.argv,
        "env": os.environ.get("OF_THE_ENGINE"),
        "cores": sorted(os.sched_getaffinity(0)),
        "leader": os.getsid(0) == os.getpid(),
        "context": cores.get_mp_context().get_start_method(),
    }
    print("seen", json.dumps(seen), flush=True)
    if "fail" in sys.argv:
        raise ValueError("no such weights")
    if "exit" in sys.argv:
        sys.exit(5)
    if "end" not in sys.argv:
        time.sleep(60)
"""
CORES = """
import multiprocessing

def get_mp_context():
    return multiprocessing.get_context("spawn")
"""
REGISTRY = """
import vllm.v1.cores

class Registered:
    def load_model_cls(self):
        print("inspected", flush=True)
        return Registered

class ModelRegistry:
    models = {"Llava": Registered()}
    def register_model(architecture, model):
        print("registered", architecture, model.__name__, flush=True)
"""


def write_packages(folder: Path) -> None:
    """vLLM, and nothing of what a real environment has beside it."""
    files = {
        "vllm/entrypoints/launchers/api_server/entry.py": ENTRY,
        "vllm/model_executor/models/registry.py": REGISTRY,
        "vllm/v1/cores.py": CORES,
        "transformers/__init__.py": "",
        "safetensors/__init__.py": "",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for package in path.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
        path.write_text(text)


class ForkServer:
    def __init__(self, folder: Path, architecture: str) -> None:
        self.log = folder / "engine.log"
        packages = folder / "packages"
        write_packages(packages)
        ours, theirs = socket.socketpair()
        ours.settimeout(5)
        self.peer = Peer(ours)
        with theirs:
            fd = str(theirs.fileno())
            command = fork_server_command(architecture, "fake")
            self.process = subprocess.Popen(
                [word.replace("{fd}", fd) for word in command],
                env={**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{SOURCES}"},
                pass_fds=(int(fd),),
                stdout=subprocess.PIPE,
                text=True,
            )
        self._news: list[dict[str, Any]] = []

    def hear(self) -> dict[str, Any]:
        while not self._news:
            received = self.peer.receive()
            assert received is not None
            self._news += received
        return self._news.pop(0)

    def start(self, *words: str, **more: str) -> int:
        """Ask for an engine, with more in its environment; its pid."""
        env = {"OF_THE_ENGINE": "1", **more}
        self.peer.send({"name": "decode-0", "argv": words, "env": env, "log": str(self.log)})
        news = self.hear()
        assert news["name"] == "decode-0"
        return int(news["pid"])

    def seen(self) -> dict[str, Any]:
        """What the engine has found."""
        wait_until(lambda: self.log.exists() and "seen" in self.log.read_text())
        (line,) = [line for line in self.log.read_text().splitlines() if line.startswith("seen")]
        seen: dict[str, Any] = json.loads(line.removeprefix("seen"))
        return seen

    def end(self) -> str:
        """Hang up; what it has printed."""
        self.peer.connection.close()
        out, _ = self.process.communicate(timeout=5)
        return out


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    server = ForkServer(tmp_path, "Llava")
    try:
        assert server.hear() == {"ready": True}
        yield server
    finally:
        server.end()


def test_an_engine_gets_its_arguments_environment_and_log(server: ForkServer) -> None:
    pid = server.start("--model", "m")
    seen = server.seen()
    assert seen["argv"] == ["vllm", "--model", "m"]
    assert seen["env"] == "1"
    assert seen["leader"], "it has a session, and a process group, of its own"
    os.kill(pid, signal.SIGKILL)
    assert server.hear() == {"exited": pid, "code": -9}


def test_an_engine_runs_on_its_cores_and_the_next_one_on_all(server: ForkServer) -> None:
    cores = sorted(os.sched_getaffinity(0))
    pid = server.start("end", EASERVE_CORES=str(cores[-1]))
    assert server.seen()["cores"] == cores[-1:]
    assert server.hear() == {"exited": pid, "code": 0}
    server.log = server.log.with_name("next.log")
    server.start("end")
    assert server.seen()["cores"] == cores


def test_vllm_is_imported_once_by_the_server(server: ForkServer) -> None:
    for _ in range(2):
        pid = server.start("end")
        assert server.hear() == {"exited": pid, "code": 0}
    assert "imported" not in server.log.read_text()
    assert server.end().count("imported by") == 1


def test_engines_fork_their_cores_too(server: ForkServer) -> None:
    server.start("end")
    assert server.seen()["context"] == "fork"


@pytest.mark.parametrize(("word", "code"), [("end", 0), ("exit", 5), ("fail", 1)])
def test_the_end_of_an_engine_is_told_with_its_code(
    server: ForkServer, word: str, code: int
) -> None:
    pid = server.start(word)
    assert server.hear() == {"exited": pid, "code": code}
    assert ("ValueError: no such weights" in server.log.read_text()) is (word == "fail")


def test_the_model_is_inspected_once_by_the_server(server: ForkServer) -> None:
    assert "inspected\nregistered Llava Registered" in server.end()


def test_an_unknown_architecture_is_left_to_the_engines(tmp_path: Path) -> None:
    server = ForkServer(tmp_path, "")
    assert server.hear() == {"ready": True}
    assert "inspected" not in server.end()


def test_it_ends_with_the_socket_and_not_with_its_engines(server: ForkServer) -> None:
    pids = [server.start(), server.start()]
    os.kill(pids[0], signal.SIGKILL)
    assert server.hear() == {"exited": pids[0], "code": -9}
    assert is_alive(server.process.pid)
    server.end()
    assert server.process.returncode == 0
    os.kill(pids[1], signal.SIGKILL)
