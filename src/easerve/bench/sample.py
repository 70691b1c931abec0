"""What a client saw of each request, and of itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from easerve.goodput import Record


@dataclass(frozen=True, slots=True)
class Sample:
    """A record and what only the client knows of it; times are on the record's clock.

    ``cause``: what kept it from being completed. ``done_s``: when the stream had ended, usage
    included. ``num_chunks``: with text. ``num_usage_tokens``, ``num_prompt_tokens``: as the server
    counts, None where it did not say. ``chunk_times_s``: of the chunks with text.
    """

    record: Record
    cause: str | None = None
    done_s: float | None = None
    num_chunks: int = 0
    num_usage_tokens: int | None = None
    num_prompt_tokens: int | None = None
    chunk_times_s: Sequence[float] = ()

    @property
    def itls_s(self) -> list[float]:
        """Times between successive chunks with text."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]


@dataclass(frozen=True, slots=True)
class Health:
    """Of a client during a run. ``cpu_share``: of one core. ``loop_lag_p99_s``: how long what was
    due at some moment had to wait for its turn. ``priority``: at which it ran, in words."""

    cpu_share: float = 0.0
    loop_lag_p99_s: float | None = None
    priority: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """Of a run. ``samples``: of what was sent, in the order given; all, unless it was stopped.

    ``start_s``: of the measured part, on the monotonic clock; other times are from there.
    ``wall_s``: until the last answer had ended, or it was stopped.
    """

    warmup: list[Sample]
    samples: list[Sample]
    start_s: float
    wall_s: float
    health: Health
    stopped: bool = False
