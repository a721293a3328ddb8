"""Turn a data path into tokenized sequences, and check them against the model, once for the plan and the run."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from upshift.errors import RequestError
from upshift.models.profile import num_sides
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import ModelSource
from upshift.planning.workload import LengthHistogram
from upshift.training.batches.objective import Objective, objective_for
from upshift.training.batches.plan_layout import find_objective
from upshift.training.data.corpus import CorpusSummary, read_corpus
from upshift.training.data.data_files import say_once
from upshift.training.data.tokenizer import Progress, load_tokenizer, tokenize_corpus
from upshift.training.data.tokens import (
    Sequences,
    check_vocabulary,
    cut_sequences,
    histogram_of,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingData:
    training: Sequences
    evaluation: Sequences | None  # None: too little data to hold any out
    objective: Objective
    histogram: LengthHistogram
    summary: CorpusSummary
    tokenizer: Any | None  # None: the data was tokenized already and the model has none

    @cached_property
    def folder(self) -> Path:
        """Return a folder with the saved data. The trials and the run share the folder, and it is removed with the data."""
        folder = Path(tempfile.mkdtemp(prefix="upshift-data-"))
        weakref.finalize(self, _remove_in_process, folder, os.getpid())
        save_data(self, folder)
        return folder


def prepare_data(
    source: ModelSource,
    data_path: Path | str,
    *,
    tokenizer: Any | None = None,
    sequence_length: int | None = None,
    text_column: str | None = None,
    progress: Progress | None = None,
) -> TrainingData:
    """Read, tokenize and cut the data. Raise RequestError for data that the model cannot be trained on.

    ``tokenizer``: None takes the model's own. ``sequence_length``: None takes the default for the model.
    """
    sequence_length = sequence_length_of(source, sequence_length)
    corpus = read_corpus(data_path, text_column=text_column)
    tokenizer = tokenizer or _load_own_tokenizer(source, needed=not corpus.is_tokenized)
    objective = _find_objective(source, tokenizer)
    if not corpus.is_tokenized:
        objective.check_masks()
    length = sequence_length * num_sides(objective.kind)
    tokenized, held_out = tokenize_corpus(corpus, tokenizer, sequence_length=length, progress=progress)
    for part in (tokenized, held_out):
        if part is not None:
            check_vocabulary(part, objective.vocab_size or 0)
    if tokenized.labels is None:
        objective.check_masks()
    if tokenized.labels is not None and objective.kind == "seq2seq-lm":
        raise RequestError(
            f"{data_path} has a column labels, which is not used with the encoder-decoder {source.reference!r}: "
            "it trains on the first and the second half of a text; leave labels out, or use another model"
        )
    training = _drop_unlabelled(cut_sequences(tokenized, length), objective, corpus.origin)
    if not len(training):
        raise RequestError(f"{data_path} has no sequence of two or more tokens with something to learn; give more text")
    evaluation = None if held_out is None else _drop_unlabelled(cut_sequences(held_out, length), objective, "the held-out data")
    return TrainingData(
        training=training,
        evaluation=evaluation if evaluation is not None and len(evaluation) else None,
        objective=objective,
        histogram=histogram_of(training.lengths, length),
        summary=corpus.summary(),
        tokenizer=tokenizer,
    )


def _drop_unlabelled(sequences: Sequences, objective: Objective, origin: str) -> Sequences:
    """Return the sequences that have a label to learn. A batch of the others would have no mean."""
    if sequences.labels is None:
        return sequences
    has_labels = objective.counted_labels(sequences, np.arange(len(sequences))) > 0
    if not has_labels.all():
        say_once(f"{origin}: {int((~has_labels).sum())} sequences without a label to learn are left out")
    return sequences.chosen(np.flatnonzero(has_labels))


def _load_own_tokenizer(source: ModelSource, *, needed: bool) -> Any | None:
    on_disk = Path(source.reference).exists()
    if on_disk and source.directory is None:
        if needed:
            raise RequestError(
                f"{source.reference} is a config without a tokenizer beside it; "
                "give a model directory with a tokenizer, or data with a column input_ids"
            )
        return None
    try:
        return load_tokenizer(source.directory if on_disk and source.directory else source.reference)
    except RequestError:
        if needed:
            raise
        return None


def _find_objective(source: ModelSource, tokenizer: Any | None) -> Objective:
    objective = find_objective(source, tokenizer=tokenizer)
    if tokenizer is None:  # objective_of masks with token 0 then, which is for trials only
        seen = {name: getattr(objective, name) for name in ("padding", "loss_splits")}
        objective = objective_for(objective.kind, None, vocab_size=objective.vocab_size or 0).changed(**seen)
    if objective.pad_token_id >= (objective.vocab_size or 0):
        return objective.changed(pad_token_id=0)  # padding is never a label nor attended to, but it is embedded
    return objective


def save_data(data: TrainingData, folder: Path) -> None:
    """Save data for the processes of a run. ``load_data`` maps the arrays, so that all ranks share one copy in memory."""
    for name, sequences in (("training", data.training), ("evaluation", data.evaluation)):
        if sequences is not None:
            for array, values in sequences.arrays.items():
                np.save(folder / f"{name}.{array}.npy", values)
    document = {
        "sequence_length": data.training.sequence_length,
        "objective": data.objective.model_dump(),
        "histogram": data.histogram.model_dump(),
        "summary": data.summary.model_dump(),
    }
    (folder / "data.json").write_text(json.dumps(document), encoding="utf-8")
    if data.tokenizer is not None:
        data.tokenizer.save_pretrained(folder / "tokenizer")


def _remove_in_process(folder: Path, process: int) -> None:
    if os.getpid() == process:  # a fork ends with the same data, and must not remove it
        shutil.rmtree(folder, ignore_errors=True)


def load_data(folder: Path) -> TrainingData:
    """Load saved data without the tokenizer. Loading one may start threads, and processes are yet to be forked."""
    values = json.loads((folder / "data.json").read_bytes())

    def sequences(name: str) -> Sequences | None:
        if not (folder / f"{name}.tokens.npy").exists():
            return None
        paths = {path.name.split(".")[1]: path for path in folder.glob(f"{name}.*.npy")}
        arrays = {array: np.load(path, mmap_mode="r") for array, path in paths.items()}
        return Sequences(**arrays, sequence_length=values["sequence_length"])

    training = sequences("training")
    assert training is not None
    return TrainingData(
        training=training,
        evaluation=sequences("evaluation"),
        objective=Objective.model_validate(values["objective"]),
        histogram=LengthHistogram.model_validate(values["histogram"]),
        summary=CorpusSummary.model_validate(values["summary"]),
        tokenizer=None,
    )
