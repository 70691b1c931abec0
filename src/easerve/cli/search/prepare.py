"""What has to be known before the first trial: space, capacities of stages, candidates, objective.

Of a scenario all of it is modelled. Of a deployment file the machine is this one: engines are
started to see what each stage does alone, unless a file of ``easerve profile`` has it.
"""

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from easerve.cli import divide, profile, profile_capacity
from easerve.cli.advise_deployment import is_deployment
from easerve.cli.bench.asked import modality
from easerve.cli.profile_capacity_bench import Workload
from easerve.cli.profile_here import here, path_of
from easerve.cli.search.confirm import AS_IT_IS, UNCHANGED, Side
from easerve.cli.search.live import LiveObjective
from easerve.cli.search.live_load import Window, promised
from easerve.cli.search.live_process import Tell
from easerve.cli.search.result import Question
from easerve.config import ConfigError, Deployment, build, read_file
from easerve.costs import hardware, roofline
from easerve.engines.vllm.models import config_of
from easerve.goodput import Slo, parse_slo
from easerve.search import allocations, best, machine, modelled, pruning, simulated, spaces
from easerve.search.allocations import Enumeration
from easerve.search.bottleneck import TP, Site
from easerve.search.capacity import Table
from easerve.search.methods.method import Candidate
from easerve.search.objective import Objective
from easerve.search.pruning import Pruning
from easerve.search.simulated import SimulatedObjective
from easerve.search.space import Configuration, Knob, Space, Value
from easerve.sim import scenario as scenarios
from easerve.sim.config import EaserveSystem, LocalPrefill
from easerve.sim.scenario import OWN_SLO, Scenario
from easerve.workload.requests import DATASET_TOKENS, SHAPES_TOKENS
from easerve.workload.requests import Asked as Load

BELOW, ABOVE = 0.1, 1.5
"""Ends of the ladder, of the most that the best allocation can do: what stays below the one is no
candidate, and short runs may outlast a rate that is too high by less than the other."""
OURS = "easerve"
STAGES = ("encode", "prefill", "decode")
USUAL = ("S3", OWN_SLO)
TEXT_TOKENS = 24
"""Of a question about shapes, in its chat template."""
BATCHES = (1, 2, 4, 8, 16)
"""Of an encoder, that are measured."""


@dataclass(frozen=True, slots=True)
class Common:
    """Of either source. ``knobs``: other values, by the path of the key."""

    path: Path
    tier: str | None
    seeds: tuple[int, ...]
    required: float
    space: str
    knobs: Mapping[str, Sequence[Value]]
    max_kept: int
    tolerance: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """``over``: changes of the scenario. ``rates_per_s`` None: a ladder of what can be done.
    ``deployment``: what the winner is laid on.
    """

    over: Sequence[str]
    rates_per_s: Sequence[float] | None
    deployment: Path | None


@dataclass(frozen=True, slots=True)
class Live:
    """``max_engines`` None: as many as the machine's default; ``gpus`` None: all. ``profiles``: the
    folder with what stages do alone.
    """

    load: Load
    rate_per_s: float
    window_s: float
    reference: Path | None
    machine: str | None
    max_engines: int | None
    gpus: Sequence[int] | None
    profiles: Path
    allow_late: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """``entered``: the objective in ``with``, which ends what it has started. ``winner``: a
    configuration as the content of a deployment file. ``before``: the source as it is, None
    where it cannot be.
    """

    question: Question
    candidates: Sequence[Candidate]
    objective: Objective
    entered: AbstractContextManager[Any]
    winner: Callable[[Configuration], dict[str, Any]]
    before: Side | None


def check_knobs(
    common: Common, found: Enumeration, build: Callable[[Space, Configuration], object]
) -> None:
    """Every value that was given of a knob, by itself. Raises ConfigError."""
    for path, values in common.knobs.items():
        for value in values:
            alone = spaces.space(common.space, found.allocations, {path: (value,)})
            try:
                build(alone, next(iter(alone)))
            except ConfigError as error:
                raise ConfigError(f"--knob {path}={value}: {error}") from None


def is_scenario(path: Path) -> bool:
    """Else it is a deployment file. Raises ConfigError for a file that is neither."""
    return not is_deployment(path)


def knobs_of(texts: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    """``policy.max_batch_items=1,4,16`` -> values by the path, each once, numbers rising. Raises
    ConfigError.
    """
    found: dict[str, tuple[Value, ...]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        if not equals or "." not in path or not values:
            raise ConfigError(f"--knob {text!r} is not like policy.max_batch_items=1,4,16")
        if path in found:
            raise ConfigError(f"--knob {path}: it is given twice; list all its values at once")
        found[path] = _values(path, values)
    return found


def _values(path: str, text: str) -> tuple[Value, ...]:
    try:
        listed = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        listed = [None, []]
    if not all(each is None or isinstance(each, str | int | float) for each in listed):
        raise ConfigError(f"--knob {path}: {text!r}: values are numbers or names, as in 1,4,16")
    values = tuple(dict.fromkeys(listed))
    return tuple(sorted(values)) if Knob(path, values).is_ordered else values


# On the simulator ---------------------------------------------------------------------------------


def on_simulator(common: Common, asked: Simulated) -> Prepared:
    """Raises ConfigError."""
    content = scenarios.laid(
        scenarios.read_content(common.path), dict(map(scenarios.key_value, asked.over))
    )
    scenario, is_as_it_is = _read(content, str(common.path))
    if not is_as_it_is:
        content = _with_one_of_each(content)
    if scenario.workload.rate_per_s is None:
        raise ConfigError(f"{common.path}: its arrivals have rates of their own: give rate_per_s")
    tier, slo = _slo(scenario, common)
    found = allocations.enumerate_(machine.of_scenario(scenario))
    why = _why(found)
    check_knobs(common, found, lambda space, each: _tried(content, space, slo).scenario(each))
    space = spaces.space(common.space, found.allocations, common.knobs)
    site = _modelled(scenario, space, slo)
    kept = _pruned(common, space, site)
    objective = SimulatedObjective(
        content,
        space,
        slo,
        tuple(sorted(set(asked.rates_per_s or _ladder(kept)))),
        common.seeds,
        common.required,
    )
    question = Question(
        str(common.path),
        scenario.title,
        False,
        tier,
        slo,
        objective.rates_per_s,
        _load(scenario),
        space,
        *why,
        kept,
        "modelled, by the costs of the scenario",
    )
    base = None if asked.deployment is None else read_file(asked.deployment)
    begun = _candidates(kept, space, site, content["systems"][OURS].get("policy"))
    return Prepared(
        question,
        begun,
        objective,
        nullcontext(),
        lambda configuration: best.of_scenario(objective.scenario(configuration), base),
        Side(replace(objective, space=UNCHANGED), AS_IT_IS, nullcontext()) if is_as_it_is else None,
    )


def _read(content: Mapping[str, Any], source: str) -> tuple[Scenario, bool]:
    """A scenario, and whether its systems are as they are said to be: where they have more GPUs
    than there are, ours has one engine of each stage, which any allocation takes the place of.
    """
    try:
        return scenarios.build(content, source), True
    except ConfigError as error:
        if "num_gpus" not in str(error):
            raise
    return scenarios.build(_with_one_of_each(content), source), False


def _with_one_of_each(content: Mapping[str, Any]) -> dict[str, Any]:
    ours = {**content["systems"][OURS], "local_prefill": None, "partition": None}
    for stage in STAGES:
        one = {"replicas": 1} if stage == "encode" else {"replicas": 1, TP: 1}
        ours[stage] = {**ours[stage], **one}
    ours["policy"] = {**ours.get("policy", {}), "remote_share": 1.0}
    left = {key: content[key] for key in content if key not in ("experiment", "anchors")}
    return left | {"system": OURS, "systems": {OURS: ours}}


def _tried(content: Mapping[str, Any], space: Space, slo: Slo) -> SimulatedObjective:
    return SimulatedObjective(content, space, slo, (1.0,), (0,))


def _slo(scenario: Scenario, common: Common) -> tuple[str, Slo]:
    """A tier of the scenario, or limits; S3 if nothing is asked for, or its own. Raises
    ConfigError.
    """
    slos = scenario.slo.slos()
    asked = common.tier or next((each for each in USUAL if each in slos), USUAL[0])
    if asked in slos:
        return asked, slos[asked]
    try:
        return asked, parse_slo(asked)
    except ValueError as error:
        known = ", ".join(slos) or "none"
        raise ConfigError(
            f"--slo {asked}: the scenario has {known}; and as limits: {error}"
        ) from None


def _modelled(scenario: Scenario, space: Space, slo: Slo) -> Site:
    """Raises ConfigError."""
    system = scenario.configs[OURS]
    assert isinstance(system, EaserveSystem), "the machine has been made of it"
    device = hardware.read(scenario.hardware)
    crowding = (system.local_prefill or LocalPrefill()).crowding
    cores = float(device.num_units) if device.kind == "cpu" else None
    return Site(modelled.capacities(scenario, _tps(space)), slo, crowding, cores)


def _tps(space: Space) -> set[int]:
    """Sizes of the engines of the language model, of all allocations."""
    found = set[int]()
    for each in space.allocations:
        found |= {int(each.changes.get(f"{stage}.{TP}", 1)) for stage in ("prefill", "decode")}
        if each.offload is not None:
            found.add(int((each.offload["local_prefill"] or {}).get(TP, 1)))
    return found


def _why(found: Enumeration) -> tuple[dict[str, str], dict[str, str]]:
    """Of what cannot be, and of what cannot prefill beside encoders. Raises ConfigError."""
    if not found.allocations:
        why = "; ".join(dict.fromkeys(each.why for each in found.pruned))
        raise ConfigError(f"no allocation can be: {why or 'three devices are the least'}")
    pruned = {each.name: each.why for each in found.pruned}
    return pruned, {each.name: each.why for each in found.remote_only}


def _pruned(common: Common, space: Space, site: Site) -> Pruning:
    """Raises ConfigError where no allocation can keep the promise by itself."""
    found = pruning.prune(space, site, common.max_kept, common.tolerance)
    if not found.kept:
        why = "; ".join(f"{each.allocation}: {each.why}" for each in found.pruned)
        raise ConfigError(f"no allocation can keep the promise: {why}")
    return found


def _ladder(kept: Pruning) -> tuple[float, ...]:
    most = kept.kept[0].per_s
    return simulated.ladder(BELOW * most, ABOVE * most)


def _load(scenario: Scenario) -> str:
    load = scenario.workload
    what = load.preset or "items of its own"
    return f"{load.num_requests} requests, {what}, {load.arrivals} arrivals"


def _candidates(
    kept: Pruning, space: Space, site: Site, policy: Mapping[str, Value] | None
) -> list[Candidate]:
    """With what to begin; ``policy``: what the file says of it."""
    given = {f"policy.{key}": value for key, value in (policy or {}).items()}
    by_name = {each.name: each for each in space.allocations}
    return [
        Candidate(
            each.allocation,
            tuple(pruning.starts(by_name[each.allocation], space, site, given)),
        )
        for each in kept.kept
    ]


# On engines ---------------------------------------------------------------------------------------


def on_engines(common: Common, asked: Live, tell: Tell, console: Console) -> Prepared:
    """Starts engines where capacities are not known yet. Raises ConfigError, EngineStartError."""
    deployment = build(read_file(common.path), str(common.path))
    window = Window(asked.load, asked.rate_per_s, asked.window_s)
    tier, slo = promised(
        common.tier or USUAL[0], deployment, asked.load, asked.reference, asked.machine
    )
    found = allocations.enumerate_(
        machine.of_deployment(deployment, max_engines=asked.max_engines, gpus=asked.gpus)
    )
    why = _why(found)
    content = read_file(common.path)
    check_knobs(common, found, lambda space, each: best.of_deployment(content, space.changes(each)))
    space = spaces.space(common.space, found.allocations, common.knobs)
    table, file = _measured(deployment, asked, _tps(space), console)
    cores = float(len(os.sched_getaffinity(0))) if deployment.device == "cpu" else None
    site = Site(table, slo, cores=cores)
    kept = _pruned(common, space, site)

    def on(space: Space) -> LiveObjective:
        return LiveObjective(
            common.path,
            space,
            window,
            slo,
            seeds=common.seeds,
            required=common.required,
            allow_late=asked.allow_late,
            tell=tell,
        )

    objective, before = on(space), on(UNCHANGED)
    question = Question(
        str(common.path),
        deployment.name,
        True,
        tier,
        slo,
        (asked.rate_per_s,),
        f"{window.num_requests} requests in {asked.window_s:g} s, {modality(asked.load)}",
        space,
        *why,
        kept,
        f"measured, {file}",
    )

    def winner(configuration: Configuration) -> dict[str, Any]:
        return best.of_deployment(content, space.changes(configuration))

    begun = _candidates(kept, space, site, content.get("policy"))
    return Prepared(
        question,
        begun,
        objective,
        objective,
        winner,
        Side(before, AS_IT_IS, before),
    )


def _measured(
    deployment: Deployment, asked: Live, tps: Collection[int], console: Console
) -> tuple[Table, Path]:
    """What each stage does alone with requests like these."""
    key = here(deployment, divide.facts_of(deployment.device))
    file = asked.profiles / path_of(key, profile.UNITS[deployment.device])
    plan = profile_capacity.plan_of(
        deployment,
        profile_capacity.Asked(_shape(deployment, asked.load), BATCHES, sorted(tps)),
        key,
        file,
        max(tps) if deployment.device == "cuda" else 0,
    )
    found = asyncio.run(profile_capacity.measure(plan, console, profile_capacity.running))
    return Table(tuple(found.rows)), plan.file


def _shape(deployment: Deployment, load: Load) -> Workload:
    """A request in the middle of what is asked."""
    side = roofline.picture_side(config_of(deployment.model))
    size = load.image_sizes[0] if load.image_sizes else (side, side)
    texts = load.text_tokens or (TEXT_TOKENS, TEXT_TOKENS)
    answers = load.output_tokens or (SHAPES_TOKENS if load.is_shapes else DATASET_TOKENS)
    items = load.num_items or (1, 1)
    return Workload(*(_middle(items), size, _middle(texts), _middle(answers)))


def _middle(ends: tuple[int, int]) -> int:
    return max(1, sum(ends) // 2)
