"""Where: the rules that draw the side of a prefill, one small class each; the trim of the share.

A count keeps the share, the deficit: what the share has promised the remote side less what that
side has got. In formulas ``d = k s - R_k``, where ``s`` is the share and ``R_k`` the number of
remotes among the first ``k``. Shares and deficits are integers, in billionths: no sum drifts, and
the bounds hold exactly, for ever.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import floor
from typing import Protocol

from easerve.policy.knobs import Knobs
from easerve.types import NS_PER_S, RequestId, Side

LOCAL, REMOTE = Side.LOCAL, Side.REMOTE
OTHER = {LOCAL: REMOTE, REMOTE: LOCAL}
ONE = 1_000_000_000
SHARE, DRAW = "share", "draw"
EARLIER, DRIFT, SHORTER = "earlier finish", "share would drift", "shorter queue"

TRIM_NS = 10 * NS_PER_S
TRIM_STEP = ONE // 50


def counted(deficit: int, share: int, weight: int, side: Side) -> int:
    """The deficit after a request of this weight went to ``side``."""
    return deficit + weight * (share - ONE * (side is REMOTE))


@dataclass(frozen=True, slots=True)
class View:
    """A request that may go to either side, as a rule sees it.

    ``weight``: what it counts. ``wait_s``: until each side would begin it, less what it saves there
    (so maybe below 0); beyond that it takes the same time at both.
    """

    request_id: RequestId
    share: int
    deficit: int
    weight: int
    wait_s: Mapping[Side, float]

    def after(self, side: Side) -> int:
        """The deficit if it goes there."""
        return counted(self.deficit, self.share, self.weight, side)

    @property
    def is_absolute(self) -> bool:
        """A share of 0 or 1, whatever the deficit is; that stays as it is."""
        return self.share in (0, ONE)

    def by_count(self) -> Side:
        """Remote where ``d + s w >= w / 2``: so ``|d|`` stays within half the largest weight."""
        if self.is_absolute:
            return REMOTE if self.share else LOCAL
        return REMOTE if 2 * self.after(LOCAL) >= self.weight * ONE else LOCAL


class Rule(Protocol):
    """``by_tokens``: a request counts its tokens, else one.

    ``swaps``: only how many go to each side matters, so requests of a batch may change places.
    ``knows_share``: what it draws has to do with the share.
    """

    by_tokens: bool
    swaps: bool
    knows_share: bool

    def __init__(self, knobs: Knobs) -> None: ...

    def choose(self, view: View) -> tuple[Side, str]:
        """The side, and why."""
        ...


class Deficit:
    """Keeps the share of the requests: ``|R_k - k s| <= 1/2`` for all ``k``, the best there is.

    Hence among any ``n`` in a row ``R`` is less than 1 from ``n s``, and no more than
    ``ceil(s / (1 - s))`` remotes or ``ceil((1 - s) / s)`` locals follow each other.
    """

    by_tokens, swaps, knows_share = False, True, True

    def __init__(self, knobs: Knobs) -> None:
        pass

    def choose(self, view: View) -> tuple[Side, str]:
        return view.by_count(), SHARE


class DeficitTokens:
    """Keeps the share of the tokens, within half the longest prompt."""

    by_tokens, swaps, knows_share = True, False, True

    def __init__(self, knobs: Knobs) -> None:
        pass

    def choose(self, view: View) -> tuple[Side, str]:
        return view.by_count(), SHARE


class Band:
    """The earlier finish while that keeps ``|d| <= kappa``, else the other side.

    Where both finish at once the count decides. One of the sides always keeps the bound, as
    ``kappa`` is at least 1/2.
    """

    by_tokens, swaps, knows_share = False, False, True

    def __init__(self, knobs: Knobs) -> None:
        self._kappa = floor(knobs.band_kappa * ONE)

    def choose(self, view: View) -> tuple[Side, str]:
        local_s, remote_s = view.wait_s[LOCAL], view.wait_s[REMOTE]
        if view.is_absolute or local_s == remote_s:
            return view.by_count(), SHARE
        earlier = LOCAL if local_s < remote_s else REMOTE
        if abs(view.after(earlier)) <= self._kappa:
            return earlier, EARLIER
        return OTHER[earlier], DRIFT


class Bernoulli:
    """By a hash of the request's id: the share on average, with runs of any length.

    To compare with, as is ``Jsq``. The deficit is kept for the record, without a bound.
    """

    by_tokens, swaps, knows_share = False, False, True

    def __init__(self, knobs: Knobs) -> None:
        self._seed = knobs.offload_seed

    def choose(self, view: View) -> tuple[Side, str]:
        digest = blake2b(f"{self._seed} {view.request_id}".encode(), digest_size=8).digest()
        is_remote = int.from_bytes(digest, "big") * ONE < view.share << 64
        return REMOTE if is_remote else LOCAL, DRAW


class Jsq:
    """Joins the queue that is shorter in seconds, ties remote; knows no share."""

    by_tokens, swaps, knows_share = False, False, False

    def __init__(self, knobs: Knobs) -> None:
        pass

    def choose(self, view: View) -> tuple[Side, str]:
        is_local = view.wait_s[LOCAL] < view.wait_s[REMOTE]
        return LOCAL if is_local else REMOTE, SHORTER


RULES: Mapping[str, Callable[[Knobs], Rule]] = {
    "deficit": Deficit,
    "deficit-tokens": DeficitTokens,
    "band": Band,
    "bernoulli": Bernoulli,
    "jsq": Jsq,
}


class Trim:
    """Moves a share towards equal backlogs, every ``TRIM_NS`` by at most ``TRIM_STEP``.

    The step is the mean difference of the backlogs as a part of their mean sum, since the last one:
    the same for fast engines and slow ones. An integral, as a share that is a little wrong makes
    one of the queues grow without end.
    """

    def __init__(self, share: int) -> None:
        self.share = share
        self._since_ns: int | None = None
        self._difference_s = self._sum_s = 0.0

    def observe(self, local_s: float, remote_s: float, now_ns: int) -> None:
        """The backlogs, as a request finds them."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._difference_s += local_s - remote_s
        self._sum_s += local_s + remote_s
        if now_ns - self._since_ns < TRIM_NS:
            return
        if self._sum_s:
            step = round(TRIM_STEP * self._difference_s / self._sum_s)
            self.share = min(ONE, max(0, self.share + step))
        self._since_ns, self._difference_s, self._sum_s = now_ns, 0.0, 0.0
