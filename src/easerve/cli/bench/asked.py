"""Options of benches that ask a server from outside: what they come to."""

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easerve.bench import job
from easerve.cli.bench.options import API_KEY
from easerve.config import ConfigError
from easerve.workload import arrivals
from easerve.workload.arrivals import Arrivals
from easerve.workload.content import Options
from easerve.workload.multimodal import Item, parse_items, parse_size
from easerve.workload.requests import Asked

ROUTES = {"chat": "chat/completions", "completions": "completions"}


@dataclass(frozen=True, slots=True)
class Server:
    """Which server is asked, and how. ``url`` is the route; ``completions`` is for text alone."""

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    label: str | None = None
    completions: bool = False
    stream: bool = True


def server(
    url: str | None,
    model: str | None,
    api_key: str | None,
    timeout_s: float,
    label: str | None,
    endpoint: str = "chat",
    stream: bool = True,
) -> Server:
    """Raises ConfigError for what cannot be."""
    if url is None:
        raise ConfigError("--url: name the server, e.g. http://127.0.0.1:8000")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"--timeout: {timeout_s} is not a number of seconds")
    if endpoint not in ROUTES:
        raise ConfigError(f"--endpoint: {endpoint!r} is neither chat nor completions")
    try:
        route = job.endpoint(url if "://" in url else f"http://{url}", ROUTES[endpoint])
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from None
    key = api_key or os.environ.get(API_KEY) or None
    completions = not route.endswith("/chat/completions")
    return Server(route, model, key, timeout_s, label, completions, stream)


def source(
    modality: str = "image",
    preset: str | None = None,
    dataset: Path | None = None,
    text_tokens: str | None = None,
    output_tokens: str | None = None,
    num_items: str | None = None,
    image_sizes: str | None = None,
    shuffle: bool = False,
    oversample: bool = False,
    keep_eos: bool = False,
    items: str | None = None,
) -> Asked:
    """What is asked. Raises ConfigError for what cannot be."""
    return Asked(
        modality,
        preset,
        _items(items),
        dataset,
        span("text-tokens", text_tokens),
        span("output-tokens", output_tokens),
        span("num-items", num_items),
        sizes(image_sizes),
        shuffle,
        oversample,
        Options(ignore_eos=not keep_eos),
    )


def _items(text: str | None) -> tuple[Item, ...] | None:
    try:
        return None if text is None else parse_items(text)
    except ValueError as error:
        raise ConfigError(f"--items: {error}") from None


def span(option: str, text: str | None) -> tuple[int, int] | None:
    """``128`` or ``8-64``: the least and the most. Raises ConfigError."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?:[-–,:]\s*(\d{1,9})\s*)?", text)
    if found is None:
        raise ConfigError(f"--{option}: {text!r} is not like 128 or 8-64")
    least = int(found[1])
    return least, least if found[2] is None else int(found[2])


def sizes(text: str | None) -> tuple[tuple[int, int], ...] | None:
    """``1280x720,256x256``. Raises ConfigError."""
    if text is None:
        return None
    try:
        return tuple(parse_size(each) for each in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--image-sizes: {text!r}: {error}") from None


def modality(asked: Asked) -> str:
    """What is asked in a word, by which its reference is known."""
    if asked.dataset is not None:
        return asked.dataset.stem
    return asked.preset or ("items" if asked.items else asked.modality)


def described(asked: Asked) -> dict[str, Any]:
    """What was said of it, for JSON."""
    found: dict[str, Any] = {}
    if asked.dataset is not None:
        found["dataset"] = str(asked.dataset)
        found |= {name: True for name in ("shuffled", "oversampled") if getattr(asked, name)}
    elif asked.preset is not None:
        found["preset"] = asked.preset
    elif asked.items is not None:
        found["items"] = [item.model_dump(mode="json", exclude_none=True) for item in asked.items]
    else:
        found["modality"] = asked.modality
    for name in ("text_tokens", "output_tokens", "num_items"):
        if (given := getattr(asked, name)) is not None:
            found[name] = list(given)
    if asked.image_sizes is not None:
        found["image_sizes"] = [f"{width}x{height}" for width, height in asked.image_sizes]
    if not asked.options.ignore_eos:
        found["ignore_eos"] = False
    return found


@dataclass(frozen=True, slots=True)
class Pace:
    """When requests are sent: at ``arrivals``, by ``concurrency`` workers in a closed loop, or else
    when the data set says."""

    arrivals: Arrivals | None
    concurrency: int | None = None
    max_in_flight: int | None = None

    def described(self) -> dict[str, Any]:
        """For JSON."""
        if self.concurrency is not None:
            return {"kind": "closed", "concurrency": self.concurrency}
        found: dict[str, Any] = {"kind": self.arrivals.kind if self.arrivals else "dataset"}
        for name in arrivals.ALL:
            if (given := getattr(self.arrivals, name, None)) is not None:
                found[name] = str(given) if isinstance(given, Path) else given
        if found["kind"] == "immediate":
            found["rate_per_s"] = "inf"  # which JSON has no number for
        if self.max_in_flight is not None:
            found["max_in_flight"] = self.max_in_flight
        return found


def pace(
    rate: str | None = None,
    arrival: str | None = None,
    cv: float | None = None,
    trace: Path | None = None,
    end_rate: str | None = None,
    steps: str | None = None,
    concurrency: int | None = None,
    max_in_flight: int | None = None,
    burstiness: float | None = None,
    max_concurrency: int | None = None,
    has_times: bool = False,
) -> Pace:
    """``has_times``: the requests may say themselves when they come.

    ``burstiness`` and ``max_concurrency`` are vLLM's: the gaps' shape, 1 / cv²; a limit on what is
    in flight, which without a rate makes a closed loop. Raises ConfigError for what cannot be.
    """
    if burstiness is not None:
        if cv is not None or not 0 < burstiness < math.inf:
            raise ConfigError("--burstiness is 1 / cv², more than 0: give it or --cv")
        cv = burstiness**-0.5
    given = [each for each in (rate, arrival, cv, trace, end_rate, steps) if each is not None]
    if max_concurrency is not None:
        if concurrency is not None or max_in_flight is not None:
            raise ConfigError("--max-concurrency is --concurrency, or --max-in-flight with a rate")
        if given and rate != "inf":
            max_in_flight = max_concurrency
        else:
            concurrency, given = max_concurrency, []
    if concurrency is not None:
        if given or max_in_flight is not None:
            raise ConfigError("--concurrency is a closed loop: it has no arrivals and no limit")
        return Pace(None, concurrency)
    if not given and has_times:
        return Pace(None, None, max_in_flight)
    if not given:
        raise ConfigError("say when requests come: --rate 5, --rate inf or --concurrency 8")
    try:
        when = arrivals.parse(rate, arrival, cv=cv, end_rate=end_rate, steps=steps, path=trace)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Pace(when, None, max_in_flight)
