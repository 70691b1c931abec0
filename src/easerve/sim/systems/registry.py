"""The systems that ours is compared with, by name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from easerve.sim.clock import Effect, System
from easerve.sim.systems import dynamo, epdserve, hydrainfer, vllm, vllm_epd
from easerve.sim.world import World


class Baseline(System, Protocol):
    def start(self) -> Iterable[Effect]:
        """What happens of itself: requests come."""
        ...


BUILDERS: Mapping[str, Callable[[Any, World], Baseline]] = {
    "vllm": vllm.build,
    "vllm-epd": vllm_epd.build,
    "dynamo": dynamo.build,
    "epdserve": epdserve.build,
    "hydrainfer": hydrainfer.build,
}
