"""What has to be known of a model before an engine starts: its architecture and its weights.

Read from the model's folder without vLLM or torch. A model that is not a folder is a hub name;
the engines load it, and only what its folder would have told is unknown here.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from easerve.config import ConfigError

# Their placeholders are not one run of equal tokens, which tokens-in requests cannot say
# (vllm 0.32, entrypoints/scale_out/token_in_token_out/protocol.py, PlaceholderRangeInfo).
SPARSE_PLACEHOLDERS = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternS1ForConditionalGeneration",
        "MiniCPMV",
        "Mistral3ForConditionalGeneration",
        "MllamaForConditionalGeneration",
        "MolmoForCausalLM",
        "PaliGemmaForConditionalGeneration",
        "PixtralForConditionalGeneration",
    }
)
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

    architecture: str | None = None
    model_type: str | None = None
    encoder_bytes: int | None = None
    language_bytes: int | None = None
    kv_bytes_per_token: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def inspect(model: str) -> ModelInfo:
    """Read a model's folder. Raises ConfigError for a model that cannot be served."""
    folder = Path(model)
    if not folder.is_dir():
        looks_like_path = model.startswith((".", "/", "~")) or model.count("/") != 1
        if looks_like_path:
            raise ConfigError(f"model {model!r}: no such folder, and not a hub name (owner/name)")
        return ModelInfo()
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {model!r}: config.json: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model {model!r}: config.json: expected a mapping")
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is None:
        raise ConfigError(f"model {model!r}: config.json names no architecture")
    if architecture in SPARSE_PLACEHOLDERS:
        raise ConfigError(
            f"model {model!r}: {architecture} mixes text into its media placeholders, which "
            "tokens-in requests cannot express; it cannot be served by separate stages"
        )
    encoder, language = _weight_bytes(folder)
    return ModelInfo(
        architecture,
        config.get("model_type"),
        encoder,
        language,
        _kv_bytes_per_token(config),
        config,
    )


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
