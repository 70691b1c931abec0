"""What a profile says of the stages of a deployment: one engine of each, no other beside it.

An engine is two processes, an API server and a core, whose main thread runs the steps. ``api_s``
are CPU seconds of the API server. ``engine_s`` is how long the work keeps the core busy: CPU
seconds of its main thread where the model runs on the CPU, else by the engine's own clock. Both
are means, of a call unless it says otherwise. ``wall_s`` are seconds of every call, as whoever
made it saw them.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import Field, model_validator

from easerve.config import Positive, Seconds, Section

Mean = Annotated[float, Field(ge=0, le=1e9)]
Times = Annotated[tuple[Seconds, ...], Field(min_length=1)]


class Renders(Section):
    """Prompts with a picture, rendered by an encoder's API server. No engine takes part."""

    wall_s: Times
    api_s: Mean


class EncodeCalls(Section):
    """Of ``batch`` new items, all of the profile's size."""

    batch: Positive
    wall_s: Times
    engine_s: Mean
    api_s: Mean


class PrefillCalls(Section):
    """Of one prompt of ``tokens``."""

    tokens: Positive
    wall_s: Times
    engine_s: Mean
    api_s: Mean


class DecodeSteps(Section):
    """While just so many ``sequences`` run, with ``context`` tokens each in the mean.

    ``step_s``: of each run the mean time between two tokens, as they come. ``engine_s`` and
    ``api_s`` are of a step.
    """

    sequences: Positive
    context: Positive
    step_s: Times
    engine_s: Mean
    api_s: Mean


class Pulls(Section):
    """Answers of one token, to prompts of ``tokens``: the KV cache is pulled, then one step.

    ``pull_s``: until decode could begin that step, by its engine's clock. ``handover_s``: what
    keeps prefill's core busy between its answer and the end of the pull.
    """

    tokens: Positive
    wall_s: Times
    engine_s: Mean
    api_s: Mean
    pull_s: Mean
    handover_s: Mean


class Pushes(Section):
    """Bundles of ``items`` embeddings, ``tokens`` in all: from the push to their use."""

    items: Positive
    tokens: Positive
    usable_s: Times


class Load(Section):
    """Requests of one picture, over HTTP, in equal distances. ``tokens``: of each answer.

    ``cpu_s``: by process, from the first request to the last answer.
    """

    rate_per_s: Seconds
    requests: Positive
    tokens: Positive
    wall_s: Seconds
    cpu_s: dict[str, Mean]


class Stages(Section):
    """``idle_cores``: that each process keeps busy while nothing is asked, as far as it does.

    ``crowding``: by what share prefill's core needs more CPU seconds for the same work while the
    encoder has work without end.
    """

    render: Renders
    encode: Annotated[tuple[EncodeCalls, ...], Field(min_length=1)]
    prefill: Annotated[tuple[PrefillCalls, ...], Field(min_length=1)]
    decode: Annotated[tuple[DecodeSteps, ...], Field(min_length=1)]
    pulls: Annotated[tuple[Pulls, ...], Field(min_length=1)]
    pushes: Annotated[tuple[Pushes, ...], Field(min_length=1)]
    loads: Annotated[tuple[Load, ...], Field(min_length=1)]
    idle_cores: dict[str, Mean]
    crowding: Mean

    @model_validator(mode="after")
    def _one_place_for_each_size(self) -> Self:
        _no_twins("encode", "batch", (each.batch for each in self.encode))
        _no_twins("prefill", "tokens", (each.tokens for each in self.prefill))
        sizes = ((each.sequences, each.context) for each in self.decode)
        _no_twins("decode", "sequences, context", sizes)
        _no_twins("pulls", "tokens", (each.tokens for each in self.pulls))
        _no_twins("pushes", "tokens", (each.tokens for each in self.pushes))
        return self


def _no_twins(section: str, names: str, sizes: Iterable[object]) -> None:
    for size, times in Counter(sizes).items():
        if times > 1:
            raise ValueError(f"{section}: {names} {size} is there {times} times")
