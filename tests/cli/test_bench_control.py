"""The control plane's bench: small runs of the real processes, and what is made of the figures."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from easerve.bench.report import Table
from easerve.cli.bench import control, control_shown
from easerve.cli.bench.command import Output
from easerve.cli.bench.control_systems import DIRECT, OURS, ROUTER, ROUTER_PD, find_router
from easerve.config import ConfigError

# Starts as vllm-router does, and passes nothing on.
DUMMY = """#!{python}
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def do_POST(self):
        self.send_response(500); self.send_header("content-length", "0"); self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def plan(router: Path | None = None, **changes: Any) -> control.Plan:
    fields: dict[str, Any] = {
        "rates_per_s": [40],
        "modalities": ["text"],
        "duration_s": 0.5,
        "num_tokens": 3,
        "num_saturating": 40,
        "concurrency": 4,
        "rounds": 1,
        "seed": 0,
        "router": router,
    }
    return control.Plan(**(fields | changes))


def program(path: Path, text: str) -> Path:
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)
    return path


def measured(asked: control.Plan, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    before = os.sched_getaffinity(0)
    assert control.run(asked, Output(as_json=True, html=None)) == 0
    assert os.sched_getaffinity(0) == before
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.long
def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(plan(modalities=["image"]), capsys)
    assert result["kind"] == "bench-control"
    assert result["ratio_vs_router"] is None
    assert result["max_req_per_s"] > 0
    for load in result["modalities"].values():
        for systems in (*load["rates"].values(), load["saturated"]):
            assert list(systems) == [DIRECT, OURS]
            assert {row["not_completed"] for row in systems.values()} == {0}
            assert systems[DIRECT]["cpu_s"] == 0 < systems[OURS]["cpu_s"]
        assert load["rates"]["40"][OURS]["ttft_p50_s"] > 0.01  # prefill alone takes so long
    tables = [
        part.title
        for section in control_shown.sections(result)
        for part in section.parts
        if isinstance(part, Table)
    ]
    assert len(tables) == 3


@pytest.mark.long
def test_beside_a_router_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measured(plan(program(tmp_path / "router", DUMMY)), capsys)
    saturated = result["modalities"]["text"]["saturated"]
    assert {name: row["not_completed"] for name, row in saturated.items()} == {
        DIRECT: 0,
        OURS: 0,
        ROUTER: 40,
        ROUTER_PD: 40,
    }


def test_a_router_that_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    router = program(tmp_path / "router", "#!{python}\nraise SystemExit('no port')\n")
    assert control.run(plan(router), Output(as_json=True, html=None)) == 1
    out, said = capsys.readouterr()
    assert out == ""
    assert f"vllm-router ({router}) did not start; it said: no port" in said


def test_a_router_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--router: .*/none is not a program"):
        find_router(str(tmp_path / "none"))


def test_the_figures_are_of_the_rate_next_to_200() -> None:
    def row(added_s: float) -> dict[str, Any]:
        return {OURS: {"added_p50_s": added_s, "added_p99_s": 2 * added_s}}

    full = {
        DIRECT: {"req_per_s": 1000.0},
        OURS: {"req_per_s": 900.0, "cpu_s": 1e-3},
        ROUTER_PD: {"req_per_s": 1800.0, "cpu_s": 2.5e-4},
    }
    rates = {"50": row(1.0), "180": row(2.0), "500": row(3.0)}
    assert control.figures({"text": {"rates": rates, "saturated": full}}) == {
        "added_p50_s": 2.0,
        "added_p99_s": 4.0,
        "max_req_per_s": 900.0,
        "is_client_bound": False,
        "cpu_s_per_request": 1e-3,
        "req_per_s_of_a_core": 1000.0,
        "ratio_vs_router": 0.25,
    }
