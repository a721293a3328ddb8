"""Read the corpus of a path, or of the data sets of a description, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from upshift.errors import RequestError
from upshift.training.data.corpus import Corpus, Document, Documents, content_of, read_corpus
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import DataOptions
from upshift.training.data.row_formats import check_data_format
from upshift.training.data.rows.data_set import DataSet, Described, read_description
from upshift.training.data.rows.described_rows import RowReader
from upshift.training.data.rows.row_slice import read_split

NOT_OF_RATINGS = (  # keys of a data set that no row with a rating has
    "template",
    "prompt",
    "loss_on",
    "learned_turns",
    "learned_roles",
    "learned_ends",
    "turn_ends",
    "answer_ends",
)


class JoinedDocuments(Documents):
    """The documents of several data sets, in their order. Each counts and reports its own."""

    def __init__(self, parts: Sequence[Documents], origin: str) -> None:
        def read(_: Documents) -> Iterator[tuple[str, Document | None]]:
            for part in parts:
                yield from part.with_places()

        super().__init__(read, origin, sum(part.num_bytes for part in parts))
        self.may_mix_answers = True
        self.columns = parts[0].columns


def read_data(data: Path | str, options: DataOptions, *, has_decoder: bool, is_evaluation: bool = False) -> Corpus:
    """Return the corpus of a path, or of a description of data sets. Raise RequestError for data that cannot be read.

    ``has_decoder`` and ``is_evaluation`` are those of ``read_corpus``. The options name a split of the training data.
    """
    described = read_description(data)
    if described is None:
        is_split = options.split is not None and not is_evaluation
        return read_corpus(
            data,
            text_column=options.text_column,
            data_format=options.data_format,
            has_decoder=has_decoder,
            is_evaluation=is_evaluation,
            pair_objective=options.pair_objective,
            rows=read_split(options.split) if is_split and options.split is not None else None,
            writes_turns=options.chat_template is not None,
        )
    named = {"text-column": options.text_column, "data-format": options.data_format, "split": options.split}
    for name, value in named.items():
        if value is not None and not is_evaluation:
            raise RequestError(
                f"--{name} {value} is for one path, and {described.origin} describes data sets; write it there, for each of them"
            )
    corpora = [
        replace(_read_data_set(data_set, options, has_decoder=has_decoder), loss_on=data_set.loss_on)
        for data_set in described.data_sets
    ]
    return corpora[0] if len(corpora) == 1 else _join(corpora, described, holds_out=options.eval_size != 0)


def _read_data_set(data_set: DataSet, options: DataOptions, *, has_decoder: bool) -> Corpus:
    if options.objective == "kto":
        _check_unpaired(data_set)
    try:
        check_data_format(data_set.text_column, data_set.format, pair_objective=options.pair_objective)
    except RequestError as error:
        raise RequestError(f"{data_set.path}: {error}") from None
    return read_corpus(
        data_set.path,
        text_column=data_set.text_column,
        data_format=data_set.format,
        has_decoder=has_decoder,
        pair_objective=options.pair_objective,
        rows=data_set.rows,
        reader=RowReader(data_set),
        writes_turns=options.chat_template is not None and not data_set.has_template,
    )


def _check_unpaired(data_set: DataSet) -> None:
    """Raise RequestError for a key that writes rows in another way than the chat template, or that chooses what is learned."""
    name = next((name for name in NOT_OF_RATINGS if getattr(data_set, name) != DataSet.model_fields[name].default), None)
    if name is not None:
        raise RequestError(
            f"{data_set.path}: {name} is not for --objective kto, which learns whole completions, and whose chats the "
            "tokenizer's chat template writes; leave it out"
        )


def _join(corpora: Sequence[Corpus], described: Described, *, holds_out: bool) -> Corpus:
    """Return several corpora as one. Raise RequestError if rows with an answer are beside others."""
    first = corpora[0]
    for corpus in corpora[1:]:
        if corpus.is_chat != first.is_chat or corpus.is_tokenized != first.is_tokenized:
            raise RequestError(
                f"{described.origin}: {first.origin} holds {_content(first)}, and {corpus.origin} holds {_content(corpus)}; "
                "train on rows with answers, on texts, or on token ids, and not on two of them together"
            )
    evaluations = [corpus.evaluation for corpus in corpora if corpus.evaluation is not None]
    evaluation = JoinedDocuments(evaluations, f"the validation splits of {described.origin}") if evaluations else None
    if evaluation is None and holds_out:
        say_once(f"{described.origin}: the rows that are held out for evaluation are the last ones of {corpora[-1].origin}")
    return Corpus(
        origin=described.origin,
        documents=JoinedDocuments([corpus.documents for corpus in corpora], described.origin),
        evaluation=evaluation,
        is_tokenized=first.is_tokenized,
        columns=first.columns,
        parts=tuple(corpora),
    )


def _content(corpus: Corpus) -> str:
    document = corpus.documents.first()
    return "nothing" if document is None else content_of(document)
