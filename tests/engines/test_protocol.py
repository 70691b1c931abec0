from typing import Any

import pytest

from easerve.engines.protocol import EmbeddingMissingError, EngineError, Prompt


@pytest.mark.parametrize(
    ("sampling", "leg", "seed"),
    [
        ({"seed": 5}, 0, 5),
        ({"seed": 5}, 1, 6),
        ({"seed": 0}, 3, 3),
        ({"seed": -2}, 1, -1),
        ({"seed": None}, 1, None),
        ({}, 1, None),
    ],
)
def test_each_leg_has_the_next_seed_where_there_is_one(
    sampling: dict[str, Any], leg: int, seed: int | None
) -> None:
    prompt = Prompt([1], {"max_tokens": 9, **sampling})
    made = prompt.for_leg(leg)
    assert made.sampling == {"max_tokens": 9, **sampling} | ({} if seed is None else {"seed": seed})
    assert prompt.sampling == {"max_tokens": 9, **sampling}, "the prompt itself is not changed"
    assert (made.token_ids, made.max_new_tokens) == (prompt.token_ids, 9)


@pytest.mark.parametrize(
    ("status", "retryable"), [(None, True), (400, False), (499, False), (500, True), (503, True)]
)
def test_only_a_refusal_is_the_requests_fault(status: int | None, retryable: bool) -> None:
    assert EngineError("it failed", status).retryable is retryable
    assert EmbeddingMissingError("it failed", status, ("k",)).retryable is retryable
