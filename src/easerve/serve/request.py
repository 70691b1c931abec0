"""What chat and text completions have in common: the parameters that a client may send."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from easerve.engines.protocol import Route
from easerve.serve.errors import ApiError
from easerve.serve.job import MediaPart

MAX_CHOICES = 128  # of one request, over all its prompts
# Engines compile a format for all their requests, one after the other.
FORMATS = ("response_format", "structured_outputs", "tools")
MAX_FORMAT_BYTES = 128 << 10
MAX_FORMAT_CHOICES = 1000
MAX_SEED = (1 << 63) - 1
UNION_MEMBERS = frozenset({"bool", "int", "str"})  # pydantic puts them into a field's path
# Parameters that the engines validate and apply; passed on as they are.
FORWARDED = frozenset(
    {
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "frequency_penalty",
        "ignore_eos",
        "include_stop_str_in_output",
        "logit_bias",
        "max_tokens",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_detection",
        "repetition_penalty",
        "response_format",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
        "truncate_prompt_tokens",
        "truncation_side",
    }
)
# What clients send that has no bearing on an answer of ours. Ids are minted here.
IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)
# Values that ask for nothing, of parameters that are not served.
NO_EFFECT: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "length_penalty": 1.0,
    "media_io_kwargs": {},
    "mm_processor_kwargs": {},
    "modalities": ["text"],
    "priority": 0,
    "return_tokens_as_token_ids": False,
    "suffix": "",
    "use_beam_search": False,
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


class OpenAIRequest(BaseModel):
    """The parameters that the router acts on; the others are for the engines."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


@dataclass(slots=True)
class Asked:
    """A validated request. ``bodies``, one per prompt, are for the engines.

    ``num_top_logprobs``: how many alternatives of each token are wanted; None: no logprobs.
    """

    model: str
    bodies: list[dict[str, Any]]
    media_parts: list[MediaPart] = field(default_factory=list)
    num_choices: int = 1
    route: Route = Route.TEXT
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    num_top_logprobs: int | None = None


def validate(
    content: Any, kind: type[OpenAIRequest], forwarded: frozenset[str], served_model: str
) -> tuple[OpenAIRequest, dict[str, Any]]:
    """The request, and what of it is for the engines. Raises ApiError naming the field."""
    if not isinstance(content, dict):
        raise ApiError(400, "The body must be a JSON object")
    try:
        request = kind.model_validate(content)
    except ValidationError as error:
        raise field_error(error) from None
    if request.model != served_model:
        message = f"The model {request.model[:200]!r} does not exist; this is {served_model!r}"
        raise ApiError(404, message, "model", "model_not_found")
    if request.stream_options and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    extra = {name: each for name, each in (request.model_extra or {}).items() if each is not None}
    for name, value in extra.items():
        if name not in forwarded | IGNORED and NO_EFFECT.get(name, ...) != value:
            raise ApiError(400, f"Parameter {name[:200]!r} is not supported", name[:200])
    for name in FORMATS:
        _check_format(name, extra.get(name))
    seed, n = extra.get("seed"), request.n or 1
    if isinstance(seed, int) and seed + n - 1 > MAX_SEED:
        message = f"seed: choices are drawn with seed to seed + {n - 1}, over 64 bits"
        raise ApiError(400, message, "seed")
    return request, {name: extra[name] for name in forwarded & extra.keys()}


def _check_format(name: str, value: Any) -> None:
    """Bounds on what an engine has to compile."""
    if value is None:
        return
    if name == "structured_outputs" and not isinstance(value, dict):
        raise ApiError(400, f"{name}: must be an object", name)
    try:
        num_bytes = len(msgspec.json.encode(value))
    except RecursionError:
        raise ApiError(400, f"{name}: nested too deep", name) from None
    if num_bytes > MAX_FORMAT_BYTES:
        raise ApiError(400, f"{name}: larger than {MAX_FORMAT_BYTES} bytes", name)
    choices = value.get("choice") if isinstance(value, dict) else None
    if isinstance(choices, list) and len(choices) > MAX_FORMAT_CHOICES:
        raise ApiError(400, f"{name}.choice: more than {MAX_FORMAT_CHOICES}", f"{name}.choice")


def asked(request: OpenAIRequest, bodies: list[dict[str, Any]]) -> Asked:
    """What every kind of request says in the same words."""
    options = request.stream_options or StreamOptions()
    return Asked(
        request.model,
        bodies,
        num_choices=request.n or 1,
        stream=bool(request.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
    )


def field_error(error: ValidationError) -> ApiError:
    """The problem that lies deepest, with its path as a client would write it."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = max(problems, key=lambda each: len(each["loc"]))
    path = ""
    for part in problem["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in UNION_MEMBERS and "[" not in part:
            path += f".{part}" if path else part
    return ApiError(400, f"{path}: {problem['msg']}"[:1000], path[:200] or None)
