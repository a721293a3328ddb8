"""Turn a data path into tokenized sequences, and check them against the model. The plan and the run share the result."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.models.build import choose_class
from upshift.models.profile import num_sides
from upshift.models.sequence_length import sequence_length_of
from upshift.models.source import ModelSource
from upshift.planning.workload import LengthHistogram
from upshift.training.batches.model_objective import find_objective
from upshift.training.batches.objective import Kind, Objective, objective_for
from upshift.training.data.chat_rows import PreferencePair, PromptCompletion
from upshift.training.data.chat_template import check_chat_template
from upshift.training.data.corpus import Corpus, CorpusSummary, content_of, has_chats
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import DataOptions, LongRows
from upshift.training.data.row_formats import DESCRIPTIONS, PREFERENCE, UNPAIRED, RowFormat
from upshift.training.data.rows.joined import read_data
from upshift.training.data.rows.token_rows import LABELS, TokenRow
from upshift.training.data.tokenizer import Progress, load_tokenizer, long_rows_of, tokenize, tokenize_corpus
from upshift.training.data.tokens import (
    IN_MEMORY_BYTES,
    Sequences,
    TokenizedCorpus,
    cannot_write,
    count_single_tokens,
    cut_sequences,
    highest_id,
    histogram_of,
    make_cache_folder,
    pair_sequences,
    rated_sequences,
    view_sequences,
)

FOLDER_PREFIX = "upshift-data-"
UNUSED_SECONDS = 3600.0  # a younger folder without a lock may be one that a process is making


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
        folder, lock = _make_folder(sum(array.nbytes for array in self.training.arrays.values()))
        weakref.finalize(self, _remove_in_process, folder, lock, os.getpid())
        try:
            save_data(self, folder)
        except OSError as error:
            raise cannot_write(error, folder.parent) from None
        return folder


def prepare_data(
    source: ModelSource,
    data_path: Path | str,
    *,
    eval_data: Path | str | None = None,
    tokenizer: Any | None = None,
    sequence_length: int | None = None,
    options: DataOptions | None = None,
    progress: Progress | None = None,
) -> TrainingData:
    """Read, tokenize and cut the data. Raise RequestError for data that the model cannot be trained on.

    ``eval_data`` is the path of the evaluation data. Without it, the validation split of the data is used, or the last documents
    are held out. Without ``tokenizer`` the model's own is used, and without ``sequence_length`` the model's default.
    """
    options = options or DataOptions()
    sequence_length = sequence_length_of(source, sequence_length)
    corpus = _read_corpus(source, data_path, options)
    if eval_data is not None:
        corpus = _with_evaluation_data(corpus, _read_corpus(source, eval_data, options, is_evaluation=True))
    tokenizer = _choose_tokenizer(source, tokenizer, corpus, options)
    objective = _find_objective(source, tokenizer, has_rewards=options.has_reward_head)
    _check_objective(options, objective, source)
    objective = objective.changed(has_pairs=options.has_pairs, has_ratings=options.has_ratings)
    _check_loss_on(corpus, options)
    if corpus.is_chat:
        _check_takes_chats(corpus, objective, source)
        _report_chats(corpus, options, source)
    elif not corpus.is_tokenized:
        objective.check_masks()
    length = sequence_length * num_sides(objective.kind)
    tokenized, held_out = tokenize_corpus(
        corpus, tokenizer, sequence_length=length, side_length=sequence_length, options=options, progress=progress
    )
    for part in (tokenized, held_out):
        if part is not None and highest_id(part.tokens, part.labels) >= (objective.vocab_size or 0):
            raise _outside_vocabulary(corpus, part, objective.vocab_size or 0)
    if tokenized.labels is None:
        objective.check_masks()
    _report_single_tokens(tokenized, length, objective, corpus.origin)
    training = _make_sequences(tokenized, length, objective, long_rows_of(corpus, options), corpus.origin)
    if not len(training):
        raise _nothing_to_learn(corpus.origin, 0 if tokenized.num_documents else tokenized.num_long, length)
    _report_ratings(training, corpus.origin)
    evaluation = None
    if held_out is not None:
        evaluation = _make_sequences(held_out, length, objective, long_rows_of(corpus, options), "the held-out data")
        if eval_data is not None and not evaluation:
            raise _nothing_to_learn(str(eval_data), 0 if held_out.num_documents else held_out.num_long, length)
    return TrainingData(
        training=training,
        evaluation=evaluation if evaluation is not None and len(evaluation) else None,
        objective=objective,
        histogram=histogram_of(training.lengths, length),
        summary=corpus.summary(),
        tokenizer=tokenizer,
    )


def _report_single_tokens(tokenized: TokenizedCorpus, length: int, objective: Objective, origin: str) -> None:
    """Tell the user how many sequences of one token are left out. Pairs are counted where they are cut."""
    num_single = 0 if objective.has_pairs else count_single_tokens(tokenized, length)
    if num_single:
        say_once(f"{origin}: {num_single} sequences of one token are left out, because they predict nothing")


def _make_sequences(tokenized: TokenizedCorpus, length: int, objective: Objective, long_rows: LongRows, origin: str) -> Sequences:
    """Return the sequences of at most ``length`` tokens that have something to learn. Tell the user what is left out."""
    if objective.has_ratings and tokenized.num_documents:
        return rated_sequences(tokenized, length, long_rows, origin)
    if objective.has_pairs:
        return pair_sequences(tokenized, length, long_rows, origin)
    return _drop_unlabelled(cut_sequences(tokenized, length), objective, origin)


def _report_ratings(training: Sequences, origin: str) -> None:
    """Tell the user how many rated answers are good and bad, or that one kind is missing."""
    if training.ratings is None:
        return
    num_good = int(training.ratings[0::2].sum())
    num_bad = len(training) // 2 - num_good
    if num_good and num_bad:
        say_once(f"{origin}: {num_good:,} good and {num_bad:,} bad completions to train on")
        return
    kind, missing = ("good", "bad") if num_good else ("bad", "good")
    say_once(
        f"{origin}: all {num_good + num_bad:,} completions to train on are {kind}; without {missing} ones the model does not "
        "learn to tell them apart"
    )


def _check_objective(options: DataOptions, objective: Objective, source: ModelSource) -> None:
    """Raise RequestError for an objective that is not the model's, and for options that are not for pairs."""
    name = options.objective
    if name in (None, objective.kind):
        return
    if not options.has_pairs:
        raise RequestError(
            f"--objective {name} is not for {source.reference!r}, which is trained as {objective.kind}; leave it out"
        )
    needed_kind = "sequence-classification" if options.has_reward_head else "causal-lm"
    if objective.kind != needed_kind:
        raise RequestError(
            f"--objective {name} is for causal language models, and {source.reference!r} is of the kind {objective.kind}; leave "
            "it out, or use a causal language model"
        )
    if objective.kind == "causal-lm" and not objective.loss_shifts:
        raise RequestError(
            f"--objective {name} compares losses of next tokens, and the loss of {source.reference!r} compares a label with the "
            "output of the label's own place; use another model"
        )
    if objective.padding == "none":
        raise RequestError(
            f"--objective {name} pads two answers to one length, and padding changes the results of {source.reference!r}; use "
            "another model"
        )
    if options.loss_on is not None:
        raise RequestError(
            f"--loss-on {options.loss_on} is not for --objective {name}, which compares the answers as a whole; leave it out"
        )
    if options.long_rows == "split":
        raise RequestError(
            f"--long-rows split is not for --objective {name}, whose answers are compared as a whole; use cut or drop"
        )


def _read_corpus(source: ModelSource, data_path: Path | str, options: DataOptions, *, is_evaluation: bool = False) -> Corpus:
    """Return the corpus of a path. The labels of an encoder-decoder may be more or fewer than its token ids."""
    has_decoder = choose_class(source.hf_config, source.reference)[1] == "seq2seq-lm"
    corpus = read_data(data_path, options, has_decoder=has_decoder, is_evaluation=is_evaluation)
    if corpus.columns is not None and corpus.columns.is_pair and corpus.is_tokenized and options.long_rows not in (None, "cut"):
        raise RequestError(
            f"--long-rows {options.long_rows} is not for pairs of input_ids and labels, whose sides are cut; use --long-rows cut"
        )
    return corpus


def _with_evaluation_data(corpus: Corpus, other: Corpus) -> Corpus:
    """Return the corpus with the documents of another path for evaluation.

    Raise RequestError if the two hold different kinds of documents.
    """
    if corpus.evaluation is not None:
        say_once(f"{corpus.evaluation.origin} is left alone, because {other.origin} is the evaluation data")
    documents = other.documents
    first = corpus.documents.first()
    first_evaluation = documents.first()
    if first is not None and first_evaluation is not None and content_of(first) != content_of(first_evaluation):
        raise RequestError(
            f"the evaluation data {other.origin} holds {content_of(first_evaluation)}, and the training data {corpus.origin} "
            f"holds {content_of(first)}; give two of the same kind"
        )
    return replace(corpus, evaluation=documents)


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


def _nothing_to_learn(origin: str, num_dropped: int, length: int) -> RequestError:
    """Return the error about data without a sequence that can be trained on. ``num_dropped``: all rows, if all are too long."""
    if num_dropped:
        return RequestError(
            f"{origin}: all {num_dropped} rows are longer than {length} tokens, and --long-rows drop leaves them out; use "
            "--long-rows cut, or a longer --sequence-length"
        )
    return RequestError(
        f"{origin} has no sequence of two or more tokens with something to learn; give more text, or a longer --sequence-length"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeDocuments:
    """The tokens of documents before they are cut. The lengths of the sequences follow from them for each sequence length."""

    tokenized: TokenizedCorpus
    origin: str
    kind: Kind
    long_rows: LongRows

    def histogram(self, sequence_length: int) -> LengthHistogram:
        """Return the histogram of ``prepare_data``, which may hold documents out. Raise RequestError if nothing is learned."""
        sides = num_sides(self.kind)
        views = view_sequences(self.tokenized, sequence_length, sides, self.long_rows)
        views = views.select(np.flatnonzero(_have_labels(views, Objective(kind=self.kind))))
        if not len(views):
            length = sequence_length * sides
            are_dropped = self.long_rows == "drop" and bool((np.diff(self.tokenized.offsets) > length).all())
            raise _nothing_to_learn(self.origin, self.tokenized.num_documents if are_dropped else 0, length)
        lengths = views.lengths
        if views.source_lengths is not None:
            lengths = lengths - views.source_lengths + np.minimum(views.source_lengths, sequence_length)
        return histogram_of(lengths, sequence_length * sides)


def read_whole_documents(source: ModelSource, data_path: str, options: DataOptions) -> WholeDocuments:
    """Return the tokens of the documents of the training split."""
    corpus = _read_corpus(source, data_path, options)
    tokenizer = _choose_tokenizer(source, None, corpus, options)
    return WholeDocuments(
        tokenized=tokenize(corpus.documents, tokenizer, loss_on=options.loss_on or "assistant"),
        origin=corpus.origin,
        kind=_find_objective(source, tokenizer).kind,
        long_rows=long_rows_of(corpus, options),
    )


def _check_loss_on(corpus: Corpus, options: DataOptions) -> None:
    """Raise RequestError if the data does not have what the loss is to be computed on."""
    has_labels = corpus.is_tokenized and corpus.columns is not None and corpus.columns.has_labels
    if options.loss_on == "assistant" and not corpus.is_chat:
        raise RequestError(
            f"--loss-on assistant is for chats, and for prompts with completions, and {corpus.origin} holds "
            f"{'token ids' if corpus.is_tokenized else 'text'}; leave it out"
        )
    if options.loss_on == "all" and has_labels:
        raise RequestError(
            f"--loss-on all learns all tokens, and the column {LABELS!r} of {corpus.origin} says which are learned; "
            "leave one of the two out"
        )


def _check_takes_chats(corpus: Corpus, objective: Objective, source: ModelSource) -> None:
    """Raise RequestError if the model is not a causal language model."""
    assert corpus.columns is not None
    if objective.kind != "causal-lm" and not objective.has_pairs:
        raise RequestError(
            f"{corpus.origin} holds {DESCRIPTIONS[corpus.columns.format]}, which only causal language models are trained on, and "
            f"{source.reference!r} is of the kind {objective.kind}; give text, or a causal language model"
        )


def _report_chats(corpus: Corpus, options: DataOptions, source: ModelSource) -> None:
    """Tell the user what the rows are, what is learned of them, and that a head is new."""
    for part in corpus.parts or (corpus,):
        say_once(_describe_chats(part, options))
    if source.new_head_on is not None and source.adapter_directory is None:
        say_once(f"{source.reference} is a {source.new_head_on}; it gets a new reward head, whose weights are random")


TEXTS_OR_MESSAGES: tuple[RowFormat, ...] = ("prompt-completion", PREFERENCE, UNPAIRED)  # rows that may hold either
LEARNED = {  # by --loss-on, and by the format of the rows, if it is assistant
    "assistant": "the assistant's turns",
    "assistant-content": "the contents of the assistant's turns",
    "content": "the contents of all turns",
    "all": "all tokens",
    "prompt-completion": "the completion",
    "segments": "the segments whose label is true",
}


def _describe_chats(corpus: Corpus, options: DataOptions) -> str:
    """Return a line that says what the rows are, and what is learned of them."""
    assert corpus.columns is not None
    if options.has_ratings:
        unpaired = ", each for itself: chosen ones are good, rejected ones bad" if corpus.columns.format == PREFERENCE else ""
        learned = f"to give the good answers and not the bad ones{unpaired}"
    elif corpus.columns.format == PREFERENCE:
        learned = "larger rewards for the chosen answers" if options.has_reward_head else "to prefer the chosen answers"
    else:
        loss_on = corpus.loss_on or options.loss_on or "assistant"
        learned = LEARNED.get(corpus.columns.format, LEARNED[loss_on]) if loss_on == "assistant" else LEARNED[loss_on]
    return f"{corpus.origin}: {DESCRIPTIONS[corpus.columns.format]}{_describe_texts(corpus)}; the model learns {learned}"


def _describe_texts(corpus: Corpus) -> str:
    """Return what becomes of plain texts of a prompt and an answer, or nothing for other rows."""
    assert corpus.columns is not None
    if corpus.columns.format not in TEXTS_OR_MESSAGES:
        return ""
    if corpus.columns.writes_turns:
        return "; --chat-template writes a plain text of a prompt as the user's turn, and its answer as the assistant's"
    first = corpus.documents.first()
    texts = first.chosen if isinstance(first, PreferencePair) else first
    if not isinstance(texts, PromptCompletion):
        return ""
    return ", joined as they are, without a chat template (with --chat-template, they are written as turns)"


def _drop_unlabelled(sequences: Sequences, objective: Objective, origin: str) -> Sequences:
    """Return the sequences that have a label that counts. A batch without any would have no mean loss."""
    has_labels = _have_labels(sequences, objective)
    if has_labels.all():
        return sequences
    say_once(f"{origin}: {int((~has_labels).sum())} sequences without a label to learn are left out")
    return sequences.select(np.flatnonzero(has_labels))


def _have_labels(sequences: Sequences, objective: Objective) -> NDArray[np.bool_]:
    """Return for each sequence whether the data has a label that counts, or has no labels at all."""
    if sequences.labels is None:
        return np.ones(len(sequences), bool)
    return objective.counted_labels(sequences, np.arange(len(sequences))) > 0


def _choose_tokenizer(source: ModelSource, tokenizer: Any | None, corpus: Corpus, options: DataOptions) -> Any | None:
    """Return the user's tokenizer, or the model's own, with the chat template that the user gives."""
    if options.chat_template is None:
        return tokenizer or _load_own_tokenizer(source, is_needed=not corpus.is_tokenized)
    chosen: Any = copy.deepcopy(tokenizer) or _load_own_tokenizer(source, is_needed=True)
    chosen.chat_template = options.chat_template
    check_chat_template(chosen)
    if not has_chats(corpus.documents.first()):
        say_once(
            f"--chat-template writes no row of {corpus.origin}, so the model does not learn its form; it is only saved with the "
            "model. To train on chats, give rows with messages, or with prompt and completion (docs/data.md#chats)"
        )
    return chosen


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


def _find_objective(source: ModelSource, tokenizer: Any | None, *, has_rewards: bool = False) -> Objective:
    """Return the objective of the model, with the token ids of the tokenizer."""
    objective = find_objective(source, tokenizer=tokenizer, has_rewards=has_rewards)
    if tokenizer is None:  # find_objective then masks with token 0, which is right for trials only
        of_model = {name: getattr(objective, name) for name in ("padding", "loss_splits")}
        objective = objective_for(objective.kind, None, vocab_size=objective.vocab_size or 0).changed(**of_model)
    if has_rewards:
        _check_padding(objective, tokenizer, source)
    elif objective.pad_token_id >= (objective.vocab_size or 0):
        return objective.changed(pad_token_id=0)  # padding is never a label and never attended to, but it is embedded
    return objective


def _check_padding(objective: Objective, tokenizer: Any | None, source: ModelSource) -> None:
    """Raise RequestError without a padding token or EOS in the vocabulary. A text's reward is that of the token before them."""
    if tokenizer is None or (tokenizer.pad_token_id is None and tokenizer.eos_token_id is None):
        raise RequestError(
            f"the tokenizer of {source.reference!r} has no padding token and no EOS, and --objective reward looks for the end of "
            "a text by them; name one with tokenizer.pad_token, and save the tokenizer"
        )
    if objective.pad_token_id >= (objective.vocab_size or 0):
        raise RequestError(
            f"the padding token of {source.reference!r} is {objective.pad_token_id}, and the model's vocabulary has "
            f"{objective.vocab_size} tokens; name another one with tokenizer.pad_token, or resize the model's embeddings"
        )


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


def _make_folder(num_bytes: int) -> tuple[Path, int | None]:
    """Return a new folder for so many bytes, and the lock of a folder in the cache. Little data is in the system's folder."""
    if num_bytes <= IN_MEMORY_BYTES:
        return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)), None
    cache = make_cache_folder()
    _remove_unused_folders(cache)
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=cache))
        descriptor = os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError as error:
        raise cannot_write(error, cache) from None
    with suppress(OSError):  # a network file system without locks
        _lock(descriptor)
    return folder, descriptor


def _remove_unused_folders(cache: Path) -> None:
    """Remove the folders of processes that were killed. No system tidies up the cache."""
    for lock_file in cache.glob(f"{FOLDER_PREFIX}*.lock"):
        with suppress(OSError), lock_file.open("r+b") as lock:
            if time.time() - os.fstat(lock.fileno()).st_mtime > UNUSED_SECONDS:
                _lock(lock.fileno())  # BlockingIOError: a process uses the folder
                _remove_folder(lock_file.with_suffix(""))


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _lock(descriptor: int) -> None:
    """Take the lock. Raise BlockingIOError if another process holds it, and OSError on a file system without locks."""
    import fcntl  # not on every system

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _lock_file(folder).unlink(missing_ok=True)


def _remove_in_process(folder: Path, lock: int | None, process: int) -> None:
    if os.getpid() == process:  # a forked process ends with the same object, and must not remove the folder
        _remove_folder(folder)
        if lock is not None:
            os.close(lock)


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
