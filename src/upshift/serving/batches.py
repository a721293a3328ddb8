"""Keep the files and batches of /v1/files and /v1/batches in a folder, and answer the requests of batches.

Each answer is written as it comes. A server that starts again continues after the answers that are there."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

from upshift.atomic_file import write_whole
from upshift.errors import RequestError
from upshift.serving.protocols.batch_requests import (
    BatchLine,
    BatchRequest,
    UploadedFile,
    finished_ids,
    format_result,
    list_page,
    read_batch_lines,
)

logger = logging.getLogger(__name__)
UNFINISHED = ("validating", "in_progress", "finalizing")
ID = re.compile(r"(file|batch)[-_][0-9a-f]{32}")
BUSY = (429, 503)  # statuses after which a request of a batch is sent again
RETRY_SECONDS = 1.0


class LineAnswer(NamedTuple):
    """The answer to a request of a batch."""

    status: int
    body: Any
    retry_after: float | None = None


AnswerLine = Callable[[str, dict[str, Any]], Awaitable[LineAnswer]]  # the address and the body of a request


async def answer_when_free(answer_line: AnswerLine, line: BatchLine) -> LineAnswer:
    """Return the answer to a request. If the server is busy, wait and send the request again."""
    while True:
        answer = await answer_line(line.endpoint, line.body)
        if answer.status not in BUSY:
            return answer
        await asyncio.sleep(max(answer.retry_after or 0.0, RETRY_SECONDS))


class BatchFolder:
    """The files and batches in a folder. The content is in ``ID.jsonl``, and its description in ``ID.json``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add_file(self, upload: UploadedFile, purpose: str = "batch") -> dict[str, Any]:
        id = f"file-{uuid.uuid4().hex}"
        document = {
            "id": id,
            "object": "file",
            "bytes": len(upload.content),
            "created_at": int(time.time()),
            "filename": upload.name,
            "purpose": purpose,
            "status": "processed",
        }
        self.content_path(id).write_bytes(upload.content)
        self.save(document)
        return document

    def content_path(self, id: str) -> Path:
        return self._folder / f"{id}.jsonl"

    def save(self, document: dict[str, Any]) -> None:
        write_whole(self._folder / f"{document['id']}.json", json.dumps(document))

    def find(self, id: str) -> dict[str, Any] | None:
        """Return the description of a file or a batch, or None if there is none."""
        path = self._folder / f"{id}.json"
        if not ID.fullmatch(id) or not path.is_file():
            return None
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if document["object"] == "file":
            document["bytes"] = self.content_path(id).stat().st_size
        return document

    def list(self, kind: str) -> list[dict[str, Any]]:
        """Return all files ("file"), or all batches ("batch")."""
        ids = [path.stem for path in self._folder.glob(f"{kind}[-_]*.json")]
        return [document for document in map(self.find, ids) if document is not None]

    def delete(self, id: str) -> None:
        self.content_path(id).unlink(missing_ok=True)
        (self._folder / f"{id}.json").unlink(missing_ok=True)

    def read_whole_lines(self, id: str) -> bytes:
        """Return the whole lines of an output. Remove a last line that is not whole, because its server ended."""
        path = self.content_path(id)
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        return whole

    def append(self, id: str, result: dict[str, Any]) -> None:
        with self.content_path(id).open("ab") as file:
            file.write(json.dumps(result, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")


class Batches:
    """The batches of a server. ``answer`` answers a request at an address. ``rows`` requests of a batch run at once."""

    def __init__(self, folder: BatchFolder, answer: AnswerLine, rows: int) -> None:
        self.folder = folder
        self._answer = answer
        self._rows = rows
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def resume(self) -> None:
        """Go on with the batches that an earlier server did not finish."""
        for batch in self.folder.list("batch"):
            if batch["status"] in UNFINISHED:
                self._start(batch)
            elif batch["status"] == "cancelling":
                self._change(batch, "cancelled")

    async def stop(self) -> None:
        """Stop all batches. They stay unfinished."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def create(self, request: BatchRequest) -> dict[str, Any]:
        """Begin a batch. Raise RequestError if there is no such file."""
        file = self.folder.find(request.input_file_id)
        if file is None or file["object"] != "file":
            raise RequestError(f"the file {request.input_file_id[:100]!r} is not here; send it to POST /v1/files first")
        batch = request.new_batch()
        self.folder.save(batch)
        self._start(batch)
        return batch

    async def cancel(self, batch: dict[str, Any]) -> dict[str, Any]:
        """End a batch. Its answers so far stay. Return its new state."""
        task = self._tasks.get(batch["id"])
        if batch["status"] not in UNFINISHED:
            raise RequestError(f"the batch {batch['id']} is {batch['status']} already, and cannot be cancelled")
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        stopped = self.folder.find(batch["id"]) or batch
        if stopped["status"] in UNFINISHED:
            self._change(stopped, "cancelling")
            self._change(stopped, "cancelled")
        return stopped

    def is_used(self, file_id: str) -> bool:
        """Return whether an unfinished batch reads or writes a file."""
        keys = ("input_file_id", "output_file_id", "error_file_id")
        unfinished = [batch for batch in self.folder.list("batch") if batch["status"] in UNFINISHED]
        return any(file_id == batch[key] for batch in unfinished for key in keys)

    def page(self, kind: str) -> dict[str, Any]:
        return list_page(self.folder.list(kind))

    def _start(self, batch: dict[str, Any]) -> None:
        id = batch["id"]
        task = asyncio.create_task(self._run(batch))
        self._tasks[id] = task
        task.add_done_callback(lambda done: self._end(id, done))

    def _end(self, id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[id]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("the batch %s stopped", id, exc_info=error)
            batch = self.folder.find(id)
            if batch is not None:
                problem = {"code": "server_error", "message": "the server failed; its log says how", "param": None, "line": None}
                batch["errors"] = {"object": "list", "data": [problem]}
                self._change(batch, "failed")

    def _change(self, batch: dict[str, Any], status: str) -> None:
        batch["status"] = status
        batch[f"{status}_at"] = int(time.time())
        self.folder.save(batch)

    async def _run(self, batch: dict[str, Any]) -> None:
        """Answer the requests of a batch that have no answer yet."""
        content = await asyncio.to_thread(self.folder.content_path(batch["input_file_id"]).read_bytes)
        lines, problems = await asyncio.to_thread(read_batch_lines, content, batch["endpoint"])
        batch["request_counts"]["total"] = len(lines)
        if problems:
            batch["errors"] = {"object": "list", "data": problems}
            self._change(batch, "failed")
            return
        for name in ("output", "error"):
            if batch[f"{name}_file_id"] is None:
                upload = UploadedFile(f"{batch['id']}_{name}.jsonl", b"")
                batch[f"{name}_file_id"] = self.folder.add_file(upload, "batch_output")["id"]
        self._change(batch, "in_progress")
        completed = finished_ids(self.folder.read_whole_lines(batch["output_file_id"]))
        failed = finished_ids(self.folder.read_whole_lines(batch["error_file_id"]))
        batch["request_counts"] |= {"completed": len(completed), "failed": len(failed)}
        waiting = iter([line for line in lines if line.custom_id not in completed | failed])

        async def work() -> None:
            for line in waiting:
                self._record(batch, line, await answer_when_free(self._answer, line))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._rows):
                group.create_task(work())
        self._change(batch, "finalizing")
        if not batch["request_counts"]["failed"]:
            self.folder.delete(batch["error_file_id"])
            batch["error_file_id"] = None
        self._change(batch, "completed")

    def _record(self, batch: dict[str, Any], line: BatchLine, answer: LineAnswer) -> None:
        file, count = ("output_file_id", "completed") if answer.status == 200 else ("error_file_id", "failed")
        self.folder.append(batch[file], format_result(line, answer.status, answer.body))
        batch["request_counts"][count] += 1
        self.folder.save(batch)
