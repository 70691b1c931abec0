import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast

import pytest

from easerve.engines.partition import facts
from easerve.engines.partition.cuda import Cuda, Device
from easerve.engines.partition.facts import (
    MIG_WITHOUT_INSTANCE,
    NO_PIPES,
    Ended,
    Gpu,
    Machine,
    gather,
    run_program,
)
from easerve.engines.partition.mps import CONTROL, DEFAULT_PIPES, PERCENTAGE, PIPES
from easerve.engines.partition.sides import DriverError

H200 = Gpu("NVIDIA H200", "GPU-1", (9, 0), 132, 8)
SLICE = Gpu("NVIDIA H200 MIG 1g.18gb", "GPU-9", (9, 0), 16, 8)
CPUINFO = """processor : 0
model name\t: AMD EPYC
flags\t\t: fpu sse avx2 amx_bf16

processor : 1
model name\t: another
"""
NOTHING = Ended(None, "", "No such file or directory")


class Programs:
    """What the programs of a machine answer, by name, and how they were called."""

    def __init__(self, *gpus: Gpu, cuda: int = 13000, error: str = "") -> None:
        found = {"cuda": cuda, "error": error, "gpus": [asdict(gpu) for gpu in gpus]}
        self.answers = {sys.executable: Ended(0, json.dumps(found))}
        self.environments: dict[str, Mapping[str, str]] = {}
        self.stdin: dict[str, str] = {}

    def __call__(self, words: Sequence[str], stdin: str, env: Mapping[str, str]) -> Ended:
        self.environments[words[0]], self.stdin[words[0]] = dict(env), stdin
        return self.answers.get(words[0], NOTHING)


class Here:
    """A machine in a folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.env, self.programs = root, {PIPES: "/mps"}, Programs(H200)
        self.control: str | None = None
        self.write("/dev/shm/.keep", "")
        self.write("/proc/cpuinfo", CPUINFO)

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def gather(self, device: str = "cuda") -> facts.Facts:
        return gather(device, Machine(self.root, self.env, self.programs, lambda _: self.control))


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


# The CPU -----------------------------------------------------------------------------------------


def test_of_a_cpu_nothing_is_asked_that_concerns_gpus(here: Here) -> None:
    here.env |= {"OMP_PROC_BIND": "true", PERCENTAGE: "50", "HOME": "/"}
    found = here.gather("cpu")
    assert (found.cpu, found.features) == ("AMD EPYC", ("avx2", "amx_bf16"))
    assert set(found.cores) == os.sched_getaffinity(0)
    assert found.environment == {"OMP_PROC_BIND": "true", PERCENTAGE: "50", PIPES: "/mps"}
    assert (found.shm, found.uid) == (True, os.getuid())
    assert (found.cuda, found.gpus) == (0, ())
    assert not here.programs.environments


def test_an_arm_cpu_calls_its_features_otherwise(here: Here) -> None:
    here.write("/proc/cpuinfo", "processor : 0\nFeatures : fp asimd sve\n")
    assert here.gather("cpu").features == ("asimd", "sve")


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    found = gather("cuda", Machine(tmp_path, {}, lambda *_: NOTHING, lambda _: None))
    assert (found.features, found.shm, found.gpus) == ((), False, ())
    assert found.error == "the driver: No such file or directory"
    assert (found.mps.control, found.mps.alive) == (None, False)
    assert (found.driver, found.smctrl) == (None, None)


# GPUs --------------------------------------------------------------------------------------------


def test_gpus_are_what_the_driver_says_and_nvidia_smi_adds(here: Here) -> None:
    here.programs.answers["nvidia-smi"] = Ended(0, "GPU-1, Disabled, Default, 580.159.03\n")
    found = here.gather()
    assert (found.cuda, found.error, found.driver) == (13000, "", "580.159.03")
    (gpu,) = found.gpus
    assert (gpu.name, gpu.capability, gpu.num_sms, gpu.granule) == ("NVIDIA H200", (9, 0), 132, 8)
    assert (gpu.mig, gpu.compute_mode) == (False, "Default")


def test_without_nvidia_smi_modes_are_not_known(here: Here) -> None:
    (gpu,) = here.gather().gpus
    assert (gpu.mig, gpu.compute_mode) == (None, None)


def test_a_mig_instance_is_known_by_its_name(here: Here) -> None:
    here.programs = Programs(SLICE)
    here.programs.answers["nvidia-smi"] = Ended(0, "GPU-1, Enabled, Default, 580.1\n")
    assert here.gather().gpus[0].mig is True


def test_mig_without_an_instance_is_named(here: Here) -> None:
    here.programs = Programs(error="cuInit failed with CUDA_ERROR_NO_DEVICE (100)")
    here.programs.answers["nvidia-smi"] = Ended(0, "GPU-1, Enabled, Default, 580.1\n")
    assert here.gather().error == MIG_WITHOUT_INSTANCE


CRASHED, HUNG = Ended(-11, ""), Ended(None, "", "no answer within 60 s")


@pytest.mark.parametrize(
    ("ended", "error"), [(CRASHED, "it crashed, exit code -11"), (HUNG, "no answer within 60 s")]
)
def test_a_driver_that_crashes_or_hangs_is_named(here: Here, ended: Ended, error: str) -> None:
    here.programs.answers[sys.executable] = ended
    found = here.gather()
    assert error in found.error
    assert (found.cuda, found.gpus) == (0, ())


@pytest.mark.parametrize("ended", [CRASHED, HUNG])
def test_what_it_said_before_counts(here: Here, ended: Ended) -> None:
    gpus = [asdict(H200), asdict(replace(H200, granule=0))]
    said = json.dumps({"cuda": 13000, "error": "", "gpus": gpus})
    here.programs.answers[sys.executable] = ended._replace(out=f"a warning\n{said}\n")
    found = here.gather()
    assert found.cuda == 13000
    assert [gpu.granule for gpu in found.gpus] == [8, 0]
    assert found.gpus[0].error == ""
    assert found.gpus[1].error == found.error != ""


def test_libsmctrl_is_found_and_not_loaded(here: Here) -> None:
    here.env["LD_LIBRARY_PATH"] = ":/opt/smctrl"
    here.write("/opt/smctrl/libsmctrl.so", "not a library")
    assert here.gather().smctrl == str(here.root / "opt/smctrl/libsmctrl.so")


def test_the_nvidia_driver_is_seen_by_its_device(here: Here) -> None:
    assert not Machine(here.root).has_nvidia_driver
    here.write("/dev/nvidiactl", "")
    assert Machine(here.root).has_nvidia_driver


# MPS ---------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(here: Here) -> Here:
    """The machine with an MPS daemon that listens."""
    here.control = f"/usr/bin/{CONTROL}"
    here.write(f"/mps/{CONTROL}.pid", "77\n")
    here.write("/proc/77/cmdline", f"{CONTROL}\0-d\0")
    here.programs.answers[here.control] = Ended(0, "100.0\n")
    return here


def listen(here: Here, kind: socket.SocketKind) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, kind)
    server.bind(str(here.root / "mps/control"))
    server.listen()
    return server


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM])
def test_a_plain_daemon(daemon: Here, kind: socket.SocketKind) -> None:
    with listen(daemon, kind):
        mps = daemon.gather().mps
    assert (mps.pipes, mps.control) == ("/mps", daemon.control)
    assert (mps.alive, mps.static, mps.uid, mps.percentage) == (True, False, os.getuid(), 100.0)
    assert daemon.programs.stdin[daemon.control or ""] == "get_default_active_thread_percentage\n"
    assert daemon.programs.environments[sys.executable][PIPES] == "/mps"


@pytest.mark.parametrize("flag", ["-S", "--static-partitioning"])
def test_a_daemon_of_static_partitions_does_not_hear_of_the_probe(daemon: Here, flag: str) -> None:
    daemon.write("/proc/77/cmdline", f"{CONTROL}\0-d\0{flag}\0")
    with listen(daemon, socket.SOCK_SEQPACKET):
        mps = daemon.gather().mps
    assert (mps.alive, mps.static) == (True, True)
    assert daemon.programs.environments[sys.executable][PIPES] == NO_PIPES


def test_a_daemon_of_another_user_does_not_hear_of_the_probe(
    daemon: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with listen(daemon, socket.SOCK_SEQPACKET):
        if owner == 0:
            os.chown(daemon.root / "mps/control", 1234, -1)
        assert daemon.gather().mps.uid == (owner or 1234)
    assert daemon.programs.environments[sys.executable][PIPES] == NO_PIPES


def test_of_a_daemon_outside_the_container_little_is_known(daemon: Here) -> None:
    (daemon.root / "proc/77/cmdline").unlink()
    daemon.control = None
    with listen(daemon, socket.SOCK_SEQPACKET):
        mps = daemon.gather().mps
    assert (mps.alive, mps.static, mps.percentage) == (True, None, None)


def test_a_daemon_that_has_no_percentage_to_tell(daemon: Here) -> None:
    daemon.programs.answers[daemon.control or ""] = Ended(1, "unknown command")
    with listen(daemon, socket.SOCK_SEQPACKET):
        assert daemon.gather().mps.percentage is None


def test_a_socket_that_a_daemon_left_behind_is_no_daemon(daemon: Here) -> None:
    listen(daemon, socket.SOCK_SEQPACKET).close()
    mps = daemon.gather().mps
    assert (mps.alive, mps.control) == (False, daemon.control)


def test_without_a_daemon_the_default_folder_is_named(here: Here) -> None:
    del here.env[PIPES]
    mps = here.gather().mps
    assert (mps.alive, mps.pipes) == (False, str(DEFAULT_PIPES))


# The driver, in a process of its own -------------------------------------------------------------


class Driver:
    """As cuda.Cuda, with two GPUs."""

    def version(self) -> int:
        return 12080

    def num_devices(self) -> int:
        return 2

    def device(self, index: int) -> Device:
        return Device(index, index, "NVIDIA L40S", f"GPU-{index}", (8, 9), 142, None)


def smallest(cuda: Cuda, index: int = 0) -> int:
    if index:
        raise DriverError("no green contexts here")
    return 4


def test_the_driver_is_asked_for_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "smallest_part", smallest)
    steps = list(facts.probe(lambda: cast(Cuda, Driver())))
    granules = [[gpu["granule"] for gpu in step["gpus"]] for step in steps]
    assert granules == [[0, 0], [4, 0], [4, 0]]
    found = json.loads(json.dumps(steps[-1]))
    assert (found["cuda"], found["error"]) == (12080, "")
    first, second = found["gpus"]
    assert (first["num_sms"], first["capability"], first["error"]) == (142, [8, 9], "")
    assert second["error"] == "no green contexts here"


def test_a_driver_without_gpus_still_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: Driver) -> int:
        raise DriverError("cuInit failed")

    monkeypatch.setattr(Driver, "num_devices", none)
    (found,) = facts.probe(lambda: cast(Cuda, Driver()))
    assert found == {"cuda": 12080, "error": "cuInit failed", "gpus": []}


def test_no_driver_at_all() -> None:
    def load() -> Cuda:
        raise DriverError("there is no CUDA driver")

    assert list(facts.probe(load)) == [{"cuda": 0, "error": "there is no CUDA driver", "gpus": []}]


def test_what_a_program_said_before_it_hung_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "PROBE_S", 0.05)
    late = run_program(["sh", "-c", "echo early; exec sleep 5"], "", os.environ)
    assert late == Ended(None, "early\n", "no answer within 0.05 s")


def test_programs_are_run_and_may_be_missing() -> None:
    assert run_program(["cat"], "hello", os.environ) == Ended(0, "hello", "")
    assert run_program(["/nosuch/program"], "", {}).code is None
