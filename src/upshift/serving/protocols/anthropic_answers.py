"""Build answers of Anthropic's /v1/messages: whole ones, and streams of events."""

from __future__ import annotations

import json
import uuid
from typing import Any

from upshift.serving.messages import Piece, ToolCall
from upshift.serving.openai_requests import ChatRequest
from upshift.serving.openai_responses import Usage
from upshift.serving.refusals import Refusal

FIELDS = {"thinking": "thinking", "text": "text"}  # of a block with text: the name of its field


class MessageAnswer:
    """An answer whose pieces become blocks: reasoning, a text and calls. Pass every piece to ``add`` exactly once.

    Each method returns the events for a stream."""

    def __init__(self, chat: ChatRequest) -> None:
        self.chat = chat
        self.id = f"msg_{uuid.uuid4().hex}"
        self.content: list[dict[str, Any]] = []
        self._is_open = False  # whether the last block goes on
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def start(self, first: Piece) -> bytes:
        usage = Usage.from_pieces([first], 0)
        return _event("message_start", message=self.body(usage))

    def add(self, piece: Piece) -> bytes:
        """Add a piece of the answer."""
        reasoning = piece.reasoning if self.chat.include_reasoning else ""
        events = self._add_text("thinking", reasoning) + self._add_text("text", piece.text)
        for call in piece.calls:
            events += self._add_call(call)
        if piece.ending is not None:
            events += self._close_block()
            self._stop_reason = self._reason_of(piece)
            self._stop_sequence = piece.stop_string if self._stop_reason == "stop_sequence" else None
        return events

    def finish(self, usage: Usage) -> bytes:
        """Return the last events."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return _event("message_delta", delta=delta, usage=_format_usage(usage)) + _event("message_stop")

    def error(self, refusal: Refusal) -> bytes:
        """Return the event of an error after the status has been sent."""
        return _event("error", error=refusal.anthropic_body()["error"])

    def body(self, usage: Usage) -> dict[str, Any]:
        """Return the message as far as it has come."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.chat.model,
            "content": [dict(block) for block in self.content],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _format_usage(usage),
        }

    def _reason_of(self, last: Piece) -> str:
        """Return why the answer ends with its last piece."""
        if last.ending == "length":
            return "max_tokens"
        if last.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if any(block["type"] == "tool_use" for block in self.content) else "end_turn"

    def _add_text(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        events = b""
        if not self._is_open or self.content[-1]["type"] != kind:
            if kind == "text" and not text.strip() and self.content:
                return b""  # white space between reasoning, or calls, and what follows
            events = self._close_block() + self._open_block(kind)
        self.content[-1][FIELDS[kind]] += text
        return events + self._block_event("content_block_delta", delta={"type": f"{kind}_delta", FIELDS[kind]: text})

    def _open_block(self, kind: str) -> bytes:
        signature = {"signature": ""} if kind == "thinking" else {}
        self.content.append({"type": kind, FIELDS[kind]: "", **signature})
        self._is_open = True
        return self._block_event("content_block_start", content_block=self.content[-1])

    def _close_block(self) -> bytes:
        """End the open block."""
        if not self._is_open:
            return b""
        self._is_open = False
        return self._block_event("content_block_stop")

    def _add_call(self, call: ToolCall) -> bytes:
        events = self._close_block()
        block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name}
        self.content.append(block | {"input": json.loads(call.arguments)})
        events += self._block_event("content_block_start", content_block=block | {"input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return events + self._block_event("content_block_delta", delta=delta) + self._block_event("content_block_stop")

    def _block_event(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, index=len(self.content) - 1, **fields)


def _event(kind: str, **fields: Any) -> bytes:
    event = {"type": kind, **fields}
    return f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _format_usage(usage: Usage) -> dict[str, int]:
    """Return the token counts. Anthropic counts the tokens of a prompt that come from the cache apart from the others."""
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
