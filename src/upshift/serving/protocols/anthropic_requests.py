"""Define the bodies of requests to Anthropic's /v1/messages, and turn them into requests of a chat."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from upshift.errors import RequestError
from upshift.serving.openai_requests import MAX_STOPS, ChatRequest, Stop
from upshift.serving.protocols.chat_messages import MAX_TOOLS, NOT_KEPT, Body, CheckedBody, ToolName
from upshift.serving.protocols.responses_requests import read_chat
from upshift.serving.refusals import ThreadsUnsupported

TURN_BORDER = "\n\n"  # between the texts of messages that follow each other with the same role
AUTOMATIC = "taken; the server itself decides what it keeps in its cache"
ToolUseId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
CHOICES = {"auto": "auto", "any": "required", "none": "none"}  # of tools, in OpenAI's words


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Body):
    """A part of a message."""

    cache_control: CacheControl | None = Field(None, description=AUTOMATIC)


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] = []


class PictureSource(Body):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class PictureBlock(Block):
    type: Literal["image"]
    source: PictureSource

    def to_part(self) -> dict[str, Any]:
        """Return the picture as a part of a message in OpenAI's form."""
        return {"type": "image_url", "image_url": {"url": f"data:{self.source.media_type};base64,{self.source.data}"}}


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="taken; reasoning is not signed here")


class RedactedThinkingBlock(Block):
    type: Literal["redacted_thinking"]
    data: str = Field(description="taken; another server's, which the model cannot read")


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: ToolUseId
    name: ToolName
    input: dict[str, Any]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: ToolUseId
    content: str | list[TextBlock] = ""
    is_error: bool = Field(False, description="taken; chat templates have no place for it")


ContentBlock = Annotated[
    TextBlock | PictureBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Field(min_length=1)]

    def blocks(self) -> list[Any]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(Body):
    """A tool that the answer may call. Anthropic's own tools, which run on its servers, are not possible here."""

    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = Field(None, description="calls that tool_choice forces match the schema, whether this is set or not")
    cache_control: CacheControl | None = Field(None, description=AUTOMATIC)
    eager_input_streaming: bool | None = Field(None, description="taken; a call comes when it is complete")
    input_examples: list[dict[str, Any]] = Field([], description="taken; chat templates have no place for them")


class ToolChoice(Body):
    type: Literal["auto", "any", "none"] = "auto"
    disable_parallel_tool_use: bool = False


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    """The choice of reasoning. ``adaptive`` leaves it to the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="tokens after which the reasoning ends")
    display: Literal["summarized", "omitted"] = Field("summarized", description="omitted: the answer leaves the reasoning out")


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(None, description="of reasoning")
    format: JsonFormat | None = None


class Metadata(Body):
    user_id: str | None = Field(None, description=NOT_KEPT)


class MessagesPrompt(CheckedBody):
    """The fields of a request that decide its prompt."""

    model: str = Field("", description="one of GET /v1/models; may be left out if there is one")
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[TextBlock] = ""
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: ToolChoice | NamedToolChoice = ToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = Field(None, description=AUTOMATIC)
    context_management: dict[str, Any] | None = Field(None, description="taken; no message is left out here")
    thread: dict[str, Any] | None = Field(
        None,
        description="rejected in the words after which Anthropic's client sends whole conversations",
        json_schema_extra={"type": "null"},
    )

    def to_chat(self) -> ChatRequest:
        """Return the request as one of a chat. Raise RequestError if it cannot be one."""
        if self.thread is not None:
            raise ThreadsUnsupported("no thread is kept here; send the whole conversation, and leave thread out")
        return read_chat(self._chat_body())

    def _chat_body(self) -> dict[str, Any]:
        system = self.system if isinstance(self.system, str) else _join_texts(self.system)
        instructions = [{"role": "system", "content": system}] if system else []
        choice = self.tool_choice
        forced: Any = CHOICES.get(choice.type)
        if isinstance(choice, NamedToolChoice):
            forced = {"type": "function", "function": {"name": choice.name}}
        output = self.output_config
        form: dict[str, Any] | None = None
        if output.format is not None:
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": output.format.schema_}}
        return {
            "model": self.model,
            "messages": [*instructions, *chat_messages(self.messages)],
            "tools": [_chat_tool(tool) for tool in self.tools],
            "tool_choice": forced,
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": output.effort,
            "response_format": form,
            **self._thinking_fields(),
            **self._ending_fields(),
        }

    def _ending_fields(self) -> dict[str, Any]:
        """Return the fields by which an answer goes on with a last message of the assistant, as Anthropic documents."""
        last = self.messages[-1]
        if last.role != "assistant":
            return {}
        blocks = last.blocks()
        if not all(isinstance(block, TextBlock | ThinkingBlock) for block in blocks):
            raise RequestError("the last message is the assistant's and calls a tool; send the result of the tool after it")
        text = _join_texts([block for block in blocks if isinstance(block, TextBlock)])
        if not text or text != text.rstrip():
            raise RequestError(
                "the last message is the assistant's, and the answer goes on with its text, which must not be empty or end with "
                "white space; leave the message or the white space out"
            )
        if self.thinking is not None and self.thinking.type == "enabled":
            raise RequestError("an answer that goes on with the last message has no reasoning before it; leave thinking out")
        return {"continue_final_message": True, "add_generation_prompt": False}

    def _thinking_fields(self) -> dict[str, Any]:
        thinking = self.thinking
        if thinking is None:
            return {}
        if (thinking.type == "enabled") != (thinking.budget_tokens is not None):
            raise RequestError("thinking.budget_tokens belongs to the type enabled, and to no other; give both, or neither")
        wanted = {"enabled": True, "disabled": False}.get(thinking.type)
        is_shown = thinking.display != "omitted"
        return {"enable_thinking": wanted, "thinking_token_budget": thinking.budget_tokens, "include_reasoning": is_shown}


class MessagesRequest(MessagesPrompt):
    """A request for an answer."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="taken without effect")

    def _chat_body(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        return {
            **super()._chat_body(),
            **{name: getattr(self, name) for name in names},
            "stop": self.stop_sequences or None,
        }


def chat_messages(messages: list[AnthropicMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Those that follow each other with the same role become one, as Anthropic documents.

    Raise RequestError for a block that its role does not have."""
    converted: list[dict[str, Any]] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        turns = [message.blocks() for message in group]
        converted += [_assistant_message(turns)] if role == "assistant" else _other_messages(role, turns)
    return converted


def _assistant_message(turns: list[list[Any]]) -> dict[str, Any]:
    blocks = [block for turn in turns for block in turn]
    if any(isinstance(block, ToolResultBlock) for block in blocks):
        raise RequestError("a message of the assistant has a tool_result; send it in the next message of the user")
    texts = [_join_texts([block for block in turn if isinstance(block, TextBlock)]) for turn in turns]
    message: dict[str, Any] = {"role": "assistant", "content": TURN_BORDER.join(text for text in texts if text)}
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [_chat_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def _other_messages(role: str, turns: list[list[Any]]) -> list[dict[str, Any]]:
    """Return the texts and the results of tools of messages with the same role, in their order."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        for kind, group in groupby(turn, key=type):
            blocks = list(group)
            is_next = bool(messages) and messages[-1]["role"] == role
            if kind is ToolResultBlock and role == "user":
                messages += [_result_message(block) for block in blocks]
            elif kind is PictureBlock and role == "user":
                pictures = [block.to_part() for block in blocks]
                messages[-1:] = [_add_parts(messages[-1], pictures)] if is_next else [*messages[-1:], _user_message(pictures)]
            elif kind is not TextBlock:
                raise RequestError(f"a message of the {role} has a block of the type {blocks[0].type}, which it cannot have")
            elif is_next and isinstance(messages[-1]["content"], list):
                messages[-1] = _add_parts(messages[-1], [_text_part(_join_texts(blocks))])
            elif is_next:
                messages[-1]["content"] += TURN_BORDER + _join_texts(blocks)
            else:
                messages.append({"role": role, "content": _join_texts(blocks)})
    return messages


def _user_message(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": parts}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _add_parts(message: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message with more parts. A content that is one text becomes the first part."""
    content = message["content"]
    return {**message, "content": [*([_text_part(content)] if isinstance(content, str) else content), *parts]}


def _result_message(block: ToolResultBlock) -> dict[str, Any]:
    content = block.content if isinstance(block.content, str) else _join_texts(block.content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _chat_call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _chat_tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _join_texts(blocks: list[TextBlock]) -> str:
    return "".join(block.text for block in blocks)
