"""The gate in front of Encode, and of Prefill for text: who waits for credit, and who may pass."""

from collections.abc import Iterable
from typing import NamedTuple

from easerve.policy.knobs import Knobs, Order
from easerve.policy.state import Request
from easerve.types import RequestId


class Credit(NamedTuple):
    """How many more legs may pass, whose lack bounds them, and when to ask again (s)."""

    num_legs: int
    held_by: str = "decode"
    again_s: float | None = None


class Opening(NamedTuple):
    """Who may pass the gate now: None is everybody. ``held_by``: whose lack keeps others out.

    ``again_s``: when to ask again, where nothing may happen until then.
    """

    allowed: frozenset[RequestId] | None
    held_by: str
    again_s: float | None

    def admits(self, request: Request) -> bool:
        return request.passed or self.allowed is None or request.request_id in self.allowed


class Gate:
    """The prepared requests that wait for credit, and how many legs are past it.

    First come, first served, or first due: pictures and texts alike, so that neither starves the
    other. Whoever may pass keeps the credit while a batching rule holds it back.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestId, Request] = {}
        self._num_waiting = 0  # legs
        self.num_passed = 0  # legs of open requests

    def join(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        self._num_waiting += request.num_choices

    def let_pass(self, request: Request) -> None:
        """For good; asking twice is harmless."""
        if not request.passed:
            self._remove(request)
            request.passed = True
            self.num_passed += request.num_choices

    def close(self, request: Request) -> None:
        """The request is closed, wherever it was."""
        if request.passed:
            self.num_passed -= request.num_choices
        else:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        if self._waiting.pop(request.request_id, None) is not None:
            self._num_waiting -= request.num_choices

    def opening(self, given: Credit, knobs: Knobs, idle_encoder: bool = True) -> Opening:
        """Without an ``idle_encoder``, who waits for one keeps no credit from the others."""
        if given.num_legs >= self._num_waiting:
            return Opening(None, "", None)
        waiting: Iterable[Request] = self._waiting.values()
        if not idle_encoder:
            waiting = [request for request in waiting if not request.pending]
        if knobs.order is Order.DEADLINE:
            waiting = sorted(waiting, key=lambda request: request.due_ns(knobs.ttft_slo_s))
        allowed, left = [], given.num_legs
        for request in waiting:
            if left <= 0:
                break
            allowed.append(request.request_id)
            left -= request.num_choices
        return Opening(frozenset(allowed), given.held_by, given.again_s)
