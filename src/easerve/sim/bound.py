"""What the engines of a system can do at best: requests per second that no run exceeds.

Every stage is taken alone, with the batches that do most in a second and nothing to wait for: so
many engines, over the seconds that a request takes of one. Engines that do several stages add them
up where they run one after another. Rules, arrivals, transfers and a shared device only make it
less. It is of all requests together: a run in which some fail may complete more of the others.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple, assert_never

from easerve.costs.base import Costs, Forward, Media
from easerve.sim.config import (
    Batched,
    DynamoSystem,
    EaserveSystem,
    Encoders,
    EpdServeSystem,
    HydraInferSystem,
    HydraNodes,
    LlmEngines,
    SystemConfig,
    VllmEpdSystem,
    VllmSystem,
)
from easerve.sim.world import World

MAX_ITEMS = 1024
MAX_IMAGES, MAX_BUDGET = 8, 2048
"""Of HydraInfer's search for the budgets of a step."""
UNBOUNDED = 1 << 30
FINE, COARSE = 64, 8
"""Of a search for the best size: so many sizes for each factor of e, and all below."""
NUM_THIRDS = 100
STRETCHES = (0.1, 0.5, 1.0, 1.5, 1.9)
"""Contexts of steps, of the mean: from the begin of a prompt or an answer to its end."""
SLACK = 1.001
"""Sizes and contexts are samples, between which kernels' times are not quite straight."""


class Step(NamedTuple):
    """Of a language model: tokens of prompts, decodes, and how long it takes."""

    tokens: int
    decodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Mean:
    """Tokens of a request on average; ``pairs``: that its prompt's tokens attend to; ``decodes``:
    steps that its answer takes, ``context``: tokens attended to in one of them.
    """

    tokens: float
    pairs: float
    decodes: float
    context: float

    def forward(self, prefill_tokens: int, num_decodes: int, stretch: float = 1.0) -> Forward:
        """A step with so many tokens of prompts like this and so many decodes, which attend to
        ``stretch`` times as many tokens as in the mean.
        """
        num_prompts = prefill_tokens / self.tokens
        return Forward(
            prefill_tokens,
            round(stretch * num_prompts * self.pairs),
            int(num_prompts),
            num_decodes,
            round(stretch * num_decodes * self.context),
        )


def bound_per_s(config: SystemConfig, world: World) -> float:
    """Requests per second; infinite without requests. Raises ConfigError as the costs do."""
    if not world.requests:
        return float("inf")
    return SLACK * _bound_per_s(config, bound_of(world))


def balanced_share(config: EaserveSystem, world: World) -> float:
    """The remote share with which both sides have as much to do as they can.

    With prefills at rate r, encoders are busy for r / encode of the time, which local prefill does
    not have: r = remote + local (1 - r / encode). 1 without local prefill or requests.
    """
    if config.local_prefill is None or not world.requests:
        return 1.0
    bound = bound_of(world)
    remote = bound.prefill(config.prefill)
    local = bound.prefill_beside(config) - remote
    encode = bound.encode(config.encode, config.policy.max_batch_items)
    return min(1.0, remote * (1 + local / encode) / (remote + local))


def bound_of(world: World) -> "Bound":
    """Of the requests of a world, of which there is at least one."""
    items = [item for request in world.requests for item in request.items]
    return Bound(world, _mean(world), items)


def _bound_per_s(config: SystemConfig, bound: "Bound") -> float:
    match config:
        case VllmSystem():
            return bound.aggregated(config)
        case EaserveSystem():
            return min(
                bound.encode(config.encode, config.policy.max_batch_items),
                bound.prefill_beside(config),
                bound.decode(config.decode),
            )
        case VllmEpdSystem():
            encode = bound.encode(config.encode, MAX_ITEMS if config.merge_calls else 1)
            if config.prefill is None:
                return min(encode, bound.both(config.decode))
            return min(encode, bound.prefill(config.prefill), bound.decode(config.decode))
        case DynamoSystem():
            encode = bound.encode(config.encode, 1)
            return min(encode, bound.prefill(config.prefill), bound.decode(config.decode))
        case EpdServeSystem():
            return bound.epdserve(config)
        case HydraInferSystem():
            return bound.hydrainfer(config)
        case _:
            assert_never(config)


def _mean(world: World) -> Mean:
    num = len(world.requests)
    prompts = [request.num_prompt_tokens for request in world.requests]
    decodes = [request.num_tokens - 1 for request in world.requests]
    contexts = [each * (prompt + each / 2) for prompt, each in zip(prompts, decodes, strict=True)]
    return Mean(
        sum(prompts) / num,
        sum(tokens * (tokens + 1) / 2 for tokens in prompts) / num,
        sum(decodes) / num,
        sum(contexts) / max(1, sum(decodes)),
    )


@dataclass(frozen=True, slots=True)
class Bound:
    world: World
    mean: Mean
    items: Sequence[Media]

    def encode(self, section: Encoders, max_items: int) -> float:
        costs = self.world.costs_of(1)
        seconds = self._encode_s(
            costs, section.dispatch_s, max_items, section.max_num_batched_tokens
        )
        return _rate(section.replicas, seconds)

    def _encode_s(self, costs: Costs, dispatch_s: float, max_items: int, max_tokens: int) -> float:
        """Of an encoder for a request, in batches as large as they may be."""
        batches: list[list[Media]] = []
        left = 0
        for item in sorted(self.items, key=lambda item: (item.modality, item.num_tokens)):
            if not batches or len(batches[-1]) >= max_items or item.num_tokens > left:
                batches.append([])
                left = max_tokens
            batches[-1].append(item)
            left -= item.num_tokens
        seconds = sum(dispatch_s + costs.encode(batch) for batch in batches)
        return seconds / len(self.world.requests)

    def prefill(self, section: LlmEngines) -> float:
        costs = self.world.costs_of(section.tensor_parallel_size, section.step_overhead_s)
        return _rate(section.replicas, self._prefill_s(costs, section.max_num_batched_tokens))

    def prefill_beside(self, config: EaserveSystem) -> float:
        """The remote engines and those beside encoders, which nothing holds up here."""
        local = config.local_prefill
        if local is None:
            return self.prefill(config.prefill)
        costs = self.world.costs_of(local.tensor_parallel_size, local.step_overhead_s)
        num = sum(name.startswith("l") for name in config.workers)
        beside = _rate(num, self._prefill_s(costs, local.max_num_batched_tokens))
        return self.prefill(config.prefill) + beside

    def _prefill_s(self, costs: Costs, budget: int) -> float:
        """Of an engine for a request, in steps of so many tokens at most."""
        return _least_s(self.mean.tokens, 0.0, self._prefills(costs, budget))

    def _prefills(self, costs: Costs, budget: int) -> Iterator[Step]:
        for num in sizes(budget, FINE):
            yield self._step(costs, num, 0)

    def _step(self, costs: Costs, tokens: int, decodes: int) -> Step:
        """With the time that such steps take in the mean, at least, whatever their contexts are
        that come to the mean: in kernels' times it makes a difference how they are spread.
        """
        times = [costs.forward(self.mean.forward(tokens, decodes, each)) for each in STRETCHES]
        known = list(zip(STRETCHES, times, strict=True))
        seconds = min(
            low_s + (high_s - low_s) * (1 - low) / (high - low)
            for low, low_s in known
            for high, high_s in known
            if low < 1 < high
        )
        return Step(tokens, decodes, min(seconds, times[STRETCHES.index(1.0)]))

    def decode(self, section: LlmEngines) -> float:
        tp, utilization = section.tensor_parallel_size, section.gpu_memory_utilization
        costs = self.world.costs_of(tp, section.step_overhead_s)
        tokens = section.kv_cache_tokens or self.world.kv_tokens(tp, utilization, False)
        return _rate(section.replicas, self._decode_s(costs, section.max_num_seqs, tokens))

    def _decode_s(self, costs: Costs, max_seqs: int, kv_tokens: int) -> float:
        if not self.mean.decodes:
            return 0.0
        slots = min(max_seqs, kv_tokens / self.mean.context)
        return _least_s(0.0, self.mean.decodes, self._decodes(costs, slots))

    def _decodes(self, costs: Costs, slots: float) -> Iterator[Step]:
        for num in sizes(slots, FINE):
            yield self._step(costs, 0, num)

    def aggregated(self, section: VllmSystem) -> float:
        """Encode, then steps of the language model."""
        costs = self.world.costs_of(section.tensor_parallel_size, section.step_overhead_s)
        encode_tokens = section.max_num_encoder_input_tokens or section.max_num_batched_tokens
        encode_s = self._encode_s(costs, 0.0, MAX_ITEMS, encode_tokens)
        return _rate(section.replicas, encode_s + self._both_s(section, with_encoder=True))

    def both(self, section: LlmEngines) -> float:
        """Prefill and decode in the same engines."""
        return _rate(section.replicas, self._both_s(section, with_encoder=False))

    def _both_s(self, section: LlmEngines, with_encoder: bool) -> float:
        """Of an engine for a request: steps of prompts, of decodes or of both, whichever take the
        least.
        """
        tp, utilization = section.tensor_parallel_size, section.gpu_memory_utilization
        costs = self.world.costs_of(tp, section.step_overhead_s)
        tokens = section.kv_cache_tokens or self.world.kv_tokens(tp, utilization, with_encoder)
        budget = section.max_num_batched_tokens
        steps = [*self._prefills(costs, budget)]
        if self.mean.decodes:
            slots = min(section.max_num_seqs, tokens / self.mean.context)
            steps += [*self._decodes(costs, slots), *self._mixed(costs, budget, slots)]
        return _least_s(self.mean.tokens, self.mean.decodes, steps)

    def _mixed(self, costs: Costs, budget: int, slots: float) -> Iterator[Step]:
        for num in sizes(slots, COARSE):
            for both in sizes(budget, COARSE):
                if both > num:
                    yield self._step(costs, both - num, num)

    def epdserve(self, config: EpdServeSystem) -> float:
        """Engines of one size change roles, so that all of them share what their stages take."""
        sections: list[Batched] = [config.encode, config.prefill, config.decode]
        seconds = [self._epdserve_s(section, config) for section in sections]
        pairs = list(zip(sections, seconds, strict=True))
        if config.role_switch is None:
            return min(_rate(section.replicas, each) for section, each in pairs)
        return min(
            _rate(
                sum(each.replicas for each in sections if each.tensor_parallel_size == size),
                sum(each for section, each in pairs if section.tensor_parallel_size == size),
            )
            for size in {section.tensor_parallel_size for section in sections}
        )

    def _epdserve_s(self, section: Batched, config: EpdServeSystem) -> float:
        costs = self.world.costs_of(section.tensor_parallel_size, config.step_overhead_s)
        if section is config.encode:
            most = section.max_batch
            if not config.irp:  # a batch has whole requests
                most *= max(1, *(len(request.items) for request in self.world.requests))
            return self._encode_s(costs, config.dispatch_s, most, UNBOUNDED)
        if section is config.decode:
            return self._decode_s(costs, section.max_batch, UNBOUNDED)
        return self._prefill_s(costs, round(section.max_batch * self.mean.tokens))

    def hydrainfer(self, config: HydraInferSystem) -> float:
        """Every stage has all nodes that run it for itself, as encode and the rest are parallel."""
        return min(
            sum(
                _rate(nodes.replicas, self._hydra_s(stage, nodes, config))
                for kind, nodes in config.nodes.items()
                if stage in kind
            )
            for stage in "epd"
        )

    def _hydra_s(self, stage: str, nodes: HydraNodes, config: HydraInferSystem) -> float:
        costs = self.world.costs_of(nodes.tensor_parallel_size, config.step_overhead_s)
        if stage == "e":
            return self._encode_s(costs, 0.0, config.image_budget or MAX_IMAGES, UNBOUNDED)
        if stage == "p":
            return self._prefill_s(costs, config.token_budget or MAX_BUDGET)
        # What is pulled may exceed the bound by as much again.
        return self._decode_s(costs, 2 * config.max_running, UNBOUNDED)


def sizes(most: float, fineness: int) -> list[int]:
    """From 1 to the next integer of ``most``: all small ones, then as fine; all powers of 2, which
    kernels are measured at.
    """
    found, size = set[int](), 1
    last = max(1, ceil(most))
    while size < last:
        found |= {size, 1 << (size.bit_length() - 1)}
        size += max(1, size // fineness)
    return sorted({*found, max(1, last - 1), last})


def _least_s(tokens: float, decodes: float, steps: Iterable[Step]) -> float:
    """That so many tokens of prompts and so many decodes take, in any mix of these steps.

    No prices of a token and of a decode with which no step costs more than its seconds make
    a request worth more than that: the best prices are searched for (linear programming's dual).
    """
    found = list(steps)
    prompts = [step for step in found if step.tokens]
    if not decodes:
        return tokens * min(step.seconds / step.tokens for step in prompts)
    most = min(step.seconds / step.decodes for step in found if step.decodes)
    if not tokens:
        return decodes * most

    def worth(price: float) -> float:
        """Of a request, where a decode has this price."""
        token = min((step.seconds - price * step.decodes) / step.tokens for step in prompts)
        return tokens * token + decodes * price

    low, high = 0.0, most
    for _ in range(NUM_THIRDS):  # it is concave
        third = (high - low) / 3
        if worth(low + third) < worth(high - third):
            low += third
        else:
            high -= third
    return worth(low)


def _rate(num_engines: int, seconds: float) -> float:
    """Of so many engines, a request at a time each; infinite where it takes none of them."""
    return num_engines / seconds if seconds > 0 else float("inf")
