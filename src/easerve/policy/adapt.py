"""Adapt: slow re-tuning of some knobs, by what the core has seen of its own engines.

Every ``adapt_period_s`` what was seen in the period is turned into a direction for each knob: up,
down or none. A knob moves when its direction has been the same for ``adapt_hold`` periods; one knob
moves by one step in a period. It stays near its centre, the value that was configured:

- ``remote_share`` goes to what the speeds of the two sides ask for, while one side has clearly more
  work before it than the other; by at most ``SHARE_STEP``, within ``adapt_share`` of its centre.
- ``max_batch_items`` goes up where full batches go to encoders that hardly keep up, if that makes
  an item cheaper; down where they would keep up with less, as all of a batch wait for its end.
- ``timeout_s`` of rule fixed and ``gap_k`` of gap and slack go down where items wait for company
  that encoders do not need, and back up to the centre where they hardly keep up.

These two kinds go by ``FACTOR``, within ``adapt_factor`` of their centres. The share may go on in
the next period, as its target is measured; the others wait for what came of a step. Time in which
nothing is asked tells nothing. A share of 0 or 1 stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from easerve.policy.batching import FULL, HARD_TIMEOUT
from easerve.policy.estimates import Mean, Times
from easerve.policy.events import Retuned
from easerve.policy.knobs import NO_RULE, Knobs
from easerve.policy.share import LOCAL, REMOTE
from easerve.policy.share import RULES as SIDES
from easerve.types import NS_PER_S, Side

SHARE, BATCH = "remote_share", "max_batch_items"
WAIT_OF = {"fixed": "timeout_s", "gap": "gap_k", "slack": "gap_k"}
"""The knob that says how long a rule waits."""
ADAPTED = (SHARE, BATCH, "timeout_s", "gap_k")
MOST_ITEMS = 1024

SHARE_STEP = 0.05
LEAST_SHARE = 0.05  # a side without work shows no speed
DEAD_SHARE = 0.02
DEAD_PROMPTS = 0.5  # of difference between the sides; credits keep it near one
DEAD_PART = 0.25  # of difference, of the work before both: where both have much, neither starves
STARVED_PROMPTS = 0.25  # before a side that has nothing to do
STARVED_STEP = 0.02
SPEEDS_ERR = 0.1  # that they may be wrong by, in the share
FACTOR = 1.5
BUSY, CALM = 0.8, 0.6
WORTH = 0.03  # of the time of an item
NOTICEABLE = 0.1  # of the time from Encode to Decode
MIN_SAMPLES = 5
COMPANY = {"fixed": ("window", HARD_TIMEOUT), "gap": ("gap", HARD_TIMEOUT), "slack": ("gap",)}
"""By rule: why batches are closed that have waited for company in vain."""


class Step(NamedTuple):
    """Where a knob should go, and why. ``to``: the value after one step."""

    up: bool
    to: float
    reason: str


@dataclass(slots=True)
class Seen:
    """Sums over a period.

    ``ahead_s``: local work less remote, ``least_s``: that of the side with less, both as requests
    found it. ``num_closed``, ``num_full``, ``wait_s``: batches that were closed, those that were
    full, how long they had waited in vain for more. The others: of encoder calls that ended.
    """

    begin_ns: int
    num_requests: int = 0
    ahead_s: float = 0.0
    least_s: float = 0.0
    num_closed: int = 0
    num_full: int = 0
    wait_s: float = 0.0
    num_calls: int = 0
    num_items: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0


class Calls(NamedTuple):
    """To encoders. ``num_items``: of a call, on average."""

    busy: float
    base_s: float
    per_item_s: float
    num_items: float

    def item_s(self, num_items: float) -> float:
        """Of an encoder, an item in a call of so many."""
        return self.base_s / num_items + self.per_item_s


@dataclass(slots=True)
class Speed:
    """Of the prefill engines of a side."""

    seconds: Mean = field(default_factory=Mean)
    tokens: Mean = field(default_factory=Mean)

    @property
    def token_s(self) -> float:
        """0 while unknown."""
        return self.seconds.value / self.tokens.value if self.tokens.value else 0.0


class Adapt:
    """``configured``: the centres; ``knobs``: in force."""

    def __init__(self, knobs: Knobs) -> None:
        self.configured = self.knobs = knobs
        self._speed = {side: Speed() for side in Side}
        self._seen: Seen | None = None
        self._held: dict[str, int] = {}
        """Periods in a row in which a knob should go up, or down if negative."""

    @property
    def due_ns(self) -> int | None:
        """The end of the period; None while nothing has been seen, or nothing is adapted."""
        if self._seen is None:
            return None
        return self._seen.begin_ns + round(self.knobs.adapt_period_s * NS_PER_S)

    def configure(self, knobs: Knobs) -> list[Retuned]:
        """The operator's: what changes is a new centre, all else stays as it was re-tuned."""
        before, was_on = self.knobs, self.knobs.adapt
        kept: dict[str, Any] = {
            name: _within(knobs, name, getattr(before, name))
            for name in ADAPTED
            if knobs.adapt and getattr(knobs, name) == getattr(self.configured, name)
        }
        self.configured, self.knobs = knobs, replace(knobs, **kept)
        if not knobs.adapt:
            self._seen, self._held = None, {}
        reason = "configured" if knobs.adapt else "adapt is off"
        return [
            Retuned(name, getattr(before, name), getattr(self.knobs, name), reason)
            for name in ADAPTED
            if was_on and getattr(before, name) != getattr(self.knobs, name)
        ]

    # What is seen -----------------------------------------------------------------------------

    def asked(self, backlog_tokens: Mapping[Side, float], now_ns: int) -> None:
        """A request came. ``backlog_tokens``: of the least loaded prefill engine of each side."""
        if self._seen is None:
            self._seen = Seen(now_ns)
        works_s = {side: each * self._token_s(side) for side, each in backlog_tokens.items()}
        self._seen.num_requests += 1
        self._seen.least_s += min(works_s.values())
        if len(works_s) == len(Side):
            self._seen.ahead_s += works_s[LOCAL] - works_s[REMOTE]

    def closed(self, reason: str, wait_s: float) -> None:
        """A batch was, after its first item had waited so long."""
        if self._seen is not None:
            self._seen.num_full += reason == FULL
            self._seen.num_closed += 1
            self._seen.wait_s += wait_s * (reason in COMPANY.get(self.knobs.when, ()))

    def encoded(self, num_items: int, num_tokens: int, seconds: float) -> None:
        """An encoder call has ended."""
        if self._seen is not None:
            self._seen.num_calls += 1
            self._seen.num_items += num_items
            self._seen.num_tokens += num_tokens
            self._seen.busy_s += seconds

    def prefilled(self, side: Side, seconds: float, num_tokens: int) -> None:
        """A prompt has been."""
        self._speed[side].seconds.observe(seconds)
        self._speed[side].tokens.observe(num_tokens)

    # What comes of it -------------------------------------------------------------------------

    def tick(
        self, num_prefills: Mapping[Side, int], num_encoders: int, times: Times, now_ns: int
    ) -> list[Retuned]:
        """At the end of a period, not before: the knob that moves. ``num_prefills``: engines of
        each side that has one.
        """
        assert self._seen is not None, "a period has ended"
        seen, self._seen = self._seen, None
        elapsed_s = (now_ns - seen.begin_ns) / NS_PER_S
        if elapsed_s >= 2 * self.knobs.adapt_period_s:  # nothing was open that would wake the core
            self._held = {}
            return []
        self._seen = Seen(now_ns)
        calls = _calls(seen, elapsed_s * num_encoders, times)
        steps = {SHARE: self._share(seen, num_prefills)}
        if calls is not None:
            steps[BATCH] = self._batch(seen, calls, times)
            if (name := WAIT_OF.get(self.knobs.when)) is not None:
                steps[name] = self._wait(name, seen, calls, times)
        return self._move({name: step for name, step in steps.items() if step is not None})

    def _move(self, steps: Mapping[str, Step]) -> list[Retuned]:
        """The first knob whose time has come."""
        before = self._held
        self._held = {name: _one_more(before.get(name, 0), step.up) for name, step in steps.items()}
        for name, step in steps.items():
            if abs(self._held[name]) < self.knobs.adapt_hold:
                continue
            old, new = getattr(self.knobs, name), _within(self.configured, name, step.to)
            if new != old:
                change: dict[str, Any] = {name: new}
                self.knobs = replace(self.knobs, **change)
                if name != SHARE:
                    del self._held[name]
                return [Retuned(name, old, new, step.reason)]
        return []

    def _share(self, seen: Seen, num_prefills: Mapping[Side, int]) -> Step | None:
        """Towards equal work before both sides, each measured by its own speed."""
        knobs = self.knobs
        keeps = SIDES[knobs.where](knobs).knows_share and 0 < self.configured.remote_share < 1
        known = all(speed.token_s for speed in self._speed.values())
        if (
            not (keeps and known)
            or seen.num_requests < MIN_SAMPLES
            or len(num_prefills) < len(Side)
        ):
            return None
        ahead_s, least_s = seen.ahead_s / seen.num_requests, seen.least_s / seen.num_requests
        up = ahead_s > 0
        fit = self._fit(num_prefills)
        step = self._share_step(
            abs(ahead_s), least_s, fit - knobs.remote_share if up else knobs.remote_share - fit
        )
        later, sooner = (LOCAL, REMOTE) if up else (REMOTE, LOCAL)
        reason = f"{later} has {abs(ahead_s):.2f} s more work than {sooner}, speeds fit {fit:.3f}"
        to = round(knobs.remote_share + (step if up else -step), 4)
        return Step(up, to, reason) if step else None

    def _fit(self, num_prefills: Mapping[Side, int]) -> float:
        """The share with which both sides are equally busy."""
        local, remote = (num_prefills[side] / self._speed[side].token_s for side in (LOCAL, REMOTE))
        return remote / (local + remote)

    def _share_step(self, ahead_s: float, least_s: float, gap: float) -> float:
        """``ahead_s``: what the side with more work has more; ``gap``: by how much less share it
        should have, by the speeds. 0: none.
        """
        prompt_s = max(speed.seconds.value for speed in self._speed.values())
        if ahead_s <= max(DEAD_PROMPTS * prompt_s, DEAD_PART * (2 * least_s + ahead_s)):
            return 0.0
        if gap > DEAD_SHARE:
            return min(SHARE_STEP, gap)
        starved = ahead_s > prompt_s and least_s < STARVED_PROMPTS * prompt_s
        return STARVED_STEP if starved and gap > -SPEEDS_ERR else 0.0

    def _batch(self, seen: Seen, calls: Calls, times: Times) -> Step | None:
        size, busy = self.knobs.max_batch_items, calls.busy
        if self.knobs.when == NO_RULE or 2 * seen.num_full < seen.num_closed:
            return None  # it is not what bounds the batches
        more, less = max(size + 1, round(size * FACTOR)), max(1, int(size / FACTOR))
        saved = 1 - calls.item_s(more) / calls.item_s(size)
        # Calls of one item do not tell what they would share.
        if busy > BUSY and (saved > WORTH or size == 1):
            return Step(True, more, f"encoders are {busy:.0%} busy with full batches")
        then = busy * calls.item_s(less) / calls.item_s(calls.num_items)
        work_s = seen.least_s / max(1, seen.num_requests)
        if then < CALM and work_s < times.prefill_s:
            return Step(False, less, f"encoders would be {then:.0%} busy with smaller batches")
        return None

    def _wait(self, name: str, seen: Seen, calls: Calls, times: Times) -> Step | None:
        value, centre = getattr(self.knobs, name), getattr(self.configured, name)
        if calls.busy > BUSY and value < centre:
            reason = f"encoders are {calls.busy:.0%} busy"
            return Step(True, min(centre, value * FACTOR), reason)
        alone = calls.busy * calls.item_s(1) / calls.item_s(calls.num_items)
        wait_s = seen.wait_s / max(1, seen.num_closed)
        if alone < CALM and wait_s > NOTICEABLE * times.lead_s:
            reason = f"batches wait {wait_s:.3f} s, encoders would be {alone:.0%} busy one by one"
            return Step(False, value / FACTOR, reason)
        return None

    def _token_s(self, side: Side) -> float:
        """Of a side, or of the other while nothing is known of it."""
        return self._speed[side].token_s or max(each.token_s for each in self._speed.values())


def _calls(seen: Seen, encoder_s: float, times: Times) -> Calls | None:
    """``encoder_s``: that encoders were there; None where too little is known."""
    base_s, token_s = times.encode.line()
    if seen.num_calls < MIN_SAMPLES or not encoder_s or not base_s + token_s:
        return None
    per_item_s = token_s * seen.num_tokens / seen.num_items
    return Calls(seen.busy_s / encoder_s, base_s, per_item_s, seen.num_items / seen.num_calls)


def _one_more(held: int, up: bool) -> int:
    """Periods in a row, down if negative."""
    return max(0, held) + 1 if up else min(0, held) - 1


def _within(knobs: Knobs, name: str, value: float) -> float:
    """A value, as near to it as the knob may come; ``knobs`` has the centre."""
    centre: float = getattr(knobs, name)
    if name == SHARE:
        by = knobs.adapt_share if 0 < centre < 1 else 0.0
        least = min(centre, max(LEAST_SHARE, centre - by))
        most = max(centre, min(1 - LEAST_SHARE, centre + by))
        return min(max(value, least), most)
    most = min(centre * knobs.adapt_factor, MOST_ITEMS) if name == BATCH else centre
    value = min(max(value, centre / knobs.adapt_factor), most)
    return max(1, round(value)) if name == BATCH else value
