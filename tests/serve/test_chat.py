"""What a chat request may say, and what of it the engines get."""

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from easerve.engines.protocol import Route
from easerve.serve import chat
from easerve.serve.errors import ApiError
from easerve.serve.request import Asked

from .server import MODEL, body, image_part, text_part

URL = "https://example.com/a.png"
TOOL = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": null}'}}


def parse(request: Any, max_images: int = 8, parse_answers: bool = False) -> Asked:
    return chat.parse(request, MODEL, max_images, parse_answers)


def refusal(request: Any, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(request, **options)
    return error.value


def sent(request: Any, **options: Any) -> dict[str, Any]:
    """What goes to the engines."""
    (made,) = parse(request, **options).bodies
    return made


def asks(*messages: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": list(messages), **parameters}


# Parts --------------------------------------------------------------------------------------------

TEXTS: dict[str, Any] = {
    "a string": "hi",
    "text": {"type": "text", "text": "hi"},
    "input_text": {"type": "input_text", "text": "hi"},
    "output_text": {"type": "output_text", "text": "hi", "annotations": []},
    "refusal": {"type": "refusal", "refusal": "hi"},
    "thinking": {"type": "thinking", "thinking": "hi", "signature": "x"},
    "other keys": {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}},
}
IMAGES: dict[str, Any] = {
    "image_url": {"type": "image_url", "image_url": {"url": URL}},
    "image_url as a string": {"type": "image_url", "image_url": URL},
    "no type": {"image_url": {"url": URL}},
    "no type, a string": {"image_url": URL},
    "input_image": {"type": "input_image", "image_url": URL},
    "input_image as an object": {"type": "input_image", "image_url": {"url": URL}},
    "detail null": {"type": "image_url", "image_url": {"url": URL, "detail": None}},
    "detail low": {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
    "detail high": {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
    "input_image's detail": {"type": "input_image", "image_url": URL, "detail": "auto"},
    "other keys": {"type": "image_url", "image_url": {"url": URL, "x": 1}, "cache_control": {}},
    "a uuid": {"type": "image_url", "image_url": {"url": URL}, "uuid": "theirs"},
}


@pytest.mark.parametrize("part", TEXTS.values(), ids=TEXTS)
def test_every_spelling_of_a_text_is_the_same_part(part: Any) -> None:
    assert sent(body([part]))["messages"][0]["content"] == [{"type": "text", "text": "hi"}]


@pytest.mark.parametrize("part", IMAGES.values(), ids=IMAGES)
def test_every_spelling_of_a_picture_is_a_place_to_be_filled(part: Any) -> None:
    asked = parse(body([text_part("what?"), part]))
    (media,) = asked.media_parts
    path = "messages[0].content[1].image_url"
    own = f"{path}.url" if isinstance(part["image_url"], dict) else path
    assert (media.url, media.path, media.part) == (URL, own, {})
    content = asked.bodies[0]["messages"][0]["content"]
    assert content == [text_part("what?"), {}]
    assert content[1] is media.part, "what the client sent is not passed on"


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": None}, ".image_url"),
        ({"type": "image_url", "image_url": 5}, ".image_url"),
        ({"type": "image_url", "image_url": [URL]}, ".image_url"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": None}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": {"url": URL}}}, ".image_url.url"),
        ({"type": "input_image"}, ".image_url"),
        ({"type": "input_image", "file_id": "file-1"}, ".image_url"),
        ({"image_url": None}, ".image_url"),
        ({"type": "text"}, ".text"),
        ({"type": "text", "text": None}, ".text"),
        ({"type": "text", "text": 5}, ".text"),
        ({"type": "text", "text": ["hi"]}, ".text"),
        ({"type": "input_text", "input_text": "hi"}, ".text"),
        ({"type": "refusal", "text": "hi"}, ".refusal"),
        ({"type": "thinking", "text": "hi"}, ".thinking"),
        ({"type": "video_url", "video_url": {"url": URL}}, ".type"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, ".type"),
        ({"type": "file", "file": {}}, ".type"),
        ({"type": "TEXT", "text": "hi"}, ".type"),
        ({"type": None, "text": "hi"}, ".type"),
        ({"type": 5}, ".type"),
        ({"text": "hi"}, ".type"),
        ({}, ".type"),
        (5, ""),
        (None, ""),
        (True, ""),
        (["hi"], ""),
    ],
)
def test_a_wrong_part_is_refused_with_its_path(part: Any, path: str) -> None:
    error = refusal(
        asks({"role": "user", "content": "a"}, {"role": "user", "content": ["b", part]})
    )
    path = f"messages[1].content[1]{path}"
    assert (error.status, error.param) == (400, path)
    assert error.message.startswith(f"{path}: ")


KINDLESS: list[Any] = [[], {}, ["text"], None, 5, True]


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"text": "hi"},
        *({"type": kind, "text": "hi"} for kind in KINDLESS),
        {"type": None, "image_url": {"url": URL}},
    ],
    ids=repr,
)
def test_a_part_without_a_type_that_is_a_name_is_told_so(part: Any) -> None:
    error = refusal(body([part]))
    path = "messages[0].content[0].type"
    assert (error.status, error.param) == (400, path)
    assert error.message == f"{path}: must be a string"


def test_a_long_type_is_not_sent_back() -> None:
    assert len(refusal(body([{"type": "x" * 100_000}])).message) < 300


@pytest.mark.parametrize(("number", "fits"), [(0, True), (2, True), (3, False)])
def test_pictures_are_counted_over_all_messages(number: int, fits: bool) -> None:
    messages = [{"role": "user", "content": [image_part(URL)]}] * number or [
        {"role": "user", "content": "hi"}
    ]
    if fits:
        assert len(parse(asks(*messages), max_images=2).media_parts) == number
    else:
        error = refusal(asks(*messages), max_images=2)
        assert (error.status, error.param) == (400, "messages")
        assert "At most 2 image(s)" in error.message


def test_pictures_are_in_the_order_of_the_conversation() -> None:
    turns = [[image_part("1"), "and", image_part("2")], "nothing", [image_part("3")]]
    asked = parse(asks(*({"role": "user", "content": turn} for turn in turns)))
    assert [part.url for part in asked.media_parts] == ["1", "2", "3"]
    assert asked.media_parts[2].path == "messages[2].content[0].image_url.url"


# Messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["developer", "system", "user", "assistant", "tool"])
def test_a_message_has_one_of_these_roles(role: str) -> None:
    message = {"role": role, "content": "hi"}
    assert sent(asks(message))["messages"] == [message]


@pytest.mark.parametrize("role", ["boss", "", "User", None, 5, ["user"], "function"])
def test_a_message_has_no_other_role(role: Any) -> None:
    error = refusal(asks({"role": "user", "content": "a"}, {"role": role, "content": "hi"}))
    assert (error.status, error.param) == (400, "messages[1].role")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "user", "content": ""},
        {"role": "user", "content": []},
        {"role": "assistant", "content": "hi", "reasoning": "hm"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
    ],
)
def test_what_a_message_says_beside_its_content_is_for_the_chat_template(
    message: dict[str, Any],
) -> None:
    assert sent(asks(message))["messages"] == [message]


def test_an_assistant_that_called_tools_may_have_said_nothing() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert sent(asks(message))["messages"] == [{"role": "assistant", "tool_calls": [CALL]}]


def test_an_answer_may_be_sent_back_as_the_openai_client_dumps_it() -> None:
    said = ChatCompletionMessage.model_validate({"role": "assistant", "content": "red"})
    dumped = said.model_dump()
    assert None in dumped.values()
    assert sent(asks(dumped))["messages"] == [{"role": "assistant", "content": "red"}]


def test_a_call_may_be_sent_back_as_the_openai_client_dumps_it() -> None:
    said = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "tool_calls": [CALL]}
    )
    assert sent(asks(said.model_dump()))["messages"] == [
        {"role": "assistant", "tool_calls": [CALL]}
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([5], "messages[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text", "text": "hi"}}], "messages[0].content"),
        ([{"content": "hi"}], "messages[0].role"),
    ],
)
def test_wrong_messages_are_refused_with_their_path(messages: Any, param: str) -> None:
    error = refusal({"model": MODEL, "messages": messages})
    assert (error.status, error.param) == (400, param)
    assert error.message.startswith(f"{param}: ")


@pytest.mark.parametrize("number", [chat.MAX_MESSAGES, chat.MAX_MESSAGES + 1])
def test_messages_are_bounded(number: int) -> None:
    request = asks(*[{"role": "user", "content": "a"}] * number)
    if number == chat.MAX_MESSAGES:
        assert len(sent(request)["messages"]) == number
    else:
        assert refusal(request).param == "messages"


@pytest.mark.parametrize("number", [chat.MAX_PARTS, chat.MAX_PARTS + 1])
def test_parts_are_bounded(number: int) -> None:
    if number == chat.MAX_PARTS:
        assert len(sent(body(["a"] * number))["messages"][0]["content"]) == number
    else:
        assert refusal(body(["a"] * number)).param == "messages[0].content"


def test_a_prompt_is_none_of_chats_business() -> None:
    assert refusal(body("hi", prompt="hi")).param == "prompt"


# Logprobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, None),
        ({"logprobs": None, "top_logprobs": None}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
def test_logprobs_are_asked_of_the_engines_when_wanted(
    given: dict[str, Any], wanted: int | None
) -> None:
    asked = parse(body("hi", **given))
    assert asked.num_top_logprobs == wanted
    expected = {} if wanted is None else {"logprobs": True, "top_logprobs": wanted}
    assert {k: v for k, v in asked.bodies[0].items() if "logprobs" in k} == expected
    assert asked.route is Route.TEXT


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": "some"}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1.5}, "top_logprobs"),
    ],
)
def test_logprobs_that_make_no_sense_are_refused(given: dict[str, Any], param: str) -> None:
    error = refusal(body("hi", **given))
    assert (error.status, error.param) == (400, param)


def test_fewer_than_no_alternatives_are_refused() -> None:
    assert refusal(body("hi", logprobs=True, top_logprobs=-1)).param == "top_logprobs"


# Routes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parse_answers", "route"),
    [
        ({}, False, Route.TEXT),
        ({"tools": None}, False, Route.TEXT),
        ({"tools": []}, False, Route.TEXT),
        ({"tool_choice": "none"}, False, Route.TEXT),
        ({"structured_outputs": {"choice": ["a"]}}, False, Route.TEXT),
        ({"n": 2}, False, Route.TEXT),
        ({"tools": [TOOL]}, False, Route.OPENAI),
        ({"tools": [TOOL], "tool_choice": "none"}, False, Route.OPENAI),
        ({}, True, Route.OPENAI),
        ({"tools": [TOOL]}, True, Route.OPENAI),
    ],
)
def test_what_has_to_be_parsed_in_an_answer_is_left_to_decode(
    given: dict[str, Any], parse_answers: bool, route: Route
) -> None:
    assert parse(body("hi", **given), parse_answers=parse_answers).route is route


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_generation_prompt", False),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("continue_final_message", True),
        ("documents", [{"title": "a"}]),
        ("include_reasoning", False),
        ("max_completion_tokens", 5),
        ("parallel_tool_calls", False),
        ("reasoning_effort", "low"),
        ("tool_choice", "none"),
        ("tools", [TOOL]),
    ],
)
def test_chats_own_parameters_are_passed_on(name: str, value: Any) -> None:
    assert sent(body("hi", **{name: value}))[name] == value
