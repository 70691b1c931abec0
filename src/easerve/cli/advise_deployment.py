"""A scenario of a deployment file, so that what is served on engines can be simulated first.

Costs are those of a model that they know; the device is named, or is the one that a profile was
measured on. What is asked and what is promised no deployment file says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easerve import config
from easerve.config import ConfigError, Deployment
from easerve.costs import hardware, models
from easerve.costs import profile as profiles
from easerve.costs.hardware import Hardware
from easerve.costs.models import ModelSpec
from easerve.engines.vllm import models as folders
from easerve.search.planned import text_config
from easerve.workload.multimodal import PRESETS

OF_SCENARIOS = ("base", "workload", "systems", "hardware", "costs", "num_gpus")
"""Keys that no deployment file has."""
STAGES = ("encode", "prefill", "decode")
TO_ADD = "or give the path of a YAML file like those in src/easerve/costs/models (docs/costs.md)"


@dataclass(frozen=True, slots=True)
class Given:
    """What a deployment file does not say; None: not given. ``model``, ``hardware``: names or files
    of ``costs``; ``preset``: of a workload.
    """

    model: str | None = None
    hardware: str | None = None
    profile: Path | None = None
    preset: str | None = None
    num_gpus: int | None = None

    @property
    def names(self) -> list[str]:
        """Of the options that were given."""
        named = {name: getattr(self, name) for name in self.__slots__}
        return [f"--{name.replace('_', '-')}" for name, each in named.items() if each is not None]


def is_deployment(path: Path) -> bool:
    """Rather than a scenario. Raises ConfigError."""
    content = config.read_yaml(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a scenario or a deployment file")
    return not any(key in content for key in OF_SCENARIOS)


def content_of(path: Path, given: Given) -> dict[str, Any]:
    """Of a scenario, whose workload may lack what is asked. Raises ConfigError."""
    deployment = config.build(config.read_file(path), str(path))
    model = given.model or _model_of(deployment.model)
    spec = models.read(model)
    profile = given.profile or _own_profile(deployment)
    name = given.hardware or _hardware_of(deployment, profile)
    device = hardware.read(name)
    if (device.kind == "cpu") is not (deployment.device == "cpu"):
        raise ConfigError(f"{path}: device: {deployment.device}, but {name} is a {device.kind}")
    return {
        "title": f"{spec.title}, {path.name}, {device.title}",
        "model": model,
        "hardware": name,
        "num_gpus": given.num_gpus or _num_devices(deployment),
        "costs": _costs(device, profile),
        "workload": _workload(given.preset),
        "systems": {"easerve": _system(deployment, spec, profile is not None)},
    }


def _workload(preset: str | None) -> dict[str, Any]:
    """The rate is any: a verdict is over a ladder of rates."""
    content: dict[str, Any] = {"rate_per_s": 1.0, "rescaled": True, "num_requests": 500}
    return content if preset is None else {**content, "preset": preset}


def check_asked(content: Mapping[str, Any]) -> None:
    """A deployment does not say what requests ask. Raises ConfigError."""
    workload = content.get("workload") or {}
    if not workload.get("preset") and not workload.get("items"):
        raise ConfigError(
            f"what do requests ask? --preset, one of {', '.join(PRESETS)}; or "
            "--set 'workload.items=[{image: 640x480}]' and --set workload.text_tokens=200"
        )


def _model_of(name: str) -> str:
    """The model of costs that a folder or a repository is. Raises ConfigError."""
    info, text = folders.read(name), text_config(name)
    for known in models.names():
        spec = models.read(known)
        if spec.repository == name:
            return known
        if text and info.architecture == spec.architecture and _is_like(text, spec):
            return known
    known_names = ", ".join(models.names())
    what = f" ({info.architecture})" if info.architecture else ""
    raise ConfigError(
        f"model {name!r}{what}: what it costs is not known; known are {known_names}: name one with "
        f"--model, {TO_ADD}"
    )


def _is_like(text: Mapping[str, Any], spec: ModelSpec) -> bool:
    """Of its size; a key that config.json leaves out says nothing."""
    sizes = {
        "hidden_size": spec.language.hidden,
        "num_hidden_layers": spec.language.num_layers,
        "intermediate_size": spec.language.intermediate,
    }
    return all(text.get(key, size) == size for key, size in sizes.items()) and bool(
        sizes.keys() & text.keys()
    )


def _own_profile(deployment: Deployment) -> Path | None:
    partition = deployment.partition
    return None if partition is None or partition.profile is None else Path(partition.profile)


def _hardware_of(deployment: Deployment, profile: Path | None) -> str:
    """The one that a profile of a CPU was measured on. Raises ConfigError."""
    known = {name: hardware.read(name) for name in hardware.names()}
    named = ", ".join(known)
    if profile is None:
        raise ConfigError(
            f"which device? --hardware, one of {named}, or the path of a YAML file; or --profile, "
            "a file of easerve profile"
        )
    key = profiles.read(profile).key
    for name, device in known.items():
        if device.kind == deployment.device == "cpu" and device.num_units == key.units:
            return name
    raise ConfigError(
        f"{profile}: {key.device} with {key.units} units is none of {named}: name a device like it "
        "with --hardware, or the path of a YAML file"
    )


def _costs(device: Hardware, profile: Path | None) -> dict[str, Any]:
    if profile is not None:
        return {"source": "profile", "profile": str(profile)}
    return {"source": "roofline" if device.kernels is None else "measured"}


def _num_devices(deployment: Deployment) -> int:
    """Of all stages; local prefill has those of the encoders."""
    sections = [getattr(deployment, stage) for stage in STAGES]
    return sum(each.replicas * each.tensor_parallel_size for each in sections)


def _system(deployment: Deployment, spec: ModelSpec, is_profile: bool) -> dict[str, Any]:
    """The keys that a simulated system has as well; how many engines there are is tried."""
    host = {"dispatch_s": 0, "item_s": 0} if is_profile else {}  # they are in the profile
    policy = deployment.policy.model_dump(exclude_unset=True)
    kept = {key: each for key, each in policy.items() if key != "remote_share"}
    if deployment.partition is None or deployment.device == "cpu":
        kept = {key: kept[key] for key in kept if key not in config.PARTITION_KNOBS}
    content: dict[str, Any] = {
        "encode": host,
        "prefill": _engines(deployment.prefill, spec),
        "decode": _engines(deployment.decode, spec),
        "policy": kept,
    }
    if is_profile:
        content["prepare_s"] = 0
    return content


def _engines(section: config.EngineSection, spec: ModelSpec) -> dict[str, Any]:
    found: dict[str, Any] = {"max_num_seqs": section.max_num_seqs}
    if section.max_num_batched_tokens is not None:
        found["max_num_batched_tokens"] = section.max_num_batched_tokens
    if section.kv_cache_memory is not None:
        found["kv_cache_tokens"] = section.kv_cache_memory // spec.language.kv_bytes_per_token
    return found
