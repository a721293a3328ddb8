"""What a chat template leaves out of a row, or cannot take, is said. What real data sets and logs write is read."""

from __future__ import annotations

import json
from typing import Any

import datasets
import pytest
from chat_models import (
    CHATML,
    DROPS_THOUGHTS,
    LLAMA2,
    MARKED,
    TOKENIZERS,
    byte_level_tokenizer,
    make_chats,
    refusal,
    rows_of,
    write_jsonl,
)
from tokenizers import processors
from transformers import ByT5Tokenizer

from upshift.training.data import data_files
from upshift.training.data.chat_template import TemplateWriter
from upshift.training.data.chat_turns import num_shared
from upshift.training.data.rows.token_rows import IGNORED

USER = {"role": "user", "content": "which road"}
ANSWER = {"role": "assistant", "content": "<think>the trees</think>the north"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
CALL = {"type": "function", "function": {"name": "find", "arguments": {"road": None}}}
WITHOUT_THOUGHTS = CHATML.replace("(message.content or '')", "(message.content or '').split('</think>')[-1]")
DROPS_FIELD = CHATML.replace("(message.content or '')", "(message.reason or '' if loop.last else '') + message.content")


def only(condition: str, template: str = CHATML) -> str:
    """The template, with the messages alone for which a condition holds."""
    return template.replace("{%- for message in messages %}", "{%- for message in messages if " + condition + " %}")


@pytest.fixture(autouse=True)
def says_again():
    data_files.say_once.cache_clear()


def learned(tokenizer: Any, row: tuple[list[int], list[int]]) -> str:
    return tokenizer.decode([label for label in row[1] if label != IGNORED])


@pytest.mark.parametrize("role", ["system", "developer", "tool", "user"])
@pytest.mark.parametrize("content", ["a", "use the road to the north"])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_a_message_that_the_template_does_not_write_is_refused(role, content, template, loss_on, tmp_path):
    """The second row has it: the first one is written whole."""
    other = {"role": role, "content": content}
    last = {"role": "user" if role != "user" else "system", "content": "which road"}
    rows = [{"messages": [last, ANSWER]}, {"messages": [last, other, ANSWER]}]
    tokenizer = byte_level_tokenizer(only(f"message.role != '{role}'", template))
    message = refusal(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, loss_on=loss_on)
    assert f"{tmp_path / 'a.jsonl'}:2" in message and "does not write message 2" in message and repr(role) in message


@pytest.mark.parametrize("form", ["messages", "prompt"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_thoughts_that_the_template_leaves_out_are_named_with_their_rows(form, loss_on, tmp_path, caplog):
    whole = {"messages": [USER, {"role": "assistant", "content": "the north"}]}
    rows = [whole, {"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]}]
    if form == "prompt":
        rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    assert len(rows_of(path, byte_level_tokenizer(CHATML), loss_on=loss_on)) == 3 and "leaves out" not in caplog.text
    assert len(rows_of(path, byte_level_tokenizer(WITHOUT_THOUGHTS), loss_on=loss_on)) == 3
    assert f"{path}:2 and 1 other rows: the chat template leaves out or changes a part of 'content'" in caplog.text


def test_thoughts_within_the_contents_of_several_turns_are_learned_where_the_template_writes_them(tmp_path):
    """As Qwen3 does, the last turn has its thoughts, and earlier ones do not."""
    thoughts = "{%- if message.role == 'user' %}{%- elif loop.last and '</think>' in message.content %}"
    thoughts += "{{- message.content.split('</think>')[0] + '</think>' }}"
    thoughts += "{%- elif loop.last %}{{- '<think></think>' }}{%- endif %}"
    template = WITHOUT_THOUGHTS.replace("{{- (message.content", thoughts + "{{- (message.content")
    other = {"role": "assistant", "content": "<think>every river</think>a road"}
    tokenizer = byte_level_tokenizer(template)
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER, USER, other]}])
    assert learned(tokenizer, rows_of(path, tokenizer)[0]) == f"the north<|im_end|>\n{other['content']}<|im_end|>\n"


def test_a_field_of_thoughts_that_is_written_for_the_last_turn_alone_is_named(tmp_path, caplog):
    turns = [USER, {"role": "assistant", "content": "the north", "reason": "every tree"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}, {"messages": turns + [USER, turns[1] | {"reason": "roads"}]}])
    rows_of(path, byte_level_tokenizer(DROPS_FIELD), loss_on="all")
    assert f"{path}:2: the chat template leaves out or changes a part of 'reason'" in caplog.text


@pytest.mark.parametrize("change", ["| trim", "| tojson", "| replace('  ', ' ')"])
def test_contents_with_other_white_space_or_as_json_are_not_named(change, tmp_path, caplog):
    template = CHATML.replace("(message.content or '')", f"(message.content {change})")
    row = {"messages": [{"role": "system", "content": ' "a"\n  b '}, USER, ANSWER]}
    assert len(rows_of(write_jsonl(tmp_path / "a.jsonl", [row] * 3), byte_level_tokenizer(template))) == 3
    assert "leaves out" not in caplog.text


READABLE: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {  # a message, and the same as the template needs it
    "no calls": (ANSWER | {"tool_calls": []}, [ANSWER]),
    "null part fields": (ANSWER | {"content": [{"type": "text", "text": ANSWER["content"], "image_url": None}]}, [ANSWER]),
    "chatgpt": ({"from": "chatgpt", "value": ANSWER["content"]}, [ANSWER]),
    "bing": ({"from": "bing", "value": ANSWER["content"]}, [ANSWER]),
    "bard": ({"from": "bard", "value": ANSWER["content"]}, [ANSWER]),
    "null call fields": (
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": None}]},
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
    ),
    "weight 0 of others": ({"role": "tool", "content": "b", "weight": 0}, [{"role": "tool", "content": "b"}]),
    "weight 0.0 of others": ({"from": "human", "value": "b", "weight": 0.0}, [{"role": "user", "content": "b"}]),
}


@pytest.mark.parametrize("name", READABLE)
def test_what_logs_and_public_data_sets_write_is_read(name, tmp_path, caplog):
    message, plain = READABLE[name]
    tokenizer = byte_level_tokenizer()
    expected = rows_of(write_jsonl(tmp_path / "plain.jsonl", [{"messages": [USER, *plain, ANSWER]}]), tokenizer)
    assert rows_of(write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, message, ANSWER]}]), tokenizer) == expected
    assert "does not use" not in caplog.text


def test_arguments_of_calls_keep_their_nulls(tmp_path):
    tokenizer = byte_level_tokenizer()
    row = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    [(ids, _)] = rows_of(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer)
    assert '{"road": null}' in tokenizer.decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_chat_that_begins_with_the_assistant_is_read_and_its_first_turn_counted(kind, tmp_path, caplog):
    tokenizer = TOKENIZERS[kind]()
    turns = [{"role": "assistant", "content": "a road"}, USER, {"role": "assistant", "content": "the north"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}] * 3)
    found = rows_of(path, tokenizer)
    assert [learned(tokenizer, row).strip() for row in found] == [learned(tokenizer, found[0]).strip()] * 3
    assert "the north" in learned(tokenizer, found[0]) and "a road" not in learned(tokenizer, found[0])
    assert f"{path}:1 and 2 other rows: the chat begins with a turn of the assistant" in caplog.text


EMPTY_ANSWERS = {
    "alpaca": ({"instruction": "a", "input": "", "output": "b"}, "output"),
    "texts": ({"prompt": "a", "completion": " b"}, "completion"),
    "messages": ({"prompt": [USER], "completion": [ANSWER]}, "completion"),
}


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("empty", [None, "", " "])
@pytest.mark.parametrize("form", EMPTY_ANSWERS)
def test_rows_without_an_answer_are_left_out_alike_in_every_file(form, empty, suffix, tmp_path, caplog):
    row, column = EMPTY_ANSWERS[form]
    rows = [row, row | {column: empty}, row]
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write_jsonl(path, rows)
    else:
        if form == "messages":  # the other answers are JSON texts, because a column has one type
            rows = [
                {key: value if isinstance(value, str | None) else json.dumps(value) for key, value in r.items()} for r in rows
            ]
        table = datasets.Dataset.from_list(rows)
        table.to_csv(path) if suffix == "csv" else table.to_parquet(path)
    tokenizer = byte_level_tokenizer()
    whole = rows_of(write_jsonl(tmp_path / "whole.jsonl", [row, row]), tokenizer)
    assert rows_of(path, tokenizer) == whole and len(whole) == 2
    assert "1 rows without an answer are left out; the first is" in caplog.text


def test_text_that_is_json_and_no_messages_stays_text(tmp_path):
    tokenizer = byte_level_tokenizer()
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": '[{"name": "a"}]', "completion": '["b"]'}])
    [(ids, _)] = rows_of(path, tokenizer)
    assert tokenizer.decode(ids) == '<s>[{"name": "a"}]["b"]</s>'


READS_ARGUMENT = CHATML + "{%- if add_generation_prompt and thinks is defined and thinks is false %}{{- '<no>' }}{%- endif %}"
READS_DOCUMENTS = CHATML.replace("{{- bos_token }}", "{{- bos_token }}{%- for d in documents or [] %}{{- d.title }}{%- endfor %}")
ARGUMENTS: dict[str, tuple[str, dict[str, Any], str]] = {  # a template, the arguments of the rows, and what is not used
    "read": (READS_ARGUMENT, {"thinks": False}, ""),
    "the default": (READS_ARGUMENT, {"thinks": True}, ""),
    "not read": (CHATML, {"thinks": False}, "'thinks'"),
    "names of functions": (CHATML, {"chat": 1, "function": 2}, "'function'"),
    "documents": (READS_DOCUMENTS, {"documents": [{"title": "t", "text": "u"}]}, ""),
    "documents, not read": (CHATML, {"documents": [{"title": "t", "text": "u"}]}, "'documents'"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_the_template_does_not_read_is_named(name, tmp_path, caplog):
    template, arguments, unused = ARGUMENTS[name]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER], "chat_template_kwargs": arguments}] * 2)
    assert len(rows_of(path, byte_level_tokenizer(template))) == 2
    assert ("does not use" in caplog.text) == bool(unused)
    assert f"does not use {unused} of chat_template_kwargs (2 rows)" in caplog.text or not unused


FAULTS = {
    "key": "{{ {}['a'] + 1 }}",
    "attribute": "{{ message.content.nothing.more }}",
    "index": "{{ '{} {}'.format(1) }}",
    "division": "{{ 1 / 0 }}",
    "overflow": "{{ 2.0 ** 100000 }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "raised": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
def test_whatever_a_template_raises_is_one_line_with_the_row(fault, template, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER]}, {"messages": [USER, USER, ANSWER]}])
    faulty = "{% if messages[1].role == 'user' %}{% set message = messages[0] %}" + FAULTS[fault] + "{% endif %}" + template
    assert f"{path}:2 is not what the model's chat template takes" in refusal(path, byte_level_tokenizer(faulty))


def by_prefixes(messages: list[dict[str, Any]], tokenizer: Any) -> tuple[list[int], list[int]]:
    """The labels by the tokens of each turn's prompt and of its end."""

    def tokens(number: int, *, prompt: bool = False) -> list[int]:
        text = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=prompt)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    ids = tokens(len(messages))
    labels = [IGNORED] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = len(tokens(number, prompt=True))
        end = next((i for i, pair in enumerate(zip(ids, tokens(number + 1), strict=False)) if pair[0] != pair[1]), None)
        end = min(len(ids), len(tokens(number + 1))) if end is None else end
        labels[start:end] = ids[start:end]
    return ids, labels


def trimming_tokenizer(template: str) -> Any:
    """A tokenizer that leaves a space out of the characters of its token, as GPT-2's and Llama 3's do."""
    tokenizer = byte_level_tokenizer(template)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def python_tokenizer(template: str) -> Any:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = template
    return tokenizer


ENDS_WITH_SPACE = CHATML.replace("'<|im_end|>\\n'", "'<|im_end|> '")
EOS_ELSE = CHATML + "{%- if not add_generation_prompt %}{{- eos_token }}{%- endif %}"  # as Phi-3.5 writes it
NEXT_LIKE_EOS = EOS_ELSE.replace("<|im_start|>", "</1")  # the next turn begins as EOS does
EOS_AT_THE_END = CHATML + "{%- if messages[-1].role == 'assistant' and not add_generation_prompt %}{{- eos_token }}{%- endif %}"


TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "space": ENDS_WITH_SPACE,
    "eos": EOS_AT_THE_END,
    "eos else": EOS_ELSE,
    "like eos": NEXT_LIKE_EOS,
    "one token across turns": CHATML.replace("<|im_end|>\\n", "<|im_end|> nor").replace("'<|im_start|>", "'th<|im_start|>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", [*TOKENIZERS, "trimming", "python"])
def test_labels_are_those_of_tokenized_prefixes(kind, name, tmp_path):
    template = TEMPLATES[name]
    make = {**TOKENIZERS, "trimming": trimming_tokenizer, "python": python_tokenizer}[kind]
    tokenizer = make(template.replace("bos_token", "(bos_token or '')"))
    rows = make_chats(15, seed=3, system=template != LLAMA2)
    expected = [by_prefixes(row["messages"], tokenizer) for row in rows]
    assert rows_of(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer) == expected
    assert tokenizer.is_fast == (kind != "python")


@pytest.mark.parametrize("template", [CHATML, DROPS_THOUGHTS], ids=["by prefixes", "by places"])
def test_a_chat_of_many_turns_is_tokenized_once(template, tmp_path, monkeypatch):
    tokenizer = byte_level_tokenizer(template)
    messages = make_chats(1)[0]["messages"][-2:] * 40
    num_whole = len(tokenizer.apply_chat_template(messages, tokenize=False))
    sizes = []
    call = type(tokenizer).__call__

    def counted(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
        sizes.append(len(text) if isinstance(text, str) else sum(map(len, text)))
        return call(self, text, *arguments, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    rows_of(write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}]), tokenizer)
    assert num_whole <= sum(sizes) < 2 * num_whole


def test_the_parts_that_a_template_does_not_use_are_not_tried_in_every_row(tmp_path, monkeypatch, caplog):
    calls = []
    write = TemplateWriter.write
    monkeypatch.setattr(TemplateWriter, "write", lambda *arguments, **options: calls.append(1) or write(*arguments, **options))
    tokenizer = byte_level_tokenizer(MARKED)
    row = {"messages": [USER | {"mood": "good"}, ANSWER], "chat_template_kwargs": {"thinks": True}}
    counts = []
    for number in (200, 400):
        calls.clear()
        rows_of(write_jsonl(tmp_path / f"{number}.jsonl", [row] * number), tokenizer)
        counts.append(len(calls))
        assert f"'mood' of the messages ({number} rows)" in caplog.text and f"({number} rows)" in caplog.text
    assert counts[0] > 0 and counts[1] == counts[0]  # the marked text itself is written by another function


@pytest.mark.parametrize("length", [0, 1, 7, 1000])
def test_num_shared_counts_one_character_after_another(length):
    for first in ("a" * length, "a" * length + "b", "a" * length + "bc"):
        for second in ("a" * length, "a" * length + "c", "a" * length + "bd"):
            expected = 0
            while expected < min(len(first), len(second)) and first[expected] == second[expected]:
                expected += 1
            assert num_shared(first, second) == expected == num_shared(list(first), list(second))
