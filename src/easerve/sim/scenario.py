"""A scenario file: YAML -> one frozen, validated tree that says what is simulated.

A file may lie on another (``base``): what it says is laid on that, section by section. Names of
files are relative to the file that names them. An error names the file, the path of the key and
what would be legal.
"""

import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, create_model, model_validator

from easerve import goodput
from easerve.config import ConfigError, Positive, Seconds, Section, explain
from easerve.costs import hardware, models
from easerve.costs.build import Knobs
from easerve.costs.models import ModelSpec
from easerve.costs.tokens import media
from easerve.sim.config import SECTIONS, EaserveSystem, SystemConfig
from easerve.sim.load import Workload
from easerve.sim.overlay import laid as laid
from easerve.sim.overlay import read_content as read_content

OWN_SLO = "own"
"""The name of the objective that a scenario gives itself, beside the tiers."""


class CostSource(Section):
    """Where seconds come from; ``profile``: a file of ``easerve profile``, for that source."""

    source: Literal["measured", "roofline", "profile"] = "measured"
    profile: str | None = None
    knobs: Knobs = Knobs()

    @model_validator(mode="after")
    def _profile_has_a_file(self) -> Self:
        if (self.source == "profile") is (self.profile is None):
            raise ValueError("source: profile and the file profile: give both or neither")
        return self


class Promise(Section):
    """Service level objectives.

    ``ttft_ref_s`` and ``tpot_ref_s``: of a request that has the system to itself; they make the
    tiers S1 to S5. ``ttft`` and ``tpot``, as in ``2s`` and ``80ms``: an objective besides.
    """

    ttft_ref_s: Seconds | None = None
    tpot_ref_s: Seconds | None = None
    ttft: str | None = None
    tpot: str | None = None

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if (self.ttft_ref_s is None) is not (self.tpot_ref_s is None):
            raise ValueError("ttft_ref_s and tpot_ref_s: give both or neither")
        self.slos()
        return self

    def slos(self) -> Mapping[str, goodput.Slo]:
        """By the name of the tier, strict to loose; the explicit one is ``own``."""
        found = {}
        if self.ttft_ref_s is not None and self.tpot_ref_s is not None:
            references = (self.ttft_ref_s, self.tpot_ref_s)
            found = {name: goodput.tier(name, *references) for name in goodput.TIERS}
        given = {"ttft": self.ttft, "tpot": self.tpot}
        if text := ",".join(f"{name}={limit}" for name, limit in given.items() if limit):
            found[OWN_SLO] = goodput.parse_slo(text)
        return found


class Failure(Section):
    """A worker of system easerve ends at ``at_s``; None: it does not come back."""

    worker: str
    at_s: Annotated[float, Field(ge=0, le=1e9)]
    back_s: Seconds | None = None

    @model_validator(mode="after")
    def _comes_back_later(self) -> Self:
        if self.back_s is not None and self.back_s <= self.at_s:
            raise ValueError(f"back_s {self.back_s:g} must be after at_s {self.at_s:g}")
        return self

    def overlaps(self, other: "Failure") -> bool:
        """Whether there is a time at which both are under way."""
        ends_s = [math.inf if each.back_s is None else each.back_s for each in (self, other)]
        return max(self.at_s, other.at_s) < min(ends_s)


Changes = Mapping[str, Mapping[str, Any]]
"""By name: values by the path of the key, with dots."""


class Experiment(Section):
    """What ``easerve reproduce`` runs: each system at each rate with each seed, and the variants.

    ``grid``: lists of variants; each of a list goes with each of all others, and is named so.
    ``topologies``: other engines on the same GPUs, of which each system may choose; one entry may
    be of several systems. ``origins``: by system, where its engines as they are come from; those of
    others are assumed. ``implied``: what of the scenario was inferred from the published results,
    so that coming to them is no check.
    """

    systems: Annotated[tuple[str, ...], Field(min_length=1)]
    rates_per_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (1, 2, 3)
    variants: Changes = Field(default_factory=dict)
    grid: tuple[Changes, ...] = ()
    topologies: Changes = Field(default_factory=dict)
    origins: Mapping[str, str] = Field(default_factory=dict)
    implied: str | None = None

    @property
    def all_variants(self) -> Changes:
        """Those of the grid as well, named as in ``e2-p2-d4 batch-8``."""
        points = product(*(each.items() for each in self.grid)) if self.grid else ()
        crossed = {
            " ".join(name for name, _ in point): dict(ChainMap(*(dict(each) for _, each in point)))
            for point in points
        }
        return {**self.variants, **crossed}

    @property
    def changes(self) -> Changes:
        """All that has a name: variants and topologies."""
        return {**self.all_variants, **self.topologies}

    @model_validator(mode="after")
    def _topologies_are_of_systems(self) -> Self:
        for name, change in self.topologies.items():
            if name in self.all_variants:
                raise ValueError(f"topologies.{name}: there is a variant of this name")
            for path in change:
                if not path.startswith("systems."):
                    raise ValueError(
                        f"topologies.{name}: {path!r}: only keys below systems may change"
                    )
        return self


METRICS = (
    "throughput_per_s",
    *(f"{name}.{part}" for name in ("ttft_s", "tpot_s") for part in ("mean", "p50", "p99")),
    *(
        f"{name}.{tier}"
        for name in ("goodput_per_s", "attainment")
        for tier in (*goodput.TIERS, OWN_SLO)
    ),
)


class Rival(Section):
    """What a figure is divided by: that of another system or variant, at the same rate.

    ``system`` None: the anchor's; ``variant`` None: the scenario as it is.
    """

    system: str | None = None
    variant: str | None = None


class Anchor(Section):
    """A published figure.

    ``rate_per_s`` None: the best of the experiment's rates. ``variant``: what of the experiment it
    is compared with; None: as is. ``over``: the figure is a ratio to that one. ``note``: why a
    simulation does not come to it.
    """

    system: str
    rate_per_s: Seconds | None = None
    metric: str
    published: float
    source: Annotated[str, Field(min_length=1)]
    variant: str | None = None
    over: Rival | None = None
    note: str | None = None

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.metric not in METRICS:
            raise ValueError(f"metric {self.metric!r} is none of {', '.join(METRICS)}")
        return self


FIELDS: dict[str, Any] = {name: (section | None, None) for name, section in SECTIONS.items()}
Systems = create_model("Systems", __base__=Section, **FIELDS)
"""A section of systems by name; not all of these names are Python's."""


class Scenario(Section):
    """What is simulated: a model on so many devices under a load, and the systems compared."""

    title: Annotated[str, Field(min_length=1)]
    model: str
    """A name in costs/models, or a file."""
    hardware: str
    """A name in costs/hardware, or a file."""
    num_gpus: Positive
    costs: CostSource = CostSource()
    workload: Workload
    slo: Promise = Promise()
    system: str = "easerve"
    """Of those under ``systems``, the one that is simulated unless another is asked for."""
    systems: Systems  # type: ignore[valid-type]
    experiment: Experiment | None = None
    anchors: tuple[Anchor, ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def configs(self) -> Mapping[str, SystemConfig]:
        """The systems that have a section, by name."""
        found = {name: getattr(self.systems, name) for name in SECTIONS}
        return {name: config for name, config in found.items() if config is not None}

    def at(self, rate_per_s: float | None = None, seed: int | None = None) -> Self:
        """The same under another load; None: as it is."""
        asked = {"rate_per_s": rate_per_s, "seed": seed}
        update = {name: value for name, value in asked.items() if value is not None}
        workload = self.workload.model_copy(update=update)
        return self.model_copy(update={"workload": workload})

    @model_validator(mode="after")
    def _systems_fit(self) -> Self:
        _known("system", [self.system], self.configs)
        for name, config in self.configs.items():
            if config.num_gpus > self.num_gpus:
                raise ValueError(
                    f"systems.{name} has engines on {config.num_gpus} GPUs, but num_gpus is "
                    f"{self.num_gpus}"
                )
        return self

    @model_validator(mode="after")
    def _experiment_and_anchors_fit(self) -> Self:
        variants: Mapping[str, Any] = {}
        if self.experiment is not None:
            _known("experiment.systems", self.experiment.systems, self.configs)
            _known("experiment.origins", list(self.experiment.origins), self.configs)
            variants = self.experiment.all_variants
        for number, anchor in enumerate(self.anchors):
            _known(f"anchors.{number}.system", [anchor.system], self.configs)
            if anchor.variant is not None:
                _known(f"anchors.{number}.variant", [anchor.variant], variants)
            if anchor.over is not None and anchor.over.system is not None:
                _known(f"anchors.{number}.over.system", [anchor.over.system], self.configs)
            if anchor.over is not None and anchor.over.variant is not None:
                _known(f"anchors.{number}.over.variant", [anchor.over.variant], variants)
            name, _, tier = anchor.metric.partition(".")
            if name in ("goodput_per_s", "attainment"):
                _known(f"anchors.{number}.metric: the objective", [tier], self.slo.slos())
        return self

    @model_validator(mode="after")
    def _failures_are_of_workers(self) -> Self:
        config = self.configs.get("easerve")
        workers = config.workers if isinstance(config, EaserveSystem) else ()
        for number, failure in enumerate(self.failures):
            _known(f"failures.{number}.worker", [failure.worker], workers)
            for before in self.failures[:number]:
                if before.worker == failure.worker and before.overlaps(failure):
                    raise ValueError(
                        f"failures.{number}: {failure.worker} fails while it is down already"
                    )
        return self


def _known(path: str, given: Sequence[str], known: Mapping[str, Any] | Sequence[str]) -> None:
    for name in given:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "there is none"
            raise ValueError(f"{path}: {name!r} is not there; {there}")


def read(path: Path, variant: str | None = None, over: Sequence[str] = ()) -> Scenario:
    """The scenario of a file, with a variant of its experiment and with changes (``key=value``).

    Everything that the file says is checked, every variant as well. A topology is asked for by its
    name, as a variant is. Raises ConfigError.
    """
    content = read_content(path)
    scenario = build(content, str(path))
    experiment = scenario.experiment
    variants = experiment.changes if experiment else {}
    for name, change in variants.items():
        kind = "topology" if experiment and name in experiment.topologies else "variant"
        source = f"{path}: {kind} {name}"
        varied = _validated(laid(content, change), source)
        if _parts(varied) != _parts(scenario):
            _check_parts(varied, source)
    if variant is not None:
        if variant not in variants:
            known = ", ".join(variants) or "none"
            raise ConfigError(f"{path}: experiment has no variant {variant!r}; there are: {known}")
        content = laid(content, variants[variant])
    if over:
        content = laid(content, dict(map(key_value, over)))
    if variant is None and not over:
        return scenario
    changed = [f"variant {variant}"] if variant else []
    return build(content, f"{path}, {', '.join([*changed, *(f'--set {each}' for each in over)])}")


def key_value(text: str) -> tuple[str, Any]:
    """``workload.num_requests=100`` -> the path of a key and its value. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text!r} is not like workload.num_requests=100")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: not YAML: {error}") from None


def build(content: Mapping[str, Any], source: str) -> Scenario:
    """Validate; ``source`` names where the content came from. Raises ConfigError."""
    scenario = _validated(content, source)
    _check_parts(scenario, source)
    return scenario


def _validated(content: Mapping[str, Any], source: str) -> Scenario:
    try:
        return Scenario.model_validate(content)
    except ValidationError as error:
        lines = [f"{source}: {line}" for line in explain(error, Scenario)]
        raise ConfigError("\n".join(lines)) from None


def _parts(scenario: Scenario) -> tuple[object, ...]:
    """What is checked against other files."""
    return scenario.model, scenario.hardware, scenario.workload


def _check_parts(scenario: Scenario, source: str) -> None:
    try:
        hardware.read(scenario.hardware)
        _check_media(scenario.workload, models.read(scenario.model))
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _check_media(workload: Workload, model: ModelSpec) -> None:
    for item in (item for mix in workload.mixes() for item in mix.items):
        content = item.draw(Random(0))  # noqa: S311
        try:
            if content is not None:
                media(model, content)
        except ValueError as error:
            raise ConfigError(f"workload: {error}") from None
