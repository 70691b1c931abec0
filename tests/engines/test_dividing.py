"""What the launch of engines that divide a device has more than that of others."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from easerve.config import ConfigError, build
from easerve.engines.partition.ladder import Choice
from easerve.engines.partition.setup import SETUP, Setup, read_setup
from easerve.engines.vllm.launch import EngineSpec, engine_specs
from easerve.engines.vllm.memory import plan

from .test_launch import INFO, LOGS, RUN, SECRET, config, value

CPU = Choice("cpu", "cores for each batch by affinity", True)
GREEN = Choice("green-context", "SMs for each batch", True)
RUNGS = {"cpu": CPU, "cuda": GREEN}
CLASSES = "easerve.engines.vllm."


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def launches(choice: Choice | None, device: str = "cpu", **content: Any) -> dict[str, EngineSpec]:
    gpu = {"gpu_memory": "48GiB"} if device == "cuda" else {}
    sections = {"model": "m", "device": device, "local_prefill": {}, "partition": {}}
    deployment = build(sections | gpu | content, "test")
    made = engine_specs(deployment, plan(deployment, INFO), RUN, LOGS, SECRET, choice=choice)
    return {spec.worker_id: spec for spec in made}


def setups(made: Mapping[str, EngineSpec]) -> dict[str, Setup]:
    return {name: setup for name, spec in made.items() if (setup := read_setup(spec.env))}


@pytest.mark.parametrize(
    ("device", "module"), [("cpu", "cpu_worker.Cpu"), ("cuda", "cuda_worker.Cuda")]
)
def test_both_engines_of_a_device_have_our_workers_and_one_page(device: str, module: str) -> None:
    made = launches(RUNGS[device], device)
    workers = {name: value(spec, "--worker-cls") for name, spec in made.items()}
    assert workers == {
        "encode-0": f"{CLASSES}{module}EncodeWorker",
        "local-prefill-0": f"{CLASSES}{module}PrefillWorker",
        "prefill-0": None,
        "decode-0": None,
    }
    cell = RUN / "encode-0.cell"
    assert {name: spec.cell for name, spec in made.items()} == {
        "encode-0": cell,
        "local-prefill-0": cell,
        "prefill-0": None,
        "decode-0": None,
    }
    told = setups(made)
    assert list(told) == ["encode-0", "local-prefill-0"]
    for setup in told.values():
        assert (setup.cell, setup.driver) == (str(cell), RUNGS[device].rung)
        assert setup.why == RUNGS[device].why


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_the_encoder_hears_announcements(device: str) -> None:
    made = launches(RUNGS[device], device)
    heard = {name: value(spec, "--middleware") for name, spec in made.items()}
    assert heard.pop("encode-0") == f"{CLASSES}announcer.Announcer"
    assert set(heard.values()) == {None}


@pytest.mark.parametrize("rung", ["green-context", "mps-static", "priority", "gate"])
def test_local_prefill_has_no_graphs_only_where_its_part_is_a_stream(rung: str) -> None:
    made = launches(replace(GREEN, rung=rung), "cuda")
    eager = {name: config(spec, "--compilation-config") for name, spec in made.items()}
    without = {"cudagraph_mode": "NONE"} if rung == "green-context" else None
    assert eager == {name: without if name == "local-prefill-0" else None for name in made}


def test_waiting_threads_of_divided_cores_do_not_spin() -> None:
    for section, policy in (({}, "passive"), (None, None)):
        for spec in launches(CPU, partition=section).values():
            assert spec.env.get("OMP_WAIT_POLICY") == policy
    assert "OMP_WAIT_POLICY" not in launches(GREEN, "cuda")["encode-0"].env


def test_engines_are_told_what_the_section_says() -> None:
    section = {"min_prefill_units": 2, "hold_s": 0.25, "patience_s": 0.5}
    setup = setups(launches(CPU, partition=section, encode={"cores": [[0, 2, 4]]}))[
        "local-prefill-0"
    ]
    assert (setup.min_prefill, setup.hold_s, setup.patience_s) == (2, 0.25, 0.5)
    assert setup.cores == (0, 2, 4)
    assert setups(launches(CPU))["encode-0"].cores == ()


@pytest.mark.parametrize(
    ("choice", "content"),
    [
        (None, {}),
        (CPU, {"partition": None}),
        (Choice("off", "they share it", False), {}),
    ],
    ids=["nothing was chosen", "no section", "nothing is possible"],
)
def test_where_nothing_is_divided_the_launch_is_the_usual_one(
    choice: Choice | None, content: dict[str, Any]
) -> None:
    made = launches(choice, **content)
    usual = launches(None, partition=None)
    assert {name: spec.argv for name, spec in made.items()} == {
        name: spec.argv for name, spec in usual.items()
    }
    assert not any(SETUP in spec.env or spec.cell for spec in made.values())


def test_options_of_the_file_come_after_ours() -> None:
    own = ["--max-num-seqs", "7"]
    encoder = launches(CPU, encode={"extra_args": own})["encode-0"]
    assert encoder.argv[-2:] == (*own,)


@pytest.mark.parametrize(
    "own",
    [
        ["--worker-cls", "mine.Worker"],
        ["-tp", "2"],
        ["--tensor_parallel_size=2"],
        ["--data-parallel-size", "2"],
        ["--api-server-count=2"],
        ["-cc.cudagraph_mode=FULL"],
        ["--compilation-config.cudagraph_mode", "FULL"],
        ["-O3"],
        ["--optimization-level", "3"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("section", ["engine", "encode", "local_prefill"])
def test_options_that_take_an_engine_out_of_its_part_are_refused(
    section: str, own: list[str]
) -> None:
    content: dict[str, Any] = {section: {"extra_args": ["--max-num-seqs", "7", *own]}}
    with pytest.raises(ConfigError, match=f"extra_args: {own[0]} does not go with .* partition"):
        launches(CPU, **content)
    launches(CPU, partition=None, **content)


# Several devices ----------------------------------------------------------------------------------


def test_each_encoder_of_several_has_a_page_with_its_local_engine() -> None:
    made = launches(CPU, encode={"replicas": 2, "cores": [[0, 1], [2, 3]]})
    for number, cores in enumerate([(0, 1), (2, 3)]):
        for name in (f"encode-{number}", f"local-prefill-{number}"):
            assert made[name].cell == RUN / f"encode-{number}.cell"
            assert setups(made)[name].cores == cores


def test_each_gpu_has_a_page() -> None:
    made = launches(GREEN, "cuda", encode={"replicas": 2})
    for number in range(2):
        engines = [made[f"{kind}-{number}"] for kind in ("encode", "local-prefill")]
        assert {spec.cell for spec in engines} == {RUN / f"encode-{number}.cell"}
        assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in engines} == {str(number)}


def test_several_encoders_that_share_all_cores_cannot_divide_them() -> None:
    encode = {"replicas": 2}
    with pytest.raises(ConfigError, match=r"partition: .*encode.cores"):
        launches(CPU, encode=encode)
    launches(CPU, encode=encode, partition=None)


def test_prefill_may_not_keep_every_core() -> None:
    keeps = {"min_prefill_units": 4}
    with pytest.raises(ConfigError, match="min_prefill_units: 4 of 4 cores leave encode none"):
        launches(CPU, partition=keeps)
    with pytest.raises(ConfigError, match="min_prefill_units: 1 of 1 cores"):
        launches(CPU, encode={"cores": [[0]]})
    assert setups(launches(CPU, partition=keeps, encode={"cores": [[0, 1, 2, 3, 4]]}))
    assert setups(launches(GREEN, "cuda", partition=keeps))
    assert setups(launches(replace(CPU, rung="gate"), partition=keeps))


def test_another_start_is_on_the_same_page() -> None:
    spec = launches(CPU)["local-prefill-0"]
    assert spec.again().cell == spec.cell == Path(setups({"l": spec.again()})["l"].cell)
