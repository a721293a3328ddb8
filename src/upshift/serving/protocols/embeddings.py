"""Define the requests and answers of /v2/embed, Cohere's form of embeddings, and of /embed, TEI's form."""

from __future__ import annotations

import base64
import math
import struct
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field

from upshift.serving.messages import Embed
from upshift.serving.openai_requests import MAX_INPUTS
from upshift.serving.protocols.chat_messages import NOT_KEPT, CheckedBody
from upshift.serving.protocols.tokenize import MODEL

TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
InputType = Literal["search_query", "search_document", "classification", "clustering"]


class CohereEmbedRequest(CheckedBody):
    """Texts in Cohere's form."""

    model: str | None = Field(None, description=MODEL)
    texts: TextList
    input_type: InputType | None = Field(None, description="taken; each text gets the prompt that the model has by default")
    embedding_types: Annotated[list[Literal["float", "base64"]], Field(min_length=1)] = ["float"]
    output_dimension: int | None = Field(None, ge=1, description="the first ones alone, for models that are trained for it")
    truncate: Literal["END"] = Field("END", description="a text that is too long is cut")
    priority: Literal[0] = 0
    user: str | None = Field(None, description=NOT_KEPT)

    def engine_request(self) -> Embed:
        return Embed(texts=tuple(self.texts), dimensions=self.output_dimension)

    def answer(self, model: str, rows: list[str], tokens: int) -> dict[str, Any]:
        """Return the body of the answer from the rows in base64."""
        forms: dict[str, list[Any]] = {"base64": [*rows], "float": [read_floats(row) for row in rows]}
        return {
            "id": uuid.uuid4().hex,
            "embeddings": {name: forms[name] for name in dict.fromkeys(self.embedding_types)},
            "texts": self.texts,
            "model": model,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}},
        }


class TeiEmbedRequest(CheckedBody):
    """Texts in the form of Hugging Face's Text Embeddings Inference."""

    model: str | None = Field(None, description=MODEL)
    inputs: str | TextList
    normalize: bool = Field(True, description="false: with the lengths that the model gives")
    truncate: Literal[True] = Field(True, description="a text that is too long is cut")
    truncation_direction: Literal["right", "Right"] = "right"
    dimensions: int | None = Field(None, ge=1, description="the first ones alone, for models that are trained for it")

    def engine_request(self) -> Embed:
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        return Embed(texts=tuple(texts), dimensions=self.dimensions)

    def answer(self, model: str, rows: list[str], tokens: int) -> list[list[float]]:
        """Return the body of the answer from the rows in base64."""
        return [(read_unit_vector if self.normalize else read_floats)(row) for row in rows]


def read_floats(row: str) -> list[float]:
    """Return the numbers of a row in base64."""
    data = base64.b64decode(row)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def read_unit_vector(row: str) -> list[float]:
    """Return the vector of a row in base64, scaled to length one. A vector of zeros stays as it is."""
    vector = read_floats(row)
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]
