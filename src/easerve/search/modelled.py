"""Capacities of engines that are not there: from the costs of a scenario's model and devices."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from easerve.search.capacity import Row, Table
from easerve.sim.bound import Bound, bound_of, sizes
from easerve.sim.config import EaserveSystem, LlmEngines
from easerve.sim.run import Run
from easerve.sim.scenario import Scenario
from easerve.sim.simulate import make_world
from easerve.sim.world import World
from easerve.types import Stage

BATCHES = (1, 2, 4, 8, 16, 32, 64)
FINENESS = 4
"""Of decode's batches: so many for each factor of e."""


def capacities(scenario: Scenario, tps: Collection[int], batches: Sequence[int] = BATCHES) -> Table:
    """Of the engines of system easerve, as they are but for their devices: ``tps`` of each engine
    of the language model. ``batches``: of an encoder. Raises ConfigError as the costs do.
    """
    config = scenario.configs["easerve"]
    assert isinstance(config, EaserveSystem)
    world = make_world(scenario, Run())
    engines = _Engines(world, config, bound_of(world))
    rows = [engines.encode(batch) for batch in batches]
    for tp in sorted(tps):
        rows += [engines.prefill(tp), *engines.decode(tp)]
    return Table(tuple(rows))


@dataclass(frozen=True, slots=True)
class _Engines:
    world: World
    config: EaserveSystem
    bound: Bound

    def encode(self, batch: int) -> Row:
        """The host prepares the items of the next call during a forward; the slower one decides."""
        section = self.config.encode.model_copy(update={"replicas": 1})
        num_items = len(self.bound.items) / len(self.world.requests)
        forward_s = 1 / self.bound.encode(section, batch)
        per_s = _rate(max(forward_s, section.item_s * num_items))
        call_s = 0.0
        if num_items:
            call_s = batch * (section.item_s + forward_s / num_items)
        return Row(Stage.ENCODE, 1, batch, per_s, call_s)

    def prefill(self, tp: int) -> Row:
        """One after another, in steps as full as they may be."""
        section = self._section(self.config.prefill, tp)
        costs = self.world.costs_of(tp, section.step_overhead_s)
        alone_s = costs.prefill(round(self.bound.mean.tokens))
        return Row(Stage.PREFILL, tp, 1, self.bound.prefill(section), alone_s)

    def decode(self, tp: int) -> Iterator[Row]:
        """At most as many sequences as the KV cache holds; one, where a prefill answers alone."""
        section = self._section(self.config.decode, tp)
        costs = self.world.costs_of(tp, section.step_overhead_s)
        tokens = section.kv_cache_tokens or self.world.kv_tokens(
            tp, section.gpu_memory_utilization, False
        )
        shape = self.bound.mean
        slots = min(section.max_num_seqs, tokens / shape.context) if shape.decodes else 1
        for num in sizes(max(1, int(slots)), FINENESS):
            step_s = costs.forward(shape.forward(0, num))
            yield Row(Stage.DECODE, tp, num, _rate(step_s * shape.decodes / num), step_s)

    def _section(self, section: LlmEngines, tp: int) -> LlmEngines:
        return section.model_copy(update={"replicas": 1, "tensor_parallel_size": tp})


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else float("inf")
