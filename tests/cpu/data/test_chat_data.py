"""Chats, and prompts with completions, as training data: each token and each label against transformers' own chat templates."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_models import (
    CHATML,
    DROPS_THOUGHTS,
    HEADER,
    LLAMA2,
    MARKED,
    TOKENIZERS,
    Rows,
    byte_level_tokenizer,
    make_chats,
    refusal,
    rows_of,
    save_model,
    words,
    write_jsonl,
)
from typer.testing import CliRunner

from upshift.cli.main import app
from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.training.batches.layout import Layout
from upshift.training.batches.sampler import BatchSource
from upshift.training.data import chat_template, chat_tokens
from upshift.training.data.corpus import read_corpus
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import DataOptions
from upshift.training.data.dataset import load_data, prepare_data, read_whole_documents, save_data
from upshift.training.data.rows.token_rows import IGNORED

CALL = {"type": "function", "function": {"name": "find", "arguments": {"count": 2, "road": "north"}}}
TOOL = {
    "type": "function",
    "function": {"name": "find", "parameters": {"type": "object", "properties": {"road": {"type": "string"}}}},
}
WITH_TOOLS = {
    "tools": [TOOL],
    "messages": [
        {"role": "user", "content": "which road"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "the north"},
        {"role": "assistant", "content": "the road to the north"},
    ],
}


def reference(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """What transformers makes of a chat, with the labels by the marks of the template."""
    encoded = tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    return list(encoded["input_ids"]), [token if is_learned else IGNORED for token, is_learned in pairs]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prefixes", "by marks"])
def test_ids_and_labels_equal_those_of_transformers(template, tmp_path):
    rows = [*make_chats(40), WITH_TOOLS]
    tokenizer = byte_level_tokenizer(template)
    found = rows_of(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)
    assert found == [reference(row, tokenizer) for row in rows]
    assert all(ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id for ids, _ in found)
    assert all(0 < sum(label != IGNORED for label in labels) < len(ids) for ids, labels in found)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_marks_and_prefixes_agree_for_every_kind_of_tokenizer(kind, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_chats(60, seed=1))
    by_marks = rows_of(path, TOKENIZERS[kind](MARKED))
    assert by_marks == rows_of(path, TOKENIZERS[kind](CHATML)) and len(by_marks) == 60


def test_marks_hold_where_tokens_leave_white_space_out(tmp_path):
    """The marked part begins and ends with a character that belongs to no token: transformers' own mask then runs on."""
    marked = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %} {{ m.content }} \n{% endgeneration %}"
    marked += "{% else %}{{ m.content }} ? {% endif %}{% endfor %}"
    tokenizer = TOKENIZERS["words"](marked)
    turns = [("user", "every road"), ("assistant", "the north"), ("user", "trees"), ("assistant", "a short answer")]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": role, "content": text} for role, text in turns]}])
    [(_, labels)] = rows_of(path, tokenizer)
    assert tokenizer.decode([label for label in labels if label != IGNORED]) == "the north a short answer"


def test_all_tokens_are_learned_if_the_user_says_so(tmp_path):
    rows = make_chats(20)
    tokenizer = byte_level_tokenizer()
    expected = [reference(row, tokenizer)[0] for row in rows]
    found = rows_of(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer, loss_on="all")
    assert found == [(ids, ids) for ids in expected]


def test_a_turn_of_weight_0_is_not_learned(tmp_path):
    [row] = [row for row in make_chats(40) if len(row["messages"]) == 4][:1]
    weighted = {"messages": [dict(message) for message in row["messages"]]}
    weighted["messages"][1]["weight"] = 0
    first = {"messages": row["messages"][:2]}
    for template in (CHATML, MARKED):
        tokenizer = byte_level_tokenizer(template)
        ids, labels = reference(row, tokenizer)
        end = len(reference(first, tokenizer)[0])
        [found] = rows_of(write_jsonl(tmp_path / "a.jsonl", [weighted]), tokenizer)
        assert found == (ids, [IGNORED] * end + labels[end:]) and labels[:end] != [IGNORED] * end
        assert "weight 0" in refusal(tmp_path / "a.jsonl", tokenizer, loss_on="all")


def test_a_template_without_a_prompt_for_the_assistant_is_learned_from_the_space_on(tmp_path):
    tokenizer = TOKENIZERS["sentences"](LLAMA2)
    row = {"messages": [{"role": "user", "content": "every road"}, {"role": "assistant", "content": "the north"}]}
    [(_, labels)] = rows_of(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer)
    assert tokenizer.decode([label for label in labels if label != IGNORED]).strip() == "the north</s>"


def test_turns_that_are_written_in_another_way_when_others_follow_are_learned_as_the_whole_chat_has_them(tmp_path):
    tokenizer = byte_level_tokenizer(DROPS_THOUGHTS)
    row = next(row for row in make_chats(30) if len(row["messages"]) >= 4)
    answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    [(ids, labels)] = rows_of(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
    learned = tokenizer.decode([label for label in labels if label != IGNORED])
    assert learned == "".join(f"{answer}<|im_end|>\n" for answer in answers[:-1]) + f"<think></think>{answers[-1]}<|im_end|>\n"


@pytest.mark.parametrize("template", [CHATML, LLAMA2], ids=["chatml", "llama2"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_places_and_prefixes_say_the_same(kind, template, tmp_path, monkeypatch):
    """Where a template writes each turn in one way, both ways to find it must agree."""
    path = write_jsonl(tmp_path / "a.jsonl", make_chats(20, system=template == CHATML))
    tokenizer = TOKENIZERS[kind](template)
    by_prefixes = rows_of(path, tokenizer)
    monkeypatch.setattr(chat_tokens.ChatEncoder, "_find_span", lambda *arguments: None)
    assert rows_of(path, tokenizer) == by_prefixes


def test_a_turn_that_cannot_be_found_is_refused(tmp_path):
    """A template may write more of the content than stands in the chat, or nothing before the turn that it would write there."""
    shouts = DROPS_THOUGHTS.replace("(message.content or '')", "(message.content or '') | upper")
    rows = [{"messages": make_chats(1)[0]["messages"][-2:]}, next(row for row in make_chats(30) if len(row["messages"]) >= 4)]
    message = refusal(write_jsonl(tmp_path / "a.jsonl", rows), byte_level_tokenizer(shouts))
    assert f"{tmp_path / 'a.jsonl'}:2" in message and "--loss-on all" in message


FOUR = ("which road", "the north", "a river", "beside it")  # the contents of two questions and their answers


def test_an_answer_that_the_template_leaves_out_is_said_and_no_reason_to_refuse(tmp_path, caplog):
    """A message of another role is refused, because the user gave it to be read."""
    say_once.cache_clear()
    forgets = (
        "{% for message in messages %}{% if loop.last or message.role != ROLE %}{{ message.content }};{% endif %}{% endfor %}"
    )
    row = {"messages": [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, FOUR, strict=True)]}
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    tokenizer = byte_level_tokenizer(forgets.replace("ROLE", "'assistant'"))
    [(ids, _)] = rows_of(path, tokenizer, loss_on="all")
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert "leaves out or changes a part of 'content' of the assistant's messages" in caplog.text
    assert "does not write message 1, of role 'user'" in refusal(path, byte_level_tokenizer(forgets.replace("ROLE", "'user'")))


def test_a_turn_that_begins_where_the_text_before_it_ends_is_found(tmp_path):
    """So it is in a template that writes the contents alone, and thoughts of the last answer only."""
    bare = (
        "{% for message in messages %}{% if message.role == 'assistant' and loop.last %}{{ '~' }}{% endif %}"
        "{{ message.content + ';' }}{% endfor %}"
    )
    row = {"messages": [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, FOUR, strict=True)]}
    tokenizer = byte_level_tokenizer(bare)
    [(ids, labels)] = rows_of(write_jsonl(tmp_path / "a.jsonl", [row]), tokenizer)
    contents = [message["content"] for message in row["messages"]]
    assert tokenizer.decode(ids) == f"{contents[0]};{contents[1]};{contents[2]};~{contents[3]};"
    assert tokenizer.decode([label for label in labels if label != IGNORED]) == f"{contents[1]};~{contents[3]};"


def test_contents_are_given_as_parts_to_a_template_that_takes_nothing_else(tmp_path):
    """Some templates go through the parts of a content. Of a text they would write nothing, and say nothing."""
    parts = "{%- for part in message.content %}{%- if part.type == 'text' %}{{- part.text }}{%- endif %}{%- endfor %}"
    takes_parts = CHATML.replace("{{- (message.content or '') + '<|im_end|>\\n' }}", parts + "{{- '<|im_end|>\\n' }}")
    assert takes_parts != CHATML
    rows = make_chats(10)
    found = rows_of(write_jsonl(tmp_path / "a.jsonl", rows), byte_level_tokenizer(takes_parts))
    assert found == [reference(row, byte_level_tokenizer()) for row in rows]
    needs_one = takes_parts.replace(HEADER, HEADER + "{%- if message.content[0].type == 'image' %}{{- ':' }}{%- endif %}")
    assert needs_one != takes_parts and rows_of(tmp_path / "a.jsonl", byte_level_tokenizer(needs_one)) == found
    silent = CHATML.replace("(message.content or '')", "''")
    assert "does not write the content" in refusal(tmp_path / "a.jsonl", byte_level_tokenizer(silent))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as the kind of file that the suffix names."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
    elif path.suffix == ".hub":  # as load_dataset reads JSON lines: objects of different keys become the type Json
        source = write_jsonl(path.with_suffix(".jsonl"), rows)
        loaded = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(path.parent / "cache"))
        loaded.save_to_disk(path)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def sharegpt(row: dict[str, Any]) -> dict[str, Any]:
    speakers = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in row["messages"]]}


def alpaca(row: dict[str, Any]) -> dict[str, Any]:
    question, _, details = row["messages"][0]["content"].partition(" ")
    return {"instruction": question, "input": details, "output": row["messages"][1]["content"]}


def single(number: int) -> list[dict[str, Any]]:
    return [{"messages": row["messages"][:2]} for row in make_chats(number, system=False)]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".saved", ".hub"])
@pytest.mark.parametrize("form", ["messages", "conversations", "tools", "parts", "alpaca", "system", "prompts"])
def test_every_form_in_every_file_gives_the_same_tokens(form, suffix, tmp_path):
    tokenizer = byte_level_tokenizer()
    rows = make_chats(12, seed=2)
    if form == "tools":
        other = json.loads(json.dumps(WITH_TOOLS).replace("road", "river"))
        rows = [WITH_TOOLS, other, WITH_TOOLS]
        written = rows
    elif form == "parts":
        written = [
            {"messages": [m | {"content": [{"type": "text", "text": c} for c in m["content"]]} for m in row["messages"]]}
            for row in rows
        ]
    elif form == "conversations":
        written = [sharegpt(row) for row in rows]
    elif form == "system":
        rows = [{"messages": [{"role": "system", "content": "north"}, *row["messages"]]} for row in make_chats(9, system=False)]
        written = [
            {"system": "north", "conversations": sharegpt({"messages": row["messages"][1:]})["conversations"]} for row in rows
        ]
    elif form == "alpaca":
        written = [alpaca(row) for row in single(12)]
        texts = [("\n".join(filter(None, (row["instruction"], row["input"]))), row["output"]) for row in written]
        rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in texts]
    elif form == "prompts":
        rows = [{"messages": row["messages"][-2:]} for row in rows]
        written = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    else:
        written = rows
    path = write(tmp_path / f"a{suffix}", [row | {"id": "7"} for row in written])
    assert rows_of(path, tokenizer) == [reference(row, tokenizer) for row in rows]


def test_tool_calls_are_used_as_objects_and_as_json_texts(tmp_path):
    """OpenAI writes the arguments of a call as a JSON text, ShareGPT the whole call as the text of a turn."""
    tokenizer = byte_level_tokenizer()
    expected = [reference(WITH_TOOLS, tokenizer)]
    texts = json.loads(json.dumps(WITH_TOOLS))
    texts["messages"][1]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL["function"]["arguments"])
    assert rows_of(write_jsonl(tmp_path / "a.jsonl", [texts]), tokenizer) == expected
    speakers = [("human", "which road"), ("function_call", json.dumps(CALL["function"])), ("observation", "the north")]
    turns = [{"from": speaker, "value": text} for speaker, text in (*speakers, ("gpt", "the road to the north"))]
    row = {"conversations": turns, "tools": json.dumps([TOOL])}
    assert rows_of(write_jsonl(tmp_path / "b.jsonl", [row]), tokenizer) == expected
    takes_text = CHATML.replace("(call.function.arguments | tojson)", "call.function.arguments + ''")
    [(ids, _)] = rows_of(write_jsonl(tmp_path / "c.jsonl", [WITH_TOOLS]), byte_level_tokenizer(takes_text))
    assert '<call>{"count": 2, "road": "north"}' in tokenizer.decode(ids)


def test_functions_are_read_as_tools(tmp_path):
    """OpenAI's API had functions before it had tools."""
    row = json.loads(json.dumps(WITH_TOOLS))
    row["functions"] = [tool["function"] for tool in row.pop("tools")]
    [call] = row["messages"][1].pop("tool_calls")
    row["messages"][1]["function_call"] = call["function"]
    row["messages"][2]["role"] = "function"
    row["messages"][0]["function_call"] = {"name": None, "arguments": None}  # as Arrow writes none
    tokenizer = byte_level_tokenizer()
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    assert rows_of(path, tokenizer) == [reference(WITH_TOOLS, tokenizer)]
    both = {"messages": [WITH_TOOLS["messages"][0], WITH_TOOLS["messages"][1] | {"function_call": CALL["function"]}]}
    assert "has function_call and tool_calls" in refusal(write_jsonl(path, [both]), tokenizer)
    twice = row | {"tools": WITH_TOOLS["tools"]}
    assert "tools and functions" in refusal(write_jsonl(path, [twice]), tokenizer)


def test_the_system_column_stands_before_a_prompt(tmp_path):
    tokenizer = byte_level_tokenizer()
    system = {"role": "system", "content": "north"}
    in_column = {"prompt": [USER], "completion": [ANSWER], "system": "north"}
    in_prompt = {"prompt": [system, USER], "completion": [ANSWER]}
    paths = [write_jsonl(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate((in_column, in_prompt))]
    assert rows_of(paths[0], tokenizer) == rows_of(paths[1], tokenizer)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_only_the_completion_is_learned_and_bos_and_eos_stand_once(kind, tmp_path):
    tokenizer = TOKENIZERS[kind](None)
    draws = random.Random(3)
    pairs = [(words(draws, 5), " " + words(draws, 4)) for _ in range(20)] + [("the north", " a road</s>")]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": answer} for prompt, answer in pairs])
    bos = [tokenizer.bos_token_id] if kind == "bytes" else []  # the other two add none of themselves
    for (ids, labels), (prompt, answer) in zip(rows_of(path, tokenizer), pairs, strict=True):
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer_ids = tokenizer(answer.removesuffix("</s>"), add_special_tokens=False)["input_ids"]
        assert ids == [*bos, *prompt_ids, *answer_ids, tokenizer.eos_token_id]
        assert labels == [IGNORED] * len(bos + prompt_ids) + ids[len(bos + prompt_ids) :]


def test_a_completion_that_merges_with_the_prompt_is_learned_from_the_first_other_token(tmp_path, caplog):
    tokenizer = byte_level_tokenizer(None)
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "the ans", "completion": "wer"}])
    [(ids, labels)] = rows_of(path, tokenizer)
    whole = tokenizer("the answer")["input_ids"]
    assert ids == [*whole, tokenizer.eos_token_id]
    assert tokenizer.decode([label for label in labels if label != IGNORED]) == " answer</s>"
    assert f"{path}:1" in caplog.text


USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
ROLE = ("role", pa.string())
CONTENT = ("content", pa.dictionary(pa.int32(), pa.string()))
DEEP = "[" * 100_000  # more than Python's JSON reader follows
BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "role": ({"messages": [USER, {"role": "asistant", "content": "b"}]}, "system, developer, user, assistant, tool"),
    "no role": ({"messages": [USER, {"content": "b"}]}, "role"),
    "speaker": ({"messages": [{"from": "martian", "value": "b"}]}, "human"),
    "image part": ({"messages": [{"role": "user", "content": [IMAGE]}, ANSWER]}, "image_url"),
    "audio part": ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}, ANSWER]}, "input_audio"),
    "image column": ({"messages": [USER, ANSWER], "images": ["a.png"]}, "images"),
    "content": ({"messages": [USER, {"role": "assistant", "content": 7}]}, "must be text"),
    "no content": ({"messages": [USER, {"role": "assistant"}]}, "must be text"),
    "text": ({"messages": "hello"}, "must be a list"),
    "number": ({"messages": 3}, "must be a list"),
    "object": ({"messages": USER}, "must be a list"),
    "texts": ({"messages": ["a", "b"]}, "role"),
    "numbers": ({"messages": [1, 2]}, "role"),
    "missing": ({"text": "a"}, "no column 'messages'"),
    "surrogate": ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "surrogate"),
    "no value": ({"messages": [USER, {"from": "gpt", "value": None}]}, "no 'value'"),
    "no speaker": ({"messages": [USER, {"value": "b"}]}, "no 'from'"),
    "speakers": ({"messages": [{"from": ["human"], "value": "a"}, ANSWER]}, "human"),
    "tools": ({"messages": [USER, ANSWER], "tools": "none"}, "tools"),
    "tool names": ({"messages": [USER, ANSWER], "tools": ["f"]}, "JSON schemas"),
    "calls": ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": 1}]}]}, "tool_calls"),
    "weight": ({"messages": [USER | {"weight": 1}, ANSWER]}, "weight"),
    "half weight": ({"messages": [USER, ANSWER | {"weight": 0.5}]}, "weight"),
    "two systems": ({"messages": [{"role": "system", "content": "s"}, USER, ANSWER], "system": "t"}, "system"),
    "system": ({"messages": [USER, ANSWER], "system": 5}, "must be text"),
    "deep messages": ({"messages": DEEP}, "must be a list"),
    "deep tools": ({"messages": [USER, ANSWER], "tools": DEEP}, "must be a list"),
    "deep tool": ({"messages": [USER, ANSWER], "tools": [DEEP]}, "JSON schemas"),
}
for argument in ("tokenize", "chat_template", "continue_final_message", "truncation", "max_length", "return_tensors", "messages"):
    BAD_ROWS[argument] = ({"messages": [USER, ANSWER], "chat_template_kwargs": {argument: "x"}}, argument)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_refused_with_its_place(name, suffix, template, tmp_path):
    row, reason = BAD_ROWS[name]
    path = write(tmp_path / f"a{suffix}", [{"messages": [USER, ANSWER]}, row])
    message = refusal(path, byte_level_tokenizer(template))
    assert reason in message and (f"{path}:2" in message or f"{path} (record 2)" in message)


PARQUET_TABLES: dict[str, tuple[Any, str]] = {  # tables, and the reason of the refusal or nothing
    "lists of numbers": (pa.table({"messages": [[1, 2], [3]]}), "must be a list"),
    "numbers of an image": (pa.table({"messages": [[USER, ANSWER]], "images": [[1.5, 2.0]]}), "images"),
    "nulls": (pa.table({"messages": pa.nulls(2)}), "2 empty"),
    "maps": (
        pa.table({"messages": pa.array([[[("role", "user"), ("content", "a")]]], pa.list_(pa.map_(pa.string(), pa.string())))}),
        "message 1 of messages",
    ),
    "large lists and dictionaries": (
        pa.table({"messages": pa.array([[USER, ANSWER]], pa.large_list(pa.struct([("role", pa.large_string()), CONTENT])))}),
        "",
    ),
    "lists of one size": (pa.table({"messages": pa.array([[USER, ANSWER]], pa.list_(pa.struct([ROLE, CONTENT]), 2))}), ""),
    "bytes": (pa.table({"prompt": [b"\xff"], "completion": ["a"]}), "two texts"),
}


@pytest.mark.parametrize("name", PARQUET_TABLES)
def test_every_type_of_column_is_used_or_refused(name, tmp_path):
    table, reason = PARQUET_TABLES[name]
    pq.write_table(table, tmp_path / "a.parquet")
    if reason:
        assert reason in refusal(tmp_path / "a.parquet", byte_level_tokenizer())
    else:
        expected = [reference({"messages": [USER, ANSWER]}, byte_level_tokenizer())]
        assert rows_of(tmp_path / "a.parquet", byte_level_tokenizer()) == expected


BAD_TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "two formats": ({"messages": [USER, ANSWER], "text": "a"}, "--data-format text or --data-format messages"),
    "ids and chats": ({"messages": [USER, ANSWER], "input_ids": [1, 2]}, "--data-format input_ids"),
    "alpaca's text": ({"instruction": "a", "output": "b", "text": "ab"}, "--data-format alpaca"),
    "preferences": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences (chosen and rejected)"),
    "chosen chats": ({"messages": [USER, ANSWER], "chosen": [ANSWER], "rejected": [ANSWER]}, "add --data-format messages"),
    "good or bad": ({"prompt": "a", "completion": "b", "label": False}, "completion and label"),
    "mixed": ({"prompt": "a", "completion": [ANSWER]}, "two lists of messages"),
    "mixed, as JSON": ({"prompt": json.dumps([USER]), "completion": "b"}, "two lists of messages"),
    "texts with a system message": ({"prompt": "a", "completion": "b", "system": "c"}, "'system'"),
    "messages as rows": (USER, '{"messages": [..]}'),
    "turns as rows": ({"from": "human", "value": "a"}, '{"conversations": [..]}'),
    "as Python prints it": ({"messages": str([USER, ANSWER])}, "json.dumps"),
    "texts with tools": ({"prompt": "a", "completion": "b", "tools": [TOOL]}, "'tools'"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_a_table_that_can_be_read_in_two_ways_or_none_is_refused(name, tmp_path):
    row, reason = BAD_TABLES[name]
    assert reason in refusal(write_jsonl(tmp_path / "a.jsonl", [row, row]), byte_level_tokenizer())


def test_a_named_format_decides(tmp_path):
    tokenizer = byte_level_tokenizer()
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER], "text": "abc"}])
    assert rows_of(path, tokenizer, data_format="messages") == [reference({"messages": [USER, ANSWER]}, tokenizer)]
    assert rows_of(path, tokenizer, data_format="text") == rows_of(path, tokenizer, text_column="text")
    for options in ({"data_format": "alpaca"}, {"data_format": "chat"}, {"data_format": "text", "text_column": "text"}):
        assert "--data-format" in refusal(path, tokenizer, **options)


@pytest.mark.parametrize("part", ["tools", "tool_calls"])
def test_a_template_that_ignores_tools_is_refused_and_other_fields_are_named(part, tmp_path, caplog):
    plain = CHATML.replace("tools" if part == "tools" else "tool_calls", "nothing")
    message = refusal(write_jsonl(tmp_path / "a.jsonl", [WITH_TOOLS]), byte_level_tokenizer(plain))
    assert f"{tmp_path / 'a.jsonl'}:1 has '{part}'" in message
    rows_of(write_jsonl(tmp_path / "b.jsonl", [{"messages": [USER | {part + part: "x"}, ANSWER]}]), byte_level_tokenizer())
    assert f"{part + part!r} of the messages (1 rows)" in caplog.text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), byte_level_tokenizer())


def limited(rows: Rows, length: int, long_rows: str) -> Rows:
    """The sequences that are trained on, by plain Python: cut, split or dropped, and then those with something to learn."""
    pieces: Rows = []
    for ids, labels in rows:
        starts = range(0, len(ids), length) if long_rows == "split" else [0]
        if long_rows != "drop" or len(ids) <= length:
            pieces += [(ids[start : start + length], labels[start : start + length]) for start in starts]
    return [piece for piece in pieces if any(label != IGNORED for label in piece[1][1:])]


@pytest.mark.parametrize("long_rows", [None, "cut", "split", "drop"])
@pytest.mark.parametrize("loss_on", [None, "all"])
def test_each_learned_token_survives_cutting_padding_and_packing(long_rows, loss_on, model, tmp_path, caplog):
    rows = make_chats(50, seed=4)
    tokenizer = byte_level_tokenizer()
    write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    write_jsonl(tmp_path / "data" / "validation.jsonl", rows[:5])
    options = DataOptions(long_rows=long_rows, loss_on=loss_on)
    data = prepare_data(find_model(str(model)), tmp_path / "data", sequence_length=48, options=options)
    whole = [reference(row, tokenizer) for row in rows]
    num_long = sum(len(ids) > 48 for ids, _ in whole)
    assert num_long > 5 and f"{num_long} rows longer than 48 tokens" in caplog.text
    if loss_on == "all":
        whole = [(ids, ids) for ids, _ in whole]
    expected = limited(whole, 48, long_rows or "cut")
    save_data(data, tmp_path)
    for training in (data.training, load_data(tmp_path).training):
        spans = [(s, s + n) for s, n in zip(training.starts.tolist(), training.lengths.tolist(), strict=True)]
        labels = training.tokens if training.labels is None else training.labels
        assert [(training.tokens[s:e].tolist(), labels[s:e].tolist()) for s, e in spans] == expected
        learned = sorted(label for _, row in expected for label in row[1:] if label != IGNORED)
        for packing, flatten, micro_batch in ((False, False, 3), (True, False, 2), (True, True, 4)):
            layout = Layout(micro_batch=micro_batch, packing=packing, flatten=flatten, pad_multiple=8)
            source = BatchSource(sequences=training, global_batch=8, layout=layout)
            batches = source.batches()
            for _ in range(2):  # epochs
                found: list[int] = []
                for _ in range(source.batches_per_epoch):
                    batch = next(batches)
                    for micro in batch.micro_batches:
                        counted = micro.arrays["labels"][:, 1:]
                        found += counted[counted != IGNORED].tolist()
                        assert micro.num_label_tokens == np.count_nonzero(counted != IGNORED)
                assert sorted(found) == learned


def test_rows_without_a_token_to_learn_are_counted_and_left_out(model, tmp_path, caplog):
    rows = [*make_chats(6), {"messages": [USER]}, {"messages": [USER, ANSWER | {"weight": 0}]}, {"messages": None}]
    write_jsonl(tmp_path / "data" / "train.jsonl", rows)
    write_jsonl(tmp_path / "data" / "validation.jsonl", rows[:2])
    data = prepare_data(find_model(str(model)), tmp_path / "data", sequence_length=200)
    assert "2 sequences without a label to learn are left out" in caplog.text and len(data.training) == 6
    assert "1 empty or null rows" in caplog.text
    only = write_jsonl(tmp_path / "b.jsonl", [{"messages": [USER]}] * 3)
    with pytest.raises(RequestError, match="something to learn"):
        prepare_data(find_model(str(model)), only, sequence_length=64)


def test_planning_reads_the_lengths_of_chats(model, tmp_path):
    rows = make_chats(20, seed=5)
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    expected = [len(reference(row, byte_level_tokenizer())[0]) for row in rows]
    documents = read_whole_documents(find_model(str(model)), str(path), DataOptions())
    assert np.diff(documents.tokenized.offsets).tolist() == expected
    assert documents.histogram(200).num_tokens == sum(expected)


def test_loss_on_is_refused_where_it_says_nothing(model, tmp_path):
    source = find_model(str(model))
    text = write_jsonl(tmp_path / "a.jsonl", [{"text": "the north"}] * 4)
    with pytest.raises(RequestError, match="--loss-on assistant is for chats"):
        prepare_data(source, text, sequence_length=64, options=DataOptions(loss_on="assistant"))
    labelled = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [3, 4, 5], "labels": [-100, 4, 5]}] * 4)
    with pytest.raises(RequestError, match="--loss-on all learns all tokens"):
        prepare_data(source, labelled, sequence_length=64, options=DataOptions(loss_on="all"))
    chats = write_jsonl(tmp_path / "c.jsonl", make_chats(3))
    with pytest.raises(RequestError, match="no chat template"):
        prepare_data(source, chats, sequence_length=64, tokenizer=byte_level_tokenizer(None))


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env=environment or None, catch_exceptions=True)


def test_show_marks_what_is_learned_and_counts(model, tmp_path):
    rows = [{"messages": [USER, {"role": "assistant", "content": f"the north {number}"}]} for number in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    shown = run("data", "show", str(model), "--data", str(path), "--sequence-length", "200")
    assert shown.exit_code == 0, shown.output
    for number in range(3):
        assert f"<|im_start|>assistant\n[[the north {number}<|im_end|>\n]]" in shown.output
    assert "the north 3" not in shown.output and "60 rows" in shown.output
    pairs = [reference(row, byte_level_tokenizer()) for row in rows]
    learned = sum(label != IGNORED for _, labels in pairs[:59] for label in labels)
    assert f"{sum(len(ids) for ids, _ in pairs[:59]):,} tokens; trained on: {learned:,}" in shown.output
    everything = run("data", "show", str(model), "--data", str(path), "--loss-on", "all", "--rows", "1")
    assert "<s>[[<|im_start|>user" in everything.output
    assert run("data", "show", str(model), "--data", str(path), "--loss-on", "some").exit_code != 0


def test_arguments_of_a_call_that_nest_too_deeply_stay_text(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": ' + DEEP}}
    row = {"messages": [USER, {"role": "assistant", "content": "b", "tool_calls": [call]}]}
    documents = read_corpus(write(tmp_path / "a.jsonl", [row])).documents
    [chat] = list(documents)
    [message] = chat_template._convert_arguments(chat.messages[1:], as_text=False)
    assert message["tool_calls"][0]["function"]["arguments"].endswith(DEEP)


@pytest.mark.parametrize(("size", "held_out"), [(None, 1), (0, 0), (0.25, 3), (5, 5)])
def test_as_many_of_the_last_chats_are_held_out_as_the_user_says(size, held_out, model, tmp_path):
    rows = make_chats(12)
    source = find_model(str(model))
    data = prepare_data(source, write_jsonl(tmp_path / "a.jsonl", rows), sequence_length=128, options=DataOptions(eval_size=size))
    number = 0 if data.evaluation is None else len(data.evaluation)
    assert (len(data.training), number) == (12 - held_out, held_out)
    folder = tmp_path / "splits"
    for split in ("train", "validation"):
        write_jsonl(folder / f"{split}.jsonl", rows)
    if size is not None:
        with pytest.raises(RequestError, match="split validation is the evaluation data; leave --eval-size out"):
            prepare_data(source, folder, sequence_length=128, options=DataOptions(eval_size=size))
