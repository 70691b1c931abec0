"""A node of HydraInfer: its language model, its encoder beside it, and what its steps take."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from easerve.costs.base import Costs, Forward, Media
from easerve.sim import sequences
from easerve.sim.config import HydraInferSystem, HydraNodes
from easerve.sim.encoder import EncodeEngine, EncodeLimits
from easerve.sim.lanes import Lanes
from easerve.sim.llm import LlmEngine, LlmLimits
from easerve.sim.sharing import Device, Shared
from easerve.sim.systems.handover import Gate
from easerve.sim.world import World
from easerve.types import Stage

MAX_IMAGE_BUDGET, MAX_TOKEN_BUDGET = 8, 2048
PROFILED_PROMPT = 16
MARGIN_S = 0.01
"""What its search for budgets (``profiler.py``) tries at most, of prompts of so many tokens, and by
how much a step must stay below the objective."""
ACTIVATIONS, KV_SHARE = 0.1, 0.8
"""Of what weights leave of a device (``epdnode.py``): for the activations of each of the two parts
of a model; and of the rest, for KV where embeddings have a cache as well.
"""
UNLIMITED = 1 << 30


@dataclass(eq=False, slots=True)
class Job:
    """A stage of a request at a node. ``source``: what is to be pulled from there first."""

    name: str
    stage: Stage
    source: "Node | None" = None


class Streams(Costs):
    """A device's two streams: how fast an encode and a step go on beside each other.

    They are as fast as on the shares ``encode_share`` and the rest of the device's units.
    """

    def __init__(self, costs: Costs, encode_share: float) -> None:
        self._costs, self._share = costs, encode_share
        self._speeds = {Stage.ENCODE: 1.0, Stage.DECODE: 1.0}

    def encode(self, items: Sequence[Media], share: float = 1.0) -> float:
        seconds = self._costs.encode(items, share)
        self._speeds[Stage.ENCODE] = seconds / self._costs.encode(items, self._share)
        return seconds

    def forward(self, step: Forward, share: float = 1.0) -> float:
        seconds = self._costs.forward(step, share)
        self._speeds[Stage.DECODE] = seconds / self._costs.forward(step, 1 - self._share)
        return seconds

    def embedding_transfer(self, num_tokens: int) -> float:
        return self._costs.embedding_transfer(num_tokens)

    def kv_transfer(self, num_tokens: int) -> float:
        return self._costs.kv_transfer(num_tokens)

    def device(self, encoder: str) -> Shared:
        def speeds(parts: Mapping[str, float]) -> Mapping[str, float]:
            if len(parts) == 1:
                return dict.fromkeys(parts, 1.0)
            stages = {name: Stage.ENCODE if name == encoder else Stage.DECODE for name in parts}
            return {name: self._speeds[stage] for name, stage in stages.items()}

        return Shared(speeds)


@dataclass(eq=False, slots=True)
class Node:
    """``num_running``: requests that were admitted, ``num_migrating``: that wait to be pulled.
    ``encodes``: admitted requests whose items are to be encoded. ``is_decoder``: it decodes,
    whatever else it does.
    """

    name: str
    max_running: int
    image_budget: int
    encoder: EncodeEngine | None
    llm: LlmEngine | None
    gate: Gate
    is_decoder: bool
    waiting: deque[Job] = field(default_factory=deque)
    encodes: deque[str] = field(default_factory=deque)
    num_running: int = 0
    num_migrating: int = 0
    is_encoding: bool = False
    host: Lanes = field(default_factory=Lanes)
    link: Lanes = field(default_factory=Lanes)

    @property
    def is_busy(self) -> bool:
        return self.is_encoding or (self.llm is not None and self.llm.is_busy)

    def admit(self) -> Iterator[Job]:
        """What comes into the next step: the first that there is room for."""
        while self._num_here < 2 * self.max_running:
            job = next(filter(self._has_room, self._heads()), None)
            if job is None:
                return
            self.num_running += 1
            self.waiting.remove(job)
            yield job

    @property
    def _num_here(self) -> int:
        return self.num_running + self.num_migrating

    def _heads(self) -> Iterator[Job]:
        """What is to be pulled, which goes first, and the first of the rest."""
        for job in self.waiting:
            yield job
            if job.source is None:
                return

    def _has_room(self, job: Job) -> bool:
        """Pulls may exceed the limit, as nodes that are full would wait for each other: in the
        repository by as much again. Where a node decodes, those that it will have to move on only
        by half of that, which leaves room for those that end here.
        """
        most = self.max_running
        if job.source is not None:
            moves_on = self.is_decoder and job.stage is not Stage.DECODE
            most += self.max_running // 2 if moves_on else self.max_running
        return self._num_here < most


def make_nodes(config: HydraInferSystem, world: World) -> Iterator[Node]:
    for kind, section in config.nodes.items():
        for number in range(section.replicas):
            yield _node(f"{kind}{number}", kind, section, config, world)


def _node(
    name: str, kind: str, section: HydraNodes, config: HydraInferSystem, world: World
) -> Node:
    tp = section.tensor_parallel_size
    costs = world.costs_of(tp, config.step_overhead_s)
    slo_s = config.tpot_slo_s if "d" in kind else config.prefill_tpot_slo_s
    limits = EncodeLimits(config.dispatch_s)
    device, encoder_name = world.device(), f"{name}.encode"
    used = costs
    if "e" in kind and kind != "e" and world.machine is None:
        used = Streams(costs, config.encode_share)
        device = used.device(encoder_name)
    gate = Gate()
    encoder = None
    if "e" in kind:
        encoder = EncodeEngine(encoder_name, used, device, limits, world.run)
    engine = None
    if kind != "e":
        engine = _engine(
            name, kind, tp, used, device, token_budget(costs, slo_s, config), gate, world
        )
    most = _max_running(kind, engine, config, world)
    images = image_budget(costs, slo_s, config, world)
    return Node(name, most, images, encoder, engine, gate, "d" in kind)


def _engine(
    name: str,
    kind: str,
    tp: int,
    costs: Costs,
    device: Device,
    budget: int,
    gate: Gate,
    world: World,
) -> LlmEngine:
    """Nodes that decode are counted as decode, whatever else they do."""
    limits = LlmLimits(_kv_tokens(kind, tp, world), UNLIMITED, budget, holds="p" in kind)
    stage = Stage.DECODE if "d" in kind else Stage.PREFILL
    return LlmEngine(name, stage, costs, device, limits, world.run, gate.part)


def _kv_tokens(kind: str, tp: int, world: World) -> int:
    encodes = "e" in kind
    left = world.kv_tokens(tp, 1.0, encodes, with_activations=False)
    share = 1 - ACTIVATIONS * (1 + encodes)
    return int(left * share * (1.0 if kind == "d" else KV_SHARE))


def longest_blocks(world: World) -> int:
    """KV blocks of the longest request."""
    requests = world.requests
    tokens = (request.num_prompt_tokens + request.num_tokens for request in requests)
    return sequences.blocks(max(tokens, default=0))


def _max_running(
    kind: str, engine: LlmEngine | None, config: HydraInferSystem, world: World
) -> int:
    """Where prefill and decode share a KV cache, no more than it holds with the margin for pulls:
    nodes would wait for each other's blocks, and in the repository die of it.
    """
    if engine is None:
        return config.encode_max_running
    if "p" not in kind or "d" not in kind:
        return config.max_running
    fitting = engine.limits.num_blocks // max(1, 2 * longest_blocks(world))
    return max(1, min(config.max_running, fitting))


def image_budget(costs: Costs, slo_s: float, config: HydraInferSystem, world: World) -> int:
    """Its search encodes a picture of 336 x 336 pixels; the smallest item of the load stands for
    it.
    """
    if config.image_budget is not None:
        return config.image_budget
    items = [item for request in world.requests for item in request.items]
    if not items:
        return MAX_IMAGE_BUDGET
    item = min(items, key=lambda item: item.num_tokens)

    def seconds(num: int) -> float:
        return config.dispatch_s + costs.encode([item] * num)

    return _largest(MAX_IMAGE_BUDGET, seconds, slo_s)


def token_budget(costs: Costs, slo_s: float, config: HydraInferSystem) -> int:
    """Its search prefills prompts of 16 tokens."""
    if config.token_budget is not None:
        return config.token_budget

    def seconds(num: int) -> float:
        prompts = num // PROFILED_PROMPT
        pairs = PROFILED_PROMPT * (PROFILED_PROMPT + 1) // 2
        return costs.forward(Forward(prompts * PROFILED_PROMPT, prompts * pairs, prompts))

    return _largest(MAX_TOKEN_BUDGET, seconds, slo_s)


def _largest(most: int, seconds: Callable[[int], float], slo_s: float) -> int:
    """Up to ``most``, at least 1, that stays below the objective, by bisection."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) < slo_s - MARGIN_S:
            low = middle
        else:
            high = middle - 1
    return low
