"""Every input format and data error with real files, tokenizers, and the same loss and gradient for every layout."""

from __future__ import annotations

import gc
import importlib
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from upshift.errors import MissingExtra, RequestError
from upshift.models.describe import max_positions
from upshift.models.source import find_model
from upshift.training.batches.collate import to_tensors
from upshift.training.batches.layout import Layout
from upshift.training.batches.objective import Objective, objective_for
from upshift.training.batches.sampler import BatchSource, synthetic_batch
from upshift.training.data import dataset
from upshift.training.data.corpus import read_corpus
from upshift.training.data.dataset import TrainingData, load_data, prepare_data, save_data
from upshift.training.data.tokenizer import load_tokenizer, tokenize, tokenize_corpus, train_byte_level_bpe
from upshift.training.data.tokens import TokenizedCorpus, cut_sequences
from upshift.training.job.processes import job_folder

TEXTS = ["first document", "second, with ünïcödé", "third\nwith lines"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_lines(path: Path, records: list) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return path


def text_file(tmp_path):
    path = tmp_path / "corpus.md"
    path.write_text("\n\n".join(TEXTS), encoding="utf-8")
    return path


def text_folder(tmp_path):
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name, text in {"a.txt": TEXTS[0], "deep/b.py": TEXTS[1], "z.md": TEXTS[2], ".hidden/c.txt": "no"}.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("é".encode("latin-1"))
    (folder / "zeros.bin").write_bytes(b"\0\0")
    return folder


def json_lines(tmp_path):
    return write_lines(tmp_path / "a.jsonl", [{"text": text, "url": "x"} for text in [*TEXTS, ""]])


def json_array(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text, "n": 1} for text in TEXTS], indent=1))
    return path


def folder_of_json_lines(tmp_path):
    for number, text in enumerate(TEXTS):
        write_lines(tmp_path / f"{number}.jsonl", [{"text": text}])
    return tmp_path


def parquet_file(tmp_path):
    pq.write_table(pa.table({"id": [1, 2, 3, 4], "text": [*TEXTS, None]}), tmp_path / "a.parquet", row_group_size=2)
    return tmp_path / "a.parquet"


def folder_of_parquet(tmp_path):
    pq.write_table(pa.table({"text": TEXTS[:1]}), tmp_path / "part-0.parquet")
    pq.write_table(pa.table({"text": pa.array(TEXTS[1:], pa.large_string())}), tmp_path / "part-1.parquet")
    return tmp_path


def saved_dataset(tmp_path):
    shuffled = datasets.Dataset.from_dict({"text": TEXTS[::-1], "label": [0, 1, 2]}).select([2, 1, 0])
    shuffled.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


FORMATS = [
    text_folder,
    json_lines,
    json_array,
    folder_of_json_lines,
    parquet_file,
    folder_of_parquet,
    saved_dataset,
]


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_gives_the_same_documents(write, tmp_path):
    corpus = read_corpus(write(tmp_path))
    assert list(corpus.documents) == TEXTS == list(corpus.documents)
    assert corpus.evaluation is None
    summary = corpus.summary()
    assert summary.num_documents == 3
    skipped = summary.num_skipped_empty, summary.num_skipped_binary
    assert skipped == {text_folder: (1, 1), json_lines: (1, 0), parquet_file: (1, 0)}.get(write, (0, 0))


def test_one_text_file_is_one_document_and_patterns_select(tmp_path):
    assert list(read_corpus(text_file(tmp_path)).documents) == ["\n\n".join(TEXTS)]
    assert list(read_corpus(text_folder(tmp_path), pattern="**/*.py").documents) == TEXTS[1:2]


@pytest.mark.parametrize("other", ["validation", "valid", "dev", "val", "test", "eval", "unsupervised"])
def test_a_saved_dict_is_evaluated_on_validation_and_test_is_left_alone(other, tmp_path, caplog):
    splits = {"train": TEXTS[:2], other: TEXTS[2:]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": texts}) for name, texts in splits.items()})
    saved.save_to_disk(tmp_path / "saved")
    corpus = read_corpus(tmp_path / "saved")
    assert list(corpus.documents) == TEXTS[:2]
    if other in ("test", "eval", "unsupervised"):
        assert corpus.evaluation is None
        assert f"split {other}, which is left alone" in caplog.text
    else:
        assert list(corpus.evaluation) == TEXTS[2:]
        assert corpus.summary().num_evaluation_documents == 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_tokenized_data_is_used_as_it_is(kind, tmp_path):
    rows = [[5, 6, 7], [], [70000, 1]]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_lines(path, [{"input_ids": row, "text": "x"} for row in rows])
    elif kind == "parquet":
        pq.write_table(pa.table({"input_ids": rows, "text": ["x"] * 3}), path)
    else:
        datasets.Dataset.from_dict({"input_ids": rows, "text": ["x"] * 3}).save_to_disk(path)
    corpus = read_corpus(path)
    assert corpus.is_tokenized
    tokenized = tokenize(corpus.documents, None)
    assert tokenized.labels is None
    assert tokenized.tokens.tolist() == [5, 6, 7, 70000, 1]
    assert tokenized.offsets.tolist() == [0, 3, 5]
    assert not read_corpus(path, text_column="text").is_tokenized


def empty_folder(tmp_path):
    (tmp_path / "zeros.txt").write_bytes(b"\0")
    return tmp_path


def written(name, content):
    def write(tmp_path):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def parquet_of_latin(tmp_path):
    pq.write_table(pa.table({"text": pa.array(["é".encode("latin-1")]).view(pa.string())}), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def repeated_column(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def truncated_parquet(tmp_path):
    path = parquet_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    return path


def damaged_dataset(tmp_path):
    path = saved_dataset(tmp_path)
    next(path.glob("*.arrow")).unlink()
    return path


def no_train_split(tmp_path):
    datasets.DatasetDict({"dev": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(tmp_path / "s")
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: p / "missing", ["missing' does not exist"]),
        (written("a.txt", b""), ["no documents", "1 empty"]),
        (written("a.txt", b"\xff\xfe"), ["not UTF-8"]),
        (written("a.jsonl", b""), ["no documents"]),
        (written("a.jsonl", b'{"text": "a"}\n{"text": \n'), ["a.jsonl:2", "JSON"]),
        (written("a.jsonl", b'{"text": "a"}\n[1]\n'), ["a.jsonl:2", "object"]),
        (written("a.jsonl", b'{"text": "a"}\n{"text": 3}\n'), ["a.jsonl:2", "'text'"]),
        (written("a.jsonl", b'{"text": "a"}\n\xff\n'), ["a.jsonl:2", "UTF-8"]),
        (written("a.jsonl", b'{"a": "x", "b": "y", "c": 1}'), ["no column 'text'", "a, b, c", "--text-column"]),
        (written("a.jsonl", b'{"n": 1, "m": 2}'), ["no column 'text'", "n, m"]),
        (written("a.jsonl", b'{"text": "a"}\n{"text": [1]}\n'), ["token ids"]),
        (written("a.json", b'[{"text": "a"}'), ["a.json", "JSON"]),
        (written("a.parquet", b"nonsense"), ["not a complete parquet"]),
        (truncated_parquet, ["not a complete parquet"]),
        (repeated_column, ["a.parquet", "column 'text' twice"]),
        (written("a.csv", b"text,text\na,b\n"), ["a.csv:1", "column 'text' twice"]),
        (parquet_of_latin, ["bytes that are not UTF-8"]),
        (written("a.jsonl", b'{"text": "a"}\n{"text": "a \\ud800 b"}\n'), ["a.jsonl:2", "\\ud800", "surrogate"]),
        (written("a.jsonl", b'{"text": null}\n{"text": null, "id": "x"}\n'), ["no documents", "2 empty"]),
        (empty_folder, ["no documents", "1 not UTF-8"]),
        (damaged_dataset, ["not a complete datasets directory"]),
        (no_train_split, ["no split 'train'", "dev"]),
    ],
)
def test_every_error_is_one_clear_line(write, words, tmp_path):
    with pytest.raises(RequestError) as caught:
        list(read_corpus(write(tmp_path)).documents)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "asked", "texts"),
    [
        ('{"text": null, "id": "x"}\n{"text": "a", "id": "y"}', None, ["a"]),
        ('{"body": null}\n{"body": "a"}', "body", ["a"]),
        ('{"body": null, "text": "no"}\n{"body": "a", "text": "no"}', "body", ["a"]),
        ('{"input_ids": null, "text": "a", "meta": null}', None, ["a"]),
        ('{"text": "a", "messages": [{"role": "user", "content": "b"}]}', "text", ["a"]),
        ('{"text": "\\ud83d\\ude00"}', None, ["\U0001f600"]),  # both halves of a pair
    ],
)
def test_the_column_is_chosen_by_its_name(content, asked, texts, tmp_path):
    (tmp_path / "a.jsonl").write_text(content)
    assert list(read_corpus(tmp_path / "a.jsonl", text_column=asked).documents) == texts


def test_links_to_folders_are_named_and_not_followed(tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    write_lines(tmp_path / "elsewhere" / "b.jsonl", [{"text": "b"}])
    folder = tmp_path / "folder"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"text": "a"}])
    for name, target in {"part": tmp_path / "elsewhere", "itself": folder, "gone": tmp_path / "gone"}.items():
        (folder / name).symlink_to(target)
    (folder / "z.jsonl").symlink_to(tmp_path / "elsewhere" / "b.jsonl")
    assert list(read_corpus(folder).documents) == ["a", "b"]
    assert "not trained on: gone, itself, part (links to folders, or to nothing, are not followed)" in caplog.text


def test_an_array_behind_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}]', encoding="utf-8-sig")
    assert list(read_corpus(tmp_path / "a.json").documents) == ["a"]


@pytest.mark.parametrize("write", [json_lines, parquet_file, saved_dataset])
def test_an_unknown_column_is_refused_with_the_columns(write, tmp_path):
    with pytest.raises(RequestError, match="no column 'prose'; its columns are .*, "):
        read_corpus(write(tmp_path), text_column="prose")


def test_missing_extra_names_the_install_command(tmp_path, monkeypatch):
    path = parquet_file(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install '.*\[data\]'"):
        read_corpus(path)


@pytest.fixture(scope="module")
def sources() -> list[str]:
    names = ("json.decoder", "textwrap", "bisect", "queue", "argparse")
    return [Path(importlib.import_module(name).__file__).read_text(encoding="utf-8") for name in names]


@pytest.fixture(scope="module")
def bpe(sources):
    return train_byte_level_bpe(sources, 600)


def test_byte_level_bpe_round_trips(bpe, sources, tmp_path):
    assert len(bpe) == 600
    assert bpe.eos_token_id == bpe.bos_token_id == bpe.pad_token_id == 0
    bpe.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    calls: list[tuple[int, int]] = []
    texts = [*sources, "ünïcödé \U0001f600  spaces"]
    tokenized = tokenize(texts, loaded, progress=lambda done, total: calls.append((done, total)))
    assert tokenized.tokens.dtype == np.uint16
    assert calls[-1] == (sum(len(text.encode()) for text in texts),) * 2
    for number, text in enumerate(texts):
        ids = tokenized.tokens[tokenized.offsets[number] : tokenized.offsets[number + 1]].tolist()
        assert ids[-1] == bpe.eos_token_id
        assert loaded.decode(ids[:-1]) == text


def test_a_long_document_is_one_document(bpe, sources, monkeypatch):
    monkeypatch.setattr("upshift.training.data.tokenizer.PIECE_CHARACTERS", 1000)
    tokenized = tokenize(sources, bpe)
    assert tokenized.num_documents == len(sources)
    assert np.count_nonzero(tokenized.tokens == bpe.eos_token_id) == len(sources)
    assert bpe.decode(tokenized.tokens[: tokenized.offsets[1] - 1].tolist()) == sources[0]


def test_evaluation_is_held_out_of_one_document(bpe, tmp_path, sources):
    (tmp_path / "a.py").write_text(sources[-1], encoding="utf-8")
    train, evaluation = tokenize_corpus(read_corpus(tmp_path / "a.py"), bpe, sequence_length=64)
    assert evaluation is not None
    assert train.num_tokens > 20 * evaluation.num_tokens > 0


def test_tokenizer_errors(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="has no tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match="vocab_size=100"):
        train_byte_level_bpe(TEXTS, 100)
    with pytest.raises(RequestError, match="no tokenizer"):
        tokenize(TEXTS, None)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(RequestError, match="has no tokenizer"):
        load_tokenizer(tmp_path)


def test_masked_lm_without_a_mask_token_is_refused(bpe):
    with pytest.raises(RequestError, match="mask"):
        objective_for("masked-lm", bpe, vocab_size=600).check_masks()
    assert objective_for("causal-lm", bpe, vocab_size=600).pad_token_id == 0


def random_sequences(sequence_length: int = 32):
    generator = np.random.default_rng(0)
    lengths = [32, 32, 64, 5, 2, 3, 17, 30, 9, 9, 21, 12, 8, 3, 31]
    documents = [generator.integers(3, 96, length) for length in lengths]
    return cut_sequences(TokenizedCorpus.from_documents(documents), sequence_length)


def loss_and_gradient(model, layouts: list[Layout], objective: Objective):
    """Summed over micro-batches and ranks, divided by the label tokens of the global batch: what a trainer computes."""
    model.zero_grad()
    total = 0.0
    for layout in layouts:
        source = BatchSource(sequences=random_sequences(), global_batch=14, layout=layout, objective=objective)
        (batch,) = islice(source.batches(), 1)
        for micro in batch.micro_batches:
            inputs = to_tensors(micro)
            labels = inputs["labels"]
            logits = model(**inputs, use_cache=False).logits
            if objective.kind == "causal-lm":
                logits, labels = logits[:, :-1], labels[:, 1:]
            summed = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (summed / batch.num_label_tokens).backward()
            total += summed.item() / batch.num_label_tokens
    return total, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def all_layouts(*, packing: bool) -> list[list[Layout]]:
    single = [Layout(micro_batch=size, packing=packed) for packed in {False, packing} for size in (1, 3, 4, 14)]
    single += [Layout(micro_batch=size, packing=True, flatten=True) for size in (1, 4) if packing]
    ranks = [
        [Layout(micro_batch=3, packing=packing, flatten=flatten, rank=rank, world_size=4) for rank in range(4)]
        for flatten in {False, packing}
    ]
    unmasked = [[Layout(micro_batch=4, mask_padding=False)]] if packing else []
    return [[layout] for layout in single] + ranks + unmasked


SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny_llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, attn_implementation="sdpa"))


def tiny_bert():
    return BertForMaskedLM(BertConfig(**SMALL, attn_implementation="sdpa"))


def tiny_t5():
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("build", "objective"),
    [
        (tiny_llama, Objective(pad_token_id=1)),
        (tiny_bert, Objective(kind="masked-lm", pad_token_id=0, mask_token_id=2, vocab_size=96)),
        (tiny_t5, Objective(kind="seq2seq-lm", pad_token_id=0)),
    ],
)
def test_loss_and_gradient_do_not_depend_on_the_layout(build, objective):
    torch.manual_seed(0)
    model = build().eval()
    packing = objective.kind == "causal-lm"
    expected_loss, expected_gradient = loss_and_gradient(model, [Layout(micro_batch=1, pad_multiple=1)], objective)
    every = list(all_layouts(packing=packing))
    assert len(every) > 1
    for layouts in every:
        loss, gradient = loss_and_gradient(model, layouts, objective)
        assert loss == pytest.approx(expected_loss, abs=1e-5), layouts
        assert torch.allclose(gradient, expected_gradient, atol=1e-5), layouts


def test_a_synthetic_packed_batch_runs():
    micro = synthetic_batch(Layout(micro_batch=2, packing=True), sequence_length=16, vocab_size=96)
    assert torch.isfinite(tiny_llama()(**to_tensors(micro), use_cache=False).loss)


def test_max_positions_leaves_out_reserved_ones():
    config = RobertaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=34, pad_token_id=1
    )
    with torch.device("meta"):
        assert max_positions(RobertaForMaskedLM(config)) == 32


@pytest.fixture
def labelled(tmp_path) -> TrainingData:
    """Tokenized data with labels of its own, for a config alone."""
    LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, architectures=["LlamaForCausalLM"]
    ).save_pretrained(tmp_path / "model")
    rows = [{"input_ids": list(range(1, 9)), "labels": [-100] * 4 + list(range(5, 9))} for _ in range(200)]
    path = write_lines(tmp_path / "data.jsonl", rows)
    return prepare_data(find_model(str(tmp_path / "model" / "config.json")), path, sequence_length=8)


def test_every_array_of_the_data_is_counted_and_comes_back(labelled, tmp_path):
    arrays = labelled.training.arrays
    assert {"tokens", "starts", "lengths", "labels"} == arrays.keys()
    save_data(labelled, tmp_path)
    loaded = load_data(tmp_path).training.arrays
    assert loaded.keys() == arrays.keys()
    assert all(np.array_equal(loaded[name], values) for name, values in arrays.items())


def test_data_is_written_once_for_trials_and_run_and_goes_with_them(labelled, monkeypatch):
    data = replace(labelled)  # which nobody else holds
    written_to = []
    monkeypatch.setattr(dataset, "save_data", lambda data, folder: (written_to.append(folder), save_data(data, folder)))
    folder = data.folder
    job = SimpleNamespace(to_json=lambda: "{}")
    for _ in range(2):
        with job_folder(job, data) as place:
            assert np.array_equal(load_data(place).training.tokens, labelled.training.tokens)
        assert (folder / "data.json").is_file()
    assert written_to == [folder]
    del data
    gc.collect()
    assert not folder.exists()


def test_much_data_is_saved_in_the_cache_and_nothing_stays_there(labelled, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("UPSHIFT_CACHE", str(cache))
    assert replace(labelled).folder.parent != cache
    monkeypatch.setattr(dataset, "IN_MEMORY_BYTES", 0)
    data = replace(labelled)
    folder = data.folder
    assert folder.parent == cache and np.array_equal(load_data(folder).training.tokens, labelled.training.tokens)
    left = cache / "upshift-data-killed"
    (left / "tokenizer").mkdir(parents=True)
    left.with_name(f"{left.name}.lock").touch()
    replace(labelled).folder  # noqa: B018  the folder is made when it is read first
    assert left.exists(), "a process may be making it"
    monkeypatch.setattr(dataset, "UNUSED_SECONDS", -1)
    other = replace(labelled)
    assert other.folder.is_dir() and folder.is_dir() and not left.exists()
    del data, other
    gc.collect()
    assert list(cache.iterdir()) == []


def test_a_folder_that_takes_no_data_is_named(labelled, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("UPSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset, "IN_MEMORY_BYTES", 0)
    with pytest.raises(RequestError, match="cannot be written to .*cache .*UPSHIFT_CACHE") as refusal:
        replace(labelled).folder  # noqa: B018
    assert "\n" not in str(refusal.value)
    monkeypatch.setattr(dataset, "IN_MEMORY_BYTES", 2**20)

    def fail(*_: object) -> None:
        raise OSError("16384 requested and 0 written")  # numpy's words for a full disk

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(RequestError, match="16384 requested and 0 written.*TMPDIR"):
        replace(labelled).folder  # noqa: B018
