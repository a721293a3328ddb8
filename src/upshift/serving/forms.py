"""Define the form of an answer by OpenAI's names: any text, any JSON object, or JSON of a schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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
