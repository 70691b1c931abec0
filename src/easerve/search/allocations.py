"""Every way to give a machine's devices to the stages, and which of them can be.

An allocation is so many encoders of a device each, so many prefill engines and so many decode
engines, of one size per stage. None is left out silently: each of them is an allocation or pruned,
with why.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from easerve.search.machine import Machine
from easerve.search.planned import offload
from easerve.search.space import Allocation
from easerve.types import Stage

SLOW_FROM_TP = 4
"""Without NVLink, degrees from this one on are only kept where they make prefill faster."""
Groups = Sequence[tuple[int, ...]]


class Engines(NamedTuple):
    """Of prefill or of decode; ``tp``: devices of each."""

    replicas: int
    tp: int

    @property
    def num_devices(self) -> int:
        return self.replicas * self.tp

    def __str__(self) -> str:
        return f"{self.tp}x{self.replicas}" if self.replicas > 1 else f"{self.tp}"


class Composition(NamedTuple):
    encoders: int
    prefill: Engines
    decode: Engines

    @property
    def num_devices(self) -> int:
        return self.encoders + self.prefill.num_devices + self.decode.num_devices

    @property
    def name(self) -> str:
        """``e2-p2x2-d4``: two encoders, two prefill engines of two devices, a decode engine of
        four.
        """
        return f"e{self.encoders}-p{self.prefill}-d{self.decode}"


@dataclass(frozen=True, slots=True)
class Pruned:
    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Enumeration:
    """``remote_only``: of the allocations, those without local prefill, and why nothing runs beside
    their encoders.
    """

    allocations: Sequence[Allocation]
    pruned: Sequence[Pruned]
    remote_only: Sequence[Pruned] = ()

    def __len__(self) -> int:
        """Of all that were looked at."""
        return len(self.allocations) + len(self.pruned)


@dataclass(frozen=True, slots=True)
class _Placed:
    """What can be: where its engines are, the devices of the encoders in the order in which local
    prefill takes them. ``local_tp`` None: nothing runs beside encoders, ``why`` not.
    """

    composition: Composition
    devices: Mapping[Stage, Groups]
    local_tp: int | None
    why: str


def enumerate_(machine: Machine) -> Enumeration:
    """Of fewer than three devices there is nothing to enumerate."""
    compositions = list(_compositions(machine))
    found = {each: _refused(machine, each) or _placed(machine, each) for each in compositions}
    placed = {key: each for key, each in found.items() if isinstance(each, _Placed)}
    why = {key: each for key, each in found.items() if isinstance(each, str)}
    if not machine.shares_cores:
        why |= _dominated(machine, placed)
    kept = [placed[each] for each in compositions if each not in why]
    return Enumeration(
        [_allocation(machine, each) for each in kept],
        [Pruned(each.name, why[each]) for each in compositions if each in why],
        [Pruned(each.composition.name, each.why) for each in kept if each.local_tp is None],
    )


def _compositions(machine: Machine) -> Iterator[Composition]:
    """That the devices suffice for."""
    num = len(machine.devices)
    for encoders in range(1, num):
        for prefill in _engines(machine, num - encoders - 1):
            for decode in _engines(machine, num - encoders - prefill.num_devices):
                yield Composition(encoders, prefill, decode)


def _engines(machine: Machine, num_devices: int) -> Iterator[Engines]:
    for tp in machine.tps:
        for replicas in range(1, num_devices // tp + 1):
            yield Engines(replicas, tp)


# What cannot be -----------------------------------------------------------------------------------


def _refused(machine: Machine, composition: Composition) -> str | None:
    """Why the machine does not hold engines of these sizes, or none should have them."""
    encoders, prefill, decode = composition
    for stage, tp in ((Stage.ENCODE, 1), (Stage.PREFILL, prefill.tp), (Stage.DECODE, decode.tp)):
        if why := machine.refuses(stage, tp, beside=False):
            return f"{stage} on {tp}: {why}"
    counts = (encoders, prefill.replicas, decode.replicas)
    return machine.refuses_all(*counts, offload=False) or _slow(machine, prefill.tp)


def _slow(machine: Machine, tp: int) -> str | None:
    """Why prefill over the host bridge has no use for so many devices."""
    half = tp // 2
    if machine.islands or machine.prefill_s is None or tp < SLOW_FROM_TP:
        return None
    if machine.refuses(Stage.PREFILL, half, beside=False):
        return None
    seconds, half_s = machine.prefill_s(tp), machine.prefill_s(half)
    if seconds < half_s:
        return None
    return f"prefill on {tp}: without NVLink it takes {seconds:.3g} s, and {half_s:.3g} s on {half}"


def _dominated(machine: Machine, placed: Mapping[Composition, _Placed]) -> dict[Composition, str]:
    """Those that leave devices idle where one more engine could have them, with all others and
    local prefill as before; by one that is not dominated itself.
    """
    best: dict[Composition, Composition] = {}
    for each in sorted(placed, key=lambda each: each.num_devices, reverse=True):
        larger = (other for other in _larger(each, len(machine.devices)) if other in placed)
        offloads = placed[each].local_tp is not None
        good = (other for other in larger if placed[other].local_tp is not None or not offloads)
        best[each] = best.get(next(good, each), each)
    return {
        each: f"leaves {_idle(len(machine.devices) - each.num_devices)}: {other.name} has all its "
        "engines and more"
        for each, other in best.items()
        if other != each
    }


def _idle(num: int) -> str:
    return f"{num} device{'s' * (num > 1)} idle"


def _larger(composition: Composition, num_devices: int) -> Iterator[Composition]:
    """With one more engine of a kind, or more encoders, as far as devices go."""
    encoders, prefill, decode = composition
    idle = num_devices - composition.num_devices
    if decode.tp <= idle:
        yield Composition(encoders, prefill, Engines(decode.replicas + 1, decode.tp))
    if prefill.tp <= idle:
        yield Composition(encoders, Engines(prefill.replicas + 1, prefill.tp), decode)
    for more in range(1, idle + 1):
        yield Composition(encoders + more, prefill, decode)


# What can be --------------------------------------------------------------------------------------


def _placed(machine: Machine, composition: Composition) -> _Placed | str:
    """Why NVLink does not join engines of these sizes, else the engines on their devices."""
    tp, why = _local(machine, composition)
    devices = _devices(machine, composition, tp or 1)
    if devices is None and tp is not None:
        why = f"no island of NVLink has room for {tp} encoders with prefill over their devices"
        tp, devices = None, _devices(machine, composition, 1)
    if devices is None:
        joined = ", ".join("-".join(map(str, island)) for island in machine.islands)
        return (
            f"prefill on {composition.prefill} and decode on {composition.decode}: the islands of "
            f"NVLink do not hold them: {joined}"
        )
    return _Placed(composition, devices, tp, why)


def _local(machine: Machine, composition: Composition) -> tuple[int | None, str]:
    """The fewest devices of a local prefill engine; None and why there can be none."""
    encoders, prefill, decode = composition
    why = ""
    for tp in (tp for tp in machine.tps if tp <= encoders):
        if encoders % tp:
            return None, f"prefill beside encoders on {tp}: {encoders} are no multiple; {why}"
        refused = machine.refuses(Stage.PREFILL, tp, beside=True)
        if refused is None:
            counts = (encoders, prefill.replicas, decode.replicas)
            refused = machine.refuses_all(*counts, offload=True)
        if refused is None:
            return tp, ""
        why = f"on {tp}: {refused}"
    return None, f"prefill beside encoders {why}"


def _devices(
    machine: Machine, composition: Composition, local_tp: int
) -> dict[Stage, Groups] | None:
    """Of each engine, no group of them across islands; None if that cannot be.

    Sizes are powers of two, so that what the largest take from an island leaves as much room for
    the others wherever it is: largest first finds a way if there is one.
    """
    bins = _bins(machine)
    encoders, prefill, decode = composition
    wanted = [
        *((local_tp, Stage.ENCODE) for _ in range(encoders // local_tp)),
        *((prefill.tp, Stage.PREFILL) for _ in range(prefill.replicas)),
        *((decode.tp, Stage.DECODE) for _ in range(decode.replicas)),
    ]
    found: dict[Stage, list[tuple[int, ...]]] = {stage: [] for _, stage in wanted}
    for size, stage in sorted(wanted, key=lambda each: -each[0]):
        free = next((each for each in bins if len(each) >= size), None)
        if free is None:
            return None
        found[stage].append(tuple(free[:size]))
        del free[:size]
    flat = [(gpu,) for group in found[Stage.ENCODE] for gpu in group]
    return {**found, Stage.ENCODE: flat}


def _bins(machine: Machine) -> list[list[int]]:
    """Devices among which a group may be: without NVLink all, else an island, or one by itself."""
    if not machine.islands:
        return [list(machine.devices)]
    joined = {gpu for island in machine.islands for gpu in island}
    alone = [[gpu] for gpu in machine.devices if gpu not in joined]
    return [*map(list, machine.islands), *alone]


def _allocation(machine: Machine, placed: _Placed) -> Allocation:
    encoders, prefill, decode = placed.composition
    changes: dict[str, Any] = {**machine.fixed, "encode.replicas": encoders}
    for stage, engines in ((Stage.PREFILL, prefill), (Stage.DECODE, decode)):
        changes[f"{stage}.replicas"] = engines.replicas
        if not machine.shares_cores:
            changes[f"{stage}.tensor_parallel_size"] = engines.tp
    if machine.names_devices:
        for stage, groups in placed.devices.items():
            changes[f"{stage}.devices"] = [list(group) for group in groups]
    local = placed.local_tp
    beside = None if local is None else offload(local, on_gpus=not machine.shares_cores)
    return Allocation(placed.composition.name, changes, beside)
