"""Token counts of known sizes; ``engines/test_token_counts`` compares many with vLLM's own."""

import pytest

from easerve.costs import models
from easerve.costs.models import ModelSpec
from easerve.costs.tokens import media
from easerve.types import Content, Modality, Picture, Sound, Video

LLAVA, QWEN, ULTRAVOX, TINY = map(
    models.read, ("llava-v1.6-34b", "qwen2.5-vl-32b", "ultravox-v0.6-27b", "tiny-llava")
)


@pytest.mark.parametrize(
    ("size", "num_tiles", "num_tokens"),
    [
        ((256, 256), 3, 1176),
        ((1280, 720), 5, 1948),
        ((640, 480), 5, 2340),
        ((672, 672), 5, 2928),
        ((300, 900), 4, 576 + 24 * 72 + 72),
        ((900, 300), 4, 576 + 24 * 72 + 24),
    ],
)
def test_llava_next_cuts_a_picture_into_tiles(
    size: tuple[int, int], num_tiles: int, num_tokens: int
) -> None:
    found = media(LLAVA, Picture(*size))
    assert (found.modality, found.num_tokens) == (Modality.IMAGE, num_tokens)
    assert (found.num_sequences, found.sequence_tokens) == (num_tiles, 577)


def test_plain_llava_has_one_tile_for_every_picture() -> None:
    for size in ((60, 60), (1000, 3)):
        found = media(TINY, Picture(*size))
        assert (found.num_tokens, found.num_sequences, found.sequence_tokens) == (25, 1, 26)


@pytest.mark.parametrize(
    ("size", "num_tokens"),
    [((1280, 720), 1196), ((256, 256), 81), ((28, 28), 4), ((2, 2), 4), ((10_000, 10_000), 16_129)],
)
def test_qwen_keeps_a_picture_in_its_proportions(size: tuple[int, int], num_tokens: int) -> None:
    found = media(QWEN, Picture(*size))
    assert found.num_tokens == num_tokens
    assert (found.num_sequences, found.sequence_tokens) == (1, 4 * num_tokens)


@pytest.mark.parametrize(
    ("size", "frames", "num_tokens"),
    [
        ((1280, 720), 16, 9568),
        ((640, 480), 16, 3128),
        ((640, 360), 16, 2392),
        ((256, 256), 16, 648),
        ((256, 256), 15, 648),
        ((256, 256), 1, 81),
    ],
)
def test_two_frames_of_a_video_are_a_sequence(
    size: tuple[int, int], frames: int, num_tokens: int
) -> None:
    found = media(QWEN, Video(*size, frames))
    assert (found.modality, found.num_tokens) == (Modality.VIDEO, num_tokens)
    assert found.num_sequences == (frames + 1) // 2
    assert found.num_sequences * found.sequence_tokens == 4 * num_tokens


def test_bounds_of_frames_are_their_own() -> None:
    """With those of transformers' own video processor."""
    grid = QWEN.encoder.grid
    assert grid is not None

    def bounded(**bounds: int) -> ModelSpec:
        changed = grid.model_copy(update=bounds)
        tower = QWEN.encoder.model_copy(update={"grid": changed})
        return QWEN.model_copy(update={"encoder": tower})

    frames = {"video_min_pixels": 100_352, "video_max_pixels": 602_112}
    assert media(bounded(**frames), Video(1280, 720, 16)).num_tokens == 5760
    assert media(bounded(**frames), Picture(1280, 720)).num_tokens == 1196
    total = bounded(**frames, video_total_pixels=16 * 200_000)
    assert media(total, Video(1280, 720, 16)).sequence_tokens * 14**2 <= 2 * 200_000
    assert media(total, Video(1280, 720, 4)).sequence_tokens == 2880


@pytest.mark.parametrize(
    ("seconds", "num_tokens", "num_pieces", "frames"),
    [
        (0.001, 1, 1, 1),
        (7.4, 47, 1, 370),
        (30, 188, 1, 1500),
        (30.01, 189, 2, 1500),
        (35.2, 221, 2, 1500),
        (60, 376, 2, 1500),
        (61, 383, 3, 1500),
    ],
)
def test_sound_is_cut_into_pieces_of_30_s(
    seconds: float, num_tokens: int, num_pieces: int, frames: int
) -> None:
    found = media(ULTRAVOX, Sound(seconds))
    assert (found.modality, found.num_tokens) == (Modality.AUDIO, num_tokens)
    assert (found.num_sequences, found.sequence_tokens) == (num_pieces, frames)


@pytest.mark.parametrize(
    ("model", "content", "wrong"),
    [
        (LLAVA, Video(640, 480, 16), "LLaVA-v1.6-34B takes no video"),
        (QWEN, Sound(3), "Qwen2.5-VL-32B takes no sound"),
        (ULTRAVOX, Picture(640, 480), "Ultravox-v0.6-27B takes no picture"),
        (QWEN, Picture(2010, 10), "at most 200 times the other: 2010x10"),
    ],
)
def test_what_a_model_does_not_take_is_refused(
    model: ModelSpec, content: Content, wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        media(model, content)
