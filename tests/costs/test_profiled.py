"""Costs from a profile: at the points, between and beyond them, and what cannot be read."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from easerve.config import ConfigError
from easerve.costs import profile, profiled
from easerve.costs.base import Forward, Media
from easerve.costs.profiled import Line, ProfileCosts, costs_of, fit, host_of
from easerve.types import Modality

from . import test_profile
from .stages import MS, made

ITEM = Media(Modality.IMAGE, 25)
COSTS = ProfileCosts(made(), ITEM.num_tokens)


def ms(milliseconds: float) -> Any:
    return pytest.approx(milliseconds * MS, rel=1e-9)


# Lines ------------------------------------------------------------------------------------------


def test_a_line_goes_through_its_points_and_on_with_its_last_slope() -> None:
    line = Line([(4, 8.0), (1, 2.0), (2, 3.0)])
    assert [line(x) for x in (1, 1.5, 2, 3, 4, 6)] == [2, 2.5, 3, 5.5, 8, 13]
    assert line(0) == 1


def test_a_line_never_falls_at_its_end_nor_below_zero() -> None:
    line = Line([(1, 0.5), (2, 4.0), (3, 3.0)])
    assert (line(0), line(3), line(9)) == (0, 3, 3)


def test_one_point_is_a_constant_and_none_is_no_line() -> None:
    assert Line([(5, 2.0)])(100) == 2
    with pytest.raises(ValueError, match="a line needs a point"):
        Line([])


def test_a_fit_finds_a_line_again() -> None:
    assert fit([(x, 3 + 0.5 * x) for x in (1, 2, 8)]) == pytest.approx((3, 0.5))


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], (0, 0)),
        ([(2, 0.0), (3, 0.0)], (0, 0)),
        ([(2, 4.0)], (4, 0)),
        ([(1, 4.0), (2, 2.0)], (pytest.approx(2.4), 0)),  # falls: a mean, the smaller counts more
        ([(1, 1.0), (2, 4.0)], (0, pytest.approx(1.2))),  # would begin below 0
    ],
)
def test_a_fit_is_never_below_zero(
    points: list[tuple[float, float]], expected: tuple[float, float]
) -> None:
    assert fit(points) == expected


def error_of(points: Sequence[tuple[float, float]], fixed: float, slope: float) -> float:
    return sum(((fixed + slope * x) / y - 1) ** 2 for x, y in points)


def test_no_other_line_has_smaller_relative_errors() -> None:
    rng = random.Random(1)
    for _ in range(20):
        points = [(x, (2 + x) * rng.uniform(0.8, 1.25)) for x in (1.0, 2.0, 4.0, 8.0, 16.0)]
        fixed, slope = fit(points)
        for _ in range(50):
            others = max(0.0, fixed + rng.gauss(0, 0.1)), max(0.0, slope + rng.gauss(0, 0.1))
            assert error_of(points, fixed, slope) <= error_of(points, *others) + 1e-12


# Costs ------------------------------------------------------------------------------------------


def test_items_are_encoded_at_between_and_beyond_what_was_measured() -> None:
    assert [COSTS.encode([ITEM] * num) for num in (1, 3, 8, 20)] == [ms(3), ms(5), ms(10), ms(22)]


def test_larger_items_count_by_their_embeddings() -> None:
    assert COSTS.encode([Media(Modality.IMAGE, 50)]) == COSTS.encode([ITEM, ITEM])


def test_part_of_a_device_takes_longer() -> None:
    assert COSTS.encode([ITEM], 0.5) == ms(6)
    assert COSTS.prefill(100, 0.5) == ms(8)
    costs = ProfileCosts(made(), 25, lambda num, share: num + 1 / share)
    assert costs.encode([ITEM, ITEM], 0.5) == ms(4 * 4)
    assert costs.encode([ITEM, ITEM]) == ms(4)


def test_a_prompt_costs_what_was_measured() -> None:
    assert [COSTS.prefill(num) for num in (16, 100, 1000)] == [ms(3.16), ms(4), ms(13)]


def test_pieces_of_a_prompt_cost_their_tokens_and_each_a_step() -> None:
    first = COSTS.forward(Forward(60, 60 * 61 // 2, 0))
    second = COSTS.forward(Forward(40, 40 * 60 + 40 * 41 // 2, 1))
    assert (first, second) == (ms(3.6), ms(3.4))


def test_prompts_of_one_step_share_what_a_step_costs() -> None:
    """Without any prompt that is 1 ms: what is left of a decode step without sequences."""
    costs = ProfileCosts(made(), 25)
    one = Forward(50, 50 * 51 // 2, 1)
    both = Forward(2 * one.prefill_tokens, 2 * one.prefill_pairs, 2)
    step_s = 2 * costs.decode_step(1, 1) - costs.decode_step(2, 2)
    assert costs.forward(both) == pytest.approx(2 * costs.forward(one) - step_s)


def test_decode_steps_go_by_sequences_and_by_what_they_attend_to() -> None:
    assert COSTS.decode_step(1, 64) == ms(1.164)
    assert COSTS.decode_step(3, 3 * 100) == ms(1 + 3 * 0.2)
    assert COSTS.decode_step(16, 16 * 512) == ms(1 + 16 * 0.612)


def test_a_mixed_step_costs_what_is_fixed_of_it_once() -> None:
    prefill, decode = Forward(50, 50 * 51 // 2, 1), Forward(num_decodes=4, decode_context=400)
    mixed = Forward(50, 50 * 51 // 2, 1, 4, 400)
    step_s = 2 * COSTS.decode_step(1, 1) - COSTS.decode_step(2, 2)
    apart = COSTS.forward(prefill) + COSTS.forward(decode)
    assert COSTS.forward(mixed) == pytest.approx(apart - step_s)
    assert COSTS.forward(Forward()) == 0


def test_transfers_are_medians_by_tokens() -> None:
    assert COSTS.embedding_transfer(25) == ms(0.4)
    assert COSTS.embedding_transfer(400) == ms(0.7)
    assert COSTS.kv_transfer(288) == ms(2.5)


# Host -------------------------------------------------------------------------------------------


def test_what_stands_around_the_engines_is_told_apart() -> None:
    host = host_of(made())
    expected = {
        "router_request_s": 3,
        "router_token_s": 0.04,
        "prepare_s": 0.6,
        "render_s": 2.5,
        "encode_call_s": 4,
        "encode_item_s": 0.5,
        "prefill_call_s": 2,
        "handover_s": 0.7,
        "decode_call_s": 1,
        "decode_step_s": 0.2,
        "decode_token_s": 0.05,
        "client_request_s": 0.5,
        "client_token_s": 0.02,
        "idle_cores": 25,
    }
    assert {name: getattr(host, name) for name in expected} == {
        name: ms(value) for name, value in expected.items()
    }
    assert set(host.__slots__) == set(expected)


# Files ------------------------------------------------------------------------------------------


def written(path: Path, *runs: profile.Runs) -> Path:
    whole = test_profile.made(*(runs or (test_profile.runs(4, 1, 0.01),)))
    profile.write(whole.model_copy(update={"stages": made()}), path)
    return path


def test_costs_come_from_a_file(tmp_path: Path) -> None:
    costs = costs_of(written(tmp_path / "p.yaml"))
    assert costs.encode([ITEM]) == ms(3)
    assert costs.encode([ITEM], 0.5) == ms(6)  # one number of units says nothing of others


def test_an_encoder_on_part_of_its_device_is_slower_as_its_surface_says(tmp_path: Path) -> None:
    cells = [test_profile.runs(units, 1, 0.05 / units) for units in (1, 2, 4)]
    beside = test_profile.runs(1, 1, 99, contended=True)
    costs = costs_of(written(tmp_path / "p.yaml", *cells, beside))
    assert costs.encode([ITEM], 0.25) == ms(3 * 4)
    assert costs.encode([ITEM], 0.75) == ms(3 * 1.5)


def test_a_file_without_stages_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    profile.write(test_profile.made(test_profile.runs(1, 1, 0.02)), path)
    with pytest.raises(ConfigError) as error:
        profiled.costs_of(path)
    said = f"{path}: stages: measured by an older easerve profile; run it again"
    assert str(error.value) == said
