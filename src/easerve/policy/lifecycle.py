"""A request's life as two tables: the request itself, and each of its legs.

The tables are the only description of what may follow what: the core moves along them, and the
diagrams in ``docs/lifecycle.md`` are drawn from them. An illegal move raises and changes nothing.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar


class RequestState(StrEnum):
    PREPARING = "preparing"
    ENCODING = "encoding"
    """At least one item is not on the way to prefill yet: it waits for an encoder, as a rule."""
    GENERATING = "generating"
    """Every embedding is at prefill or on the way there; the legs run."""
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


class LegState(StrEnum):
    PREFILL_QUEUED = "prefill queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DONE = "done"


State = TypeVar("State", bound=StrEnum)


class IllegalMove(Exception):
    """A move that is not in the table."""


class Table(Generic[State]):
    """Legal moves: state -> (cause -> next state)."""

    def __init__(self, start: Mapping[str, State], moves: Mapping[State, Mapping[str, State]]):
        self.start, self.moves = start, moves

    def enter(self, cause: str) -> State:
        """The first state."""
        try:
            return self.start[cause]
        except KeyError:
            raise IllegalMove(f"nothing begins by {cause!r}") from None

    def next(self, state: State, cause: str) -> State:
        try:
            return self.moves[state][cause]
        except KeyError:
            raise IllegalMove(f"{cause!r} cannot happen in state {state.value!r}") from None

    def mermaid(self) -> str:
        """The table as a Mermaid state diagram, one arrow for each pair of states."""
        arrows: dict[tuple[str, str], list[str]] = {}
        for cause, state in self.start.items():
            arrows.setdefault(("[*]", state.name), []).append(cause)
        for state, moves in self.moves.items():
            for cause, following in moves.items():
                arrows.setdefault((state.name, following.name), []).append(cause)
            if not moves:
                arrows.setdefault((state.name, "[*]"), [])
        lines = ["stateDiagram-v2"]
        for (source, target), causes in arrows.items():
            label = f": {', '.join(causes)}" if causes else ""
            lines.append(f"    {source} --> {target}{label}")
        return "\n".join(lines)


R, L = RequestState, LegState

_ENDINGS = {"failed": R.FAILED, "timed out": R.FAILED, "cancelled": R.CANCELLED}
REQUEST = Table(
    {"admitted": R.PREPARING, "rejected": R.REJECTED},
    {
        R.PREPARING: {
            "prepare retried": R.PREPARING,
            "prepared with media": R.ENCODING,
            "prepared as text": R.GENERATING,
            **_ENDINGS,
        },
        R.ENCODING: {
            "embeddings sent": R.GENERATING,
            "legs done": R.COMPLETED,
            **_ENDINGS,
        },
        R.GENERATING: {
            "to be encoded again": R.ENCODING,
            "legs done": R.COMPLETED,
            **_ENDINGS,
        },
        R.COMPLETED: {},
        R.FAILED: {},
        R.CANCELLED: {},
        R.REJECTED: {},
    },
)

LEG = Table(
    {"embeddings sent": L.PREFILL_QUEUED},
    {
        L.PREFILL_QUEUED: {"prefill started": L.PREFILLING},
        L.PREFILLING: {
            "prefilled": L.DECODING,
            "first token was the last": L.DONE,
            "prefill retried": L.PREFILL_QUEUED,
        },
        L.DECODING: {"decoded": L.DONE, "decode retried": L.PREFILL_QUEUED},
        L.DONE: {},
    },
)
