"""What has to be known of a model before an engine starts: its architecture and its weights.

Read from the model's folder, or from the hub's cache, without vLLM or torch. Of a hub model that
was never downloaded nothing is known until the engines have loaded it.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from easerve.config import ConfigError

# What was run and compared: placeholders are one run of equal tokens, which is all that tokens-in
# requests can say (vllm 0.32, token_in_token_out/protocol.py, PlaceholderRangeInfo), and neither
# prefill nor decode needs anything of a picture but its embedding (M-RoPE models need its grid).
SERVED = ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration")
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


def inspect(model: str) -> ModelInfo:
    """Read a model's folder, or what the hub's cache on this machine has of it.

    Raises ConfigError for a model that cannot be served.
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
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"model {model!r}: config.json: {error}") from None
    if architecture not in SERVED:
        raise ConfigError(
            f"model {model!r}: {architecture or 'a model without architecture'} cannot be served "
            f"by separate stages yet; what can: {', '.join(SERVED)}"
        )
    encoder, language = _weight_bytes(folder)
    return ModelInfo(
        architecture, config.get("model_type"), encoder, language, _kv_bytes_per_token(config)
    )


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
