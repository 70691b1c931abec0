import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from easerve.config import ConfigError
from easerve.engines.vllm.models import CAPABILITIES, ModelInfo, inspect, read

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


# Capabilities ---------------------------------------------------------------------------------

SERVED = [
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
]
UNSERVED = sorted(name for name, capability in CAPABILITIES.items() if not capability.served)


@pytest.mark.parametrize(
    ("architecture", "vision", "known_as", "media_at_prefill"),
    [
        (SERVED[0], None, SERVED[0], False),
        (SERVED[0], {}, SERVED[0], False),
        (SERVED[0], {"model_type": "clip_vision_model"}, SERVED[0], False),
        (SERVED[0], {"model_type": "siglip_vision_model"}, SERVED[0], False),
        (SERVED[0], {"model_type": "pixtral"}, f"{SERVED[0]}/pixtral", True),
        (SERVED[1], {"model_type": "clip_vision_model"}, SERVED[1], False),
        (SERVED[1], {"model_type": "pixtral"}, SERVED[1], False),
        (SERVED[2], None, SERVED[2], True),
        (SERVED[2], {"model_type": "pixtral"}, SERVED[2], True),
    ],
)
def test_how_a_model_is_served_depends_on_its_tower_where_that_matters(
    tmp_path: Path,
    architecture: str,
    vision: dict[str, Any] | None,
    known_as: str,
    media_at_prefill: bool,
) -> None:
    config = {"architectures": [architecture], "vision_config": vision}
    info = inspect(write_model(tmp_path, config))
    assert info.capability is CAPABILITIES[known_as]
    assert info.media_at_prefill is media_at_prefill
    assert info.architecture == architecture


@pytest.mark.parametrize("architecture", UNSERVED)
def test_a_known_model_that_is_not_served_is_refused_with_the_reason(
    tmp_path: Path, architecture: str
) -> None:
    model = write_model(tmp_path, {"architectures": [architecture]})
    with pytest.raises(ConfigError) as error:
        inspect(model)
    assert str(error.value) == (
        f"model {model!r}: {architecture} cannot be served by separate stages yet "
        f"({CAPABILITIES[architecture].note}); what can: {', '.join(SERVED)}"
    )


def test_an_unknown_model_is_refused_with_what_is_served(tmp_path: Path) -> None:
    model = write_model(tmp_path, {"architectures": ["Other", *SERVED]})
    with pytest.raises(ConfigError) as error:
        inspect(model)
    assert str(error.value) == (
        f"model {model!r}: Other cannot be served by separate stages yet; "
        f"what can: {', '.join(SERVED)}"
    )


@pytest.mark.parametrize("architecture", [*UNSERVED, "Other"])
def test_what_cannot_be_served_can_be_read(tmp_path: Path, architecture: str) -> None:
    config = LLAVA | {"architectures": [architecture]}
    info = read(write_model(tmp_path, config))
    assert info.architecture == architecture
    assert info.capability == CAPABILITIES.get(architecture)
    assert info.kv_bytes_per_token == 2 * 3 * 8 * 8 * 2


def test_of_a_model_that_nothing_is_known_of_no_media_go_to_prefill() -> None:
    assert not ModelInfo().media_at_prefill


@pytest.mark.parametrize("name", CAPABILITIES)
def test_every_capability_says_why(name: str) -> None:
    capability = CAPABILITIES[name]
    assert capability.note
    assert name.partition("/")[0] in CAPABILITIES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json: .*No such file"),
        ("{", "config.json: "),
        ("[]", "config.json"),
        ("{}", "names no architecture"),
        ('{"architectures": null}', "names no architecture"),
        ('{"architectures": []}', "names no architecture"),
        ('{"architectures": ["A"], "vision_config": "clip"}', "config.json: "),
    ],
)
def test_a_folder_that_is_no_model_is_an_error(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    for look in (inspect, read):
        with pytest.raises(ConfigError, match=message) as error:
            look(str(tmp_path))
        assert repr(str(tmp_path)) in str(error.value)


@pytest.mark.parametrize("architectures", [5, [["A"]]])
def test_a_config_whose_architectures_are_no_names_is_an_error(
    tmp_path: Path, architectures: Any
) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        inspect(write_model(tmp_path, {"architectures": architectures}))


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
