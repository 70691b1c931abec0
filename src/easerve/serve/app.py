"""The OpenAI-compatible HTTP server in front of the driver."""

import asyncio
import hmac
import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from easerve import __version__
from easerve.config import Deployment
from easerve.engines.protocol import Delta
from easerve.serve import chat
from easerve.serve.driver import Driver, Job
from easerve.serve.errors import ApiError, ended
from easerve.types import Reason, RequestId

WELL_FORMED_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # echoed; our own id is in the body
BODY_TIMEOUT_S = 60.0
OPEN_PATHS = frozenset({"/health", "/ready"})


def create_app(deployment: Deployment, driver: Driver) -> FastAPI:
    """The routes. The caller owns the driver, its engines and their life."""
    app = FastAPI(title="EAServe", version=__version__, docs_url=None, redoc_url=None)
    reader = Reader(int(deployment.limits.max_body), int(deployment.limits.max_held))
    if deployment.server.api_key is not None:
        app.add_middleware(KeyCheck, key=deployment.server.api_key.get_secret_value())

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: Exception) -> JSONResponse:
        status = getattr(error, "status_code", 500)
        text = {404: "There is no such path", 405: "The path does not take this method"}
        return ApiError(status, text.get(status, "The request cannot be served")).response()

    @app.exception_handler(ClientDisconnect)
    async def left_while_sending(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.get("/health")
    async def health() -> Response:
        """The process answers."""
        return Response()

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """200 when every stage has an engine, 503 before and after."""
        engines = sorted(engine.worker_id for engine in driver.engines())
        return JSONResponse(
            {"ready": driver.ready, "engines": engines}, 200 if driver.ready else 503
        )

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(driver.metrics.render(driver.core), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": deployment.name, "object": "model", "created": 0, "owned_by": "easerve"}
        return {"object": "list", "data": [model]}

    @app.post(
        "/v1/chat/completions",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": chat.ChatRequest.model_json_schema()}},
            }
        },
    )
    async def chat_completions(request: Request) -> Response:
        content, num_bytes = await reader.read(request)
        asked = chat.parse(content, deployment.name, deployment.limits.limit_mm_per_prompt.image)
        job = Job(
            RequestId(f"chatcmpl-{uuid.uuid4().hex}"), asked.body, asked.media_parts, num_bytes
        )
        driver.submit(job)
        return await _respond(request, driver, job, asked)

    return app


class KeyCheck:
    """Every path but OPEN_PATHS needs the API key, known paths and unknown ones."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._expected = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            header = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, given = header.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given, self._expected):
                refusal = ApiError(401, "Missing or wrong API key", code="invalid_api_key")
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Reader:
    """Reads bodies: bounded each, in all those that are being read, and in time."""

    def __init__(self, max_body: int, max_held: int) -> None:
        self._max_body, self._max_held = max_body, max_held
        self._held = 0

    async def read(self, request: Request) -> tuple[Any, int]:
        """The decoded JSON and its size in bytes."""
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise ApiError(415, "The Content-Type must be application/json")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.stream():
                    body += piece
                    self._held += len(piece)
                    if len(body) > self._max_body:
                        raise self._too_large()
                    if self._held > self._max_held:
                        raise ended(Reason.OVERLOADED, retry_after_s=1)
        except TimeoutError:
            raise ApiError(408, f"The body did not come within {BODY_TIMEOUT_S:g} s") from None
        finally:
            self._held -= len(body)
        try:
            return msgspec.json.decode(body), len(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"The body is not valid JSON: {error}") from None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_body} bytes")


async def _respond(request: Request, driver: Driver, job: Job, asked: chat.Chat) -> Response:
    """The response, once there is something to say: the first piece, the whole, or an error."""
    ids_wanted = bool(asked.request.return_token_ids)
    answer = chat.Answer(job.request_id, asked.request.model, return_token_ids=ids_wanted)
    given = request.headers.get("x-request-id", "")
    headers = {"x-request-id": given if WELL_FORMED_ID.fullmatch(given) else job.request_id}
    pieces = job.stream()
    gone = asyncio.create_task(_disconnected(request))
    work = asyncio.create_task(_first(pieces) if asked.request.stream else _all(pieces))
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            driver.cancel(job)
            return Response(status_code=499)  # nobody reads it
        deltas = work.result()
    except ApiError as error:
        return error.response(headers)
    except asyncio.CancelledError:
        driver.cancel(job)
        raise
    finally:
        gone.cancel()
        work.cancel()
    answer.prompt_token_ids = job.prompt.token_ids if job.prompt else ()
    if not asked.request.stream:
        return JSONResponse(answer.whole(deltas), headers=headers)
    options = asked.request.stream_options
    include_usage = bool(options and options.include_usage)
    events = _events(answer, _chain(deltas, pieces), include_usage)
    return EventStream(events, headers, partial(driver.cancel, job))


class EventStream(StreamingResponse):
    """Server-sent events. ``close`` is called at the end, also of a stream that never began."""

    def __init__(
        self, events: AsyncIterator[str], headers: Mapping[str, str], close: Callable[[], None]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(
    answer: chat.Answer, pieces: AsyncIterator[tuple[int, Delta]], include_usage: bool
) -> AsyncIterator[str]:
    """The answer as server-sent events; an error is the last but one."""
    seen: set[int] = set()
    try:
        async for leg, delta in pieces:
            if leg not in seen:
                seen.add(leg)
                yield _event(answer.role_chunk(leg))
            yield _event(answer.chunk(leg, delta))
        if include_usage:
            yield _event(answer.usage_chunk())
    except ApiError as error:
        yield _event(error.body())
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _chain(
    first: list[tuple[int, Delta]], rest: AsyncIterator[tuple[int, Delta]]
) -> AsyncIterator[tuple[int, Delta]]:
    for piece in first:
        yield piece
    async for piece in rest:
        yield piece


async def _first(pieces: AsyncIterator[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
    return [await anext(pieces)]


async def _all(pieces: AsyncIterator[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
    return [piece async for piece in pieces]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
