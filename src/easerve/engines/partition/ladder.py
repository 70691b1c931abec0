"""Which way of dividing a device is the best that a machine has: a ladder, the best rung first.

No clock, no I/O: facts in, a choice out. Only a device's first rung gives every batch a part of its
own; figures from a lower one are not those of a partition, so its name goes with them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from easerve.config import ConfigError
from easerve.engines.partition.cuda import GREEN_CUDA
from easerve.engines.partition.facts import MIG_WITHOUT_INSTANCE, Facts, Gpu
from easerve.engines.partition.mps import CONTROL, PERCENTAGE, PIPES

STATIC_CUDA = 13010
MPS_CAPABILITY = (7, 0)
EXCLUSIVE, PROHIBITED = "Exclusive_Process", "Prohibited"


class Obstacle(NamedTuple):
    """Why a rung is not possible, and what mends it (empty: nothing does)."""

    why: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rung that is not possible."""

    rung: str
    why: str
    hint: str


@dataclass(frozen=True, slots=True)
class Choice:
    """``why``: what the rung does here. ``tried``: the better ones, none of which is possible."""

    rung: str
    why: str
    per_batch: bool
    tried: tuple[Refusal, ...] = ()


class Rung(NamedTuple):
    """``per_batch``: a batch gets a part of its own. ``obstacles``: all that is in the way."""

    name: str
    what: str
    per_batch: bool
    obstacles: Callable[[Facts], Iterator[Obstacle]]


def choose(facts: Facts, device: str, wanted: str = "auto") -> Choice:
    """The best rung that is possible, or the one that is ``wanted``.

    Every GPU in ``facts`` has to be able to. Raises ConfigError for a wanted rung that is not
    possible, with the best that is.
    """
    ladder = {rung.name: rung for rung in LADDERS[device]}
    refused = {
        name: Refusal(name, *obstacle)
        for name, rung in ladder.items()
        if (obstacle := next(rung.obstacles(facts), None)) is not None
    }
    best = next(name for name in ladder if name not in refused)
    if wanted == "auto":
        above = list(ladder)[: list(ladder).index(best)]
        return _choice(ladder[best], facts, [refused[name] for name in above])
    if wanted not in ladder:
        raise ConfigError(
            f"partition.driver {wanted}: not for device: {device}, which has {', '.join(ladder)}"
        )
    if wanted in refused:
        refusal = refused[wanted]
        instead = f"partition.driver {best} would work"
        if best == OFF.name:
            instead = "nothing else would work; leave out the section partition"
        why = "; ".join(filter(None, (refusal.why, refusal.hint, instead)))
        raise ConfigError(f"partition.driver {wanted}: {why}")
    return _choice(ladder[wanted], facts)


def _choice(rung: Rung, facts: Facts, tried: Iterable[Refusal] = ()) -> Choice:
    parts = [rung.what]
    if rung.name == "green-context":
        parts.append(_granules(facts.gpus[0]))
    if rung.name == "cpu":
        parts.append(f"{len(facts.cores)} cores")
    return Choice(rung.name, "; ".join(parts), rung.per_batch, tuple(tried))


def _granules(gpu: Gpu) -> str:
    of = "the MIG instance that both engines are in" if gpu.mig else gpu.name
    return f"{gpu.num_sms} SMs of {of}, in granules of {gpu.granule}"


# What is in the way ------------------------------------------------------------------------------


def no_gpu(facts: Facts) -> Iterator[Obstacle]:
    if not facts.gpus:
        hint = "check nvidia-smi -L and CUDA_VISIBLE_DEVICES"
        if facts.error == MIG_WITHOUT_INSTANCE:
            hint = "nvidia-smi mig -cgi makes one, nvidia-smi -mig 0 turns it off"
        elif not facts.cuda:
            hint = "install the NVIDIA driver; in a container: docker run --gpus all"
        yield Obstacle(facts.error or "CUDA sees no GPU", hint)
    for gpu in facts.gpus:
        if gpu.compute_mode == PROHIBITED:
            yield Obstacle(f"{gpu.name}: compute mode Prohibited", "nvidia-smi -c DEFAULT")


def _driver_before(facts: Facts, cuda: int, what: str, driver: str) -> Iterator[Obstacle]:
    if facts.cuda < cuda:
        yield Obstacle(
            f"{what} need CUDA {version(cuda)}, this driver offers {version(facts.cuda)}", driver
        )


def no_mps(facts: Facts) -> Iterator[Obstacle]:
    """Why no daemon can serve two engines: without one they take turns, whatever the SMs."""
    mps = facts.mps
    for gpu in facts.gpus:
        if gpu.capability < MPS_CAPABILITY:
            capability = ".".join(map(str, gpu.capability))
            yield Obstacle(f"{gpu.name}: MPS needs compute capability 7.0, this has {capability}")
    if not facts.shm:
        yield Obstacle("MPS shares memory, but /dev/shm cannot be written", "mount a tmpfs there")
    if mps.alive and mps.uid not in (None, 0, facts.uid):
        yield Obstacle(
            f"the MPS daemon behind {mps.pipes} is another user's",
            f"set {PIPES} to a folder of your own",
        )
    if not mps.alive and mps.control is None:
        yield Obstacle(
            f"two processes compute at once through MPS only, and {CONTROL} is not installed",
            "install the driver's compute utilities (nvidia-compute-utils)",
        )


def static_daemon(facts: Facts) -> Iterator[Obstacle]:
    if facts.mps.alive and facts.mps.static:
        yield Obstacle(
            f"the MPS daemon behind {facts.mps.pipes} hands out static partitions only",
            f"start it without -S, or set {PIPES} to another folder",
        )


def capped_clients(facts: Facts) -> Iterator[Obstacle]:
    asked = facts.environment.get(PERCENTAGE)
    if asked is not None and _percent(asked) != 100:
        yield Obstacle(
            f"{PERCENTAGE}={asked} overrides the SMs of a green context", f"unset {PERCENTAGE}"
        )
    default = facts.mps.percentage
    if default is not None and default != 100:
        yield Obstacle(
            f"the MPS daemon gives its clients {default:g} % of the SMs, which overrides a green "
            "context",
            f"echo set_default_active_thread_percentage 100 | {CONTROL}",
        )


def _percent(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _green(facts: Facts) -> Iterator[Obstacle]:
    yield from no_gpu(facts)
    yield from _driver_before(facts, GREEN_CUDA, "green contexts", "driver 550 or newer")
    yield from capped_clients(facts)
    yield from static_daemon(facts)
    for gpu in facts.gpus:
        if not gpu.granule:
            yield Obstacle(f"{gpu.name}: no green context: {gpu.error}")
    yield from no_mps(facts)


def _mps_static(facts: Facts) -> Iterator[Obstacle]:
    yield from no_gpu(facts)
    yield from _driver_before(facts, STATIC_CUDA, "static partitions", "driver 590 or newer")
    yield from no_mps(facts)
    if facts.mps.control is None:
        yield Obstacle(
            f"{CONTROL}, which makes partitions, is not installed",
            "install the driver's compute utilities (nvidia-compute-utils)",
        )
    if facts.mps.alive and facts.mps.static is False:
        yield Obstacle(
            f"the MPS daemon behind {facts.mps.pipes} was not started with -S",
            f"start it with -S, or set {PIPES} to another folder",
        )


def _priority(facts: Facts) -> Iterator[Obstacle]:
    yield from no_gpu(facts)
    yield from static_daemon(facts)
    yield from no_mps(facts)


def _gate(facts: Facts) -> Iterator[Obstacle]:
    yield from no_gpu(facts)
    yield from static_daemon(facts)
    without_mps = next(no_mps(facts), None)
    for gpu in facts.gpus:
        if gpu.compute_mode == EXCLUSIVE and without_mps is not None:
            yield Obstacle(
                f"{gpu.name}: compute mode {EXCLUSIVE} lets one process in, and there is no MPS",
                "nvidia-smi -c DEFAULT",
            )


def _one_core(facts: Facts) -> Iterator[Obstacle]:
    if len(facts.cores) < 2:
        yield Obstacle("a single core cannot be divided", "let the process run on two or more")


def _nothing(facts: Facts) -> Iterator[Obstacle]:
    yield from ()


def version(cuda: int) -> str:
    """13010 -> 13.1."""
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


GATE = Rung("gate", "prefill pauses while something is encoded", False, _nothing)
OFF = Rung("off", "encode and prefill share the device as they come", False, _nothing)
LADDERS: Mapping[str, tuple[Rung, ...]] = {
    "cuda": (
        Rung("green-context", "SMs for each batch by green contexts, under MPS", True, _green),
        Rung(
            "mps-static",
            "parts that are fixed when the engines start, not per batch",
            False,
            _mps_static,
        ),
        Rung(
            "priority",
            "the encoder's kernels are scheduled first; nothing is set aside for them",
            False,
            _priority,
        ),
        GATE._replace(obstacles=_gate),
        OFF,
    ),
    "cpu": (
        Rung("cpu", "cores for each batch by affinity", True, _one_core),
        GATE,
        OFF,
    ),
}
