"""Describe the addresses of a server in OpenAPI's form."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

NAMED_MODEL = {"required": ["model"], "properties": {"model": {"type": "string", "minLength": 1}}}


class DescribedApp(FastAPI):
    """An application whose description says that a request names its model.

    A server of one model takes requests without the name. One of several rejects them, and both have one description.
    """

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            _require_model(super().openapi())
        return super().openapi()


def _require_model(document: dict[str, Any]) -> None:
    """Require ``model`` in all bodies that may have it."""
    schemas = document["components"]["schemas"]
    for operations in document["paths"].values():
        body = operations.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        schema = schemas.get(body.get("schema", {}).get("$ref", "").rpartition("/")[2], {})
        if "model" in schema.get("properties", {}) and NAMED_MODEL not in schema.get("allOf", ()):
            schema["allOf"] = [*schema.get("allOf", ()), NAMED_MODEL]
