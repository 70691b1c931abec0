"""Chat completions: what a client may send, and what it gets back."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from easerve.engines.protocol import Delta
from easerve.serve.driver import MediaPart
from easerve.serve.errors import ApiError

# Sampling parameters that the engines validate and apply; passed on as they are.
FORWARDED = frozenset(
    {
        "bad_words",
        "chat_template_kwargs",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_completion_tokens",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
# What OpenAI's clients send that has no bearing on an answer of ours.
IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "store", "user"})
# Values that ask for nothing, of parameters that are not served yet.
NO_EFFECT: Mapping[str, Any] = {
    "logprobs": False,
    "n": 1,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
MAX_MESSAGES = 1000
MAX_PARTS = 1000


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Part(BaseModel):
    """Clients put hints of other servers into parts; what is not known here has no effect."""

    model_config = ConfigDict(extra="ignore")


class TextPart(Part):
    type: Literal["text"]
    text: str


class ImageUrl(Part):
    url: str


class ImagePart(Part):
    """A ``uuid`` is one of those hints: keys are made from the content."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(Strict):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: (
        str
        | Annotated[
            list[Annotated[TextPart | ImagePart, Field(discriminator="type")]],
            Field(max_length=MAX_PARTS, fail_fast=True),
        ]
    )
    name: str | None = None


class StreamOptions(Strict):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The part of a chat request that the router acts on; FORWARDED is for the engines."""

    model_config = ConfigDict(extra="allow")

    model: str
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


@dataclass(slots=True)
class Chat:
    """A validated request. ``body`` is for the engines, its media parts are in ``media_parts``."""

    request: ChatRequest
    body: dict[str, Any]
    media_parts: list[MediaPart] = field(default_factory=list)


def parse(content: Any, served_model: str, max_images: int) -> Chat:
    """Validate a decoded JSON body. Raises ApiError naming the field."""
    if not isinstance(content, dict):
        raise ApiError(400, "The body must be a JSON object")
    try:
        request = ChatRequest.model_validate(content)
    except ValidationError as error:
        raise _field_error(error) from None
    if request.model != served_model:
        message = f"The model {request.model[:200]!r} does not exist; this is {served_model!r}"
        raise ApiError(404, message, "model", "model_not_found")
    if request.stream_options and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    extra = request.model_extra or {}
    for name, value in extra.items():
        known = name in FORWARDED or name in IGNORED
        if not known and value is not None and NO_EFFECT.get(name, ...) != value:
            raise ApiError(400, f"Parameter {name[:200]!r} is not supported", name[:200])
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    body = {"messages": messages} | {name: extra[name] for name in FORWARDED & extra.keys()}
    chat = Chat(request, body, list(_media_parts(messages)))
    if len(chat.media_parts) > max_images:
        message = f"At most {max_images} image(s) may be provided in one request"
        raise ApiError(400, message, "messages")
    return chat


def _media_parts(messages: Sequence[dict[str, Any]]) -> Iterator[MediaPart]:
    for number, message in enumerate(messages):
        parts = message["content"]
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if part["type"] == "image_url":
                path = f"messages[{number}].content[{index}].image_url.url"
                yield MediaPart(part, part["image_url"]["url"], path)


def _field_error(error: ValidationError) -> ApiError:
    """The problem that lies deepest, with its path as a client would write it."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = max(problems, key=lambda each: len(each["loc"]))
    path, previous = "", None
    for part in problem["loc"]:
        union_member = part == "str" or (isinstance(part, str) and "[" in part)
        tag = isinstance(previous, int) and path.endswith("]") and "content" in path
        if isinstance(part, int):
            path += f"[{part}]"
        elif not union_member and not (tag and part in ("text", "image_url")):
            path += f".{part}" if path else str(part)
        previous = part
    return ApiError(400, f"{path}: {problem['msg']}"[:1000], path[:200] or None)


@dataclass(slots=True)
class Answer:
    """Builds the response of one request from its deltas, whole or as chunks."""

    request_id: str
    model: str
    prompt_token_ids: Sequence[int] = ()
    return_token_ids: bool = False
    num_output_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def count(self, delta: Delta) -> None:
        self.num_output_tokens += len(delta.token_ids)

    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": len(self.prompt_token_ids),
            "completion_tokens": self.num_output_tokens,
            "total_tokens": len(self.prompt_token_ids) + self.num_output_tokens,
        }

    def whole(self, deltas: Sequence[tuple[int, Delta]]) -> dict[str, Any]:
        """The ``chat.completion`` object."""
        choices: dict[int, dict[str, Any]] = {}
        for leg, delta in deltas:
            self.count(delta)
            choice = choices.setdefault(
                leg,
                {
                    "index": leg,
                    "message": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                },
            )
            choice["message"]["content"] += delta.text
            if self.return_token_ids:
                choice.setdefault("token_ids", []).extend(delta.token_ids)
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
        return {
            **self._head("chat.completion"),
            **self._prompt(),
            "choices": [choices[leg] for leg in sorted(choices)],
            "usage": self.usage(),
        }

    def role_chunk(self, leg: int) -> dict[str, Any]:
        return self._chunk(leg, {"role": "assistant", "content": ""}) | self._prompt()

    def chunk(self, leg: int, delta: Delta) -> dict[str, Any]:
        """A ``chat.completion.chunk`` with a piece of the answer."""
        self.count(delta)
        chunk = self._chunk(leg, {"content": delta.text}, delta.finish_reason)
        if self.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(delta.token_ids)
        if delta.finish_reason is not None:
            chunk["choices"][0]["stop_reason"] = delta.stop_reason
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": list(self.prompt_token_ids)} if self.return_token_ids else {}

    def _chunk(
        self, leg: int, delta: dict[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": leg, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }
