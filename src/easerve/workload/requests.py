"""What a bench asks a server: bodies of chat requests, from whatever source is named.

A body depends on what is asked, the seed and its own number only: the same seed gives the same
bytes in any process, and a run that is cut short has sent the same. Bodies have neither a model's
name nor ``stream``; whoever sends them adds both.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from easerve.config import ConfigError
from easerve.workload import content, dataset, mix, multimodal, shapes
from easerve.workload.content import Options
from easerve.workload.multimodal import LIBRISPEECH, PRESETS, Item, Mix, Size
from easerve.workload.synthetic import MissingPackageError

ITEMS: dict[str, tuple[Item, ...]] = {
    "image": (Item(image=(1280, 720)),),
    "video": (Item(video=(640, 360), frames=16),),
    "audio": (Item(audio=LIBRISPEECH),),
    "text": (Item(),),
    "mix": PRESETS["mix"].items,
}
MODALITIES = (*ITEMS, "shapes")
PARTS = {"image_url": "image", "video_url": "video", "input_audio": "audio", "audio_url": "audio"}
SHAPES_TOKENS, DATASET_TOKENS = (8, 24), (128, 128)  # of an answer
Range = tuple[int, int]
"""The least and the most, all in between equally likely."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The source of requests: a ``dataset`` (``workload/dataset``), ``items``, a ``preset``
    (``multimodal.PRESETS``) or else a ``modality``, one of ``MODALITIES``.

    ``image``: pictures of 1280x720. ``video``: 16 frames of 640x360. ``audio``: as long as
    LibriSpeech's utterances. ``text``: no media. ``mix``: items of the preset of that name.
    ``shapes``: pictures of coloured shapes and questions about them (``workload/mix``), which
    ``models/tiny-llava`` knows.

    ``image_sizes`` replaces the sizes of pictures, each equally likely; ``num_items`` is per
    request (1 if None), ``text_tokens`` about so many (1024; ``shapes``: the question's) and
    ``output_tokens`` are asked (128; ``shapes``: 8 to 24). A data set says all that itself:
    ``output_tokens`` are for its lines that do not, it may be ``shuffled`` by the seed, and
    ``oversampled`` lets its lines come again when it has fewer than asked.

    Raises ConfigError for what cannot be, or would do nothing.
    """

    modality: str = "image"
    preset: str | None = None
    items: tuple[Item, ...] | None = None
    dataset: Path | None = None
    text_tokens: Range | None = None
    output_tokens: Range | None = None
    num_items: Range | None = None
    image_sizes: tuple[Size, ...] | None = None
    shuffled: bool = False
    oversampled: bool = False
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        try:
            _check_names(self)
            _check_source(self)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @property
    def is_shapes(self) -> bool:
        sources = (self.items, self.preset, self.dataset)
        return self.modality == "shapes" and all(source is None for source in sources)


class Body(NamedTuple):
    """``kind``: its modalities in words, such as ``image`` or ``audio+image``, or ``text``.

    ``at_s``: when it is to be sent, if a data set says so.
    """

    body: dict[str, Any]
    kind: str
    at_s: float | None = None


def bodies(asked: Asked, num: int, seed: int, first: int = 0) -> Iterator[Body]:
    """``num`` bodies from number ``first`` on, each made when it is asked for.

    Raises ConfigError, at once or when they are made, for a data set that cannot be used (with file
    and line) or is too short, media of a size that cannot be, a package that is missing.
    """
    if num < 0 or first < 0:
        raise ConfigError(f"requests cannot be {num} from number {first} on")
    numbers = range(first, first + num)
    if asked.dataset is not None:
        return _told(_of_dataset(asked, asked.dataset, numbers, seed))
    if asked.is_shapes:
        return _told(_of_shapes(asked, numbers, seed))
    return _told(_of_mix(asked, numbers, seed))


def _told(made: Iterator[Body]) -> Iterator[Body]:
    """The same, with errors as ``bodies`` promises them."""
    try:
        yield from made
    except (ValueError, MissingPackageError) as error:
        raise ConfigError(str(error)) from None


def _of_dataset(asked: Asked, path: Path, numbers: range, seed: int) -> Iterator[Body]:
    rows = dataset.select(
        dataset.load(path),
        numbers.stop,
        seed,
        shuffled=asked.shuffled,
        oversampled=asked.oversampled,
    )
    for number in numbers:
        row = rows[number]
        rng = random.Random(f"{seed}:{number}")  # noqa: S311 (lengths of answers, not secrets)
        body = dataset.body(
            row, rng.randint(*(asked.output_tokens or DATASET_TOKENS)), asked.options
        )
        yield Body(body, kind_of(body), row.at_s)


def _of_shapes(asked: Asked, numbers: range, seed: int) -> Iterator[Body]:
    pictures = _shapes(asked)
    for number in numbers:
        drawn = mix.request(pictures, seed, number)
        body = {"messages": drawn.messages, "max_tokens": drawn.max_tokens}
        yield Body({**body, **asked.options.sampling()}, kind_of(body))


def _of_mix(asked: Asked, numbers: range, seed: int) -> Iterator[Body]:
    media = _mix(asked)
    for number in numbers:
        drawn = multimodal.request(media, seed, number)
        body = content.body(drawn, seed, number, asked.options)
        yield Body(body, kind_of(body))


def kind_of(body: dict[str, Any]) -> str:
    """The modalities of a chat body, in words."""
    found: set[str] = set()
    for message in body["messages"]:
        parts = message.get("content")
        if isinstance(parts, list):
            found |= {PARTS[part["type"]] for part in parts if part["type"] in PARTS}
    return "+".join(sorted(found)) or "text"


def _check_names(asked: Asked) -> None:
    if asked.modality not in MODALITIES:
        raise ValueError(f"a modality is one of {', '.join(MODALITIES)}, not {asked.modality!r}")
    if asked.preset is not None and asked.preset not in PRESETS:
        raise ValueError(f"a preset is one of {', '.join(PRESETS)}, not {asked.preset!r}")
    given = [name for name in ("preset", "items", "dataset") if getattr(asked, name) is not None]
    if len(given) > 1:
        raise ValueError(f"give one of preset, items and dataset, not {' and '.join(given)}")


def _check_source(asked: Asked) -> None:
    if asked.dataset is not None:
        _check_range("output_tokens", asked.output_tokens)
        for name in ("text_tokens", "num_items", "image_sizes"):
            if getattr(asked, name) is not None:
                raise ValueError(f"a dataset says itself what {name} would")
        return
    if asked.shuffled or asked.oversampled:
        raise ValueError("only a dataset can be shuffled or oversampled")
    if asked.is_shapes:
        _shapes(asked)
        return
    items = _mix(asked).items
    if asked.image_sizes is not None and all(item.image is None for item in items):
        raise ValueError("image_sizes would do nothing: no picture is asked")
    if asked.num_items is not None and all(item == Item(weight=item.weight) for item in items):
        raise ValueError("num_items would do nothing: only text is asked")


def _check_range(name: str, given: Range | None, lowest: int = 1) -> None:
    if given is not None and not lowest <= given[0] <= given[1]:
        raise ValueError(
            f"{name} must go from {lowest} or more upwards, not {given[0]} to {given[1]}"
        )


def _shapes(asked: Asked) -> mix.Mix:
    least, most = asked.num_items or (1, 1)
    _check_range("num_items", asked.num_items, 0)
    return mix.Mix(
        num_images=dict.fromkeys(range(least, most + 1), 1.0),
        sizes=dict.fromkeys(asked.image_sizes or ((shapes.SIZE, shapes.SIZE),), 1.0),
        num_words=asked.text_tokens or (0, 0),
        num_output_tokens=asked.output_tokens or SHAPES_TOKENS,
    )


def _mix(asked: Asked) -> Mix:
    base = PRESETS[asked.preset] if asked.preset else Mix(asked.items or ITEMS[asked.modality])
    return Mix(
        _resized(base.items, asked.image_sizes),
        asked.text_tokens or base.num_text_tokens,
        asked.output_tokens or base.num_output_tokens,
        asked.num_items or base.num_items,
    )


def _resized(items: tuple[Item, ...], sizes: tuple[Size, ...] | None) -> tuple[Item, ...]:
    """Each picture in each of the sizes, all together as often as before."""
    if sizes is None:
        return items
    found: list[Item] = []
    for item in items:
        if item.image is None:
            found.append(item)
        else:
            found += [Item(image=size, weight=item.weight / len(sizes)) for size in sizes]
    return tuple(found)
