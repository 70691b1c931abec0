"""What a completion request may say, and what of it the engines get."""

from typing import Any

import pytest

from easerve.engines.protocol import Route
from easerve.serve import completions
from easerve.serve.errors import ApiError
from easerve.serve.request import MAX_CHOICES, Asked

from .server import MODEL, body


def parse(**request: Any) -> Asked:
    return completions.parse({"model": MODEL, **request}, MODEL)


def refusal(**request: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(**request)
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        ([5, 6, 0], [[5, 6, 0]]),
        (["hi"], ["hi"]),
        (["a", "b", "a"], ["a", "b", "a"]),
        ([[5, 6]], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_a_prompt_is_a_text_or_tokens_or_several_of_either(prompt: Any, prompts: list[Any]) -> None:
    asked = parse(prompt=prompt, seed=3)
    assert asked.bodies == [{"seed": 3, "prompt": each} for each in prompts]
    assert asked.media_parts == []
    assert asked.route is Route.TEXT


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        True,
        {},
        [],
        [[]],
        [None],
        [5, "a"],
        ["a", 5],
        ["a", ["b"]],
        [[5], "a"],
        [[5], [-1]],
        [-1],
        [1.5],
        ["a"] * (MAX_CHOICES + 1),
        [[1]] * (MAX_CHOICES + 1),
    ],
    ids=repr,
)
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    error = refusal(prompt=prompt)
    assert error.param is not None
    assert error.param.startswith("prompt")
    assert error.message.startswith(f"{error.param}: ")


@pytest.mark.parametrize("prompt", [[True, False], [[True]], ["5", 6], [5.0, 6.0]])
def test_what_only_looks_like_a_token_is_refused(prompt: Any) -> None:
    assert str(refusal(prompt=prompt).param).startswith("prompt")


def test_a_request_without_a_prompt_is_refused() -> None:
    error = refusal()
    assert (error.param, error.message) == ("prompt", "prompt: Field required")


def test_a_chat_sent_to_the_wrong_place_is_refused() -> None:
    assert refusal(**body("hi")).param == "prompt"
    assert refusal(prompt="hi", messages=[]).param == "messages"


@pytest.mark.parametrize("name", ["tools", "max_completion_tokens", "reasoning_effort"])
def test_chats_own_parameters_are_refused(name: str) -> None:
    assert refusal(prompt="hi", **{name: 5}).param == name


@pytest.mark.parametrize(
    ("prompts", "n", "fits"),
    [
        (1, 128, True),
        (128, 1, True),
        (64, 2, True),
        (65, 2, False),
        (2, 65, False),
        (128, 2, False),
    ],
)
def test_choices_are_bounded_over_all_prompts(prompts: int, n: int, fits: bool) -> None:
    if fits:
        asked = parse(prompt=["a"] * prompts, n=n)
        assert (len(asked.bodies), asked.num_choices) == (prompts, n)
    else:
        error = refusal(prompt=["a"] * prompts, n=n)
        assert error.param == "n"
        assert "128 choices" in error.message


# Logprobs and echo --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sent", "route"),
    [
        ({}, {}, Route.TEXT),
        ({"logprobs": None, "echo": None}, {}, Route.TEXT),
        ({"echo": False}, {}, Route.TEXT),
        ({"logprobs": 0}, {"logprobs": 0}, Route.OPENAI),
        ({"logprobs": 3}, {"logprobs": 3}, Route.OPENAI),
        ({"echo": True}, {"echo": True}, Route.OPENAI),
        ({"echo": True, "return_token_ids": False}, {"echo": True}, Route.OPENAI),
        ({"echo": True, "return_token_ids": True}, {}, Route.TEXT),
        ({"logprobs": 1, "return_token_ids": True}, {"logprobs": 1}, Route.OPENAI),
        ({"stream": True}, {}, Route.TEXT),
    ],
)
def test_what_has_to_be_worded_as_vllm_does_is_left_to_decode(
    given: dict[str, Any], sent: dict[str, Any], route: Route
) -> None:
    asked = parse(prompt="hi", **given)
    assert asked.bodies == [{"prompt": "hi", **sent}]
    assert asked.route is route
    assert asked.num_top_logprobs == given.get("logprobs")


@pytest.mark.parametrize("number", [0, 2])
def test_logprobs_of_an_echoed_prompt_are_refused(number: int) -> None:
    error = refusal(prompt="hi", echo=True, logprobs=number)
    assert error.param == "echo"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": "many"}, "logprobs"),
        ({"echo": "perhaps"}, "echo"),
        ({"suffix": "the end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_a_wrong_parameter_is_refused_by_its_name(given: dict[str, Any], param: str) -> None:
    assert refusal(prompt="hi", **given).param == param
