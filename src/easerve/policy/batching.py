"""When: the rules that close an encode micro-batch. One small class each, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from easerve.types import MediaItem, RequestId


@dataclass(frozen=True, slots=True)
class QueuedItem:
    """A media item in the pooled encode queue, since ``since_ns``."""

    request_id: RequestId
    index: int
    item: MediaItem
    since_ns: int


@dataclass(frozen=True, slots=True)
class Close:
    """Encode the first ``size`` items now."""

    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Hold the batch back; ask again at ``until_ns`` at the latest."""

    until_ns: int


class BatchingRule(Protocol):
    """``needs_idle``: the rule is asked for an idle encoder only; it holds back no other."""

    name: str
    needs_idle: bool

    def decide(self, queue: Sequence[QueuedItem], now_ns: int) -> Close | Wait:
        """``queue`` is not empty and in order of arrival."""
        ...


class NoBatching:
    """Every item is its own call, at once: the pass-through of today's proxies."""

    name = "none"
    needs_idle = False

    def decide(self, queue: Sequence[QueuedItem], now_ns: int) -> Close | Wait:
        return Close(1, "pass-through")


RULES: Mapping[str, Callable[[], BatchingRule]] = {NoBatching.name: NoBatching}
