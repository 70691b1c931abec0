"""OpenAI's objects made from an answer's pieces: whole, and in chunks that join to the same."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from easerve.engines.fake import logprob
from easerve.engines.protocol import Delta, Prompt, Route
from easerve.serve.answers import BLANK, Answer, ChatAnswer, CompletionAnswer, event
from easerve.serve.job import Job
from easerve.serve.request import Asked
from easerve.types import RequestId

from .server import MODEL

KINDS: dict[str, type[Answer]] = {"chat": ChatAnswer, "completion": CompletionAnswer}
Pieces = Sequence[tuple[int, Delta]]
ONE = [(0, Delta("a ", [1])), (0, Delta("", [2])), (0, Delta("b", [3, 4], "stop", "x"))]
# Two choices, their pieces in the order of their arrival.
TWO = [
    (1, Delta("c", [5])),
    (0, Delta("a", [1])),
    (1, Delta("d", [6], "length")),
    (0, Delta("b", [2, 3], "stop", 3)),
]
# Choices 2 and 3 are the second prompt's.
FOUR = [*TWO, (3, Delta("h", [8], "stop")), (2, Delta("e", [7])), (2, Delta("f", [9], "stop"))]
PROMPTS = [[10, 11, 12], [20]]

every_kind = pytest.mark.parametrize("kind", KINDS)


def answer(kind: str, num_prompts: int = 1, **asked: Any) -> Answer:
    jobs = []
    for tokens in PROMPTS[:num_prompts]:
        job = Job(RequestId("r"), {}, [], num_bytes=0)
        job.prompt = Prompt(tokens, {"max_tokens": 9})
        jobs.append(job)
    return KINDS[kind](Asked(MODEL, [{}] * num_prompts, **asked), "id-1", jobs)


def chunks(made: Answer, pieces: Pieces) -> list[dict[str, Any]]:
    return [chunk for choice, delta in pieces for chunk in made.chunks(choice, delta)]


def choices(made: Answer, pieces: Pieces) -> list[dict[str, Any]]:
    """The choice of each chunk."""
    return [choice for chunk in chunks(made, pieces) for choice in chunk["choices"]]


def said(choice: Mapping[str, Any]) -> str:
    """The text of a choice, whole or a chunk's."""
    message = choice.get("message") or choice.get("delta") or choice
    return str(message.get("content", message.get("text", "")))


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client makes of a stream, by choice."""
    made: dict[int, dict[str, Any]] = {}
    for part in parts:
        choice = made.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": []})
        choice["text"] += said(part)
        choice["token_ids"] += part.get("token_ids") or []
        choice["logprobs"] += (part.get("logprobs") or {}).get("content", [])
        for name in ("finish_reason", "stop_reason"):
            assert choice.get(name) is None, "nothing follows the end of a choice"
            choice[name] = part.get(name)
    return made


# The form -----------------------------------------------------------------------------------------


def test_a_whole_chat_answer_is_a_chat_completion() -> None:
    made = answer("chat")
    assert made.whole(ONE) == {
        "id": "id-1",
        "object": "chat.completion",
        "created": made.created,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "a b"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "x",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_a_whole_completion_is_a_text_completion() -> None:
    made = answer("completion")
    assert made.whole(ONE) == {
        "id": "id-1",
        "object": "text_completion",
        "created": made.created,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": "a b",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "x",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_the_chunks_of_a_chat_are_a_role_and_then_the_pieces() -> None:
    made = answer("chat")
    heads = [{**chunk, "choices": None} for chunk in chunks(made, ONE)]
    assert (
        heads
        == [
            {
                "id": "id-1",
                "object": "chat.completion.chunk",
                "created": made.created,
                "model": MODEL,
                "choices": None,
            }
        ]
        * 4
    )
    assert choices(answer("chat"), ONE[::2]) == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        },
        {
            "index": 0,
            "delta": {"content": "a "},
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        },
        {
            "index": 0,
            "delta": {"content": "b"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "x",
        },
    ]


def test_the_chunks_of_a_completion_are_its_pieces() -> None:
    made = answer("completion")
    parts = chunks(made, ONE)
    assert {(part["object"], part["id"]) for part in parts} == {("text_completion", "id-1")}
    assert [part["choices"] for part in parts] == [
        [
            {
                "index": 0,
                "text": delta.text,
                "logprobs": None,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
            }
        ]
        for _, delta in ONE
    ]


@every_kind
def test_a_stream_has_one_id_and_one_moment(kind: str) -> None:
    made = answer(kind, 2, num_choices=2, include_usage=True)
    parts = [*chunks(made, FOUR), made.usage_chunk()]
    assert len({(part["id"], part["created"], part["object"]) for part in parts}) == 1


# Chunks and the whole -----------------------------------------------------------------------------

CASES: dict[str, tuple[int, int, Pieces]] = {
    "one": (1, 1, ONE),
    "n": (1, 2, TWO),
    "prompts": (2, 1, TWO),
    "prompts, n": (2, 2, FOUR),
}
every_case = pytest.mark.parametrize(("num_prompts", "n", "pieces"), CASES.values(), ids=CASES)


@every_kind
@every_case
def test_the_chunks_join_to_the_whole(kind: str, num_prompts: int, n: int, pieces: Pieces) -> None:
    asked = {"num_prompts": num_prompts, "num_choices": n, "return_token_ids": True}
    streaming = answer(kind, **asked)
    whole = answer(kind, **asked).whole(pieces)
    parts = choices(streaming, pieces)
    assert [choice["index"] for choice in whole["choices"]] == list(range(num_prompts * n))
    assert joined(parts) == joined(whole["choices"])
    assert streaming.usage_chunk() == {
        "id": "id-1",
        "object": streaming.chunk_kind,
        "created": streaming.created,
        "model": MODEL,
        "choices": [],
        "usage": whole["usage"],
    }


@every_case
def test_the_role_of_each_choice_comes_once_and_first(
    num_prompts: int, n: int, pieces: Pieces
) -> None:
    parts = choices(answer("chat", num_prompts, num_choices=n), pieces)
    for number in range(num_prompts * n):
        first, *others = [part["delta"] for part in parts if part["index"] == number]
        assert first == {"role": "assistant", "content": ""}
        assert all(other.keys() == {"content"} for other in others)


# Usage --------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(
    ("num_prompts", "n", "pieces", "prompt", "completion"),
    [(1, 1, ONE, 3, 4), (1, 2, TWO, 3, 5), (2, 1, TWO, 4, 5), (2, 2, FOUR, 4, 8)],
)
def test_every_prompt_and_every_choice_is_counted_once(
    kind: str, num_prompts: int, n: int, pieces: Pieces, prompt: int, completion: int
) -> None:
    usage = answer(kind, num_prompts, num_choices=n).whole(pieces)["usage"]
    assert usage == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


@every_kind
def test_chunks_have_no_usage_unless_asked(kind: str) -> None:
    parts = chunks(answer(kind, include_usage=True), ONE)
    assert all("usage" not in part for part in parts)


@every_kind
def test_continuous_usage_counts_the_chunks_own_choice(kind: str) -> None:
    made = answer(kind, 2, num_choices=2, include_usage=True, continuous_usage=True)
    seen: dict[int, list[tuple[int, int]]] = {}
    for chunk in chunks(made, FOUR):
        usage = chunk["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        counts = (usage["prompt_tokens"], usage["completion_tokens"])
        seen.setdefault(chunk["choices"][0]["index"], []).append(counts)
    opening = [0] if kind == "chat" else []
    assert seen == {
        0: [(3, count) for count in [*opening, 1, 3]],
        1: [(3, count) for count in [*opening, 1, 2]],
        2: [(1, count) for count in [*opening, 1, 2]],
        3: [(1, count) for count in [*opening, 1]],
    }
    assert made.usage_chunk()["usage"]["completion_tokens"] == 8


# Token ids ----------------------------------------------------------------------------------------


@every_kind
def test_token_ids_are_nobodys_business_unless_asked(kind: str) -> None:
    made = answer(kind)
    assert "token_ids" not in str([made.whole(ONE), *chunks(made, ONE)])


def test_a_chat_has_the_prompts_tokens_at_its_top() -> None:
    asked = {"num_choices": 2, "return_token_ids": True}
    whole = answer("chat", **asked).whole(TWO)
    parts = chunks(answer("chat", **asked), TWO)
    assert whole["prompt_token_ids"] == [10, 11, 12]
    assert [choice["token_ids"] for choice in whole["choices"]] == [[1, 2, 3], [5, 6]]
    assert parts[0]["prompt_token_ids"] == [10, 11, 12]
    assert all("prompt_token_ids" not in choice for choice in whole["choices"])
    assert [part["choices"][0].get("token_ids") for part in parts] == [
        *(None, [5], None, [1], [6], [2, 3]),
    ]


def test_a_completion_has_the_tokens_of_its_prompt_with_each_choice() -> None:
    asked = {"num_prompts": 2, "num_choices": 2, "return_token_ids": True}
    whole = answer("completion", **asked).whole(FOUR)
    parts = choices(answer("completion", **asked), FOUR)
    expected = [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]]
    assert "prompt_token_ids" not in whole
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == expected
    for number, tokens in enumerate(expected):
        first, *others = [part for part in parts if part["index"] == number]
        assert first["prompt_token_ids"] == tokens
        assert all("prompt_token_ids" not in other for other in others)


# Logprobs -----------------------------------------------------------------------------------------

LOGPROBS = [
    (0, Delta("a", [1], logprobs=[logprob("a")])),
    (0, Delta("bc", [2, 3], "stop", logprobs=[logprob("b"), logprob("c")])),
]


@pytest.mark.parametrize(("number", "kept"), [(0, 0), (1, 1), (3, 3), (5, 3)])
def test_logprobs_have_so_many_alternatives_as_were_asked_for(number: int, kept: int) -> None:
    asked = {"num_top_logprobs": number}
    whole = answer("chat", **asked).whole(LOGPROBS)["choices"]
    content = whole[0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "b", "c"]
    assert [entry["logprob"] for entry in content] == [-0.5] * 3
    for entry in content:
        assert entry["top_logprobs"] == logprob(entry["token"])["top_logprobs"][:kept]
    assert joined(choices(answer("chat", **asked), LOGPROBS)) == joined(whole)


def test_logprobs_are_not_given_unless_asked() -> None:
    made = answer("chat")
    whole, parts = made.whole(LOGPROBS), choices(made, LOGPROBS)
    assert [choice["logprobs"] for choice in [*whole["choices"], *parts]] == [None] * 4


def test_a_piece_without_logprobs_has_none_to_show() -> None:
    (_, part) = choices(answer("chat", num_top_logprobs=1), [(0, Delta("a", [1], "stop"))])
    assert part["logprobs"] == {"content": []}


# Chunks that decode's own route made --------------------------------------------------------------


def made_by_decode(index: int, token_ids: list[int], **content: Any) -> tuple[int, Delta]:
    """A piece as the client makes it of vLLM's chunk; vLLM numbers each choice 0."""
    choice = {"index": 0, "logprobs": None, "finish_reason": None, "token_ids": token_ids} | content
    return index, Delta("", token_ids, choice["finish_reason"], choice=choice)


def usage_of_decode(index: int, completion: int, reasoning: int | None = None) -> tuple[int, Delta]:
    details = None if reasoning is None else {"reasoning_tokens": reasoning}
    usage = {"prompt_tokens": 99, "completion_tokens": completion, "total_tokens": 0}
    return index, Delta("", usage=usage | {"completion_tokens_details": details})


ROLE = {"role": "assistant", "content": ""}
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
MORE = {"index": 0, "function": {"arguments": "{}"}}
TOOLS = [
    made_by_decode(0, [1], delta={}),
    made_by_decode(0, [2], delta={"tool_calls": [CALL]}),
    made_by_decode(0, [3], delta={"content": None}),
    made_by_decode(0, [4], delta={"tool_calls": [MORE]}),
    made_by_decode(0, [5], delta={}, finish_reason="tool_calls", stop_reason=None),
    usage_of_decode(0, 5),
]
REASONED = [
    made_by_decode(1, [1], delta={"reasoning": "hm"}),
    made_by_decode(1, [2], delta={"content": "a"}, finish_reason="stop"),
    usage_of_decode(1, 2, reasoning=1),
    made_by_decode(0, [3, 4], delta={"reasoning": "oh"}),
    made_by_decode(0, [5], delta={"content": "b"}, finish_reason="stop"),
    usage_of_decode(0, 3, reasoning=2),
]


def test_chunks_of_decode_are_passed_on_under_our_ids() -> None:
    parts = chunks(answer("chat", route=Route.OPENAI), TOOLS)
    assert {(part["id"], part["model"]) for part in parts} == {("id-1", MODEL)}
    assert [part["choices"][0]["delta"] for part in parts] == [
        ROLE,
        {"tool_calls": [CALL]},
        {"tool_calls": [MORE]},
        {},
    ]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [*[None] * 3, "tool_calls"]
    assert "token_ids" not in str(parts)


def test_chunks_that_only_carry_token_ids_are_passed_on_if_those_are_asked_for() -> None:
    made = answer("chat", route=Route.OPENAI, return_token_ids=True)
    parts = choices(made, TOOLS)
    assert [part.get("token_ids") for part in parts] == [None, [1], [2], [3], [4], [5]]


def test_chunks_that_only_carry_logprobs_are_passed_on() -> None:
    logprobs = {"content": [logprob("<call>")]}
    made = answer("chat", route=Route.OPENAI, num_top_logprobs=0)
    parts = choices(made, [made_by_decode(0, [1], delta={}, logprobs=logprobs), *TOOLS[1:]])
    assert parts[1]["logprobs"] == logprobs


def test_the_role_that_decode_says_is_not_said_again() -> None:
    made = answer("chat", route=Route.OPENAI)
    parts = choices(made, [made_by_decode(0, [], delta=ROLE), *TOOLS])
    assert [part["delta"].get("role") for part in parts] == ["assistant", None, None, None]


def test_pieces_of_several_legs_keep_their_numbers() -> None:
    made = answer("chat", route=Route.OPENAI, num_choices=2)
    parts = choices(made, REASONED)
    assert [part["index"] for part in parts] == [1, 1, 1, 0, 0, 0]
    assert [part["delta"] for part in parts[:3]] == [ROLE, {"reasoning": "hm"}, {"content": "a"}]


@pytest.mark.parametrize(
    ("pieces", "completion", "details"),
    [
        (TOOLS, 5, None),
        (REASONED, 5, {"reasoning_tokens": 3}),
        (REASONED[:3], 2, {"reasoning_tokens": 1}),
        ([*REASONED[:3], *TOOLS], 7, {"reasoning_tokens": 1}),
    ],
)
def test_usage_is_what_decode_counted_and_reasoning_is_summed(
    pieces: Pieces, completion: int, details: dict[str, int] | None
) -> None:
    made = answer("chat", route=Route.OPENAI, num_choices=2, include_usage=True)
    assert all("usage" not in part for part in chunks(made, pieces))
    usage = made.usage_chunk()["usage"]
    expected = {
        "prompt_tokens": 3,
        "completion_tokens": completion,
        "total_tokens": 3 + completion,
    }
    assert usage == expected | ({"completion_tokens_details": details} if details else {})


@every_kind
def test_continuous_usage_is_what_decode_counted_so_far(kind: str) -> None:
    """Tokens of an echo, or of a call that is not said yet, are not shown."""
    said: dict[str, Any] = {"delta": {"content": "a"}} if kind == "chat" else {"text": "a"}
    pieces = []
    for index, count in ((0, 1), (1, 2), (0, 4), (1, 5)):
        _, piece = made_by_decode(index, [], **said)
        pieces.append((index, replace(piece, usage={"completion_tokens": count})))
    asked: dict[str, Any] = {"include_usage": True, "continuous_usage": True}
    made = answer(kind, num_choices=2, route=Route.OPENAI, **asked)
    seen: dict[int, list[int]] = {}
    for chunk in chunks(made, pieces):
        assert chunk["usage"]["prompt_tokens"] == 3
        count = chunk["usage"]["completion_tokens"]
        assert chunk["usage"]["total_tokens"] == 3 + count
        seen.setdefault(chunk["choices"][0]["index"], []).append(count)
    opening = [0] if kind == "chat" else []
    assert seen == {0: [*opening, 1, 4], 1: [*opening, 2, 5]}
    assert made.usage_chunk()["usage"]["completion_tokens"] == 9


def test_tokens_that_decode_counted_but_did_not_show_are_counted() -> None:
    made = answer("completion", route=Route.OPENAI)
    chunks(made, [made_by_decode(0, [], text="hi a", finish_reason="stop"), usage_of_decode(0, 7)])
    assert made.usage()["completion_tokens"] == 7


@pytest.mark.parametrize("ids", [False, True])
def test_whole_choices_of_decode_are_put_together(ids: bool) -> None:
    """The later choice comes first; each brings the usage of its own call."""
    pieces = []
    for index, tokens in ((1, [4]), (0, [1, 2])):
        message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        ending = {"finish_reason": "tool_calls", "stop_reason": None}
        _, delta = made_by_decode(index, tokens, message=message, prompt_token_ids=[9], **ending)
        _, counted = usage_of_decode(index, len(tokens), reasoning=1)
        piece = Delta("", tokens, "tool_calls", choice=delta.choice, usage=counted.usage)
        pieces.append((index, piece))
    asked: dict[str, Any] = {"num_choices": 2, "route": Route.OPENAI, "return_token_ids": ids}
    whole = answer("chat", **asked).whole(pieces)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [choice.get("token_ids") for choice in whole["choices"]] == (
        [[1, 2], [4]] if ids else [None, None]
    )
    for choice in whole["choices"]:
        assert choice["message"]["tool_calls"] == [CALL]
        assert choice["finish_reason"] == "tool_calls"
        assert "prompt_token_ids" not in choice
    assert whole["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_what_a_piece_says_is_not_changed() -> None:
    said: dict[str, Any] = {"delta": {"content": "a"}, "prompt_token_ids": [9]}
    for make in (chunks, Answer.whole):
        piece = made_by_decode(0, [1], **said)
        make(answer("chat", route=Route.OPENAI), [piece])
        assert piece == made_by_decode(0, [1], **said)


def test_chunks_of_a_completion_by_decode() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{}], "text_offset": [0]}
    pieces = [
        made_by_decode(1, [1], text="a", logprobs=logprobs),
        made_by_decode(1, [2], text=""),
        made_by_decode(1, [3], text="", finish_reason="length", prompt_token_ids=[5]),
        usage_of_decode(1, 3),
    ]
    made = answer("completion", 2, route=Route.OPENAI, return_token_ids=False)
    parts = choices(made, pieces)
    assert [(part["index"], part["text"]) for part in parts] == [(1, "a"), (1, "")]
    assert parts[0]["logprobs"] == logprobs
    assert "token_ids" not in str(parts)


# As bytes -----------------------------------------------------------------------------------------

TEXTS = ["plain ", 'a "quote" \\ and\nlines', "é 图 \U0001f600", BLANK, "\x00", "]}}", ""]
ASKED: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "token ids": {"return_token_ids": True},
    "usage with each": {"continuous_usage": True},
    "logprobs": {"num_top_logprobs": 1},
}


@every_kind
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_events_are_the_chunks_as_bytes(kind: str, asked: dict[str, Any]) -> None:
    pieces = [
        (choice, Delta(text, [number], logprobs=[logprob(text)]))
        for number, text in enumerate(TEXTS)
        for choice in (0, 1)
    ]
    pieces += [(0, Delta("end", [90], "stop", "x")), (1, Delta("", [91], "length"))]
    by_bytes, by_chunks = answer(kind, 2, **asked), answer(kind, 2, **asked)
    by_chunks.created = by_bytes.created
    for choice, delta in pieces:
        expected = b"".join(map(event, by_chunks.chunks(choice, delta)))
        assert by_bytes.events(choice, delta) == expected
    assert by_bytes.usage() == by_chunks.usage()


@every_kind
def test_a_piece_of_decodes_own_route_is_never_framed(kind: str) -> None:
    by_bytes, by_chunks = answer(kind), answer(kind)
    by_chunks.created = by_bytes.created
    content = {"content": "b"} if kind == "chat" else {}
    choice = {"index": 0, "delta": content, "text": "b", "finish_reason": None}
    usage = {"completion_tokens": 3}
    pieces = [
        Delta("a", [1]),
        Delta("a", [1]),
        Delta("", [2], choice=choice, usage=usage),
        Delta("", usage=usage),
    ]
    for delta in pieces:
        expected = b"".join(map(event, by_chunks.chunks(0, delta)))
        assert by_bytes.events(0, delta) == expected
