"""Requests with real media, as OpenAI chat bodies: of sizes (``workload/multimodal``), the bytes.

A body depends on the request, the seed and the request's number only. Parts are those that vLLM
takes: ``image_url`` and ``video_url`` with a data URL, ``input_audio`` with a WAV, then one text.
"""

import base64
import random
from dataclasses import dataclass
from typing import Any

from easerve.types import Content, Picture, Sound, Video
from easerve.workload import multimodal, synthetic
from easerve.workload.synthetic import PictureFormat

POSITION_BITS = 8
MAX_ITEMS = 1 << POSITION_BITS  # in one request
# Frequent and short: a token each, with the space before it, in the vocabularies of today's models.
WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea body back parent face level "
    "office door health person art war history party result change morning reason research girl "
    "guy moment air teacher force"
).split()


@dataclass(frozen=True, slots=True)
class Options:
    """Of a body. ``ignore_eos`` lets a server go on to ``max_tokens``, so that answers have the
    length that was asked, as vLLM's bench does; it and ``temperature`` None are left out.
    ``picture_format`` None: see ``synthetic.encoded``.
    """

    ignore_eos: bool = True
    temperature: float | None = 0.0
    picture_format: PictureFormat | None = None

    def sampling(self) -> dict[str, Any]:
        """What they add to a body."""
        added: dict[str, Any] = {}
        if self.temperature is not None:
            added["temperature"] = self.temperature
        if self.ignore_eos:
            added["ignore_eos"] = True
        return added


def body(
    request: multimodal.Request, seed: int, index: int, options: Options | None = None
) -> dict[str, Any]:
    """Request number ``index``, counted from 0, without a model's name.

    Raises ValueError for more than ``MAX_ITEMS`` items or an item of a size that cannot be,
    MissingPackageError for a video without PyAV.
    """
    if len(request.items) > MAX_ITEMS:
        raise ValueError(f"a request has {MAX_ITEMS} items at most, not {len(request.items)}")
    options = options or Options()
    rng = random.Random(f"{seed}:{index}:content")  # noqa: S311 (pictures, not secrets)
    content = text(request.num_text_tokens, rng)
    parts = [
        part(item, index << POSITION_BITS | position, rng, options.picture_format)
        for position, item in enumerate(request.items)
    ]
    return {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": content}]}],
        "max_tokens": request.num_output_tokens,
        **options.sampling(),
    }


def text(num_tokens: int, rng: random.Random) -> str:
    """About so many tokens: a word is taken for a token.

    That is exact for Mistral's tokenizers, of three generations; a small vocabulary makes more of
    it (``models/tiny-llava``: 4.7 a word), and a chat template adds some. Reports give the server's
    own count. The first words differ from request to request, so that no prefix of a
    prompt is found in a cache.
    """
    return " ".join(rng.choices(WORDS, k=num_tokens))


def part(
    item: Content, number: int, rng: random.Random, form: PictureFormat | None = None
) -> dict[str, Any]:
    """An item as a part of a message's content."""
    match item:
        case Picture():
            drawn = synthetic.picture(item.width, item.height, number, rng)
            content, kind = synthetic.encoded(drawn, form)
            return {"type": "image_url", "image_url": {"url": data_url(f"image/{kind}", content)}}
        case Video():
            content = synthetic.video(item.width, item.height, item.frames, number, rng)
            return {"type": "video_url", "video_url": {"url": data_url("video/mp4", content)}}
        case Sound():
            content = synthetic.sound(item.seconds, number, rng)
            return {"type": "input_audio", "input_audio": input_audio(content, "wav")}


def data_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{_base64(content)}"


def input_audio(content: bytes, form: str) -> dict[str, str]:
    return {"data": _base64(content), "format": form}


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
