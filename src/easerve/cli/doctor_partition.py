"""What the doctor finds of dividing a device between encode and local prefill."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from easerve.cli.finding import BAD, OK, WARN, Finding
from easerve.cli.profile_here import of_device, versions
from easerve.config import ConfigError
from easerve.costs import profile
from easerve.engines.partition.cuda import GREEN_CUDA
from easerve.engines.partition.facts import BINDING, Facts
from easerve.engines.partition.ladder import (
    Choice,
    capped_clients,
    no_gpu,
    no_mps,
    static_daemon,
    version,
)
from easerve.engines.partition.mps import CONNECTIONS, NUM_CONNECTIONS
from easerve.engines.vllm.memory import detect_gpu_bytes, gib

PROFILES = Path("profiles")
V2_RUNNER = Path("v1/worker/gpu/model_runner.py")
V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
NO_SMCTRL = (
    "EAServe does not use it: no licence was found, it breaks with the driver's version, and on "
    "Hopper its mask bits are not SMs"
)
UNBOUND = frozenset({"", "false", "disabled", "none"})


def partition_findings(facts: Facts, device: str, choice: Choice) -> Iterator[Finding]:
    """Only what applies to ``device``; the rung last."""
    if device == "cpu":
        yield _openmp(facts)
        yield _profile(facts, device)
    elif facts.gpus:
        yield from _cuda(facts)
        yield _profile(facts, device)
    else:
        yield Finding("gpu", BAD, *next(no_gpu(facts)))
    status = OK if choice.per_batch else WARN
    hint = ""
    if choice.tried:
        better = choice.tried[0]
        hint = f"for {better.rung}: {better.hint or better.why}"
    yield Finding("partition", status, f"{choice.rung}: {choice.why}", hint)


def _cuda(facts: Facts) -> Iterator[Finding]:
    yield _gpu(facts)
    yield _driver(facts)
    yield _green(facts)
    yield from _modes(facts)
    yield _mps(facts)
    yield from _environment(facts)
    if facts.smctrl is None:
        yield Finding("libsmctrl", OK, "not installed, nor needed")
    else:
        yield Finding("libsmctrl", OK, facts.smctrl, NO_SMCTRL)
    yield _hook()


def _gpu(facts: Facts) -> Finding:
    names = [
        f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.num_sms} SMs"
        for gpu in facts.gpus
    ]
    parts = [
        name if names.count(name) == 1 else f"{names.count(name)} × {name}"
        for name in dict.fromkeys(names)
    ]
    memory = detect_gpu_bytes()
    if memory is not None:
        parts.append(gib(memory))
    return Finding("gpu", OK, ", ".join(parts))


def _driver(facts: Facts) -> Finding:
    found = f"CUDA {version(facts.cuda)}"
    if facts.driver is not None:
        found = f"{facts.driver}, {found}"
    if facts.cuda < GREEN_CUDA:
        return Finding("driver", WARN, found, "green contexts need CUDA 12.4: driver 550 or newer")
    return Finding("driver", OK, found)


def _green(facts: Facts) -> Finding:
    for gpu in facts.gpus:
        if not gpu.granule:
            return Finding("green contexts", WARN, f"none: {gpu.error}", "see partition")
    granules = sorted({gpu.granule for gpu in facts.gpus})
    sizes = ", ".join(map(str, granules))
    return Finding("green contexts", OK, f"made and read back, granules of {sizes} SMs")


def _modes(facts: Facts) -> Iterator[Finding]:
    migs = {gpu.mig for gpu in facts.gpus}
    if True in migs:
        hint = "both engines have to be in one instance; a profile is made in the same one"
        yield Finding("mig", OK, "on", hint)
    else:
        yield Finding("mig", OK, "not known, as nvidia-smi is silent" if None in migs else "off")
    modes = sorted({gpu.compute_mode for gpu in facts.gpus if gpu.compute_mode is not None})
    if not modes:
        return
    found = ", ".join(modes)
    if modes == ["Default"]:
        yield Finding("compute mode", OK, found)
    else:
        hint = "engines share a GPU in it through MPS only; nvidia-smi -c DEFAULT"
        yield Finding("compute mode", BAD if "Prohibited" in modes else WARN, found, hint)


def _mps(facts: Facts) -> Finding:
    mps = facts.mps
    obstacle = next(no_mps(facts), None)
    if obstacle is not None:
        return Finding("mps", WARN, *obstacle)
    if not mps.alive:
        return Finding("mps", OK, f"no daemon behind {mps.pipes}; {mps.control} can start one")
    mode = {True: "static partitions", False: "plain", None: "mode not visible"}[mps.static]
    found = f"a daemon behind {mps.pipes}, {mode}"
    if mps.percentage is not None:
        found += f", {mps.percentage:g} % of the SMs to a client"
    obstacle = next(static_daemon(facts), None)
    return (
        Finding("mps", OK, found)
        if obstacle is None
        else Finding("mps", WARN, found, obstacle.hint)
    )


def _environment(facts: Facts) -> Iterator[Finding]:
    capped = next(capped_clients(facts), None)
    if capped is not None:
        yield Finding("thread percentage", WARN, *capped)
    connections = facts.environment.get(CONNECTIONS)
    if connections is not None and not (
        connections.isdigit() and int(connections) >= NUM_CONNECTIONS
    ):
        hint = f"two MPS clients need {NUM_CONNECTIONS}; unset it"
        yield Finding("connections", WARN, f"{CONNECTIONS}={connections}", hint)


def _hook() -> Finding:
    """vLLM's V2 runner keeps its stream in an attribute that has to change with the partition."""
    if os.environ.get(V2_SWITCH, "1").lower() in ("0", "false"):
        hint = f"unset {V2_SWITCH}: only the V2 runner follows a green context"
        return Finding("vllm runner", WARN, f"{V2_SWITCH}={os.environ[V2_SWITCH]}", hint)
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return Finding("vllm runner", WARN, "not installed")
    try:
        source = (Path(spec.origin).parent / V2_RUNNER).read_text()
    except OSError:
        source = ""
    if "def main_stream(self)" in source:
        return Finding("vllm runner", OK, "V2, with main_stream")
    hint = "green contexts need vLLM 0.32 as it was released"
    return Finding("vllm runner", WARN, "no V2 runner with main_stream", hint)


def _openmp(facts: Facts) -> Finding:
    """What is inherited; engines that divide cores are started with OMP_WAIT_POLICY=passive."""
    bound = [
        f"{name}={facts.environment[name]}"
        for name in BINDING
        if facts.environment.get(name, "").lower() not in UNBOUND
    ]
    if bound:
        hint = "threads that are bound to cores cannot be moved: unset it"
        return Finding("openmp", WARN, ", ".join(bound), hint)
    policy = facts.environment.get("OMP_WAIT_POLICY", "not set")
    return Finding("openmp", OK, f"OMP_WAIT_POLICY {policy}, threads not bound")


# Profiles -----------------------------------------------------------------------------------------


def _profile(facts: Facts, device: str) -> Finding:
    """One that was made on this device, of whatever model."""
    installed = {name: found for name, found in versions().items() if found is not None}
    here = installed | of_device(facts, device)
    paths = sorted(PROFILES.glob("*/*.yaml"))
    matching, others = [], []
    for path in paths:
        try:
            key = profile.read(path).key
        except ConfigError as error:
            others.append(str(error).splitlines()[0])
            continue
        differs = profile.mismatch(key, key.model_copy(update=here))
        if differs is None:
            matching.append(f"{path} ({key.model}, {key.units} units)")
        else:
            others.append(f"{path}: {differs}")
    if matching:
        return Finding("profile", OK, "; ".join(matching))
    hint = "easerve profile FILE.yaml; without a profile a batch gets half of the device"
    return Finding("profile", WARN, others[0] if others else f"none in {PROFILES}", hint)
