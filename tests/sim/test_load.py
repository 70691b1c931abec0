from pathlib import Path
from typing import Any

import pytest

from easerve.config import ConfigError
from easerve.costs import models
from easerve.sim.load import Workload, requests
from easerve.sim.scenario import _check_media
from easerve.workload.multimodal import PRESETS

MODEL = models.read("llava-v1.6-34b")


def test_requests_come_in_order_and_ask_what_the_mix_says() -> None:
    workload = Workload(rate_per_s=2, num_requests=200, preset="random-mm", rescaled=True)
    found = requests(workload, MODEL)
    times_s = [request.at_s for request in found]
    assert times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(100)
    assert {request.num_text_tokens for request in found} == {1024}
    assert {request.num_tokens for request in found} == {128}
    # Of 256x256 and of 1280x720, by vLLM's own count.
    assert {item.num_tokens for request in found for item in request.items} == {1176, 1948}
    assert {request.num_prompt_tokens for request in found} == {2200, 2972}


def test_the_same_seed_is_the_same_load_and_another_is_not() -> None:
    workload = Workload(rate_per_s=2, num_requests=50, preset="random-mm", seed=3)
    found = requests(workload, MODEL)
    assert found == requests(workload, MODEL)
    other = requests(workload.model_copy(update={"seed": 4}), MODEL)
    assert [each.at_s for each in found] != [each.at_s for each in other]
    assert [each.items for each in found] != [each.items for each in other]


def test_another_rate_is_the_same_load_faster() -> None:
    slow = requests(Workload(rate_per_s=2, num_requests=50, preset="random-mm"), MODEL)
    fast = requests(Workload(rate_per_s=4, num_requests=50, preset="random-mm"), MODEL)
    assert [each.at_s for each in slow] == pytest.approx([2 * each.at_s for each in fast])
    assert [each.items for each in slow] == [each.items for each in fast]


def test_keys_are_laid_on_the_preset() -> None:
    base = PRESETS["random-mm"]
    laid = Workload.model_validate({"rate_per_s": 1, "preset": "random-mm", "text_tokens": 5})
    assert laid.mix().num_text_tokens == (5, 5)
    assert (laid.mix().items, laid.mix().num_output_tokens) == (base.items, base.num_output_tokens)
    ranged = Workload.model_validate({"rate_per_s": 1, "items": [{}], "output_tokens": [2, 9]})
    assert ranged.mix().num_output_tokens == (2, 9)
    assert requests(ranged, MODEL)[0].items == ()


def test_a_trace_gives_the_times(tmp_path: Path) -> None:
    path = tmp_path / "times"
    workload = Workload(arrivals="trace", trace=str(path), num_requests=2, preset="random-mm")
    with pytest.raises(ConfigError, match=r"^workload\.trace: .*/times: No such file"):
        requests(workload, MODEL)
    path.write_text("0.5\n")
    with pytest.raises(ConfigError, match=r"^workload: .*/times has 1 arrivals, but 2 requests"):
        requests(workload, MODEL)
    path.write_text("0.5\n4\n")
    assert [request.at_s for request in requests(workload, MODEL)] == [0.5, 4.0]


PHASES: list[dict[str, Any]] = [
    {"duration_s": 50, "rate_per_s": 2, "items": [{"image": "256x256"}], "text_tokens": 7},
    {"duration_s": 50, "rate_per_s": 0},
    {"duration_s": 100, "rate_per_s": 4, "items": [{}], "output_tokens": 3},
]


def test_phases_have_their_rates_and_ask_what_they_say() -> None:
    workload = Workload.model_validate(
        {"arrivals": "phases", "phases": PHASES, "preset": "random-mm", "num_requests": 700}
    )
    found = requests(workload, MODEL)
    second = [each for each in found if each.at_s % 200 < 50]
    last = [each for each in found if each.at_s % 200 >= 100]
    assert len(second) + len(last) == len(found)
    assert 70 < sum(each.at_s < 50 for each in second) < 130
    assert 340 < sum(each.at_s < 200 for each in last) < 460
    assert found[-1].at_s > 200  # the first phase comes again
    assert {(len(each.items), each.num_text_tokens, each.num_tokens) for each in second} == {
        (1, 7, 128)
    }
    assert {(len(each.items), each.num_text_tokens, each.num_tokens) for each in last} == {
        (0, 1024, 3)
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"phases": PHASES, "rate_per_s": 1},
        {"arrivals": "phases"},
        {"arrivals": "phases", "phases": []},
        {"arrivals": "phases", "phases": PHASES, "rate_per_s": 1},
        {"arrivals": "phases", "phases": PHASES[1:2]},
    ],
)
def test_phases_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"phases|rate"):
        Workload.model_validate({"preset": "random-mm", **wrong})


def test_media_of_every_phase_are_checked() -> None:
    phases = [*PHASES, {"duration_s": 1, "rate_per_s": 1, "items": [{"audio_s": 1}]}]
    workload = Workload.model_validate({"arrivals": "phases", "phases": phases, "items": [{}]})
    with pytest.raises(ConfigError, match="takes no sound"):
        _check_media(workload, MODEL)


def test_media_that_the_model_does_not_take_are_an_error() -> None:
    workload = Workload(rate_per_s=1, preset="librispeech")
    with pytest.raises(ConfigError, match=r"^workload: LLaVA-v1\.6-34B takes no sound: "):
        requests(workload, MODEL)
