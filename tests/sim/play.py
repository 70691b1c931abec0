"""Effects without a system: what modelled engines do of themselves."""

from collections.abc import Iterable, Iterator

from easerve.sim import clock
from easerve.sim.clock import Effect, Handler
from easerve.types import NS_PER_S


class Nothing:
    """A system that does nothing."""

    def settle(self, now_ns: int) -> Iterable[Effect]:
        return ()

    def deadline_ns(self) -> int | None:
        return None


def play(*asked: tuple[float, Handler]) -> float:
    """When (s) what is asked for; the last instant at which anything happened (s)."""
    effects = [(round(at_s * NS_PER_S), handler) for at_s, handler in asked]
    return clock.run(Nothing(), effects) / NS_PER_S


class Notes(dict[str, float]):
    """When (s) something happened."""

    def note(self, name: str) -> Handler:
        """What happens once, and is written down."""

        def handler(now_ns: int) -> Iterator[Effect]:
            assert name not in self, f"{name} happened twice"
            self[name] = now_ns / NS_PER_S
            yield from ()

        return handler
