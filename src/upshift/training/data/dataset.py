"""Turn a data path into tokenized sequences, and check them against the model. The plan and the run share the result."""

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
from upshift.models.build import choose_class
from upshift.models.profile import num_sides
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import ModelSource
from upshift.planning.workload import LengthHistogram
from upshift.training.batches.objective import Objective, objective_for
from upshift.training.batches.plan_layout import find_objective
from upshift.training.data.corpus import Corpus, CorpusSummary, TokenRow, read_corpus
from upshift.training.data.data_files import say_once
from upshift.training.data.tokenizer import Progress, load_tokenizer, tokenize_corpus
from upshift.training.data.tokens import (
    Sequences,
    TokenizedCorpus,
    count_single_tokens,
    cut_sequences,
    highest_id,
    histogram_of,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingData:
    """The tokenized data of a run."""

    training: Sequences
    evaluation: Sequences | None  # None: there is too little data to hold any out
    objective: Objective
    histogram: LengthHistogram
    summary: CorpusSummary
    tokenizer: Any | None  # None: the data was tokenized already and the model has none

    @cached_property
    def folder(self) -> Path:
        """Return a folder with the saved data. Trials and the run share it. It is removed with this object."""
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

    Without ``tokenizer`` the model's own is used, and without ``sequence_length`` the model's default.
    """
    sequence_length = sequence_length_of(source, sequence_length)
    has_decoder = choose_class(source.hf_config, source.reference)[1] == "seq2seq-lm"
    corpus = read_corpus(data_path, text_column=text_column, has_decoder=has_decoder)
    tokenizer = tokenizer or _load_own_tokenizer(source, is_needed=not corpus.is_tokenized)
    objective = _find_objective(source, tokenizer)
    if not corpus.is_tokenized:
        objective.check_masks()
    length = sequence_length * num_sides(objective.kind)
    tokenized, held_out = tokenize_corpus(
        corpus, tokenizer, sequence_length=length, side_length=sequence_length, progress=progress
    )
    for part in (tokenized, held_out):
        if part is not None and highest_id(part.tokens, part.labels) >= (objective.vocab_size or 0):
            raise _outside_vocabulary(corpus, part, objective.vocab_size or 0)
    if tokenized.labels is None:
        objective.check_masks()
    num_single = count_single_tokens(tokenized, length)
    if num_single:
        say_once(f"{corpus.origin}: {num_single} sequences of one token are left out, because they predict nothing")
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


def _outside_vocabulary(corpus: Corpus, tokenized: TokenizedCorpus, vocab_size: int) -> RequestError:
    """Return the error about an id outside of the vocabulary. If the data has ids, it names the first row with such an id."""
    if corpus.is_tokenized:
        for documents in filter(None, (corpus.documents, corpus.evaluation)):
            for place, row in documents.with_places():
                if isinstance(row, TokenRow) and highest_id(row.ids, row.labels) >= vocab_size:
                    return _no_such_id(place, highest_id(row.ids, row.labels), vocab_size)
    return _no_such_id("the tokenized data", highest_id(tokenized.tokens, tokenized.labels), vocab_size)


def _no_such_id(place: str, token_id: int, vocab_size: int) -> RequestError:
    return RequestError(
        f"{place} holds token id {token_id}, the model's vocabulary has {vocab_size} (ids 0 to {vocab_size - 1}); "
        "tokenize with the model's own tokenizer, or resize the model's embeddings"
    )


def _drop_unlabelled(sequences: Sequences, objective: Objective, origin: str) -> Sequences:
    """Return the sequences that have a label that counts. A batch without any would have no mean loss."""
    if sequences.labels is None:
        return sequences
    has_labels = objective.counted_labels(sequences, np.arange(len(sequences))) > 0
    if not has_labels.all():
        say_once(f"{origin}: {int((~has_labels).sum())} sequences without a label to learn are left out")
    return sequences.select(np.flatnonzero(has_labels))


def _load_own_tokenizer(source: ModelSource, *, is_needed: bool) -> Any | None:
    """Return the model's own tokenizer, or None if it has none. Raise RequestError if it is needed."""
    is_on_disk = Path(source.reference).exists()
    if is_on_disk and source.directory is None:
        if is_needed:
            raise RequestError(
                f"{source.reference} is a config without a tokenizer beside it; "
                "give a model directory with a tokenizer, or data with a column input_ids"
            )
        return None
    try:
        return load_tokenizer(source.directory if is_on_disk and source.directory else source.reference)
    except RequestError:
        if is_needed:
            raise
        return None


def _find_objective(source: ModelSource, tokenizer: Any | None) -> Objective:
    """Return the objective of the model, with the token ids of the tokenizer."""
    objective = find_objective(source, tokenizer=tokenizer)
    if tokenizer is None:  # find_objective then masks with token 0, which is right for trials only
        of_model = {name: getattr(objective, name) for name in ("padding", "loss_splits")}
        objective = objective_for(objective.kind, None, vocab_size=objective.vocab_size or 0).changed(**of_model)
    if objective.pad_token_id >= (objective.vocab_size or 0):
        return objective.changed(pad_token_id=0)  # padding is never a label and never attended to, but it is embedded
    return objective


def save_data(data: TrainingData, folder: Path) -> None:
    """Save data for the processes of a run. ``load_data`` maps the arrays, so all ranks share one copy in memory."""
    for split, sequences in (("training", data.training), ("evaluation", data.evaluation)):
        if sequences is not None:
            for name, array in sequences.arrays.items():
                np.save(folder / f"{split}.{name}.npy", array)
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
    if os.getpid() == process:  # a forked process ends with the same object, and must not remove the folder
        shutil.rmtree(folder, ignore_errors=True)


def load_data(folder: Path) -> TrainingData:
    """Load saved data without the tokenizer. Loading a tokenizer may start threads, and processes are forked later."""
    document = json.loads((folder / "data.json").read_bytes())

    def load_sequences(split: str) -> Sequences | None:
        if not (folder / f"{split}.tokens.npy").exists():
            return None
        paths = {path.name.split(".")[1]: path for path in folder.glob(f"{split}.*.npy")}
        arrays = {name: np.load(path, mmap_mode="r") for name, path in paths.items()}
        return Sequences(**arrays, sequence_length=document["sequence_length"])

    training = load_sequences("training")
    assert training is not None
    return TrainingData(
        training=training,
        evaluation=load_sequences("evaluation"),
        objective=Objective.model_validate(document["objective"]),
        histogram=LengthHistogram.model_validate(document["histogram"]),
        summary=CorpusSummary.model_validate(document["summary"]),
        tokenizer=None,
    )
