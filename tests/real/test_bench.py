"""``easerve bench encode`` on real engines: small, for its form; the figures are for people."""

import json
import subprocess
import sys
from pathlib import Path

from .conftest import ROOT

SMALL = "--rounds 1 --pictures 32 --requests 16 --concurrency 8 --duration-s 0.5".split()
SWEEPS = "--rates 8,16 --rules none,slack --windows-ms 0,50".split()


def test_every_part_says_what_it_promises(tmp_path: Path) -> None:
    page = tmp_path / "encode.html"
    command = [sys.executable, "-m", "easerve.cli.main", "bench", "encode", "--json"]
    done = subprocess.run(
        [*command, *SMALL, *SWEEPS, "--html", str(page)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for name in ("encode_stage_ratio", "one_call_ratio", "server_ratio", "low_load_ttft_ratio"):
        assert result[name] > 0
    assert set(result["systems"]) == {"none", "slack"}
    for row in result["systems"].values():
        assert row["not_completed"] == 0
        assert row["ttft_s"]["mean"] > 0
        assert 0 < row["busy_share"] <= 1
        assert {"items_per_s", "batch_mean", "encode_wait_s"} <= row.keys()
        assert list(row["by_rate"]) == ["8", "16"]
    assert result["systems"]["none"]["batch_mean"] == 1
    assert result["stage"]["slack"]["batch_mean"] >= 16
    assert list(result["windows"]) == ["0", "0.05"]
    assert page.read_text().count("<figure") >= 6
