"""Define the bodies of requests to OpenAI's /v1/responses, and turn them into requests of a chat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, StringConstraints, ValidationError

from upshift.errors import RequestError
from upshift.serving.openai_requests import ANY_OBJECT, HINT, MAX_TOOLS, ChatRequest, Effort, RequestBody, StreamOptions
from upshift.serving.protocols.chat_messages import NOT_KEPT, Body, ToolName
from upshift.serving.refusals import refusal_of_problems

MAX_STORED = 1024  # responses in memory
MAX_STORED_CHARACTERS = 64 * 2**20  # of all of them together
Status = Literal["in_progress", "completed", "incomplete"]
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
    id: str | None = None
    status: Status | None = None


Item = MessageItem | CallItem | ResultItem | ReasoningItem


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ForcedFunction(Body):
    type: Literal["function"]
    name: ToolName


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


class ResponsesRequest(RequestBody):
    input: str | Annotated[list[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | ForcedFunction = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    store: bool = Field(True, description="whether a later request may name this response; it is kept in memory only")
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    include: list[Literal["reasoning.encrypted_content"]] = Field([], description="taken; the reasoning is not encrypted")
    metadata: dict[str, str] = {}
    service_tier: str | None = Field(None, description=NOT_KEPT)
    prompt_cache_key: str | None = Field(None, description=NOT_KEPT)
    prompt_cache_retention: str | None = Field(None, description=NOT_KEPT)
    max_tool_calls: int | None = Field(None, ge=1, description="of tools that the server itself runs, and this one runs none")
    safety_identifier: str | None = Field(None, description=NOT_KEPT)

    def own_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the input, in the form of a chat."""
        items: list[Item] = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        return messages_of_items(items)

    def to_chat(self, earlier: list[dict[str, Any]]) -> ChatRequest:
        """Return the request as one of a chat, after the messages of earlier responses."""
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools]
        choice: Any = self.tool_choice
        if isinstance(choice, ForcedFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        body = {
            "model": self.model,
            "messages": [*instructions, *earlier, *self.own_messages()],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort,
            "response_format": self._response_format(),
        }
        return read_chat(body)

    def _response_format(self) -> dict[str, Any]:
        form = self.text.format
        if form.type != "json_schema":
            return {"type": form.type}
        return {"type": form.type, "json_schema": {"name": form.name or "answer", "schema": form.schema_}}


def read_chat(body: dict[str, Any]) -> ChatRequest:
    """Return the request of a chat. Raise RequestError with the first problem if it is none."""
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        raise RequestError(refusal_of_problems(error.errors()).message) from None


def messages_of_items(items: list[Item]) -> list[dict[str, Any]]:
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


class StoredResponse(NamedTuple):
    """A response, and all messages of the conversation up to it without instructions."""

    body: dict[str, Any]
    messages: list[dict[str, Any]]
    characters: int


class ResponseStore:
    """The last responses, in memory. The oldest ones are dropped first."""

    def __init__(self, max_responses: int = MAX_STORED, max_characters: int = MAX_STORED_CHARACTERS) -> None:
        self._max_responses = max_responses
        self._max_characters = max_characters
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._characters = 0

    def add(self, body: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response, and drop old ones if there are too many."""
        characters = len(repr(messages)) + len(repr(body))
        self._responses[body["id"]] = StoredResponse(body, messages, characters)
        self._characters += characters
        while len(self._responses) > self._max_responses or self._characters > self._max_characters:
            _, dropped = self._responses.popitem(last=False)
            self._characters -= dropped.characters

    def find(self, id: str) -> StoredResponse | None:
        return self._responses.get(id)

    def remove(self, id: str) -> bool:
        """Drop a response. Return whether there was one."""
        dropped = self._responses.pop(id, None)
        self._characters -= 0 if dropped is None else dropped.characters
        return dropped is not None
