"""What requests ask: seeded mixes of pictures and text.

A request depends on the mix, the seed and its own number only. So a run can be cut short, or made
in parallel, and its requests are the same. No two pictures of a run have the same pixels: an
encoder never finds one in its cache.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from PIL import Image

from easerve.workload import shapes

Size = tuple[int, int]
Choice = TypeVar("Choice", int, Size)

POSITION_BITS, STAMP_BITS = 8, 48
MAX_IMAGES = 1 << POSITION_BITS  # in one request
MIN_SIDE = 4  # pixels; a stamp needs 16 of them
WORDS = (
    "apple bridge candle desert engine forest garden harbour island jacket kettle ladder "
    "market needle orange pepper quarry river summer ticket umbrella valley window yellow"
).split()


@dataclass(frozen=True, slots=True)
class Mix:
    """How many pictures, of which size, with how much text; what a request may answer.

    ``num_images`` and ``sizes`` (width and height in pixels) say how often each value comes: a
    weight each, of any sum. ``num_words`` and ``num_output_tokens`` are the least and the most,
    all in between equally likely. A text shorter than its number of words gets filler words in
    front of the question; a question is never cut. ``text_share`` of the requests have no picture,
    whatever ``num_images`` says.

    Raises ValueError for a mix that cannot be.
    """

    num_images: Mapping[int, float] = field(default_factory=lambda: {1: 1.0})
    sizes: Mapping[Size, float] = field(default_factory=lambda: {(shapes.SIZE, shapes.SIZE): 1.0})
    num_words: tuple[int, int] = (0, 0)
    num_output_tokens: tuple[int, int] = (8, 24)
    text_share: float = 0.0

    def __post_init__(self) -> None:
        _check_weights("num_images", self.num_images.values())
        _check_weights("sizes", self.sizes.values())
        for count in self.num_images:
            if not 0 <= count <= MAX_IMAGES:
                raise ValueError(f"num_images must be 0 to {MAX_IMAGES}, not {count}")
        for size in self.sizes:
            if min(size) < MIN_SIDE:
                raise ValueError(f"both sides must be {MIN_SIDE} pixels or more, not {size}")
        _check_range("num_words", self.num_words, 0)
        _check_range("num_output_tokens", self.num_output_tokens, 1)
        if not 0 <= self.text_share <= 1:
            raise ValueError(f"text_share must be 0 to 1, not {self.text_share}")


@dataclass(frozen=True, slots=True)
class Request:
    """``content`` is the content of an OpenAI chat message: the pictures, then one text."""

    content: list[dict[str, Any]]
    max_tokens: int
    num_images: int

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.content}]


def requests(mix: Mix, num: int, seed: int) -> Iterator[Request]:
    """The first ``num`` requests of a run, each made when it is asked for."""
    if num < 0:
        raise ValueError(f"the number of requests must not be negative, but is {num}")
    return (request(mix, seed, index) for index in range(num))


def request(mix: Mix, seed: int, index: int) -> Request:
    """Request number ``index``, counted from 0.

    Sizes are drawn last, so that mixes that differ in sizes alone ask the same.
    """
    rng = random.Random(f"{seed}:{index}")  # noqa: S311 (pictures, not secrets)
    max_tokens = rng.randint(*mix.num_output_tokens)
    num_words = rng.randint(*mix.num_words)
    is_text = rng.random() < mix.text_share
    num_images = _pick(mix.num_images, rng)
    if is_text:
        num_images = 0
    scenes = [shapes.draw(rng) for _ in range(num_images)]
    question = _question(scenes, rng)
    num_filler_words = max(0, num_words - len(question.split()))
    text = " ".join([*rng.choices(WORDS, k=num_filler_words), question])
    parts = [
        _picture_part(scene.picture, _pick(mix.sizes, rng), index << POSITION_BITS | position)
        for position, scene in enumerate(scenes)
    ]
    return Request([*parts, {"type": "text", "text": text}], max_tokens, num_images)


def _question(scenes: list[shapes.Scene], rng: random.Random) -> str:
    """About the last picture, which is next to the question."""
    if scenes:
        return shapes.ask(rng.choice(shapes.QUESTION_KINDS), scenes[-1], rng).text
    colour, kind = rng.choice(list(shapes.COLOURS)), rng.choice(shapes.KINDS)
    # The number keeps most texts apart, so that a prefix cache does not answer for the engine.
    return f"Tell story number {rng.randrange(10**6)} about a {colour} {kind}."


def _picture_part(picture: Image.Image, size: Size, number: int) -> dict[str, Any]:
    if size != picture.size:
        picture = picture.resize(size)
    url = shapes.data_url(_stamped(picture, number))
    return {"type": "image_url", "image_url": {"url": url}}


def _stamped(picture: Image.Image, number: int) -> Image.Image:
    """A number in the lowest bits of the first pixels, where nobody sees it.

    Chance alone would keep large pictures apart, but not small ones.
    """
    pixels = bytearray(picture.tobytes())
    for bit in range(STAMP_BITS):
        pixels[bit] = (pixels[bit] & 0xFE) | ((number >> bit) & 1)
    return Image.frombytes("RGB", picture.size, bytes(pixels))


def _pick(weights: Mapping[Choice, float], rng: random.Random) -> Choice:
    """The order in which a mapping was written must not count."""
    choices = sorted(weights)
    return rng.choices(choices, [weights[choice] for choice in choices])[0]


def _check_weights(name: str, weights: Iterable[float]) -> None:
    values = list(weights)
    if not all(0 <= weight < math.inf for weight in values) or not 0 < sum(values) < math.inf:
        raise ValueError(f"the weights of {name} must be 0 or more, and one more than 0: {values}")


def _check_range(name: str, bounds: tuple[int, int], lowest: int) -> None:
    least, most = bounds
    if not lowest <= least <= most:
        raise ValueError(
            f"{name} must go from {lowest} or more upwards, not from {least} to {most}"
        )
