"""Turn errors into a status of HTTP and an error in OpenAI's form."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from upshift.errors import JobFailed, RequestError
from upshift.serving.engine import RequestRefused
from upshift.serving.requests import ErrorAnswer

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
WORDS = {
    400: "the request is not possible",
    401: "the key is missing or unknown",
    404: "the model is not served here",
    408: "the body came too slowly",
    413: "the body, or prompt and answer, are too long",
    415: "the body is compressed, or a browser's and not named as JSON",
    429: "it would wait too long",
    500: "the engine failed at this request alone",
    503: "the engine died, or starts again",
    504: "it took longer than a request may",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": said, "model": ErrorAnswer} for status, said in WORDS.items()
}
RETRY_SECONDS = 1.0


class Refusal(NamedTuple):
    status: int
    why: str
    param: str | None = None
    retry_after: float | None = None

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.why, "type": kind, "param": self.param, "code": None}}


def refusal(error: BaseException) -> Refusal | None:
    """Return the refusal for an error, or None if the error is a fault of the server itself."""
    if isinstance(error, RequestRefused):
        return Refusal(error.status, str(error), retry_after=error.retry_after)
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail))
    if isinstance(error, TimeoutError):
        return Refusal(504, "the answer took longer than a request may take here; ask for fewer tokens")
    if isinstance(error, RequestError):
        return Refusal(400, str(error))
    if isinstance(error, JobFailed):
        return Refusal(503, str(error), retry_after=RETRY_SECONDS)
    return None


def answer_of(found: Refusal | None) -> JSONResponse:
    found = found or Refusal(500, "the server failed at this request; its log says how")
    headers = {} if found.retry_after is None else {"Retry-After": str(max(math.ceil(found.retry_after), 1))}
    if found.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(found.body(), status_code=found.status, headers=headers)


def _invalid(error: RequestValidationError) -> Refusal:
    """Return the first problem, without what the client sent. For a field with several types, prefer a problem that
    is not about the type."""
    problems = error.errors()
    problem = next((one for one in problems if not one["type"].endswith(("_type", "_parsing"))), problems[0])
    where = [str(part) for part in problem["loc"] if part != "body"]
    name = ".".join(where).encode(errors="backslashreplace").decode()
    if problem["type"] == "extra_forbidden":
        return Refusal(400, f"{name} is not possible here; leave it out", name)
    if problem["type"] == "json_invalid":
        return Refusal(400, "the body is not JSON")
    return Refusal(400, f"{name or 'the body'}: {problem['msg']}", name or None)
