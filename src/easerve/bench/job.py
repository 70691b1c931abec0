"""What a load client is asked: requests and when, where they go, how it tells of its progress."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from yarl import URL

from easerve.goodput import Record, Slo

TIMEOUT_S = 600.0
MAX_CAUSES, MAX_CAUSE_CHARS = 20, 200
OTHER_CAUSES = "other causes"


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the model asked. ``timeout_s`` is for each request as a whole."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Planned:
    """One request, to be sent ``at_s`` seconds after the start; a closed loop ignores the time.

    Bytes are sent as they are. A dict gets what it lacks: the model, and that the answer is to be
    streamed with its usage at the end.
    """

    at_s: float
    body: dict[str, Any] | bytes

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ValueError(f"a request cannot be sent at {self.at_s} seconds")

    def encoded(self, model: str) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        body: dict[str, Any] = {"model": model, "stream": True, **self.body}
        if body["stream"]:
            body.setdefault("stream_options", {"include_usage": True})
        return msgspec.json.encode(body)


@dataclass(slots=True)
class Progress:
    """How many requests were sent and have ended, how many met each objective, and how often each
    cause kept one from being completed. ``num_warm``: warm-ups that have ended."""

    num_warm: int = 0
    num_sent: int = 0
    num_done: int = 0
    met: dict[str, int] = field(default_factory=dict)
    causes: dict[str, int] = field(default_factory=dict)

    def count(self, record: Record, cause: str | None, slos: Mapping[str, Slo]) -> None:
        self.num_done += 1
        for name, slo in slos.items():
            self.met[name] = self.met.get(name, 0) + slo.met(record)
        if cause is not None:
            if cause not in self.causes and len(self.causes) >= MAX_CAUSES:
                cause = OTHER_CAUSES
            self.causes[cause] = self.causes.get(cause, 0) + 1

    def copy(self) -> "Progress":
        return replace(self, met=dict(self.met), causes=dict(self.causes))


OnProgress = Callable[[Progress], None]


def brief(cause: str) -> str:
    """On one line, which is not too long."""
    return " ".join(cause.split())[:MAX_CAUSE_CHARS]


@dataclass(frozen=True, slots=True)
class Job:
    """A run without its bodies, which are ``body_bytes`` long; those of warm-ups come first.

    ``times_s`` has none for warm-ups. Raises ValueError for what cannot be.
    """

    url: str
    api_key: str | None = field(repr=False)
    times_s: list[float]
    body_bytes: list[int]
    max_in_flight: int | None = None
    concurrency: int | None = None
    timeout_s: float = TIMEOUT_S
    slos: Mapping[str, Slo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if self.concurrency is not None and self.max_in_flight is not None:
            raise ValueError("a closed loop has no max_in_flight")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s must be more than 0 and finite, not {self.timeout_s}")

    @property
    def num_warmup(self) -> int:
        return len(self.body_bytes) - len(self.times_s)


def endpoint(url: str, route: str = "chat/completions") -> str:
    """Where chats are asked: a server's address, with or without ``/v1``, or the route itself.

    Raises ValueError for what is no HTTP address.
    """
    parsed = URL(url)
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is not like http://127.0.0.1:8000")
    path = parsed.path.rstrip("/")
    if path.endswith("/completions"):
        return str(parsed)
    return str(parsed.with_path(f"{path.removesuffix('/v1')}/v1/{route}"))


def encoded(
    target: Target,
    requests: Sequence[Planned],
    warmup: Sequence[Planned] = (),
    *,
    max_in_flight: int | None = None,
    concurrency: int | None = None,
    slos: Mapping[str, Slo] | None = None,
) -> tuple[Job, list[bytes]]:
    """The job and its bodies. Raises ValueError for arguments that cannot be."""
    bodies = [request.encoded(target.model) for request in (*warmup, *requests)]
    job = Job(
        endpoint(target.url),
        target.api_key,
        [request.at_s for request in requests],
        [len(body) for body in bodies],
        max_in_flight,
        concurrency,
        target.timeout_s,
        slos or {},
    )
    return job, bodies
