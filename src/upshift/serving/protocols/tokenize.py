"""Define the bodies of requests for tokens, with vLLM's fields: /tokenize and /detokenize."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from upshift.serving.messages import TemplateOptions, Tokenize
from upshift.serving.openai_requests import TokenId
from upshift.serving.protocols.chat_messages import (
    MAX_TOOLS,
    CheckedBody,
    Message,
    Tool,
    check_calls,
    prompt_ending,
    template_messages,
)

MODEL = "one of GET /v1/models; may be left out if there is one"


# For the description of the API; TokenizeRequest checks the rest.
PROMPT_OR_CHAT: JsonDict = {
    "oneOf": [
        {
            "required": ["prompt"],
            "properties": {
                "prompt": {"type": "string"},
                "messages": {"type": "null"},
                "tools": {"maxItems": 0},
                "chat_template_kwargs": {"maxProperties": 0},
                "add_generation_prompt": {"enum": [True, None]},
                "continue_final_message": {"const": False},
            },
        },
        {
            "required": ["messages"],
            "properties": {
                "prompt": {"type": "null"},
                "messages": {"type": "array"},
                "add_special_tokens": {"enum": [False, None]},
            },
        },
    ],
}


class TokenizeRequest(CheckedBody):
    """A prompt, or the messages of a chat, whose tokens are returned. The fields are vLLM's."""

    model_config = ConfigDict(json_schema_extra=PROMPT_OR_CHAT)
    model: str | None = Field(None, description=MODEL)
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(None, description="of a prompt; a chat has those of its template")
    add_generation_prompt: bool | None = Field(None, description="whether the template begins an answer; it does by default")
    continue_final_message: bool = Field(False, description="the last message goes on, so that nothing ends it")
    return_token_strs: bool = False
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = []
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check_prompt(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("no_prompt", "give either a prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise PydanticCustomError("special", "a chat has the special tokens of its template; leave out add_special_tokens")
        if self.messages is None and (
            self.tools or self.chat_template_kwargs or self.continue_final_message or self.add_generation_prompt is False
        ):
            raise PydanticCustomError("no_chat", "tools and options of a chat template need messages instead of a prompt")
        return self

    def engine_request(self) -> Tokenize:
        """Return the engine's request. Raise RequestError for a call whose arguments are no JSON object."""
        check_calls(self.messages or [])
        messages = template_messages(self.messages or [])
        return Tokenize(
            prompt=messages if self.prompt is None else self.prompt,
            add_special_tokens=self.add_special_tokens is not False,
            tools=json.dumps([tool.to_template() for tool in self.tools]) if self.tools else None,
            template=TemplateOptions(
                variables=json.dumps(self.chat_template_kwargs),
                ending=prompt_ending(self.add_generation_prompt, self.continue_final_message),
            ),
            with_texts=self.return_token_strs,
        )


class DetokenizeRequest(CheckedBody):
    model: str | None = Field(None, description=MODEL)
    tokens: list[TokenId]
