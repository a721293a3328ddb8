"""Described data sets: ranges of rows, renamed columns, and templates whose parts are tokenized alone.

The references here build tokens from texts that are written out. They were compared with Axolotl's and LLaMA-Factory's own labels
on made rows of every template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, ReadInstruction
from helpers.chat_models import byte_level_tokenizer

from upshift.errors import RequestError
from upshift.training.data.data_options import DataOptions
from upshift.training.data.rows.joined import read_data
from upshift.training.data.rows.row_slice import read_split
from upshift.training.data.tokenizer import tokenize

IGNORED = -100
TOKENIZER = byte_level_tokenizer()


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def encode(data_sets: Any, **options: Any) -> list[tuple[list[int], list[int]]]:
    corpus = read_data(json.dumps(data_sets), DataOptions(**options), has_decoder=False)
    tokenized = tokenize(corpus.documents, TOKENIZER)
    borders = zip(tokenized.offsets[:-1], tokenized.offsets[1:], strict=True)
    labels = tokenized.tokens if tokenized.labels is None else tokenized.labels
    return [(tokenized.tokens[start:end].tolist(), labels[start:end].tolist()) for start, end in borders]


def tokens(*parts: str | tuple[str] | int) -> tuple[list[int], list[int]]:
    """The ids and labels of parts: a text, a text in a tuple, which is learned, or the id of a token that is learned."""
    ids: list[int] = []
    labels: list[int] = []
    for part in parts:
        text = part[0] if isinstance(part, tuple) else part
        added = [text] if isinstance(text, int) else TOKENIZER(text, add_special_tokens=False)["input_ids"]
        ids += added
        labels += [IGNORED] * len(added) if isinstance(part, str) else added
    return ids, labels


EOS = TOKENIZER.eos_token_id
BOS = TOKENIZER.bos_token


def test_an_alpaca_row_is_axolotls_prompt_then_the_answer_and_eos(tmp_path: Path) -> None:
    rows = [{"instruction": "Say {x}.", "input": "a tree", "output": "x"}, {"instruction": "Go", "input": "", "output": "north"}]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    opening = (
        f"{BOS}Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n"
    )
    short = f"{BOS}Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    first = f"{opening}### Instruction:\nSay {{x}}.\n\n### Input:\na tree\n\n### Response:\n"
    second = f"{short}### Instruction:\nGo\n\n### Response:\n"
    expected = [tokens(first, ("x",), EOS), tokens(second, ("north",), EOS)]
    assert encode([{"path": path, "template": "axolotl/alpaca"}]) == expected
    everything = encode([{"path": path, "template": "axolotl/alpaca", "loss_on": "all"}])
    assert everything == [(ids, ids) for ids, _ in expected]


def test_a_prompt_of_the_users_own_takes_the_columns_that_it_names(tmp_path: Path) -> None:
    rows = [{"q": "Where?", "a": "North", "about": "Be brief."}, {"q": "How?", "a": "By road", "about": None, "extra": "now"}]
    prompt = {
        "instruction": "{q}", "input": "{extra}", "output": "{a}", "with_input": "[{instruction}|{input}] ",
        "without_input": "[{instruction}] ", "system": "<{system}> ", "system_column": "about", "default_system": "none",
    }  # fmt: skip
    found = encode([{"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "prompt": prompt}])
    assert found == [
        tokens(f"{BOS}<Be brief.> [Where?] ", ("North",), EOS), tokens(f"{BOS}<none> [How?|now] ", ("By road",), EOS)
    ]  # fmt: skip


def test_turns_are_written_by_the_template_with_renamed_columns_fields_and_roles(tmp_path: Path) -> None:
    turns = [("me", "Hi"), ("bot", "Hello"), ("me", "Go"), ("bot", "North")]
    rows = [{"talk": [{"who": who, "says": says} for who, says in turns], "about": "Be brief."}]
    data_set = {
        "path": str(write_rows(tmp_path / "rows.jsonl", rows)), "format": "messages",
        "columns": {"messages": "talk", "system": "about"}, "message_fields": {"role": "who", "content": "says"},
        "roles": {"me": "user", "bot": "assistant"},
    }  # fmt: skip
    start, end = "<|im_start|>", "<|im_end|>"
    template = {"template": "llama-factory/yi"}
    assert encode([data_set | template]) == [
        tokens(
            f"{start}system\nBe brief.{end}\n", f"{start}user\nHi{end}\n{start}assistant\n", (f"Hello{end}\n",),
            f"{start}user\nGo{end}\n{start}assistant\n", (f"North{end}\n",),
        )
    ]  # fmt: skip
    assert encode([data_set | {"template": "llama-factory/default"}]) == [
        tokens(
            "System: Be brief.</s>", "\n", "Human: Hi</s>", "\nAssistant:", ("Hello",), EOS, ("\n",),
            "Human: Go</s>", "\nAssistant:", ("North",), EOS, ("\n",),
        )
    ]  # fmt: skip
    ids, labels = encode([data_set | {"template": "llama-factory/solar"}])[0]  # EOS is learned at the token after each answer
    first = tokens("### System:\nBe brief.\n\n", "### User:\nHi\n\n### Assistant:\n", ("Hello",))
    second = tokens("### User:\nGo\n\n### Assistant:\n", ("North",), EOS)
    assert ids == first[0] + second[0]
    assert labels == first[1] + [EOS, *second[1][1:]]


LONG_TALK = {"messages": [{"role": role, "content": word} for role, word in zip(["user", "assistant"] * 2, "abcd", strict=True)]}


@pytest.mark.parametrize("template", [None, "llama-factory/yi"])
def test_the_last_turn_alone_is_learned(template: str | None, tmp_path: Path) -> None:
    """The tokens stay, and the labels are those of the last answer."""
    completion = {"prompt": LONG_TALK["messages"][:1], "completion": LONG_TALK["messages"][1:]}
    data_set = {"path": str(write_rows(tmp_path / "rows.jsonl", [LONG_TALK, LONG_TALK])), "template": template}
    whole = encode([data_set])
    for (ids, labels), (all_ids, all_labels) in zip(encode([data_set | {"learned_turns": "last"}]), whole, strict=True):
        places = [place for place, label in enumerate(all_labels) if label != IGNORED]
        last_gap = max(place for place, following in zip(places, places[1:], strict=False) if following > place + 1)
        assert ids == all_ids and labels == [IGNORED] * (last_gap + 1) + all_labels[last_gap + 1 :]
    if template is None:
        prompted = {"path": str(write_rows(tmp_path / "completions.jsonl", [completion] * 2)), "learned_turns": "last"}
        assert encode([prompted]) == encode([data_set | {"learned_turns": "last"}])


def test_history_has_no_thoughts_and_eos_is_learned_where_llama_factory_learns_it(tmp_path: Path) -> None:
    talk = json.loads(json.dumps(LONG_TALK).replace('"b"', '"<seed:think>hm</seed:think>b"'))
    path = str(write_rows(tmp_path / "rows.jsonl", [talk]))
    [(ids, labels)] = encode([{"path": path, "template": "llama-factory/seed_oss", "learned_turns": "last"}])
    assert (ids, labels) == tokens(
        f"{BOS}user\na", "</s>", f"{BOS}assistant\n", "b</s>", f"{BOS}user\nc</s>", f"{BOS}assistant\n",
        ("<seed:think></seed:think>",), ("d",), EOS,
    )  # fmt: skip
    path = str(write_rows(tmp_path / "plain.jsonl", [LONG_TALK]))
    [(ids, labels)] = encode([{"path": path, "template": "llama-factory/solar", "learned_turns": "last"}])
    first = tokens("### User:\na\n\n### Assistant:\n", "b", "### User:\nc\n\n### Assistant:\n", ("d",), EOS)
    assert ids == first[0] and labels == [2, *first[1][1:]]


@pytest.mark.parametrize("other", [{"loss_on": "all"}, {"loss_on": "content"}, {"format": "preference"}], ids=str)
def test_the_last_turn_alone_is_no_answer_beside_others(other: dict[str, str], tmp_path: Path) -> None:
    path = str(write_rows(tmp_path / "rows.jsonl", [LONG_TALK]))
    with pytest.raises(RequestError, match="has learned_turns last and (loss_on|format)"):
        encode([{"path": path, "learned_turns": "last", **other}])


def test_a_pair_of_answers_has_the_prompt_of_an_instruction(tmp_path: Path) -> None:
    rows = [{"q": "Where?", "good": "North", "bad": "South"}]
    columns = {"instruction": "q", "chosen": "good", "rejected": "bad"}
    data_set = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "format": "preference", "columns": columns}
    found = encode([data_set | {"template": "llama-factory/default"}], objective="dpo")
    assert found == [
        tokens("Human: Where?</s>", "\nAssistant:", (answer,), EOS, ("\n",)) for answer in ("North", "South")
    ]  # fmt: skip


def test_a_pair_with_its_question_elsewhere_is_two_chats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"about": about, "q": "a", "good": "b", "bad": "c", "id": 1} for about in ("s", "", None)]
    columns = {"instruction": "q", "system": "about", "chosen": "good", "rejected": "bad"}
    described = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "format": "preference", "columns": columns}
    found = encode([described], objective="dpo")
    turn = [{"role": "user", "content": "a"}]
    systems = [[{"role": "system", "content": "s"}], [], []]
    chats = [
        {"prompt": [*system, *turn], **{name: [{"role": "assistant", "content": word}] for name, word in ANSWERS.items()}}
        for system in systems
    ]
    assert found == encode([{"path": str(write_rows(tmp_path / "chats.jsonl", chats))}], objective="dpo")
    assert [message for message in caplog.messages if "not used" in message] == [
        f"{tmp_path / 'rows.jsonl'}: columns that are not used: id"
    ]


ANSWERS = {"chosen": "b", "rejected": "c"}


@pytest.mark.parametrize("question", ["question", "instruction"])
def test_a_pair_of_texts_is_written_as_axolotls_type_writes_it(question: str, tmp_path: Path) -> None:
    template = "axolotl/chatml.intel" if question == "question" else "axolotl/llama3.default"
    start, end = ("<|im_start|>{}\n", "<|im_end|>\n")
    if question == "instruction":
        start, end = ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>")
    rows = [
        {question: "Go {where}?", "chosen": "North", "rejected": "No", "system": system, "n": 3} for system in ("Be brief.", None)
    ]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    found = encode([{"path": path, "format": "preference", "template": template}], objective="dpo")
    expected = []
    for system in (f"{start.format('system')}Be brief.{end}", ""):
        prompt = f"{BOS}{system}{start.format('user')}Go {{where}}?{end}{start.format('assistant')}"
        expected += [tokens(prompt, (answer + end.strip(),), EOS) for answer in ("North", "No")]
    assert found == expected


def test_answers_of_pairs_end_with_eos_in_place_of_the_templates_white_space(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "Where?"}], "chosen": "North", "rejected": "No"}]
    columns = {"columns": {"messages": "messages", "chosen": "chosen", "rejected": "rejected"}}
    data_set = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "format": "preference", **columns}
    prompt = f"{BOS}<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
    plain = encode([data_set], objective="dpo")
    assert plain == [tokens(prompt, (f"{answer}<|im_end|>\n",)) for answer in ("North", "No")]
    ended = encode([data_set | {"answer_ends": "eos"}], objective="dpo")
    assert ended == [tokens(prompt, (f"{answer}<|im_end|>",), EOS) for answer in ("North", "No")]


def test_thoughts_are_added_or_removed(tmp_path: Path) -> None:
    rows = [{"instruction": "Go", "output": "North"}, {"instruction": "Go", "output": "<think>\nhm\n</think>\n\nNorth"}]
    data_set = {"path": str(write_rows(tmp_path / "rows.jsonl", rows)), "template": "llama-factory/seed_oss"}
    opening = (f"{BOS}user\nGo</s>", f"{BOS}assistant\n")
    thoughts = "<seed:think></seed:think>"
    plain, other = encode([data_set])
    assert plain[0] == tokens(f"{BOS}user\nGo", "</s>", f"{BOS}assistant\n", (thoughts,), ("North",), EOS)[0]
    assert plain[1] == tokens(*opening, (thoughts,), ("North",), EOS)[1]
    assert other == tokens(*opening, (thoughts,), ("<think>\nhm\n</think>\n\nNorth",), EOS)
    assert encode([data_set | {"thinks": False}])[0] == tokens(*opening, thoughts, ("North",), EOS)


def test_segments_are_learned_as_they_say_and_stand_beside_chats(tmp_path: Path) -> None:
    segments = [{"label": False, "text": "Q: 1+1\nA:"}, {"label": True, "text": " 2</s>"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"segments": segments}])
    chats = write_rows(
        tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}]
    )
    expected = tokens("Q: 1+1\nA:", (" 2</s>",))
    chat = tokens(f"{BOS}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", ("Ho<|im_end|>\n",))
    whole = encode([{"path": str(rows)}, {"path": str(chats)}, {"path": str(chats), "loss_on": "all"}, {"path": str(rows)}])
    assert whole == [expected, chat, (chat[0], chat[0]), expected]


@pytest.mark.parametrize("loss_on", ["assistant-content", "content"])
def test_contents_are_learned_with_eos_where_the_template_writes_it(loss_on: str, tmp_path: Path) -> None:
    turn = "{{ '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}"
    tokenizer = byte_level_tokenizer(f"{{% for message in messages %}}{turn}{{% endfor %}}")
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}]
    corpus = read_data(write_rows(tmp_path / "rows.jsonl", rows), DataOptions(), has_decoder=False)
    tokenized = tokenize(corpus.documents, tokenizer, loss_on=loss_on)  # type: ignore[arg-type]
    question: tuple[Any, ...] = (("Hi",), EOS) if loss_on == "content" else ("Hi</s>",)
    ids, labels = tokens("<|im_start|>user\n", *question, "\n<|im_start|>assistant\n", ("Ho",), EOS, "\n")
    assert tokenized.tokens.tolist() == ids and tokenized.labels is not None
    assert tokenized.labels.tolist() == labels


ROLES_AND_ENDS: dict[str, tuple[dict[str, Any], list[Any]]] = {  # keys, and the parts of the row from the first content on
    "user": ({"learned_roles": ["user"]}, [("Hi",), EOS, "!\n", "Ho</s>!\n", ("Go",), EOS, "!\n", "No</s>!\n"]),
    "all ends": ({"learned_ends": "all"}, ["Hi", EOS, "!\n", ("Ho",), EOS, "!\n", "Go", EOS, "!\n", ("No",), EOS, "!\n"]),
    "last end": ({"learned_ends": "last"}, ["Hi</s>!\n", ("Ho",), "</s>!\n", "Go</s>!\n", ("No",), EOS, "!\n"]),
    "no end": ({"learned_ends": "none"}, ["Hi</s>!\n", ("Ho",), "</s>!\n", "Go</s>!\n", ("No",), "</s>!\n"]),
    "own end": ({"turn_ends": ["!"]}, ["Hi</s>!\n", ("Ho",), EOS, ("!",), "\n", "Go</s>!\n", ("No",), EOS, ("!",), "\n"]),
}


@pytest.mark.parametrize("case", ROLES_AND_ENDS)
def test_the_roles_and_the_ends_of_turns_that_a_data_set_names_are_learned(case: str, tmp_path: Path) -> None:
    keys, parts = ROLES_AND_ENDS[case]
    tokenizer = byte_level_tokenizer("{% for message in messages %}{{ message.content + eos_token + '!\n' }}{% endfor %}")
    talk = [{"role": ["user", "assistant"][number % 2], "content": word} for number, word in enumerate(["Hi", "Ho", "Go", "No"])]
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": talk}])
    description = json.dumps([{"path": str(path), "loss_on": "assistant-content", **keys}])
    tokenized = tokenize(read_data(description, DataOptions(), has_decoder=False).documents, tokenizer)
    ids, labels = tokens(*parts)
    assert tokenized.tokens.tolist() == ids and tokenized.labels is not None
    assert tokenized.labels.tolist() == labels


SPLITS = ["train", "train[:10%]", "train[10%:]", "train[-25%:]", "train[3:7]", "train[-4:]", "train[:-9]",
          "train[:5%]+train[-5%:]", "train[50:10]", "train[:1000]", "train[17%:33%]", "test[1:]"]  # fmt: skip


def test_ranges_are_those_of_datasets(tmp_path: Path) -> None:
    for number in (1, 7, 23):
        files = tmp_path / f"files{number}"
        files.mkdir()
        texts = {name: [f"{name} {index}" for index in range(number)] for name in ("train", "test")}
        for name, rows in texts.items():
            write_rows(files / f"{name}.jsonl", [{"text": text} for text in rows])
        saved = tmp_path / f"saved{number}"
        DatasetDict({name: Dataset.from_dict({"text": rows}) for name, rows in texts.items()}).save_to_disk(saved)
        sizes = dict.fromkeys(texts, number)
        for split in SPLITS:
            expected = [
                texts[part.splitname][index]
                for part in ReadInstruction.from_spec(split).to_absolute(sizes)
                for index in range(part.from_, part.to)
            ]
            assert _texts(files, split) == expected == _texts(saved, split), (number, split)


def _texts(path: Path, split: str) -> list[str]:
    try:
        return [str(text) for text in read_data(path, DataOptions(split=split), has_decoder=False).documents]
    except RequestError as error:
        if "range of rows in its split holds no document" not in str(error):
            raise
        return []


def test_rows_outside_of_the_range_may_be_anything(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "b"}, {"text": 3}])
    assert _texts(path, "train[:2]") == ["a", "b"]
    with pytest.raises(RequestError, match=r"rows.jsonl:3.*holds 3"):
        _texts(path, "train")


@pytest.mark.parametrize(
    ("split", "words"),
    [("test", "has no split 'test'; it has train"), ("train[:200%]", "is no split"), ("train[a:b]", "is no split"),
     ("train+train", "is no split"), ("train[:1]+test[:1]", "names the splits train, test"), ("", "is no split")],
)  # fmt: skip
def test_a_wrong_split_is_named(split: str, words: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])
    with pytest.raises(RequestError) as caught:
        read_data(path, DataOptions(split=split), has_decoder=False)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_lists_data_sets_beside_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "first"}, {"text": "second"}])
    write_rows(tmp_path / "b.jsonl", [{"body": "third"}])
    mix = tmp_path / "mix.yaml"
    mix.write_text("data_sets:\n  - {path: a.jsonl, split: 'train[:1]'}\n  - {path: b.jsonl, text_column: body}\n")
    assert list(read_data(mix, DataOptions(), has_decoder=False).documents) == ["first", "third"]
    mix.write_text("a: plain\ntext: file\n")
    assert not isinstance(next(iter(read_data(mix, DataOptions(), has_decoder=False).documents)), dict)
    with pytest.raises(ValueError):
        read_split("train[")


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"path": "a.jsonl", "templat": "x"}, "unknown key 'templat'"),
        ({"path": "a.jsonl", "template": "axolotl/alpacca"}, "did you mean axolotl/alpaca"),
        ({"path": "a.jsonl", "split": "train[1"}, "is no split"),
        ({"path": "none.jsonl"}, "none.jsonl"),
        ({"path": "a.jsonl", "prompt": {"with_input": "{other}", "without_input": "x"}}, "has {other}"),
        ({"path": "a.jsonl", "template": "axolotl/alpaca"}, "has no column 'instruction', which the template reads"),
        ({"path": "m.jsonl", "template": "llama-factory/yi"}, "message 2 after the system's has role 'user'"),
        ({"path": "t.jsonl", "template": "llama-factory/llama3"}, "token <|eot_id|>, which the tokenizer does not have"),
        ({"path": "s.jsonl"}, "s.jsonl:1: segment 1 is"),
        ({"path": ""}, "has an empty path"),
        ({"path": "t.jsonl", "answer_ends": "eos"}, "has answer_ends, which needs format: preference without a template"),
        ({"path": "t.jsonl", "template": "axolotl/chatml.intel"}, "writes pairs of answers; add format: preference"),
        ({"path": "t.jsonl", "learned_roles": ["user"]}, "has learned_roles, which needs loss_on assistant-content"),
        ({"path": "t.jsonl", "learned_roles": [], "loss_on": "assistant-content"}, "learned_roles is empty"),
        ({"path": "t.jsonl", "learned_ends": "first", "loss_on": "content"}, "learned_ends"),
        ({"path": "t.jsonl", "turn_ends": ["two words"], "loss_on": "content"}, "'two words' is not one token"),
        ("a.jsonl", "write its path"),
    ],
    ids=str,
)
def test_a_wrong_description_is_one_line(entry: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    user = {"role": "user", "content": "Hi"}
    write_rows(tmp_path / "a.jsonl", [{"text": "a"}])
    write_rows(tmp_path / "m.jsonl", [{"messages": [user, user]}])
    write_rows(tmp_path / "t.jsonl", [{"messages": [user, {"role": "assistant", "content": "Ho"}]}])
    write_rows(tmp_path / "s.jsonl", [{"segments": [{"text": 3, "label": True}]}])
    with pytest.raises(RequestError) as caught:
        encode([entry])
    assert words in str(caught.value) and "\n" not in str(caught.value)
