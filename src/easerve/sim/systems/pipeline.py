"""Encode, prefill and decode engines that a front end leads every request through, stage by stage.

The front end asks encoders for the items and waits for all of them, then for the prefill, then for
the answer. It holds nothing back; engines batch what waits for them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from easerve.costs.base import Costs, Media
from easerve.sim.clock import Effect
from easerve.sim.config import LlmEngines
from easerve.sim.encoder import Call, EncodeEngine, EncodeLimits
from easerve.sim.lanes import Lanes
from easerve.sim.llm import LlmEngine
from easerve.sim.systems.handover import HandOver, Requests
from easerve.sim.world import World
from easerve.types import Stage


class Router(Protocol):
    """Where the parts of a request go."""

    def prefill(self) -> LlmEngine:
        """Asked when a request comes."""
        ...

    def encode(
        self, prefill: LlmEngine, items: Sequence[Media]
    ) -> Iterable[tuple[EncodeEngine, Sequence[Media]]]:
        """Calls for the items of a request, if it has any."""
        ...

    def decode(self, prefill: LlmEngine) -> LlmEngine:
        """Asked when it has been prefilled."""
        ...


class Pipeline:
    """``first_at``: whose first token the client sees. ``holds``: as the prefill engines do."""

    def __init__(
        self, world: World, costs: Costs, router: Router, first_at: Stage, holds: bool
    ) -> None:
        self._run, self._costs, self._router = world.run, costs, router
        self._requests = Requests(world)
        self._links: defaultdict[str, Lanes] = defaultdict(Lanes)
        """Of each encoder."""
        self._hand_over = HandOver(self._requests, costs, first_at, holds)
        self._num_missing: dict[str, int] = {}
        """Calls whose embeddings a request waits for."""

    def start(self) -> Iterator[Effect]:
        return self._requests.start(self._arrived)

    def settle(self, now_ns: int) -> Iterable[Effect]:
        return ()

    def deadline_ns(self) -> int | None:
        return None

    def _arrived(self, name: str, now_ns: int) -> Iterator[Effect]:
        prefill, items = self._router.prefill(), self._requests[name].items
        if not items:
            yield from self._prefill(name, prefill, now_ns)
            return
        calls = list(self._router.encode(prefill, items))
        self._num_missing[name] = len(calls)
        for encoder, part in calls:
            encoded = partial(self._encoded, name, prefill, encoder, part)
            yield from encoder.submit(Call(part, encoded), now_ns)

    def _encoded(
        self,
        name: str,
        prefill: LlmEngine,
        encoder: EncodeEngine,
        items: Sequence[Media],
        now_ns: int,
    ) -> Iterator[Effect]:
        """The embeddings of each item travel by themselves, one after another."""
        end_ns = now_ns
        for item in items:
            seconds = self._costs.embedding_transfer(item.num_tokens)
            begin_ns, end_ns = self._links[encoder.name].take(seconds, now_ns)
            tokens = item.num_tokens
            self._run.note(
                encoder.name, "transfer", begin_ns, end_ns, to=prefill.name, tokens=tokens
            )
        yield end_ns, partial(self._received, name, prefill)

    def _received(self, name: str, prefill: LlmEngine, now_ns: int) -> Iterator[Effect]:
        self._num_missing[name] -= 1
        if not self._num_missing[name]:
            del self._num_missing[name]
            yield from self._prefill(name, prefill, now_ns)

    def _prefill(self, name: str, prefill: LlmEngine, now_ns: int) -> Iterable[Effect]:
        return self._hand_over.prefill(name, prefill, partial(self._router.decode, prefill), now_ns)


def encoders(world: World, num: int, limits: EncodeLimits) -> list[EncodeEngine]:
    return [world.encoder(f"e{number}", limits) for number in range(num)]


def engines(
    world: World, stage: Stage, section: LlmEngines, *, holds: bool = False
) -> list[LlmEngine]:
    """As a section says, for prefill or decode."""
    utilization = section.gpu_memory_utilization
    return [
        world.llm(f"{stage.value[0]}{number}", stage, section, utilization, holds=holds)
        for number in range(section.replicas)
    ]
