"""Chat completions: what a client may send."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from easerve.engines.protocol import Route
from easerve.serve.errors import ApiError
from easerve.serve.job import MediaPart
from easerve.serve.request import FORWARDED, Asked, OpenAIRequest, asked, validate

CHAT_FORWARDED = FORWARDED | {
    "add_generation_prompt",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "include_reasoning",
    "max_completion_tokens",
    "parallel_tool_calls",
    "reasoning_effort",
    "tool_choice",
    "tools",
}
MAX_MESSAGES = 1000
MAX_PARTS = 1000
# Spellings of a text part, with the key of the text.
TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
IMAGE_PARTS = ("image_url", "input_image")


class Message(BaseModel):
    """Other keys (tool calls, reasoning, a name) are for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[Any], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


def parse(content: Any, served_model: str, max_images: int, parse_answers: bool = False) -> Asked:
    """Validate a decoded JSON body. Raises ApiError naming the field.

    ``parse_answers``: the engines were told how to find reasoning in every answer.
    """
    request, body = validate(content, ChatRequest, CHAT_FORWARDED, served_model)
    assert isinstance(request, ChatRequest)
    media_parts: list[MediaPart] = []
    body["messages"] = [
        _message(message, f"messages[{number}]", media_parts)
        for number, message in enumerate(request.messages)
    ]
    if len(media_parts) > max_images:
        message = f"At most {max_images} image(s) may be provided in one request"
        raise ApiError(400, message, "messages")
    chat = asked(request, [body])
    chat.media_parts = media_parts
    if request.logprobs:
        chat.num_top_logprobs = request.top_logprobs or 0
        body |= {"logprobs": True, "top_logprobs": chat.num_top_logprobs}
    elif request.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    if parse_answers or body.get("tools"):
        chat.route = Route.OPENAI
    return chat


def _message(message: Message, path: str, media_parts: list[MediaPart]) -> dict[str, Any]:
    known = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        known["content"] = [
            _part(part, f"{path}.content[{index}]", media_parts)
            for index, part in enumerate(message.content)
        ]
    return known


def _part(part: Any, path: str, media_parts: list[MediaPart]) -> dict[str, Any]:
    """One part in its plainest spelling; hints of other servers in it have no effect.

    A client's ``uuid`` is one of those hints: keys are made from the content.
    """
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise ApiError(400, f"{path}: a content part must be an object", path)
    kind = part.get("type", "image_url" if "image_url" in part else None)
    if not isinstance(kind, str):
        raise ApiError(400, f"{path}.type: must be a string", f"{path}.type")
    if kind in TEXT_PARTS:
        key = TEXT_PARTS[kind]
        if not isinstance(part.get(key), str):
            raise ApiError(400, f"{path}.{key}: must be a string", f"{path}.{key}")
        return {"type": "text", "text": part[key]}
    if kind not in IMAGE_PARTS:
        raise ApiError(400, f"{path}.type: {kind[:100]!r} is not supported", f"{path}.type")
    path, url = f"{path}.image_url", part.get("image_url")
    if isinstance(url, dict):
        path, url = f"{path}.url", url.get("url")
    if not isinstance(url, str):
        raise ApiError(400, f"{path}: must be a string", path)
    placed: dict[str, Any] = {}  # filled when the picture is decoded
    media_parts.append(MediaPart(placed, url, path))
    return placed
