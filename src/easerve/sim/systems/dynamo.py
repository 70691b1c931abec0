"""NVIDIA Dynamo's encode, prefill and decode workers with the vLLM backend.

A prefill worker, in turn, splits the items of a request over encode workers, in turn, and waits for
all embeddings (``prefill_worker_utils.py``); it prefills, and asks a decode worker, in turn, for
the answer (``multimodal_pd_worker_handler.py``). An encode worker runs the items of a call as one
forward and calls one after another (``encode_worker_handler.py``). Every prefill worker takes its
own turns. Nothing is held back and calls are never batched together.
"""

from collections.abc import Iterator, Sequence

from easerve.costs.base import Media
from easerve.sim.config import DynamoSystem
from easerve.sim.encoder import EncodeEngine, EncodeLimits
from easerve.sim.llm import LlmEngine
from easerve.sim.systems import pipeline
from easerve.sim.systems.handover import Turns
from easerve.sim.systems.pipeline import Pipeline
from easerve.sim.world import World
from easerve.types import Stage


class Workers:
    def __init__(
        self,
        encoders: Sequence[EncodeEngine],
        prefills: Sequence[LlmEngine],
        decodes: Sequence[LlmEngine],
    ) -> None:
        self._num_encoders, self._prefills = len(encoders), Turns(prefills)
        self._encoders = {prefill.name: Turns(encoders) for prefill in prefills}
        self._decodes = {prefill.name: Turns(decodes) for prefill in prefills}

    def prefill(self) -> LlmEngine:
        return self._prefills.take()

    def encode(
        self, prefill: LlmEngine, items: Sequence[Media]
    ) -> Iterator[tuple[EncodeEngine, Sequence[Media]]]:
        size = max(1, len(items) // self._num_encoders)
        for begin in range(0, len(items), size):
            yield self._encoders[prefill.name].take(), items[begin : begin + size]

    def decode(self, prefill: LlmEngine) -> LlmEngine:
        return self._decodes[prefill.name].take()


def build(config: DynamoSystem, world: World) -> Pipeline:
    encode = config.encode
    limits = EncodeLimits(encode.dispatch_s, encode.item_s)
    router = Workers(
        pipeline.encoders(world, encode.replicas, limits),
        pipeline.engines(world, Stage.PREFILL, config.prefill, holds=config.hold_kv),
        pipeline.engines(world, Stage.DECODE, config.decode),
    )
    costs = world.costs_of(config.prefill.tensor_parallel_size)
    return Pipeline(world, costs, router, Stage(config.first_token_at), config.hold_kv)
