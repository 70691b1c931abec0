"""What ``easerve profile`` has measured, as a YAML file: an encoder's latency, sample by sample, by
compute units and batch; and the work of each stage (``stages``, which older files lack).

A percentile is by nearest rank: the smallest value that so many percent of the values do not
exceed. Of 20 runs the p95 is the 19th.
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import AwareDatetime, Field, ValidationError, model_validator

from easerve.config import ConfigError, Positive, Seconds, Section, read_yaml
from easerve.costs.stages import Stages

P50, P95 = 50, 95
HEAD = "# Written by easerve profile. Seconds are those of every run after the warm-ups.\n"
Text = Annotated[str, Field(min_length=1)]
Times = Annotated[tuple[Seconds, ...], Field(min_length=1)]


class Key(Section):
    """What the latencies of a profile hold for; of another they say nothing.

    ``device``: name of the GPU, or of the CPU. ``units``: SMs or cores of it that the two engines
    share. ``driver``: of a GPU. ``mode``: how the encoder runs its forwards.
    """

    device: Text
    units: Positive
    driver: Text | None = None
    torch: Text
    vllm: Text
    model: Text
    dtype: Text
    mode: Literal["eager"] = "eager"


class Runs(Section):
    """Forwards of one batch size on so many units, in the order in which they ran.

    ``contended``: while prefill was busy on the other units. ``forward_s``: in the encoder;
    ``wall_s``: of the call, with preprocessing. ``num_late``: forwards that began while a prefill
    step still held some of the units.
    """

    units: Positive
    batch: Positive
    contended: bool
    forward_s: Times
    wall_s: Times
    num_late: Annotated[int, Field(ge=0)] = 0

    @property
    def p95_s(self) -> float:
        return percentile(self.forward_s, P95)


class Peak(Section):
    """What the device can do with all its units: ``how`` it was measured."""

    flops_per_s: Annotated[float, Field(gt=0)]
    bytes_per_s: Annotated[float, Field(gt=0)]
    how: Text


class Capacity(Section):
    """Of an engine that has the device to itself, under load.

    ``decode_tokens_per_s``: with as many sequences as were measured at most.
    """

    encode_items_per_s: Annotated[float, Field(gt=0)]
    prefill_tokens_per_s: Annotated[float, Field(gt=0)]
    decode_tokens_per_s: Annotated[float, Field(gt=0)] | None = None


class Profile(Section):
    """``unit``: what compute units are. ``picture``: width and height, in pixels, of all items.

    ``partition``: the driver that divided the device. ``item_tokens``: embeddings of an item.
    ``others_cores``: that other processes kept busy meanwhile, in the mean. ``stages``: None in
    files of older versions.
    """

    made: AwareDatetime
    easerve: Text
    key: Key
    unit: Literal["SM", "core"]
    partition: Text
    picture: tuple[Positive, Positive]
    item_tokens: Positive
    others_cores: Annotated[float, Field(ge=0)]
    capacity: Capacity
    peak: Peak
    runs: Annotated[tuple[Runs, ...], Field(min_length=1)]
    stages: Stages | None = None

    @model_validator(mode="after")
    def _one_place_for_each_cell(self) -> Self:
        cells = Counter((runs.batch, runs.units, runs.contended) for runs in self.runs)
        (batch, units, _), times = cells.most_common(1)[0]
        if times > 1:
            raise ValueError(f"runs: batch {batch} on {units} units is there {times} times")
        return self

    def rows(self) -> tuple[tuple[int, tuple[tuple[int, float], ...]], ...]:
        """(batch, ((units, p95 of a forward in seconds), ...)) for each batch, both rising.

        Beside prefill, or alone where a batch was not measured so: on an undivided device.
        """
        beside = {runs.batch for runs in self.runs if runs.contended}
        latencies: dict[int, dict[int, float]] = {}
        for runs in sorted(self.runs, key=lambda runs: (runs.batch, runs.units)):
            if runs.contended is (runs.batch in beside):
                latencies.setdefault(runs.batch, {})[runs.units] = runs.p95_s
        return tuple((batch, tuple(row.items())) for batch, row in latencies.items())


def percentile(values: Sequence[float], percent: int) -> float:
    """By nearest rank."""
    return sorted(values)[max(1, ceil(percent * len(values) / 100)) - 1]


def mismatch(profile: Key, here: Key) -> str | None:
    """A sentence that names what differs; None: the profile holds here."""
    pairs = ((name, getattr(profile, name), getattr(here, name)) for name in Key.model_fields)
    differences = [f"{name} {made}, here {now}" for name, made, now in pairs if made != now]
    return f"the profile was made with {'; '.join(differences)}" if differences else None


def read(path: Path) -> Profile:
    """Raises ConfigError, which names the file and the key."""
    content = read_yaml(path)
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        places = ((".".join(map(str, issue["loc"])), issue["msg"]) for issue in error.errors())
        lines = [f"{path}: {place or 'a profile'}: {message}" for place, message in places]
        raise ConfigError("\n".join(lines)) from None


def write(profile: Profile, path: Path) -> None:
    """Whole or not at all; the folder is made. Raises ConfigError."""
    content = yaml.safe_dump(
        profile.model_dump(mode="json", exclude_defaults=True),
        sort_keys=False,
        default_flow_style=None,
        width=100,
    )
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(HEAD + content)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
