"""Every parameter: one plain vLLM engine and E→P→D, on the same weights, give the same answer."""

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from .aggregated import OF_A_MODEL
from .conftest import TOOLS, RealServer
from .requests import picture_of, text_part, user

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 60.0
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at the picture",
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"type": "string", "enum": ["red", "blue"]},
                "count": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["colour", "count"],
        },
    },
}
SAY = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "enum": ["yes", "no"]}},
            "required": ["word"],
        },
    },
}
CALLS = [LOOK, SAY]
NAMED = {"type": "function", "function": {"name": "look"}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 9}},
            "required": ["ok", "n"],
            "additionalProperties": False,
        },
    },
}


class Case(NamedTuple):
    name: str
    path: str
    body: dict[str, Any]


def picture_and(text: str, seed: int = 5) -> list[dict[str, Any]]:
    return [user([picture_of(seed), text_part(text)])]


SEEN = picture_and("What is in the picture?")
HELLO = [user("Hello there")]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
ARGUMENTS = json.dumps({"colour": "red", "count": 1})
HISTORY = [
    *SEEN,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ARGUMENTS}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
]


def chat(name: str, messages: list[dict[str, Any]] = SEEN, **parameters: Any) -> Case:
    """None takes a default parameter away."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 24, **parameters}
    return Case(name, CHAT, {key: value for key, value in body.items() if value is not None})


def completion(name: str, prompt: Any = "Hello", **parameters: Any) -> Case:
    return Case(name, COMPLETIONS, {"prompt": prompt, "temperature": 0, **parameters})


CASES = [
    chat("a picture"),
    chat("text", HELLO),
    chat("n", n=3, **SAMPLED),
    chat("n of text", HELLO, n=2, **SAMPLED),
    chat("seed", HELLO, **SAMPLED),
    chat("logprobs", logprobs=True),
    chat("top_logprobs", logprobs=True, top_logprobs=3),
    chat("top_logprobs of a draw", logprobs=True, top_logprobs=2, **SAMPLED),
    chat("logprobs of one token", logprobs=True, top_logprobs=2, max_tokens=1),
    chat("stop", stop=["gre", " and", "e"]),
    chat("stop, included", stop=["e"], include_stop_str_in_output=True),
    chat("stop at the first token", stop=["a", " "]),
    chat("stop_token_ids", stop_token_ids=list(range(260, 400))),
    chat("presence and frequency", HELLO, presence_penalty=1.5, frequency_penalty=1, min_tokens=9),
    chat("repetition_penalty", HELLO, repetition_penalty=1.8, min_tokens=9),
    chat("top_p, top_k, min_p", top_p=0.9, top_k=5, min_p=0.01, **SAMPLED),
    chat("max_tokens 1", max_tokens=1),
    chat("max_tokens 1, drawn", max_tokens=1, **SAMPLED),
    chat("max_tokens 0", max_tokens=0),
    chat("max_tokens below 0", max_tokens=-1),
    chat("no limit", max_tokens=None),
    chat("max_completion_tokens", max_tokens=None, max_completion_tokens=3),
    chat("max_completion_tokens 1", max_tokens=None, max_completion_tokens=1),
    chat("max_completion_tokens 0", max_tokens=None, max_completion_tokens=0),
    chat("both limits", max_completion_tokens=3, max_tokens=9),
    chat("min_tokens", min_tokens=15),
    chat("ignore_eos", ignore_eos=True),
    chat("logit_bias", logit_bias={"300": 50}, max_tokens=5),
    chat("bad_words", bad_words=["circle", "square"]),
    chat("allowed_token_ids", allowed_token_ids=[10, 11, 12], max_tokens=4),
    chat("skip_special_tokens", skip_special_tokens=False),
    chat("json_object", HELLO, response_format={"type": "json_object"}),
    chat("json_schema", response_format=SCHEMA, max_tokens=60, logit_bias={"202": -100}),
    chat("a choice", structured_outputs={"choice": ["yes", "no"]}),
    chat("a choice, one token", structured_outputs={"choice": ["yes", "no"]}, max_tokens=1),
    chat("a regex", structured_outputs={"regex": "[ab]{3}"}, logprobs=True),
    chat("a schema of no type", response_format={"type": "json_schema", "json_schema": {}}),
    chat("tools auto", tools=CALLS, tool_choice="auto"),
    chat("tools by default", tools=CALLS),
    chat("tools none", tools=CALLS, tool_choice="none"),
    chat("tools required", tools=CALLS, tool_choice="required", max_tokens=100),
    chat("tools required, n", tools=CALLS, tool_choice="required", max_tokens=100, n=2, **SAMPLED),
    chat("tools required, cut", tools=CALLS, tool_choice="required", max_tokens=15),
    chat("tools required, logprobs", tools=[SAY], tool_choice="required", logprobs=True),
    chat("tools required, text", HELLO, tools=[SAY], tool_choice="required", max_tokens=100),
    chat(
        "tools required, not parallel",
        tools=CALLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
    ),
    chat("tools, a picture alone", [user([picture_of(4)])], tools=[SAY], tool_choice="required"),
    chat("tools named", tools=CALLS, tool_choice=NAMED, max_tokens=100),
    chat("tools unknown", tools=[SAY], tool_choice=NAMED),
    chat("tools required, none given", tool_choice="required"),
    chat("tools used", HISTORY, tools=CALLS),
    chat("system", [{"role": "system", "content": "Answer briefly."}, *SEEN]),
    chat("developer", [{"role": "developer", "content": "Answer briefly."}, *SEEN]),
    chat("two pictures", [user([picture_of(1), picture_of(2), text_part("How many?")])]),
    chat("a picture in mid-text", [user([text_part("What"), picture_of(3), text_part("is it?")])]),
    chat(
        "pictures in several turns",
        [*SEEN, {"role": "assistant", "content": "a red circle"}, *picture_and("And here?", 8)],
    ),
    chat("text parts", [user([text_part("How many"), text_part("shapes are there?")])]),
    chat(
        "continue_final_message",
        [*SEEN, {"role": "assistant", "content": "a"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    chat("truncate_prompt_tokens", HELLO, truncate_prompt_tokens=4),
    chat("cache_salt", cache_salt="salt"),
    chat("too long", [user("long " * 2000)]),
    completion("a prompt"),
    completion("a prompt of tokens", [5, 6, 7, 100]),
    completion("prompts", ["a b", "c d"]),
    completion("prompts of tokens", [[5, 6], [7]]),
    completion("prompts, n", ["a b", "c d"], n=2, **SAMPLED),
    completion("completion logprobs", logprobs=2),
    completion("completion logprobs 0", logprobs=0),
    completion("completion logprobs, one token", logprobs=3, max_tokens=1),
    completion("completion logprobs of a draw", logprobs=2, **SAMPLED),
    completion("completion stop", stop="e", max_tokens=20),
    completion("completion of one token", max_tokens=1),
    completion("completion of none", max_tokens=0),
    completion("completion as JSON", response_format={"type": "json_object"}),
    completion("an empty prompt", ""),
    completion("no prompts", []),
]
ECHO = [completion("echo", echo=True), completion("echo of tokens", [50, 60], echo=True)]


# Both servers -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ours(
    random_models: dict[str, Path], start: Callable[..., RealServer]
) -> Iterator[dict[str, RealServer]]:
    """A server for each of the random models; they start together, and beside the plain engines."""
    options = ("--port", "0", "--dtype", "float32", "--max-model-len", "1024", *TOOLS)
    servers = {
        name: start(*options, "--served-model-name", name, *OF_A_MODEL.get(name, ()), source=model)
        for name, model in random_models.items()
    }
    yield servers
    for server in servers.values():
        server.process.send_signal(signal.SIGINT)
    for server in servers.values():
        assert server.process.wait(60) == 0


@pytest.fixture(scope="session")
def pairs(
    ours: dict[str, RealServer], aggregated: dict[str, Path], server: RealServer
) -> Iterator[dict[str, tuple[httpx.Client, httpx.Client]]]:
    """By the model: a client of the plain engine, and one of ours."""
    servers = {"llava": server} | {name: each.wait_ready() for name, each in ours.items()}
    clients = {
        name: (
            httpx.Client(
                transport=httpx.HTTPTransport(uds=str(aggregated[name])),
                base_url="http://engine",
                timeout=TIMEOUT_S,
            ),
            httpx.Client(base_url=each.url, timeout=TIMEOUT_S),
        )
        for name, each in servers.items()
    }
    yield clients
    for pair in clients.values():
        for client in pair:
            client.close()


def whole(client: httpx.Client, case: Case, model: str) -> dict[str, Any]:
    """Status, choices and usage of a plain answer."""
    response = client.post(case.path, json={"model": model, **case.body})
    if response.status_code != 200:
        return {"status": response.status_code}
    answer = response.json()
    for choice in answer["choices"]:
        choice.pop("prompt_logprobs", None)
        choice.pop("routed_experts", None)
        message = choice.get("message", {})
        for call in message.get("tool_calls") or ():
            call.pop("id")
        choice["message"] = {key: value for key, value in message.items() if value}
    return {
        "prompt": answer.get("prompt_token_ids"),
        "choices": [_said(choice) for choice in answer["choices"]],
        "usage": _said(answer["usage"]),
    }


def streamed(client: httpx.Client, case: Case, model: str) -> dict[str, Any]:
    """The same of a stream, its deltas joined."""
    body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **case.body}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    with client.stream("POST", case.path, json=body) as response:
        if response.status_code != 200:
            return {"status": response.status_code}
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return {"status": event["error"]["code"]}
            usage = event.get("usage") or usage
            for piece in event["choices"]:
                _join(choices.setdefault(piece["index"], {"tools": {}}), piece)
    return {"choices": choices, "usage": _said(usage or {})}


def _join(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    delta = piece.get("delta") or piece
    for key in ("content", "text", "reasoning"):
        if delta.get(key):
            choice[key] = choice.get(key, "") + delta[key]
    choice["token_ids"] = choice.get("token_ids", []) + (piece.get("token_ids") or [])
    for call in delta.get("tool_calls") or ():
        joined = choice["tools"].setdefault(call["index"], {"name": "", "arguments": ""})
        for key in joined:
            joined[key] += call["function"].get(key) or ""
    logprobs = piece.get("logprobs") or {}
    for key, entries in logprobs.items():
        if entries:
            choice[f"logprobs.{key}"] = choice.get(f"logprobs.{key}", []) + entries
    for key in ("finish_reason", "stop_reason"):
        if piece.get(key) is not None:
            choice[key] = piece[key]


def _said(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if value is not None}


def rounded(value: Any) -> Any:
    """Log-probabilities of one engine and of three differ in the last digits."""
    if isinstance(value, float):
        return round(value, 2) + 0.0
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return value


def compare(pair: tuple[httpx.Client, httpx.Client], case: Case, model: str) -> None:
    """Both are asked at once."""
    names = (model, "tiny-llava" if model == "llava" else model)
    with ThreadPoolExecutor(2) as pool:
        for ask in (whole, streamed):
            expected, answer = map(rounded, pool.map(ask, pair, (case, case), names))
            assert answer == expected, ask.__name__


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_answer(pairs: dict[str, tuple[httpx.Client, httpx.Client]], case: Case) -> None:
    with_ids = case._replace(body={"return_token_ids": True, **case.body})
    compare(pairs["llava"], with_ids, "llava")


@pytest.mark.parametrize("case", ECHO, ids=lambda case: case.name)
def test_same_echo(pairs: dict[str, tuple[httpx.Client, httpx.Client]], case: Case) -> None:
    compare(pairs["llava"], case, "llava")


SIZES = ((60, 60), (100, 50), (50, 130), (200, 60), (33, 300))
SHAPES = [
    *(
        chat(f"{width}x{height}", [user([picture_of(7, (width, height)), text_part("What?")])])
        for width, height in SIZES
    ),
    chat(
        "several of different sizes",
        [user([*(picture_of(i, size) for i, size in enumerate(SIZES)), text_part("What?")])],
    ),
    chat("text", HELLO),
    chat("n", n=2, **SAMPLED),
    chat("logprobs", logprobs=True, top_logprobs=2, max_tokens=2),
    chat("one token", max_tokens=1),
    chat("tools", tools=CALLS, tool_choice="required", max_tokens=60),
]


@pytest.mark.parametrize("model", ["next", "pixtral", "mistral3"])
@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_same_answer_of_other_architectures(
    pairs: dict[str, tuple[httpx.Client, httpx.Client]], case: Case, model: str
) -> None:
    with_ids = case._replace(body={"return_token_ids": True, **case.body})
    compare(pairs[model], with_ids, model)


THOUGHT = "Here is my thought process: a bHere is my response: c d"


@pytest.mark.parametrize("include_reasoning", [True, False])
def test_reasoning_is_parted_from_the_answer(
    pairs: dict[str, tuple[httpx.Client, httpx.Client]], include_reasoning: bool
) -> None:
    case = chat(
        "reasoning",
        structured_outputs={"choice": [THOUGHT]},
        include_reasoning=include_reasoning,
        max_tokens=80,
    )
    compare(pairs["mistral3"], case, "mistral3")
    if not include_reasoning:  # vLLM leaves reasoning that is shown unconstrained
        (choice,) = whole(pairs["mistral3"][1], case, "mistral3")["choices"]
        assert choice["message"]["content"].strip() == "c d"
