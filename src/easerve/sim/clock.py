"""A heap of effects: handlers return what follows from them, and only the loop pushes.

Time is integer nanoseconds. Effects of one instant happen in the order in which they were pushed;
when none is left the system settles, which may bring more of them at the same instant.
"""

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import Protocol, TypeAlias

Effect: TypeAlias = tuple[int, "Handler"]
"""When something happens (ns), and what."""
Handler: TypeAlias = Callable[[int], Iterable[Effect]]
"""Is told the time; returns what follows."""


class System(Protocol):
    def settle(self, now_ns: int) -> Iterable[Effect]:
        """Everything that happens at this instant has happened, or the deadline has come."""
        ...

    def deadline_ns(self) -> int | None:
        """When to settle at the latest, whatever happens."""
        ...


def run(system: System, effects: Iterable[Effect]) -> int:
    """Until nothing is left to happen; returns the last instant at which something did (ns)."""
    number, heap, now_ns = count(), list[tuple[int, int, Handler]](), 0
    heappush, heappop = heapq.heappush, heapq.heappop

    def push(effects: Iterable[Effect]) -> None:
        for at_ns, handler in effects:
            assert at_ns >= now_ns, "nothing happens in the past"
            heappush(heap, (at_ns, next(number), handler))

    push(effects)
    while True:
        deadline_ns = system.deadline_ns()
        if not heap and deadline_ns is None:
            return now_ns
        next_ns = heap[0][0] if heap else deadline_ns
        assert next_ns is not None
        now_ns = next_ns if deadline_ns is None else max(now_ns, min(next_ns, deadline_ns))
        while heap and heap[0][0] == now_ns:
            push(heappop(heap)[2](now_ns))
        push(system.settle(now_ns))
