"""``easerve bench cpu`` on real engines: small, for its form; the figures are for people."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .conftest import ROOT

VARIANTS = {"passthrough", "When", "Where", "How", "all"}


def test_every_system_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    page, out = tmp_path / "cpu.html", tmp_path / "cpu.json"
    command = [sys.executable, "-m", "easerve.cli.main", "bench", "cpu", "--quick"]
    with tempfile.TemporaryDirectory(prefix="ea-test-") as runtime:
        done = subprocess.run(
            [*command, "--out", str(out), "--html", str(page)],
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": runtime, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        left = [*Path(runtime).iterdir()]
    assert done.returncode == 0, done.stderr
    assert not left
    assert "Where the time goes" in page.read_text()
    assert "All mechanisms together answer" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    result = json.loads(out.read_text())
    assert result["kind"] == "bench-cpu"
    (mix,) = result["mixes"]
    plain = mix["best_vllm"]
    assert set(mix["systems"]) == {*VARIANTS, plain}
    for run in mix["systems"].values():
        assert run["not_completed"] == 0
        assert run["throughput_per_s"] > 0
        assert all(seconds >= 0 for seconds in run["used_s"].values())
    assert mix["systems"]["passthrough"]["sizes"]["items_per_call"] == 1
    assert mix["systems"]["When"]["sizes"]["items_per_call"] > 1
    assert mix["systems"]["Where"]["sizes"]["remote_share"] == 0.5
    for name in VARIANTS:
        assert mix["systems"][name]["sizes"]["steps"]["decode"] > 0
        assert mix["predicted"][name]["cpu_s"] > 0
    assert set(mix["ratios"]) == {"passthrough", plain}
    assert all(row["not_completed"] == 0 for row in result["slo"]["rows"])
    for seen in result["timelines"]:
        assert seen["calls"]["encode"]
        assert seen["beside"]["encode"] > 0
