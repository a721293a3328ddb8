"""Answer OpenAI's /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from upshift.serving.batches import Batches
from upshift.serving.protocols.batch_requests import BatchRequest, read_upload
from upshift.serving.request_checks import FILES_PATH

UPLOAD_FIELDS = {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}}
UPLOAD = {
    "required": True,
    "content": {"multipart/form-data": {"schema": {"type": "object", "required": [*UPLOAD_FIELDS], "properties": UPLOAD_FIELDS}}},
}
ADDRESSES = {"file": FILES_PATH, "batch": "/v1/batches"}


def add_batch_addresses(app: FastAPI, batches: Batches | None, errors: dict[str, Any]) -> None:
    """Add the addresses to an application. Without ``batches``, they answer 403. ``errors`` describes their errors."""
    addresses = BatchAddresses(batches)
    app.post(FILES_PATH, openapi_extra={"requestBody": UPLOAD}, **errors)(addresses.upload)
    app.get(FILES_PATH, **errors)(addresses.files)
    app.get(f"{FILES_PATH}/{{id}}", **errors)(addresses.file)
    app.get(f"{FILES_PATH}/{{id}}/content", **errors)(addresses.content)
    app.delete(f"{FILES_PATH}/{{id}}", **errors)(addresses.delete_file)
    app.post("/v1/batches", **errors)(addresses.create)
    app.get("/v1/batches", **errors)(addresses.batches)
    app.get("/v1/batches/{id}", **errors)(addresses.batch)
    app.post("/v1/batches/{id}/cancel", **errors)(addresses.cancel)


class BatchAddresses:
    """The handlers of files and batches."""

    def __init__(self, batches: Batches | None) -> None:
        self._batches = batches

    async def upload(self, request: Request) -> dict[str, Any]:
        batches = self._served
        upload = await asyncio.to_thread(read_upload, request.headers.get("content-type", ""), await request.body())
        return await asyncio.to_thread(batches.folder.add_file, upload)

    def files(self) -> dict[str, Any]:
        return self._served.page("file")

    def file(self, id: str) -> dict[str, Any]:
        return self._find(id, "file")

    async def content(self, id: str) -> Response:
        """Return the content of a file. A batch that runs may append to it meanwhile."""
        file = self._find(id, "file")
        content = await asyncio.to_thread(self._served.folder.content_path(file["id"]).read_bytes)
        return Response(content, media_type="application/jsonl")

    def delete_file(self, id: str) -> dict[str, Any]:
        file = self._find(id, "file")
        if self._served.is_used(file["id"]):
            raise HTTPException(400, f"the file {id} belongs to a batch that runs; cancel the batch first")
        self._served.folder.delete(file["id"])
        return {"id": id, "object": "file", "deleted": True}

    async def create(self, request: BatchRequest) -> dict[str, Any]:
        return self._served.create(request)

    def batches(self) -> dict[str, Any]:
        return self._served.page("batch")

    def batch(self, id: str) -> dict[str, Any]:
        return self._find(id, "batch")

    async def cancel(self, id: str) -> dict[str, Any]:
        return await self._served.cancel(self._find(id, "batch"))

    @property
    def _served(self) -> Batches:
        if self._batches is None:
            raise HTTPException(403, "no files and batches are kept here; start the server with --batch-folder")
        return self._batches

    def _find(self, id: str, kind: str) -> dict[str, Any]:
        entry = self._served.folder.find(id)
        if entry is None or entry["object"] != kind:
            raise HTTPException(404, f"the {kind} {id[:100]!r} is not here; GET {ADDRESSES[kind]} lists those that are")
        return entry
