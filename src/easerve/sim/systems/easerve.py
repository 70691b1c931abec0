"""EAServe as a scenario describes it: engines, what they share, and the core that serves."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from easerve.costs.base import Costs, Media
from easerve.costs.linear import LinearCosts
from easerve.policy.admission import Admission
from easerve.policy.core import Core, Limits
from easerve.policy.events import WorkerJoined
from easerve.policy.knobs import Knobs, Order
from easerve.policy.partition import Devices, Layout, Surface
from easerve.sim.config import EaserveSystem
from easerve.sim.encoder import EncodeEngine, EncodeLimits, whole
from easerve.sim.fleet import Fleet
from easerve.sim.llm import LlmEngine
from easerve.sim.sharing import Colocated
from easerve.sim.systems.served import Failure, Observe, Served
from easerve.sim.world import World
from easerve.types import NS_PER_S, Stage, WorkerId

GUESS_TOKENS = 1000
MAX_BYTES = 1 << 60
SURFACE_BATCHES = (1, 2, 4, 8, 16)


class Recipe(NamedTuple):
    """What a core is made of, but for what requests weigh in bytes as the server has it."""

    knobs: Knobs
    admission: Admission
    limits: Limits
    costs: LinearCosts
    devices: Devices | None

    def core(self) -> Core:
        return Core(self.knobs, self.admission, self.costs, self.limits, self.devices)


class Group(NamedTuple):
    """Encoders whose devices a local prefill engine shares; None: all engines share the machine."""

    local: WorkerId
    encoders: tuple[WorkerId, ...]
    device: Colocated | None


def build(
    config: EaserveSystem,
    world: World,
    failures: Sequence[Failure] = (),
    observe: Observe | None = None,
) -> Served:
    """``observe``: is told of every step of the core."""
    layout = _layout(config, world)
    groups = list(_groups(config, world, layout))
    prefills = [*_locals(config, world, groups), *_remotes(config, world)]
    decodes = list(_decodes(config, world))
    fleet = Fleet(
        world.costs_of(config.prefill.tensor_parallel_size),
        world.run,
        _encoders(config, world, groups),
        prefills,
        decodes,
        _devices(groups),
        {encoder: frozenset({group.local}) for group in groups for encoder in group.encoders},
        world.host,
    )
    return Served(
        recipe(config, world).core(),
        fleet,
        list(_workers(config, groups)),
        world.requests,
        world.run,
        config.prepare_s,
        config.limits.preparation_workers,
        Stage(config.first_token_at),
        failures,
        observe,
    )


def recipe(config: EaserveSystem, world: World) -> Recipe:
    """Of the core of this system."""
    policy, limits = config.policy, config.limits
    costs = world.costs_of(config.prefill.tensor_parallel_size)
    media = Counter(item for request in world.requests for item in request.items)
    usual = media.most_common(1)[0][0] if media else None
    devices = None
    if config.partition is not None:
        layout = _layout(config, world)
        devices = Devices(None if usual is None else surface(costs, usual, layout))
    return Recipe(
        Knobs(**{**policy.model_dump(), "order": Order(policy.order)}),
        Admission(limits.max_requests, MAX_BYTES),
        Limits(
            limits.max_retries,
            int(limits.request_timeout_s * NS_PER_S),
            int(limits.worker_wait_s * NS_PER_S),
        ),
        guess(costs, usual),
        devices,
    )


def guess(costs: Costs, usual: Media | None) -> LinearCosts:
    """The first guess of the core's estimates, which it corrects by what it sees."""
    encode_base_s = encode_token_s = 0.0
    if usual is not None:
        one_s, two_s = costs.encode([usual]), costs.encode([usual, usual])
        encode_token_s = (two_s - one_s) / usual.num_tokens
        encode_base_s = max(0.0, 2 * one_s - two_s)
    one_s, two_s = costs.prefill(GUESS_TOKENS), costs.prefill(2 * GUESS_TOKENS)
    base_s, token_s = max(0.0, 2 * one_s - two_s), (two_s - one_s) / GUESS_TOKENS
    return LinearCosts(encode_base_s, encode_token_s, base_s, token_s)


def surface(costs: Costs, usual: Media, layout: Layout) -> Surface:
    """What a profile of the encoder would have measured."""
    units = (*layout.parts, layout.total)
    rows = (
        (batch, tuple((each, costs.encode([usual] * batch, each / layout.total)) for each in units))
        for batch in SURFACE_BATCHES
    )
    return Surface(usual.num_tokens, tuple(rows))


def _layout(config: EaserveSystem, world: World) -> Layout:
    kept = config.partition.min_prefill_units if config.partition else None
    return Layout(world.num_units, world.granule, kept or world.granule)


def _groups(config: EaserveSystem, world: World, layout: Layout) -> Iterator[Group]:
    """The encoders in their order, cut into groups of a local prefill engine's ranks."""
    if config.local_prefill is None:
        return
    size = config.local_prefill.tensor_parallel_size
    for number in range(config.encode.replicas // size):
        local = WorkerId(f"l{number}")
        encoders = range(number * size, (number + 1) * size)
        device = None
        if world.machine is None:
            device = Colocated(layout, local, config.local_prefill.crowding)
        yield Group(local, tuple(WorkerId(f"e{each}") for each in encoders), device)


def _devices(groups: Sequence[Group]) -> dict[WorkerId, Colocated]:
    """Of each encoder that shares one."""
    pairs = ((encoder, group.device) for group in groups for encoder in group.encoders)
    return {encoder: device for encoder, device in pairs if device is not None}


def _encoders(
    config: EaserveSystem, world: World, groups: Sequence[Group]
) -> Iterator[EncodeEngine]:
    limits = EncodeLimits(config.encode.dispatch_s, config.encode.item_s)
    device_of = _devices(groups)
    for number in range(config.encode.replicas):
        name = WorkerId(f"e{number}")
        device = device_of.get(name)
        part = whole if device is None else partial(device.encode_part, name)
        yield world.encoder(name, limits, device, part)


def _locals(config: EaserveSystem, world: World, groups: Sequence[Group]) -> Iterator[LlmEngine]:
    for group in groups:
        assert config.local_prefill is not None
        engine = world.llm(
            group.local,
            Stage.PREFILL,
            config.local_prefill,
            config.prefill.gpu_memory_utilization,
            group.device,
            whole if group.device is None else group.device.prefill_part,
            holds=True,
            with_encoder=True,
        )
        if group.device is not None:
            group.device.wake = engine.wake
        yield engine


def _remotes(config: EaserveSystem, world: World) -> Iterator[LlmEngine]:
    section = config.prefill
    for number in range(section.replicas):
        utilization = section.gpu_memory_utilization
        yield world.llm(f"p{number}", Stage.PREFILL, section, utilization, holds=True)


def _decodes(config: EaserveSystem, world: World) -> Iterator[LlmEngine]:
    section = config.decode
    for number in range(section.replicas):
        yield world.llm(f"d{number}", Stage.DECODE, section, section.gpu_memory_utilization)


def _workers(config: EaserveSystem, groups: Sequence[Group]) -> Iterator[WorkerJoined]:
    """As the engines introduce themselves to the core."""
    for number in range(config.encode.replicas):
        tokens = config.encode.max_num_batched_tokens
        yield WorkerJoined(WorkerId(f"e{number}"), Stage.ENCODE, max_batch_tokens=tokens)
    for group in groups:
        assert config.local_prefill is not None
        slots = config.local_prefill.max_num_seqs
        yield WorkerJoined(group.local, Stage.PREFILL, slots, beside=group.encoders)
    for stage, letter, section in (
        (Stage.PREFILL, "p", config.prefill),
        (Stage.DECODE, "d", config.decode),
    ):
        for number in range(section.replicas):
            yield WorkerJoined(WorkerId(f"{letter}{number}"), stage, section.max_num_seqs)
