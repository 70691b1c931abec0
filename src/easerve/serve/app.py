"""The OpenAI-compatible HTTP server in front of the driver."""

import asyncio
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from hmac import compare_digest
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, SecretStr
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from easerve import __version__
from easerve.config import Deployment
from easerve.serve import chat, completions
from easerve.serve.admin import Admin
from easerve.serve.answers import Answer, ChatAnswer, CompletionAnswer, event
from easerve.serve.driver import Driver
from easerve.serve.errors import ApiError, ended
from easerve.serve.job import Job, Outputs
from easerve.serve.request import Asked
from easerve.types import Reason, RequestId

WELL_FORMED_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # echoed; our own id is in the body
BODY_TIMEOUT_S = 60.0
BODY, DONE = "http.response.body", b"data: [DONE]\n\n"
OPEN_PATHS = frozenset({"/health", "/ready"})
ADMIN = "/admin/"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


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

    limit = deployment.limits.limit_mm_per_prompt.image
    parses_reasoning = deployment.engine.reasoning_parser is not None

    def parse_chat(content: Any) -> Asked:
        return chat.parse(content, deployment.name, limit, parses_reasoning)

    def parse_completion(content: Any) -> Asked:
        return completions.parse(content, deployment.name)

    chat_route = Completions(driver, reader, parse_chat, ChatAnswer)
    completion_route = Completions(driver, reader, parse_completion, CompletionAnswer)
    app.router.routes += [
        Route(CHAT, chat_route, methods=["POST"]),
        Route(COMPLETIONS, completion_route, methods=["POST"]),
    ]
    _describe(app, {CHAT: chat.ChatRequest, COMPLETIONS: completions.CompletionRequest})

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


def _describe(app: FastAPI, bodies: Mapping[str, type[BaseModel]]) -> None:
    """Put the routes that are plain ASGI into the API's description, by the bodies they take."""

    def described() -> dict[str, Any]:
        schema = FastAPI.openapi(app)
        for path, kind in bodies.items():
            content = {"application/json": {"schema": kind.model_json_schema()}}
            answers = {"200": {"description": "The answer, whole or as server-sent events"}}
            schema["paths"][path] = {
                "post": {
                    "requestBody": {"required": True, "content": content},
                    "responses": answers,
                }
            }
        return schema

    app.openapi = described  # type: ignore[method-assign]


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


class Completions:
    """A route that answers with a model's words.

    It is plain ASGI, below the framework's requests and responses: a token then costs a send.
    """

    def __init__(
        self, driver: Driver, reader: Reader, parse: Callable[[Any], Asked], kind: type[Answer]
    ) -> None:
        self._driver, self._reader, self._parse, self._kind = driver, reader, parse, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        content, num_bytes = await self._reader.read(request)
        asked = self._parse(content)
        request_id = f"{self._kind.id_prefix}-{uuid.uuid4().hex}"
        given = request.headers.get("x-request-id", "")
        headers = {"x-request-id": given if WELL_FORMED_ID.fullmatch(given) else request_id}
        jobs = _jobs(asked, request_id, num_bytes)
        answer = self._kind(asked, request_id, jobs)
        for job in jobs:
            self._driver.submit(job)
        gone = asyncio.get_running_loop().create_task(self._cancel_when_gone(receive, jobs))
        try:
            if asked.stream:
                await _send_stream(send, answer, headers)
            else:
                pieces = [piece async for piece in jobs[0].outputs.pieces(len(jobs))]
                if not gone.done():  # else there may be less than an answer
                    body = msgspec.json.encode(answer.whole(pieces))
                    await send(_start(200, b"application/json", headers, len(body)))
                    await send({"type": BODY, "body": body})
        except ApiError as error:
            await error.response(headers)(scope, receive, send)
        finally:
            gone.cancel()
            self._cancel(jobs)

    async def _cancel_when_gone(self, receive: Receive, jobs: Sequence[Job]) -> None:
        """Their outputs end then."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel(jobs)

    def _cancel(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._driver.cancel(job)


async def _send_stream(send: Send, answer: Answer, headers: Mapping[str, str]) -> None:
    """Server-sent events, from the first piece on: until then an error has a status of its own.

    Later an error is the last event but one.
    """
    started, tail = False, b""
    try:
        async for batch in answer.jobs[0].outputs.batches(len(answer.jobs)):
            if not started:
                started = True
                await send(_start(200, b"text/event-stream; charset=utf-8", headers))
            events = b"".join([answer.events(choice, delta) for choice, delta in batch])
            if events:
                await send({"type": BODY, "body": events, "more_body": True})
        if answer.asked.include_usage:
            tail = event(answer.usage_chunk())
    except ApiError as error:
        if not started:
            raise
        tail = event(error.body())
    if started:  # else the client has gone
        await send({"type": BODY, "body": tail + DONE})


def _start(
    status: int, content_type: bytes, headers: Mapping[str, str], length: int | None = None
) -> dict[str, Any]:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    raw.append((b"content-type", content_type))
    if length is not None:
        raw.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": raw}
