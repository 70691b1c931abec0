"""What waits for an engine, in order of arrival: legs for Prefill (items: see ``encoding``).

Also requests whose preparation failed; they are prepared again when there is an engine for it.
"""

from collections.abc import Iterator

from easerve.policy.lifecycle import LegState
from easerve.policy.state import Leg, Request
from easerve.types import Stage


class Queues:
    def __init__(self) -> None:
        self.legs: list[tuple[Request, Leg]] = []
        self.preparations: list[Request] = []

    def add_legs(self, request: Request) -> None:
        """Every leg that waits for prefill; the first time, they come to be."""
        if not request.legs:
            first = LegState.PREFILL_QUEUED
            request.legs = [Leg(index, first) for index in range(request.num_choices)]
        waiting = (leg for leg in request.legs if leg.state is LegState.PREFILL_QUEUED)
        self.legs += [(request, leg) for leg in waiting]

    def take_legs(self) -> list[tuple[Request, Leg]]:
        taken, self.legs = self.legs, []
        return taken

    def drop(self, request: Request) -> None:
        self.legs = [queued for queued in self.legs if queued[0] is not request]
        self.preparations = [queued for queued in self.preparations if queued is not request]

    def needing(self, stage: Stage) -> Iterator[Request]:
        """The requests that cannot go on without an engine of a stage."""
        for request in self.preparations:
            if prepares(request) is stage:
                yield request
        if stage in (Stage.PREFILL, Stage.DECODE):
            yield from (request for request, _ in self.legs)


def prepares(request: Request) -> Stage:
    """The stage whose engines render the prompt of a request."""
    return Stage.ENCODE if request.num_media else Stage.PREFILL
