"""What this machine has for dividing a device. Nothing here needs torch or vLLM.

The driver is asked in a process of its own: a CUDA context does not survive a fork, and a driver
that hangs or crashes must not take the asker with it. Nothing is started and no setting changed.
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from easerve.engines.partition.cuda import Cuda
from easerve.engines.partition.green import smallest_part
from easerve.engines.partition.mps import (
    CONNECTIONS,
    CONTROL,
    DEFAULT_PIPES,
    PERCENTAGE,
    PIPES,
    alive,
    is_static,
    pipes_of,
)
from easerve.engines.partition.sides import DriverError

NVIDIA_DRIVER = "dev/nvidiactl"
NO_PIPES = os.devnull
"""As pipe directory: CUDA goes without MPS."""
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
OMP = ("OMP_WAIT_POLICY", *BINDING)
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
LIBRARIES = ("usr/local/lib", "usr/lib", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")
PROBE = "easerve.engines.partition.facts"
PROBE_S = 60.0
MIG_WITHOUT_INSTANCE = "MIG is on, but there is no instance"


@dataclass(frozen=True, slots=True)
class Gpu:
    """``granule``: SMs of the smallest green context, read back; 0: none, ``error`` says why.

    Where MIG is on, it is the instance that CUDA sees. ``mig`` and ``compute_mode`` (as nvidia-smi
    says it) are None where nvidia-smi does not tell.
    """

    name: str
    uuid: str
    capability: tuple[int, int]
    num_sms: int
    granule: int = 0
    error: str = ""
    mig: bool | None = None
    compute_mode: str | None = None


@dataclass(frozen=True, slots=True)
class Mps:
    """``control``: path of the program that starts a daemon; None: not installed.

    Of a daemon that is ``alive`` behind ``pipes``: ``static``, that it hands out fixed partitions;
    ``uid``, whose it is; ``percentage``, the share of SMs that its clients get by default. None:
    it cannot be seen.
    """

    control: str | None
    pipes: str
    alive: bool = False
    static: bool | None = None
    uid: int | None = None
    percentage: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """``cuda``: version of the driver's API, 13000 for 13.0; 0: no driver, ``error`` says why.

    ``cpu``: its name. ``driver``: of NVIDIA, as nvidia-smi says it. ``environment``: what of MPS,
    CUDA and OpenMP is set. ``shm``: that /dev/shm can be written. ``smctrl``: where libsmctrl is
    installed. ``uid``: who asks.
    """

    cpu: str
    cores: tuple[int, ...]
    features: tuple[str, ...]
    environment: Mapping[str, str]
    shm: bool
    uid: int
    cuda: int = 0
    error: str = ""
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    mps: Mps = Mps(None, str(DEFAULT_PIPES))
    smctrl: str | None = None


class Ended(NamedTuple):
    """``code`` None: the program is not there, or did not end in time."""

    code: int | None
    out: str
    err: str = ""


class Run(Protocol):
    def __call__(self, words: Sequence[str], stdin: str, env: Mapping[str, str]) -> Ended: ...


def run_program(words: Sequence[str], stdin: str, env: Mapping[str, str]) -> Ended:
    try:
        ended = subprocess.run(
            words, input=stdin, env=dict(env), capture_output=True, text=True, timeout=PROBE_S
        )
    except subprocess.TimeoutExpired as late:
        out = (late.stdout or b"").decode(errors="replace")  # bytes, whatever was asked for
        return Ended(None, out, f"no answer within {PROBE_S:g} s")
    except OSError as error:
        return Ended(None, "", str(error.strerror))
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where facts are read from. ``root``: in place of /."""

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Run = run_program
    which: Callable[[str], str | None] = shutil.which

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str:
        """Empty where there is no such file, or it is not for us."""
        try:
            return self.path(absolute).read_text()
        except OSError:
            return ""

    @property
    def has_nvidia_driver(self) -> bool:
        return self.path(NVIDIA_DRIVER).exists()


def gather(device: str, machine: Machine = Machine()) -> Facts:
    """``device``: cpu or cuda; of a CPU, nothing is asked that concerns GPUs. Takes seconds."""
    info = _cpu_info(machine)
    flags = info.get("flags", info.get("Features", "")).split()
    facts = Facts(
        cpu=info.get("model name", platform.machine()),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        features=tuple(feature for feature in CPU_FEATURES if feature in flags),
        environment={
            name: machine.env[name]
            for name in (*OMP, PERCENTAGE, CONNECTIONS, PIPES)
            if name in machine.env
        },
        shm=os.access(machine.path("dev/shm"), os.W_OK),
        uid=os.getuid(),
    )
    if device == "cpu":
        return facts
    mps = _mps(machine)
    facts = replace(facts, mps=mps, smctrl=_smctrl(machine))
    return _with_modes(machine, _with_driver(machine, facts))


def _cpu_info(machine: Machine) -> dict[str, str]:
    """Of the first core."""
    first = machine.text("/proc/cpuinfo").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _mps(machine: Machine) -> Mps:
    mps = Mps(machine.which(CONTROL), str(pipes_of(machine.env)))
    pipes = machine.path(mps.pipes)
    if not alive(pipes):
        return mps
    percentage = None
    if mps.control is not None:
        asked = machine.run([mps.control], "get_default_active_thread_percentage\n", machine.env)
        with contextlib.suppress(ValueError):
            percentage = float(asked.out)
    return replace(
        mps,
        alive=True,
        static=is_static(pipes, machine.path("/proc")),
        uid=(pipes / "control").stat().st_uid,
        percentage=percentage,
    )


def _with_driver(machine: Machine, facts: Facts) -> Facts:
    env, mps = dict(machine.env), facts.mps
    if mps.static or mps.uid not in (None, 0, facts.uid):  # it would refuse, or wait for its user
        env[PIPES] = NO_PIPES
    ended = machine.run([sys.executable, "-m", PROBE], "", env)
    said = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    found: dict[str, Any] = said[-1] if said else {"cuda": 0, "error": "", "gpus": []}
    gpus = [Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in found["gpus"]]
    error = found["error"]
    if ended.code != 0:
        why = ended.err if ended.code is None else f"it crashed, exit code {ended.code}"
        error = f"the driver: {why}"
        gpus = [gpu if gpu.granule else replace(gpu, error=error) for gpu in gpus]
    return replace(facts, cuda=found["cuda"], error=error, gpus=tuple(gpus))


def _with_modes(machine: Machine, facts: Facts) -> Facts:
    """What only nvidia-smi tells. It names whole GPUs, CUDA names an instance where MIG is on."""
    columns = "uuid,mig.mode.current,compute_mode,driver_version"
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader"]
    rows = [line.split(", ") for line in machine.run(query, "", machine.env).out.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    modes = {uuid: (mig == "Enabled", mode) for uuid, mig, mode, _ in rows}
    if rows:
        facts = replace(facts, driver=rows[0][3])
    if not facts.gpus and facts.cuda and any(mig for mig, _ in modes.values()):
        return replace(facts, error=MIG_WITHOUT_INSTANCE)
    gpus = []
    for gpu in facts.gpus:
        mig, mode = modes.get(gpu.uuid, (True if " MIG " in gpu.name else None, None))
        gpus.append(replace(gpu, mig=mig, compute_mode=mode))
    return replace(facts, gpus=tuple(gpus))


def _smctrl(machine: Machine) -> str | None:
    """Never loaded: see ``easerve doctor``."""
    searched = [*machine.env.get("LD_LIBRARY_PATH", "").split(":"), *LIBRARIES]
    for folder in filter(None, searched):
        for found in machine.path(folder).glob("libsmctrl.so*"):
            return str(found)
    return None


# In a process of its own --------------------------------------------------------------------------


def probe(load: Callable[[], Cuda] = Cuda) -> Iterator[dict[str, Any]]:
    """``cuda``, ``error`` and ``gpus`` of Facts for JSON, again with each step that may crash."""
    version = 0
    gpus: list[Gpu] = []
    error = ""
    try:
        cuda = load()
        version = cuda.version()
        for index in range(cuda.num_devices()):
            device = cuda.device(index)
            gpus.append(Gpu(device.name, device.uuid, device.capability, device.num_sms))
    except DriverError as refused:
        error = str(refused)
    yield {"cuda": version, "error": error, "gpus": [asdict(gpu) for gpu in gpus]}
    for index, gpu in enumerate(gpus):
        try:
            gpus[index] = replace(gpu, granule=smallest_part(cuda, index))
        except DriverError as refused:
            gpus[index] = replace(gpu, error=str(refused))
        yield {"cuda": version, "error": error, "gpus": [asdict(gpu) for gpu in gpus]}


if __name__ == "__main__":
    for step in probe():
        print(json.dumps(step), flush=True)
