"""What is derived from a model's facts, against MODEL.md's tables and arithmetic by hand."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from easerve.config import ConfigError
from easerve.costs import models, roofline
from easerve.costs.models import FOLDER, Encoder, Language, ModelSpec

LLAVA, QWEN, ULTRAVOX, TINY = map(
    models.read, ("llava-v1.6-34b", "qwen2.5-vl-32b", "ultravox-v0.6-27b", "tiny-llava")
)
SMALL: dict[str, Any] = {
    "source": "here",
    "num_layers": 3,
    "hidden": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "intermediate": 16,
    "vocab": 10,
}
ENCODER: dict[str, Any] = {
    "source": "here",
    "num_layers": 2,
    "hidden": 8,
    "num_heads": 2,
    "head_dim": 4,
    "intermediate": 16,
    "patches": [[12, 8]],
    "projector": [[8, 8]],
    "tiles": {"side": 4, "patch": 2},
}


def small(**changes: Any) -> Language:
    return Language.model_validate({**SMALL, **changes})


def encoder(**changes: Any) -> Encoder:
    return Encoder.model_validate({**ENCODER, **changes})


def test_the_models_that_come_with_the_package() -> None:
    assert models.names() == ["llava-v1.6-34b", "qwen2.5-vl-32b", "tiny-llava", "ultravox-v0.6-27b"]


@pytest.mark.parametrize("name", models.names())
def test_every_section_has_a_source_and_a_projector_that_fits(name: str) -> None:
    model = models.read(name)
    assert model.language.source
    assert model.encoder.source
    assert model.encoder.projector[-1][1] == model.language.hidden
    assert model.encoder.projector[0][0] == model.encoder.hidden * model.encoder.merge
    assert model.encoder.patches[-1][1] == model.encoder.hidden
    assert model.encoder.num_heads * model.encoder.head_dim == model.encoder.hidden


@pytest.mark.parametrize(
    ("model", "weights", "encoder_weights", "kv_bytes", "embedding_bytes"),
    [
        (LLAVA, 34.39e9, 0.350e9, 245_760, 14_336),
        (QWEN, 32.76e9, 0.689e9, 262_144, 10_240),
        (ULTRAVOX, 27.01e9, 0.690e9, 507_904, 10_752),
        (TINY, 0.5006e6, 0.7535e6, 1536, 512),
    ],
)
def test_sizes(
    model: ModelSpec, weights: float, encoder_weights: float, kv_bytes: int, embedding_bytes: int
) -> None:
    assert model.language.num_weights == pytest.approx(weights, rel=1e-3)
    value_bytes = 4 if model is TINY else 2
    assert model.language.weight_bytes == value_bytes * model.language.num_weights
    assert model.encoder.num_weights == pytest.approx(encoder_weights, rel=2e-3)
    assert model.encoder.weight_bytes == value_bytes * model.encoder.num_weights
    assert model.num_weights == model.language.num_weights + model.encoder.num_weights
    assert model.language.kv_bytes_per_token == kv_bytes
    assert model.language.embedding_bytes_per_token == embedding_bytes


def test_a_small_model_by_hand() -> None:
    made = small(layer_vectors=5)
    assert (made.query_size, made.kv_size) == (8, 4)
    assert made.layer_matrices == ((8, 16), (8, 8), (8, 32), (16, 8))
    layer = 8 * 16 + 8 * 8 + 8 * 32 + 16 * 8
    assert made.num_layer_weights == 3 * layer
    assert made.num_weights == 2 * 10 * 8 + 3 * (layer + 5) + 8
    assert small(layer_vectors=5, tied_embeddings=True).num_weights == made.num_weights - 80
    assert made.kv_bytes_per_token == 3 * 2 * 4 * 2
    assert made.kv_bytes(7) == 7 * made.kv_bytes_per_token
    assert small(value_bytes=4).kv_bytes(7) == 2 * made.kv_bytes(7)


def test_layers_with_a_window_keep_no_more_than_the_window() -> None:
    made = small(window=100, num_window_layers=2)
    of_layer = made.kv_bytes_per_token // 3
    assert made.num_global_layers == 1
    assert made.kv_bytes(100) == 100 * made.kv_bytes_per_token
    assert made.kv_bytes(150) == 150 * of_layer + 2 * 100 * of_layer
    language = ULTRAVOX.language
    assert language.num_global_layers == 10
    assert language.kv_bytes(1025) - language.kv_bytes(1024) == 81_920


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 4"),
        ({"window": 4}, "window and num_window_layers: give both or neither"),
        ({"num_window_layers": 1}, "window and num_window_layers: give both or neither"),
        ({"window": 4, "num_window_layers": 4}, r"at most 3 \(num_layers\)"),
    ],
)
def test_a_language_model_that_cannot_be_is_refused(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        small(**changes)


def test_a_small_encoder_by_hand() -> None:
    made = encoder(other_weights=9)
    assert made.layer_matrices == ((8, 24), (8, 8), (8, 16), (16, 8))
    layer = 8 * 24 + 8 * 8 + 8 * 16 + 16 * 8
    assert made.num_weights == 12 * 8 + 2 * layer + 8 * 8 + 9
    assert encoder(gated=True).layer_matrices[2] == (8, 32)


def test_tokens_that_the_projector_takes_as_one() -> None:
    assert (LLAVA.encoder.merge, QWEN.encoder.merge, ULTRAVOX.encoder.merge) == (1, 4, 8)
    assert LLAVA.encoder.num_projected(577) == 576
    assert QWEN.encoder.num_projected(4784) == 1196
    assert ULTRAVOX.encoder.num_projected(1500) == 188


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"tiles": None}, "one of tiles, grid and pieces"),
        ({"pieces": {"piece_s": 30, "frames_per_s": 50, "stack": 8}}, "one of tiles, grid and"),
        ({"patch_rows": [1, 1]}, "patches and patch_rows must be of one length"),
        ({"window": 4}, "window and num_global_layers: give both or neither"),
        ({"window": 4, "num_global_layers": 3}, r"at most 2 \(num_layers\)"),
        ({"tiles": {"side": 5, "patch": 2}}, "patch 2 does not divide side 5"),
        (
            {"tiles": {"side": 4, "patch": 2, "canvases": [[4, 6]]}},
            "canvases must be whole tiles of 4 pixels, not 4x6",
        ),
    ],
)
def test_an_encoder_that_cannot_be_is_refused(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        encoder(**changes)


def test_clip_takes_as_much_work_as_roofline_says() -> None:
    """Of the same model, from its config.json."""
    tower = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096}
    config = {
        "model_type": "llava_next",
        "text_config": {"hidden_size": 7168},
        "vision_config": {**tower, "num_hidden_layers": 24, "image_size": 336, "patch_size": 14},
    }
    counted = roofline.encoder(config, 1280, 720)
    assert counted is not None
    made = LLAVA.encoder
    matrices = (*made.patches, *made.projector, *made.num_layers * made.layer_matrices)
    assert counted.num_weights == sum(inputs * outputs for inputs, outputs in matrices)
    assert (counted.num_layers, counted.num_tiles, counted.num_patches) == (23, 5, 576)


def test_a_model_can_be_a_file_beside_the_one_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text((FOLDER / "tiny-llava.yaml").read_text())
    assert models.read("mine.yaml", tmp_path) == TINY
    assert models.read(str(tmp_path / "mine.yaml"), Path("/elsewhere")) == TINY


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model 'llava': known are llava-v1\.6-34b, qwen2\.5-vl"):
        models.read("llava", tmp_path)


def test_errors_name_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match=r"mine\.yaml: No such file"):
        models.read("mine.yaml", tmp_path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"mine\.yaml: not YAML"):
        models.read("mine.yaml", tmp_path)
    path.write_text("nothing")
    with pytest.raises(ConfigError, match=r"mine\.yaml: Input should be"):
        models.read("mine.yaml", tmp_path)
    content = yaml.safe_load((FOLDER / "tiny-llava.yaml").read_text())
    content["language"]["hiden"] = 1
    content["encoder"]["tiles"]["patch"] = 0
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as error:
        models.read("mine.yaml", tmp_path)
    assert f"{path}: language.hiden: unknown key; did you mean 'hidden'?" in str(error.value)
    assert f"{path}: encoder.tiles.patch: Input should be greater" in str(error.value)
