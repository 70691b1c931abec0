"""``easerve doctor --gpu-bench``: what dividing this GPU costs, and what each rule makes of it.

Every step is a process: one that crashes, hangs or leaves the GPU in disorder costs its own
results alone. The parent does not touch CUDA.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from easerve.bench import report
from easerve.cli import gpu_shown, gpu_steps
from easerve.cli.bench import command
from easerve.cli.gpu_steps import Found, Record
from easerve.config import Policy
from easerve.engines.partition.facts import gather
from easerve.engines.partition.gpu import VIT_TOKENS
from easerve.sim.device import EQUAL, Model, SimulatedDevice

LIMITS_S = {"card": 20.0, "threads": 20.0, "processes": 35.0, "surface": 75.0, "contention": 75.0}
"""Of each step, with about ten seconds for torch and CUDA to start; 4 minutes in all."""
GRACE_S = 12.0  # longer than a step waits for an MPS daemon to quit
SIMULATED_S = 20.0
SEED = 0


def run(as_json: bool, html: Path | None, simulate: bool) -> int:
    """The exit code: 1 without a GPU, or when no rule was measured."""
    if html is not None:
        command.check_writable(html)
    console = Console(stderr=True)
    if simulate:
        result = simulated(console)
    else:
        missing = _missing()
        if missing is not None:
            print(f"easerve: {missing}", file=sys.stderr)
            if as_json:
                print(json.dumps({"error": missing}))
            return 1
        result = measured(console)
    sections = gpu_shown.sections(result)
    if as_json:
        print(json.dumps(result))
    else:
        command.show(sections, Console())
    if html is not None:
        html.write_text(report.html("EAServe: a device divided", sections))
        console.print(f"report: {html}", soft_wrap=True)
    return 0 if any(device["contention"] for device in result["devices"]) else 1


def _missing() -> str | None:
    """What there has to be for a bench. The driver is asked in a process of its own."""
    facts = gather("cuda")
    if not facts.gpus:
        return f"no GPU: {facts.error or 'the driver sees none'} (--simulate needs none)"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: scripts/install cuda"
    return None


def simulated(console: Console) -> Record:
    """Both assumptions on SMs that are shared: which holds, only a GPU can say."""
    devices = []
    with command.progress(console, len(EQUAL) * gpu_steps.NUM_CASES) as tick:
        for sharing in EQUAL:
            device = SimulatedDevice(SEED, Model(sharing=sharing))
            runs = list(gpu_steps.surface(device))
            rows = gpu_steps.rows(device, runs, SIMULATED_S, tick)
            found = {
                "surface": [dataclasses.asdict(each) for each in runs],
                "contention": [dataclasses.asdict(each) for each in rows],
            }
            devices.append(_device(device.source, found, device.item_tokens))
    return {"simulated": True, "devices": devices, "errors": {}}


def measured(console: Console) -> Record:
    """What all steps have found, and the errors of those that did not come to their end."""
    found: dict[str, list[Record]] = {}
    errors: dict[str, str] = {}
    with command.progress(console, len(LIMITS_S)) as tick:
        for name, limit_s in LIMITS_S.items():
            tick(name)
            found[name], error = step(name, found, limit_s)
            if error is not None:
                errors[name] = error
    card: Record = {}
    for record in found["card"]:
        card |= record
    source = f"{card.get('source', 'GPU')}, torch {card.get('torch', '?')}"
    return {
        "simulated": False,
        "card": card,
        "threads": _last(found["threads"]),
        "processes": _last(found["processes"]),
        "devices": [_device(source, found, VIT_TOKENS)],
        "errors": errors,
    }


def step(name: str, found: Found, limit_s: float) -> tuple[list[Record], str | None]:
    """What the step wrote, and why there is no more of it. It is killed after ``limit_s``."""
    with contextlib.ExitStack() as files:
        given, out, said = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        json.dump(found, given)
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", gpu_steps.MODULE, name],
            stdin=given,
            stdout=out,
            stderr=said,
            start_new_session=True,
        )
        error = _wait(child, limit_s)
        out.seek(0)
        records = [json.loads(line) for line in out if line.endswith("\n")]
        said.seek(0)
        lines = said.read().strip().splitlines()
    if error is None and child.returncode:
        error = lines[-1] if lines else f"ended with {child.returncode}"
    return records, error


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> str | None:
    """Until it has ended, and all of its own processes have.

    It is asked first: it may have an MPS daemon, whose server outlives a daemon that is killed.
    """
    try:
        child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"killed after {limit_s:g} s"
    finally:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return None


def _device(source: str, found: Found, item_tokens: int) -> Record:
    """Of what was found of it. ``min_units``: by batch, and whether they meet the target."""
    runs = gpu_steps.runs_of(found)
    result: Record = {
        "source": source,
        "surface": found["surface"],
        "contention": found["contention"],
        "target_s": Policy().encode_target_s,
        "min_units": {},
    }
    if any(each.units for each in runs):
        setting = gpu_steps.setting(runs, item_tokens)
        result["min_units"] = {
            row.batch: {"units": row.units, "met": row.met} for row in setting.table.rows
        }
    return result


def _last(records: Sequence[Record]) -> Record | None:
    return records[-1] if records else None
