"""The live objective on real engines: small, for what is started and what is left."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest

from easerve.cli.bench import asked
from easerve.cli.search.live import LiveObjective
from easerve.cli.search.live_load import Window
from easerve.cli.search.live_process import ServerProcess
from easerve.goodput import Slo
from easerve.search.space import SHARE, Allocation, Knob, Space

from ..processes import is_alive
from .conftest import DEPLOYMENT, descendants

SPACE = Space(
    [Allocation("e1-p1-d1", {}), Allocation("e1-p1-d1, 8 slots", {"decode.max_num_seqs": 8})],
    [Knob("policy.when", ("none", "slack")), Knob(SHARE, (1.0,))],
)
SHAPES = asked.source("shapes", output_tokens="8")


def pids_of(objective: LiveObjective) -> dict[str, int]:
    server = objective._server
    assert isinstance(server, ServerProcess)
    return dict(server.served.pids)


def unheld() -> set[str]:
    """Shared memory of nobody: what others of this machine use is none of our business."""
    held = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            held |= {line.rpartition(" ")[2] for line in maps.read_text().splitlines()}
    return {str(path) for path in Path("/dev/shm").iterdir()} - held


def test_engines_stay_for_knobs_and_are_started_for_an_allocation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before, ours = unheld(), descendants(os.getpid())
    none, slack, other, _ = SPACE
    with tempfile.TemporaryDirectory(prefix="ea-test-") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        window = Window(SHAPES, 10.0, 1.0, num_warmup=1)
        with LiveObjective(
            DEPLOYMENT, SPACE, window, Slo(ttft_s=20.0), allow_late=True
        ) as objective:
            scores = [objective.score(none, 0)]
            first = pids_of(objective)
            scores.append(objective.score(slack, 0))
            assert pids_of(objective) == first
            scores.append(objective.score(other, 0))
            second = pids_of(objective)
            family = descendants(os.getpid()) - ours
            assert family >= set(second.values())
        assert not list(Path(runtime).iterdir())
    assert all(name.endswith("-0") or name == "fork server" for name in first)
    assert not set(first.values()) & set(second.values())
    assert not any(map(is_alive, family | set(first.values())))
    assert not unheld() - before
    for score in scores:
        assert score.attainment == 1
        assert score.goodput_per_s > 2
