"""Tokens, rows of chats and special tokens, by hand: what is counted, cut, held out, told from each other, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from upshift.errors import RequestError
from upshift.training.data import tokens as data_tokens
from upshift.training.data.chat_rows import Columns, read_chat
from upshift.training.data.file_content import refuse_json_records
from upshift.training.data.rows.token_rows import IGNORED, _check_ids, _to_integers
from upshift.training.data.special_tokens import UnknownTokens, ids_around_document, overlap, with_special_tokens
from upshift.training.data.tokens import (
    TokenFile,
    TokenizedCorpus,
    count_single_tokens,
    cut_sequences,
    highest_id,
    histogram_of,
    hold_out_rows,
    pair_sequences,
    view_sequences,
)


def corpus_of(*lengths: int, labels: list[int] | None = None, source_lengths: list[int] | None = None) -> TokenizedCorpus:
    """Return documents of these lengths, of the ids 0, 1, 2 ..."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenizedCorpus(
        tokens=np.arange(sum(lengths), dtype=np.int32), offsets=offsets,
        labels=None if labels is None else np.array(labels, np.int32),
        source_lengths=None if source_lengths is None else np.array(source_lengths, np.int64),
    )  # fmt: skip


# --- sequences -------------------------------------------------------------------------------------------------------


def test_ids_of_documents_are_those_that_a_vocabulary_can_have() -> None:
    joined = TokenizedCorpus.from_documents([np.array([5, 6]), np.array([], np.int64), np.array([2**16 - 1])])
    assert (joined.tokens.tolist(), joined.offsets.tolist(), joined.tokens.dtype) == ([5, 6, 65535], [0, 2, 2, 3], np.uint16)
    wide = TokenizedCorpus.from_documents([np.array([2**16]), np.array([2**31 - 1])])
    assert wide.tokens.dtype == np.int32 and wide.num_documents == 2 and wide.num_tokens == 2
    for number in (-1, 2**31):
        with pytest.raises(RequestError, match=f"holds token id {number};"):
            TokenizedCorpus.from_documents([np.array([1, number])])
    assert TokenizedCorpus.from_documents([]).num_documents == 0


def test_labels_that_count_are_those_behind_the_first_position() -> None:
    labels = [1, IGNORED, 3, 4, IGNORED, 6, IGNORED]
    sequences = cut_sequences(corpus_of(4, 3, labels=labels), 8)
    members = np.array([0, 1])
    assert sequences.num_labels(members, first=0).tolist() == [3, 1]
    assert sequences.num_labels(members, first=1).tolist() == [2, 1]
    plain = cut_sequences(corpus_of(4, 3), 8)
    assert plain.num_labels(members, first=1).tolist() == [3, 2]


def test_documents_are_cut_and_a_last_token_alone_is_dropped() -> None:
    corpus = corpus_of(5, 4, 9, 1, 2)
    sequences = cut_sequences(corpus, 4)
    assert list(zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)) == [
        (0, 4), (5, 4), (9, 4), (13, 4), (19, 2),
    ]  # fmt: skip
    assert count_single_tokens(corpus, 4) == 3
    with pytest.raises(RequestError, match="choose at least 2"):
        cut_sequences(corpus, 1)
    assert len(cut_sequences(corpus, 2)) == 2 + 2 + 4 + 1


@pytest.mark.parametrize(("long_rows", "lengths"), [("split", [4, 4, 4, 4, 2]), ("cut", [4, 4, 4, 2]), ("drop", [4, 2])])
def test_long_rows_are_split_cut_or_left_out(long_rows: Any, lengths: list[int]) -> None:
    assert view_sequences(corpus_of(5, 4, 9, 1, 2), 4, 1, long_rows).lengths.tolist() == lengths
    assert view_sequences(corpus_of(5, 4), 2, 2, "drop").lengths.tolist() == [4]


def test_only_the_labels_of_two_sides_are_cut() -> None:
    """Three tokens that an encoder reads, and as many labels as fit the other side."""
    corpus = corpus_of(5, 9, source_lengths=[3, 3])
    assert view_sequences(corpus, 4, 2, "drop").lengths.tolist() == [5, 7]


def test_pairs_are_held_out_whole() -> None:
    """Of 100 pairs the last two, of two the last, of one none."""
    for num_pairs, held_out in ((100, 2), (2, 1), (10_000, 64), (50, 1)):
        train, evaluation = hold_out_rows(corpus_of(*[3] * (2 * num_pairs)), documents_per_row=2)
        assert evaluation is not None
        assert (train.num_documents, evaluation.num_documents) == (2 * (num_pairs - held_out), 2 * held_out)
        assert [*train.tokens.tolist(), *evaluation.tokens.tolist()] == [*range(6 * num_pairs)]
    for size, held_out in ((0.25, 2), (0.01, 1), (3, 3)):
        train, evaluation = hold_out_rows(corpus_of(*[3] * 16), size, documents_per_row=2)
        assert evaluation is not None and (train.num_documents, evaluation.num_documents) == (16 - 2 * held_out, 2 * held_out)
    assert hold_out_rows(corpus_of(*[3] * 16), 0, documents_per_row=2)[1] is None
    single = corpus_of(3, 3)
    assert hold_out_rows(single, documents_per_row=2) == (single, None)


def test_pairs_without_an_answer_to_learn_are_left_out_together() -> None:
    """Documents of 3 and 5 tokens; 2 and 2 with nothing learned in one; 3 and 2."""
    labels = [IGNORED, 1, 2, IGNORED, IGNORED, 5, 6, 7, IGNORED, IGNORED, IGNORED, 4, IGNORED, 3, 2, IGNORED, 1]
    corpus = corpus_of(3, 5, 2, 2, 3, 2, labels=labels)
    whole = pair_sequences(corpus, 5, "cut", "data")
    assert (whole.starts.tolist(), whole.lengths.tolist()) == ([0, 3, 12, 15], [3, 5, 3, 2])
    assert pair_sequences(corpus, 4, "cut", "data").lengths.tolist() == [3, 4, 3, 2]
    assert pair_sequences(corpus, 4, "drop", "data").lengths.tolist() == [3, 2]
    assert pair_sequences(corpus, 2, "cut", "data").lengths.tolist() == [2, 2]


def test_lengths_are_counted_in_buckets() -> None:
    histogram = histogram_of(np.array([1, 4, 7, 2049, 2050]), 2050)
    assert (histogram.lengths, histogram.counts, histogram.num_tokens) == ((3, 6, 9, 2049, 2050), (1, 1, 1, 1, 1), 4111)
    assert histogram_of(np.array([5, 5, 7]), 1024).lengths == (5, 7)
    assert highest_id(np.array([3, 9]), None) == 9
    assert highest_id(np.array([3, 9]), np.array([IGNORED, 11])) == 11
    assert highest_id(np.array([], np.int32), np.array([IGNORED])) == 0


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_file_of_tokens_becomes_wide_where_a_number_needs_it(
    chunk: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it is written at once or in parts, in memory or mapped."""
    monkeypatch.setattr(data_tokens, "CHUNK_SIZE", chunk)
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path))
    for limit in (8 * 2**20, 16, 0):
        monkeypatch.setattr(data_tokens, "IN_MEMORY_BYTES", limit)
        for last, dtype in ((2**16 - 1, np.uint16), (2**16, np.int32)):
            file = TokenFile(np.uint16)
            for numbers in ([1, 2, 3], [], [4, 5, 6, 7], [last, 8]):
                file.add(numbers)
            assert file.length == 9
            found = file.finish()
            assert found.tolist() == [1, 2, 3, 4, 5, 6, 7, last, 8]
            assert found.dtype == dtype
            assert isinstance(found, np.memmap) == (found.nbytes > limit)


# --- columns ---------------------------------------------------------------------------------------------------------


def test_columns_of_integers() -> None:
    assert _to_integers([1, -2, 2**63 - 1, -(2**63)], "labels", "row 1").tolist() == [1, -2, 2**63 - 1, -(2**63)]
    assert _to_integers([True, False, 1], "attention_mask", "row 1").tolist() == [1, 0, 1]
    assert _to_integers([], "input_ids", "row 1").tolist() == []
    assert _to_integers(np.array([3, 4]), "input_ids", "row 1").tolist() == [3, 4]
    for values in ([1.0], [True], ["1"], [None], np.array([1.5])):
        with pytest.raises(RequestError, match="must be a list of integers"):
            _to_integers(values, "input_ids", "row 1")
    with pytest.raises(RequestError, match="it must be text or a list of integers"):
        _to_integers([1.0], "story", "row 1")
    for number in (2**63, -(2**63) - 1):
        with pytest.raises(RequestError, match=f"holds token id {number};"):
            _to_integers([number], "input_ids", "row 1")
    _check_ids(np.array([0, 2**31 - 1]), "input_ids", "row 1")
    for number in (-1, 2**31):
        with pytest.raises(RequestError, match=f"holds token id {number};"):
            _check_ids(np.array([1, number]), "input_ids", "row 1")


@pytest.mark.parametrize(
    ("text", "is_whole", "is_json"),
    [
        ('{"a": 1}\n', True, True), ('{"a": 1}', True, True), ('{"a": 1}\n{"b": 2}\n{"c"', False, True),
        ('{"a": 1}\n{"b"', False, False), ('{"a": 1}\nplain\n{"c": 1}\n', True, False), ("plain\n", True, False),
        ('{"a": 1}\n\n{"b": 2}\nplain\n', True, True), ("", True, False), ('{"a": 1', True, False), ("[1]\n", True, False),
        ('[{"a": 1}, {"b": 2}]', True, True), ('\n[\n  {"a": 1}\n]\n', True, True), ('[{"a": 1},\n {"b"', False, True),
        ('[{"a": 1} is a record', True, False), ('[["a"]]\n', True, False), ("[{'a': 1}]", True, False),
        ("[ ] to do", True, False),
        ('{\n  "a": 1\n}\n', True, True), ('{\n  "a": 1\n}\n', False, False), ('{\n  "a": 1\n}\nand text', True, False),
    ],
)  # fmt: skip
def test_text_files_that_hold_json_records(text: str, is_whole: bool, is_json: bool) -> None:
    """By the first two lines, the first entry of an array, or the whole text; what was cut off says nothing."""
    if not is_json:
        refuse_json_records(Path("a.txt"), text, is_whole=is_whole)
        return
    with pytest.raises(RequestError, match=r"let its name end in \.jsonl?,"):
        refuse_json_records(Path("a.txt"), text, is_whole=is_whole)


# --- special tokens --------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of letters, which puts some ids around a text."""

    def __init__(self, before: list[int], after: list[int], *, eos: int | None = None, prefix: bool = False) -> None:
        self.before = before
        self.after = after
        self.eos_token_id = eos
        self.prefix = prefix  # a token for a space before the first letter

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [*([9] if self.prefix else []), *(ord(letter) for letter in text)]
        return {"input_ids": [*self.before, *ids, *self.after] if add_special_tokens else ids}


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "eos", "expected"),
    [
        ([], [], None, ([], [])), ([1], [], None, ([1], [])), ([1, 2], [3], None, ([1, 2], [3])), ([], [], 7, ([], [7])),
        ([1], [7], 7, ([1], [7])), ([1], [3], 7, ([1], [3, 7])),
    ],
)  # fmt: skip
def test_ids_around_a_document(
    before: list[int], after: list[int], eos: int | None, expected: tuple[list[int], list[int]], prefix: bool
) -> None:
    """Those that the tokenizer adds, and the end of a text where it does not."""
    tokenizer: Any = Letters(before, after, eos=eos, prefix=prefix)
    assert ids_around_document(tokenizer) == expected


def test_ids_that_a_document_has_already_are_not_added_again() -> None:
    assert overlap([1, 2, 3], [2, 3, 4]) == 2 and overlap([1], [2]) == 0 and overlap([], [1]) == 0
    assert with_special_tokens([5, 6], [1, 2], [7, 8]) == [1, 2, 5, 6, 7, 8]
    assert with_special_tokens([1, 2, 5, 6, 7, 8], [1, 2], [7, 8]) == [1, 2, 5, 6, 7, 8]
    assert with_special_tokens([2, 5, 7], [1, 2], [7, 8]) == [1, 2, 5, 7, 8]
    assert with_special_tokens([], [1], [7]) == [1, 7]


class Words:
    """A tokenizer that knows some words."""

    unk_token = "<unk>"
    bos_token_id = 1
    eos_token_id = 2
    pad_token_id = None

    def __init__(self, unknown: int | None = 0) -> None:
        self.unk_token_id = unknown

    def get_vocab(self) -> dict[str, int]:
        return {"<unk>": 0, "a": 5, "\u2581": 6}


def unknown_of(*texts: list[int], unknown: int | None = 0) -> UnknownTokens:
    counts = UnknownTokens(Words(unknown))
    for text in texts:
        counts.add(text)
    return counts


def test_most_tokens_of_data_must_be_known() -> None:
    """From sixteen tokens on. Some tokenizers put a token for a space before every unknown one: it says nothing."""
    unknown_of([0] * 8 + [5] * 8).check()
    unknown_of([0] * 15).check()
    with pytest.raises(RequestError, match="9 of the first 16 tokens are <unk>"):
        unknown_of([0] * 9 + [5] * 7).check()
    with pytest.raises(RequestError, match="16 of the first 16 tokens are <unk>"):
        unknown_of([6, 0] * 16).check()
    unknown_of([6, 5] * 16, [0]).check()
    unknown_of([1] * 99, unknown=1).check()  # in GPT-2 it is the end of a text
    UnknownTokens(None).add([0] * 99)


def test_a_share_of_unknown_tokens_and_texts_that_are_lost_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("upshift.training.data.special_tokens.say_once", said.append)
    unknown_of([5] * 99, [0, *[5] * 9]).report()
    unknown_of([5] * 9, []).report()
    assert said == []
    unknown_of([5] * 30, [0, 0]).report()
    assert said.pop().endswith("2 of 32 tokens (6.2%), which become <unk>, and of 1 texts it knows no token")
    unknown_of([5] * 500, [6, 0]).report()
    assert "and of 1 texts it knows no token" in said.pop()
    pieces = unknown_of([5] * 500)
    for piece in ([0], [], [5], [0]):
        pieces.add_piece(piece)
    pieces.end_text()
    pieces.report()
    assert said == []
    unknown_of([5] * 97, [0, 0, 5]).report()
    assert said.pop().endswith("2 of 100 tokens (2.0%), which become <unk>")


# --- rows of chats ---------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def chat_of(record: dict[str, Any], form: Any = "messages", name: str = "messages") -> Any:
    return read_chat(record, Columns(format=form, name=name), "row 1")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"from": "human"}, "has no 'value'"), ({"value": "x"}, "has no 'from'"), ({"from": "dog", "value": "x"}, "is from"),
        ({"content": "x"}, "has no role"), ({"role": "cook", "content": "x"}, "has role"), ({"role": "user"}, "it must be text"),
        ({"role": "user", "content": [{"type": "image"}]}, "only text is trained on"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "has tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "has tool_calls"),
        ({"role": "user", "content": "x", "weight": 1}, "has weight"),
        ({"role": "assistant", "content": "x", "weight": 2}, "has weight"), ("x", "write"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_used_are_refused(message: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        chat_of({"messages": [message, ANSWER]})


def test_messages_are_read_without_what_is_empty() -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"x": None}, "extra": None}}
    chat = chat_of({"messages": [
        {**USER, "name": None, "tool_calls": []}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"from": "gpt", "value": "a", "weight": 0}, {"role": "user", "content": [{"type": "text", "text": "b", "x": None}]},
        {"role": "assistant", "content": []},
    ]})  # fmt: skip
    assert chat.messages == [
        USER, {"role": "assistant", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
        ]},
        {"role": "assistant", "content": "a", "weight": 0}, {"role": "user", "content": "b"},
        {"role": "assistant", "content": ""},
    ]  # fmt: skip


def test_a_prompt_and_its_completion_are_two_texts_or_two_lists() -> None:
    def read(prompt: Any, completion: Any, **more: Any) -> Any:
        return chat_of({"prompt": prompt, "completion": completion, **more}, "prompt-completion", "prompt")

    texts = read("q", "a")
    assert (texts.prompt, texts.completion) == ("q", "a")
    assert (read(None, "a").prompt, read("q", None).completion) == ("", "")
    chat = read([USER], [ANSWER])
    assert (chat.messages, chat.num_prompt_messages, chat.has_answer) == ([USER, ANSWER], 1, True)
    open_chat = read([USER], None)
    assert (open_chat.messages, open_chat.has_answer) == ([USER], False)
    assert read("", "") is None or read("", "").completion == ""
    for prompt, completion in (("q", [ANSWER]), ([USER], "a"), (3, "a"), ("q", 3)):
        with pytest.raises(RequestError, match="give two texts, or two lists of messages"):
            read(prompt, completion)
    with pytest.raises(RequestError, match="a completion is learned as a whole"):
        read([USER], [{**ANSWER, "weight": 0}])
    with pytest.raises(RequestError, match="only text is trained on"):
        read("q", "a", images=["x.png"])
    assert read("q", "a", images=[]).prompt == "q"


def test_an_alpaca_row_without_an_output_has_no_answer() -> None:
    def read(output: Any) -> Any:
        return chat_of({"instruction": "q", "input": "", "output": output}, "alpaca", "instruction")

    assert read("a").has_answer and not read("").has_answer and not read(None).has_answer


def test_weights_are_not_for_answers_that_are_compared() -> None:
    other = {"role": "assistant", "content": "b"}

    def read(chosen: list[Any], rejected: list[Any]) -> Any:
        return chat_of({"chosen": chosen, "rejected": rejected}, "preference", "chosen")

    pair = read([USER, ANSWER], [USER, other])
    assert (pair.chosen.messages, pair.rejected.messages) == ([USER, ANSWER], [USER, other])
    assert pair.chosen.num_prompt_messages == pair.rejected.num_prompt_messages == 1
    assert pair.num_characters == pair.chosen.num_characters + pair.rejected.num_characters
    for chosen, rejected in (
        ([USER, {**ANSWER, "weight": 0}], [USER, other]), ([USER, ANSWER], [USER, {**other, "weight": 0}]),
    ):  # fmt: skip
        with pytest.raises(RequestError, match="answers are compared as a whole"):
            read(chosen, rejected)
    with pytest.raises(RequestError, match="do not begin with the same prompt"):
        read([USER, ANSWER], [{**USER, "content": "other"}, other])
