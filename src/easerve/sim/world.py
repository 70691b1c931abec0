"""What every system is built of: the same costs, the same engines, the same requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from easerve.costs.base import Costs
from easerve.sim.encoder import EncodeEngine, EncodeLimits, whole
from easerve.sim.host import NoHost
from easerve.sim.llm import LlmEngine, LlmLimits
from easerve.sim.run import Request, Run
from easerve.sim.sharing import Device, Own
from easerve.types import Stage


class CostsOf(Protocol):
    def __call__(self, tp: int, step_overhead_s: float | None = None) -> Costs:
        """On ``tp`` devices; ``step_overhead_s`` None: as the knobs say."""
        ...


class KvTokens(Protocol):
    def __call__(
        self, tp: int, utilization: float, with_encoder: bool, with_activations: bool = True
    ) -> int:
        """What the KV cache of an engine on ``tp`` devices holds, beside an encoder or not, and
        beside what vLLM keeps for activations.
        """
        ...


class LlmSection(Protocol):
    """What the sections of engines with a language model have in common."""

    tensor_parallel_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_tokens: int | None
    step_overhead_s: float | None


@dataclass(frozen=True, slots=True)
class World:
    """``num_units``, ``granule``: of a device, that can be divided. ``machine``: the one device of
    all engines, a CPU; None: each has its own. ``host``: what goes on around their steps.
    """

    costs_of: CostsOf
    kv_tokens: KvTokens
    num_units: int
    granule: int
    requests: Sequence[Request]
    run: Run
    rng: Random
    machine: Device | None = None
    host: NoHost = field(default_factory=NoHost)

    def device(self) -> Device:
        """For one more engine."""
        return self.machine or Own()

    def encoder(
        self,
        name: str,
        limits: EncodeLimits,
        device: Device | None = None,
        part: Callable[[], float] = whole,
    ) -> EncodeEngine:
        costs = self.costs_of(1)
        return EncodeEngine(name, costs, device or self.device(), limits, self.run, part)

    def llm(
        self,
        name: str,
        stage: Stage,
        section: LlmSection,
        utilization: float,
        device: Device | None = None,
        part: Callable[[], float] = whole,
        *,
        holds: bool = False,
        with_encoder: bool = False,
    ) -> LlmEngine:
        """``with_encoder``: it shares the memory of its devices with one."""
        limits = LlmLimits(
            section.kv_cache_tokens
            or self.kv_tokens(section.tensor_parallel_size, utilization, with_encoder),
            section.max_num_seqs,
            section.max_num_batched_tokens,
            holds=holds,
        )
        costs = self.costs_of(section.tensor_parallel_size, section.step_overhead_s)
        return LlmEngine(name, stage, costs, device or self.device(), limits, self.run, part)
