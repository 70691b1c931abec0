"""Which runs a reproduction is made of: the experiments of a folder of scenarios.

Every run is made under each set of knobs: ``untuned``, the defaults of costs and of engines, and
``fitted``, what ``fitted.yaml`` of the folder says. Where systems are compared, each of them runs
at its other topologies as well: untuned, with the first seed alone.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from easerve.config import ConfigError
from easerve.sim import scenario as scenarios
from easerve.sim.checks import check
from easerve.sim.scenario import Anchor, Experiment, Scenario

UNTUNED = "untuned"
FITTED = "fitted"
KNOB_SETS = (UNTUNED, FITTED)
KNOBS_FILE = "fitted.yaml"

Knobs = Mapping[str, Any]
"""Values by the path of the key, with dots."""


class Point(NamedTuple):
    """One run. ``study``: the name of its scenario's file; ``variant``: or topology, or ""."""

    study: str
    knobs: str
    variant: str
    system: str
    rate_per_s: float
    seed: int

    @property
    def series(self) -> str:
        """Its name but for rate and seed."""
        return " | ".join(self[:4])

    @property
    def key(self) -> str:
        return f"{self.series} | {self.rate_per_s:g} | {self.seed}"


def point(series: str, rate_per_s: float, seed: int) -> Point:
    """Raises ValueError."""
    study, knobs, variant, system = (part.strip() for part in series.split("|"))
    return Point(study, knobs, variant, system, rate_per_s, seed)


@dataclass(frozen=True)
class Study:
    """A scenario file with an experiment. ``content``: all it says, its bases' too."""

    name: str
    folder: Path
    content: Mapping[str, Any]
    scenario: Scenario
    knobs: Mapping[str, Knobs]
    """By the name of the set."""

    @property
    def experiment(self) -> Experiment:
        assert self.scenario.experiment is not None
        return self.scenario.experiment

    @property
    def variants(self) -> Sequence[str]:
        """The scenario as it is comes first."""
        return ["", *self.experiment.all_variants]

    @property
    def is_comparison(self) -> bool:
        """Of systems, not of variants of one."""
        return len(self.experiment.systems) > 2

    @property
    def topologies(self) -> Sequence[str]:
        """Those that are run; a scenario that lies on a comparison has its topologies too."""
        return list(self.experiment.topologies) if self.is_comparison else []

    @property
    def rates_per_s(self) -> Sequence[float]:
        return self.experiment.rates_per_s

    @property
    def seeds(self) -> Sequence[int]:
        return self.experiment.seeds

    @cached_property
    def _built(self) -> dict[tuple[str, str], Scenario]:
        return {}

    @cached_property
    def _changed(self) -> dict[str, Sequence[str]]:
        return {}

    def at(self, knobs: str, variant: str) -> Scenario:
        """Under a set of knobs; a variant or topology lies on top. Raises ConfigError."""
        if (knobs, variant) not in self._built:
            changes = [self.knobs[knobs], self.experiment.changes[variant] if variant else {}]
            self._built[knobs, variant] = self.changed(changes, f"{knobs} {variant}".strip())
        return self._built[knobs, variant]

    def changed(self, changes: Iterable[Knobs], what: str) -> Scenario:
        """With changes, one after the other. Raises ConfigError."""
        content = self.content
        for change in changes:
            content = scenarios.laid(content, change)
        return scenarios.build(content, f"{self.name}, {what}")

    def systems(self, variant: str) -> Sequence[str]:
        """Those of the experiment to which a variant or topology makes a difference."""
        if variant not in self._changed:
            plain, varied = self.at(UNTUNED, ""), self.at(UNTUNED, variant)
            self._changed[variant] = [
                name
                for name in self.experiment.systems
                if not variant or settings(varied, name) != settings(plain, name)
            ]
        return self._changed[variant]

    @cached_property
    def _alike(self) -> dict[str, Mapping[str, Sequence[str]]]:
        return {}

    def alike(self, system: str) -> Mapping[str, Sequence[str]]:
        """Variants that change a system, by the first of those with which it runs alike.

        Not a grid's.
        """
        if system not in self._alike:
            found: dict[str, list[str]] = {}
            for variant in self.experiment.variants:
                if system in self.systems(variant):
                    key = settings(self.at(UNTUNED, variant), system)
                    found.setdefault(key, []).append(variant)
            self._alike[system] = {names[0]: names for names in found.values()}
        return self._alike[system]

    @property
    def knob_sets(self) -> Sequence[str]:
        """A grid, which is a search by hand, is of the untuned model alone."""
        return (UNTUNED,) if self.experiment.grid else KNOB_SETS

    def digest(self) -> str:
        """Of what its file and its bases say that its runs depend on."""
        shown = {key: self.content[key] for key in self.content if key not in ("title", "anchors")}
        unused = ["implied", "origins", *([] if self.is_comparison else ["topologies"])]
        shown["experiment"] = {**shown["experiment"], **dict.fromkeys(unused)}
        text = json.dumps(shown, sort_keys=True, default=str).replace(f"{self.folder}/", "")
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings(scenario: Scenario, system: str) -> str:
    """All that decides what a system does in a scenario, as text."""
    shared = {"title", "system", "systems", "experiment", "anchors"}
    return "\n".join(
        [scenario.model_dump_json(exclude=shared), system, repr(scenario.configs[system])]
    )


def read(folder: Path, knobs: Knobs, names: Sequence[str] = ()) -> list[Study]:
    """The studies of a folder, those named, or all. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder of scenarios")
    paths = {path.stem: path for path in sorted(folder.glob("*.yaml")) if path.name != KNOBS_FILE}
    for name in names:
        if name not in paths:
            known = ", ".join(paths) or "none"
            raise ConfigError(f"{folder} has no scenario {name!r}; there are: {known}")
    chosen = {name: paths[name] for name in (dict.fromkeys(names) if names else paths)}
    found = [_read(name, path, knobs) for name, path in chosen.items()]
    studies = [study for study in found if study.scenario.experiment is not None]
    if not studies:
        raise ConfigError(f"{folder}: no scenario has an experiment: {', '.join(chosen) or 'none'}")
    return studies


def _read(name: str, path: Path, knobs: Knobs) -> Study:
    scenario = scenarios.read(path)
    check(scenario)
    content = scenarios.read_content(path)
    return Study(name, path.parent, content, scenario, {UNTUNED: {}, FITTED: knobs})


def points(study: Study) -> Iterator[Point]:
    """Every run of an experiment, under each set of knobs, and those at other topologies."""
    for knobs in study.knob_sets:
        for variant in study.variants:
            for system in study.systems(variant):
                for rate_per_s in study.rates_per_s:
                    for seed in study.seeds:
                        yield Point(study.name, knobs, variant, system, rate_per_s, seed)
    for topology in study.topologies:
        for system in study.systems(topology):
            for rate_per_s in study.rates_per_s:
                yield Point(study.name, UNTUNED, topology, system, rate_per_s, study.seeds[0])


def quick_points(study: Study, knob_sets: Sequence[str] = KNOB_SETS) -> Iterator[Point]:
    """What the anchors of a study need, with its first seed."""
    seen = set()
    for knobs in knob_sets:
        for anchor in study.scenario.anchors:
            for side in sides(anchor):
                for rate_per_s in rates(study, anchor):
                    variant = effective(study, side)
                    made = Point(
                        study.name, knobs, variant, side.system, rate_per_s, study.seeds[0]
                    )
                    if made not in seen:
                        seen.add(made)
                        yield made


class Side(NamedTuple):
    """What an anchor is of, or what it is divided by."""

    system: str
    variant: str


def sides(anchor: Anchor) -> list[Side]:
    own = Side(anchor.system, anchor.variant or "")
    if anchor.over is None:
        return [own]
    return [own, Side(anchor.over.system or anchor.system, anchor.over.variant or "")]


def rates(study: Study, anchor: Anchor) -> Sequence[float]:
    return study.rates_per_s if anchor.rate_per_s is None else [anchor.rate_per_s]


def effective(study: Study, side: Side) -> str:
    """The variant under which runs of this system are kept: "" if it changes nothing for it."""
    return side.variant if side.system in study.systems(side.variant) else ""
