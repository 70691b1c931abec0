import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from easerve.cli.main import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


Easerve = Callable[..., Ended]


@pytest.fixture
def easerve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Easerve:
    """The command as a user gives it, in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["easerve", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code or 0
        assert isinstance(code, int)
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder of a model without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = '{"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}'
    (folder / "config.json").write_text(config)
    return folder


@pytest.fixture
def deployment(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(f"model: {model}\nserved_model_name: short\nprefill: {{replicas: 2}}\n")
    return path
