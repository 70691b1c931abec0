"""``easerve profile --parts capacity`` on real engines: how the figures must be to each other, and
that nothing is left.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from .conftest import DEPLOYMENT, ROOT

OPTIONS = "--parts capacity --json --batches 1,8 --output-tokens 8".split()


def test_each_stage_alone_is_measured_once(tmp_path: Path) -> None:
    content = yaml.safe_load(DEPLOYMENT.read_text())
    for stage in ("prefill", "decode"):
        content[stage]["max_num_seqs"] = 4
    deployment = tmp_path / "deployment.yaml"
    deployment.write_text(yaml.safe_dump(content | {"model": str(ROOT / "models/tiny-llava")}))
    with tempfile.TemporaryDirectory(prefix="ea-test-") as runtime:
        done = _profile(deployment, runtime)
        left = list(Path(runtime).iterdir())
        again = _profile(deployment, runtime)
    assert done.returncode == 0, done.stderr
    assert not left
    result = json.loads(done.stdout)
    rows = {(row["stage"], row["batch"]): row for row in result["capacity_rows"]}
    assert list(rows) == [
        *(("encode", batch) for batch in (1, 8)),
        *((stage, batch) for stage in ("prefill", "decode") for batch in (1, 4)),
    ]
    assert all(0 < row["seconds"] < 2 for row in rows.values())
    assert rows["encode", 8]["per_s"] > 1.5 * rows["encode", 1]["per_s"]
    one, many = (rows["decode", batch]["per_s"] for batch in (1, 4))
    assert many > 1.5 * one
    assert all(each > 0 for each in result["capacity_per_s"].values())
    assert "ready" not in again.stderr  # all is in the file: no engine was started
    assert json.loads(again.stdout)["capacity_rows"] == result["capacity_rows"]


def _profile(deployment: Path, runtime: str) -> "subprocess.CompletedProcess[str]":
    """The profile goes beside the deployment."""
    words = ["profile", str(deployment), "--out", str(deployment.parent), *OPTIONS]
    return subprocess.run(
        [sys.executable, "-m", "easerve.cli.main", *words],
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": runtime},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
