"""A real server: ``easerve serve`` as a user starts it, with real vLLM engines on this CPU."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from easerve.engines.vllm.launch import SITE

from ..processes import wait_until

ROOT = Path(__file__).parents[2]
# For processes with torch and transformers of their own.
HUGGING_FACE = {"PYTHONPATH": str(SITE), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
TOOLS = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
ADMIN_TOKEN = "the-admins"
DEPLOYMENT = ROOT / "examples/tiny-llava.yaml"
START_TIMEOUT_S = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engines)


def parents() -> dict[int, int]:
    """Every process and its parent."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            found[int(folder.name)] = int(fields[1])
    return found


def descendants(pid: int) -> set[int]:
    tree, found = parents(), {pid}
    while new := {child for child, parent in tree.items() if parent in found} - found:
        found |= new
    return found - {pid}


@dataclass
class RealServer:
    """``runtime``: the only folder it may use for sockets; ``output``: what it printed."""

    process: subprocess.Popen[bytes]
    runtime: Path
    output: Path
    decision_log: Path | None = None

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def url(self) -> str:
        found = re.search(r"is served at (http://\S+)/v1", self.text)
        assert found, self.text
        return found.group(1)

    @property
    def run_dir(self) -> Path:
        (folder,) = self.runtime.glob("easerve-*")
        return folder

    def wait_ready(self) -> "RealServer":
        def ready() -> bool:
            assert self.process.poll() is None, self.text
            return "is served at" in self.text

        try:
            wait_until(ready, START_TIMEOUT_S, "ready")
        except AssertionError as error:
            raise AssertionError(f"{error}; it printed:\n{self.text}") from None
        return self

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


def golden(requests: Sequence[list[dict[str, Any]]]) -> list[dict[str, list[int]]]:
    """Token ids of ``prompt`` and ``answer`` (24 at most) of each, by Hugging Face."""
    output = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("golden.py")), "models/tiny-llava", "24"],
        input="\n".join(json.dumps(messages) for messages in requests),
        env=HUGGING_FACE,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert output.returncode == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()]


@contextlib.contextmanager
def servers() -> Iterator[Callable[..., RealServer]]:
    """Starts servers; each is killed at the end, should it be left."""
    started: list[RealServer] = []

    def start_server(*options: str, source: Path | str = DEPLOYMENT) -> RealServer:
        runtime = Path(tempfile.mkdtemp(prefix="ea-test-"))
        output = runtime / "output.txt"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "easerve.cli.main", "serve", str(source), *options],
                cwd=ROOT,
                env={
                    **os.environ,
                    "XDG_RUNTIME_DIR": str(runtime),
                    "XDG_STATE_HOME": str(runtime / "state"),
                    "COLUMNS": "200",
                },
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )
        started.append(RealServer(process, runtime, output))
        return started[-1]

    try:
        yield start_server
    finally:
        for server in started:
            server.process.kill()
            server.process.wait()
            shutil.rmtree(server.runtime, ignore_errors=True)


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., RealServer]]:
    with servers() as start_server:
        yield start_server


@pytest.fixture(scope="session")
def server(
    start: Callable[..., RealServer], tmp_path_factory: pytest.TempPathFactory
) -> RealServer:
    """One server for all tests that leave it as it was."""
    log = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    options = ("--admin-token", ADMIN_TOKEN, "--decision-log", str(log))
    started = start("--port", "0", *TOOLS, *options)
    started.decision_log = log
    return started.wait_ready()


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models with random weights, written by the repository's script."""
    folder = tmp_path_factory.mktemp("models")
    names = {"next": "tiny-llava-next", "pixtral": "tiny-pixtral", "mistral3": "tiny-mistral3"}
    subprocess.run(
        [sys.executable, "-m", "scripts.random_models", *names, "--out", str(folder)],
        env=HUGGING_FACE,
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return {kind: folder / name for kind, name in names.items()}


@pytest.fixture(scope="session")
def aggregated(random_models: dict[str, Path]) -> Iterator[dict[str, Path]]:
    """Each model in one plain vLLM engine; the socket that its API server listens on."""
    folder = Path(tempfile.mkdtemp(prefix="ea-test-"))
    models = {"llava": ROOT / "models/tiny-llava", **random_models}
    log = folder / "output.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.real.aggregated", str(folder)]
            + [f"{name}={model}" for name, model in models.items()],
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
        )

    def ready() -> bool:
        assert process.poll() is None, log.read_text()
        return "ready" in log.read_text()

    try:
        wait_until(ready, START_TIMEOUT_S, "aggregated engines ready")
        yield {name: folder / f"{name}.sock" for name in models}
    finally:
        process.communicate()  # closes its input, at whose end it ends
        shutil.rmtree(folder, ignore_errors=True)
