import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from easerve.config import ConfigError
from easerve.engines.vllm.models import ModelInfo, inspect

LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "text_config": {"num_hidden_layers": 3, "num_attention_heads": 8, "hidden_size": 64},
}


def write_weights(path: Path, sizes: Mapping[str, int]) -> None:
    """A safetensors file that ends after its header."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def write_model(folder: Path, config: Mapping[str, Any] = LLAVA) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_folder_tells_architecture_and_weights(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    write_weights(tmp_path / "a.safetensors", {"vision_tower.x": 10, "language_model.y": 200})
    write_weights(tmp_path / "b.safetensors", {"multi_modal_projector.z": 4, "lm_head.w": 1000})
    info = inspect(model)
    assert (info.architecture, info.model_type) == ("LlavaForConditionalGeneration", "llava")
    assert (info.encoder_bytes, info.language_bytes) == (14, 1200)


@pytest.mark.parametrize(
    ("name", "encoder"),
    [
        ("vision_tower.vision_model.w", True),
        ("model.vision_tower.w", True),
        ("visual.blocks.0.w", True),
        ("model.visual.w", True),
        ("audio_tower.w", True),
        ("image_newline", True),
        ("model.multi_modal_projector.w", True),
        ("model.language_model.w", False),
        ("model.layers.0.w", False),
        ("lm_head.weight", False),
    ],
)
def test_a_tensor_belongs_to_the_encoder_or_to_the_language_model(
    tmp_path: Path, name: str, encoder: bool
) -> None:
    write_weights(tmp_path / "model.safetensors", {name: 8})
    info = inspect(write_model(tmp_path))
    assert (info.encoder_bytes, info.language_bytes) == ((8, 0) if encoder else (0, 8))


def test_a_folder_without_weights_leaves_their_size_unknown(tmp_path: Path) -> None:
    info = inspect(write_model(tmp_path))
    assert (info.encoder_bytes, info.language_bytes) == (None, None)
    assert info.architecture == "LlavaForConditionalGeneration"


@pytest.mark.parametrize(
    ("text_config", "expected"),
    [
        # keys and values, layers, heads, head size, bytes
        ({}, 2 * 3 * 8 * (64 // 8) * 2),
        ({"num_key_value_heads": 2}, 2 * 3 * 2 * 8 * 2),
        ({"num_key_value_heads": 2, "head_dim": 32}, 2 * 3 * 2 * 32 * 2),
        ({"num_key_value_heads": None}, 2 * 3 * 8 * 8 * 2),
    ],
)
def test_kv_bytes_per_token(tmp_path: Path, text_config: dict[str, Any], expected: int) -> None:
    text = LLAVA["text_config"] | text_config
    nested, flat = tmp_path / "nested", tmp_path / "flat"
    nested.mkdir()
    flat.mkdir()
    configs = (LLAVA | {"text_config": text}, {"architectures": LLAVA["architectures"], **text})
    for folder, config in zip((nested, flat), configs, strict=True):
        assert inspect(write_model(folder, config)).kv_bytes_per_token == expected


def test_kv_bytes_are_unknown_where_the_config_does_not_tell(tmp_path: Path) -> None:
    config = {"architectures": LLAVA["architectures"], "text_config": {"num_hidden_layers": 3}}
    assert inspect(write_model(tmp_path, config)).kv_bytes_per_token is None


@pytest.fixture
def hub_cache(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Model to the path of its cached configuration."""
    cached: dict[str, str] = {}
    hub = ModuleType("huggingface_hub")
    vars(hub)["try_to_load_from_cache"] = lambda model, _: cached.get(model)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return cached


def test_of_a_hub_model_that_is_not_cached_nothing_is_known(hub_cache: dict[str, str]) -> None:
    assert inspect("owner/name") == ModelInfo()
    assert hub_cache == {}


def test_a_cached_hub_model_is_like_a_folder(tmp_path: Path, hub_cache: dict[str, str]) -> None:
    hub_cache["owner/name"] = f"{write_model(tmp_path)}/config.json"
    write_weights(tmp_path / "model.safetensors", {"vision_tower.w": 8})
    assert inspect("owner/name") == inspect(str(tmp_path))
    write_model(tmp_path, {"architectures": ["Other"]})
    with pytest.raises(ConfigError, match="Other cannot be served"):
        inspect("owner/name")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nosuch", "~/nosuch", "nosuch", "a/b/c"])
def test_a_path_that_is_not_there_is_an_error(model: str) -> None:
    with pytest.raises(ConfigError, match="no such folder, and not a hub name") as error:
        inspect(model)
    assert repr(model) in str(error.value)


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"]
)
def test_a_model_that_was_not_run_in_stages_is_refused(tmp_path: Path, architecture: str) -> None:
    model = write_model(tmp_path, {"architectures": [architecture]})
    with pytest.raises(ConfigError, match=f"{architecture} cannot be served by separate stages"):
        inspect(model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json: .*No such file"),
        ("{", "config.json: "),
        ("[]", "config.json"),
        ("{}", "a model without architecture cannot be served"),
        ('{"architectures": null}', "a model without architecture cannot be served"),
        ('{"architectures": []}', "a model without architecture cannot be served"),
    ],
)
def test_a_folder_that_is_no_model_is_an_error(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        inspect(str(tmp_path))
    assert repr(str(tmp_path)) in str(error.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        struct.pack("<Q", 100) + b"{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
    ],
    ids=["empty", "cut", "lfs-pointer", "header-cut", "not-a-mapping", "not-a-tensor"],
)
def test_a_weight_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    model = write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: not a safetensors file"):
        inspect(model)
