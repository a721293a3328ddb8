"""Build answers of OpenAI's /v1/responses: whole ones, and streams of events."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from upshift.serving.messages import Piece, ToolCall
from upshift.serving.openai_requests import ChatRequest
from upshift.serving.openai_responses import Usage
from upshift.serving.protocols.responses_requests import ResponsesRequest
from upshift.serving.refusals import Refusal

KINDS = {"reasoning": "reasoning_text", "message": "output_text"}  # of an item: the type of its part
ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


class ResponseAnswer:
    """An answer whose pieces become items: reasoning, a message and calls. Pass every piece to ``add`` exactly once.

    Each method returns the events for a stream."""

    def __init__(self, request: ResponsesRequest, chat: ChatRequest) -> None:
        self.request = request
        self.chat = chat
        self.id = f"resp_{uuid.uuid4().hex}"
        self.output: list[dict[str, Any]] = []
        self._created = int(time.time())
        self._events = 0
        self._is_open = False  # whether the last item goes on
        self._status = "in_progress"

    def start(self, first: Piece) -> bytes:
        return self._event("response.created", response=self.body(None)) + self._event(
            "response.in_progress", response=self.body(None)
        )

    def add(self, piece: Piece) -> bytes:
        """Add a piece of the answer."""
        events = self._add_text("reasoning", piece.reasoning) + self._add_text("message", piece.text)
        for call in piece.calls:
            events += self._add_call(call)
        if piece.ending is not None:
            self._status = "incomplete" if piece.ending == "length" else "completed"
            if not self.output:
                events += self._open_item("message")
            events += self._close_item()
        return events

    def finish(self, usage: Usage) -> bytes:
        """Return the last event."""
        return self._event(f"response.{self._status}", response=self.body(usage))

    def error(self, refusal: Refusal) -> bytes:
        """Return the event of an error after the status has been sent."""
        error = refusal.body()["error"]
        return self._event("error", code=error["code"] or error["type"], message=error["message"], param=error["param"])

    def messages(self) -> list[dict[str, Any]]:
        """Return the answer as messages of a chat."""
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for item in self.output:
            if item["type"] == "message":
                message["content"] = item["content"][0]["text"]
            elif item["type"] == "reasoning":
                message["reasoning_content"] = item["content"][0]["text"]
            else:
                function = {"name": item["name"], "arguments": item["arguments"]}
                message.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        return [message]

    def body(self, usage: Usage | None) -> dict[str, Any]:
        """Return the response as far as it has come."""
        request = self.request
        choice = request.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": request.model,
            "output": [dict(item) for item in self.output],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": request.reasoning.model_dump(),
            "store": request.store,
            "temperature": request.temperature,
            "text": {"format": request.text.format.model_dump(by_alias=True, exclude_unset=True) or {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.tools],
            "top_p": request.top_p,
            "truncation": request.truncation,
            "usage": None if usage is None else _format_usage(usage),
            "user": request.user,
        }

    def _add_text(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        events = b""
        if not self._is_open or self.output[-1]["type"] != kind:
            if kind == "message" and not text.strip() and self.output:
                return b""  # white space between reasoning, or calls, and what follows
            events = self._close_item() + self._open_item(kind)
        self.output[-1]["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return events + self._part_event(f"response.{KINDS[kind]}.delta", delta=text, **logprobs)

    def _open_item(self, kind: str) -> bytes:
        """Begin an item with text."""
        item: dict[str, Any] = {"id": _new_id(kind), "type": kind, "status": "in_progress"}
        own_field: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        self.output.append(item | own_field | {"content": []})
        self._is_open = True
        events = self._item_event("response.output_item.added")
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
        self.output[-1]["content"] = [{"type": KINDS[kind], "text": "", **more}]
        return events + self._part_event("response.content_part.added", part=dict(self.output[-1]["content"][0]))

    def _close_item(self) -> bytes:
        """End the open item with text."""
        if not self._is_open:
            return b""
        self._is_open = False
        item = self.output[-1]
        part = item["content"][0]
        is_cut = self._status == "incomplete"
        self.output[-1] = item | {"status": "incomplete" if is_cut else "completed"}
        logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        events = self._part_event(f"response.{part['type']}.done", text=part["text"], **logprobs)
        events += self._part_event("response.content_part.done", part=part)
        return events + self._item_event("response.output_item.done")

    def _add_call(self, call: ToolCall) -> bytes:
        events = self._close_item()
        item = {"id": _new_id("function_call"), "type": "function_call", "call_id": f"call_{uuid.uuid4().hex}", "name": call.name}
        self.output.append(item | {"arguments": "", "status": "in_progress"})
        events += self._item_event("response.output_item.added")
        self.output[-1] = item | {"arguments": call.arguments, "status": "completed"}
        place = {"item_id": item["id"], "output_index": len(self.output) - 1}
        events += self._event("response.function_call_arguments.delta", delta=call.arguments, **place)
        events += self._event("response.function_call_arguments.done", name=call.name, arguments=call.arguments, **place)
        return events + self._item_event("response.output_item.done")

    def _item_event(self, kind: str) -> bytes:
        return self._event(kind, output_index=len(self.output) - 1, item=self.output[-1])

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._events, **fields}
        self._events += 1
        return f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _new_id(kind: str) -> str:
    return f"{ID_PREFIXES[kind]}_{uuid.uuid4().hex}"


def _format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
