import builtins
import io
import random
import sys
import wave
from array import array
from typing import Any

import av
import pytest
from PIL import Image

from easerve.workload import synthetic
from easerve.workload.synthetic import DARK, LIGHT, MissingPackageError

MIDDLE = (DARK + LIGHT) // 2
NUMBERS = (0, 1, (1 << 48) - 1, 0xABCDEF012345)


def rng() -> random.Random:
    return random.Random(5)


def stamped_in_blocks(image: Image.Image) -> int:
    """The number, as an eye would read it."""
    grey = image.convert("L")
    number = 0
    for place in range(synthetic.STAMP_BITS):
        middle = (8 * (place % 8) + 4, 8 * (place // 8) + 4)
        number |= (
            grey.crop((*middle, middle[0] + 1, middle[1] + 1)).tobytes()[0] > MIDDLE
        ) << place
    return number


@pytest.mark.parametrize("number", NUMBERS)
def test_a_pictures_number_survives_jpeg(number: int) -> None:
    content, form = synthetic.encoded(synthetic.picture(160, 90, number, rng()))
    assert form == "jpeg"
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (160, 90)
        assert stamped_in_blocks(image) == number


def test_small_pictures_are_apart_though_nothing_else_differs() -> None:
    made = [synthetic.encoded(synthetic.picture(8, 8, number, rng())) for number in range(200)]
    assert {form for _, form in made} == {"png"}
    assert len({content for content, _ in made}) == 200


def test_a_small_picture_is_a_png_whatever_is_asked() -> None:
    small, large = (synthetic.picture(side, side, 1, rng()) for side in (79, 80))
    assert synthetic.encoded(small, "jpeg")[1] == "png"
    assert synthetic.encoded(large, "png")[0].startswith(b"\x89PNG")
    assert synthetic.encoded(large, "jpeg")[0].startswith(b"\xff\xd8")


def test_the_same_random_numbers_give_the_same_bytes() -> None:
    assert synthetic.sound(1, 3, rng()) == synthetic.sound(1, 3, rng())
    videos = [synthetic.video(64, 48, 3, number, rng()) for number in (1, 1)]
    assert videos[0] == videos[1]


def test_nothing_is_equal_whose_random_numbers_are_not() -> None:
    other = random.Random(6)
    for side in (8, 79, 80):
        pictures = [synthetic.picture(side, side, 1, each) for each in (rng(), other)]
        assert len({synthetic.encoded(picture)[0] for picture in pictures}) == 2
    for size in ((64, 48), (96, 80)):
        assert synthetic.video(*size, 2, 1, rng()) != synthetic.video(*size, 2, 1, other)
    assert synthetic.sound(0.01, 1, rng()) != synthetic.sound(0.01, 1, other)


@pytest.mark.parametrize("size", [(7, 100), (100, 0)])
def test_a_picture_that_is_too_small_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="both sides must be 8 pixels or more"):
        synthetic.picture(*size, 1, rng())


def test_a_video_has_its_size_its_frames_and_its_number() -> None:
    file = io.BytesIO(synthetic.video(96, 80, 5, 0xABCDEF012345, rng()))
    with av.open(file, "r") as container:
        [stream] = container.streams
        decoded: list[Any] = list(container.decode(video=0))
        frames: list[Image.Image] = [frame.to_image() for frame in decoded]
        assert container.metadata.get("creation_time") is None
        assert stream.duration is not None
        assert stream.time_base is not None
        assert stream.duration * stream.time_base == 2.5
    assert [frame.size for frame in frames] == [(96, 80)] * 5
    assert len({frame.tobytes() for frame in frames}) == 5
    assert {stamped_in_blocks(frame) for frame in frames} == {0xABCDEF012345}


@pytest.mark.parametrize(
    ("size", "wrong"), [((97, 64), "must be even, not 97x64"), ((96, 8), "16 or more: 96x8")]
)
def test_a_video_that_cannot_be_is_refused(size: tuple[int, int], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        synthetic.video(*size, 2, 1, rng())


def test_a_video_without_pyav_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *more: Any, **others: Any) -> Any:
        if name == "av":
            raise ImportError("No module named 'av'")
        return real(name, *more, **others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingPackageError, match="pip install av"):
        synthetic.video(64, 48, 2, 1, rng())


def test_a_sound_is_16_khz_mono_and_as_long_as_asked() -> None:
    with wave.open(io.BytesIO(synthetic.sound(1.25, 1, rng()))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
        assert file.getnframes() == 20_000
        samples = array("h", file.readframes(20_000))
    if sys.byteorder == "big":
        samples.byteswap()
    syllables = [samples[start : start + 1600] for start in range(1600, 19_000, 1600)]
    peaks = {max(map(abs, syllable)) for syllable in syllables}
    assert max(peaks) < 48 << 8
    assert max(peaks) > 4 * min(peaks)  # some are louder than others


def test_sounds_are_apart_though_nothing_else_differs() -> None:
    made = {synthetic.sound(0.001, number, rng()) for number in range(100)}
    assert len(made) == 100
