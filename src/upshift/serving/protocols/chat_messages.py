"""Define the messages of a chat and the tools that its answer may call, by OpenAI's names.

A field that is not defined here is an error that names the field."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from upshift.errors import RequestError
from upshift.serving.messages import PromptEnding
from upshift.text import find_lone_surrogate

NOT_KEPT = "taken, and not kept"
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DATA_URL = "^data:image/[A-Za-z0-9.+-]+;base64,"
FILE_URL = "^file:/{3}"
MAX_TOOLS = 128
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
TOOL_NAME = "^[a-zA-Z0-9_-]{1,64}$"
ToolName = Annotated[str, StringConstraints(pattern=TOOL_NAME)]

# The checks of the validators below as JSON schemas, for the page at /docs.
MESSAGE_SCHEMA: dict[str, Any] = {
    "allOf": [
        {
            "if": {"properties": {"role": {"not": {"enum": ["assistant", "function"]}}}},
            "then": {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        },
        {
            "if": {"properties": {"role": {"not": {"const": "assistant"}}}},
            "then": {"properties": {"tool_calls": {"maxItems": 0}, "function_call": {"type": "null"}}},
            "else": {
                "if": {"required": ["function_call"], "properties": {"function_call": {"type": "object"}}},
                "then": {"properties": {"tool_calls": {"maxItems": 0}}},
            },
        },
        {
            "if": {"properties": {"role": {"const": "function"}}},
            "then": {"required": ["name"], "properties": {"name": {"type": "string", "pattern": TOOL_NAME}}},
        },
        {
            "if": {"properties": {"role": {"const": "tool"}}},
            "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string"}}},
            "else": {"properties": {"tool_call_id": {"type": "null"}}},
        },
    ],
}


class Body(BaseModel):
    """An object in the body of a request. A field that is null counts as left out, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        """Remove the fields that are null. Objects of the user's own, such as a JSON schema, stay as they are."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


class CheckedBody(Body):
    """A whole body, whose texts are checked."""

    @model_validator(mode="before")
    @classmethod
    def _check_characters(cls, body: Any) -> Any:
        """Raise an error if a text of the body has half of a surrogate pair, which is no character."""
        surrogate = find_lone_surrogate(json.dumps(body, ensure_ascii=False))
        if surrogate is not None:
            raise PydanticCustomError("half_a_pair", f"{surrogate} alone is no character; send whole ones")
        return body


class TextPart(Body):
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description=NOT_KEPT)


class PictureAddress(Body):
    url: str = Field(
        description="a data: URL with the file in base64, or a file: URL of a file of --image-folder",
        json_schema_extra={"pattern": f"{DATA_URL}|{FILE_URL}"},
    )
    detail: Literal["auto", "low", "high"] | None = Field(None, description="taken; the model's processor decides on the size")

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        if not re.match(f"{DATA_URL}|{FILE_URL}", url):
            raise PydanticCustomError(
                "no_data",
                "pictures are taken as data: URLs such as data:image/png;base64,..., or as file: URLs with an absolute path "
                "in the server's --image-folder, and no site is read here",
            )
        return url


class PicturePart(Body):
    type: Literal["image_url"]
    image_url: PictureAddress
    cache_control: dict[str, Any] | None = Field(None, description=NOT_KEPT)

    @field_validator("image_url", mode="before")
    @classmethod
    def _read_address(cls, address: Any) -> Any:
        return {"url": address} if isinstance(address, str) else address  # a short form of vLLM's

    def to_template(self) -> dict[str, str]:
        """Return the part with its file in base64, or with the URL of a file that the engine reads."""
        url = self.image_url.url
        return {"type": "image", "url": url} if re.match(FILE_URL, url) else {"type": "image", "data": url[url.index(",") + 1 :]}


class RefusalPart(Body):
    """A part of an answer of OpenAI's."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[TextPart | PicturePart | RefusalPart, Field(discriminator="type")]


class CalledFunction(Body):
    name: ToolName
    arguments: str = Field(description="a JSON object")


class MessageCall(Body):
    """A call of a tool in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(Body):
    """A tool that the answer may call. ``parameters`` is the JSON schema of its arguments. Without it, there are none."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="calls that tool_choice forces match the schema, whether this is set or not")


class Tool(Body):
    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = Field(None, description=NOT_KEPT)

    def to_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: with a description and a schema."""
        function = self.function
        parameters = NO_ARGUMENTS if function.parameters is None else function.parameters
        fields = {"name": function.name, "description": function.description or "", "parameters": parameters}
        return {"type": "function", "function": fields}


class FunctionName(Body):
    name: ToolName


class ForcedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedNames(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ForcedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """The choice of some of the tools. The answer may call these alone, or must call one of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


class Message(Body):
    """A message of a chat. An answer of this server, or of OpenAI's, can be sent back as it came."""

    model_config = ConfigDict(json_schema_extra=MESSAGE_SCHEMA)

    role: Role
    content: str | Annotated[list[Part], Field(min_length=1)] | None = None
    name: str | None = Field(
        None,
        description="the function whose result this is, in a message of the role function; "
        "in other messages, taken and not used: chat templates have no place for it",
    )
    refusal: str | None = Field(None, description="of an answer of OpenAI's, in place of its content")
    annotations: Annotated[list[Any], Field(max_length=0)] = []
    id: str | None = Field(None, description=NOT_KEPT)
    cache_control: dict[str, Any] | None = Field(None, description=NOT_KEPT)
    # The next three are litellm's and OpenRouter's.
    provider_specific_fields: dict[str, Any] | None = Field(None, description=NOT_KEPT)
    thinking_blocks: list[Any] | None = Field(None, description=NOT_KEPT)
    reasoning_details: list[Any] | None = Field(None, description=NOT_KEPT)
    reasoning_content: str | None = Field(None, description="of an earlier answer, if the chat template has a place for it")
    reasoning: str | None = Field(None, description="the same under another name")
    tool_calls: list[MessageCall] = []
    tool_call_id: str | None = Field(None, description="of the call whose result a message of the role tool is")
    function_call: CalledFunction | None = Field(None, description="the older form of tool_calls")

    @field_validator("name")
    @classmethod
    def _check_function_name(cls, name: str | None, info: ValidationInfo) -> str | None:
        """Raise an error if the name of a function, which chat templates write into the prompt, is no name of a tool."""
        if info.data.get("role") == "function" and name is not None and not re.fullmatch(TOOL_NAME, name):
            raise PydanticCustomError(
                "no_tool_name", "the name of a function has 1 to 64 letters, digits, _ or -; give the name of the function called"
            )
        return name

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role not in ("assistant", "function"):
            raise PydanticCustomError("no_content", "the content is missing; only a message of the assistant may have none")
        if self.role == "function" and self.name is None:
            raise PydanticCustomError("no_name", "a message of the role function has the name of the function; give it")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError("no_call", "a message of the role tool, and no other, has a tool_call_id")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("no_calls", "only a message of the assistant has tool_calls")
        if self.function_call is not None and (self.tool_calls or self.role != "assistant"):
            raise PydanticCustomError(
                "no_function_call", "only a message of the assistant without tool_calls has a function_call; leave one out"
            )
        return self

    @property
    def called_functions(self) -> list[CalledFunction]:
        """Return the calls of a message, in the newer or in the older form."""
        return [call.function for call in self.tool_calls] + ([] if self.function_call is None else [self.function_call])

    @property
    def has_pictures(self) -> bool:
        return isinstance(self.content, list) and any(isinstance(part, PicturePart) for part in self.content)

    def _template_content(self) -> str | list[dict[str, str]]:
        """Return the content as one text, or as parts if it has pictures."""
        content = self.content or self.refusal or ""
        if isinstance(content, str):
            return content
        if not self.has_pictures:
            return "".join(part.text for part in content if not isinstance(part, PicturePart))
        return [part.to_template() if isinstance(part, PicturePart) else {"type": "text", "text": part.text} for part in content]

    def to_template(self, function_id: str) -> dict[str, Any]:
        """Return the message as chat templates expect it: without the roles "developer" and "function".

        ``function_id`` stands for the id of a call of a function, and of its result, which have none."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        message: dict[str, Any] = {"role": role, "content": self._template_content()}
        reasoning = self.reasoning_content or self.reasoning
        if reasoning and role == "assistant":
            message["reasoning_content"] = reasoning
        if self.function_call is not None:
            message["tool_calls"] = [{"id": function_id, "type": "function", "function": self.function_call.model_dump()}]
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.role == "function":
            message |= {"tool_call_id": function_id, "name": self.name}
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def template_messages(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    """Return the messages of a chat as chat templates expect them.

    The result of a function belongs to the last call of that function before it."""
    function_ids: dict[str | None, str] = {}
    turns = []
    for position, message in enumerate(messages):
        new_id = f"function_{position}"
        if message.function_call is not None:
            function_ids[message.function_call.name] = new_id
        turns.append(message.to_template(function_ids.get(message.name, new_id) if message.role == "function" else new_id))
    return tuple(turns)


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def check_calls(messages: list[Message]) -> None:
    """Raise RequestError for a call whose arguments are no JSON object, and for a picture that is not the user's."""
    for position, message in enumerate(messages):
        if message.role != "user" and message.has_pictures:
            raise RequestError(f"messages.{position} has a picture; only a message of the user has pictures")
        for function in message.called_functions:
            if not _is_json_object(function.arguments or "{}"):
                raise RequestError(
                    f"the arguments of the call of {function.name} in messages.{position} are no JSON object; send them as "
                    "they came"
                )


def prompt_ending(begins_answer: bool | None, goes_on: bool) -> PromptEnding:
    """Return what follows the last message of a chat. Raise RequestError if an answer would begin in a message that goes on."""
    if not goes_on:
        return "nothing" if begins_answer is False else "answer"
    if begins_answer:
        raise RequestError("continue_final_message goes on with the last message; set add_generation_prompt to false")
    return "open"
