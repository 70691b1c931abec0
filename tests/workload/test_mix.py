import base64
import io
import json
import math
import random
from collections import Counter
from typing import Any

import pytest
from PIL import Image

from easerve.workload import shapes
from easerve.workload.mix import WORDS, Mix, Request, request, requests


def pictures(made: Request) -> list[Image.Image]:
    urls = [part["image_url"]["url"] for part in made.content if part["type"] == "image_url"]
    return [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]


def text(made: Request) -> str:
    last = made.content[-1]
    assert last["type"] == "text"
    assert isinstance(last["text"], str)
    return last["text"]


def run(num: int = 300, **of_mix: Any) -> list[Request]:
    return list(requests(Mix(**of_mix), num, 7))


def test_the_default_is_one_small_picture_and_a_question() -> None:
    for made in run(30):
        assert [part["type"] for part in made.content] == ["image_url", "text"]
        assert made.content[0]["image_url"]["url"].startswith("data:image/png;base64,")
        assert [picture.size for picture in pictures(made)] == [(60, 60)]
        assert made.num_images == 1
        assert 8 <= made.max_tokens <= 24
        assert made.messages == [{"role": "user", "content": made.content}]
        assert json.loads(json.dumps(made.messages)) == made.messages


def test_the_picture_and_the_question_are_those_of_shapes() -> None:
    rng = random.Random("7:0")
    rng.randint(8, 24), rng.randint(0, 0), rng.random(), rng.choices([1])
    scene = shapes.draw(rng)
    question = shapes.ask(rng.choice(shapes.QUESTION_KINDS), scene, rng)
    made = request(Mix(), 7, 0)
    assert text(made) == question.text
    found = pictures(made)[0].tobytes()
    # The stamp changes nothing but the lowest bits of the first 16 pixels.
    differences = [abs(a - b) for a, b in zip(found, scene.picture.tobytes(), strict=True)]
    assert max(differences) <= 1
    assert not any(differences[48:])


def test_a_request_depends_on_its_seed_and_number_only() -> None:
    mix = Mix(num_images={0: 1, 1: 1, 3: 1}, num_words=(5, 50), text_share=0.2)
    made = list(requests(mix, 20, 7))
    assert list(requests(mix, 5, 7)) == made[:5]
    assert [request(mix, 7, index) for index in reversed(range(20))] == made[::-1]
    assert all(one != other for one, other in zip(requests(mix, 20, 8), made, strict=True))


def test_the_order_in_which_weights_are_written_does_not_count() -> None:
    one = Mix(num_images={1: 0.3, 2: 0.7}, sizes={(60, 60): 1, (40, 30): 2})
    other = Mix(num_images={2: 0.7, 1: 0.3}, sizes={(40, 30): 2, (60, 60): 1})
    assert list(requests(one, 20, 1)) == list(requests(other, 20, 1))


def test_mixes_that_differ_in_sizes_ask_the_same() -> None:
    small, mixed = run(20), run(20, sizes={(60, 60): 1, (90, 80): 1})
    assert list(map(text, small)) == list(map(text, mixed))
    assert [made.max_tokens for made in small] == [made.max_tokens for made in mixed]


@pytest.mark.parametrize("size", [(60, 60), (4, 4), (96, 48)])
def test_no_two_pictures_of_a_run_have_equal_pixels(size: tuple[int, int]) -> None:
    made = run(150, num_images={2: 1}, sizes={size: 1})
    found = [picture for each in made for picture in pictures(each)]
    assert {picture.size for picture in found} == {size}
    assert len({picture.tobytes() for picture in found}) == len(found) == 300


def test_pictures_are_apart_even_when_the_same_scene_is_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = shapes.draw(random.Random(1))
    monkeypatch.setattr(shapes, "draw", lambda _: scene)
    found = [picture for each in run(100, num_images={3: 1}) for picture in pictures(each)]
    assert len({picture.tobytes() for picture in found}) == len(found) == 300


def test_numbers_and_sizes_come_as_often_as_their_weights_say() -> None:
    made = run(600, num_images={0: 1, 1: 2, 2: 1, 5: 0}, sizes={(8, 8): 3, (9, 6): 1})
    counts = Counter(each.num_images for each in made)
    assert set(counts) == {0, 1, 2}
    assert counts[1] / 600 == pytest.approx(0.5, abs=0.08)
    assert counts[2] / 600 == pytest.approx(0.25, abs=0.08)
    assert all(len(pictures(each)) == each.num_images for each in made)
    sizes = Counter(picture.size for each in made for picture in pictures(each))
    assert sizes[8, 8] / sizes.total() == pytest.approx(0.75, abs=0.08)
    assert set(sizes) == {(8, 8), (9, 6)}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_requests_is_text_only(share: float) -> None:
    made = run(400, text_share=share, sizes={(8, 8): 1})
    text_only = [each for each in made if each.num_images == 0]
    assert len(text_only) / 400 == pytest.approx(share, abs=0.08 if 0 < share < 1 else 0)
    assert all([part["type"] for part in each.content] == ["text"] for each in text_only)
    assert len({text(each) for each in text_only}) == len(text_only)


def test_texts_have_the_number_of_words_that_was_asked() -> None:
    for share in (0.0, 1.0):
        lengths = [
            len(text(each).split()) for each in run(300, num_words=(20, 25), text_share=share)
        ]
        assert set(lengths) == set(range(20, 26))


def test_filler_comes_before_the_question_and_a_question_is_never_cut() -> None:
    for plain, filled in zip(run(30), run(30, num_words=(30, 30)), strict=True):
        filler = text(filled).removesuffix(text(plain)).split()
        assert set(filler) <= set(WORDS)
        assert len(filler) == 30 - len(text(plain).split())
    assert list(map(text, run(30, num_words=(1, 1)))) == list(map(text, run(30)))


def test_output_tokens_go_from_the_least_to_the_most() -> None:
    made = run(200, num_output_tokens=(3, 6), text_share=1.0)
    assert {each.max_tokens for each in made} == {3, 4, 5, 6}
    assert {each.max_tokens for each in run(400, text_share=1.0)} == set(range(8, 25))


@pytest.mark.parametrize(
    ("of_mix", "wrong"),
    [
        ({"num_images": {}}, "the weights of num_images"),
        ({"num_images": {1: 0.0}}, "the weights of num_images"),
        ({"num_images": {1: -1.0, 2: 2.0}}, "the weights of num_images"),
        ({"sizes": {(60, 60): math.nan}}, "the weights of sizes"),
        ({"sizes": {(60, 60): math.inf}}, "the weights of sizes"),
        ({"num_images": {-1: 1.0}}, "num_images must be 0 to 256, not -1"),
        ({"num_images": {257: 1.0}}, "num_images must be 0 to 256, not 257"),
        ({"sizes": {(60, 3): 1.0}}, "both sides must be 4 pixels or more"),
        ({"num_words": (5, 4)}, "num_words must go from 0"),
        ({"num_words": (-1, 4)}, "num_words must go from 0"),
        ({"num_output_tokens": (0, 4)}, "num_output_tokens must go from 1"),
        ({"num_output_tokens": (9, 8)}, "num_output_tokens must go from 1"),
        ({"text_share": 1.1}, "text_share must be 0 to 1"),
        ({"text_share": -0.1}, "text_share must be 0 to 1"),
        ({"text_share": math.nan}, "text_share must be 0 to 1"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(of_mix: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Mix(**of_mix)


def test_a_negative_number_of_requests_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="negative, but is -1"):
        requests(Mix(), -1, 7)
    assert list(requests(Mix(), 0, 7)) == []
