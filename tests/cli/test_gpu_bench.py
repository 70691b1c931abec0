import dataclasses
import io
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from easerve.bench.report import Table
from easerve.cli import gpu_bench, gpu_shown, gpu_steps
from easerve.config import ConfigError
from easerve.engines.partition.contention import CASES, Row
from easerve.engines.partition.facts import Facts, Gpu
from easerve.engines.partition.sides import DriverError
from easerve.engines.partition.sweep import Runs
from easerve.sim.device import Sharing

FACTS = Facts(cpu="A CPU", cores=(0,), features=(), environment={}, shm=True, uid=0)
STEPS = """
import json, os, signal, subprocess, sys, time
name = sys.argv[1]

def left(text):
    open(os.environ["LEFT"], "w").write(str(text))

if name == "stubborn":
    signal.signal(signal.SIGTERM, lambda *_: left("asked"))
    left("hangs")
    while True:
        time.sleep(60)
elif name == "late":
    from easerve.cli import gpu_steps

    def late(found):
        try:
            yield {"seen": 1}
            left("hangs")
            time.sleep(60)
        finally:
            left("cleaned up")

    gpu_steps.STEPS = {"late": late}
    gpu_steps.main(["late"])

found = json.load(sys.stdin)
if name == "card":
    print(json.dumps({"driver": "580.1"}))
    print(json.dumps({"source": "card", "torch": "2"}))
    print(json.dumps({"num_sms": 132, "cuda": 13000, "context_ms": [1.0, 2.0, 9.0],
        "stream_ms": [0.5], "granule": 8, "idle_sms": 0}))
    print(json.dumps({"set_stream_us": 1.0, "confine_us": 5.0}))
elif name == "threads":
    print(json.dumps({"ok": True, "why": "seen"}))
elif name == "processes":
    sys.stderr.write("Traceback\\nRuntimeError: no MPS\\n")
    sys.exit(1)
elif name == "surface":
    for batch in (1, 2):
        for units in (0, 8, 16):
            seconds = [0.01 * batch * 16 / (units or 32)] * 20
            print(json.dumps({"batch": batch, "units": units, "beside": False,
                "seconds": seconds}), flush=True)
    print('{"batch": 4, ', end="", flush=True)
    child = subprocess.Popen(["sleep", "60"])
    left(child.pid)
    time.sleep(60)
elif name == "contention":
    assert found["surface"][0]["batch"] == 1, found
    assert found["processes"] == []
    os.abort()
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that seems to have one."""
    card = Gpu("card", "GPU-1", (9, 0), 132)
    monkeypatch.setattr(gpu_bench, "gather", lambda _: replace(FACTS, gpus=(card,)))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps that end in every way there is; the file says what process one of them has left."""
    left = tmp_path / "left"
    (tmp_path / "stand_in_steps.py").write_text(STEPS)
    monkeypatch.setenv("LEFT", str(left))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_steps, "MODULE", "stand_in_steps")
    wait = subprocess.Popen.wait

    def wait_for_what_hangs(process: subprocess.Popen[bytes], limit_s: float | None = None) -> int:
        """Its time is up as soon as it hangs."""
        begin = time.monotonic()
        while limit_s is not None and process.poll() is None:
            hangs = left.exists() and left.read_text()
            if hangs:
                left.rename(tmp_path / "seen")
            if hangs or time.monotonic() - begin > limit_s:
                raise subprocess.TimeoutExpired("step", limit_s)
            time.sleep(0.01)
        return wait(process)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_for_what_hangs)
    return tmp_path / "seen"


def row(case: str = "gate", step: str = "fine", share: float = 0.9, fit: float = 1.0) -> Row:
    return Row(case, step, 2, 5.0, 9.0, 1.0, 2.0, 0.5, fit, 0.0, 400.0, share, (5.0, 9.0))


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("error", ["there is no CUDA driver", ""])
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: str,
    as_json: bool,
) -> None:
    monkeypatch.setattr(gpu_bench, "gather", lambda _: replace(FACTS, error=error))
    assert gpu_bench.run(as_json, None, False) == 1
    out, err = capsys.readouterr()
    said = f"no GPU: {error or 'the driver sees none'} (--simulate needs none)"
    assert err == f"easerve: {said}\n"
    assert out == (json.dumps({"error": said}) + "\n" if as_json else "")


def test_torch_is_asked_for(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert gpu_bench.run(False, None, False) == 1
    assert "torch is not installed" in capsys.readouterr().err


@pytest.mark.long
def test_the_parent_and_the_steps_need_no_torch() -> None:
    code = "import sys; from easerve.cli import gpu_bench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_a_report_that_cannot_be_written_is_found_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        gpu_bench.run(False, tmp_path / "nowhere" / "report.html", True)


def test_a_step_that_fails_or_hangs_costs_its_own_results_alone(
    gpu: None, steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_bench.run(True, None, False) == 1  # no row of the last step
    result = json.loads(capsys.readouterr().out)
    assert result["errors"] == {
        "processes": "RuntimeError: no MPS",
        "surface": "killed after 75 s",
        "contention": "ended with -6",
    }
    assert result["card"]["confine_us"] == 5
    assert (result["threads"]["ok"], result["processes"]) == (True, None)
    (device,) = result["devices"]
    assert device["source"] == "card, torch 2"
    assert len(device["surface"]) == 6
    assert device["min_units"]["1"] == {"units": 8, "met": True}
    assert device["min_units"]["2"] == {"units": 16, "met": True}


def test_a_step_says_why_the_driver_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: gpu_steps.Found) -> NoReturn:
        raise DriverError("no parts")

    monkeypatch.setattr(gpu_steps, "STEPS", {"card": refuse})
    monkeypatch.setattr("sys.stdin", io.StringIO("{}"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it is for a process of its own
    with pytest.raises(SystemExit, match="no parts"):
        gpu_steps.main(["card"])


def test_the_processes_need_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DriverError, match="nvidia-cuda-mps-control is not installed"):
        list(gpu_steps.STEPS["processes"]({}))


def test_rules_are_not_compared_without_a_surface() -> None:
    with pytest.raises(DriverError, match="no surface"):
        list(gpu_steps.STEPS["contention"]({"surface": []}))


def test_what_a_step_has_started_ends_with_it(gpu: None, steps: Path) -> None:
    gpu_bench.step("surface", {}, 75.0)
    deadline = time.monotonic() + 2
    while _runs(int(steps.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(int(steps.read_text()))


@pytest.mark.parametrize(
    ("name", "said", "records"), [("late", "cleaned up", [{"seen": 1}]), ("stubborn", "asked", [])]
)
def test_a_step_that_is_late_is_asked_to_end_before_it_is_killed(
    steps: Path, name: str, said: str, records: list[gpu_steps.Record]
) -> None:
    assert gpu_bench.step(name, {}, 20.0) == (records, "killed after 20 s")
    assert said in {each.read_text() for each in (steps, steps.with_name("left")) if each.exists()}


def _runs(pid: int) -> bool:
    """It has not ended, though nobody may have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_was_found_of_a_gpu_is_shown(
    gpu: None, steps: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    gpu_bench.run(False, None, False)
    out = capsys.readouterr().out
    for text in (
        "card, 2",
        "580.1",
        "13.0",
        "132, 8, 0",
        "disjoint",
        "no MPS",
        "killed after 75 s",
    ):
        assert text in out


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation of a moment."""
    monkeypatch.setattr(gpu_bench, "SIMULATED_S", 0.2)
    monkeypatch.setattr(gpu_steps, "BATCHES", (1,))


def test_a_simulated_device_fills_the_same_table(
    brief: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert gpu_bench.run(True, page, True) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["simulated"], result["errors"]) == (True, {})
    for device in result["devices"]:
        assert device["source"].startswith("simulated")
        assert {each["case"] for each in device["contention"]} == {case.name for case in CASES}
        assert device["contention"][0].keys() == {field.name for field in dataclasses.fields(Row)}
    assert f"report: {page}" in err
    text = page.read_text()
    assert text.count('id="chart-') == 2 * 4
    assert "Latency surface: simulated" in text


def test_a_simulation_is_printed(
    brief: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(gpu_bench, "EQUAL", (Sharing.SLICES,))
    assert gpu_bench.run(False, None, True) == 0
    out = capsys.readouterr().out
    assert "Encode beside prefill: simulated, 132 SMs" in out
    assert "Fewest SMs within 25 ms: batch 1: 8" in out


def device_of(*rows: Row, runs: tuple[Runs, ...] = ()) -> dict[str, Any]:
    return {
        "source": "GPU",
        "surface": [dataclasses.asdict(each) for each in runs],
        "contention": [dataclasses.asdict(each) for each in rows],
        "target_s": 0.025,
        "min_units": {1: {"units": 16, "met": False}},
    }


def test_a_target_that_is_missed_is_marked() -> None:
    runs = (Runs(1, 16, False, (0.03,)), Runs(1, 0, False, (0.02,)))
    result = {"simulated": True, "devices": [device_of(runs=runs)]}
    (section,) = gpu_shown.sections(result)
    assert "batch 1: 16 (misses it)" in section.text
    table = section.parts[0]
    assert isinstance(table, Table)
    assert list(table.rows) == [("16", 30, None), ("all", 20, None)]


def test_the_best_rule_is_named_of_those_that_hold_the_target() -> None:
    rows = (row("gate", share=0.8), row("none", share=0.9, fit=0.5), row("static", share=0.4))
    result = {"simulated": True, "devices": [device_of(*rows)]}
    (section,) = gpu_shown.sections(result)
    assert "95% of forwards within the target: gate (80%)" in section.text
    assert "95% of batches within the target: no rule" in section.text


def test_nothing_is_shown_of_what_is_not_there() -> None:
    assert gpu_shown.sections({"simulated": True, "devices": [device_of()]}) == []
