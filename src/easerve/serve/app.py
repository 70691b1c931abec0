"""The OpenAI-compatible HTTP server in front of the driver."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from hmac import compare_digest
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from easerve import __version__
from easerve.config import Deployment
from easerve.engines.protocol import Delta
from easerve.serve import chat, completions
from easerve.serve.admin import Admin
from easerve.serve.answers import Answer, ChatAnswer, CompletionAnswer
from easerve.serve.driver import Driver
from easerve.serve.errors import ApiError, ended
from easerve.serve.job import Job, Outputs
from easerve.serve.request import Asked
from easerve.types import Reason, RequestId

WELL_FORMED_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # echoed; our own id is in the body
BODY_TIMEOUT_S = 60.0
OPEN_PATHS = frozenset({"/health", "/ready"})
ADMIN = "/admin/"


def create_app(deployment: Deployment, driver: Driver) -> FastAPI:
    """The routes. The caller owns the driver, its engines and their life."""
    app = FastAPI(title="EAServe", version=__version__, docs_url=None, redoc_url=None)
    reader = Reader(int(deployment.limits.max_body), int(deployment.limits.max_held))
    _add_admin(app, Admin(deployment, driver), driver, reader)
    app.add_middleware(
        KeyCheck,
        key=_secret(deployment.server.api_key),
        token=_secret(deployment.server.admin_token),
    )

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
        return Response(driver.render_metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {
            "id": deployment.name,
            "object": "model",
            "created": 0,
            "owned_by": "easerve",
            "max_model_len": deployment.engine.max_model_len,  # None: as the model's folder says
        }
        return {"object": "list", "data": [model]}

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(chat.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        content, num_bytes = await reader.read(request)
        limit = deployment.limits.limit_mm_per_prompt.image
        asked = chat.parse(
            content, deployment.name, limit, deployment.engine.reasoning_parser is not None
        )
        return await _respond(request, driver, asked, num_bytes, ChatAnswer)

    @app.post("/v1/completions", openapi_extra=_body_schema(completions.CompletionRequest))
    async def text_completions(request: Request) -> Response:
        content, num_bytes = await reader.read(request)
        asked = completions.parse(content, deployment.name)
        return await _respond(request, driver, asked, num_bytes, CompletionAnswer)

    return app


def _add_admin(app: FastAPI, admin: Admin, driver: Driver, reader: "Reader") -> None:
    @app.get("/admin/knobs")
    async def knobs() -> dict[str, Any]:
        """The control policies as they are now."""
        return admin.knobs()

    @app.patch("/admin/knobs")
    async def change_knobs(request: Request) -> dict[str, Any]:
        """Change some of them; the answer is all of them, in force."""
        content, _ = await reader.read(request)
        return admin.change(content)

    @app.get("/admin/state")
    async def state() -> dict[str, Any]:
        """Engines, queues and divided devices as they are now."""
        await driver.see_divisions()
        return admin.state()


def _body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def _secret(secret: SecretStr | None) -> bytes | None:
    return None if secret is None else secret.get_secret_value().encode()


class KeyCheck:
    """Every path but OPEN_PATHS needs the API key, if there is one, known paths and unknown ones.

    What is under ADMIN needs the admin's token instead; without one it is not there.
    """

    def __init__(self, app: ASGIApp, key: bytes | None, token: bytes | None) -> None:
        self._app, self._key, self._token = app, key, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await refusal.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if scope["path"] in OPEN_PATHS:
            return None
        expected, name = self._key, "API key"
        if scope["path"].startswith(ADMIN):
            if self._token is None:
                return ApiError(404, "There is no such path")
            expected, name = self._token, "admin token"
        header = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, given = header.partition(b" ")
        if expected is None or (scheme.lower() == b"bearer" and compare_digest(given, expected)):
            return None
        return ApiError(401, f"Missing or wrong {name}", code="invalid_api_key")


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


def _jobs(asked: Asked, request_id: str, num_bytes: int) -> list[Job]:
    """One job per prompt; they share a queue of outputs."""
    outputs = Outputs()
    several = len(asked.bodies) > 1
    return [
        Job(
            RequestId(f"{request_id}-{number}" if several else request_id),
            body,
            asked.media_parts,
            num_bytes // len(asked.bodies),
            asked.num_choices,
            asked.route,
            asked.stream,
            number * asked.num_choices,
            outputs,
        )
        for number, body in enumerate(asked.bodies)
    ]


async def _respond(
    request: Request, driver: Driver, asked: Asked, num_bytes: int, kind: type[Answer]
) -> Response:
    """The response, once there is something to say: the first piece, the whole, or an error."""
    request_id = f"{kind.id_prefix}-{uuid.uuid4().hex}"
    given = request.headers.get("x-request-id", "")
    headers = {"x-request-id": given if WELL_FORMED_ID.fullmatch(given) else request_id}
    jobs = _jobs(asked, request_id, num_bytes)
    answer = kind(asked, request_id, jobs)

    def cancel() -> None:
        for job in jobs:
            driver.cancel(job)

    for job in jobs:
        driver.submit(job)
    stream = jobs[0].outputs.pieces(len(jobs))
    gone = asyncio.create_task(_disconnected(request))
    work = asyncio.create_task(_first(stream) if asked.stream else _all(stream))
    done = False
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)  # nobody reads it
        found = work.result()
        done = True
    except ApiError as error:
        return error.response(headers)
    finally:
        gone.cancel()
        work.cancel()
        if not done:
            cancel()
    if not asked.stream:
        content = msgspec.json.encode(answer.whole(found))
        return Response(content, media_type="application/json", headers=headers)
    return EventStream(_events(answer, _chain(found, stream)), headers, cancel)


class EventStream(StreamingResponse):
    """Server-sent events. ``close`` is called at the end, also of a stream that never began."""

    def __init__(
        self, events: AsyncIterator[bytes], headers: Mapping[str, str], close: Callable[[], None]
    ) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


async def _events(answer: Answer, stream: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
    """The answer as server-sent events; an error is the last but one."""
    try:
        async for choice, delta in stream:
            for chunk in answer.chunks(choice, delta):
                yield _event(chunk)
        if answer.asked.include_usage:
            yield _event(answer.usage_chunk())
    except ApiError as error:
        yield _event(error.body())
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def _chain(
    first: list[tuple[int, Delta]], rest: AsyncIterator[tuple[int, Delta]]
) -> AsyncIterator[tuple[int, Delta]]:
    for piece in first:
        yield piece
    async for piece in rest:
        yield piece


async def _first(stream: AsyncIterator[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
    return [await anext(stream)]


async def _all(stream: AsyncIterator[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
    return [piece async for piece in stream]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
