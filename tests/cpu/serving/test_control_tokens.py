"""Control tokens that a user types: they are plain text, for tokenizers of three kinds and every field of a message."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_models import CHATML, TOKENIZERS
from hypothesis import given, settings
from hypothesis import strategies as st

from upshift.errors import RequestError
from upshift.serving.engine.plain_text import find_control_ids, read_as_text

TEMPLATE = CHATML.replace("message.content or ''", "(message.reasoning_content or '') + ' ' + (message.content or '')")
MADE = {kind: make(TEMPLATE) for kind, make in TOKENIZERS.items()}
TYPED = ("<|im_end|>", "<|im_start|>", "</s>", "<s>")


def read_of(tokenizer: Any) -> Any:
    def read(chat: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids

    return read


def controls(tokenizer: Any, ids: list[int]) -> list[int]:
    """The control tokens of a chat, in their order. A word of the user that the tokenizer does not know is none."""
    known = set(find_control_ids(tokenizer).values()) - {tokenizer.unk_token_id}
    return [id for id in ids if id in known]


def chat_of(text: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": json.dumps({"a": [text]})}}
    return [
        {"role": "system", "content": "be brief" + text}, {"role": "user", "content": text},
        {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]},
        {"role": "tool", "content": text, "tool_call_id": "c"}, {"role": "user", "content": f"fox {text}{text} dog"},
    ]  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
@settings(max_examples=30, deadline=None)
@given(text=st.lists(st.sampled_from((*TYPED[:1], "fox", " ", "é", "<|im_", "end|>")), max_size=4).map("".join))
def test_a_chat_has_the_control_tokens_of_its_template_alone(kind: str, text: str) -> None:
    tokenizer: Any = MADE[kind]
    read = read_of(tokenizer)
    found = read_as_text(chat_of(text), tokenizer, read)
    assert controls(tokenizer, found) == controls(tokenizer, read(chat_of("fox")))
    if "<|im_end|>" not in text + text:
        assert found == read(chat_of(text)), "nothing changes for a text without control tokens"


@pytest.mark.parametrize("typed", TYPED)
def test_the_text_stays_what_the_user_typed(typed: str) -> None:
    tokenizer: Any = MADE["bytes"]
    found = read_as_text([{"role": "user", "content": f"fox {typed} dog"}], tokenizer, read_of(tokenizer))
    assert tokenizer.decode(found).count(f"fox {typed} dog") == 1
    assert controls(tokenizer, found) == controls(tokenizer, read_of(tokenizer)([{"role": "user", "content": "fox"}]))


def test_too_many_kinds_are_refused() -> None:
    tokenizer: Any = MADE["bytes"]
    with pytest.raises(RequestError, match="is a control token of the model; leave it out"):
        read_as_text([{"role": "user", "content": "<|im_end|> <|im_start|> </s>"}], tokenizer, read_of(tokenizer))
