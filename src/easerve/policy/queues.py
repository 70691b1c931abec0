"""What waits for an engine, in order of arrival: items for Encode, legs for Prefill.

Also requests whose preparation failed; they are prepared again when there is an engine for it.
"""

from collections.abc import Iterable, Iterator

from easerve.policy.batching import QueuedItem
from easerve.policy.lifecycle import LegState
from easerve.policy.state import Leg, Request
from easerve.types import RequestId, Stage


class Queues:
    def __init__(self) -> None:
        self.items: list[QueuedItem] = []
        self.legs: list[tuple[Request, Leg]] = []
        self.preparations: list[Request] = []

    def add_items(self, request: Request, now_ns: int) -> None:
        """Every media item of a request."""
        request.pending = set(range(len(request.items)))
        self.items += [
            QueuedItem(request.request_id, index, item, now_ns)
            for index, item in enumerate(request.items)
        ]

    def put_back(self, items: Iterable[QueuedItem]) -> None:
        """Items that have to be encoded again, to where they stood."""
        self.items = sorted([*items, *self.items], key=lambda queued: queued.since_ns)

    def take_items(self, size: int) -> list[QueuedItem]:
        taken, self.items = self.items[:size], self.items[size:]
        return taken

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
        request_id = request.request_id
        self.items = [queued for queued in self.items if queued.request_id != request_id]
        self.legs = [queued for queued in self.legs if queued[0] is not request]
        self.preparations = [queued for queued in self.preparations if queued is not request]

    def needing(self, stage: Stage) -> Iterator[RequestId]:
        """The requests that cannot go on without an engine of a stage."""
        for request in self.preparations:
            if prepares(request) is stage:
                yield request.request_id
        if stage in (Stage.ENCODE, Stage.PREFILL):
            yield from (queued.request_id for queued in self.items)
        if stage in (Stage.PREFILL, Stage.DECODE):
            yield from (request.request_id for request, _ in self.legs)


def prepares(request: Request) -> Stage:
    """The stage whose engines render the prompt of a request."""
    return Stage.ENCODE if request.has_media else Stage.PREFILL
