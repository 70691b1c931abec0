"""Who is compared at the same number of devices: whole engines, and three ways to split them.

A contender is a system with its engines, as changes of a scenario, by the path of the key: anything
else that can be laid on a scenario (what a search has found) can be compared in its place. Keys
that only engines have (slots, budgets, KV cache) are those of the scenario's own sections.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from easerve.config import ConfigError
from easerve.sim import scenario as scenarios
from easerve.sim.bound import balanced_share
from easerve.sim.config import EaserveSystem, LlmEngines, LocalPrefill
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.simulate import make_world

AGGREGATED, E_PD, E_P_D, OURS = "aggregated", "E+PD", "E+P+D", "EAServe"
"""From the simplest on."""
SECTIONS: Mapping[str, str] = {
    AGGREGATED: "vllm",
    E_PD: "vllm-epd",
    E_P_D: "vllm-epd",
    OURS: "easerve",
}
"""Of a scenario, by family."""
ENGINE_KEYS = frozenset(LlmEngines.model_fields) - {"replicas", "tensor_parallel_size"}
LOCAL_KEYS = ENGINE_KEYS & frozenset(LocalPrefill.model_fields)
NOT_COMPARED = ("experiment", "anchors", "failures")
SHARES = (-0.1, -0.05, 0.05, 0.1)
"""Other remote shares, from the one with which both sides of prefill have as much to do."""
MAX_DEGREE = 8
CHUNKS = (256, 512, 1024)
"""Tokens of a step, besides the scenario's own number: where prefill and decode share an engine
they set how long prompts hold decodes up.
"""
DEFAULT_UTILIZATION = 0.9


@dataclass(frozen=True, slots=True)
class Contender:
    """``changes``: of the scenario, by the path of the key. ``variants``: by name, more changes
    with which the same engines are tried as well, if this is the best topology.
    """

    name: str
    system: str
    changes: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def varied(self) -> "Iterator[Contender]":
        for name, changes in self.variants.items():
            yield Contender(name, self.system, {**self.changes, **changes})


@dataclass(frozen=True, slots=True)
class Family:
    """A way to serve at its topologies; ``refused``: why no engine of other sizes can be."""

    name: str
    contenders: Sequence[Contender]
    refused: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    """``degrees``: devices that an engine may have. ``refuses``: why an engine of so many devices,
    with an encoder in their memory or not, cannot be; None: it can. ``shares``: engines share one
    device, a CPU, so that fewer of them than there may be waste nothing.
    """

    num_devices: int
    degrees: Sequence[int]
    refuses: Callable[[int, bool], str | None]
    shares: bool = False


def machine_of(content: Mapping[str, Any]) -> Machine:
    """That of a scenario. An engine holds the longest of its requests. Raises ConfigError."""
    scenario = scenarios.build(bare(content), "the scenario")
    world = make_world(scenario, Run())
    longest = max(each.num_prompt_tokens + each.num_tokens for each in world.requests)
    section = engine_keys(content)
    utilization = section.get("gpu_memory_utilization", DEFAULT_UTILIZATION)

    def refuses(tp: int, with_encoder: bool) -> str | None:
        try:
            world.costs_of(tp)
            tokens = section.get("kv_cache_tokens") or world.kv_tokens(
                tp, utilization, with_encoder
            )
        except ConfigError as error:
            return str(error)
        if tokens < longest:
            return (
                f"tensor_parallel_size {tp}: the KV cache holds {tokens:,} tokens, a request has "
                f"up to {longest:,}"
            )
        return None

    one = scenario.costs.source == "profile"  # of an engine as it was measured
    most = 1 if one else min(MAX_DEGREE, scenario.num_gpus)
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= most]
    return Machine(scenario.num_gpus, degrees, refuses, shares=world.machine is not None)


def bare(content: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is of the scenario's experiment. Raises ConfigError for failures."""
    if content.get("failures"):
        raise ConfigError("failures: they are of one system's engines; --set failures=[]")
    return {key: value for key, value in content.items() if key not in NOT_COMPARED}


def alone(content: Mapping[str, Any], contender: Contender) -> Scenario:
    """The scenario with nothing but this system. Raises ConfigError."""
    laid = scenarios.laid(bare(content), contender.changes)
    laid["systems"] = {contender.system: laid["systems"][contender.system]}
    laid["system"] = contender.system
    return scenarios.build(laid, contender.name)


def engine_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """What the scenario says of its decode engines, or of any others."""
    systems = content.get("systems") or {}
    for path in (("easerve", "decode"), ("easerve", "prefill"), ("vllm-epd", "decode"), ("vllm",)):
        section: Any = systems
        for key in path:
            section = (section or {}).get(key)
        if section:
            return {key: value for key, value in section.items() if key in ENGINE_KEYS}
    return {}


def families(
    content: Mapping[str, Any], machine: Machine, chunks: Sequence[int] = CHUNKS
) -> list[Family]:
    """All four, from the simplest on; of one that cannot be there is only why. ``chunks``: tokens
    of a step that engines which prefill and decode are tried with, besides their own. Raises
    ConfigError for a scenario that cannot be.
    """
    fits, why = _fitting(machine, with_encoder=False)
    whole, why_whole = _fitting(machine, with_encoder=True)
    base = _base(content)
    split = [*_splits(machine, fits)]
    found = {
        AGGREGATED: ([*_aggregated(base, _whole(machine, whole), chunks)], why_whole),
        E_PD: ([*_e_pd(base, _pairs(machine, fits), chunks)], why),
        E_P_D: ([_e_p_d(base, *each) for each in split], why),
        OURS: ([each for one in split for each in _ours(content, base, whole, *one)], why),
    }
    return [
        Family(
            name, contenders, [*refused, *([] if contenders else [_too_few(machine, name, fits)])]
        )
        for name, (contenders, refused) in found.items()
    ]


def _fitting(machine: Machine, with_encoder: bool) -> tuple[list[int], list[str]]:
    """Degrees that an engine may have, and why not others."""
    reasons = {degree: machine.refuses(degree, with_encoder) for degree in machine.degrees}
    fits = [degree for degree, why in reasons.items() if why is None]
    return fits, [why for why in reasons.values() if why is not None]


def _too_few(machine: Machine, name: str, fits: Sequence[int]) -> str:
    """What an engine of each kind needs at least."""
    num_engines = {E_PD: 1, E_P_D: 2, OURS: 2}.get(name)
    if not fits or num_engines is None:
        return "no engine fits"
    least = 1 + num_engines * min(fits)
    return (
        f"an engine of each kind needs {least} devices in all, and there are {machine.num_devices}"
    )


Engines = tuple[int, int]
"""Replicas, and devices of each."""


def _groups(num: int, degrees: Iterable[int]) -> Iterator[Engines]:
    """Engines of one size on so many devices, or on fewer."""
    for tp in degrees:
        for replicas in range(1, num // tp + 1):
            yield replicas, tp


def _whole(machine: Machine, degrees: Sequence[int]) -> Iterator[Engines]:
    """Engines of one size on all devices; what is left of them idles."""
    for replicas, tp in _groups(machine.num_devices, degrees):
        if machine.shares or replicas == machine.num_devices // tp:
            yield replicas, tp


def _pairs(machine: Machine, degrees: Sequence[int]) -> Iterator[tuple[int, Engines]]:
    """Encoders have what is left."""
    for both in _groups(machine.num_devices - 1, degrees):
        left = machine.num_devices - both[0] * both[1]
        for encoders in range(1, left + 1) if machine.shares else (left,):
            yield encoders, both


def _splits(machine: Machine, degrees: Sequence[int]) -> Iterator[tuple[int, Engines, Engines]]:
    for prefill in _groups(machine.num_devices - 2, degrees):
        for decode in _groups(machine.num_devices - 1 - prefill[0] * prefill[1], degrees):
            left = machine.num_devices - prefill[0] * prefill[1] - decode[0] * decode[1]
            for encoders in range(1, left + 1) if machine.shares else (left,):
                yield encoders, prefill, decode


def _name(letter: str, engines: Engines) -> str:
    """As in ``p2x3``: three prefill engines of two devices."""
    replicas, tp = engines
    return f"{letter}{tp}" + (f"x{replicas}" if replicas > 1 else "")


def _sized(section: Mapping[str, Any], engines: Engines) -> dict[str, Any]:
    return {**section, "replicas": engines[0], "tensor_parallel_size": engines[1]}


@dataclass(frozen=True, slots=True)
class _Base:
    """Sections to which engines are added, without their numbers."""

    vllm: Mapping[str, Any]
    epd: Mapping[str, Any]
    encode: Mapping[str, Any]
    prefill: Mapping[str, Any]
    decode: Mapping[str, Any]


def _base(content: Mapping[str, Any]) -> _Base:
    systems = content.get("systems") or {}
    ours, epd = systems.get("easerve") or {}, systems.get("vllm-epd") or {}
    engines, encode = engine_keys(content), ours.get("encode") or epd.get("encode") or {}
    item_s = {"item_s": encode["item_s"]} if "item_s" in encode else {}
    return _Base(
        systems.get("vllm") or {**engines, **item_s},
        {key: value for key, value in epd.items() if key not in ("encode", "prefill", "decode")},
        {key: value for key, value in encode.items() if key != "replicas"},
        {**engines, **_keys(ours.get("prefill")), **_keys(epd.get("prefill"))},
        {**engines, **_keys(epd.get("decode"))},
    )


def _keys(section: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (section or {}).items() if key in ENGINE_KEYS}


def _chunked(
    name: str, section: Mapping[str, Any], chunks: Sequence[int]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Engines that prefill and decode, with each number of tokens of a step; by name."""
    yield name, dict(section)
    own = section.get("max_num_batched_tokens", LlmEngines().max_num_batched_tokens)
    for tokens in chunks:
        if tokens != own:
            yield f"{name} chunk {tokens}", {**section, "max_num_batched_tokens": tokens}


def _aggregated(
    base: _Base, sizes: Iterable[Engines], chunks: Sequence[int]
) -> Iterator[Contender]:
    for engines in sizes:
        for name, section in _chunked(_name("tp", engines), _sized(base.vllm, engines), chunks):
            yield Contender(name, "vllm", {"systems.vllm": section})


def _e_pd(
    base: _Base, sizes: Iterable[tuple[int, Engines]], chunks: Sequence[int]
) -> Iterator[Contender]:
    for encoders, both in sizes:
        encode = {**base.encode, "replicas": encoders}
        name = f"e{encoders}-{_name('pd', both)}"
        for chunked, decode in _chunked(name, _sized(base.decode, both), chunks):
            rest = {"first_token_at": "decode", "prefill": None}
            section = {**base.epd, **rest, "encode": encode, "decode": decode}
            yield Contender(chunked, "vllm-epd", {"systems.vllm-epd": section})


def _e_p_d(base: _Base, encoders: int, prefill: Engines, decode: Engines) -> Contender:
    section = {
        **base.epd,
        "encode": {**base.encode, "replicas": encoders},
        "prefill": _sized(base.prefill, prefill),
        "decode": _sized(base.decode, decode),
    }
    name = _split_name(encoders, prefill, decode)
    return Contender(name, "vllm-epd", {"systems.vllm-epd": section})


def _split_name(encoders: int, prefill: Engines, decode: Engines) -> str:
    return f"e{encoders}-{_name('p', prefill)}-{_name('d', decode)}"


def _ours(
    content: Mapping[str, Any],
    base: _Base,
    beside: Sequence[int],
    encoders: int,
    prefill: Engines,
    decode: Engines,
) -> Iterator[Contender]:
    """All prefill remote; and with the smallest local engines that fit, at the share with which
    both sides finish together.
    """
    ours = (content.get("systems") or {}).get("easerve") or {}
    name, prefix = _split_name(encoders, prefill, decode), "systems.easerve."
    engines = {
        f"{prefix}encode": {**base.encode, "replicas": encoders},
        f"{prefix}prefill": _sized(_keys(ours.get("prefill")) or base.prefill, prefill),
        f"{prefix}decode": _sized(_keys(ours.get("decode")) or base.decode, decode),
    }
    remote = {f"{prefix}{key}": None for key in ("local_prefill", "partition")}
    yield Contender(
        name, "easerve", {**engines, **remote, f"{prefix}policy": {"remote_share": 1.0}}
    )
    for tp in beside:
        if encoders % tp:
            continue
        local = _local(ours, base, tp)
        changes = {**engines, f"{prefix}local_prefill": local}
        half = {**changes, f"{prefix}policy": {"remote_share": 0.5}}
        share = _balanced(content, Contender(name, "easerve", half))
        shares = [round(share + each, 2) for each in SHARES]
        first, *others = (
            Contender(
                f"{name} share {each:g}",
                "easerve",
                {**changes, f"{prefix}policy": {"remote_share": each}},
            )
            for each in (share, *(each for each in shares if 0 < each < 1))
        )
        yield replace(first, variants={each.name: each.changes for each in others})
        return


def _local(ours: Mapping[str, Any], base: _Base, tp: int) -> dict[str, Any]:
    """As the scenario has them, or as its prefill engines."""
    given = ours.get("local_prefill")
    if given is None:
        section = _keys(ours.get("prefill")) or base.prefill
        given = {key: value for key, value in section.items() if key in LOCAL_KEYS}
    return {**given, "tensor_parallel_size": tp}


def _balanced(content: Mapping[str, Any], contender: Contender) -> float:
    scenario = alone(content, contender)
    config = scenario.configs["easerve"]
    assert isinstance(config, EaserveSystem)
    return round(balanced_share(config, make_world(scenario, Run())), 2)
