"""Text completions: what a client may send."""

from typing import Annotated, Any

from pydantic import Field

from easerve.engines.protocol import Route
from easerve.serve.errors import ApiError
from easerve.serve.request import FORWARDED, MAX_CHOICES, Asked, OpenAIRequest, asked, validate

TOKEN_ID = Annotated[int, Field(ge=0, strict=True)]


class CompletionRequest(OpenAIRequest):
    """``prompt``: a text, its tokens, or several of either."""

    prompt: (
        str
        | Annotated[list[TOKEN_ID], Field(min_length=1, fail_fast=True)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Annotated[
            list[Annotated[list[TOKEN_ID], Field(min_length=1, fail_fast=True)]],
            Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
        ]
    )
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False


def parse(content: Any, served_model: str) -> Asked:
    """Validate a decoded JSON body. Raises ApiError naming the field."""
    request, body = validate(content, CompletionRequest, FORWARDED, served_model)
    assert isinstance(request, CompletionRequest)
    several = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
    prompts = request.prompt if several else [request.prompt]
    if len(prompts) * (request.n or 1) > MAX_CHOICES:
        raise ApiError(400, f"At most {MAX_CHOICES} choices may be asked for at once", "n")
    if request.echo and request.logprobs is not None:
        raise ApiError(400, "logprobs of an echoed prompt are not supported", "echo")
    if request.logprobs is not None:
        body["logprobs"] = request.logprobs
    echo = request.echo and not request.return_token_ids  # vLLM gives the ids instead of the text
    if echo:
        body["echo"] = True
    completion = asked(request, [{**body, "prompt": prompt} for prompt in prompts])
    completion.num_top_logprobs = request.logprobs
    if echo or request.logprobs is not None:
        completion.route = Route.OPENAI
    return completion
