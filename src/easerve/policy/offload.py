"""Where: the side that a prefill runs on, and the engine that a piece of work goes to."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from easerve.policy.knobs import Knobs
from easerve.policy.share import LOCAL, ONE, OTHER, REMOTE, RULES, Trim, View, counted
from easerve.types import RequestId, Side

ONLY, SPILL, SWAPPED = "only side", "spill guard", "share, sizes balanced"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request whose prefill is to be placed; ``num_tokens``: of its prompt.

    ``sides``: where it may go now, at least one: those with a worker that has not failed it.
    ``saved_s``: seconds that a side saves because it has the embeddings already.
    """

    request_id: RequestId
    num_tokens: int
    sides: frozenset[Side]
    saved_s: Mapping[Side, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Load:
    """What is known of the sides when a batch is placed.

    ``backlog_s``: of the least loaded worker of each side that has one. ``token_s``: the prefill
    time of a token. ``num_workers``: of each side, 1 where it is not said.
    """

    backlog_s: Mapping[Side, float]
    token_s: float
    num_workers: Mapping[Side, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a prefill goes, why, and what was known then.

    ``share``: in force. ``deficit_before``, ``deficit_after``: requests or, with a rule that counts
    them, tokens. ``local_s``, ``remote_s``: the backlogs, those drawn before it in its batch
    included; None: no worker.
    """

    side: Side
    reason: str
    share: float
    deficit_before: float
    deficit_after: float
    local_s: float | None
    remote_s: float | None


@dataclass(frozen=True, slots=True)
class Pick:
    """What was drawn for a candidate. ``weight``: 0 where it does not count."""

    num_tokens: int
    side: Side
    reason: str
    weight: int
    local_s: float | None
    remote_s: float | None


class Offload:
    """Draws the sides of prefills, batch by batch.

    What can go to one side only does not count, so that no credit builds up while a side is down.
    Where a prefill would wait ``spill_guard_s`` longer than at the other side it goes there, even
    at a share of 0 or 1, and does not count either. Another share carries the deficit over; another
    rule or ``band_kappa`` starts at 0.
    """

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs
        self._rule = RULES[knobs.where](knobs)
        self._trim = Trim(_share(knobs))
        self._deficit = 0

    @property
    def share(self) -> float:
        """In force."""
        return self._trim.share / ONE

    @property
    def deficit(self) -> float:
        """What the remote side is behind its share: requests, or tokens if the rule counts them."""
        return self._deficit / ONE

    @property
    def keeps_share(self) -> bool:
        """Whatever the backlogs are."""
        return self._rule.knows_share and self._knobs.spill_guard_s is None

    def shares(self, sides: Collection[Side]) -> dict[Side, float]:
        """What each of these sides gets of the prefills; one that gets nothing is left out.

        ``sides``: that have a worker. A rule that knows no share is taken to give both the same.
        """
        share = self.share if self._rule.knows_share else 0.5
        shares = {LOCAL: 1 - share, REMOTE: share} if len(sides) > 1 else dict.fromkeys(sides, 1.0)
        return {side: part for side, part in shares.items() if part}

    def retune(self, knobs: Knobs) -> None:
        before, self._knobs = self._knobs, knobs
        self._rule = RULES[knobs.where](knobs)
        if (knobs.where, knobs.band_kappa) != (before.where, before.band_kappa):
            self._deficit = 0
        trims = knobs.share_trim and not knobs.adapt
        if not trims or _share(knobs) != _share(before):
            self._trim = Trim(_share(knobs))

    def place(self, candidates: Sequence[Candidate], load: Load, now_ns: int) -> list[Placement]:
        """One for each candidate, in their order; they count as sent."""
        trims = self._knobs.share_trim and not self._knobs.adapt and 0 < _share(self._knobs) < ONE
        if trims and len(load.backlog_s) == len(Side):
            self._trim.observe(load.backlog_s[LOCAL], load.backlog_s[REMOTE], now_ns)
        picks = self._draw(candidates, load)
        return [self._count(pick) for pick in (swapped(picks) if self._rule.swaps else picks)]

    def _draw(self, candidates: Sequence[Candidate], load: Load) -> list[Pick]:
        backlog_s, deficit = dict(load.backlog_s), self._deficit
        picks = []
        for candidate in candidates:
            pick = self._pick(candidate, backlog_s, deficit)
            picks.append(pick)
            deficit = counted(deficit, self._trim.share, pick.weight, pick.side)
            num_workers = load.num_workers.get(pick.side, 1)
            backlog_s[pick.side] += candidate.num_tokens * load.token_s / num_workers
        return picks

    def _pick(self, candidate: Candidate, backlog_s: Mapping[Side, float], deficit: int) -> Pick:
        weight = candidate.num_tokens if self._rule.by_tokens else 1
        if len(candidate.sides) == 1:
            (side,) = candidate.sides
            reason, weight = ONLY, 0
        else:
            saved_s, guard_s = candidate.saved_s, self._knobs.spill_guard_s
            wait_s = {side: backlog_s[side] - saved_s.get(side, 0.0) for side in Side}
            view = View(candidate.request_id, self._trim.share, deficit, weight, wait_s)
            side, reason = self._rule.choose(view)
            if guard_s is not None and wait_s[side] - wait_s[OTHER[side]] > guard_s:
                side, reason, weight = OTHER[side], SPILL, 0
        local_s, remote_s = backlog_s.get(LOCAL), backlog_s.get(REMOTE)
        return Pick(candidate.num_tokens, side, reason, weight, local_s, remote_s)

    def _count(self, pick: Pick) -> Placement:
        before, share = self._deficit, self._trim.share
        self._deficit = counted(before, share, pick.weight, pick.side)
        return Placement(
            pick.side,
            pick.reason,
            share / ONE,
            before / ONE,
            self._deficit / ONE,
            pick.local_s,
            pick.remote_s,
        )


def swapped(picks: Sequence[Pick]) -> list[Pick]:
    """The picks that count change sides until each side has its part of the tokens, or nearly.

    As many go to each side as were drawn, so that the deficit after the batch is the same.
    """
    counting = [pick for pick in picks if pick.weight]
    sides = iter(balanced([pick.num_tokens for pick in counting], [p.side for p in counting]))
    return [_moved(pick, next(sides)) if pick.weight else pick for pick in picks]


def balanced(tokens: Sequence[int], sides: Sequence[Side]) -> list[Side]:
    """``sides`` dealt anew to requests of so many tokens, if that is nearer to equal means.

    The longest first, to the side that is furthest behind its part and has room; ties by order.
    Within a batch only, and not always the best there is.
    """
    room = {side: sides.count(side) for side in Side}
    behind = _behind(tokens, sides)
    dealt, left = list(sides), {side: room[side] * sum(tokens) for side in Side}
    for index in sorted(range(len(tokens)), key=lambda index: -tokens[index]):
        side = max((side for side in Side if room[side]), key=lambda side: left[side])
        dealt[index] = side
        room[side] -= 1
        left[side] -= len(tokens) * tokens[index]
    return dealt if abs(left[REMOTE]) < abs(behind) else list(sides)


def _behind(tokens: Sequence[int], sides: Sequence[Side]) -> int:
    """What the remote side is short of its part of the tokens, times the number of requests."""
    remote = sum(num for num, side in zip(tokens, sides, strict=True) if side is REMOTE)
    return sides.count(REMOTE) * sum(tokens) - len(tokens) * remote


def _moved(pick: Pick, side: Side) -> Pick:
    return pick if side is pick.side else replace(pick, side=side, reason=SWAPPED)


def _share(knobs: Knobs) -> int:
    return round(knobs.remote_share * ONE)
