"""Which MPS daemon the engines of a divided GPU are clients of, and of which of its partitions."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from easerve.config import ConfigError, build
from easerve.engines.partition import mps
from easerve.engines.partition.facts import Facts, Gpu, Mps
from easerve.engines.partition.ladder import Choice
from easerve.engines.partition.sides import DriverError
from easerve.engines.vllm.mps_daemon import MpsDaemon, mps_daemon

from .test_dividing import GREEN, launches

GPUS = tuple(Gpu("H200", f"GPU-{number}", (9, 0), 132, 8) for number in range(2))
NONE_YET = Mps("/usr/bin/nvidia-cuda-mps-control", "/tmp/nvidia-mps")
RUNNING = replace(NONE_YET, alive=True, static=False)
RUN, LOGS = Path("/run/x"), Path("/log/x")


def daemon(
    rung: str,
    running: Mps = NONE_YET,
    run: Path = RUN,
    encode: dict[str, Any] | None = None,
    **policy: Any,
) -> MpsDaemon | None:
    content = {"model": "m", "device": "cuda", "local_prefill": {}, "partition": {}}
    content |= {} if encode is None else {"encode": encode}
    facts = Facts("a CPU", (0,), (), {}, shm=True, uid=0, gpus=GPUS, mps=running)
    deployment = build(content | {"policy": policy}, "test")
    return mps_daemon(deployment, facts, Choice(rung, "", True), run, LOGS)


@pytest.mark.parametrize("rung", ["cpu", "gate", "off"])
def test_what_takes_turns_needs_no_daemon(rung: str) -> None:
    assert daemon(rung) is None


@pytest.mark.parametrize("rung", ["green-context", "priority"])
def test_a_daemon_that_runs_already_is_used(rung: str) -> None:
    made = daemon(rung, RUNNING)
    assert made is not None
    assert (made.argv, made.pipes, made.static) == ((), Path("/tmp/nvidia-mps"), False)


@pytest.mark.parametrize(
    ("rung", "running", "flags"),
    [
        ("green-context", NONE_YET, ["-f"]),
        ("priority", NONE_YET, ["-f"]),
        ("mps-static", NONE_YET, ["-f", "-S"]),
        ("mps-static", replace(RUNNING, static=True), ["-f", "-S"]),
    ],
)
def test_else_one_of_our_own_is_started_that_sees_every_gpu(
    rung: str, running: Mps, flags: list[str]
) -> None:
    made = daemon(rung, running)
    assert made is not None
    command, *words = made.argv
    assert command == "env"
    unset = {words[index + 1] for index, word in enumerate(words) if word == "-u"}
    assert unset == {mps.VISIBLE, mps.PERCENTAGE, mps.PARTITION}
    assert words[2 * len(unset) :] == [mps.CONTROL, *flags]
    assert made.env == {mps.PIPES: "/run/x/mps", mps.LOGS: "/log/x"}
    assert made.static is ("-S" in flags)


def test_a_folder_that_is_too_long_for_its_socket_is_an_error() -> None:
    with pytest.raises(DriverError, match="too long for a socket's path"):
        daemon("green-context", run=Path("/" + "x" * 100))


@pytest.mark.parametrize(
    "encode", [{"devices": [[2]]}, {"devices": [[0], [2]], "replicas": 2}, {"replicas": 3}], ids=str
)
def test_an_encoder_on_a_gpu_that_is_not_there_is_an_error(encode: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="GPU 2 of encode is not there: CUDA sees 2"):
        daemon("mps-static", encode=encode)
    assert daemon("mps-static", encode={"devices": [[1]]}) is not None


def test_the_daemon_is_ready_when_it_listens(tmp_path: Path) -> None:
    made = daemon("green-context", replace(RUNNING, pipes=str(tmp_path)))
    assert made is not None
    assert not made.is_ready()


# Clients ------------------------------------------------------------------------------------------


def test_only_the_engines_of_a_divided_gpu_are_its_clients() -> None:
    made = daemon("green-context")
    assert made is not None
    before = launches(GREEN, "cuda", encode={"replicas": 2})
    for spec in made.clients(list(before.values())):
        usual = before[spec.worker_id]
        if spec.cell is None:
            assert spec == usual
            continue
        assert dict(spec.env) == {**usual.env, **made.env, mps.CONNECTIONS: "8"}
        assert (spec.argv, spec.cell) == (usual.argv, usual.cell)
    assert mps.PIPES not in os.environ


def test_only_by_priority_does_prefill_come_after_its_encoder() -> None:
    for rung, after in (("priority", {"local-prefill-0"}), ("green-context", set[str]())):
        made = daemon(rung)
        assert made is not None
        specs = launches(replace(GREEN, rung=rung), "cuda")
        clients = made.clients(list(specs.values()))
        assert {spec.worker_id for spec in clients if spec.env.get(mps.PRIORITY) == "1"} == after
        assert sum(mps.PRIORITY in spec.env for spec in clients) == len(after)


@pytest.mark.parametrize("units", [None, 24])
def test_static_partitions_are_made_once_for_each_gpu(
    monkeypatch: pytest.MonkeyPatch, units: int | None
) -> None:
    asked: list[tuple[Path, str, int | None]] = []

    class Control:
        def __init__(self, pipes: Path) -> None:
            self._pipes = pipes

        def split(self, uuid: str, encode_sms: int | None) -> mps.Split:
            asked.append((self._pipes, uuid, encode_sms))
            return mps.Split(f"{uuid}/first", f"{uuid}/rest")

    monkeypatch.setattr(mps, "Control", Control)
    made = daemon("mps-static", encode_units=units)
    assert made is not None
    specs = launches(replace(GREEN, rung="mps-static"), "cuda", encode={"replicas": 2})
    partitions = {
        spec.worker_id: spec.env.get(mps.PARTITION) for spec in made.clients(list(specs.values()))
    }
    assert partitions == {
        "encode-0": "GPU-0/first",
        "encode-1": "GPU-1/first",
        "local-prefill-0": "GPU-0/rest",
        "local-prefill-1": "GPU-1/rest",
        "prefill-0": None,
        "decode-0": None,
    }
    assert asked == [(RUN / "mps", f"GPU-{number}", units) for number in range(2)]
