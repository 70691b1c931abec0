import base64
import io
import random
import wave
from typing import Any

import pytest
from PIL import Image

from easerve.types import Picture, Sound, Video
from easerve.workload import content
from easerve.workload.content import Options
from easerve.workload.multimodal import Request

EVERYTHING = Request((Picture(100, 80), Video(64, 48, 2), Sound(0.2)), 30, 7)


def media(part: dict[str, Any]) -> bytes:
    """The bytes of a part."""
    if part["type"] == "input_audio":
        return base64.b64decode(part["input_audio"]["data"], validate=True)
    head, _, data = part[part["type"]]["url"].partition(",")
    assert head.endswith(";base64")
    return base64.b64decode(data, validate=True)


def test_a_body_has_media_then_text() -> None:
    body = content.body(EVERYTHING, 7, 3)
    [message] = body["messages"]
    picture, video, sound, text = message["content"]
    assert [part["type"] for part in message["content"]] == [
        "image_url",
        "video_url",
        "input_audio",
        "text",
    ]
    assert picture["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert video["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert sound["input_audio"]["format"] == "wav"
    assert len(text["text"].split()) == 30
    with Image.open(io.BytesIO(media(picture))) as image:
        assert image.size == (100, 80)
    with wave.open(io.BytesIO(media(sound))) as file:
        assert file.getnframes() == 3200
    del body["messages"]
    assert body == {"max_tokens": 7, "temperature": 0, "ignore_eos": True}


def test_a_body_depends_on_request_seed_and_number_only() -> None:
    assert content.body(EVERYTHING, 7, 3) == content.body(EVERYTHING, 7, 3)
    others = [content.body(EVERYTHING, 7, 4), content.body(EVERYTHING, 8, 3)]
    parts = zip(
        *(body["messages"][0]["content"] for body in (content.body(EVERYTHING, 7, 3), *others)),
        strict=True,
    )
    for same_place in parts:
        assert len(set(map(str, same_place))) == 3


def test_no_two_items_of_a_run_are_equal() -> None:
    alike = Request((Picture(8, 8), Picture(8, 8), Sound(0.01), Sound(0.01)), 1, 1)
    parts = [
        media(part)
        for index in range(50)
        for part in content.body(alike, 1, index)["messages"][0]["content"][:-1]
    ]
    assert len(set(parts)) == 200


def test_options() -> None:
    plain = content.body(EVERYTHING, 7, 3, Options(False, None, "png"))
    assert plain.keys() == {"messages", "max_tokens"}
    assert plain["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png;")


def test_text_only_has_no_other_part() -> None:
    [message] = content.body(Request((), 5, 1), 1, 0)["messages"]
    assert [part["type"] for part in message["content"]] == ["text"]


def test_too_many_items_are_refused() -> None:
    with pytest.raises(ValueError, match="256 items at most, not 257"):
        content.body(Request((Picture(8, 8),) * 257, 1, 1), 1, 0)


def test_words_are_short_and_differ_from_text_to_text() -> None:
    assert len(set(content.WORDS)) == len(content.WORDS)
    rng = random.Random(1)
    assert len({content.text(8, rng) for _ in range(500)}) == 500
    assert len(content.text(1000, rng).split()) == 1000
