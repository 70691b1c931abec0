"""vLLM replicas: encoder and language model in every engine, balanced by its own client or a proxy.

An item is processed in an API server, then its request is given to an engine. In each step the
engine encodes what the step's tokens need, then runs the language model.
"""

from collections.abc import Iterable, Iterator
from functools import partial

from easerve.sim.clock import Effect
from easerve.sim.config import VllmSystem
from easerve.sim.lanes import Lanes
from easerve.sim.llm import LlmEngine, LlmLimits, TooLongError
from easerve.sim.systems.handover import Requests, Turns
from easerve.sim.world import World
from easerve.types import Stage

KV_PRESSURE, KV_PENALTY = 0.5, 6.0
"""vllm/v1/engine/core_client.py, DPLBAsyncMPClient: of an engine whose KV cache is fuller than the
first, a waiting request counts so much more, times the excess."""


class Vllm:
    """API servers, as many as engines, take requests in turn.

    Balancing sees the engines as they are; vLLM's clients see reports of every 100 ms and what they
    have sent themselves.
    """

    def __init__(self, config: VllmSystem, world: World) -> None:
        self._config, self._run = config, world.run
        self._requests = Requests(world)
        self._engines = [_engine(f"v{number}", config, world) for number in range(config.replicas)]
        self._servers = Turns(range(config.replicas))
        self._lanes = [Lanes(config.api_server_workers) for _ in self._engines]
        self._scan_from = Turns(range(config.replicas))

    def start(self) -> Iterator[Effect]:
        return self._requests.start(self._arrived)

    def settle(self, now_ns: int) -> Iterable[Effect]:
        return ()

    def deadline_ns(self) -> int | None:
        return None

    def _arrived(self, name: str, now_ns: int) -> Iterable[Effect]:
        server = self._servers.take()
        seconds = self._config.item_s * len(self._requests[name].items)
        if not seconds:
            return self._route(name, server, now_ns)
        begin_ns, end_ns = self._lanes[server].take(seconds, now_ns)
        self._run.note(self._engines[server].name, "preprocess", begin_ns, end_ns)
        return [(end_ns, partial(self._route, name, server))]

    def _route(self, name: str, server: int, now_ns: int) -> Iterable[Effect]:
        own = self._config.routing == "round-robin"  # a proxy has chosen the server, and its engine
        engine = self._engines[server] if own else self._least_loaded()
        sequence = self._requests.answer(name, items=self._requests[name].items)
        try:
            return engine.submit(sequence, now_ns)
        except TooLongError:
            return self._requests.end(name, "failed", now_ns)

    def _least_loaded(self) -> LlmEngine:
        """Among equals the first of a scan that begins one further each time."""
        begin = self._scan_from.take()
        return min((*self._engines[begin:], *self._engines[:begin]), key=_load)


def _load(engine: LlmEngine) -> float:
    usage = 1 - engine.num_free_blocks / engine.limits.num_blocks
    excess = max(0.0, usage - KV_PRESSURE)
    return engine.num_seqs + engine.num_waiting * KV_PENALTY * excess


def _engine(name: str, config: VllmSystem, world: World) -> LlmEngine:
    """It is counted as decode, which it does most of the time."""
    tp, utilization = config.tensor_parallel_size, config.gpu_memory_utilization
    limits = LlmLimits(
        config.kv_cache_tokens or world.kv_tokens(tp, utilization, True),
        config.max_num_seqs,
        config.max_num_batched_tokens,
        item_budget=config.max_num_encoder_input_tokens,
    )
    costs = world.costs_of(tp, config.step_overhead_s)
    return LlmEngine(name, Stage.DECODE, costs, world.device(), limits, world.run)


def build(config: VllmSystem, world: World) -> Vllm:
    return Vllm(config, world)
