"""An assistant's call of tools without a text (content: null): each template gets the form that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_models import CALLS, HEADER, PROMPT, TOOLS, byte_level_tokenizer, rows_of, save_model, write_jsonl

from upshift.inference.generation.prompts import Prompts
from upshift.models.source import find_model
from upshift.training.data import data_files
from upshift.training.data.rows.token_rows import IGNORED

TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": {"road": "None"}}}
MESSAGES = [
    {"role": "user", "content": "which road"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "the north"},
    {"role": "assistant", "content": "the north"},
]


def template(content: str) -> str:
    """A template that writes the content of a message in this way."""
    head = f"{{{{- bos_token }}}}{TOOLS}{{%- for message in messages %}}{HEADER}"
    return f"{head}{content}{CALLS}{{{{- '<|im_end|>\\n' }}}}{{%- endfor %}}{PROMPT}"


JOINS = "{%- if '</think>' in message.content %}{{- 'thoughts' }}{%- endif %}{{- '' + message.content }}"  # as Qwen3's
STRIPS = "{%- set content = message['content'] %}{{- content.strip() }}"  # as Nemotron's
PRINTS = "{{- message.content }}"
ASKS = "{%- if message.content is none %}{{- '[calls]' }}{%- else %}{{- message.content }}{%- endif %}"  # as DeepSeek's
NEEDS = "{%- if 'content' in message %}{{- message.content.strip() }}{%- else %}{{- '[calls]' }}{%- endif %}"
REJECTS_EMPTY = (
    "{%- if 'content' in message %}{%- if not message.content %}{{- raise_exception('empty') }}{%- endif %}"
    "{{- message.content }}{%- endif %}"
)
PARTS = "{%- for part in message.content %}{{- part.text }}{%- endfor %}"
CASES = {  # the content of the call with which the template writes the text that is expected
    "joins": (JOINS, ""),
    "strips": (STRIPS, ""),
    "prints": (PRINTS, ""),
    "asks": (ASKS, None),
    "needs": (NEEDS, None),
    "rejects an empty content": (REJECTS_EMPTY, "missing"),
    "guards": ("{{- message.content or '' }}", None),
}


@pytest.fixture(autouse=True)
def says_again() -> None:
    data_files.say_once.cache_clear()


def expected_text(tokenizer: Any, content: str | None, messages: list[dict[str, Any]], *, adds_prompt: bool) -> str:
    """What transformers writes with this content of the call."""
    call = {**messages[1], "content": content}
    if content == "missing":
        del call["content"]
    text: str = tokenizer.apply_chat_template(
        [messages[0], call, *messages[2:]], tools=[TOOL], tokenize=False, add_generation_prompt=adds_prompt
    )
    return text


@pytest.mark.parametrize("is_written", [True, False], ids=["null", "no key"])
@pytest.mark.parametrize("loss_on", ["all", "assistant"])
@pytest.mark.parametrize("name", CASES)
def test_a_row_of_training_has_the_text_that_the_template_writes(
    name: str, loss_on: str, is_written: bool, tmp_path: Path
) -> None:
    source, content = CASES[name]
    tokenizer = byte_level_tokenizer(template(source))
    call = MESSAGES[1] if is_written else {key: value for key, value in MESSAGES[1].items() if key != "content"}
    rows = [{"messages": [MESSAGES[0], call, *MESSAGES[2:]], "tools": [TOOL]}] * 2
    (ids, labels), second = rows_of(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, loss_on=loss_on)
    text = tokenizer.decode(ids)
    assert text == expected_text(tokenizer, content, MESSAGES, adds_prompt=False) and (ids, labels) == second
    assert text.count("None") == 1  # of the call's arguments
    if loss_on == "assistant":
        learned = tokenizer.decode([label for label in labels if label != IGNORED])
        assert '<call>{"road": "None"}' in learned and "the north" in learned and "which road" not in learned


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_has_the_text_that_the_template_writes(name: str, tmp_path: Path) -> None:
    source, content = CASES[name]
    save_model(tmp_path, byte_level_tokenizer(template(source)))
    prompts = Prompts(find_model(str(tmp_path)))
    messages = [MESSAGES[0], {**MESSAGES[1], "tool_calls": [{key: CALL[key] for key in ("type", "function")}]}, MESSAGES[2]]
    (ids,) = prompts.tokenize([{"messages": messages, "tools": [TOOL]}])
    assert prompts.tokenizer.decode(ids) == expected_text(prompts.tokenizer, content, messages, adds_prompt=True)


def test_a_template_of_parts_gets_null_as_it_takes_it(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer(template(PARTS))
    rows = [{"messages": MESSAGES, "tools": [TOOL]}]
    ((ids, _),) = rows_of(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)
    text = tokenizer.decode(ids)
    assert "which road" in text and text.count("None") == 1 and "<call>" in text
