"""Text to tokens: train a small byte-level BPE, load a model's own tokenizer, and tokenize a corpus in parallel.

Decides what stands around a document: what the tokenizer itself adds (BOS, CLS .. SEP), then EOS when it has one and
has not added it. Documents above 256 Ki characters are tokenized in pieces cut after a line break, because one text
uses one core; a tokenizer that marks the start of a text may see one extra mark per piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.training.data.corpus import Corpus
from upshift.training.data.tokens import TokenizedCorpus, hold_out_evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
BATCH_BYTES = 2**22
PIECE_CHARACTERS = 2**18
MIN_BYTE_VOCABULARY = 257  # 256 bytes and the end of text
Progress = Callable[[int, int], None]  # (done_bytes, total_bytes)


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A GPT-2 style tokenizer. It may end up smaller than `vocab_size` on little text."""
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
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(model_dir: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id. Code from the directory is never run."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), trust_remote_code=False)
    except Exception as error:  # the loaders of transformers and tokenizers raise many types, bare Exception among them
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:160]
        raise _no_tokenizer(model_dir, reason) from None
    # Without vocabulary files transformers builds an empty tokenizer instead of failing.
    if not tokenizer or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise _no_tokenizer(model_dir, "it has no vocabulary")
    return tokenizer


def tokenize(
    documents: Sequence[str] | Sequence[NDArray[Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    progress: Progress | None = None,
) -> TokenizedCorpus:
    """Token ids of documents; those that are tokenized already are taken as they are."""
    if not isinstance(documents[0], str):
        return TokenizedCorpus.from_documents(documents)  # type: ignore[arg-type]
    if tokenizer is None:
        raise RequestError("the data is text and there is no tokenizer; give one, or data with a column input_ids")
    before, after = _around(tokenizer)
    total = sum(map(_num_bytes, documents))  # type: ignore[arg-type]
    done = 0
    parts: list[NDArray[Any]] = []
    ends: list[int] = []
    num_tokens = 0
    for batch in _batches(_pieces(documents)):  # type: ignore[arg-type]
        encoded = tokenizer(
            [piece.text for piece in batch], add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        for piece, ids in zip(batch, encoded, strict=True):
            part = np.array((before if piece.is_first else []) + ids + (after if piece.is_last else []), np.int32)
            parts.append(part)
            num_tokens += len(part)
            if piece.is_last:
                ends.append(num_tokens)
        done += sum(_num_bytes(piece.text) for piece in batch)
        if progress:
            progress(done, total)
    joined = TokenizedCorpus.from_documents(parts)
    return TokenizedCorpus(tokens=joined.tokens, offsets=np.array([0, *ends], np.int64))


def tokenize_corpus(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    sequence_length: int,
    progress: Progress | None = None,
) -> tuple[TokenizedCorpus, TokenizedCorpus | None]:
    """(training, evaluation). Without an evaluation split the last documents are held out."""
    training = tokenize(corpus.documents, tokenizer, progress=progress)
    if corpus.evaluation is not None:
        return training, tokenize(corpus.evaluation, tokenizer)
    return hold_out_evaluation(training, sequence_length=sequence_length)


def _no_tokenizer(model_dir: Path | str, reason: str) -> RequestError:
    return RequestError(
        f"{model_dir} has no tokenizer that loads ({reason}); save one there with tokenizer.save_pretrained, "
        "name another directory, or give data with a column input_ids"
    )


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids before and after a document, found by encoding a letter with and without them."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer("a")["input_ids"]
    starts = (i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain)
    start = next(starts, None)
    before, after = ([], []) if start is None or not plain else (full[:start], full[start + len(plain) :])
    eos = tokenizer.eos_token_id
    if eos is not None and eos not in after:
        after = [*after, eos]
    return before, after


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    is_first: bool
    is_last: bool


def _pieces(documents: Iterable[str]) -> Iterator[_Piece]:
    for text in documents:
        start = 0
        while len(text) - start > PIECE_CHARACTERS:
            end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1
            if not end:
                end = start + PIECE_CHARACTERS
            yield _Piece(text[start:end], start == 0, False)
            start = end
        yield _Piece(text[start:] if start else text, start == 0, True)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
