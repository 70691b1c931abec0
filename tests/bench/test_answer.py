import json
from typing import Any

import pytest

from easerve.bench.answer import Answer

from .stand_in import ANSWER, DONE, chunk, event, usage


def read(*pieces: bytes) -> Answer:
    """Each piece comes a second after the one before it, the first after one second."""
    answer = Answer()
    for now_s, piece in enumerate(pieces, 1):
        answer.take(piece, now_s)
    return answer


Seen = tuple[float | None, float | None, float | None, int]


def seen(answer: Answer) -> Seen:
    return answer.first_token_s, answer.last_token_s, answer.done_s, answer.num_tokens


def test_the_first_token_is_the_first_text() -> None:
    assert seen(read(*ANSWER)) == (2, 3, 5, 2)


def test_the_servers_count_goes_before_the_chunks() -> None:
    pieces = (chunk("a"), chunk("b"), chunk("", "stop"))
    assert seen(read(*pieces, DONE)) == (1, 3, 4, 2)
    assert seen(read(*pieces, usage(7), DONE)) == (1, 3, 5, 7)
    assert seen(read(*pieces, event({"choices": [], "usage": None}), DONE)) == (1, 3, 5, 2)


def test_an_answer_without_text_has_the_token_that_ended_it() -> None:
    pieces = (chunk("", role="assistant"), chunk("", "stop"), usage(1), DONE)
    assert seen(read(*pieces)) == (2, 2, 4, 1)


@pytest.mark.parametrize(
    "choice",
    [
        {"delta": {"reasoning": "hm"}},
        {"delta": {"content": None, "reasoning_content": "hm"}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}},
        {"text": "a"},
    ],
)
def test_thoughts_calls_and_completions_are_tokens_too(choice: dict[str, Any]) -> None:
    assert seen(read(event({"choices": [choice]}), DONE)) == (1, 1, 2, 1)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("space", [b" ", b""])
def test_events_may_be_cut_anywhere(end: bytes, space: bytes) -> None:
    text = b": hello\n\nevent: message\nid: 1\n" + b"".join(ANSWER).replace(
        b"role", "rôle \\u2028 data: [DONE] ".encode()
    )
    text = text.replace(b"data: {", b"data:" + space + b"{").replace(b"\n", end)
    whole = read(text)
    assert seen(whole) == (1, 1, 1, 2)
    for cut in range(len(text) + 1):
        answer = read(text[:cut], text[cut:])
        assert answer.num_tokens == 2
        assert answer.done_s is not None
    one_by_one = read(*(text[at : at + 1] for at in range(len(text))))
    assert one_by_one.num_tokens == 2
    assert one_by_one.error is None


def test_chunks_and_usage_are_both_kept() -> None:
    answer = read(chunk("", role="assistant"), chunk("a"), chunk("b c d"), usage(9), DONE)
    assert (answer.num_chunks, answer.num_usage_tokens, answer.num_prompt_tokens) == (2, 9, 9)
    assert answer.chunk_times_s == [2, 3]
    none = read(chunk("a"), DONE)
    assert (none.num_usage_tokens, none.num_prompt_tokens, none.num_tokens) == (None, None, 1)


def test_the_last_count_of_a_server_that_counts_in_each_chunk_holds() -> None:
    counted = [
        event({"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": n}})
        for n in (1, 2, 3)
    ]
    answer = read(*counted, event({"choices": [], "usage": {"prompt_tokens": 4}}), DONE)
    assert (answer.num_tokens, answer.num_chunks, answer.num_prompt_tokens) == (3, 3, 4)


def test_what_ends_an_answer_is_its_last_token_but_no_text() -> None:
    answer = read(chunk("a"), chunk("", "stop"), usage(2), DONE)
    assert seen(answer) == (1, 2, 4, 2)
    assert answer.chunk_times_s == [1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"error": {"message": "lost", "code": 500}}, "lost"),
        ({"error": "lost"}, "lost"),
        ({"error": {"code": 500}}, "{'code': 500}"),
        ({"object": "error", "message": "lost"}, "lost"),
        ({"choices": [{"delta": {}, "finish_reason": "abort"}]}, "finish_reason abort"),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}], "object": "x"}, None),
    ],
)
def test_what_is_wrong_in_a_stream(wrong: dict[str, Any], message: str | None) -> None:
    assert read(chunk("a"), event(wrong), DONE).error == message


def test_an_answer_without_a_token() -> None:
    assert seen(read(DONE)) == (None, None, 1, 0)
    assert seen(read(chunk("", role="assistant"), usage(0), DONE)) == (None, None, 3, 0)


@pytest.mark.parametrize(
    ("choice", "last_token_s"),
    [
        ({"message": {"content": "a"}}, 3),
        ({"message": {"content": None, "reasoning": "hm"}}, 3),
        ({"message": {"content": ""}, "finish_reason": "stop"}, 3),
        ({"text": "a"}, 3),
        ({"message": {"content": ""}}, None),
    ],
)
def test_a_whole_answer(choice: dict[str, Any], last_token_s: float | None) -> None:
    answer = Answer()
    content = {"choices": [choice], "usage": {"completion_tokens": 7, "prompt_tokens": 3}}
    answer.take_whole(json.dumps(content).encode(), 3)
    assert seen(answer) == (None, last_token_s, 3, 7)
    assert answer.num_prompt_tokens == 3
