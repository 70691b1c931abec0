"""FLOPs and bytes of an encoder forward, against numbers made by hand or by a FLOP counter."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from easerve.costs import roofline
from easerve.costs.roofline import Encoder, encoder

TINY = Path(__file__).parents[2] / "models/tiny-llava/config.json"
# As llava-1.5-7b has it, which leaves out text_config.hidden_size.
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "vision_feature_layer": -2,
    "text_config": {"model_type": "llama"},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
}
PIXTRAL = {"model_type": "llava", "vision_config": {"model_type": "pixtral"}}


def of(config: dict[str, Any], width: int = 336, height: int = 336) -> Encoder:
    made = encoder(config, width, height)
    assert made is not None
    return made


def test_a_vit_l_takes_what_a_flop_counter_says() -> None:
    tower = replace(of(LLAVA), num_layers=24, projector=())
    assert tower.item_flops == pytest.approx(0.382e12, rel=1e-3)


def test_llava_runs_all_layers_but_the_last_and_its_projector() -> None:
    made = of(LLAVA)
    assert made.num_layers == 23
    assert made.projector == ((1024, 4096), (4096, 4096))
    tower = replace(made, projector=())
    assert made.item_flops - tower.item_flops == 2 * 576 * (1024 * 4096 + 4096 * 4096)


def test_a_tiny_encoder_by_hand() -> None:
    """3 patches of 2 values and a class token, 1 layer of 4 values, an MLP of 8, out to 5."""
    made = Encoder(4, 8, 1, 2, 2, 3, 1, 1, ((4, 5), (5, 5)), 3)
    layer = 4 * 4 * 4 + 2 * 4 * 8
    projector = 4 * 5 + 5 * 5
    assert made.num_weights == 2 * 4 + layer + projector
    attention = 2 * (4 * 4 * 4) * 2  # 4 tokens by 4 tokens by 4 values, twice
    assert made.item_flops == 2 * 3 * 2 * 4 + 2 * 4 * layer + attention + 2 * 3 * projector
    assert made.item_values == 3 * (2 + 4) + 4 * (22 * 4 + 4 * 8) + 3 * (4 + 5 + 5 + 5)
    one, four = made.forward(1, 2), made.forward(4, 2)
    assert one.num_bytes == 2 * (made.num_weights + made.item_values)
    assert four.flops == 4 * one.flops
    assert four.num_bytes == one.num_bytes + 3 * 2 * made.item_values
    assert four.intensity == four.flops / four.num_bytes > one.intensity


def test_the_tiny_model_is_counted() -> None:
    made = of(json.loads(TINY.read_text()), 60, 60)
    assert (made.num_layers, made.num_patches, made.num_extra) == (4, 25, 1)
    assert made.projector == ((128, 128), (128, 128))


@pytest.mark.parametrize(("size", "patches"), [((64, 32), 4 * 2), ((100, 40), 7 * 3)])
def test_pixtral_takes_pictures_as_they_are(size: tuple[int, int], patches: int) -> None:
    made = of(PIXTRAL, *size)
    assert (made.num_patches, made.num_extra, made.mlp_matrices) == (patches, 0, 3)
    assert made.num_layers == 23
    gated = replace(made, mlp_matrices=2)
    assert made.num_weights - gated.num_weights == 23 * 1024 * 4096


def test_pixtral_makes_large_pictures_smaller() -> None:
    assert of(PIXTRAL, 4096, 2048).num_patches == 64 * 32


def test_mistral_merges_patches() -> None:
    made = of({**PIXTRAL, "model_type": "mistral3"}, 128, 64)
    assert (made.num_patches, made.num_projected, made.num_layers) == (8 * 4, 8, 24)
    assert made.projector[0] == (4 * 1024, 1024)


@pytest.mark.parametrize(
    ("size", "tiles"), [((336, 336), 3), ((672, 672), 5), ((300, 900), 4), ((1000, 1000), 5)]
)
def test_llava_next_cuts_a_picture_into_tiles(size: tuple[int, int], tiles: int) -> None:
    one = of(LLAVA).item_flops
    made = of({**LLAVA, "model_type": "llava_next"}, *size)
    assert made.item_flops == pytest.approx(tiles * one)


def test_several_layers_features_go_into_the_projector_together() -> None:
    made = of({**LLAVA, "vision_feature_layer": [-2, -5, 3]})
    assert made.num_layers == 23
    assert made.projector[0] == (3 * 1024, 4096)


@pytest.mark.parametrize(
    "config",
    [{}, {"model_type": "llava"}, {**LLAVA, "model_type": "q"}],
)
def test_other_models_are_not_counted(config: dict[str, Any]) -> None:
    assert encoder(config, 336, 336) is None


def test_the_pictures_an_encoder_was_made_for() -> None:
    assert roofline.picture_side(LLAVA) == 336
    assert roofline.picture_side(PIXTRAL) == 1024
    assert roofline.picture_side({}) == 336
