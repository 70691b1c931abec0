"""The load of a scenario: what its file says, and the requests that come of it for a model."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Self, TypeVar

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


class Phase(Section):
    """Poisson arrivals for ``duration_s``; what is not given is the workload's."""

    duration_s: Seconds
    rate_per_s: Annotated[float, Field(ge=0, le=1e9)]
    items: tuple[Item, ...] | None = None
    text_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class Workload(Section):
    """When requests come and what they ask.

    ``arrivals``, ``rate_per_s``, ``cv``, ``trace`` (a file of arrival times) and ``rescaled`` as
    ``workload/arrivals``. What is asked is a ``preset``, a mix by name, or ``items``; tokens that
    are not given are the preset's, or 1024 of text and 128 of answer. ``seed``: of arrivals and of
    what is asked. ``phases``: a load that drifts, for ``arrivals: phases``; after the last comes
    the first again.
    """

    arrivals: Literal["poisson", "gamma", "constant", "trace", "phases"] = "poisson"
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
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        if (self.arrivals == "trace") is (self.trace is None):
            raise ValueError("arrivals: trace and the file trace: give both or neither")
        if (self.arrivals == "phases") is (self.phases is None):
            raise ValueError("arrivals: phases and the list phases: give both or neither")
        self.process()
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is none of {', '.join(PRESETS)}")
        if (self.preset is None) is (self.items is None):
            raise ValueError(
                f"give a preset ({', '.join(PRESETS)}) or items; null takes away what a base gives"
            )
        self.mixes()
        return self

    def process(self) -> Arrivals:
        path = None if self.trace is None else Path(self.trace)
        steps = tuple((phase.rate_per_s, phase.duration_s) for phase in self.phases or ())
        kind = "steps" if steps else self.arrivals
        return Arrivals(kind, self.rate_per_s, self.cv, path, self.rescaled, steps=steps or None)

    def mixes(self) -> list[Mix]:
        """Of each phase; one where there are none."""
        return [self.mix(phase) for phase in self.phases or (None,)]

    def mix(self, phase: Phase | None = None) -> Mix:
        base = Mix() if self.preset is None else PRESETS[self.preset]
        given: list[Phase | Workload] = [self] if phase is None else [phase, self]
        return Mix(
            _first([each.items for each in given], base.items),
            _first([each.text_tokens for each in given], base.num_text_tokens),
            _first([each.output_tokens for each in given], base.num_output_tokens),
        )


Given = TypeVar("Given")


def _first(choices: Sequence[Given | None], default: Given) -> Given:
    return next((each for each in choices if each is not None), default)


def requests(workload: Workload, model: ModelSpec) -> list[Request]:
    """In the order of their arrival. Raises ConfigError for a trace that cannot be used and for
    media that the model does not take.
    """
    num = workload.num_requests
    try:
        times_s = workload.process().times(num, Random(f"{workload.seed}:arrivals"))  # noqa: S311
        return [
            Request(
                at_s,
                tuple(media(model, content) for content in asked.items),
                asked.num_text_tokens,
                asked.num_output_tokens,
            )
            for at_s, asked in zip(times_s, _asked(workload, times_s), strict=True)
        ]
    except OSError as error:
        raise ConfigError(f"workload.trace: {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"workload: {error}") from None


def _asked(workload: Workload, times_s: Sequence[float]) -> Iterator[multimodal.Request]:
    """What is asked at these times."""
    mixes = workload.mixes()
    ends_s = list(accumulate(phase.duration_s for phase in workload.phases or ()))
    for index, time_s in enumerate(times_s):
        number = bisect_right(ends_s, time_s % ends_s[-1]) if ends_s else 0
        yield multimodal.request(mixes[number], workload.seed, index)
