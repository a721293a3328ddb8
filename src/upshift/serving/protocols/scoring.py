"""Define the requests and answers of /rerank and /score: Cohere's, Jina's and TEI's forms of the one, vLLM's of the other.

A cross-encoder scores each pair of texts. A model that gives embeddings scores it by their cosine, as vLLM does."""

from __future__ import annotations

import base64
import math
import struct
import time
import uuid
from operator import mul
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from upshift.serving.messages import Embed
from upshift.serving.openai_requests import MAX_INPUTS, ONLY_DEFAULT
from upshift.serving.protocols.chat_messages import NOT_KEPT, Body, CheckedBody
from upshift.serving.protocols.tokenize import MODEL

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
DOCUMENTS_OR_TEXTS: dict[str, Any] = {
    "oneOf": [
        {"required": ["documents"], "properties": {"documents": {"type": "array"}, "texts": {"type": "null"}}},
        {"required": ["texts"], "properties": {"texts": {"type": "array"}, "documents": {"type": "null"}}},
    ],
}


class TextDocument(Body):
    text: str


Documents = Annotated[list[str | TextDocument], Field(min_length=1, max_length=MAX_INPUTS)]
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
Texts = str | TextList


class RerankRequest(CheckedBody):
    """A query and the texts to order by it: ``documents`` in Cohere's and Jina's form, or ``texts`` in TEI's."""

    model_config = ConfigDict(json_schema_extra=DOCUMENTS_OR_TEXTS)
    model: str | None = Field(None, description=MODEL)
    query: str
    documents: Documents | None = Field(None, description="Cohere's, Jina's and vLLM's name of the texts")
    texts: TextList | None = Field(None, description="TEI's name of the texts")
    top_n: int | None = Field(None, ge=0, description="number of results, the best ones; 0: all, as without it")
    return_documents: bool = True
    return_text: bool = Field(False, description="TEI's name of return_documents")
    raw_scores: bool = Field(False, description="without the model's activation; TEI's name")
    use_activation: bool | None = Field(None, description="false: as raw_scores; vLLM's name")
    truncate: Literal[True] = Field(True, description="a pair that is too long is cut")
    truncation_direction: Literal["right", "Right"] = "right"
    rank_fields: list[Literal["text"]] = ["text"]
    max_tokens_per_doc: int | None = Field(None, ge=1, description="a longer document is cut; Cohere's name")
    priority: Literal[0] = Field(0, description=ONLY_DEFAULT)
    user: str | None = Field(None, description=NOT_KEPT)

    @model_validator(mode="after")
    def _check_texts(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise PydanticCustomError("no_documents", "give either documents or texts")
        return self

    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in self._document_texts()]

    def is_raw(self) -> bool:
        return self.raw_scores or self.use_activation is False

    def answer(self, model: str, scores: list[float], tokens: int) -> Any:
        """Return the body of the answer: TEI's list if the request has ``texts``, else one that Cohere, Jina and vLLM share."""
        texts = self._document_texts()
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n or None]
        if self.texts is not None:
            return [
                {"index": index, "score": scores[index], **({"text": texts[index]} if self.return_text else {})} for index in best
            ]
        results = []
        for index in best:
            document = {"document": {"text": texts[index]}} if self.return_documents else {}
            results.append({"index": index, "relevance_score": scores[index], **document})
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": model,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        }

    def _document_texts(self) -> list[str]:
        documents = self.texts if self.documents is None else self.documents
        return [text.text if isinstance(text, TextDocument) else text for text in documents or []]


FIRST_NAMES = ("text_1", "data_1", "queries")
SECOND_NAMES = ("text_2", "data_2", "documents", "items")


def _score_form(first: str, second: str) -> dict[str, Any]:
    """Return the JSON schema of a body with one text under ``first``, and its texts under ``second``.

    Several first texts are taken, too, if there are as many second ones, which a schema cannot say."""
    others = {name: {"type": "null"} for name in FIRST_NAMES + SECOND_NAMES if name not in (first, second)}
    texts = {first: {"type": "string"}, second: {"type": ["string", "array"]}}
    return {"required": [first, second], "properties": {**others, **texts}}


FORMS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
SCORE_FORMS: dict[str, Any] = {"oneOf": [_score_form(first, second) for first, second in FORMS]}


class ScoreRequest(CheckedBody):
    """Texts to score with others: one with each of several, or several with as many. The fields are vLLM's."""

    model_config = ConfigDict(json_schema_extra=SCORE_FORMS)
    model: str | None = Field(None, description=MODEL)
    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = Field(None, description="the same as text_1")
    data_2: Texts | None = Field(None, description="the same as text_2")
    queries: Texts | None = Field(None, description="the same as text_1")
    documents: Texts | None = Field(None, description="the same as text_2")
    items: Texts | None = Field(None, description="the same as text_2")
    use_activation: bool | None = Field(None, description="false: without the model's activation")
    user: str | None = Field(None, description=NOT_KEPT)

    @model_validator(mode="after")
    def _check_texts(self) -> ScoreRequest:
        first = self._given(FIRST_NAMES)
        second = self._given(SECOND_NAMES)
        if len(first) != 1 or len(second) != 1:
            raise PydanticCustomError("no_texts", "give text_1 and text_2, or queries and documents")
        if len(first[0]) not in (1, len(second[0])):
            numbers = {"first": len(first[0]), "second": len(second[0])}
            raise PydanticCustomError(
                "uneven", "text_1 has {first} texts and text_2 {second}; give as many, or one text_1", numbers
            )
        return self

    def pairs(self) -> list[tuple[str, str]]:
        first = self._given(FIRST_NAMES)[0]
        second = self._given(SECOND_NAMES)[0]
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    def is_raw(self) -> bool:
        return self.use_activation is False

    def answer(self, model: str, scores: list[float], tokens: int) -> dict[str, Any]:
        """Return the body of the answer."""
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def _given(self, names: tuple[str, ...]) -> list[list[str]]:
        values = [getattr(self, name) for name in names]
        return [[value] if isinstance(value, str) else value for value in values if value is not None]


ScoringRequest = RerankRequest | ScoreRequest


def engine_request(request: ScoringRequest, *, reads_pairs: bool) -> Embed:
    """Return the engine's request: the pairs for a cross-encoder, or each text once for a model that gives embeddings."""
    pairs = request.pairs()
    limit = request.max_tokens_per_doc if isinstance(request, RerankRequest) else None
    if reads_pairs:
        return Embed(texts=(), pairs=tuple(pairs), raw=request.is_raw(), max_document_tokens=limit)
    return Embed(texts=tuple(dict.fromkeys(text for pair in pairs for text in pair)), max_document_tokens=limit)


def scores_of(request: ScoringRequest, rows: list[str], *, reads_pairs: bool) -> list[float]:
    """Return the score of each pair from the rows [N] in base64 that the engine gives for ``engine_request``."""
    vectors = [_decode(row) for row in rows]
    if reads_pairs:
        return [vector[0] for vector in vectors]
    pairs = request.pairs()
    texts = dict.fromkeys(text for pair in pairs for text in pair)
    by_text = dict(zip(texts, map(_normalized, vectors), strict=True))
    return [sum(map(mul, by_text[first], by_text[second])) for first, second in pairs]


def _decode(row: str) -> tuple[float, ...]:
    data = base64.b64decode(row)
    return struct.unpack(f"<{len(data) // 4}f", data)


def _normalized(vector: tuple[float, ...]) -> list[float]:
    length = max(math.hypot(*vector), 1e-8)  # the least that torch's cosine_similarity divides by
    return [value / length for value in vector]
