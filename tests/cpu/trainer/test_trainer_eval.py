"""Evaluation and prediction beyond memory: what transformers gives, from disk, in bounded memory, and nothing left over."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
)
from transformers.modeling_outputs import ModelOutput

from upshift.errors import JobFailed, RequestError
from upshift.training.hf_trainer import evaluation
from upshift.training.hf_trainer import evaluation as spool
from upshift.training.hf_trainer.evaluation import StreamedEvaluation
from upshift.units import MIB

BERT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
TIMES = ("runtime", "samples_per_second", "steps_per_second", "preparation_time")


class T(StreamedEvaluation, transformers.Trainer):
    pass


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield


@pytest.fixture(params=["disk", "memory"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "disk":
        monkeypatch.setattr(evaluation, "BUFFER_BYTES", 200)
    return str(request.param)


def ragged(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in batch)
    padded = {
        key: [list(row[key]) + [fill] * (width - len(row[key])) for row in batch]
        for key, fill in (("input_ids", 0), ("attention_mask", 0), ("labels", -100))
    }
    return {key: torch.tensor(rows) for key, rows in padded.items()}


def rows(kind: str, count: int = 11) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    made = []
    for _ in range(count):
        length = int(draw.integers(2, 9))
        tokens = draw.integers(1, 40, length).tolist()
        row: dict[str, Any] = {"input_ids": tokens, "attention_mask": [1] * length}
        if kind == "classification":
            row["labels"] = int(draw.integers(3))
        elif kind == "answers":
            row |= {"start_positions": int(draw.integers(length)), "end_positions": int(draw.integers(length))}
        else:
            row["labels"] = draw.integers(0, 3, length).tolist()
        made.append(row)
    return made


def fixed(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    for_all = {key: [row[key] for row in batch] for key in batch[0]}
    for key in ("input_ids", "attention_mask"):
        for_all[key] = [list(row) + [0] * (8 - len(row)) for row in for_all[key]]
    return {key: torch.tensor(values) for key, values in for_all.items()}


def classifier() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**BERT, num_labels=3))


def tagger() -> Any:
    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(**BERT, num_labels=3))


def reader() -> Any:
    torch.manual_seed(0)
    return BertForQuestionAnswering(BertConfig(**BERT, output_hidden_states=True))


def causal() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0))


CASES = {
    "classification": (classifier, "classification", fixed),
    "tokens": (tagger, "tokens", ragged),
    "answers": (reader, "answers", fixed),
    "causal": (causal, "tokens", ragged),
    "t5": (t5, "tokens", ragged),
}


def digest(prediction: Any) -> dict[str, float]:
    """A metric that reads every number of everything that it gets."""

    def total(tree: Any) -> float:
        if isinstance(tree, (list, tuple)):
            return sum((number + 1) * total(item) for number, item in enumerate(tree))
        if isinstance(tree, dict):
            return sum(total(item) for item in tree.values())
        flat = np.asarray(tree, dtype=np.float64).reshape(-1)
        return float(flat @ np.arange(1, len(flat) + 1))

    return {"digest": sum((number + 1) * total(item) for number, item in enumerate(prediction))}


def trainer(cls: Any, case: str, tmp_path: Path, *, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
    make_model, kind, collate = CASES[case]
    options = {"compute_metrics": digest, "eval_dataset": rows(kind), "data_collator": collate, **options}
    settings = {"per_device_eval_batch_size": 3, "report_to": [], "disable_tqdm": True, "use_cpu": True, **(arguments or {})}
    return cls(model=make_model(), args=TrainingArguments(output_dir=str(tmp_path / "out"), **settings), **options)


def same(one: Any, other: Any) -> None:
    if isinstance(one, (list, tuple)):
        assert type(one) is type(other) and len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            same(left, right)
    elif isinstance(one, dict):
        assert type(one) is type(other) and list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif one is None:
        assert other is None
    else:
        assert isinstance(other, np.ndarray)
        assert one.dtype == other.dtype and one.shape == other.shape
        assert one.tobytes() == np.asarray(other).tobytes()


def plain(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.endswith(TIMES)}


def compare(case: str, tmp_path: Path, **options: Any) -> Any:
    ours, theirs = (trainer(cls, case, tmp_path, **options) for cls in (T, transformers.Trainer))
    assert plain(ours.evaluate()) == plain(theirs.evaluate())
    got, expected = (one.predict(one.eval_dataset) for one in (ours, theirs))
    assert plain(got.metrics) == plain(expected.metrics)
    same(expected.predictions, got.predictions)
    same(expected.label_ids, got.label_ids)
    return got


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("accumulation", [None, 2])
def test_parity(case: str, accumulation: int | None, held: str, tmp_path: Path) -> None:
    got = compare(case, tmp_path, arguments={"eval_accumulation_steps": accumulation, "include_for_metrics": ["inputs", "loss"]})
    leaf = got.predictions
    while isinstance(leaf, tuple):
        leaf = leaf[0]
    assert isinstance(leaf, np.memmap) == (held == "disk")
    leaf[...] = 0  # may be written to, as an array of transformers


@pytest.mark.parametrize("case", ["tokens", "answers", "t5"])
def test_parity_without_concatenation(case: str, held: str, tmp_path: Path) -> None:
    got = compare(case, tmp_path, arguments={"eval_do_concat_batches": False})
    assert isinstance(got.predictions, list)


def test_parity_of_metrics_by_batch(held: str, tmp_path: Path) -> None:
    def both() -> Any:
        seen: list[float] = []

        def metric(prediction: Any, compute_result: bool) -> dict[str, float]:
            seen.append(float(prediction.predictions.double().sum()))
            return {"digest": sum(seen)} if compute_result else {}

        return metric

    arguments = {"batch_eval_metrics": True, "include_for_metrics": ["loss"]}
    ours, theirs = (
        trainer(cls, "tokens", tmp_path, arguments=arguments, compute_metrics=both()) for cls in (T, transformers.Trainer)
    )
    assert plain(ours.evaluate()) == plain(theirs.evaluate())


@pytest.mark.parametrize(
    "options",
    [
        {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)},
        {"preprocess_logits_for_metrics": lambda logits, labels: {"best": logits.argmax(-1), "top": logits[:, :, :2]}},
        {"preprocess_logits_for_metrics": lambda logits, labels: (logits.mean(), logits.bfloat16())},
        {"arguments": {"bf16_full_eval": True}},
        {"arguments": {"prediction_loss_only": True}},
        {"arguments": {"label_smoothing_factor": 0.1}},
        {"compute_metrics": None},
    ],
    ids=["view", "dict", "scalar", "bf16", "loss only", "smoothing", "no metrics"],
)
def test_parity_of_options(options: dict[str, Any], held: str, tmp_path: Path) -> None:
    compare("causal", tmp_path, **options)


def test_parity_of_ignored_keys_and_several_sets(held: str, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    class Watch(TrainerCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any) -> None:
            seen.append((self.name, len(eval_dataloader)))

    sets = {"first": rows("answers", 7), "second": rows("answers", 4)}
    ours, theirs = (
        trainer(cls, "answers", tmp_path, eval_dataset=sets, callbacks=[Watch(cls.__name__)]) for cls in (T, transformers.Trainer)
    )
    assert plain(ours.evaluate()) == plain(theirs.evaluate())
    assert [size for name, size in seen if name == "T"] == [size for name, size in seen if name == "Trainer"] == [3, 3, 3, 2, 2]
    got, expected = (one.predict(sets["first"], ignore_keys=["hidden_states"]) for one in (ours, theirs))
    same(expected.predictions, got.predictions)
    assert len(got.predictions) == 2


class Wide(nn.Module):
    """Logits of 1 MiB a row, from almost no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> ModelOutput:
        logits = input_ids.float() * self.weight * torch.ones(len(input_ids), MIB // 4)
        return ModelOutput(loss=logits.mean(), logits=logits)


def anonymous_bytes() -> int:
    """Resident memory that no file backs."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
@pytest.mark.parametrize("concatenated", [True, False])
def test_memory_does_not_grow_with_the_batches(concatenated: bool, tmp_path: Path) -> None:
    data = [{"input_ids": [number], "labels": number} for number in range(400)]
    resident: list[int] = []

    class Watch(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            resident.append(psutil.Process().memory_info().rss)

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=4, report_to=[], disable_tqdm=True, use_cpu=True,
        eval_do_concat_batches=concatenated,
    )  # fmt: skip
    one = T(model=Wide(), args=arguments, callbacks=[Watch()])
    one.predict(data[:8])
    gc.collect()
    before, before_anonymous = psutil.Process().memory_info().rss, anonymous_bytes()
    resident.clear()
    predictions = one.predict(data).predictions
    assert max(resident) - before < 100 * MIB, f"{(max(resident) - before) / MIB:.0f} MiB more"
    assert anonymous_bytes() - before_anonymous < 100 * MIB
    parts = [predictions] if concatenated else predictions
    assert sum(part.nbytes for part in parts) == 400 * MIB
    assert [float(row[0]) for part in parts for row in part] == list(range(400))


def test_views_do_not_keep_what_they_look_at(tmp_path: Path) -> None:
    column = spool.Spool(tmp_path, 2**40).column()
    column.add(torch.zeros(100, 1000)[:, :1])
    assert column._buffer[0].untyped_storage().nbytes() == 400


def test_files_are_gone_when_nobody_can_read_them(tmp_path: Path) -> None:
    column = spool.Spool(tmp_path, 0).column()
    for _ in range(3):
        column.add(torch.ones(4, 5))
    assert list(tmp_path.iterdir()) == []
    array = column.concatenated(-100)
    del column
    gc.collect()
    assert array[2:].sum() == 50 and list(tmp_path.iterdir()) == []
    opened = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    del array
    gc.collect()
    if opened is not None:
        assert len(os.listdir("/proc/self/fd")) < opened


class FullDisk:
    """A file on a disk that takes one more buffer."""

    def __init__(self) -> None:
        self.written = 0

    def write(self, data: memoryview) -> int:
        if self.written:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written = len(data)
        return len(data)


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "BUFFER_BYTES", 100)
    monkeypatch.setattr(spool.tempfile, "TemporaryFile", lambda **options: FullDisk())
    with pytest.raises(JobFailed, match=r"the disk is full after .*; free space, name a larger disk in TMPDIR, or return less"):
        trainer(T, "tokens", tmp_path).evaluate()


def test_outputs_that_cannot_be_one_array_are_refused(tmp_path: Path) -> None:
    grows = iter(range(2, 100))
    refused = trainer(T, "tokens", tmp_path, preprocess_logits_for_metrics=lambda logits, labels: logits[:, :, : next(grows)])
    with pytest.raises(RequestError, match="only the first two dimensions may differ"):
        refused.evaluate()
    refused = trainer(T, "tokens", tmp_path, preprocess_logits_for_metrics=lambda logits, labels: (logits,) * next(grows))
    with pytest.raises(RequestError, match="batches of the evaluation differ in their outputs"):
        refused.evaluate()
    refused = trainer(T, "tokens", tmp_path, preprocess_logits_for_metrics=lambda logits, labels: (logits, None))
    with pytest.raises(RequestError, match="NoneType, not a tensor"):
        refused.evaluate()


def test_a_temporary_directory_in_memory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    parts = [type("Part", (), {"mountpoint": str(memory), "fstype": "tmpfs"})]
    monkeypatch.setattr(spool.tempfile, "gettempdir", lambda: str(memory))
    monkeypatch.setattr(spool.psutil, "disk_partitions", lambda all: parts)
    assert spool.spool_directory(disk / "not" / "yet") == disk
    monkeypatch.setattr(spool.psutil, "disk_partitions", lambda all: [])
    assert spool.spool_directory(disk) == memory


def test_the_loop_of_transformers_makes_its_containers_by_this_name() -> None:
    assert evaluation.CONTAINER_NAME in transformers.Trainer.evaluation_loop.__code__.co_names


class Shared(BertForSequenceClassification):
    """A script's own class, whose loss may be anything."""


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows that are gone once they are read."""

    def __init__(self) -> None:
        self.rows = iter(rows("classification"))

    def __iter__(self) -> Any:
        return self.rows


class RowLoss(nn.Module):
    """A model of a script: transformers' Trainer takes the loss that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **inputs: Any) -> dict[str, torch.Tensor]:
        logits = self.inner(input_ids=input_ids, **inputs).logits
        return {"loss": (logits @ logits.T).logsumexp(1).mean(), "logits": logits}


def summed_ctc() -> Any:
    model = classifier()
    model.config.ctc_loss_reduction = "sum"  # Wav2Vec2's default
    return model


@pytest.mark.parametrize("case", [RowLoss, lambda: Shared(classifier().config), summed_ctc, "stream"])
def test_a_loss_that_may_be_no_mean_is_not_computed_of_smaller_batches(
    case: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = classifier() if case == "stream" else case()
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=8, report_to="none", use_cpu=True, remove_unused_columns=False
    )
    data = Stream() if case == "stream" else rows("classification")
    made = T(model=model, args=arguments, data_collator=fixed, eval_dataset=data)
    sizes: list[int] = []
    original = BertForSequenceClassification.forward

    def refuse(self: Any, input_ids: Any = None, **inputs: Any) -> Any:
        sizes.append(len(input_ids))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("simulated")
        return original(self, input_ids=input_ids, **inputs)

    monkeypatch.setattr(BertForSequenceClassification, "forward", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        made.evaluate()
    assert sizes == [8]
