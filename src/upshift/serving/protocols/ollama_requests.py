"""Define the bodies of requests to Ollama's addresses, and turn them into requests of OpenAI's."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from upshift.errors import RequestError
from upshift.inference.generation.options import MIN_DIVISOR
from upshift.serving.messages import Embed
from upshift.serving.openai_requests import ANY_OBJECT, MAX_INPUTS, MAX_STOPS, TEMPERATURE_SCHEMA, CompletionRequest, Stop
from upshift.serving.openai_responses import TextRequest
from upshift.serving.protocols.chat_messages import MAX_TOOLS, Body, CheckedBody, ToolName
from upshift.serving.protocols.embeddings import read_floats, read_unit_vector
from upshift.serving.protocols.responses_requests import read_chat
from upshift.serving.refusals import read_body

SERVERS_OWN = "taken; the server decides it at its start"
MODEL = "one of GET /api/tags; may be left out if there is one; :latest may follow"
WITHOUT_EFFECT = "taken with the value that changes nothing"
NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
DURATION = rf"^[+-]?({NUMBER}|({NUMBER}(ns|us|\u00b5s|\u03bcs|ms|s|m|h))+)$"  # a number of seconds, or Go's form of a duration
Duration = Annotated[str, StringConstraints(pattern=DURATION, max_length=64)]
KeepAlive = Annotated[
    Duration | float | None,
    Field(description="0: the model is unloaded after this request; other durations are taken: --total-memory decides"),
]


def is_zero(keep_alive: str | float | None) -> bool:
    """Return whether a request asks to unload its model afterwards."""
    return not re.search("[1-9]", keep_alive) if isinstance(keep_alive, str) else keep_alive == 0


Size = Annotated[int | None, Field(description=SERVERS_OWN)]
Picture = Annotated[str, Field(min_length=1, description="a file in base64")]


class OllamaOptions(Body):
    """The options of a request, by Ollama's names."""

    temperature: float | None = Field(None, ge=0, le=2, json_schema_extra=TEMPERATURE_SCHEMA)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    num_predict: int | None = Field(
        None,
        ge=-2,
        description="tokens of the answer; -1 and -2: as many as the server allows, as without it",
        json_schema_extra={"not": {"const": 0}},
    )
    repeat_penalty: float | None = Field(None, ge=MIN_DIVISOR, description="of the tokens of the prompt and of the answer")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_last_n: Literal[-1] | None = Field(None, description="penalties count the whole text, as without it")
    typical_p: float = Field(1.0, ge=1, le=1, description=WITHOUT_EFFECT)
    tfs_z: float = Field(1.0, ge=1, le=1, description=WITHOUT_EFFECT)
    mirostat: Literal[0] = Field(0, description=WITHOUT_EFFECT)
    num_ctx: Size = None
    num_keep: Size = None
    num_batch: Size = None
    num_gpu: Size = None
    main_gpu: Size = None
    num_thread: Size = None
    use_mmap: bool | None = Field(None, description=SERVERS_OWN)
    numa: bool | None = Field(None, description=SERVERS_OWN)

    @field_validator("num_predict")
    @classmethod
    def _check_limit(cls, limit: int | None) -> int | None:
        if limit == 0:
            raise PydanticCustomError(
                "no_limit", "0 is no number of tokens; give 1 or more, or -1 for as many as the server allows"
            )
        return limit

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request of OpenAI's. A seed of -1 is a random one."""
        names = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
        limit = self.num_predict
        return {
            **{name: getattr(self, name) for name in names},
            "seed": None if self.seed == -1 else self.seed,
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": None if limit is None or limit < 0 else limit,
        }


class OllamaFunction(Body):
    name: ToolName
    arguments: dict[str, Any] = {}
    index: int | None = None
    description: str | None = None


class OllamaCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: OllamaFunction


class OllamaMessage(Body):
    """A message of a chat. Its fields depend on its role, and a field that is empty counts as left out."""

    content: str = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value not in ("", [])} if isinstance(body, dict) else body


class SystemMessage(OllamaMessage):
    role: Literal["system"]


class UserMessage(OllamaMessage):
    role: Literal["user"]
    images: list[Picture] = []


class AssistantMessage(OllamaMessage):
    role: Literal["assistant"]
    thinking: str = ""
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] = []


class ToolMessage(OllamaMessage):
    """The result of a call. Without a name and an id, it is that of the first call that has none."""

    role: Literal["tool"]
    tool_name: str | None = Field(None, description="the tool of the call")
    tool_call_id: str | None = Field(None, description="the id of the call")


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class OllamaRequest(CheckedBody):
    """The fields that chats and prompts share. Answers come as a stream unless ``stream`` is false."""

    model: str = Field("", description=MODEL)
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = Field("", description="json, or a JSON schema that the answer matches")
    options: OllamaOptions = OllamaOptions()
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(None, description="for the chat template")
    keep_alive: KeepAlive = None

    @property
    def is_empty(self) -> bool:
        """Return whether the request has no prompt, and so only asks to load or unload the model."""
        raise NotImplementedError

    def _fields(self) -> dict[str, Any]:
        """Return the fields of a request of OpenAI's, without its prompt. An empty schema is that of any object, as in Ollama."""
        schema = None if self.format == "" else ANY_OBJECT if self.format in ("json", {}) else self.format
        fields = {"model": self.model, "stream": self.stream, **self.options.fields(), "guided_json": schema}
        if isinstance(self.think, bool):
            return fields | {"enable_thinking": self.think}
        return fields | {"reasoning_effort": self.think}


class OllamaChat(OllamaRequest):
    """A chat in Ollama's form."""

    messages: list[ChatMessage] = []
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] = []

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def to_request(self, *, chats: bool) -> TextRequest:
        """Return the request as one of OpenAI's. ``chats`` says whether the model has a chat template.

        Raise RequestError for a request that is not possible."""
        if self.tools and self.format != "":
            raise RequestError("an answer in a format calls no tools; leave out format or tools")
        return read_chat(self._fields() | {"messages": chat_messages(self.messages), "tools": self.tools})


class OllamaPrompt(OllamaRequest):
    """A prompt in Ollama's form. It is the message of a user, unless ``raw`` is set or the model has no chat template."""

    prompt: str = ""
    system: str = ""
    suffix: str = Field("", description="the text that follows the answer, for models that fill in the middle")
    images: list[Picture] = []
    raw: bool = Field(False, description="true: the prompt is a text that the model continues")
    template: Literal[""] = Field("", description=WITHOUT_EFFECT)

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.images or self.suffix)

    def to_request(self, *, chats: bool) -> TextRequest:
        """Return the request as one of OpenAI's. ``chats`` says whether the model has a chat template.

        Raise RequestError for a request that is not possible."""
        if chats and not (self.raw or self.suffix):
            system = [SystemMessage(role="system", content=self.system)] if self.system else []
            user = UserMessage(role="user", content=self.prompt, images=self.images)
            return read_chat(self._fields() | {"messages": chat_messages([*system, user])})
        if self.system or self.images or self.think:
            raise RequestError("system, images and think are for a chat template; leave them out, or leave raw and suffix out")
        fields = self._fields()
        fields = {name: value for name, value in fields.items() if name not in ("enable_thinking", "reasoning_effort")}
        return read_body(ContinuedText, fields | {"prompt": self.prompt, "suffix": self.suffix})


class ContinuedText(CompletionRequest):
    """A text that the model continues, up to the server's own limit, which a chat has too."""

    @property
    def default_tokens(self) -> None:
        return None


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Raise RequestError for a result that belongs to no call of its turn.

    Ollama's calls may have no ids: results follow in the order of the calls, or name their tool."""
    converted: list[dict[str, Any]] = []
    open_calls: deque[tuple[str, str]] = deque()  # ids and names of calls without a result
    for number, message in enumerate(messages):
        if isinstance(message, ToolMessage):
            converted.append({"role": "tool", "tool_call_id": _take_call(open_calls, message), "content": message.content})
            continue
        if not isinstance(message, SystemMessage):  # a new turn, in which calls of the one before have no results
            open_calls.clear()
        if isinstance(message, AssistantMessage):
            calls = [_chat_call(call, f"call_{number}_{index}") for index, call in enumerate(message.tool_calls)]
            open_calls.extend((call["id"], call["function"]["name"]) for call in calls)
            converted.append(_assistant_message(message, calls))
        else:
            converted.append({"role": message.role, "content": _content(message)})
    return converted


def _assistant_message(message: AssistantMessage, calls: list[dict[str, Any]]) -> dict[str, Any]:
    reasoning = {"reasoning_content": message.thinking} if message.thinking else {}
    return {"role": "assistant", "content": message.content, **reasoning, **({"tool_calls": calls} if calls else {})}


def _content(message: SystemMessage | UserMessage) -> Any:
    if isinstance(message, SystemMessage) or not message.images:
        return message.content
    text = [{"type": "text", "text": message.content}] if message.content else []
    urls = [f"data:image/png;base64,{picture}" for picture in message.images]  # the form of the file is read from its bytes
    return [*text, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]


def _chat_call(call: OllamaCall, id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments, ensure_ascii=False)}
    return {"id": call.id or id, "type": "function", "function": function}


def _take_call(open_calls: deque[tuple[str, str]], message: ToolMessage) -> str:
    """Return the id of the call whose result a message has."""
    wanted = (call for call in open_calls if message.tool_call_id in (None, call[0]) and message.tool_name in (None, call[1]))
    found = next(wanted, None)
    if found is None:
        raise RequestError(
            "a message of the role tool follows no call of its tool; send it right behind the message with the call"
        )
    open_calls.remove(found)
    return found[0]


class OllamaVectors(CheckedBody):
    """The fields that both addresses for vectors share."""

    model: str = Field("", description=MODEL)
    options: OllamaOptions = Field(OllamaOptions(), description="taken; a vector depends on none of them")
    keep_alive: KeepAlive = None

    @property
    def has_text(self) -> bool:
        """Return whether there is a text to compute, or the request only asks to load the model."""
        return True


class OllamaEmbed(OllamaVectors):
    """Texts in Ollama's form. Its vectors have length one."""

    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
    truncate: Literal[True] = Field(True, description="a text that is too long is cut")
    dimensions: int | None = Field(None, ge=1, description="the first ones alone, for models that are trained for it")

    def engine_request(self) -> Embed:
        texts = [self.input] if isinstance(self.input, str) else self.input
        return Embed(texts=tuple(texts), dimensions=self.dimensions)

    def answer(self, rows: list[str]) -> dict[str, Any]:
        """Return the vectors of the answer from the rows in base64."""
        return {"embeddings": [read_unit_vector(row) for row in rows]}


class OllamaEmbedding(OllamaVectors):
    """One text in Ollama's older form. Its vector has the length that the model gives. Without a text there is no vector."""

    prompt: str = ""

    @property
    def has_text(self) -> bool:
        return bool(self.prompt)

    def engine_request(self) -> Embed:
        return Embed(texts=(self.prompt,))

    def answer(self, rows: list[str]) -> dict[str, Any]:
        """Return the vector of the answer from the rows in base64."""
        return {"embedding": [value for row in rows for value in read_floats(row)]}


class OllamaShow(CheckedBody):
    """A question about a model."""

    model: str = Field("", description=MODEL)
    name: str | None = Field(None, description="the older name of model")
    verbose: bool = Field(False, description="taken; there is no more to tell")
