"""The winner as a deployment file: what ``easerve serve`` takes, with where it comes from above.

Of a deployment file the winner's changes are laid on it, and its own comments are lost. Of a
scenario the engines and the policy of its system are taken, without what only the simulator knows.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import yaml

from easerve import config
from easerve.config import ConfigError, Deployment
from easerve.costs import hardware, models
from easerve.search.overlay import coherent, laid
from easerve.search.space import Value
from easerve.sim.config import EaserveSystem
from easerve.sim.scenario import Scenario

WIDTH, DAY_S = 98, 86_400
STAGES = ("encode", "prefill", "decode")
PER_LOAD = ("offload_seed",)
"""Of a policy: what belongs to a run."""


def of_deployment(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a deployment file with a configuration's changes. Raises ConfigError."""
    return _checked(_without_stale(laid(content, changes)), "the winner")


def of_scenario(scenario: Scenario, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The scenario's own system, laid on ``base``, the content of a deployment file; None: on
    nothing but its model. Raises ConfigError for a model that nobody says where to get.
    """
    system = scenario.configs["easerve"]
    assert isinstance(system, EaserveSystem), "the section of that name"
    base = _base(scenario) if base is None else base
    content: dict[str, Any] = {}
    sections = (*STAGES, *(["local_prefill"] if system.local_prefill else []))
    for name in sections:
        content[name] = _section(getattr(system, name), name)
    if system.local_prefill is None:
        content["local_prefill"] = None
    content["partition"] = None if system.partition is None else system.partition.model_dump()
    policy = system.policy.model_dump(exclude_unset=True)
    if system.policy.max_queue_s > DAY_S:
        del policy["max_queue_s"]  # for runs that refuse nobody
    content["policy"] = {key: policy[key] for key in policy if key not in PER_LOAD}
    merged = config.merge(base, content)
    if merged.get("device", "cpu") == "cpu":
        merged = {name: _on_cpu(each) for name, each in merged.items()}
    return _checked(_without_stale(merged), scenario.title)


def _base(scenario: Scenario) -> dict[str, Any]:
    repository = models.read(scenario.model).repository
    if repository is None:
        raise ConfigError(
            f"model {scenario.model!r} is in no repository: name a deployment file of it with "
            "--deployment, on which the winner is laid"
        )
    is_gpu = hardware.read(scenario.hardware).kind == "gpu"
    return {"model": repository, "device": "cuda" if is_gpu else "cpu"}


def _section(section: config.Section, name: str) -> dict[str, Any]:
    """What its author or the search gave of it, of the keys that a deployment has."""
    kind = config.LocalPrefill if name == "local_prefill" else config.StageSection
    given = section.model_dump(exclude_unset=True)
    return {key: each for key, each in given.items() if key in kind.model_fields}


def _on_cpu(section: Any) -> Any:
    """One device is all there is."""
    if not isinstance(section, Mapping):
        return section
    return {key: each for key, each in section.items() if key not in config.GPU_KEYS}


def _without_stale(content: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that are not there, and knobs of a partition that is not there."""
    return coherent({key: each for key, each in content.items() if each is not None})


def _checked(content: dict[str, Any], source: str) -> dict[str, Any]:
    config.build(content, source)
    return content


def text(content: Mapping[str, Any], remarks: Iterable[str]) -> str:
    """A YAML file; every remark is a comment of its own above it."""
    comments = [line for each in remarks for line in wrap(each, WIDTH) or [""]]
    head = "".join(f"# {line}".rstrip() + "\n" for line in comments)
    return f"{head}\n{yaml.safe_dump(_plain(content), sort_keys=False, width=WIDTH)}"


def _plain(value: Any) -> Any:
    """As YAML has it: no tuples."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


def write(path: Path, content: Mapping[str, Any], remarks: Iterable[str]) -> Deployment:
    """The file, and what it says. Names of files in it are seen from it. Raises ConfigError."""
    located = dict(content)
    for *sections, key in (name.split(".") for name in config.FILES):
        located = _located(located, sections, key, path.parent)
    path.write_text(text(located, remarks))
    return config.build(config.read_file(path), str(path))


def _located(
    content: dict[str, Any], sections: Sequence[str], key: str, folder: Path
) -> dict[str, Any]:
    """With the name of a file or folder that is there as it is seen from ``folder``."""
    if sections:
        inner = content.get(sections[0])
        if not isinstance(inner, dict):
            return content
        return content | {sections[0]: _located(inner, sections[1:], key, folder)}
    name = content.get(key)
    if not isinstance(name, str) or not Path(name).exists():
        return content
    return content | {key: os.path.relpath(name, folder)}


def shown(values: Iterable[tuple[str, Value]]) -> str:
    """As in ``remote_share 0.55, max_batch_items 8``."""
    return ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in values)
