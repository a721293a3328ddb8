"""Define the bodies of requests to Ollama's addresses, and turn them into requests of OpenAI's."""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from upshift.errors import RequestError
from upshift.serving.messages import Embed
from upshift.serving.openai_requests import MAX_INPUTS, MAX_STOPS, CompletionRequest, Stop
from upshift.serving.openai_responses import TextRequest
from upshift.serving.protocols.chat_messages import MAX_TOOLS, Body, CheckedBody, ToolName
from upshift.serving.protocols.embeddings import read_floats
from upshift.serving.protocols.responses_requests import read_chat
from upshift.serving.refusals import refusal_of_problems

SERVERS_OWN = "taken; the server decides it at its start"
ONLY_DEFAULT = "taken with the value that changes nothing"
KeepAlive = Annotated[str | float | None, Field(description="taken; --total-memory decides which models are loaded")]
Size = Annotated[int | None, Field(description=SERVERS_OWN)]
Picture = Annotated[str, Field(min_length=1, description="a file in base64")]


class OllamaOptions(Body):
    """The options of a request, by Ollama's names."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    num_predict: int | None = Field(None, ge=-2, description="tokens of the answer; -1 and -2: as many as the server allows")
    repeat_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_last_n: Literal[-1] | None = Field(None, description="penalties count the whole text")
    typical_p: float = Field(1.0, ge=1, le=1, description=ONLY_DEFAULT)
    tfs_z: float = Field(1.0, ge=1, le=1, description=ONLY_DEFAULT)
    mirostat: Literal[0] = Field(0, description=ONLY_DEFAULT)
    num_ctx: Size = None
    num_keep: Size = None
    num_batch: Size = None
    num_gpu: Size = None
    main_gpu: Size = None
    num_thread: Size = None
    use_mmap: bool | None = Field(None, description=SERVERS_OWN)
    numa: bool | None = Field(None, description=SERVERS_OWN)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request of OpenAI's."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
        limit = self.num_predict
        return {
            **{name: getattr(self, name) for name in names},
            "repetition_penalty": self.repeat_penalty,
            "max_tokens": None if limit is None or limit < 0 else max(limit, 1),
        }


class CalledFunction(Body):
    name: ToolName
    arguments: dict[str, Any] = {}
    index: int | None = None
    description: str | None = None


class OllamaCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Picture] = []
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] = []
    tool_name: str | None = Field(None, description="of the call whose result the message has")
    tool_call_id: str | None = None


class OllamaRequest(CheckedBody):
    """The fields that chats and prompts share. Answers come as a stream unless ``stream`` is false."""

    model: str = Field("", description="one of GET /api/tags; may be left out if there is one; :latest may follow")
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = Field("", description="json, or a JSON schema that the answer matches")
    options: OllamaOptions = OllamaOptions()
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(None, description="for the chat template")
    keep_alive: KeepAlive = None

    @property
    def is_empty(self) -> bool:
        """Return whether the request has no prompt, and so only asks to load the model."""
        raise NotImplementedError

    def _fields(self) -> dict[str, Any]:
        """Return the fields of a request of OpenAI's, without its prompt."""
        schema = {"type": "object"} if self.format == "json" else self.format or None
        fields = {"model": self.model, "stream": self.stream, **self.options.fields(), "guided_json": schema}
        if isinstance(self.think, bool):
            return fields | {"enable_thinking": self.think}
        return fields | {"reasoning_effort": self.think}


class OllamaChat(OllamaRequest):
    """A chat in Ollama's form."""

    messages: list[OllamaMessage] = []
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] = []

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def to_request(self, *, chats: bool) -> TextRequest:
        """Return the request as one of OpenAI's. ``chats`` says whether the model has a chat template."""
        return read_chat(self._fields() | {"messages": chat_messages(self.messages), "tools": self.tools})


class OllamaPrompt(OllamaRequest):
    """A prompt in Ollama's form. It is the message of a user, unless ``raw`` is set or the model has no chat template."""

    prompt: str = ""
    system: str = ""
    suffix: str = Field("", description="the text that follows the answer, for models that fill in the middle")
    images: list[Picture] = []
    raw: bool = Field(False, description="true: the prompt is a text that the model continues")
    template: Literal[""] = Field("", description=ONLY_DEFAULT)

    @property
    def is_empty(self) -> bool:
        return not self.prompt and not self.images

    def to_request(self, *, chats: bool) -> TextRequest:
        """Return the request as one of OpenAI's. ``chats`` says whether the model has a chat template."""
        if chats and not (self.raw or self.suffix):
            system = [OllamaMessage(role="system", content=self.system)] if self.system else []
            user = OllamaMessage(role="user", content=self.prompt, images=self.images)
            return read_chat(self._fields() | {"messages": chat_messages([*system, user])})
        if self.system or self.images or self.think:
            raise RequestError("system, images and think are for a chat template; leave them out, or leave raw and suffix out")
        fields = self._fields()
        fields = {name: value for name, value in fields.items() if name not in ("enable_thinking", "reasoning_effort")}
        fields["max_tokens"] = fields["max_tokens"] or DEFAULT_TOKENS
        try:
            return CompletionRequest.model_validate(fields | {"prompt": self.prompt, "suffix": self.suffix})
        except ValidationError as error:
            raise RequestError(refusal_of_problems(error.errors()).message) from None


DEFAULT_TOKENS = 128  # of a continued text; a chat has the server's own limit


def chat_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Raise RequestError for a result that belongs to no call.

    Ollama's calls have no ids of their own: results follow in the order of the calls, or name their tool."""
    converted: list[dict[str, Any]] = []
    open_calls: deque[tuple[str, str]] = deque()  # ids and names of calls without a result
    for number, message in enumerate(messages):
        if message.role == "tool":
            converted.append({"role": "tool", "tool_call_id": _take_call(open_calls, message), "content": message.content})
            continue
        fields: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        calls = [_chat_call(call, f"call_{number}_{index}") for index, call in enumerate(message.tool_calls)]
        if calls:
            fields["tool_calls"] = calls
            open_calls.extend((call["id"], call["function"]["name"]) for call in calls)
        converted.append(fields)
    return converted


def _content(message: OllamaMessage) -> Any:
    if not message.images:
        return message.content
    text = [{"type": "text", "text": message.content}] if message.content else []
    urls = [f"data:image/png;base64,{picture}" for picture in message.images]  # the form of the file is read from its bytes
    return [*text, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]


def _chat_call(call: OllamaCall, id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": json.dumps(call.function.arguments, ensure_ascii=False)}
    return {"id": call.id or id, "type": "function", "function": function}


def _take_call(open_calls: deque[tuple[str, str]], message: OllamaMessage) -> str:
    """Return the id of the call whose result a message has."""
    wanted = (call for call in open_calls if message.tool_call_id in (None, call[0]) and message.tool_name in (None, call[1]))
    found = next(wanted, None)
    if found is None:
        raise RequestError("a message of the role tool follows no call of its tool; send it behind the message with the call")
    open_calls.remove(found)
    return found[0]


class OllamaEmbed(CheckedBody):
    """Texts in Ollama's form. Its vectors have length one."""

    model: str | None = Field(None, description="one of GET /api/tags; may be left out if there is one")
    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
    truncate: Literal[True] = Field(True, description="a text that is too long is cut")
    dimensions: int | None = Field(None, ge=1, description="the first ones alone, for models that are trained for it")
    options: OllamaOptions = Field(OllamaOptions(), description="taken; a vector depends on none of them")
    keep_alive: KeepAlive = None

    def engine_request(self) -> Embed:
        texts = [self.input] if isinstance(self.input, str) else self.input
        return Embed(texts=tuple(texts), dimensions=self.dimensions)

    def answer(self, model: str, rows: list[str], tokens: int) -> dict[str, Any]:
        """Return the body of the answer from the rows in base64."""
        vectors = [read_floats(row) for row in rows]
        lengths = [math.hypot(*vector) or 1.0 for vector in vectors]
        scaled = [[value / length for value in vector] for vector, length in zip(vectors, lengths, strict=True)]
        return {"model": model, "embeddings": scaled, "prompt_eval_count": tokens}


class OllamaShow(CheckedBody):
    """A question about a model."""

    model: str = Field("", description="one of GET /api/tags; may be left out if there is one")
    name: str | None = Field(None, description="the older name of model")
    verbose: bool = Field(False, description="taken; there is no more to tell")
