"""``easerve bench`` on real engines: small, for its form; the figures are for people."""

import json
import os
import subprocess
import sys
import tempfile
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


def test_transfers_of_every_system_are_measured_and_leave_nothing(tmp_path: Path) -> None:
    page, disk = tmp_path / "transfer.html", tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "easerve.cli.main", "bench", "transfer", "--json"]
    options = ["--rounds", "2", "--items", "1,4", "--disk", str(disk), "--html", str(page)]
    with tempfile.TemporaryDirectory(prefix="ea-test-") as runtime:
        done = subprocess.run(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, "XDG_RUNTIME_DIR": runtime},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        left = [*Path(runtime).iterdir(), *disk.iterdir()]
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ratio"] == result["push_s"] / result["example_s"] > 0
    data = {(row["case"], row["num_items"], row["connector"]): row for row in result["data"]}
    assert len(data) == 2 * 2 * 3
    for row in data.values():
        assert 0 < row["usable_s"]["median"] <= row["read_s"]["median"]
        assert row["bytes_per_s"] > 0
    assert data["large", 4, "push"]["num_bytes"] == 4 * 576 * 4096 * 2
    systems = {(row["num_items"], row["system"]): row for row in result["engines"]}
    assert len(systems) == 2 * 4
    for (_, system), row in systems.items():
        assert row["encode_s"]["median"] > 0
        assert row["first_token_s"]["median"] > 0
        assert (row["wait_s"] is not None) is system.startswith("push")
    assert page.read_text().count("<figure") == 6
    assert not left
