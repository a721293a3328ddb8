"""Build answers of OpenAI's /v1/responses: whole ones, and streams of events."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any, Literal

from upshift.serving.messages import Piece, TokenScore, ToolCall
from upshift.serving.openai_requests import ChatRequest
from upshift.serving.openai_responses import Usage, chat_logprobs
from upshift.serving.protocols.responses_requests import ResponsesRequest, new_item_id
from upshift.serving.refusals import Refusal

KINDS = {"reasoning": "reasoning_text", "message": "output_text"}  # of an item: the type of its part


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
        self.status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"] = "in_progress"
        self._refusal: Refusal | None = None
        self._unsent_scores: list[TokenScore] = []  # of tokens whose text is held back

    def start(self, first: Piece) -> bytes:
        return self._event("response.created", response=self.body(None)) + self._event(
            "response.in_progress", response=self.body(None)
        )

    def add(self, piece: Piece) -> bytes:
        """Add a piece of the answer."""
        self._unsent_scores += piece.scores[piece.reasoning_tokens :]
        events = self._add_text("reasoning", piece.reasoning) + self._add_text("message", piece.text)
        for call in piece.calls:
            self._unsent_scores = []  # of the call's tokens, which belong to no text
            events += self._add_call(call)
        if piece.ending is not None:
            self.status = "incomplete" if piece.ending == "length" else "completed"
            if not self.output:
                events += self._open_item("message")
            events += self._close_item()
        return events

    def finish(self, usage: Usage) -> bytes:
        """Return the last event."""
        return self._event(f"response.{self.status}", response=self.body(usage))

    def error(self, refusal: Refusal) -> bytes:
        """Return the event of an error after the status has been sent."""
        error = refusal.body()["error"]
        return self._event("error", code=error["code"] or error["type"], message=error["message"], param=error["param"])

    def cut(self, status: Literal["cancelled", "failed"], refusal: Refusal | None = None) -> None:
        """End an answer in the background that does not go on. ``refusal`` says why it failed."""
        self.status = status
        self._refusal = refusal
        self._close_item()

    def body(self, usage: Usage | None) -> dict[str, Any]:
        """Return the response as far as it has come."""
        request = self.request
        choice = request.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "background": request.background,
            "error": None if self._refusal is None else self._format_error(self._refusal),
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
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
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p,
            "truncation": request.truncation,
            "usage": None if usage is None else _format_usage(usage),
            "user": request.user,
        }

    def _format_error(self, refusal: Refusal) -> dict[str, Any]:
        """Return the error of an answer in the background, with a code that OpenAI's clients know."""
        code = {429: "rate_limit_exceeded"}.get(refusal.status, "server_error" if refusal.status >= 500 else "invalid_prompt")
        return {"code": code, "message": refusal.body()["error"]["message"]}

    def _take_scores(self) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens since the last call."""
        scores, self._unsent_scores = self._unsent_scores, []
        formatted: list[dict[str, Any]] = chat_logprobs(scores)["content"]
        return formatted

    def _add_text(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        events = b""
        if not self._is_open or self.output[-1]["type"] != kind:
            if kind == "message" and not text.strip() and self.output:
                return b""  # white space between reasoning, or calls, and what follows
            events = self._close_item() + self._open_item(kind)
        part = self.output[-1]["content"][0]
        part["text"] += text
        logprobs: dict[str, Any] = {"logprobs": self._take_scores()} if kind == "message" else {}
        part.get("logprobs", []).extend(logprobs.get("logprobs", []))
        return events + self._part_event(f"response.{KINDS[kind]}.delta", delta=text, **logprobs)

    def _open_item(self, kind: str) -> bytes:
        """Begin an item with text."""
        item: dict[str, Any] = {"id": new_item_id(kind), "type": kind, "status": "in_progress"}
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
        if self.status in ("completed", "incomplete") and item["type"] == "message":
            part["logprobs"] += self._take_scores()  # of a text that a stop string ended
        is_cut = self.status in ("incomplete", "cancelled", "failed")
        self.output[-1] = item | {"status": "incomplete" if is_cut else "completed"}
        logprobs: dict[str, Any] = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        events = self._part_event(f"response.{part['type']}.done", text=part["text"], **logprobs)
        events += self._part_event("response.content_part.done", part=part)
        return events + self._item_event("response.output_item.done")

    def _add_call(self, call: ToolCall) -> bytes:
        events = self._close_item()
        item = {
            "id": new_item_id("function_call"),
            "type": "function_call",
            "call_id": f"call_{uuid.uuid4().hex}",
            "name": call.name,
        }
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


def _format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
