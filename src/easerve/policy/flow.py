"""Flow: what may pass the gate in front of Encode (of Prefill, for text), so that nothing waits
further down only.

Two credits. *Prefill*: the least loaded prefill worker has no more work ahead of what is encoded
now than ``prefill_ahead_s`` (a quarter of the TTFT promise, where that is less). *Decode*: no more
legs are past the gate than decode has slots, and as many more as slots come free on the way there.
With a TPOT promise, no more slots are used than keep it, which is found by trying.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from easerve.policy.estimates import Estimates, Times
from easerve.policy.gate import Credit, Gate, Opening
from easerve.policy.knobs import NO_RULE, Knobs
from easerve.policy.lifecycle import RequestState
from easerve.policy.pool import Pool, Worker
from easerve.policy.state import Leg, Request
from easerve.types import NS_PER_S, Stage

UNLIMITED = 1 << 30
SHARE_OF_TTFT = 0.25
AGAIN_S = 0.02  # prefill tells when it is done; this is for what it should have done by then
START, CAUTION = 8.0, 0.2


@dataclass(frozen=True, slots=True)
class Load:
    """What is downstream of the gate. ``num_passed``: legs of requests past it that are open.

    ``backlog_s``: of the least loaded prefill worker; with offload, of the side that has more.
    ``slots``: of each decode worker.
    """

    num_passed: int
    backlog_s: float
    slots: Sequence[int]


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
    """What is before the gate: items, and the legs of their requests; the workers of each stage.

    ``num_prefills``: as many prefill workers as those are worth that there are, with the share of
    prefills that each side gets. ``num_passed``: legs that are past the gate.
    """

    num_items: int
    num_legs: int
    num_encoders: int
    max_batch_tokens: int
    num_prefills: float
    slots: Sequence[int]
    num_passed: int


def queue_s(knobs: Knobs, times: Times, window: Window, waiting: Waiting) -> float:
    """Seconds until what waits has passed, at the pace of the slowest stage."""
    batch_items = min(knobs.max_batch_items, times.items_in(waiting.max_batch_tokens))
    encode_s = times.items_s(waiting.num_items, batch_items) / waiting.num_encoders
    if not knobs.flow or knobs.when == NO_RULE:
        return encode_s
    prefill_s = times.observed_prefill_s * waiting.num_legs / waiting.num_prefills
    slots = window.usable(waiting.slots, knobs.tpot_slo_s)
    num_late = max(0, waiting.num_legs - max(0, slots - waiting.num_passed))
    return max(encode_s, prefill_s, times.decode_s * num_late / slots)


class Flow:
    """What is known of the stages, and who may pass the gate because of it.

    ``wake_ns``: when to ask for an opening again, where nothing may happen until then.
    """

    def __init__(self, knobs: Knobs, guess: Estimates) -> None:
        self.knobs, self.times = knobs, Times(guess)
        self.window, self.gate = Window(), Gate()
        self.wake_ns: int | None = None
        self._num_waiting = 0  # legs of the open requests that have not passed
        self._num_preparing = 0  # media of the requests that are being prepared

    # A request's way --------------------------------------------------------------------------

    def admitted(self, request: Request) -> None:
        self._num_waiting += request.num_choices
        self._num_preparing += request.num_media

    def prepared(self, request: Request) -> None:
        self._num_preparing -= request.num_media
        self.gate.join(request)

    def let_pass(self, request: Request) -> None:
        """For good; asking twice is harmless."""
        if not request.passed:
            self.gate.let_pass(request)
            self._num_waiting -= request.num_choices

    def closed(self, request: Request) -> None:
        """Wherever it was."""
        if request.state is RequestState.PREPARING:
            self._num_preparing -= request.num_media
        if not request.passed:
            self._num_waiting -= request.num_choices
        self.gate.close(request)

    def decoded(self, decode_s: float, tpot_s: float, leg: Leg, worker: Worker) -> None:
        """A leg had its answer from a worker."""
        self.times.decoded(decode_s)
        self.window.observe(tpot_s, leg.beside, worker.num_slots, self.knobs.tpot_slo_s)

    # What is decided --------------------------------------------------------------------------

    def opening(
        self, pool: Pool, backlog_s: float, now_ns: int, idle_encoder: bool = True
    ) -> Opening:
        """Of the gate, by what is downstream now; ``idle_encoder``: as in ``Gate.opening``.

        ``backlog_s``: of prefill, as in ``Load``.
        """
        load = Load(self.gate.num_passed, backlog_s, _slots(pool))
        given = credit(self.knobs, self.times, self.window, load)
        opening = self.gate.opening(given, self.knobs, idle_encoder)
        again_s, self.wake_ns = opening.again_s, None
        if again_s is not None:
            self.wake_ns = now_ns + ceil(again_s * NS_PER_S)
        return opening

    def queue_s(self, pool: Pool, num_queued: int, num_prefills: float) -> float:
        """Seconds until all that waits has passed, ``num_queued`` items in the encode queue among
        it; 0 while a stage has no engine. ``num_prefills``: as in ``Waiting``.
        """
        if not pool.has(*Stage):
            return 0.0
        encoders = pool.of(Stage.ENCODE)
        return queue_s(
            self.knobs,
            self.times,
            self.window,
            Waiting(
                self._num_preparing + num_queued,
                self._num_waiting,
                len(encoders),
                min(encoder.max_batch_tokens for encoder in encoders),
                num_prefills,
                _slots(pool),
                self.gate.num_passed,
            ),
        )


def _slots(pool: Pool) -> list[int]:
    return [worker.num_slots for worker in pool.of(Stage.DECODE)]
