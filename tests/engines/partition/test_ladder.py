from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from easerve.config import ConfigError, Partition
from easerve.engines.partition.facts import MIG_WITHOUT_INSTANCE, Facts, Gpu, Mps
from easerve.engines.partition.ladder import LADDERS, choose, version
from easerve.engines.partition.mps import PERCENTAGE, PIPES

PIPE = "/tmp/nvidia-mps"
CONTROL = "/usr/bin/nvidia-cuda-mps-control"
H200 = Gpu("NVIDIA H200", "GPU-1", (9, 0), 132, 8, "", False, "Default")
L40S = Gpu("NVIDIA L40S", "GPU-2", (8, 9), 142, 4, "", False, "Default")
SLICE = Gpu("NVIDIA H200 MIG 1g.18gb", "GPU-1", (9, 0), 16, 8, "", True, None)
PASCAL = Gpu("Tesla P100", "GPU-3", (6, 0), 56, 0, "not supported", False, "Default")


def machine(
    *gpus: Gpu,
    cuda: int = 13000,
    control: str | None = CONTROL,
    mps: Mapping[str, Any] = MappingProxyType({}),
    **facts: Any,
) -> Facts:
    """Facts of a machine with ``gpus``, where MPS is installed and no daemon runs."""
    default = Facts("a CPU", (0, 1), (), {}, shm=True, uid=1000)
    daemon = replace(Mps(control, PIPE), **mps)
    return replace(default, cuda=cuda, gpus=gpus, mps=daemon, **facts)


PLAIN = {"alive": True, "static": False, "uid": 1000, "percentage": 100.0}
STATIC = {"alive": True, "static": True, "uid": 1000}
NO_DRIVER = machine(cuda=0, control=None, error="there is no CUDA driver")


@pytest.mark.parametrize(
    ("facts", "rung"),
    [
        (machine(H200), "green-context"),
        (machine(H200, H200), "green-context"),
        (machine(L40S), "green-context"),
        (machine(L40S, mps=PLAIN), "green-context"),
        (machine(L40S, mps=PLAIN | {"uid": 0}), "green-context"),
        (machine(L40S, mps=PLAIN, control=None), "green-context"),
        (machine(L40S, environment={PERCENTAGE: "100"}), "green-context"),
        (machine(SLICE), "green-context"),
        (machine(replace(H200, compute_mode="Exclusive_Process")), "green-context"),
        (machine(H200, cuda=12020), "priority"),
        (machine(H200, environment={PERCENTAGE: "50"}), "priority"),
        (machine(H200, environment={PERCENTAGE: "half"}), "priority"),
        (machine(H200, cuda=13010, environment={PERCENTAGE: "50"}), "mps-static"),
        (machine(H200, mps=PLAIN | {"percentage": 40.0}), "priority"),
        (machine(H200, cuda=13010, mps=STATIC), "mps-static"),
        (machine(replace(H200, granule=0, error="no")), "priority"),
        (machine(H200, control=None), "gate"),
        (machine(H200, shm=False), "gate"),
        (machine(H200, mps=PLAIN | {"uid": 1}), "gate"),
        (machine(PASCAL), "gate"),
        (machine(H200, cuda=13010, mps=STATIC, control=None), "off"),
        (machine(replace(H200, compute_mode="Exclusive_Process"), control=None), "off"),
        (machine(replace(H200, compute_mode="Prohibited")), "off"),
        (machine(error=MIG_WITHOUT_INSTANCE), "off"),
        (machine(), "off"),
        (NO_DRIVER, "off"),
    ],
)
def test_the_best_rung_of_a_gpu(facts: Facts, rung: str) -> None:
    choice = choose(facts, "cuda")
    assert choice.rung == rung
    assert choice.per_batch is (rung == "green-context")
    names = [rung.name for rung in LADDERS["cuda"]]
    assert [refusal.rung for refusal in choice.tried] == names[: names.index(rung)]
    assert all(refusal.why for refusal in choice.tried)


@pytest.mark.parametrize(("cores", "rung"), [((0,), "gate"), ((0, 1), "cpu"), ((3, 5, 7), "cpu")])
def test_the_best_rung_of_a_cpu(cores: tuple[int, ...], rung: str) -> None:
    choice = choose(replace(NO_DRIVER, cores=cores), "cpu")
    assert (choice.rung, choice.per_batch) == (rung, rung == "cpu")
    if rung == "cpu":
        assert f"{len(cores)} cores" in choice.why
    else:
        (refusal,) = choice.tried
        assert (refusal.rung, "single core" in refusal.why) == ("cpu", True)


@pytest.mark.parametrize(
    ("facts", "why", "hint"),
    [
        (NO_DRIVER, "no CUDA driver", "install the NVIDIA driver"),
        (machine(), "CUDA sees no GPU", "CUDA_VISIBLE_DEVICES"),
        (machine(error=MIG_WITHOUT_INSTANCE), "MIG is on", "mig -cgi"),
        (machine(H200, cuda=12020), "need CUDA 12.4, this driver offers 12.2", "driver 550"),
        (machine(H200, control=None), "nvidia-cuda-mps-control is not", "nvidia-compute-utils"),
        (machine(H200, shm=False), "/dev/shm cannot be written", "tmpfs"),
        (machine(H200, mps=STATIC), "static partitions only", "without -S"),
        (machine(H200, mps=PLAIN | {"uid": 1}), "another user's", f"set {PIPES}"),
        (machine(H200, mps=PLAIN | {"percentage": 40}), "40 % of the SMs", "set_default_active"),
        (machine(H200, environment={PERCENTAGE: "50"}), f"{PERCENTAGE}=50", f"unset {PERCENTAGE}"),
        (machine(replace(H200, granule=0, error="code 801")), "no green context: code 801", ""),
        (machine(H200, replace(L40S, granule=0, error="801")), "NVIDIA L40S: no green", ""),
        (machine(replace(PASCAL, granule=2)), "needs compute capability 7.0, this has 6.0", ""),
        (machine(replace(H200, compute_mode="Prohibited")), "Prohibited", "nvidia-smi -c DEFAULT"),
    ],
)
def test_why_there_are_no_green_contexts_and_what_mends_it(
    facts: Facts, why: str, hint: str
) -> None:
    first = choose(facts, "cuda").tried[0]
    assert first.rung == "green-context"
    assert why in first.why
    assert hint in first.hint


def test_the_rung_says_what_can_be_had() -> None:
    assert "132 SMs of NVIDIA H200, in granules of 8" in choose(machine(H200), "cuda").why
    assert "16 SMs of the MIG instance" in choose(machine(SLICE), "cuda").why
    assert "not per batch" in choose(machine(H200, cuda=13010, mps=STATIC), "cuda").why
    assert "nothing is set aside" in choose(machine(H200, cuda=12020), "cuda").why


def test_static_partitions_need_their_own_daemon() -> None:
    facts = machine(H200, cuda=13010, mps=PLAIN | {"percentage": 40.0})
    choice = choose(facts, "cuda")
    assert choice.rung == "priority"
    assert "was not started with -S" in choice.tried[1].why
    assert "13.1, this driver offers 13.0" in choose(machine(PASCAL), "cuda").tried[1].why


@pytest.mark.parametrize("wanted", ["green-context", "mps-static", "priority", "gate", "off"])
def test_a_rung_that_is_wanted_is_taken_where_it_is_possible(wanted: str) -> None:
    choice = choose(machine(H200, cuda=13010), "cuda", wanted)
    assert (choice.rung, choice.tried) == (wanted, ())


@pytest.mark.parametrize(
    ("facts", "device", "wanted", "parts"),
    [
        (machine(H200), "cuda", "mps-static", ["need CUDA 13.1", "driver 590", "green-context"]),
        (machine(H200, control=None), "cuda", "green-context", ["MPS", "driver gate would work"]),
        (NO_DRIVER, "cuda", "gate", ["no CUDA driver", "leave out the section partition"]),
        (replace(NO_DRIVER, cores=(0,)), "cpu", "cpu", ["single core", "driver gate would work"]),
        (machine(H200), "cpu", "green-context", ["not for device: cpu", "cpu, gate, off"]),
        (machine(H200), "cuda", "cpu", ["not for device: cuda", "green-context, mps-static"]),
    ],
)
def test_a_wanted_rung_that_is_impossible_is_refused_with_the_one_that_would_work(
    facts: Facts, device: str, wanted: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        choose(facts, device, wanted)
    text = str(refused.value)
    assert text.startswith(f"partition.driver {wanted}: ")
    assert all(part in text for part in parts)


def test_whatever_a_deployment_can_ask_for_is_on_a_ladder() -> None:
    drivers = set(Partition.model_json_schema()["properties"]["driver"]["enum"])
    rungs = {rung.name for ladder in LADDERS.values() for rung in ladder}
    assert drivers - {"auto"} == rungs - {"off"}


@pytest.mark.parametrize(("cuda", "text"), [(12040, "12.4"), (13000, "13.0"), (13010, "13.1")])
def test_versions_are_read_as_nvidia_writes_them(cuda: int, text: str) -> None:
    assert version(cuda) == text
