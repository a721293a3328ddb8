"""Define what clients send, by OpenAI's names. A field that is not defined here is an error that names it.

Define the form of an answer by OpenAI's names: any text, any JSON object, or JSON of a schema.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from upshift.inference.generation.options import LEAST
from upshift.serving.messages import Generate, Piece, Prompt
from upshift.text import find_lone_surrogate

OBJECT: dict[str, Any] = {"type": "object"}


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """Return the JSON schema of the answer, or None if any text is allowed."""
        return None


class TextForm(Form):
    type: Literal["text"]


class ObjectForm(Form):
    type: Literal["json_object"]

    @property
    def schema_of_answer(self) -> dict[str, Any]:
        return OBJECT


class NamedSchema(BaseModel):
    """``strict``: it always is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(OBJECT, alias="schema")
    strict: bool | None = None


class SchemaForm(Form):
    type: Literal["json_schema"]
    json_schema: NamedSchema

    @property
    def schema_of_answer(self) -> dict[str, Any]:
        return self.json_schema.schema_


ResponseFormat = Annotated[TextForm | ObjectForm | SchemaForm, Field(discriminator="type")]
TEXT = TextForm(type="text")


MOST_CHOICES, MOST_PROMPTS = 16, 256
MOST_LIKELY = 20  # tokens that are told of in one place
MOST_BIASED = 1024
Role = Literal["system", "developer", "user", "assistant"]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TOKEN_KEY = "^[0-9]{1,9}$"
TokenKey = Annotated[str, StringConstraints(pattern=TOKEN_KEY)]  # JSON has no other keys
TokenIds = Annotated[list[TokenId], Field(min_length=1)]

# What validators check, for the description of the addresses.
TOO_COLD: dict[str, Any] = {"not": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": LEAST}}
TOLD_TOGETHER: dict[str, Any] = {
    "if": {"required": ["top_logprobs"], "properties": {"top_logprobs": {"type": "integer"}}},
    "then": {"required": ["logprobs"], "properties": {"logprobs": {"const": True}}},
}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())

    model: str = Field(description="one of GET /v1/models")
    user: str | None = Field(None, description="taken, and not kept")

    @model_validator(mode="before")
    @classmethod
    def _check_characters(cls, said: Any) -> Any:
        half = find_lone_surrogate(json.dumps(said, ensure_ascii=False))
        if half is not None:
            raise PydanticCustomError("half_a_pair", f"{half} alone is no character; send whole ones")
        return said


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool = False
    include_obfuscation: bool = Field(False, description="false: nothing is added to answers")


class Sampled(Body):
    """``temperature``: 0 takes the likeliest token; unset: as the model's generation_config.json says."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, json_schema_extra=TOO_COLD)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, description="not OpenAI's; transformers' name")
    min_p: float | None = Field(None, ge=0, le=1, description="likewise")
    repetition_penalty: float | None = Field(None, ge=LEAST, description="likewise")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASED)] | None = Field(
        None, description="by token ids of the model", json_schema_extra={"propertyNames": {"pattern": TOKEN_KEY}}
    )
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, said: float | None) -> float | None:
        if said is not None and 0 < said < LEAST:
            raise PydanticCustomError("too_small", f"{said:g} is too small; give 0, or {LEAST:g} to 2")
        return said

    @property
    def most(self) -> int | None:
        """Return the most tokens that an answer may have."""
        return self.max_tokens

    @property
    def top(self) -> int | None:
        """Return the number of likeliest tokens to report, or None to report no log-probabilities at all."""
        return None

    @property
    def json_schema(self) -> str | None:
        """Return the schema that the answer must keep to, as JSON."""
        return None

    def of_engine(self, prompt: Prompt, *, seed: int) -> Generate:
        return Generate(prompt=prompt, options=self._options(seed), json_schema=self.json_schema, top=self.top)

    def _options(self, seed: int) -> dict[str, Any]:
        """Return the GenerationOptions that the request asks for."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
        found: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.temperature == 0:
            found |= {"do_sample": False, "temperature": None}
        elif self.temperature is not None or self.top_p is not None:
            found["do_sample"] = True
        if self.logit_bias:
            found["sequence_bias"] = [((int(token),), bias) for token, bias in self.logit_bias.items()]
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return found | {"seed": seed, "stop_strings": stops, "max_new_tokens": self.most}


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Role
    content: str | Annotated[list[TextPart], Field(min_length=1)]

    def plain(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(Sampled):
    model_config = ConfigDict(json_schema_extra=TOLD_TOGETHER)

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, description="the newer name of max_tokens")
    response_format: ResponseFormat = TEXT
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)

    @model_validator(mode="after")
    def _check_top(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("not_told", "top_logprobs is told of beside log-probabilities; ask for logprobs: true, too")
        return self

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def json_schema(self) -> str | None:
        schema = self.response_format.schema_of_answer
        return None if schema is None else json.dumps(schema)

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def prompts(self) -> list[Any]:
        return [tuple(message.plain() for message in self.messages)] * self.n


class CompletionRequest(Sampled):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    echo: Literal[False] = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def most(self) -> int | None:
        return self.max_tokens or 16  # OpenAI's default

    def prompts(self) -> list[Any]:
        found: list[Any]
        if isinstance(self.prompt, str):
            found = [self.prompt]
        elif isinstance(self.prompt[0], int):
            found = [tuple(self.prompt)]
        else:
            found = [one if isinstance(one, str) else tuple(one) for one in self.prompt]
        return [one for one in found for _ in range(self.n)]


class EmbeddingRequest(Body):
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="the first ones alone, for models that are trained for it")

    def texts(self) -> tuple[str, ...]:
        return (self.input,) if isinstance(self.input, str) else tuple(self.input)


class PromptTokens(BaseModel):
    cached_tokens: int = Field(0, description="that were computed for an earlier request")


class Usage(BaseModel):
    prompt_tokens: int
    prompt_tokens_details: PromptTokens = PromptTokens()
    completion_tokens: int = 0
    total_tokens: int

    @classmethod
    def of(cls, prompts: list[Piece], made: int) -> Usage:
        """Return the token counts. ``prompts`` holds one piece a prompt, whatever its number of choices. ``made``
        counts the tokens of all choices."""
        prompt = sum(piece.prompt_tokens for piece in prompts)
        known = PromptTokens(cached_tokens=sum(piece.cached_tokens for piece in prompts))
        return cls(
            prompt_tokens=prompt, prompt_tokens_details=known, completion_tokens=made, total_tokens=prompt + made
        )  # fmt: skip


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    error: ErrorBody
