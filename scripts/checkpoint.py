"""Writes a model's folder so that Hugging Face and vLLM can both read it."""

import copy
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def save(model: Any, processor: Any, folder: Path) -> None:
    """Weights in 16 bit, a CLIP tower's under the names that both readers know.

    transformers 5 writes ``vision_tower.*``; vLLM 0.32 looks for ``vision_tower.vision_model.*``.
    """
    copy.deepcopy(model).half().save_pretrained(folder)
    processor.save_pretrained(folder)
    file = folder / "model.safetensors"
    if model.config.vision_config.model_type == "clip_vision_model":
        weights = {
            name.replace("vision_tower.", "vision_tower.vision_model."): weight
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)
