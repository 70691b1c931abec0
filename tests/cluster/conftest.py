import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from easerve.cluster.local import Folders, make_folders
from easerve.engines.vllm import launch

from . import dummies


@pytest.fixture
def run_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where deployments of this test put their sockets; a socket's path has to be short."""
    with tempfile.TemporaryDirectory(prefix="ea-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
def folders(run_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """The folders of a deployment, whose engines are dummies."""
    monkeypatch.setattr(launch, "ENTRY", dummies.ENTRY)
    made = make_folders(tmp_path / "logs")
    assert made.run.parent == run_root
    return made
