"""What has to be known of a model before an engine starts: its architecture and its weights.

Read from the model's folder, or from the hub's cache, without vLLM or torch. Of a hub model that
was never downloaded nothing is known until the engines have loaded it.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from easerve.config import ConfigError


class Capability(NamedTuple):
    """How an architecture is served by separate stages, or why it is not.

    ``media_at_prefill``: prefill gets the media, too. Tokens-in requests tell where a placeholder
    begins and how long it is (vllm 0.32, token_in_token_out/protocol.py, PlaceholderRangeInfo);
    which of its tokens stand for embeddings, where not all do, only the model's processor knows.
    """

    served: bool
    media_at_prefill: bool
    note: str


DENSE = "each placeholder token is an embedding"
SPARSE = "a placeholder holds other tokens, too"
MROPE = "M-RoPE: the grid of a picture is not passed on yet"
UNTRIED = "sparse placeholders; not compared with a plain engine yet"
# By architecture, and where it matters by the type of its vision tower. What is served was
# compared with an aggregated engine, token by token (tests/real).
CAPABILITIES: Mapping[str, Capability] = {
    "LlavaForConditionalGeneration": Capability(True, False, DENSE),
    "LlavaForConditionalGeneration/pixtral": Capability(True, True, SPARSE),
    "LlavaNextForConditionalGeneration": Capability(True, False, DENSE),
    "Gemma3ForConditionalGeneration": Capability(False, True, UNTRIED),
    "Idefics3ForConditionalGeneration": Capability(False, True, UNTRIED),
    "Mistral3ForConditionalGeneration": Capability(True, True, SPARSE),
    "PaliGemmaForConditionalGeneration": Capability(False, True, UNTRIED),
    "Qwen2VLForConditionalGeneration": Capability(False, False, MROPE),
    "Qwen2_5_VLForConditionalGeneration": Capability(False, False, MROPE),
    "Qwen3VLForConditionalGeneration": Capability(False, False, MROPE),
    "SmolVLMForConditionalGeneration": Capability(False, True, UNTRIED),
}
ENCODER_PREFIXES = (
    "audio_tower.",
    "image_newline",
    "model.image_newline",
    "model.multi_modal_projector.",
    "model.vision_tower.",
    "model.visual.",
    "multi_modal_projector.",
    "vision_tower.",
    "visual.",
)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """``encoder_bytes`` and ``language_bytes``: size of the stored weights; None when unknown."""

    capability: Capability | None = None
    architecture: str | None = None
    model_type: str | None = None
    encoder_bytes: int | None = None
    language_bytes: int | None = None
    kv_bytes_per_token: int | None = None

    @property
    def media_at_prefill(self) -> bool:
        return self.capability is not None and self.capability.media_at_prefill


def inspect(model: str) -> ModelInfo:
    """As ``read``; raises ConfigError also for a model that cannot be served."""
    info = read(model)
    if info.architecture is not None and not (info.capability and info.capability.served):
        served = sorted({name.partition("/")[0] for name, c in CAPABILITIES.items() if c.served})
        why = f" ({info.capability.note})" if info.capability else ""
        raise ConfigError(
            f"model {model!r}: {info.architecture} cannot be served by separate stages yet{why}; "
            f"what can: {', '.join(served)}"
        )
    return info


def read(model: str) -> ModelInfo:
    """Read a model's folder, or what the hub's cache on this machine has of it.

    Raises ConfigError for what is not a model's folder or name.
    """
    folder = Path(model)
    if folder.is_dir():
        file = folder / "config.json"
    elif model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise ConfigError(f"model {model!r}: no such folder, and not a hub name (owner/name)")
    elif (cached := _in_hub_cache(model)) is not None:
        file, folder = cached, cached.parent
    else:
        return ModelInfo()
    try:
        config = json.loads(file.read_text())
        architecture = next(iter(config.get("architectures") or ()), None)
        tower = (config.get("vision_config") or {}).get("model_type")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"model {model!r}: config.json: {error}") from None
    if not isinstance(architecture, str):
        raise ConfigError(f"model {model!r}: config.json names no architecture")
    capability = CAPABILITIES.get(f"{architecture}/{tower}") or CAPABILITIES.get(architecture)
    encoder, language = _weight_bytes(folder)
    per_token = _kv_bytes_per_token(config)
    model_type = config.get("model_type")
    return ModelInfo(capability, architecture, model_type, encoder, language, per_token)


def config_of(model: str) -> Mapping[str, Any]:
    """The model's config.json; empty for a hub model that was never downloaded."""
    folder = Path(model)
    file = folder / "config.json" if folder.is_dir() else _in_hub_cache(model)
    config: Mapping[str, Any] = {} if file is None else json.loads(file.read_text())
    return config


def _in_hub_cache(model: str) -> Path | None:
    """The configuration of a hub model, once something has downloaded it."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # comes with vLLM; refuses what is no model's name
        return None
    return Path(path) if isinstance(path, str) else None


def _weight_bytes(folder: Path) -> tuple[int | None, int | None]:
    """Bytes of the encoder (with its projector) and of the language model."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None, None
    totals = {True: 0, False: 0}
    for file in files:
        for name, num_bytes in _tensors(file):
            totals[name.startswith(ENCODER_PREFIXES)] += num_bytes
    return totals[True], totals[False]


def _tensors(file: Path) -> list[tuple[str, int]]:
    """Name and bytes of each tensor, from the file's header."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > file.stat().st_size:
                raise ValueError("cut off, or a Git LFS pointer")
            header = json.loads(stream.read(length))
        offsets = {name: t["data_offsets"] for name, t in header.items() if name != "__metadata__"}
        return [(name, end - start) for name, (start, end) in offsets.items()]
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: not a safetensors file ({error})") from None


def _kv_bytes_per_token(config: Mapping[str, Any], bytes_per_value: int = 2) -> int | None:
    """Keys and values of one token over all layers, in 16 bit."""
    text = config.get("text_config") or config
    try:
        heads = text.get("num_key_value_heads") or text["num_attention_heads"]
        size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        return int(2 * text["num_hidden_layers"] * heads * size * bytes_per_value)
    except KeyError:
        return None
