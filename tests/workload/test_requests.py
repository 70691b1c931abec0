import hashlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from easerve.config import ConfigError
from easerve.workload import mix, requests
from easerve.workload.content import Options
from easerve.workload.multimodal import PRESETS, Item
from easerve.workload.requests import MODALITIES, Asked, Body, bodies
from tests.workload.test_content import media

SMALL = (
    Item(image=(96, 96)),
    Item(video=(32, 32), frames=2),
    Item(audio_s=(0.1, 0.2)),
    Item(),
)
# Prints what a run's bodies hash to; told apart by nothing but its arguments.
HASHED = """
from tests.workload.test_requests import *
print(digest(bodies(Asked(items=SMALL, text_tokens=(5, 9)), 12, 3)))
print(digest(bodies(Asked("shapes"), 4, 3)))
"""


def made(num: int = 3, seed: int = 1, first: int = 0, **asked: Any) -> list[Body]:
    return list(bodies(Asked(**asked), num, seed, first))


def content(body: Body) -> list[dict[str, Any]]:
    [message] = body.body["messages"]
    parts: list[dict[str, Any]] = message["content"]
    return parts


def digest(made: Any) -> str:
    return hashlib.sha256(json.dumps(list(made)).encode()).hexdigest()


@pytest.mark.parametrize(
    ("modality", "kind", "types"),
    [
        ("image", "image", ["image_url", "text"]),
        ("video", "video", ["video_url", "text"]),
        ("audio", "audio", ["input_audio", "text"]),
        ("text", "text", ["text"]),
        ("shapes", "image", ["image_url", "text"]),
    ],
)
def test_a_modality(modality: str, kind: str, types: list[str]) -> None:
    [body] = made(1, modality=modality)
    assert (body.kind, body.at_s) == (kind, None)
    assert [part["type"] for part in content(body)] == types
    assert body.body.keys() == {"messages", "max_tokens", "temperature", "ignore_eos"}


def test_a_mix_asks_what_the_preset_asks() -> None:
    assert requests._mix(Asked("mix")) == PRESETS["mix"]
    assert MODALITIES == ("image", "video", "audio", "text", "mix", "shapes")


def test_a_kind_names_every_modality_of_a_request() -> None:
    kinds = {body.kind for body in made(40, items=SMALL, num_items=(2, 3), text_tokens=(1, 1))}
    assert {"text", "audio", "audio+image", "audio+image+video"} <= kinds


def test_the_same_seed_gives_the_same_bytes_in_any_process() -> None:
    here = [
        digest(bodies(Asked(items=SMALL, text_tokens=(5, 9)), 12, 3)),
        digest(bodies(Asked("shapes"), 4, 3)),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    there = subprocess.run(
        [sys.executable, "-c", HASHED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert there.stdout.split() == here
    assert digest(bodies(Asked("shapes"), 4, 4)) not in here


@pytest.mark.parametrize("asked", [{"items": SMALL}, {"modality": "shapes"}])
def test_a_run_can_be_cut_short_or_gone_on_with(asked: dict[str, Any]) -> None:
    whole = made(8, **asked)
    assert made(3, **asked) == whole[:3]
    assert made(3, first=5, **asked) == whole[5:]


def test_what_is_asked_replaces_what_is_usual() -> None:
    [body] = made(
        1,
        preset="random-mm",
        text_tokens=(5, 5),
        output_tokens=(3, 3),
        num_items=(2, 2),
        image_sizes=((64, 32),),
        options=Options(ignore_eos=False, temperature=None),
    )
    *pictures, text = content(body)
    assert [Image.open(io.BytesIO(media(each))).size for each in pictures] == [(64, 32)] * 2
    assert len(text["text"].split()) == 5
    assert body.body.keys() == {"messages", "max_tokens"}
    assert body.body["max_tokens"] == 3


def test_sizes_come_as_often_as_others_did() -> None:
    asked = Asked(items=(Item(image=(8, 8), weight=2), Item()), image_sizes=((9, 9), (16, 16)))
    assert [item.weight for item in requests._mix(asked).items] == [1, 1, 1]


def test_shapes_are_those_of_the_tiny_model() -> None:
    for index, body in enumerate(made(3, modality="shapes")):
        drawn = mix.request(mix.Mix(num_output_tokens=(8, 24)), 1, index)
        assert body.body["messages"] == drawn.messages
        assert body.body["max_tokens"] == drawn.max_tokens


def test_shapes_of_other_sizes_and_numbers() -> None:
    [body] = made(1, modality="shapes", num_items=(3, 3), image_sizes=((64, 32),))
    assert [part["type"] for part in content(body)] == ["image_url"] * 3 + ["text"]


@pytest.mark.parametrize(
    ("asked", "wrong"),
    [
        ({"modality": "smell"}, "a modality is one of image, video, .*, not 'smell'"),
        ({"preset": "best"}, "a preset is one of random-mm, .*, not 'best'"),
        ({"preset": "text", "items": SMALL}, "one of preset, items and dataset"),
        ({"dataset": Path("a"), "text_tokens": (1, 1)}, "says itself what text_tokens would"),
        ({"dataset": Path("a"), "output_tokens": (2, 1)}, "output_tokens must go from 1"),
        ({"shuffled": True}, "only a dataset can be shuffled"),
        ({"text_tokens": (0, 1)}, "num_text_tokens must go from 1"),
        (
            {"modality": "shapes", "num_items": (2, 1)},
            "num_items must go from 0 or more upwards, not 2 to 1",
        ),
        ({"modality": "shapes", "num_items": (0, 999)}, "num_images must be 0 to 256"),
        ({"modality": "shapes", "image_sizes": ((1, 1),)}, "both sides must be 4"),
        ({"modality": "audio", "image_sizes": ((9, 9),)}, "image_sizes would do nothing"),
        ({"modality": "text", "num_items": (1, 2)}, "num_items would do nothing"),
    ],
)
def test_what_cannot_be_asked(asked: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Asked(**asked)


def test_what_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="8 pixels or more, not 4x4"):
        made(1, image_sizes=((4, 4),))
    with pytest.raises(ConfigError, match="must be even, not 33x32"):
        made(1, items=(Item(video=(33, 32), frames=2),))
    with pytest.raises(ConfigError, match="requests cannot be -1"):
        bodies(Asked(), -1, 1)


def dataset(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_dataset(tmp_path: Path) -> None:
    Image.new("RGB", (3, 2)).save(tmp_path / "a.png")
    path = dataset(
        tmp_path,
        {"prompt": "a", "at_s": 0.5, "max_tokens": 7},
        {"prompt": "b", "images": ["a.png"], "at_s": 0.75},
    )
    text, picture = made(2, dataset=path, output_tokens=(2, 2))
    assert (text.kind, text.at_s, text.body["max_tokens"]) == ("text", 0.5, 7)
    assert (picture.kind, picture.at_s, picture.body["max_tokens"]) == ("image", 0.75, 2)
    assert made(1, first=1, dataset=path, output_tokens=(2, 2)) == [picture]
    assert {body.at_s for body in made(5, dataset=path, oversampled=True)} == {None}
    assert made(2, dataset=path, shuffled=True) == made(2, dataset=path, shuffled=True)


def test_errors_of_a_dataset_name_file_and_line(tmp_path: Path) -> None:
    path = dataset(tmp_path, {"prompt": "a"}, {"prompt": "b", "images": ["gone.png"]})
    with pytest.raises(ConfigError, match=r"data.jsonl, line 2: .*gone.png is not there"):
        made(2, dataset=path)
    with pytest.raises(ConfigError, match=r"data.jsonl has 2 requests, but 3 are asked"):
        made(3, dataset=path)
    with pytest.raises(ConfigError, match="No such file"):
        made(3, dataset=tmp_path / "gone.jsonl")


def test_the_kind_of_a_body_without_content() -> None:
    assert requests.kind_of({"messages": [{"role": "assistant", "tool_calls": []}]}) == "text"
