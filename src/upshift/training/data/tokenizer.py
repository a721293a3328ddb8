"""Turn text into tokens: train a small byte-level BPE, load a model's own tokenizer, and tokenize a corpus in parallel.

This module decides which ids stand around a document: those that the tokenizer itself adds (BOS, CLS .. SEP), then EOS if the
tokenizer has one and has not added it. Ids with which the text already begins or ends are not added again.

Documents above 256 Ki characters are cut into pieces after a line break, because one text is tokenized on one core. A tokenizer
that marks the start of a text may add one more mark for each piece. Many token ids are kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from upshift.errors import RequestError
from upshift.text import NO_VOCABULARY, has_words
from upshift.training.data.chat_tokens import encode_rows
from upshift.training.data.corpus import Corpus, Document, Documents
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import DataOptions, LongRows, LossOn
from upshift.training.data.row_formats import MARGIN, PREFERENCE
from upshift.training.data.rows.token_rows import TokenRow, make_pair
from upshift.training.data.special_tokens import UnknownTokens, ids_around_document, overlap
from upshift.training.data.text_files import PIECE_CHARACTERS, TextFile
from upshift.training.data.tokens import NO_LIMIT, CorpusWriter, RowLimit, TokenizedCorpus, hold_out_evaluation, hold_out_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BATCH_BYTES = 2**22
MIN_BYTE_VOCABULARY = 257  # 256 bytes and the end-of-text token
LONG_ROWS_OUTCOMES = {"cut": "are cut", "split": "are split into several sequences", "drop": "are left out"}
Progress = Callable[[int, int], None]  # gets the bytes that are done, and all bytes


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a GPT-2 style tokenizer. On little text it may be smaller than ``vocab_size``."""
    if vocab_size < MIN_BYTE_VOCABULARY:
        raise RequestError(f"vocab_size={vocab_size} is too few for byte-level BPE; use {MIN_BYTE_VOCABULARY} or more")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(model_dir: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory or a hub id. Code from the directory never runs."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many types, bare Exception among them
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:160]
        raise _missing_tokenizer(model_dir, reason) from None
    # Without vocabulary files transformers builds an empty tokenizer instead of failing.
    if not tokenizer or not has_words(tokenizer):
        raise _missing_tokenizer(model_dir, NO_VOCABULARY)
    return tokenizer


def tokenize(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    loss_on: LossOn = "assistant",
    side_length: int | None = None,
    limit: RowLimit = NO_LIMIT,
    progress: Progress | None = None,
) -> TokenizedCorpus:
    """Return the token ids of documents, and the labels of those that have some. Tokenized documents stay as they are.

    ``loss_on`` says what is learned of chats, and of prompts with completions. If a pair has an encoder's tokens and a decoder's
    labels, each side is cut to ``side_length``. The user is told how many are. ``limit`` holds for all other rows.
    """
    writer = CorpusWriter(limit)
    num_cut = 0
    pieces: list[_TextPiece] = []
    batch_bytes = 0
    byte_progress = _ByteProgress(documents, progress)
    ids_around: tuple[list[int], list[int]] | None = None
    unknown = UnknownTokens(tokenizer)
    for document in encode_rows(documents, tokenizer, loss_on, unknown):
        if isinstance(document, TokenRow):
            if document.source_length is not None:
                whole_length = len(document.ids)
                document = _cut_pair(document, document.source_length, side_length or whole_length)
                num_cut += len(document.ids) < whole_length
            writer.add_part(document.ids, document.labels)
            writer.end_row(document.source_length, margin=document.margin, rating=document.rating)
            byte_progress.add(document.ids.nbytes)
            continue
        if tokenizer is None:
            raise RequestError("the data is text and there is no tokenizer; give one, or data with a column input_ids")
        ids_around = ids_around or ids_around_document(tokenizer)
        assert isinstance(document, str | TextFile)  # encode_rows yields no other kind
        for piece in _cut_text(document):
            pieces.append(piece)
            batch_bytes += len(piece.text)
            if batch_bytes >= BATCH_BYTES:
                _encode(pieces, tokenizer, ids_around, writer, unknown)
                byte_progress.add(sum(_num_bytes(piece.text) for piece in pieces))
                pieces = []
                batch_bytes = 0
    if pieces and tokenizer is not None and ids_around is not None:
        _encode(pieces, tokenizer, ids_around, writer, unknown)
    unknown.report()
    byte_progress.finish()
    if num_cut:
        say_once(f"the inputs or the labels of {num_cut} rows are longer than {side_length} tokens, and are cut to that length")
    return writer.finish()


def _cut_pair(row: TokenRow, source_length: int, side_length: int) -> TokenRow:
    """Return a pair with at most ``side_length`` tokens on each side."""
    if row.labels is None or max(source_length, len(row.ids) - source_length) <= side_length:
        return row
    return make_pair(row.ids[:source_length][:side_length], row.labels[source_length:][:side_length])


def _encode(
    pieces: list[_TextPiece],
    tokenizer: Any,
    ids_around: tuple[list[int], list[int]],
    writer: CorpusWriter,
    unknown: UnknownTokens,
) -> None:
    texts = [piece.text for piece in pieces]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    ids_before, ids_after = ids_around
    for piece, piece_ids in zip(pieces, encoded, strict=True):
        if piece.is_first:
            writer.add_part(ids_before[: len(ids_before) - overlap(ids_before, piece_ids)])
        writer.add_part(piece_ids)
        unknown.add_piece(piece_ids)
        if piece.is_last:
            unknown.end_text()
            writer.add_part(ids_after[overlap(piece_ids, ids_after) :])
            writer.end_row()
    unknown.check()


def long_rows_of(corpus: Corpus, options: DataOptions) -> LongRows:
    """Return what happens to rows that are longer than a sequence.

    As in TRL, chats are cut, and pairs whose rewards are compared are left out: a reward is of a whole text. Texts are split.
    """
    if options.has_reward_head:
        return options.long_rows or "drop"
    return options.long_rows or ("cut" if corpus.is_chat else "split")


def tokenize_corpus(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sequence_length: int,
    side_length: int | None = None,
    options: DataOptions | None = None,
    progress: Progress | None = None,
) -> tuple[TokenizedCorpus, TokenizedCorpus | None]:
    """Return the training and the evaluation corpus. Without an evaluation split the last documents are held out.

    ``side_length`` is the sequence length of an encoder and of its decoder.
    """
    options = options or DataOptions()
    if corpus.evaluation is not None and options.eval_size is not None:
        raise RequestError(
            f"--eval-size {options.eval_size:g} holds rows of the training out, and {corpus.evaluation.origin} is the evaluation "
            "data; leave --eval-size out"
        )
    loss_on = options.loss_on or "assistant"
    long_rows = long_rows_of(corpus, options)
    limit = NO_LIMIT if options.has_pairs else RowLimit(sequence_length, long_rows)  # a pair is cut as a whole, later

    def tokenize_part(documents: Documents, progress: Progress | None) -> TokenizedCorpus:
        tokenized = tokenize(documents, tokenizer, loss_on=loss_on, side_length=side_length, limit=limit, progress=progress)
        if tokenized.num_long and (corpus.is_chat or options.long_rows is not None):
            outcome = LONG_ROWS_OUTCOMES[long_rows]
            say_once(f"{documents.origin}: {tokenized.num_long} rows longer than {sequence_length} tokens {outcome}")
        return tokenized

    training = tokenize_part(corpus.documents, progress)
    if corpus.evaluation is None and options.has_pairs:
        has_pairs = corpus.columns is None or corpus.columns.format == PREFERENCE
        return hold_out_rows(training, options.eval_size, documents_per_row=2 if has_pairs else 1)
    if corpus.evaluation is None:
        return hold_out_evaluation(training, sequence_length=sequence_length, size=options.eval_size)
    evaluation = tokenize_part(corpus.evaluation, None)
    if evaluation.num_tokens and (evaluation.labels is None) != (training.labels is None):
        raise RequestError(
            f"one of {corpus.documents.origin} and {corpus.evaluation.origin} has labels, the other has none; give both or "
            "neither"
        )
    if evaluation.num_tokens and training.num_tokens and (evaluation.margins is None) != (training.margins is None):
        raise RequestError(
            f"one of {corpus.documents.origin} and {corpus.evaluation.origin} has a column {MARGIN!r}, the other has none; give "
            "it in both or in neither"
        )
    return training, evaluation


def _missing_tokenizer(model_dir: Path | str, reason: str) -> RequestError:
    return RequestError(
        f"{model_dir} has no tokenizer that loads ({reason}); save one there with tokenizer.save_pretrained, "
        "name another directory, or give data with a column input_ids"
    )


@dataclass(frozen=True, slots=True)
class _TextPiece:
    text: str
    is_first: bool
    is_last: bool


def _cut_text(document: str | TextFile) -> Iterator[_TextPiece]:
    """Yield a document in pieces that are cut after line breaks. The text of a file is never in memory as a whole."""
    blocks = iter([document]) if isinstance(document, str) else document.pieces()
    remaining = ""
    is_first = True
    for block in blocks:
        text = remaining + block
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
            yield _TextPiece(text[start:end], is_first, False)
            start = end
            is_first = False
        remaining = text[start:]
    yield _TextPiece(remaining, is_first, True)


class _ByteProgress:
    """Report how many bytes are done, of texts in memory or, approximately, of files."""

    def __init__(self, documents: Iterable[Document], progress: Progress | None) -> None:
        self._progress = progress
        self._done = 0
        self._total = 0
        if isinstance(documents, Documents):
            self._total = documents.num_bytes
        elif isinstance(documents, list | tuple):
            self._total = sum(_num_bytes(document) for document in documents if isinstance(document, str))

    def add(self, num_bytes: int) -> None:
        self._done = min(self._done + num_bytes, self._total)
        if self._progress and num_bytes:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        if self._progress:
            self._progress(self._total, self._total)


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
