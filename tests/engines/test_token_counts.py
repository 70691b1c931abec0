"""Token counts and weights against vLLM and transformers themselves, over random sizes."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from easerve.costs import models
from easerve.costs.base import Media
from easerve.costs.models import Grid, ModelSpec
from easerve.costs.tokens import media
from easerve.engines.vllm.launch import SITE
from easerve.types import Picture, Sound, Video

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models/tiny-llava"
NUM_SIZES, NUM_VIDEOS, NUM_SOUNDS = 150, 100, 30
DEFAULT_FRAMES = (128 * 28 * 28, 768 * 28 * 28)  # least and most pixels, of transformers
TOTAL_PIXELS = int(128000 * 28 * 28 * 0.9)  # transformers' max_video_tokens
RNG = random.Random(7)


def side(most: int) -> int:
    """Small ones as often as large ones."""
    return round(2 ** RNG.uniform(4, most))


PICTURES = [
    (256, 256),
    (1280, 720),
    (640, 480),
    (336, 336),
    (672, 672),
    (60, 60),
    (4000, 30),
    (10_000, 10_000),
] + [(side(12), side(12)) for _ in range(NUM_SIZES)]
VIDEOS = [
    (256, 256, 16),
    (1280, 720, 16),
    (640, 480, 16),
    (640, 360, 16),
    (256, 256, 1),
    (900, 700, 4000),
] + [(side(11), side(11), RNG.randint(1, 900)) for _ in range(NUM_VIDEOS)]
GRIDS = [(RNG.randint(1, 3), 2 * RNG.randint(1, 60), 2 * RNG.randint(1, 60)) for _ in range(50)]
SECONDS = [0.0, 0.01, 0.02, 7.4, 29.99, 30.0, 30.001, 30.01, 35.2, 60.0, 61.7] + [
    round(RNG.uniform(0.5, 36), 4) for _ in range(NUM_SOUNDS)
]


def grid(model: ModelSpec) -> Grid:
    assert model.encoder.grid is not None
    return model.encoder.grid


def with_grid(model: ModelSpec, **of_grid: int) -> ModelSpec:
    changed = grid(model).model_copy(update=of_grid)
    return model.model_copy(update={"encoder": model.encoder.model_copy(update={"grid": changed})})


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    bounds = grid(models.read("qwen2.5-vl-32b"))
    question = {
        "folder": str(TINY),
        "pictures": PICTURES,
        "videos": VIDEOS,
        "grids": GRIDS,
        "seconds": SECONDS,
        "bounds": (bounds.min_pixels, bounds.max_pixels),
        "frame_bounds": DEFAULT_FRAMES,
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.engines.reference_tokens"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{SITE}:{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"},
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    answer: dict[str, Any] = json.loads(ran.stdout[ran.stdout.index('{"llava_next"') :])
    return answer


def pictures(model: ModelSpec) -> list[Media]:
    return [media(model, Picture(*size)) for size in PICTURES]


def test_llava_next_pictures(reference: dict[str, Any]) -> None:
    found = pictures(models.read("llava-v1.6-34b"))
    assert [[each.num_tokens, each.num_sequences] for each in found] == reference["llava_next"]


def test_llava_pictures(reference: dict[str, Any]) -> None:
    found = pictures(models.read("tiny-llava"))
    assert [each.num_tokens for each in found] == reference["llava"]


def test_qwen_pictures(reference: dict[str, Any]) -> None:
    found = pictures(models.read("qwen2.5-vl-32b"))
    assert [[each.num_tokens, each.sequence_tokens] for each in found] == reference["qwen_pictures"]


@pytest.mark.parametrize(
    ("name", "of_grid"),
    [
        ("qwen_videos", {}),
        ("qwen_default_videos", {}),
        ("qwen_capped_videos", {"video_total_pixels": TOTAL_PIXELS}),
    ],
)
def test_qwen_videos(reference: dict[str, Any], name: str, of_grid: dict[str, int]) -> None:
    model = models.read("qwen2.5-vl-32b")
    if name != "qwen_videos":
        least, most = DEFAULT_FRAMES
        model = with_grid(model, video_min_pixels=least, video_max_pixels=most, **of_grid)
    found = [media(model, Video(*size)) for size in VIDEOS]
    assert [[each.num_tokens, each.num_sequences] for each in found] == reference[name]


def test_a_cap_of_all_pixels_changes_something(reference: dict[str, Any]) -> None:
    assert reference["qwen_capped_videos"] != reference["qwen_default_videos"]


def test_no_window_of_qwen_is_larger_than_it_says(reference: dict[str, Any]) -> None:
    assert max(reference["qwen_windows"]) == models.read("qwen2.5-vl-32b").encoder.window


def test_ultravox_sounds(reference: dict[str, Any]) -> None:
    model = models.read("ultravox-v0.6-27b")
    found = [media(model, Sound(length_s)) for length_s in SECONDS]
    assert [
        [each.num_tokens, each.num_sequences, each.sequence_tokens] for each in found
    ] == reference["ultravox"]


def test_weights(reference: dict[str, Any]) -> None:
    llava, qwen, ultravox = map(
        models.read, ("llava-v1.6-34b", "qwen2.5-vl-32b", "ultravox-v0.6-27b")
    )
    found = reference["weights"]
    assert llava.language.num_weights == found["llama"]
    assert qwen.language.num_weights == found["qwen"]
    assert ultravox.language.num_weights == found["gemma"]
    assert ultravox.language.num_window_layers == found["windows"]
    assert qwen.encoder.num_weights == found["vit"]
    last_norm, newline, biases = 2 * 1024, 7168, 2 * 7168
    projector = sum(inputs * outputs for inputs, outputs in llava.encoder.projector)
    assert llava.encoder.num_weights == found["clip"] - last_norm + newline + biases + projector
    norms = 10240 + 2048
    projector = sum(inputs * outputs for inputs, outputs in ultravox.encoder.projector)
    assert ultravox.encoder.num_weights == found["whisper"] + norms + projector
