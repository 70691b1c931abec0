"""Requests of a bench, made and encoded before its clock starts."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from easerve.bench.job import Planned
from easerve.cli.bench.asked import Pace, Server
from easerve.config import ConfigError
from easerve.workload import dataset
from easerve.workload.requests import Asked, Body, bodies

DEFAULT_REQUESTS, DEFAULT_WARMUP = 100, 8
MAX_BYTES = 2 << 30
"""Of all bodies of a run. They are held twice: here, and by the client."""
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Made:
    """``kinds``: how many requests there are of each, such as ``image``."""

    planned: list[Planned] = field(default_factory=list)
    warmup: list[Planned] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def number(asked: Asked, pace: Pace, num: int | None, seed: int) -> int:
    """Of requests, when nobody says: all of a trace, of steps or of a data set. Raises ConfigError.

    A trace and a data set that differ in length are run for as long as both last.
    """
    if num is not None:
        return num
    numbers = []
    try:
        times_s = pace.arrivals.whole(_rng(seed)) if pace.arrivals else None
        if times_s is not None:
            numbers.append(len(times_s))
        if asked.dataset is not None and not (asked.oversampled and numbers):
            numbers.append(len(dataset.load(asked.dataset)))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    found = min(numbers, default=DEFAULT_REQUESTS)
    if found == 0:
        raise ConfigError("there is not a single request in that time")
    return found


def warmups(asked: Asked, num: int, num_warmup: int | None) -> int:
    """When nobody says: as many as a data set has left, at most. Raises ConfigError."""
    if num_warmup is not None:
        return num_warmup
    if asked.dataset is None or asked.oversampled:
        return DEFAULT_WARMUP
    try:
        return max(0, min(DEFAULT_WARMUP, len(dataset.load(asked.dataset)) - num))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def make(
    server: Server,
    model: str,
    asked: Asked,
    pace: Pace,
    seed: int,
    num: int,
    num_warmup: int = 0,
    tick: Tick = lambda: None,
) -> Made:
    """Warm-ups are other requests than those that follow: of another seed, or, of a data set, the
    lines behind. ``tick`` hears of each that is made. Raises ConfigError.
    """
    made = Made()
    left = MAX_BYTES
    warming = (
        bodies(asked, num_warmup, -1 - seed)
        if asked.dataset is None
        else bodies(asked, num_warmup, seed, first=num)
    )
    told_s: list[float | None] = []
    for target, source in ((made.warmup, warming), (made.planned, bodies(asked, num, seed))):
        for body in _checked(source):
            planned = Planned(0.0, encoded(body, model, server))
            assert isinstance(planned.body, bytes)
            left -= len(planned.body)
            if left < 0:
                raise ConfigError(
                    f"the bodies of {len(made.planned)} of {num} requests come to "
                    f"{MAX_BYTES >> 30} GiB, more than is held in memory: ask fewer "
                    "(--num-requests) or smaller ones (--image-sizes, --num-items)"
                )
            target.append(planned)
            tick()
            if target is made.planned:
                made.kinds[body.kind] += 1
                told_s.append(body.at_s)
    times_s = scheduled(pace, num, seed, told_s)
    made.planned[:] = map(_at, times_s, made.planned)
    return made


def _checked(source: Iterable[Body]) -> Iterable[Body]:
    try:
        yield from source
    except OSError as error:  # a file of a data set
        raise ConfigError(str(error)) from None


def _at(time_s: float, planned: Planned) -> Planned:
    return replace(planned, at_s=time_s)


def _rng(seed: int) -> random.Random:
    """Of arrivals: they do not depend on what is asked."""
    return random.Random(f"{seed}:arrivals")  # noqa: S311 (gaps, not secrets)


def scheduled(
    pace: Pace, num: int, seed: int, told_s: list[float | None] | None = None
) -> list[float]:
    """When each request is to be sent; ``told_s``: what they say themselves. Raises ConfigError."""
    if pace.concurrency is not None:
        return [0.0] * num
    if pace.arrivals is None:
        times_s = [each for each in told_s or () if each is not None]
        if len(times_s) != num:
            raise ConfigError("the data set has no times (at_s): say when requests come (--rate 5)")
        return times_s
    try:
        return pace.arrivals.times(num, _rng(seed))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None


def encoded(body: Body, model: str, server: Server) -> bytes:
    """As it is sent. Raises ConfigError for media by the route for text."""
    content = dict(body.body)
    if server.completions:
        content["prompt"] = _text(content.pop("messages"))
    if not server.stream:
        content["stream"] = False
    return Planned(0.0, content).encoded(model)


def _text(messages: list[dict[str, Any]]) -> str:
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        for part in parts:
            if part.get("type") != "text":
                raise ConfigError("--endpoint completions takes text alone: --modality text")
            texts.append(part["text"])
    return "\n".join(texts)
