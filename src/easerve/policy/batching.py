"""When: the rules that hold an idle encoder back for more company. One small class each, by name.

A rule only says until when it would hold the batch; ``decide`` bounds what it says: by
``HARD_TIMEOUT_NS`` since the oldest item came, by the TTFT slack of the items, and not at all while
the server drains. A full batch is never shown to a rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Protocol

from easerve.policy.knobs import Knobs
from easerve.types import NS_PER_S

HARD_TIMEOUT_NS = NS_PER_S
LEAST_SLACK_S = 0.005  # a prefill that is late would be waited for again and again
PASS_THROUGH, FULL, DRAIN = "pass-through", "full", "drain"
HARD_TIMEOUT, SLO = "hard timeout", "slo"


@dataclass(frozen=True, slots=True)
class View:
    """The items that one call of an idle encoder could take now, and what is known of the world.

    ``room``: how many more items would fill the batch. ``oldest_ns``, ``last_ns``: when the first
    of them came, and when anything came last. ``gap_s``: the mean gap between arrivals, None while
    it is unknown; ``cv``: of the gaps. ``base_s``, ``item_s``, ``service_s``: of an encoder call,
    of each item in it, of this batch. ``backlog_s``: work of the least loaded prefill worker.
    ``slo_ns``: the latest start that keeps the TTFT of all, None without a promise.
    """

    now_ns: int
    num_items: int
    room: int
    oldest_ns: int
    last_ns: int
    gap_s: float | None
    cv: float
    base_s: float
    item_s: float
    service_s: float
    backlog_s: float
    slo_ns: int | None


@dataclass(frozen=True, slots=True)
class Hold:
    """Until when a batch is held back; a time that has come closes it, and ``reason`` is why."""

    until_ns: int
    reason: str


class Rule(Protocol):
    """``waits``: False is a rule that sends every item on its own, to busy encoders as well."""

    waits: bool

    def __init__(self, knobs: Knobs) -> None: ...

    def hold(self, view: View) -> Hold: ...


class PassThrough:
    """Every item is its own call, at once: what today's proxies do. Never asked."""

    waits = False

    def __init__(self, knobs: Knobs) -> None:
        pass

    def hold(self, view: View) -> Hold:
        return Hold(view.now_ns, PASS_THROUGH)


class Greedy:
    """What has gathered while the encoder was busy goes when it is idle."""

    waits = True

    def __init__(self, knobs: Knobs) -> None:
        pass

    def hold(self, view: View) -> Hold:
        return Hold(view.now_ns, "encoder idle")


class Fixed:
    """A window of ``timeout_s`` that the first item opens."""

    waits = True

    def __init__(self, knobs: Knobs) -> None:
        self._window_ns = _ns(knobs.timeout_s)

    def hold(self, view: View) -> Hold:
        return Hold(view.oldest_ns + self._window_ns, "window")


class Fill:
    """As long as the batch should need to fill at the estimated rate."""

    waits = True

    def __init__(self, knobs: Knobs) -> None:
        pass

    def hold(self, view: View) -> Hold:
        wait_s = view.room * view.gap_s if view.gap_s is not None else 0.0
        return Hold(view.oldest_ns + _ns(wait_s), "fill")


class Gap:
    """Until nothing has come for ``gap_k`` mean gaps: the paper's rule as we read it.

    With Poisson arrivals the chance that this happens by accident is ``exp(-gap_k)``.
    """

    waits = True

    def __init__(self, knobs: Knobs) -> None:
        self._gap_k = knobs.gap_k

    def hold(self, view: View) -> Hold:
        return Hold(view.last_ns + _ns(self._gap_k * (view.gap_s or 0.0)), "gap")


class Slack:
    """Waits where waiting is free or pays, else not.

    Free: while the least loaded prefill worker is busy anyway, for longer than this batch takes.
    Pays: when sharing the call's base cost with one more item saves more waiting than it causes
    (one step look-ahead for Poisson arrivals; a control limit as in Deb and Serfozo, 1973). Without
    a backlog downstream that is so only where calls of one item could not keep up.
    """

    waits = True

    def __init__(self, knobs: Knobs) -> None:
        self._gap_k, self._value = knobs.gap_k, 1.0 + knobs.encoder_value

    def hold(self, view: View) -> Hold:
        free_s = view.backlog_s - view.service_s
        free = Hold(view.now_ns + (_ns(free_s) if free_s > LEAST_SLACK_S else 0), "slack")
        if view.gap_s is None or not self._pays(view, view.gap_s):
            return free
        # Bursts make batches by themselves; what comes after one is further away than a mean gap.
        gap_s = view.gap_s * min(1.0, 2 / (1 + view.cv**2))
        gap = Hold(view.last_ns + _ns(self._gap_k * gap_s), "gap")
        return max(free, gap, key=lambda hold: hold.until_ns)

    def _pays(self, view: View, gap_s: float) -> bool:
        meanwhile_s = gap_s * (1 - exp(-view.service_s / gap_s)) if gap_s else 0.0
        cost_s = view.num_items * (gap_s + view.item_s) + meanwhile_s
        return self._value * view.base_s > cost_s


RULES: Mapping[str, Callable[[Knobs], Rule]] = {
    "none": PassThrough,
    "greedy": Greedy,
    "fixed": Fixed,
    "fill": Fill,
    "gap": Gap,
    "slack": Slack,
}


def decide(rule: Rule, view: View, draining: bool) -> Hold:
    """What the rule says, within its bounds; the reason is the rule's where it would go now."""
    if draining:
        return Hold(view.now_ns, DRAIN)
    holds = [rule.hold(view), Hold(view.oldest_ns + HARD_TIMEOUT_NS, HARD_TIMEOUT)]
    if view.slo_ns is not None:
        holds.append(Hold(view.slo_ns, SLO))
    return min(holds, key=lambda hold: max(hold.until_ns, view.now_ns))


def _ns(seconds: float) -> int:
    """Bounded: a rate of almost nothing makes waits of almost for ever."""
    return int(min(seconds, 1e6) * NS_PER_S)
