"""Flow: what may pass the gate in front of Encode (of Prefill, for text), so that nothing waits
further down only.

Two credits. *Prefill*: the least loaded prefill worker has no more work ahead of what is encoded
now than ``prefill_ahead_s`` (a quarter of the TTFT promise, where that is less). *Decode*: no more
legs are past the gate than decode has slots, and as many more as slots come free on the way there.
With a TPOT promise, no more slots are used than keep it, which is found by trying.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from easerve.policy.estimates import Estimates, Line, Mean
from easerve.policy.knobs import NO_RULE, Knobs, Order
from easerve.policy.state import Request
from easerve.types import MediaItem, RequestId

UNLIMITED = 1 << 30
SHARE_OF_TTFT = 0.25
AGAIN_S = 0.001
START, CAUTION = 8.0, 0.2


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

    def opening(self, given: Credit, knobs: Knobs, media: bool = True) -> Opening:
        """``media``: whether requests with media could use credit now."""
        if given.num_legs >= self._num_waiting:
            return Opening(None, "", None)
        waiting: Iterable[Request] = self._waiting.values()
        if not media:
            waiting = [request for request in waiting if not request.items]
        if knobs.order is Order.DEADLINE:
            waiting = sorted(waiting, key=lambda request: request.due_ns(knobs.ttft_slo_s))
        allowed, left = [], given.num_legs
        for request in waiting:
            if left <= 0:
                break
            allowed.append(request.request_id)
            left -= request.num_choices
        return Opening(frozenset(allowed), given.held_by, given.again_s)


@dataclass(frozen=True, slots=True)
class Load:
    """What is downstream of the gate. ``num_passed``: legs of requests past it that are open.

    ``backlog_s``: of the least loaded prefill worker. ``slots``: of each decode worker.
    """

    num_passed: int
    backlog_s: float
    slots: Sequence[int]


class Times:
    """Service times in seconds, learned from a first guess on."""

    def __init__(self, guess: Estimates) -> None:
        base_s, tokens = guess.encode_s(0, 0), 1000
        self.encode = Line(base_s, (guess.encode_s(1, tokens) - base_s) / tokens)
        self._prefill_s, self._prefill_tokens = Mean(guess.prefill_s(tokens)), Mean(tokens)
        self._decode_s = Mean()
        self._item_tokens = Mean()

    def seen(self, item: MediaItem) -> None:
        """An item of this size has come."""
        self._item_tokens.observe(item.num_tokens)

    def prefilled(self, seconds: float, num_tokens: int) -> None:
        self._prefill_s.observe(seconds)
        self._prefill_tokens.observe(num_tokens)

    def decoded(self, seconds: float) -> None:
        """A leg took so long."""
        self._decode_s.observe(seconds)

    @property
    def prefill_s(self) -> float:
        """Of a prompt."""
        return self._prefill_s.value

    @property
    def observed_prefill_s(self) -> float:
        """Of a prompt; 0 while unknown."""
        return self._prefill_s.value if self._prefill_s.num_samples else 0.0

    @property
    def prefill_token_s(self) -> float:
        return self._prefill_s.value / self._prefill_tokens.value

    @property
    def decode_s(self) -> float:
        """Of a leg; 0 while unknown."""
        return self._decode_s.value

    def items_s(self, num_items: int, batch_items: int) -> float:
        """Work of an encoder, in batches of ``batch_items``; 0 while no item was seen."""
        return self.encode.at(batch_items * self._item_tokens.value) / batch_items * num_items

    @property
    def lead_s(self) -> float:
        """From Encode to Decode, without waiting."""
        return self.items_s(1, 1) + self.prefill_s


class Window:
    """How many legs a decode worker may run so that the TPOT promise holds.

    Why steps are long is not asked: what else the device does counts as well as the legs beside. A
    leg that was too slow pulls the window ``CAUTION`` of the way to what should have been right,
    if the time were in proportion to the number of legs. One that was fast opens it by the share of
    the promise that it left, where the window mattered: twofold, at most, while its legs take
    turns. It begins with ``START`` legs, so that the first burst is no flood.
    """

    def __init__(self) -> None:
        self._size = START

    def observe(
        self, tpot_s: float, num_running: int, num_slots: int, promise_s: float | None
    ) -> None:
        """A leg ended that was one of ``num_running`` when it began, on so many slots."""
        if promise_s is None:
            return
        if tpot_s > promise_s:
            right = max(1.0, num_running * promise_s / tpot_s)
            self._size -= CAUTION * max(0.0, self._size - right)
        elif num_running >= self._size / 2:
            self._size = min(self._size + 1 - tpot_s / promise_s, float(num_slots))

    def usable(self, slots: Sequence[int], promise_s: float | None) -> int:
        """Of the slots of all decode workers; at least one of each, whatever was promised."""
        if promise_s is None:
            return sum(slots)
        return sum(max(1, min(each, int(self._size))) for each in slots)


def credit(knobs: Knobs, times: Times, window: Window, load: Load) -> Credit:
    """What may pass now. With nothing downstream something always may."""
    if not knobs.flow or knobs.when == NO_RULE:
        return Credit(UNLIMITED)
    ahead_s = knobs.prefill_ahead_s
    if knobs.ttft_slo_s is not None:
        ahead_s = min(ahead_s, SHARE_OF_TTFT * knobs.ttft_slo_s)
    if load.backlog_s > ahead_s:
        return Credit(0, "prefill", max(AGAIN_S, load.backlog_s - ahead_s))
    slots = window.usable(load.slots, knobs.tpot_slo_s)
    freed = slots * times.lead_s / times.decode_s if times.decode_s else 0.0
    return Credit(max(0, slots + int(freed) - load.num_passed))


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is before the gate: items, and the legs of their requests; the workers of each stage."""

    num_items: int
    num_legs: int
    num_encoders: int
    num_prefills: int
    slots: Sequence[int]


def queue_s(knobs: Knobs, times: Times, window: Window, waiting: Waiting) -> float:
    """Seconds until what waits has passed, at the pace of the slowest stage."""
    encode_s = times.items_s(waiting.num_items, knobs.max_batch_items) / waiting.num_encoders
    if not knobs.flow or knobs.when == NO_RULE:
        return encode_s
    prefill_s = times.observed_prefill_s * waiting.num_legs / waiting.num_prefills
    slots = window.usable(waiting.slots, knobs.tpot_slo_s)
    decode_s = times.decode_s * waiting.num_legs / slots
    return max(encode_s, prefill_s, decode_s)
