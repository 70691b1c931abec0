import random
import statistics
from collections import Counter
from typing import Any

import pytest
import yaml

from easerve.types import Picture, Sound, Video
from easerve.workload.multimodal import (
    CORPORA,
    LIBRISPEECH_FILE,
    PARTS,
    PRESETS,
    Item,
    Mix,
    Request,
    parse_items,
    request,
    requests,
    utterance_s,
)


def item(**content: Any) -> Item:
    return Item.model_validate(content)


def run(mix: Mix, num: int = 400, seed: int = 7) -> list[Request]:
    return list(requests(mix, num, seed))


def durations(corpus: str, num: int = 20_000) -> list[float]:
    rng = random.Random(1)
    return sorted(utterance_s(corpus, rng) for _ in range(num))


@pytest.mark.parametrize(
    ("content", "drawn"),
    [
        ({"image": "1280x720"}, Picture(width=1280, height=720)),
        ({"image": " 256 × 100 "}, Picture(width=256, height=100)),
        ({"video": "1280x720", "frames": 16}, Video(width=1280, height=720, frames=16)),
        ({"audio_s": 8}, Sound(8)),
        ({"weight": 3}, None),
    ],
)
def test_an_item_as_it_stands_in_a_scenario(content: dict[str, Any], drawn: Any) -> None:
    assert item(**content).draw(random.Random(1)) == drawn


def test_seconds_are_drawn_from_the_least_to_the_most() -> None:
    rng, sounds = random.Random(1), item(audio_s=[2, 16])
    found = [made.seconds for _ in range(2000) if isinstance(made := sounds.draw(rng), Sound)]
    assert len(found) == 2000
    assert (round(min(found)), round(max(found))) == (2, 16)
    assert statistics.fmean(found) == pytest.approx(9, abs=0.4)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ({"image": "1280"}, "expected width x height in pixels, such as 1280x720"),
        ({"image": "0x720"}, "expected width x height in pixels, such as 1280x720"),
        ({"image": "12.5x720"}, "expected width x height in pixels, such as 1280x720"),
        ({"image": 1280}, "valid tuple"),
        ({"image": "1x1", "audio_s": 3}, "image, video, audio_s, audio, not image and audio_s"),
        ({"video": "1280x720"}, "video and frames: give both or neither"),
        ({"frames": 3}, "video and frames: give both or neither"),
        ({"audio_s": [3, 2]}, "audio_s must go from the least to the most"),
        ({"audio_s": 0}, "greater than 0"),
        ({"audio": "music"}, "audio is one of librispeech, .*, not 'music'"),
        ({"weight": -1}, "greater than or equal to 0"),
        ({"weight": float("nan")}, "finite number"),
        ({"picture": "1x1"}, "Extra inputs"),
    ],
)
def test_an_item_that_cannot_be_is_refused(content: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        item(**content)


def test_a_request_depends_on_mix_seed_and_number_only() -> None:
    mix = Mix((item(image="60x60"), item(audio="librispeech")), (10, 90), (1, 50))
    assert run(mix) == run(mix)
    assert run(mix, 20) == run(mix)[:20]
    assert request(mix, 7, 12) == run(mix)[12]
    assert run(mix, seed=8) != run(mix)


def test_items_come_as_often_as_their_weights_say() -> None:
    mix = Mix((item(weight=3, image="60x60"), item(weight=1), item(weight=0, image="8x8")))
    counts = Counter(made.items for made in run(mix, 2000))
    assert set(counts) == {(Picture(60, 60),), ()}
    assert counts[()] == pytest.approx(500, abs=80)


def test_tokens_go_from_the_least_to_the_most() -> None:
    made = run(Mix(num_text_tokens=(5, 7), num_output_tokens=(1, 3)))
    assert {each.num_text_tokens for each in made} == {5, 6, 7}
    assert {each.num_output_tokens for each in made} == {1, 2, 3}


@pytest.mark.parametrize(
    ("of_mix", "wrong"),
    [
        ({"items": ()}, "one of the items must have a weight"),
        ({"items": (Item(weight=0),)}, "one of the items must have a weight"),
        ({"num_text_tokens": (0, 5)}, "num_text_tokens must go from 1"),
        ({"num_output_tokens": (6, 5)}, "num_output_tokens must go from 1"),
        ({"num_items": (2, 1)}, "num_items must go upwards in 0 to 256, not 2 to 1"),
        ({"num_items": (-1, 1)}, "num_items must go upwards in 0 to 256"),
        ({"num_items": (1, 257)}, "num_items must go upwards in 0 to 256"),
    ],
)
def test_a_mix_that_cannot_be_is_refused(of_mix: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Mix(**of_mix)


def test_a_negative_number_of_requests_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="negative, but is -1"):
        requests(Mix(), -1, 7)


def test_random_mm_is_what_vllms_bench_draws() -> None:
    made = run(PRESETS["random-mm"], 2000)
    assert {(each.num_text_tokens, each.num_output_tokens) for each in made} == {(1024, 128)}
    counts = Counter(made.items for made in made)
    assert set(counts) == {(Picture(256, 256),), (Picture(width=1280, height=720),)}
    assert counts[(Picture(256, 256),)] == pytest.approx(1000, abs=100)


def test_video_presets() -> None:
    assert {each.items for each in run(PRESETS["random-mm-video"])} == {(Video(1280, 720, 16),)}
    found = {each.items for each in run(PRESETS["random-mm-video-assumed"])}
    assert found == {(Video(640, 360, 16),), (Video(640, 480, 16),)}


def test_the_corpora_are_those_of_the_file() -> None:
    content = yaml.safe_load(LIBRISPEECH_FILE.read_text())
    assert tuple(content["parts"]) == PARTS
    for part in content["parts"].values():
        assert len(part["quantiles"]) == len(content["percents"])
        assert part["quantiles"] == sorted(part["quantiles"])


@pytest.mark.parametrize("part", PARTS)
def test_utterances_have_the_published_quantiles_mean_and_deviation(part: str) -> None:
    content = yaml.safe_load(LIBRISPEECH_FILE.read_text())
    published, found = content["parts"][part], durations(f"librispeech-{part}")
    for percent, quantile in zip(content["percents"], published["quantiles"], strict=True):
        if 5 <= percent <= 95:
            place = round(percent / 100 * len(found))
            assert found[place] == pytest.approx(quantile, rel=0.03)
    assert found[0] >= published["quantiles"][0]
    assert found[-1] <= published["quantiles"][-1]
    assert statistics.fmean(found) == pytest.approx(published["mean"], rel=0.03)
    assert statistics.pstdev(found) == pytest.approx(published["std"], rel=0.05)


def test_librispeech_is_test_clean_unless_it_is_said() -> None:
    assert durations("librispeech", 50) == durations("librispeech-test-clean", 50)
    assert len({tuple(durations(corpus, 50)) for corpus in CORPORA}) == len(PARTS)
    sounds = [made.items[0] for made in run(PRESETS["librispeech"])]
    assert all(isinstance(sound, Sound) and 1.3 <= sound.seconds <= 35 for sound in sounds)


def test_a_request_of_one_item_draws_what_it_always_drew() -> None:
    """Scenarios have their published figures from these draws."""
    mix = Mix((item(image="60x60"), item(audio_s=[1, 9]), item()), (5, 50), (1, 9))
    for index in range(50):
        rng = random.Random(f"7:{index}")
        output, text = rng.randint(1, 9), rng.randint(5, 50)
        [chosen] = rng.choices(mix.items, [1, 1, 1])
        content = chosen.draw(rng)
        assert request(mix, 7, index) == Request((content,) if content else (), text, output)


def test_numbers_of_items_go_from_the_least_to_the_most() -> None:
    made = run(Mix((item(image="60x60"), item(audio_s=1)), num_items=(0, 3)), 2000)
    counts = Counter(len(each.items) for each in made)
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) - min(counts.values()) < 150
    assert len({each.items for each in made}) == 1 + 2 + 4 + 8
    assert {len(each.items) for each in run(Mix((item(image="8x8"),), num_items=(2, 2)))} == {2}


def test_items_that_are_text_only_add_none() -> None:
    made = run(Mix((item(image="60x60"), item()), num_items=(2, 2)), 400)
    assert {len(each.items) for each in made} == {0, 1, 2}


def test_presets_of_a_bench() -> None:
    assert {each.items for each in run(PRESETS["text"])} == {()}
    kinds = Counter(type(each.items[0]) if each.items else None for each in run(PRESETS["mix"]))
    shares = {kind: count / 400 for kind, count in kinds.items()}
    expected = {Picture: 0.4, Video: 0.1, Sound: 0.2, None: 0.3}
    assert shares == pytest.approx(expected, abs=0.08)


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("{image: 1280x720}", (item(image="1280x720"),)),
        (
            "[{video: 640x360, frames: 16, weight: 2}, {audio_s: [2, 16]}, {}]",
            (item(video="640x360", frames=16, weight=2), item(audio_s=[2, 16]), item()),
        ),
        ("{}", (item(),)),
        (
            " {(256, 128, 1): 0.5, (720, 1280, 16): 0.25}",
            (
                item(image="128x256", weight=0.5),
                item(video="1280x720", frames=16, weight=0.25),
            ),
        ),
    ],
)
def test_items_as_words(text: str, items: tuple[Item, ...]) -> None:
    assert parse_items(text) == items


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[", "is not like"),
        ("", "valid dictionary"),
        ("[]", "has no items"),
        ("picture", "valid dictionary"),
        ("{image: 12}", "image: Input should be a valid tuple"),
        ("{picture: 1x1}", "picture: Extra inputs"),
        ("{(1, 2): 3}", "is not like {.height, width, frames.: weight}"),
        ("{(1, 2, 3)}", "is not like {.height"),
        ("{(0, 2, 1): 1}", "is not like {.height"),
        ("{(2, 2, 1): 1", "is not like {.height"),
    ],
)
def test_words_that_are_no_items(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        parse_items(text)
