"""Define OpenAI's /v1/files and /v1/batches: uploaded files, the lines of a batch, and its state."""

from __future__ import annotations

import email
import email.policy
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from upshift.errors import RequestError
from upshift.serving.protocols.chat_messages import CheckedBody
from upshift.serving.request_checks import find_content_problem
from upshift.text import find_lone_surrogate

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
MAX_LINES = 50_000  # OpenAI's
MAX_PROBLEMS = 100  # that a batch tells
LINE_FORM = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'


class BatchRequest(CheckedBody):
    input_file_id: str = Field(description="of a file of POST /v1/files")
    endpoint: Endpoint
    completion_window: Literal["24h"] = Field("24h", description="taken; a batch ends when all of its lines are answered")
    metadata: dict[str, str] | None = None

    def new_batch(self) -> dict[str, Any]:
        """Return the batch in OpenAI's form before it runs."""
        times = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            **{f"{name}_at": None for name in times},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": self.metadata,
        }


class UploadedFile(NamedTuple):
    name: str
    content: bytes


def read_upload(content_type: str, body: bytes) -> UploadedFile:
    """Return the file of a multipart form. Raise RequestError if the form has none, or another purpose than batches."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1", "replace")
    form = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    parts: dict[str, Any] = {}
    if form.is_multipart():
        for part in form.get_payload():
            name = part.get_param("name", header="content-disposition")  # type: ignore[union-attr]
            parts[str(name)] = part
    if "file" not in parts or "purpose" not in parts:
        raise RequestError(
            "the body is no form with purpose and file; send it as multipart/form-data: curl -F purpose=batch -F file=@FILE"
        )
    purpose = _content_of(parts["purpose"]).decode(errors="replace").strip()
    if purpose != "batch":
        raise RequestError(f"purpose {purpose[:100]!r} is not possible here; give batch")
    name = str(parts["file"].get_filename() or "file.jsonl")[:256]
    return UploadedFile("file.jsonl" if find_lone_surrogate(name) else name, _content_of(parts["file"]))


def _content_of(part: Any) -> bytes:
    content = part.get_payload(decode=True)
    return content if isinstance(content, bytes) else b""


class BatchLine(NamedTuple):
    """A request of a batch."""

    custom_id: str
    endpoint: str
    body: dict[str, Any]


def read_batch_lines(content: bytes, endpoint: str | None) -> tuple[list[BatchLine], list[dict[str, Any]]]:
    """Return the requests of a batch, and the problems of the lines that are no requests, in OpenAI's form.

    With ``endpoint``, all requests are for this address. With None, each is for an address of ``Endpoint``."""
    lines: list[BatchLine] = []
    problems: list[dict[str, Any]] = []
    known_ids: set[str] = set()
    for number, raw_line in _numbered_lines(content):
        try:
            if len(lines) == MAX_LINES:
                raise RequestError(f"the file has more than {MAX_LINES:,} requests; divide it")
            line = _read_line(raw_line, endpoint, known_ids)
        except RequestError as error:
            problems.append({"code": "invalid_request", "message": str(error)[:500], "param": None, "line": number})
            if len(problems) == MAX_PROBLEMS:
                break
        else:
            known_ids.add(line.custom_id)
            lines.append(line)
    if not lines and not problems:
        problems.append({"code": "empty_file", "message": "the file has no requests", "param": None, "line": None})
    return lines, problems


def _numbered_lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not empty, with their numbers."""
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _read_line(raw_line: bytes, endpoint: str | None, known_ids: set[str]) -> BatchLine:
    problem = find_content_problem(raw_line)
    if problem is not None:
        raise RequestError(f"{problem.replace('the body', 'the line')}; write {LINE_FORM}")
    document = json.loads(raw_line)
    custom_id = document.get("custom_id")
    body = document.get("body")
    if not isinstance(custom_id, str) or not isinstance(body, dict):
        raise RequestError(f"the line has no custom_id with a text, or no body with an object; write {LINE_FORM}")
    if custom_id in known_ids:
        raise RequestError(f"the custom_id {custom_id!r} was in an earlier line; give each line one of its own")
    url = document.get("url")
    allowed = get_args(Endpoint) if endpoint is None else (endpoint,)
    if document.get("method", "POST") != "POST" or url not in allowed:
        address = f"{document.get('method')} {url!r}"
        raise RequestError(f"the line asks for {address}, and the batch for POST {' or '.join(allowed)}")
    return BatchLine(custom_id, url, body)


def format_result(line: BatchLine, status: int, body: Any) -> dict[str, Any]:
    """Return a line of the output, or of the errors."""
    request_id = f"batch_req_{uuid.uuid4().hex}"
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": request_id, "custom_id": line.custom_id, "response": response, "error": None}


def finished_ids(content: bytes) -> set[str]:
    """Return the custom ids of whole lines of an output."""
    return {json.loads(line)["custom_id"] for line in content.split(b"\n") if line}


def list_page(data: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a list in OpenAI's form, the newest first. All items are on its only page."""
    newest_first = sorted(data, key=lambda item: item["created_at"], reverse=True)
    ids = [item["id"] for item in newest_first]
    edges = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": newest_first, "has_more": False, **edges}
