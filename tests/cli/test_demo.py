from pathlib import Path

import pytest

from .conftest import Easerve

OFFLOAD = Path(__file__).parents[2] / "examples/tiny-llava-offload.yaml"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("[1]", "expected a mapping"),
        ("device: cpu", "model: Field required"),
        ("model: 5", "model: Input should be a valid string"),
        ("model: null", "model: Input should be a valid string"),
        ("{model: a/b, engin: {}}", "engin: unknown key; did you mean 'engine'?"),
        ("{model: ./nosuch}", "no such folder"),
    ],
)
def test_a_deployment_that_cannot_be_used_is_a_usage_error(
    easerve: Easerve, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "d.yaml"
    if text is not None:
        path.write_text(text)
    ended = easerve("demo", "--deployment", path)
    assert ended.code == 2
    assert ended.err.startswith("easerve: ")
    assert message in ended.err


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "device: Input should be 'cpu' or 'cuda'"), ("cuda", "no NVIDIA driver")],
)
@pytest.mark.parametrize("more", [(), ("--deployment", OFFLOAD)], ids=["default", "offload"])
def test_a_device_that_is_not_here_is_a_usage_error(
    easerve: Easerve,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    message: str,
    more: tuple[str | Path, ...],
) -> None:
    monkeypatch.setattr("easerve.cli.deploy.NVIDIA_DRIVER", Path("/nonexistent"))
    ended = easerve("demo", "--device", device, *more)
    assert (ended.code, message in ended.err) == (2, True)
