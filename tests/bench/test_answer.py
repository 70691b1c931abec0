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


def seen(answer: Answer) -> tuple[float | None, float | None, int]:
    return answer.first_token_s, answer.end_s, answer.num_tokens


def test_the_first_token_is_the_first_text() -> None:
    assert seen(read(*ANSWER)) == (2, 5, 2)


def test_the_servers_count_goes_before_the_chunks() -> None:
    pieces = (chunk("a"), chunk("b"), chunk("", "stop"))
    assert seen(read(*pieces, DONE)) == (1, 4, 2)
    assert seen(read(*pieces, usage(7), DONE)) == (1, 5, 7)
    assert seen(read(*pieces, event({"choices": [], "usage": None}), DONE)) == (1, 5, 2)


def test_an_answer_without_text_has_the_token_that_ended_it() -> None:
    pieces = (chunk("", role="assistant"), chunk("", "stop"), usage(1), DONE)
    assert seen(read(*pieces)) == (2, 4, 1)


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
    assert seen(read(event({"choices": [choice]}), DONE)) == (1, 2, 1)


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("space", [b" ", b""])
def test_events_may_be_cut_anywhere(end: bytes, space: bytes) -> None:
    text = b": hello\n\nevent: message\nid: 1\n" + b"".join(ANSWER).replace(
        b"role", "rôle \\u2028 data: [DONE] ".encode()
    )
    text = text.replace(b"data: {", b"data:" + space + b"{").replace(b"\n", end)
    whole = read(text)
    assert seen(whole) == (1, 1, 2)
    for cut in range(len(text) + 1):
        answer = read(text[:cut], text[cut:])
        assert answer.num_tokens == 2
        assert answer.end_s is not None
    one_by_one = read(*(text[at : at + 1] for at in range(len(text))))
    assert one_by_one.num_tokens == 2
    assert one_by_one.error is None
