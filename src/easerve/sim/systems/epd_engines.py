"""EPDServe's engines: encoders with a cache, and engines that pull between their steps."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from easerve.costs.base import Media
from easerve.sim.config import BatchedEngines, EpdServeSystem
from easerve.sim.encoder import EncodeEngine, EncodeLimits
from easerve.sim.llm import LlmEngine, LlmLimits
from easerve.sim.systems.handover import Gate
from easerve.sim.world import World
from easerve.types import Stage


@dataclass(eq=False, slots=True)
class Encoder:
    """``num_cached``: items that are being encoded, or not pulled yet."""

    engine: EncodeEngine
    waiting: deque["Shard"] = field(default_factory=deque)
    num_cached: int = 0
    is_busy: bool = False
    is_active: bool = True

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.num_cached or self.is_busy)


@dataclass(eq=False, slots=True)
class Loop:
    """An engine that pulls between its steps. ``num_parts``: of requests that it has begun to pull
    and not got whole.
    """

    engine: LlmEngine
    gate: Gate
    is_pulling: bool = False
    num_parts: int = 0
    is_active: bool = True

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    @property
    def is_empty(self) -> bool:
        """It has nothing, and holds nothing for others."""
        engine = self.engine
        free = engine.num_free_blocks == engine.limits.num_blocks
        return free and not (engine.num_seqs or self.is_pulling or self.num_parts)


@dataclass(eq=False, slots=True)
class Shard:
    """Items of a request that are encoded together. ``whole``: the request's pulled parts."""

    items: Sequence[Media]
    whole: "Whole"
    source: Encoder | None = None


@dataclass(eq=False, slots=True)
class Whole:
    """``puller``: the engine that takes all its shards, once it has taken one."""

    name: str
    num_missing: int
    puller: Loop | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    name: str
    source: Loop


class Engines:
    """Makes them, by the number that they get in their stage."""

    def __init__(self, config: EpdServeSystem, world: World) -> None:
        self._config, self._world = config, world

    def encoder(self, number: int, now_ns: int = 0) -> Encoder:
        limits = EncodeLimits(self._config.dispatch_s, self._config.item_s)
        engine = self._world.encoder(f"e{number}", limits)
        self._world.run.engine(engine.name, Stage.ENCODE, now_ns)
        return Encoder(engine)

    def prefill(self, number: int, now_ns: int = 0) -> Loop:
        section = self._config.prefill
        limits = LlmLimits(
            self._kv_tokens(section),
            section.max_batch,
            section.max_tokens,
            chunked=False,
            max_prompts=section.max_batch,
            holds=True,
        )
        return self._loop(f"p{number}", Stage.PREFILL, section, limits, now_ns)

    def decode(self, number: int, now_ns: int = 0) -> Loop:
        section = self._config.decode
        tokens = self._kv_tokens(section)
        limits = LlmLimits(tokens, section.max_batch, section.max_tokens, reserves=True)
        return self._loop(f"d{number}", Stage.DECODE, section, limits, now_ns)

    def _loop(
        self, name: str, stage: Stage, section: BatchedEngines, limits: LlmLimits, now_ns: int
    ) -> Loop:
        world, tp = self._world, section.tensor_parallel_size
        costs = world.costs_of(tp, self._config.step_overhead_s)
        gate = Gate()
        engine = LlmEngine(name, stage, costs, world.device(), limits, world.run, gate.part)
        world.run.engine(name, stage, now_ns)
        return Loop(engine, gate)

    def _kv_tokens(self, section: BatchedEngines) -> int:
        """Every engine has all weights, to be able to change its role."""
        tp, utilization = section.tensor_parallel_size, section.gpu_memory_utilization
        return section.kv_cache_tokens or self._world.kv_tokens(tp, utilization, True)
