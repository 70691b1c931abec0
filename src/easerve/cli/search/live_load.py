"""The load of a live score: a window of requests at one rate, and the promise it is judged by."""

import hashlib
from dataclasses import dataclass, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

from easerve.bench import reference
from easerve.bench.run import Run
from easerve.cli.bench import asked, making
from easerve.cli.bench.asked import Pace, Server
from easerve.cli.bench.making import Made
from easerve.config import ConfigError, Deployment
from easerve.goodput import Slo
from easerve.search.objective import Score
from easerve.workload.requests import Asked

NUM_WARMUP = 16
TIMEOUT_S = 120.0
PROMISE = "promise"
ALONE = Pace(None, concurrency=1)
"""Of requests whose times are still to come."""


@dataclass(frozen=True, slots=True)
class Window:
    """The load of a score: ``rate_per_s`` for ``duration_s``, until all is answered.

    ``kind`` and ``cv`` are of the arrivals. ``num_warmup``: requests before, where knobs are new;
    on engines that are, some times more. ``timeout_s``: for each request. Raises ConfigError for
    what cannot be.
    """

    asked: Asked
    rate_per_s: float
    duration_s: float
    kind: str = "poisson"
    cv: float | None = None
    num_warmup: int = NUM_WARMUP
    timeout_s: float = TIMEOUT_S

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "duration_s", "timeout_s"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"{name} must be more than 0 and finite")
        if self.asked.dataset is not None:
            raise ConfigError(
                f"{self.asked.dataset}: a live search asks nothing twice, and the lines of a data "
                "set would come again with each configuration: name a preset, items or a modality"
            )
        self.times_s(0)

    @property
    def num_requests(self) -> int:
        return max(1, ceil(self.rate_per_s * self.duration_s))

    def times_s(self, seed: int) -> list[float]:
        pace = asked.pace(str(self.rate_per_s), self.kind, self.cv)
        return making.scheduled(pace, self.num_requests, seed)

    def made(self, model: str, seed: int, content_seed: int, num_warmup: int) -> Made:
        """``seed``: of when, ``content_seed``: of what is asked."""
        made = making.make(
            Server("", model),
            model,
            self.asked,
            ALONE,
            content_seed,
            self.num_requests,
            num_warmup,
        )
        pairs = zip(self.times_s(seed), made.planned, strict=True)
        made.planned[:] = [replace(planned, at_s=at_s) for at_s, planned in pairs]
        return made

    def described(self) -> dict[str, Any]:
        """For JSON."""
        told = {name: getattr(self, name) for name in ("rate_per_s", "duration_s", "kind", "cv")}
        more = {"num_warmup": self.num_warmup, "timeout_s": self.timeout_s}
        return {"workload": asked.described(self.asked), **told, **more}


def scored(run: Run, slo: Slo, rate_per_s: float) -> Score:
    """What a window was worth."""
    summary = run.summary({PROMISE: slo})
    return Score(
        summary.goodput_per_s[PROMISE] or 0.0, summary.attainment[PROMISE] or 0.0, rate_per_s
    )


def content_seed(seed: int, number: int) -> int:
    """Of what is asked in a window: never the same."""
    digest = hashlib.sha256(f"{seed}:window {number}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def promised(
    text: str, deployment: Deployment, asked_: Asked, path: Path | None, machine: str | None
) -> tuple[str, Slo]:
    """The promise and its name: a tier, or limits (``ttft=2s,tpot=80ms``).

    ``path``: of a reference, else it is looked for by ``machine``, else by this CPU. Raises
    ConfigError.
    """
    if machine is None and deployment.device == "cpu":
        machine = reference.this_cpu()
    name = asked.modality(asked_)
    found = reference.chosen([text], path, deployment.name, machine, name)
    slos = reference.resolve([text], found)
    if len(slos) != 1:
        raise ConfigError(f"--slo {text}: a search goes by one promise")
    return next(iter(slos.items()))
