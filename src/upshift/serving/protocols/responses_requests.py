"""Define the bodies of requests to OpenAI's /v1/responses, and turn them into requests of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from upshift.errors import RequestError
from upshift.serving.openai_requests import ANY_OBJECT, HINT, MAX_LIKELIEST, ChatRequest, Effort, RequestBody, StreamOptions
from upshift.serving.protocols.chat_messages import MAX_TOOLS, NOT_KEPT, Body, ToolName
from upshift.serving.refusals import read_body

Status = Literal["in_progress", "completed", "incomplete"]
LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "function_call_output": "fco"}  # by types of items
PART_TYPES = {"assistant": "output_text"}  # of a message's text, by roles; others have input_text
ShortText = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class ContentPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] = []
    logprobs: list[Any] = []


class InputImage(Body):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = Field(None, description="taken; the model's processor decides on the size")


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Annotated[ContentPart | InputImage, Field(discriminator="type")]]
    phase: str | None = Field(None, description="taken; chat templates have no place for it")
    id: str | None = None
    status: Status | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: ShortText
    name: ToolName
    arguments: str
    id: str | None = None
    status: Status | None = None


class ResultItem(Body):
    type: Literal["function_call_output"]
    call_id: ShortText
    output: str | list[ContentPart]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | None = Field(None, description="taken; another server's, which the model cannot read")
    id: str | None = None
    status: Status | None = None


class ItemReference(Body):
    """An item of a response that is kept, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: ShortText


Item = MessageItem | CallItem | ResultItem | ReasoningItem
InputItem = Item | ItemReference


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ForcedFunction(Body):
    type: Literal["function"]
    name: ToolName


class AllowedFunctions(Body):
    """The choice of some of the tools. The answer may call these alone, or must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ForcedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(ANY_OBJECT, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat = TextFormat()
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=HINT)


class ReasoningOptions(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="taken; the reasoning comes as it is")


class ResponsesPrompt(RequestBody):
    """The fields of a request that decide its prompt."""

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | ForcedFunction | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    truncation: Literal["disabled"] = "disabled"

    def own_items(self) -> list[InputItem]:
        return [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else list(self.input)

    def to_chat(self, items: Sequence[Item]) -> ChatRequest:
        """Return the request as one of a chat. ``items`` are those of the conversation, with those of this request."""
        return read_chat(self._chat_body(items))

    def _chat_body(self, items: Sequence[Item]) -> dict[str, Any]:
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return {
            "model": self.model,
            "messages": [*instructions, *messages_of_items(items)],
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "response_format": self._response_format(),
        }

    def _response_format(self) -> dict[str, Any]:
        form = self.text.format
        if form.type != "json_schema":
            return {"type": form.type}
        return {"type": form.type, "json_schema": {"name": form.name or "answer", "schema": form.schema_}}


class ResponsesRequest(ResponsesPrompt):
    """A request for an answer."""

    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST, description=f"needs {LOGPROBS} in include")
    store: bool = Field(True, description="whether a later request may name this response; it is kept in memory only")
    background: bool = Field(False, description="true: the answer comes at once, and is computed meanwhile")
    include: list[Included] = Field(
        [], description="log-probabilities; others are taken: reasoning is not encrypted, and no tool runs on this server"
    )
    metadata: dict[str, str] = {}
    service_tier: str | None = Field(None, description=NOT_KEPT)
    prompt_cache_key: str | None = Field(None, description=NOT_KEPT)
    prompt_cache_retention: str | None = Field(None, description=NOT_KEPT)
    max_tool_calls: int | None = Field(None, ge=1, description="of tools that the server itself runs, and this one runs none")
    safety_identifier: str | None = Field(None, description=NOT_KEPT)

    def check(self) -> None:
        """Raise RequestError for fields that do not fit together."""
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(f"top_logprobs is for log-probabilities; add {LOGPROBS!r} to include, or leave top_logprobs out")
        if self.background and self.stream:
            raise RequestError("an answer in the background is not streamed; set one of background and stream to false")
        if self.background and not self.store:
            raise RequestError("an answer in the background is asked for by its id, and store is false; set store to true")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include

    def _chat_body(self, items: Sequence[Item]) -> dict[str, Any]:
        body = super()._chat_body(items) | {
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
        }
        return body | ({"logprobs": True, "top_logprobs": self.top_logprobs} if self.wants_logprobs else {})


def _chat_choice(choice: str | ForcedFunction | AllowedFunctions) -> Any:
    """Return the choice of tools in the form of chat completions."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, ForcedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": [_chat_choice(tool) for tool in choice.tools]}}


def read_chat(body: dict[str, Any]) -> ChatRequest:
    """Return the request of a chat. Raise RequestError with the first problem if it is none."""
    return read_body(ChatRequest, body)


def messages_of_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Return items as messages of a chat. A call, and reasoning, belong to the assistant's message beside them."""
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for item in items:
        if isinstance(item, ReasoningItem):
            reasoning += "".join(part.text for part in item.content)
        elif isinstance(item, ResultItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _join_parts(item.output)})
        elif isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": _chat_content(item.content)})
        else:
            if not messages or messages[-1]["role"] != "assistant" or reasoning:
                messages.append({"role": "assistant", "content": None})
            function = {"name": item.name, "arguments": item.arguments}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        if reasoning and messages and messages[-1]["role"] == "assistant" and not isinstance(item, ReasoningItem):
            messages[-1]["reasoning_content"] = reasoning
            reasoning = ""
    return messages


def _chat_content(content: str | Sequence[ContentPart | InputImage]) -> str | list[dict[str, Any]]:
    """Return a content as one text, or as parts of a chat if it has pictures."""
    if isinstance(content, str):
        return content
    if not any(isinstance(part, InputImage) for part in content):
        return "".join(part.text for part in content if isinstance(part, ContentPart))
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def _join_parts(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def new_item_id(kind: str) -> str:
    """Return an id for an item of a type."""
    return f"{ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def describe_item(item: Item) -> dict[str, Any]:
    """Return an item of an input as OpenAI lists it: with an id, a status, and its texts as parts."""
    described = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = PART_TYPES.get(item.role, "input_text")
        described["content"] = [{"type": kind, "text": item.content, **({"annotations": []} if kind == "output_text" else {})}]
    return described | {"id": item.id or new_item_id(item.type), "status": item.status or "completed"}
