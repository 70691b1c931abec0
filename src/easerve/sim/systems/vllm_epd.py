"""vLLM's example proxy for encode, prefill and decode instances (``disagg_epd_proxy.py``).

For each request an encoder call per item, on the encoders in turn and all at once; when all are
back, a prefill that makes one token, which is thrown away; then an answer. The proxy draws the
prefill and the decode engine of a request. It queues and batches nothing (its newest version puts
those pictures of a request into one call that one encoder gets).

Without prefill engines (the proxy's ``--prefill-servers-urls disable``) a request goes to one of
the decode engines when its items are back, which prefills it and goes on.

An encoder is a vLLM engine: a step takes the waiting calls that its token budget holds, and all
items of a step are one forward. ``merge_calls`` false is what we have seen of engines on a CPU,
where each call was a forward of its own.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from easerve.costs.base import Media
from easerve.sim.clock import Effect
from easerve.sim.config import VllmEpdSystem
from easerve.sim.encoder import EncodeEngine, EncodeLimits
from easerve.sim.llm import LlmEngine, TooLongError
from easerve.sim.systems import pipeline
from easerve.sim.systems.handover import Turns
from easerve.sim.systems.pipeline import Pipeline
from easerve.sim.world import World
from easerve.types import Stage

Choose: TypeAlias = Callable[[], LlmEngine]


class Proxy:
    """``prefill`` and ``decode``: the engine of the next request."""

    def __init__(self, encoders: Sequence[EncodeEngine], prefill: Choose, decode: Choose) -> None:
        self._encoders, self._prefill, self._decode = Turns(encoders), prefill, decode

    def prefill(self) -> LlmEngine:
        return self._prefill()

    def encode(
        self, prefill: LlmEngine, items: Sequence[Media]
    ) -> Iterable[tuple[EncodeEngine, Sequence[Media]]]:
        return [(self._encoders.take(), [item]) for item in items]

    def decode(self, prefill: LlmEngine) -> LlmEngine:
        return self._decode()


class InOneEngine(Pipeline):
    """The engine that prefills a request makes all of its answer."""

    def _prefill(self, name: str, prefill: LlmEngine, now_ns: int) -> Iterable[Effect]:
        try:
            return prefill.submit(self._requests.answer(name), now_ns)
        except TooLongError:
            return self._requests.end(name, "failed", now_ns)


def build(config: VllmEpdSystem, world: World) -> Pipeline:
    encode = config.encode
    limits = EncodeLimits(
        encode.dispatch_s,
        encode.item_s,
        merge_items=1 << 30 if config.merge_calls else 1,
        merge_tokens=encode.max_num_batched_tokens,
    )
    encoders = pipeline.encoders(world, encode.replicas, limits)

    def chooser(engines: Sequence[LlmEngine]) -> Choose:
        if config.routing == "random":
            return lambda: world.rng.choice(engines)
        return Turns(engines).take

    first_at = Stage(config.first_token_at)
    if config.prefill is None:
        # Counted as decode, which they do most of the time.
        choose = chooser(pipeline.engines(world, Stage.DECODE, config.decode))
        costs = world.costs_of(config.decode.tensor_parallel_size)
        return InOneEngine(world, costs, Proxy(encoders, choose, choose), first_at, holds=False)
    prefills = pipeline.engines(world, Stage.PREFILL, config.prefill, holds=True)
    decodes = pipeline.engines(world, Stage.DECODE, config.decode)
    router = Proxy(encoders, chooser(prefills), chooser(decodes))
    costs = world.costs_of(config.prefill.tensor_parallel_size)
    return Pipeline(world, costs, router, first_at, holds=True)
