"""Tell clients why a request is rejected: the status, and the error in OpenAI's form, in Anthropic's or in Ollama's."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from upshift.errors import JobFailed, RequestError
from upshift.serving.engine_process import EngineDied, RequestRefused
from upshift.serving.messages import CONTEXT_CODE, cut_error

B = TypeVar("B", bound=BaseModel)


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: ErrorBody


class OllamaErrorAnswer(BaseModel):
    error: str


class AnthropicErrorBody(BaseModel):
    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorAnswer(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorBody


ANTHROPIC_PREFIX = "/v1/messages"  # of the addresses whose errors have Anthropic's form
OLLAMA_PREFIX = "/api/"  # likewise, of Ollama's
ANTHROPIC_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
DESCRIPTIONS = {  # of the statuses, for the page at /docs
    400: "the request is not possible",
    401: "the key is missing or unknown",
    403: "the server does not allow this",
    404: "the model is not served here",
    408: "the headers or the body came too slowly",
    413: "the body, or prompt and answer, are too long",
    415: "the body is compressed, or a browser's and not named as JSON",
    429: "it would wait too long",
    431: "the headers are too large",
    500: "the engine failed at this request alone",
    503: "the engine died, or starts again",
    504: "it took longer than a request may",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "model": ErrorAnswer} for status, description in DESCRIPTIONS.items()
}
ANTHROPIC_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "model": AnthropicErrorAnswer} for status, description in DESCRIPTIONS.items()
}
OLLAMA_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "model": OllamaErrorAnswer} for status, description in DESCRIPTIONS.items()
}
OLLAMA_NAMES = {  # of fields and addresses, by OpenAI's names for them
    "max_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "guided_json": "format",
    "/v1/chat/completions": "/api/chat",
    "/v1/completions": "/api/generate",
    "/v1/embeddings": "/api/embed",
}
OPENAI_NAME = re.compile(rf"(?<![\w/])({'|'.join(map(re.escape, OLLAMA_NAMES))})(?![\w/])")
OTHER_VARIABLES = ", or set one of "  # begins the names of variables of a chat template, which Ollama's clients cannot set
RETRY_SECONDS = 1.0  # an engine that died is restarted


class ThreadsUnsupported(RequestError):
    """A request of Anthropic's asks the server to keep the conversation."""


THREAD_DETAILS: dict[str, Any] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}  # Anthropic's


class Refusal(NamedTuple):
    """An error answer: HTTP status, message, the field that is wrong, the seconds after which to try again, OpenAI's code, and
    Anthropic's details.

    Message and field may quote the request, and are cut where they are sent."""

    status: int
    message: str
    param: str | None = None
    retry_after: float | None = None
    code: str | None = None
    details: dict[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        error_type = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else cut_error(self.param)
        return {"error": {"message": cut_error(self.message), "type": error_type, "param": param, "code": self.code}}

    def ollama_body(self) -> dict[str, Any]:
        """Return the error in Ollama's form, with its names of the fields."""
        message = self.message.partition(OTHER_VARIABLES)[0]
        return {"error": cut_error(OPENAI_NAME.sub(lambda match: OLLAMA_NAMES[match[1]], message))}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the error in Anthropic's form. Its clients know a prompt that is too long by the words of the message."""
        error_type = ANTHROPIC_ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        message = f"prompt is too long: {self.message}" if self.code == CONTEXT_CODE else self.message
        details = {} if self.details is None else {"details": self.details}
        return {"type": "error", "error": {"type": error_type, "message": cut_error(message), **details}}


# pydantic's names, in the path of a field
UNION_NAME = re.compile(r"(list|tuple|union|tagged-union|function-\w+|constrained-\w+)\[|constrained-\w+$")
OTHER_PARTS = {  # types of the parts of a message that are no text, in OpenAI's words and in Anthropic's
    "video_url": "a video",
    "input_audio": "a sound",
    "input_file": "a file",
    "file": "a file",
    "document": "a document",
}
FAULT = Refusal(500, "the server failed at this request; its log says how")


def refusal_of(error: BaseException) -> Refusal | None:
    """Return the refusal for an error, or None if the error is a fault of the server itself."""
    if isinstance(error, RequestRefused):
        return Refusal(error.status, str(error), retry_after=error.retry_after, code=error.code)
    if isinstance(error, RequestValidationError):
        # FastAPI says first where the field is: in the body, the query or the path.
        return refusal_of_problems([{**problem, "loc": problem["loc"][1:]} for problem in error.errors()])
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, str(error.detail))
    if isinstance(error, TimeoutError):
        return Refusal(504, "the answer took longer than a request may take here; ask for fewer tokens")
    if isinstance(error, ThreadsUnsupported):
        return Refusal(400, str(error), "thread", details=THREAD_DETAILS)
    if isinstance(error, RequestError):
        return Refusal(400, str(error))
    if isinstance(error, EngineDied):
        return Refusal(503, str(error), retry_after=max(error.retry_after or 0.0, RETRY_SECONDS))
    if isinstance(error, JobFailed):
        return Refusal(503, str(error), retry_after=RETRY_SECONDS)
    return None


def read_body(body_type: type[B], body: dict[str, Any]) -> B:
    """Return a body as a request. Raise RequestError with the first problem if it is none."""
    try:
        return body_type.model_validate(body)
    except ValidationError as error:
        raise RequestError(refusal_of_problems(error.errors()).message) from None


def body_error(error: ValidationError) -> RequestValidationError:
    """Return the error of a body as FastAPI raises it."""
    return RequestValidationError([{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()])


def error_response(refusal: Refusal, path: str) -> JSONResponse:
    """Return the HTTP response for a refusal at an address."""
    headers = {}
    if refusal.retry_after is not None:
        headers["Retry-After"] = str(max(math.ceil(refusal.retry_after), 1))
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = refusal.anthropic_body() if path.startswith(ANTHROPIC_PREFIX) else refusal.body()
    body = refusal.ollama_body() if path.startswith(OLLAMA_PREFIX) else body
    return JSONResponse(body, status_code=refusal.status, headers=headers)


def refusal_of_problems(problems: Sequence[Any]) -> Refusal:
    """Return the first of pydantic's problems of a request, without the values that the client sent.

    ``loc`` of a problem is the path of its field. For a field with several types, prefer a problem that is not about the type."""
    value_problems = [problem for problem in problems if not problem["type"].endswith(("_type", "_parsing"))]
    problem = (value_problems or problems)[0]
    path = [str(key) for key in problem["loc"] if not UNION_NAME.match(str(key))]
    field = ".".join(path).encode(errors="backslashreplace").decode()
    kind = problem.get("ctx", {}).get("tag") or problem.get("input")
    if isinstance(kind, str) and kind in OTHER_PARTS and problem["type"] in ("union_tag_invalid", "literal_error"):
        return Refusal(400, f"{field} is {OTHER_PARTS[kind]}, and models here read texts and pictures only; leave it out", field)
    if problem["type"] == "extra_forbidden":
        return Refusal(400, f"{field} is not possible here; leave it out", field)
    if problem["type"] == "json_invalid":
        return Refusal(400, "the body is not JSON")
    return Refusal(400, f"{field or 'the body'}: {problem['msg']}", field or None)
