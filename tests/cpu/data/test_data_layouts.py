"""Data as people have it: folders with splits, tables, compressed files, token ids with labels; used, or refused by name."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
import random
import re
import warnings
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from upshift.errors import RequestError
from upshift.models.source import find_model
from upshift.training.batches.collate import to_tensors
from upshift.training.batches.layout import Layout
from upshift.training.batches.objective import IGNORED, Objective
from upshift.training.batches.sampler import BatchSource, Position, count_steps
from upshift.training.data.corpus import read_corpus
from upshift.training.data.data_files import find_data_files
from upshift.training.data.dataset import prepare_data
from upshift.training.data.tokenizer import tokenize
from upshift.training.data.tokens import cut_sequences, hold_out_evaluation

OTHER_ROWS = [
    {"dialogue": [{"role": "user", "content": "a"}], "id": "7"},
    {"question": "a", "answer": "b"},
    {"instruction": "a", "response": "b"},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": "a", "completion": "b", "label": True},
    {"id": "7", "url": "http://a"},
    {"id": "7"},
    {"content": "a text", "n": 1},
]


UNREAD = (".pdf", ".docx", ".png", ".xlsx", ".zip", ".npy", ".tar.gz")
GAPS = [{"input_ids": [1, 2], "attention_mask": [True, True]}, {"input_ids": [1, 2, 3], "attention_mask": [True, False, True]}]


def write_jsonl(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write(path: Path, rows: list) -> Path:
    """Write rows as the kind of file that the suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".saved":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        write_jsonl(path, rows)
    return path


def texts(path: Path, **options) -> list:
    return list(read_corpus(path, **options).documents)


def refusal(path: Path, **options) -> str:
    with pytest.raises(RequestError) as caught:
        texts(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".saved"])
@pytest.mark.parametrize("row", OTHER_ROWS, ids=lambda row: "+".join(row))
def test_rows_without_the_text_column_are_refused_with_their_columns(row, suffix, tmp_path):
    message = refusal(write(tmp_path / f"a{suffix}", [row] * 3))
    assert ", ".join(row) in message
    expected = "preferences" if {"chosen", "label"} & row.keys() else "--text-column|rename '.+' to '.+'"
    assert re.search(expected, message)
    column = next(name for name, value in row.items() if isinstance(value, str))
    assert texts(tmp_path / f"a{suffix}", text_column=column) == [row[column]] * 3


TOKENS = {"input_ids": list(range(10, 30)), "labels": [-100] * 10 + list(range(20, 30))}
PADDED = {"input_ids": [0, 0, 5, 6, 7, 8, 0], "attention_mask": [0, 0, 1, 1, 1, 1, 0], "labels": [1, 1, -100, 6, -100, 8, 1]}


def sequences_of(path: Path, length: int = 32):
    return cut_sequences(tokenize(read_corpus(path).documents, None), length)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".saved"])
def test_labels_and_masks_are_honoured_in_every_layout(suffix, tmp_path):
    """Ten positions are learned of the first row, two of the second; padding is neither attended to nor learned."""
    rows = [{"attention_mask": [1] * 20, **TOKENS}, PADDED] * 4
    sequences = sequences_of(write(tmp_path / f"a{suffix}", rows))
    assert sequences.lengths.tolist() == [20, 4] * 4
    assert sequences.num_labels(np.arange(8), first=1).tolist() == [10, 2] * 4
    shapes = itertools.product((1, 3), ((False, False), (True, False), (True, True)), (1, 3))
    for micro_batch, (packing, flatten), ranks in shapes:
        learned: list[tuple[int, int]] = []
        totals = set()
        for rank in range(ranks):
            layout = Layout(micro_batch=micro_batch, packing=packing, flatten=flatten, rank=rank, world_size=ranks)
            source = BatchSource(sequences=sequences, global_batch=8, layout=layout)
            batch = next(source.batches())
            totals.add(batch.num_label_tokens)
            for micro in batch.micro_batches:
                arrays = to_tensors(micro)
                label, inputs = arrays["labels"][:, 1:], arrays["input_ids"][:, 1:]
                counted = label != IGNORED
                assert int(counted.sum()) == micro.num_label_tokens
                learned += list(zip(inputs[counted].tolist(), label[counted].tolist(), strict=True))
        assert totals == {48}
        assert sorted(learned) == sorted([(i, i) for i in range(20, 30)] * 4 + [(6, 6), (8, 8)] * 4)


@pytest.mark.parametrize("mask_token_id", [4, None])
def test_labels_that_the_data_has_are_what_a_masked_model_finds(mask_token_id, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 4, 7], "labels": [-100, 6, -100]}] * 2)
    objective = Objective(kind="masked-lm", pad_token_id=0, mask_token_id=mask_token_id, vocab_size=10)
    batch = next(
        BatchSource(sequences=sequences_of(path), global_batch=2, layout=Layout(micro_batch=2), objective=objective).batches()
    )
    assert batch.num_label_tokens == 2
    assert batch.micro_batches[0].arrays["input_ids"][0, :3].tolist() == [5, 4, 7]
    assert batch.micro_batches[0].arrays["labels"][0, :3].tolist() == [-100, 6, -100]


def test_a_masked_model_needs_a_mask_token_only_where_the_data_has_no_labels(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 10}
    BertConfig(**sizes, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path / "model")
    model = find_model(str(tmp_path / "model" / "config.json"))
    with_labels = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 4, 7], "labels": [-100, 6, -100]}] * 2)
    training = prepare_data(model, with_labels, sequence_length=8).training
    assert training.num_labels(np.arange(len(training)), first=0).tolist() == [1] * len(training)
    without = write_jsonl(tmp_path / "b.jsonl", [{"input_ids": [5, 4, 7]}] * 2)
    with pytest.raises(RequestError, match="mask_token_id .* a column labels"):
        prepare_data(model, without, sequence_length=8)


PAIR = {"input_ids": [3, 4, 5], "labels": [7, IGNORED]}


def build_t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 16, "vocab_size": 60}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)).eval()


def build_bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in (("layers", 2), ("ffn_dim", 16))}
    sizes = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 32, **sides}
    return BartForConditionalGeneration(BartConfig(**sizes, vocab_size=60)).eval()


@pytest.mark.parametrize("build", [build_t5, build_bart])
@pytest.mark.parametrize("micro_batch", [1, 3, 6])
def test_a_decoders_labels_have_their_own_length_as_in_transformers(build, micro_batch, tmp_path):
    """The loss is that of transformers' own collator, which pads the same rows."""
    model = build()
    draw = np.random.default_rng(0)
    rows = []
    for source, target in [(5, 2), (1, 7), (6, 6), (3, 1), (8, 4), (2, 3)]:
        labels = draw.integers(3, 60, target)
        labels[:-1][draw.random(target - 1) < 0.3] = IGNORED
        rows.append({"input_ids": draw.integers(3, 60, source).tolist(), "labels": labels.tolist()})
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    sequences = cut_sequences(tokenize(read_corpus(path, has_decoder=True).documents, None, side_length=8), 16)
    assert sequences.source_lengths.tolist() == [len(row["input_ids"]) for row in rows]
    objective = Objective(kind="seq2seq-lm", pad_token_id=model.config.pad_token_id, vocab_size=60)
    layout = Layout(micro_batch=micro_batch)
    batch = next(BatchSource(sequences=sequences, global_batch=6, layout=layout, objective=objective).batches())
    total = sum(model(**to_tensors(micro)).loss.item() * micro.num_label_tokens for micro in batch.micro_batches)
    assert batch.num_label_tokens == sum(label != IGNORED for row in rows for label in row["labels"])

    tokenizer = words_tokenizer(bos=False, eos=False)
    tokenizer.pad_token = "<unk>"
    tokenizer.pad_token_id = model.config.pad_token_id
    features = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    expected = model(**DataCollatorForSeq2Seq(tokenizer, model=model)(features)).loss.item()
    assert total / batch.num_label_tokens == pytest.approx(expected, abs=1e-5)


def test_a_long_side_of_a_pair_is_cut_and_said(tmp_path, caplog):
    rows = [{"input_ids": list(range(1, 12)), "labels": [5, 6]}, {"input_ids": [1, 2], "labels": list(range(1, 12))}, PAIR]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    tokenized = tokenize(read_corpus(path, has_decoder=True).documents, None, side_length=4)
    assert tokenized.source_lengths.tolist() == [4, 2, 3]
    assert tokenized.labels.tolist() == [*[IGNORED] * 4, 5, 6, IGNORED, IGNORED, 1, 2, 3, 4, *[IGNORED] * 3, 7, IGNORED]
    assert "2 rows are longer than 4 tokens" in caplog.text
    training, held_out = hold_out_evaluation(tokenized, sequence_length=8)
    assert (training.source_lengths.tolist(), held_out.source_lengths.tolist()) == ([4, 2], [3])


@pytest.mark.parametrize("row", [PAIR, {"input_ids": [3, 4, 99]}])
def test_an_id_outside_of_the_vocabulary_is_refused_with_its_row(row, tmp_path):
    sizes = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16, "vocab_size": 90}
    T5Config(**sizes, decoder_start_token_id=0, architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "model")
    model = find_model(str(tmp_path / "model" / "config.json"))
    good = {name: [3] * 4 for name in row}
    data = write_jsonl(tmp_path / "a.jsonl", [good, good, {name: [*values, 95] for name, values in row.items()}, good])
    with pytest.raises(RequestError, match=r"a.jsonl:3 holds token id 9[59], the model's vocabulary has 90"):
        prepare_data(model, data, sequence_length=8)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, ["3 token ids", "2 in column 'labels'"]),
        ({"input_ids": [1, 2, 3], "labels": 1}, ["'labels'", "holds 1"]),
        ({"input_ids": [1, 2, 3], "labels": None}, ["'labels'"]),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, -5]}, ["-5"]),
        ({"input_ids": [1, 2, -3], "labels": [1, 2, 3]}, ["-3", "padding"]),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 0, 1]}, ["attention_mask"]),
        ({"input_ids": [1, 2, 3]}, ["no column 'labels'"]),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3], "completion_mask": [0, 1, 1]}, ["'completion_mask'"]),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 3], "token_type_ids": [0, 1, 1]}, ["'token_type_ids'"]),
        ({"input_ids": "1 2 3", "labels": [1, 2, 3]}, ["holds text"]),
        ({"labels": [1, 2, 3]}, ["no column 'input_ids'"]),
    ],
)
def test_token_rows_that_contradict_themselves_are_refused_with_their_place(row, words, tmp_path):
    good = {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "token_type_ids": [0, 0, 0], "special_tokens_mask": [1, 0, 0]}
    message = refusal(write_jsonl(tmp_path / "a.jsonl", [good, row]))
    assert all(word in message for word in ["a.jsonl:2", *words]), message


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".saved"])
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2, 3], "labels": [1]}], ["row 2", "3 token ids and 1"]),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, None]}], ["row 2", "empty value"]),
        (GAPS, ["row 2"]),
        ([{"input_ids": [1, 2], "loss_mask": [1, 0]}], ["row 1", "'loss_mask'"]),
        ([{"input_ids": [1.5, 2.0]}], ["row 1", "list of integers"]),
        ([{"text": "a"}, {"text": None}, {"text": 3.5}][2:], ["row 1", "holds 3.5"]),
        ([{"text": {"a": "b"}}], ["row 1", "'text'"]),
        ([{"text": ["a", "b"]}], ["row 1", "'text'"]),
    ],
)  # fmt: skip
def test_rows_of_tables_are_refused_with_their_number(rows, words, suffix, tmp_path):
    message = refusal(write(tmp_path / f"a{suffix}", rows))
    assert all(word in message for word in words), message


def test_every_kind_of_arrow_text_is_read(tmp_path):
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
    for number, kind in enumerate(kinds):
        values = ["one", None, "two", "one"]
        array = pa.array(values).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(values, kind)
        pq.write_table(pa.table({"text": array}), tmp_path / f"{number}.parquet")
        assert texts(tmp_path / f"{number}.parquet") == ["one", "two", "one"], kind
    pq.write_table(pa.table({"text": pa.nulls(3), "id": ["a", "b", "c"]}), tmp_path / "null.parquet")
    assert "3 empty" in refusal(tmp_path / "null.parquet")
    pq.write_table(pa.table({"text": pa.array([b"a"], pa.binary())}), tmp_path / "binary.parquet")
    assert "row 1" in refusal(tmp_path / "binary.parquet")
    lists = [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 2), pa.list_view(pa.int8())]
    for kind in lists:
        table = pa.table({"input_ids": pa.array([[1, 2], [3, 4]], kind)})
        with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as file:
            file.write_table(table)
        assert [row.ids.tolist() for row in texts(tmp_path / "a.arrow")] == [[1, 2], [3, 4]], kind


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", 'id,text\n1,"one, with a comma"\n2,"two\nlines"\n3,NA\n', ["one, with a comma", "two\nlines", "NA"]),
        ("a.csv", "\ufefftext\r\none\r\n\r\ntwo\r\n", ["one", "two"]),
        ("a.tsv", "text\tn\none, two\t1\n", ["one, two"]),
        ("a.json", '\n [ {"text": "one"} , {"text": "t]wo"} ] \n', ["one", "t]wo"]),
        ("a.json", '{"text": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ("a.ndjson", '{"text": "one"}\r\n\r\n{"text": "two"}', ["one", "two"]),
        ("a.jsonl", '{"text": "one", "score": NaN}\n{"text": "", "score": 1}\n{"text": "two", "extra": [1]}', ["one", "two"]),
        ("a.txt", "\ufeffone\r\ntwo", ["one\r\ntwo"]),
        ("a.foo", "one", ["one"]),
    ],
)
def test_tables_and_texts_are_read_as_they_are(name, content, expected, tmp_path):
    (tmp_path / name).write_bytes(content.encode())
    assert texts(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"one\ntwo\n", ["no column 'text'", "one", "--text-column"]),
        ("a.csv", b"id;text\n1;one\n", ["a.csv:1", "'id;text'", "';' divides"]),
        ("a.csv", b"text,n\none,1\ntwo\n", ["a.csv:3", "1 fields"]),
        ("a.csv", b"text,n\none,1\ntwo,2,3\n", ["a.csv:3", "3 fields"]),
        ("a.csv", b'text,n\n"one,1\n', ["a.csv:2"]),
        ("a.csv", b"text,text\none,two\n", ["'text' twice"]),
        ("a.csv", b"text\n\xff\xfe\n", ["not UTF-8"]),
        ("a.csv", b"text\n", ["no documents"]),
        ("a.csv", b"", ["no documents"]),
        ("a.jsonl", b'{"text": "a"}\n{"url": "b"}\n', ["a.jsonl:2", "no column 'text'", "url"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b", "text": "c"}\n', ["a.jsonl:2", "'text'", "twice"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": NaN}\n', ["a.jsonl:2", "NaN"]),
        ("a.jsonl", b'{"text": "a"}\n{"text": true}\n', ["a.jsonl:2", "true"]),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', ["a.json", "not valid JSON"]),
        ("a.json", b'[{"text": "a"}, ]', ["a.json", "not valid JSON"]),
        ("a.json", b'[{"text": "a"}] {"text": "b"}', ["a.json", "more follows"]),
        ("a.json", b'[{"text": "a"}, "b"]', ["a.json (record 2)"]),
        ("a.json", b'{"data": [{"text": "a"}]}', ["a.json:1", "'data' holds the records"]),
        ("a.json", b'{"text": ["a", "b"]}', ["a.json:1", "'text'"]),
        ("a.json", b"[]", ["no documents"]),
        ("a.txt", b"a \x00 b", ["not UTF-8"]),
        ("a.txt", "one".encode("utf-16"), ["not UTF-8"]),
        ("a.txt", b" \n ", ["no documents", "1 empty"]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100, mtime=0)[:-9], ["complete compressed"]),
        ("a.jsonl.gz", b'{"text": "a"}\n', ["a.jsonl.gz"]),
        ("a.jsonl.zst", b'{"text": "a"}\n', ["a.jsonl.zst"]),
        ("a.arrow", b"nonsense", ["not a complete arrow"]),
        ("a.feather", b"FEA1" + bytes(40), ["is a Feather V1 file", "convert", "read_table('a.feather')", "'a.parquet'"]),
        *((f"a{suffix}", b"anything", [suffix, "give"]) for suffix in UNREAD),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert all(word in message for word in words), message


def test_the_line_that_converts_a_feather_v1_file_does_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of pyarrow 25 and later
        pa.feather.write_feather(pa.table({"text": ["one", "two"]}), "a.arrow", version=1)
        line = refusal(Path("a.arrow")).partition("in Python: ")[2]
        exec(line)
    assert texts(Path("a.parquet")) == ["one", "two"]


def test_a_text_column_is_for_tables(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    assert "--text-column body" in refusal(tmp_path / "a.txt", text_column="body")
    assert "--text-column body" in refusal(tmp_path, text_column="body")


@pytest.mark.parametrize("inner", [".jsonl", ".json", ".csv", ".txt"])
@pytest.mark.parametrize("outer", [".gz", ".bz2", ".xz", ".zst", ".lz4"])
def test_compressed_files_are_read(inner, outer, tmp_path):
    content = {".jsonl": '{"text": "one"}\n', ".json": '[{"text": "one"}]', ".csv": "text\none\n", ".txt": "one"}[inner].encode()
    own = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    path = tmp_path / f"a{inner}{outer}"
    if outer in own:
        path.write_bytes(own[outer](content))
    else:
        with pa.CompressedOutputStream(str(path), {".zst": "zstd", ".lz4": "lz4"}[outer]) as stream:
            stream.write(content)
    assert texts(path) == ["one"]
    assert texts(tmp_path) == ["one"]


NAMES = (
    "a", "b", "train", "train_0", "train-1", "training", "my.train", "test", "test_1", "testing", "eval", "validation", "valid",
    "dev", "val", "data-val", "trainer", "contest", "train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001",
    "validation-00000-of-00001",
)  # fmt: skip
FOLDERS = ("", "", "data", "train", "test", "val", "my-train", "train/deep", "test_2", "sub/dev", "__pycache__", ".hidden")


def test_splits_are_those_of_load_dataset(tmp_path):
    """Random folders, against the library itself."""
    draw = random.Random(0)
    seen = set()
    for number in range(150):
        folder = tmp_path / str(number)
        suffix = draw.choice([".jsonl", ".csv", ".txt", ".jsonl.gz"])
        paths = {f"{draw.choice(FOLDERS)}/{draw.choice(NAMES)}{suffix}".lstrip("/") for _ in range(draw.randint(1, 5))}
        if all(name.startswith((".hidden", "__pycache__")) for name in paths):
            continue
        for name in (*paths, "README.md", "notes.xyz"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(b"a") if suffix == ".jsonl.gz" else b"text\na")
        if suffix == ".txt":
            (folder / "notes.xyz").unlink()
        try:
            files = datasets.load_dataset_builder(str(folder)).config.data_files
        except (FileNotFoundError, ValueError):
            with pytest.raises(RequestError):
                read_corpus(folder)
            continue
        expected = {split: [Path(file).relative_to(folder).as_posix() for file in members] for split, members in files.items()}
        if "train" not in expected:
            assert "no split 'train'" in refusal(folder)
            continue
        found = find_data_files(folder, pattern=None)
        assert [file.relative_to(folder).as_posix() for file in found.training] == list(dict.fromkeys(expected["train"])), paths
        evaluation = [file.relative_to(folder).as_posix() for file in found.evaluation]
        assert evaluation == list(dict.fromkeys(expected.get("validation", []))), paths
        seen.add((tuple(sorted(expected)), "data/" in str(paths)))
    assert len(seen) >= 6


def test_a_folder_trains_on_train_and_says_what_it_leaves(tmp_path, caplog):
    write_jsonl(tmp_path / "train.jsonl", [{"text": "learn"}])
    write_jsonl(tmp_path / "test.jsonl", [{"text": "secret"}])
    write_jsonl(tmp_path / "valid.jsonl", [{"text": "watch"}])
    (tmp_path / "README.md").write_text("# A data set")
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    corpus = read_corpus(tmp_path)
    assert (list(corpus.documents), list(corpus.evaluation)) == (["learn"], ["watch"])
    assert "test.jsonl (split test is left alone)" in caplog.text
    assert "README.md" in caplog.text and "notes.pdf" in caplog.text


@pytest.mark.parametrize("content", ['[{"text": "one"}]', '{"text": "one"}\n'])
def test_a_folder_with_records_is_no_folder_of_texts(content, tmp_path, caplog):
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "code.py").write_text("print()")
    assert texts(tmp_path) == ["one"]
    assert "code.py" in caplog.text


def test_the_readme_of_the_hub_names_the_splits(tmp_path):
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / "files" / f"{name}.jsonl", [{"text": name}])
    head = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: files/a.jsonl\n"
    (tmp_path / "README.md").write_text(head + '  - split: validation\n    path: ["files/[b]*"]\n---\nText.\n')
    corpus = read_corpus(tmp_path)
    assert (list(corpus.documents), list(corpus.evaluation)) == (["a"], ["b"])
    (tmp_path / "README.md").write_text(head + "- config_name: other\n  data_files: files/c.jsonl\n---\n")
    assert texts(tmp_path) == ["a"]
    (tmp_path / "README.md").write_text((head + "- config_name: other\n  data_files: '**'\n---\n").replace("default", "first"))
    assert "several data sets (first, other)" in refusal(tmp_path)
    (tmp_path / "README.md").write_text(head.replace("a.jsonl", "z.jsonl") + "---\n")
    assert "split train" in refusal(tmp_path)
    (tmp_path / "README.md").write_text("---\nconfigs: 3\n---\n")
    assert "as the Hub writes it" in refusal(tmp_path)


def test_long_files_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("upshift.training.data.text_files.PIECE_CHARACTERS", 8)
    monkeypatch.setattr("upshift.training.data.tokenizer.PIECE_CHARACTERS", 8)
    monkeypatch.setattr("upshift.training.data.records.READ_CHARACTERS", 5)
    (tmp_path / "a.txt").write_text("one two\nhello one a\n" * 3, encoding="utf-8")
    tokenizer = words_tokenizer(bos=True, eos=True)
    tokenized = tokenize(read_corpus(tmp_path / "a.txt").documents, tokenizer)
    ids = tokenized.tokens.tolist()
    assert tokenized.num_documents == 1 and ids[0] == 1 and ids[-1] == 2 and not {1, 2} & {*ids[1:-1]}
    (tmp_path / "b.txt").write_bytes(b"one two three " + b"\xff")
    assert "not UTF-8" in refusal(tmp_path / "b.txt")
    records = [{"text": f"text {number}", "n": {"m": [number] * 3}} for number in range(9)]
    (tmp_path / "a.json").write_text(json.dumps(records, indent=2))
    assert texts(tmp_path / "a.json") == [record["text"] for record in records]


def words_tokenizer(*, bos: bool, eos: bool, special: bool = True) -> PreTrainedTokenizerFast:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "hello": 3, "one": 4, "a": 5, "two": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    template = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    names = {"bos_token": "<s>", "eos_token": "</s>"} if special else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **names)


@pytest.mark.parametrize(
    ("bos", "eos", "special", "ends"),
    [
        (True, True, True, (1, 2)),
        (True, False, True, (1, 2)),
        (False, False, True, (None, 2)),
        (False, False, False, (None, None)),
    ],
)
def test_a_text_has_each_of_its_marks_once(bos, eos, special, ends, tmp_path):
    tokenizer = words_tokenizer(bos=bos, eos=eos, special=special)
    for text in ("hello", "<s>hello", "hello</s>", "<s>hello</s>"):
        before = [1] if ends[0] or "<s>" in text else []
        after = [2] if ends[1] or "</s>" in text else []
        assert tokenize([text], tokenizer).tokens.tolist() == [*before, 3, *after], text


@pytest.mark.parametrize(("rows", "global_batch", "epochs"), [(47, 32, 1), (100, 64, 3), (8, 8, 2), (9, 4, 2.5)])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_row_is_once_in_every_epoch(rows, global_batch, epochs, packing, ranks, tmp_path):
    """On all ranks together; resumed anywhere, the rows that follow are the same."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [number + 10] * (2 + number % 5)} for number in range(rows)])
    sequences = sequences_of(path, 16)
    steps = count_steps(epochs, num_sequences=rows, global_batch=global_batch)
    assert steps == int(np.ceil(np.ceil(rows / global_batch) * epochs))
    seen: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        layout = Layout(micro_batch=3, packing=packing, rank=rank, world_size=ranks)
        source = BatchSource(sequences=sequences, global_batch=global_batch, layout=layout)
        batches = list(itertools.islice(source.batches(), steps))
        for step, batch in enumerate(batches):
            seen[step] += [member for micro in batch.micro_batches for member in micro.sequence_ids.tolist()]
            assert batch.num_label_tokens == int((sequences.lengths[batch.sequence_ids] - 1).sum())
            resumed = next(source.batches(Position.from_json(source.position_of_step(step).to_json())))
            assert resumed.sequence_ids.tolist() == batch.sequence_ids.tolist()
    per_epoch = -(-rows // global_batch)
    for start in range(0, steps - per_epoch + 1, per_epoch):
        assert sorted(sum(seen[start : start + per_epoch], [])) == list(range(rows))
    assert [len(step) for step in seen[:per_epoch]] == [global_batch] * (rows // global_batch) + [rows % global_batch] * (
        rows % global_batch > 0
    )
