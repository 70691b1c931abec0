"""The load of a scenario: what its file says, and the requests that come of it for a model."""

from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from easerve.config import ConfigError, Positive, Seconds, Section
from easerve.costs.models import ModelSpec
from easerve.costs.tokens import media
from easerve.sim.run import Request
from easerve.workload import multimodal
from easerve.workload.arrivals import Arrivals
from easerve.workload.multimodal import PRESETS, Item, Mix


def _as_range(value: Any) -> Any:
    return (value, value) if isinstance(value, int) else value


def _rises(value: tuple[int, int]) -> tuple[int, int]:
    if value[0] > value[1]:
        raise ValueError(f"give the least first and the most last, not {value[0]} and {value[1]}")
    return value


Tokens = Annotated[tuple[Positive, Positive], BeforeValidator(_as_range), AfterValidator(_rises)]
"""A number, or the least and the most, all in between equally likely."""


MAX_REQUESTS = 1_000_000
"""Of a run; each takes about a kilobyte."""


class Workload(Section):
    """When requests come and what they ask.

    ``arrivals``, ``rate_per_s``, ``cv``, ``trace`` (a file of arrival times) and ``rescaled`` as
    ``workload/arrivals``. What is asked is a ``preset``, a mix by name, or ``items``; tokens that
    are not given are the preset's, or 1024 of text and 128 of answer. ``seed``: of arrivals and of
    what is asked.
    """

    arrivals: Literal["poisson", "gamma", "constant", "trace"] = "poisson"
    rate_per_s: Seconds | None = None
    cv: float | None = None
    trace: str | None = None
    rescaled: bool = False
    num_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] = 500
    seed: Annotated[int, Field(ge=0)] = 1
    preset: str | None = None
    text_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    items: tuple[Item, ...] | None = None

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if (self.arrivals == "trace") is (self.trace is None):
            raise ValueError("arrivals: trace and the file trace: give both or neither")
        self.process()
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is none of {', '.join(PRESETS)}")
        if (self.preset is None) is (self.items is None):
            raise ValueError(
                f"give a preset ({', '.join(PRESETS)}) or items; null takes away what a base gives"
            )
        self.mix()
        return self

    def process(self) -> Arrivals:
        path = None if self.trace is None else Path(self.trace)
        return Arrivals(self.arrivals, self.rate_per_s, self.cv, path, self.rescaled)

    def mix(self) -> Mix:
        base = Mix() if self.preset is None else PRESETS[self.preset]
        return Mix(
            base.items if self.items is None else self.items,
            self.text_tokens or base.num_text_tokens,
            self.output_tokens or base.num_output_tokens,
        )


def requests(workload: Workload, model: ModelSpec) -> list[Request]:
    """In the order of their arrival. Raises ConfigError for a trace that cannot be used and for
    media that the model does not take.
    """
    num = workload.num_requests
    drawn = multimodal.requests(workload.mix(), num, workload.seed)
    try:
        times_s = workload.process().times(num, Random(f"{workload.seed}:arrivals"))  # noqa: S311
        return [
            Request(
                at_s,
                tuple(media(model, content) for content in asked.items),
                asked.num_text_tokens,
                asked.num_output_tokens,
            )
            for at_s, asked in zip(times_s, drawn, strict=True)
        ]
    except OSError as error:
        raise ConfigError(f"workload.trace: {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from None
