"""Errors as the OpenAI API words them: one body for all, the cause named, nothing leaked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse

from easerve.types import Reason

# Status and text of a request that ended without an answer. What the client did wrong is said
# by whoever found it; here is only what the server could not do.
_ENDS = {
    Reason.OVERLOADED: (429, "The server is at capacity; try again later"),
    Reason.NO_WORKER: (503, "No engine of a stage that the request needs is running"),
    Reason.PREPARE_FAILED: (503, "No engine could prepare the request"),
    Reason.ENCODE_FAILED: (500, "The media could not be encoded"),
    Reason.PREFILL_FAILED: (500, "The prompt could not be processed"),
    Reason.DECODE_FAILED: (500, "The answer could not be generated"),
    Reason.WORKER_LOST: (503, "The engine that worked on the request was lost"),
    Reason.TIMED_OUT: (504, "The request took too long"),
}


@dataclass
class ApiError(Exception):
    """An error for the client. ``param`` is the path of the field at fault."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @property
    def kind(self) -> str:
        match self.status:
            case 401:
                return "authentication_error"
            case 429:
                return "rate_limit_error"
            case status if status < 500:
                return "invalid_request_error"
        return "server_error"

    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        headers = dict(headers or {})
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        return JSONResponse(self.body(), self.status, headers)


def ended(reason: Reason, retry_after_s: int | None = None) -> ApiError:
    """The error of a request that ended for ``reason``."""
    status, message = _ENDS[reason]
    return ApiError(status, message, code=reason.value, retry_after_s=retry_after_s)
