"""Requests as a model's own numbers see them: media of a size, so many tokens, no content.

A request depends on the mix, the seed and its own number only, as in ``workload/mix``. An item as
a scenario writes it is one of

    {image: 1280x720}             # width x height, in pixels
    {video: 1280x720, frames: 16}
    {audio_s: 8}                  # or {audio_s: [2, 16]}, all in between equally likely
    {audio: librispeech}          # the durations of a speech corpus
    {}                            # no item: text only

each with a ``weight`` that says how often it comes.
"""

import ast
import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from easerve.config import Positive, Seconds, Section
from easerve.types import Content, Picture, Sound, Video

LIBRISPEECH = "librispeech"
LIBRISPEECH_FILE = Path(__file__).with_name("librispeech.yaml")
PARTS = ("test-clean", "test-other", "dev-clean", "dev-other")
DEFAULT_PART = PARTS[0]  # assumed: who says LibriSpeech seldom says which part
MAX_ITEMS = 256  # in one request
CORPORA = (LIBRISPEECH, *(f"{LIBRISPEECH}-{part}" for part in PARTS))


def parse_size(text: Any) -> Any:
    """``1280x720`` -> (1280, 720): width and height. What is no text is left to be validated."""
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*([1-9]\d{0,5})\s*[x×]\s*([1-9]\d{0,5})\s*", text)
    if match is None:
        raise ValueError("expected width x height in pixels, such as 1280x720")
    return int(match[1]), int(match[2])


def _as_range(value: Any) -> Any:
    return (value, value) if isinstance(value, int | float) else value


Size = Annotated[tuple[Positive, Positive], BeforeValidator(parse_size)]
SecondsRange = Annotated[tuple[Seconds, Seconds], BeforeValidator(_as_range)]


class Item(Section):
    """What is drawn as one item of a request; see the module's docstring for each form."""

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    image: Size | None = None
    video: Size | None = None
    frames: Positive | None = None
    audio_s: SecondsRange | None = None
    audio: str | None = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        forms = ("image", "video", "audio_s", "audio")
        given = [form for form in forms if getattr(self, form) is not None]
        if len(given) > 1:
            raise ValueError(f"an item is one of {', '.join(forms)}, not {' and '.join(given)}")
        if (self.video is None) is not (self.frames is None):
            raise ValueError("video and frames: give both or neither")
        if self.audio_s is not None and self.audio_s[0] > self.audio_s[1]:
            raise ValueError(f"audio_s must go from the least to the most, not {self.audio_s}")
        if self.audio is not None and self.audio not in CORPORA:
            raise ValueError(f"audio is one of {', '.join(CORPORA)}, not {self.audio!r}")
        return self

    def draw(self, rng: random.Random) -> Content | None:
        """None: text only."""
        if self.image is not None:
            return Picture(*self.image)
        if self.video is not None and self.frames is not None:
            return Video(*self.video, self.frames)
        if self.audio_s is not None:
            return Sound(rng.uniform(*self.audio_s))
        if self.audio is not None:
            return Sound(utterance_s(self.audio, rng))
        return None


@dataclass(frozen=True, slots=True)
class Mix:
    """``items``: of which a request gets ``num_items``, by weight. The rest are the least and the
    most. An item that is text only adds none, so a request may have fewer than ``num_items``.

    Raises ValueError for a mix that cannot be.
    """

    items: tuple[Item, ...] = (Item(),)
    num_text_tokens: tuple[int, int] = (1024, 1024)
    num_output_tokens: tuple[int, int] = (128, 128)
    num_items: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if not any(item.weight for item in self.items):
            raise ValueError("one of the items must have a weight of more than 0")
        for name in ("num_text_tokens", "num_output_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                raise ValueError(f"{name} must go from 1 or more upwards, not {least} to {most}")
        least, most = self.num_items
        if not 0 <= least <= most <= MAX_ITEMS:
            raise ValueError(
                f"num_items must go upwards in 0 to {MAX_ITEMS}, not {least} to {most}"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """``num_text_tokens``: of the prompt, beside those of its items."""

    items: tuple[Content, ...]
    num_text_tokens: int
    num_output_tokens: int


PRESETS: Mapping[str, Mix] = {
    "random-mm": Mix((Item(image=(256, 256)), Item(image=(1280, 720)))),
    "random-mm-video": Mix((Item(video=(1280, 720), frames=16),)),
    "random-mm-video-assumed": Mix(
        (Item(video=(640, 360), frames=16), Item(video=(640, 480), frames=16))
    ),
    LIBRISPEECH: Mix((Item(audio=LIBRISPEECH),)),
    "text": Mix(),
    "mix": Mix(
        (
            Item(image=(1280, 720), weight=4),
            Item(video=(640, 360), frames=16, weight=1),
            Item(audio=LIBRISPEECH, weight=2),
            Item(weight=3),
        )
    ),
}
"""Mixes by name.

``random-mm``: what vLLM 0.32's bench draws by default (RandomMultiModalDataset in
vllm/benchmarks/datasets): one picture, 256 or 720 pixels high, 1024 and 128 tokens.
``random-mm-video``: the bucket that vLLM lists for videos, which it draws only if told so.
``random-mm-video-assumed``: sizes are assumed. The published results for video would need about
2700 tokens a video of Qwen2.5-VL; these have 2392 and 3128. They are inferred from results, so a
simulation of those results with this mix is no independent check.
``librispeech``: durations are LibriSpeech's; 1024 and 128 tokens are assumed, as of pictures.
``text``: no media, vLLM's 1024 and 128 tokens.
``mix``: 40 % pictures, 10 % videos, 20 % sounds, 30 % text only. All of it is assumed; it is not
what anybody measured of real users, but asks every modality of a server in one run.
"""


def parse_items(text: str) -> tuple[Item, ...]:
    """Items as a scenario writes them, in YAML: ``[{image: 1280x720, weight: 2}, {audio_s: 8}]``,
    or one of them without brackets.

    vLLM's buckets are taken too, ``{(256, 256, 1): 0.5, (720, 1280, 16): 0.5}``: height, width and
    frames, with a weight. Raises ValueError that names what is wrong.
    """
    if re.match(r"\s*\{\s*\(", text):
        return _buckets(text)
    try:
        found = yaml.safe_load(text)
        entries = found if isinstance(found, list) else [found]
        items = tuple(Item.model_validate(entry) for entry in entries)
    except yaml.YAMLError:
        raise ValueError(f"{text!r} is not like [{{image: 1280x720}}, {{audio_s: 8}}]") from None
    except ValidationError as error:
        [first, *_] = error.errors()
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{text!r}: {where or 'an item'}: {first['msg']}") from None
    if not items:
        raise ValueError(f"{text!r} has no items")
    return items


def _buckets(text: str) -> tuple[Item, ...]:
    found: list[Item] = []
    try:
        for (height, width, frames), weight in ast.literal_eval(text.strip()).items():
            size = (width, height)
            content = {"image": size} if frames == 1 else {"video": size, "frames": frames}
            found.append(Item.model_validate({"weight": weight, **content}))
    except (ValueError, TypeError, AttributeError, SyntaxError):
        raise ValueError(f"{text!r} is not like {{(height, width, frames): weight}}") from None
    return tuple(found)


def requests(mix: Mix, num: int, seed: int) -> Iterator[Request]:
    """The first ``num`` requests of a run, each made when it is asked for."""
    if num < 0:
        raise ValueError(f"the number of requests must not be negative, but is {num}")
    return (request(mix, seed, index) for index in range(num))


def request(mix: Mix, seed: int, index: int) -> Request:
    """Request number ``index``, counted from 0."""
    rng = random.Random(f"{seed}:{index}")  # noqa: S311 (sizes, not secrets)
    num_output_tokens = rng.randint(*mix.num_output_tokens)
    num_text_tokens = rng.randint(*mix.num_text_tokens)
    least, most = mix.num_items
    # What cannot differ is not drawn: mixes of one item draw what they always drew.
    num_items = least if least == most else rng.randint(least, most)
    chosen = rng.choices(mix.items, [item.weight for item in mix.items], k=num_items)
    drawn = [item.draw(rng) for item in chosen]
    items = tuple(content for content in drawn if content is not None)
    return Request(items, num_text_tokens, num_output_tokens)


def utterance_s(corpus: str, rng: random.Random) -> float:
    """The duration of an utterance of one of ``CORPORA``, in seconds.

    Between two published quantiles the logarithm is uniform (assumed: it meets the published means
    within 3 %); nothing is outside the shortest and the longest utterance.
    """
    part = corpus.removeprefix(LIBRISPEECH).removeprefix("-") or DEFAULT_PART
    percents: list[float] = _librispeech()["percents"]
    quantiles: list[float] = _librispeech()["parts"][part]["quantiles"]
    percent = rng.uniform(0, 100)
    after = min(bisect_right(percents, percent), len(percents) - 1)
    low, high = percents[after - 1], percents[after]
    shortest, longest = quantiles[after - 1], quantiles[after]
    return float(shortest * (longest / shortest) ** ((percent - low) / (high - low)))


@cache
def _librispeech() -> Mapping[str, Any]:
    content: Mapping[str, Any] = yaml.safe_load(LIBRISPEECH_FILE.read_text())
    return content
