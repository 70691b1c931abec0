"""Parameters that chat and text completions have in common."""

from typing import Any

import msgspec
import pytest

from easerve.serve import chat, completions
from easerve.serve.errors import ApiError
from easerve.serve.request import (
    FORWARDED,
    IGNORED,
    MAX_CHOICES,
    MAX_FORMAT_BYTES,
    MAX_FORMAT_CHOICES,
    MAX_SEED,
    NO_EFFECT,
    Asked,
)

from .server import MODEL

OWN: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completion": {"prompt": "hi"},
}


class Endpoint:
    def __init__(self, kind: str) -> None:
        self._kind, self.own = kind, {"model": MODEL, **OWN[kind]}

    def parse_body(self, content: Any) -> Asked:
        if self._kind == "chat":
            return chat.parse(content, MODEL, max_images=8)
        return completions.parse(content, MODEL)

    def parse(self, **parameters: Any) -> Asked:
        return self.parse_body(self.own | parameters)

    def refusal(self, content: Any) -> ApiError:
        with pytest.raises(ApiError) as error:
            self.parse_body(content)
        return error.value

    def sent(self, **parameters: Any) -> dict[str, Any]:
        """What the engines get beside messages or prompt."""
        (made,) = self.parse(**parameters).bodies
        return {name: value for name, value in made.items() if name not in self.own}


@pytest.fixture(params=["chat", "completion"])
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    return Endpoint(request.param)


# What goes to the engines -------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(FORWARDED))
def test_what_engines_apply_is_passed_on_as_it_is(endpoint: Endpoint, name: str) -> None:
    value = {"anything": [None, 1]}
    assert endpoint.sent(**{name: value}) == {name: value}


@pytest.mark.parametrize("value", [0, 0.0, "", False, [], {}], ids=repr)
def test_only_null_means_that_a_parameter_was_not_given(endpoint: Endpoint, value: Any) -> None:
    assert endpoint.sent(stop=value, seed=None) == {"stop": value}


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_has_no_bearing_on_an_answer_is_ignored(endpoint: Endpoint, name: str) -> None:
    assert endpoint.sent(**{name: {"any": "thing"}}) == {}


@pytest.mark.parametrize("name", sorted(NO_EFFECT.keys() - {"echo"}))
def test_what_asks_for_nothing_is_taken_and_not_passed_on(endpoint: Endpoint, name: str) -> None:
    assert endpoint.sent(**{name: NO_EFFECT[name]}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("suffix", "the end"),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("modalities", ["text", "audio"]),
        ("mm_processor_kwargs", {"max_pixels": 1}),
        ("media_io_kwargs", {"video": {}}),
        ("priority", 1),
        ("return_tokens_as_token_ids", True),
        ("functions", []),
        ("function_call", "none"),
        ("audio", {"voice": "x"}),
        ("prompt_logprobs", 1),
        ("kv_transfer_params", {}),
        ("ec_transfer_params", {"coming": [0]}),
        ("mm_payload", "full"),
        ("foo", 0),
        ("", 1),
        ("served_model", MODEL),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(
    endpoint: Endpoint, name: str, value: Any
) -> None:
    error = endpoint.refusal(endpoint.own | {name: value})
    assert (error.status, error.param) == (400, name)
    assert error.message == f"Parameter {name!r} is not supported"


@pytest.mark.parametrize("name", ["seed", "n", "stream", "best_of", "functions", "foo"])
def test_null_is_as_good_as_not_given(endpoint: Endpoint, name: str) -> None:
    given, without = endpoint.parse(**{name: None}), endpoint.parse()
    assert given == without


# What the router acts on --------------------------------------------------------------------------


def test_without_parameters_one_whole_choice_is_asked_for(endpoint: Endpoint) -> None:
    asked = endpoint.parse()
    assert (asked.model, asked.num_choices, asked.stream) == (MODEL, 1, False)
    flags = (asked.include_usage, asked.continuous_usage, asked.return_token_ids)
    assert flags == (False, False, False)
    assert asked.num_top_logprobs is None


@pytest.mark.parametrize("n", [1, 2, MAX_CHOICES])
def test_n_choices_are_asked_for_and_the_engines_do_not_see_n(endpoint: Endpoint, n: int) -> None:
    assert endpoint.parse(n=n).num_choices == n
    assert endpoint.sent(n=n) == {}


@pytest.mark.parametrize("n", [0, -1, MAX_CHOICES + 1, "many", 1.5, [2]])
def test_n_is_bounded(endpoint: Endpoint, n: Any) -> None:
    error = endpoint.refusal(endpoint.own | {"n": n})
    assert (error.status, error.param) == (400, "n")


@pytest.mark.parametrize(
    ("seed", "n"), [(MAX_SEED, 1), (MAX_SEED, None), (MAX_SEED - 2, 3), (-MAX_SEED, 9), (0, 128)]
)
def test_a_seed_may_be_as_large_as_those_of_all_choices_fit(
    endpoint: Endpoint, seed: int, n: int | None
) -> None:
    assert endpoint.sent(seed=seed, n=n) == {"seed": seed}


@pytest.mark.parametrize(
    ("seed", "n"), [(MAX_SEED, 2), (MAX_SEED - 2, 4), (MAX_SEED + 1, 1), (1 << 80, None)]
)
def test_seeds_of_choices_that_do_not_fit_are_refused(
    endpoint: Endpoint, seed: int, n: int | None
) -> None:
    error = endpoint.refusal(endpoint.own | {"seed": seed, "n": n})
    assert (error.status, error.param) == (400, "seed")
    assert error.message.startswith("seed: ")


# Formats ------------------------------------------------------------------------------------------


def formats(endpoint: Endpoint) -> list[str]:
    tools = ["tools"] if "messages" in endpoint.own else []
    return ["response_format", "structured_outputs", *tools]


def format_of(num_bytes: int, letter: str = "x") -> dict[str, str]:
    """Something of that size as JSON."""
    rest = num_bytes - len(msgspec.json.encode({"a": ""}))
    made = {"a": letter * (rest // len(letter.encode()))}
    assert len(msgspec.json.encode(made)) == num_bytes
    return made


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_format_is_bounded(endpoint: Endpoint, letter: str) -> None:
    for name in formats(endpoint):
        fits = format_of(MAX_FORMAT_BYTES, letter)
        assert endpoint.sent(**{name: fits}) == {name: fits}
        error = endpoint.refusal(endpoint.own | {name: format_of(MAX_FORMAT_BYTES + 2, letter)})
        assert (error.status, error.param) == (400, name)
        assert error.message == f"{name}: larger than {MAX_FORMAT_BYTES} bytes"


@pytest.mark.parametrize("value", [[], ["a"], "", "a", 0, 5, 0.5, True, False], ids=repr)
def test_structured_outputs_are_an_object(endpoint: Endpoint, value: Any) -> None:
    error = endpoint.refusal(endpoint.own | {"structured_outputs": value})
    assert (error.status, error.param) == (400, "structured_outputs")
    assert error.message == "structured_outputs: must be an object"


def test_choices_of_a_format_are_bounded(endpoint: Endpoint) -> None:
    fits = {"choice": ["a"] * MAX_FORMAT_CHOICES}
    assert endpoint.sent(structured_outputs=fits) == {"structured_outputs": fits}
    error = endpoint.refusal(
        endpoint.own | {"structured_outputs": {"choice": [*fits["choice"], "b"]}}
    )
    assert (error.status, error.param) == (400, "structured_outputs.choice")
    assert error.message.startswith("structured_outputs.choice: ")


# Flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "usage", "continuous"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": None}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True}, False, False),
        ({"include_usage": False, "include_obfuscation": True}, False, False),
    ],
)
def test_stream_options_say_whether_usage_is_wanted(
    endpoint: Endpoint, options: dict[str, Any] | None, usage: bool, continuous: bool
) -> None:
    asked = endpoint.parse(stream=True, stream_options=options)
    assert (asked.stream, asked.include_usage, asked.continuous_usage) == (True, usage, continuous)
    assert endpoint.sent(stream=True, stream_options=options) == {}


@pytest.mark.parametrize("stream", [{}, {"stream": None}, {"stream": False}])
def test_stream_options_need_a_stream(endpoint: Endpoint, stream: dict[str, Any]) -> None:
    error = endpoint.refusal(endpoint.own | stream | {"stream_options": {"include_usage": True}})
    assert (error.status, error.param) == (400, "stream_options")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stream": "perhaps"}, "stream"),
        ({"stream": 2}, "stream"),
        ({"stream": True, "stream_options": True}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": True, "stream_options": {"include_usage": 5}}, "stream_options.include_usage"),
        ({"return_token_ids": "perhaps"}, "return_token_ids"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(
    endpoint: Endpoint, given: dict[str, Any], param: str
) -> None:
    error = endpoint.refusal(endpoint.own | given)
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize("asked", [True, False, None])
def test_token_ids_are_returned_if_asked(endpoint: Endpoint, asked: bool | None) -> None:
    assert endpoint.parse(return_token_ids=asked).return_token_ids is bool(asked)
    assert endpoint.sent(return_token_ids=asked) == {}


def test_another_model_does_not_exist(endpoint: Endpoint) -> None:
    error = endpoint.refusal(endpoint.own | {"model": "x" * 100_000})
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert MODEL in error.message
    assert len(error.message) < 500


@pytest.mark.parametrize("content", [None, [], "hi", 5, True], ids=repr)
def test_a_body_is_an_object(endpoint: Endpoint, content: Any) -> None:
    error = endpoint.refusal(content)
    assert (error.status, error.message) == (400, "The body must be a JSON object")


def test_a_long_name_is_not_sent_back(endpoint: Endpoint) -> None:
    error = endpoint.refusal(endpoint.own | {"x" * 100_000: 1})
    assert len(error.message) + len(str(error.param)) < 600
