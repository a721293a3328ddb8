"""Tokenize chats, and prompts with completions, and label the tokens that are learned.

A chat is written by the tokenizer's chat template, which writes BOS and the end of each turn. The turns of the assistant are
learned. They are those that the template marks with ``{% generation %}``. A template without marks writes two parts for each
turn: up to the turn (the prompt from which the model is to write it), and up to its end. If the tokens of both parts are the
beginning of the tokens of the whole chat, they say where the turn is. Only special tokens at the end of the second part may
differ: some templates write EOS after the last turn alone. In other chats the place of the content says it (``chat_places``), or
else the row is rejected.

Of a prompt with a completion everything is learned from the first token that the prompt alone does not have, as in TRL
(trl/trainer/sft_trainer.py, completion_only_loss).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.text import find_lone_surrogate
from upshift.training.data.chat_places import find_turns
from upshift.training.data.chat_rows import ASSISTANT, WEIGHT, Chat, PromptCompletion
from upshift.training.data.chat_template import Span, TemplateWriter
from upshift.training.data.corpus import IGNORED, Document, TokenRow
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import LossOn
from upshift.training.data.special_tokens import ids_around_document, with_special_tokens

BATCH_CHARACTERS = 2**20  # of rows that are tokenized at once


def encode_rows(documents: Iterable[Document], tokenizer: Any, loss_on: LossOn) -> Iterator[Document]:
    """Yield the documents, with chats, and prompts with completions, as token rows. Other documents stay as they are."""
    encoder: ChatEncoder | None = None
    batch: list[Chat | PromptCompletion] = []
    num_characters = 0
    for document in documents:
        if not isinstance(document, Chat | PromptCompletion):
            yield document
            continue
        encoder = encoder or ChatEncoder(tokenizer, loss_on)
        batch.append(document)
        num_characters += document.num_characters
        if num_characters >= BATCH_CHARACTERS:
            yield from encoder.encode(batch)
            batch = []
            num_characters = 0
    if encoder is not None:
        yield from encoder.encode(batch)
        encoder.report()


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant: the text before it, and the text up to its end."""

    number: int  # of the message, from 1
    prompt: str
    up_to_end: str


class ChatEncoder:
    """Turns rows into token ids and labels."""

    def __init__(self, tokenizer: Any, loss_on: LossOn) -> None:
        if tokenizer is None:
            raise RequestError("the data is chats and there is no tokenizer; give one, or data with a column input_ids")
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._writer = TemplateWriter(tokenizer)
        self._around = ids_around_document(tokenizer)
        self._diverging: list[str] = []  # places of prompts that end with other tokens than the same text in the whole row
        self._placed: list[str] = []  # places of chats whose turns are written in another way when others follow
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._has_checked_end = False

    def encode(self, batch: Sequence[Chat | PromptCompletion]) -> Iterator[TokenRow]:
        """Yield the token rows of a batch. Raise RequestError, with its place, for a row that the chat template rejects."""
        pairs = [row for row in batch if isinstance(row, PromptCompletion)]
        chats = [self._writer.prepare(row) for row in batch if isinstance(row, Chat)]
        if pairs:
            yield from self._encode_pairs(pairs)
        elif self._loss_on == "all":
            _refuse_weights(chats)
            yield from (TokenRow(np.array(ids)) for ids in self._tokenize([self._writer.write(chat) for chat in chats]))
        elif chats and chats[0].num_prompt_messages is not None:
            yield from self._encode_prompted(chats)
        else:
            yield from self._encode_chats(chats)

    def report(self) -> None:
        """Tell the user about prompts that do not end at a token, and about fields that the chat template does not use."""
        self._writer.report()
        if self._placed:
            others = f" and {len(self._placed) - 1} other rows" if len(self._placed) > 1 else ""
            say_once(
                f"{self._placed[0]}{others}: the chat template writes earlier turns in another way than the last one, for "
                "example without thoughts; the model learns each turn as it stands in the whole chat"
            )
        if self._diverging:
            others = f" and {len(self._diverging) - 1} other rows" if len(self._diverging) > 1 else ""
            say_once(
                f"{self._diverging[0]}{others}: the tokens at the end of the prompt are others when the completion follows; "
                "what is learned begins at the first token that differs"
            )

    def _encode_pairs(self, pairs: Sequence[PromptCompletion]) -> Iterator[TokenRow]:
        for pair in pairs:
            surrogate = find_lone_surrogate(pair.prompt + pair.completion)
            if surrogate is not None:
                raise RequestError(
                    f"{pair.place} holds {surrogate}, half of a surrogate pair, which is no text; write the file again"
                )
        before, after = self._around
        wholes = self._tokenize([pair.prompt + pair.completion for pair in pairs])
        wholes = [with_special_tokens(ids, before, after) for ids in wholes]
        if self._loss_on == "all":
            yield from (TokenRow(np.array(ids)) for ids in wholes)
            return
        prompts = self._tokenize([pair.prompt for pair in pairs])
        prompts = [with_special_tokens(ids, before, []) for ids in prompts]
        for pair, ids, prompt_ids in zip(pairs, wholes, prompts, strict=True):
            yield self._completion_row(ids, prompt_ids, pair.place)

    def _encode_prompted(self, chats: Sequence[Chat]) -> Iterator[TokenRow]:
        """Yield the rows of chats whose messages after the prompt are learned."""
        wholes = self._tokenize([self._writer.write(chat) for chat in chats])
        prompts = self._tokenize([self._writer.write(chat, chat.num_prompt_messages, adds_prompt=True) for chat in chats])
        for chat, ids, prompt_ids in zip(chats, wholes, prompts, strict=True):
            row = self._completion_row(ids, prompt_ids, chat.place)
            self._check_end(row, chat.place)
            yield row

    def _completion_row(self, ids: list[int], prompt_ids: list[int], place: str) -> TokenRow:
        start = _common_prefix(ids, prompt_ids)
        if start < len(prompt_ids):
            self._diverging.append(place)
        return _labelled(ids, [(start, len(ids))])

    def _encode_chats(self, chats: Sequence[Chat]) -> Iterator[TokenRow]:
        """Yield the rows of chats whose assistant's turns are learned."""
        is_marked = [self._tokenizer.is_fast and self._writer.has_marks(chat) for chat in chats]
        marked = iter(self._encode_marked([chat for chat, has_marks in zip(chats, is_marked, strict=True) if has_marks]))
        others = iter(self._encode_by_prefixes([chat for chat, has_marks in zip(chats, is_marked, strict=True) if not has_marks]))
        for chat, has_marks in zip(chats, is_marked, strict=True):
            row = next(marked if has_marks else others)
            self._check_end(row, chat.place)
            yield row

    def _encode_marked(self, chats: Sequence[Chat]) -> list[TokenRow]:
        written = [self._writer.write_marked(chat) for chat in chats]
        if not written:
            return []
        encoded = self._tokenizer(
            [text for text, _ in written],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        tokens = zip(encoded["input_ids"], encoded["offset_mapping"], written, strict=True)
        return [_labelled_by_characters(ids, offsets, spans) for ids, offsets, (_, spans) in tokens]

    def _encode_by_prefixes(self, chats: Sequence[Chat]) -> list[TokenRow]:
        turns = [self._turns(chat) for chat in chats]
        wholes = self._tokenize([self._writer.write(chat) for chat in chats])
        prompts = iter(self._tokenize([turn.prompt for chat_turns in turns for turn in chat_turns]))
        ends = iter(self._tokenize([turn.up_to_end for chat_turns in turns for turn in chat_turns]))
        rows = []
        for chat, ids, chat_turns in zip(chats, wholes, turns, strict=True):
            spans = [self._prefix_span(ids, next(prompts), next(ends)) for _ in chat_turns]
            known_spans = [span for span in spans if span is not None]
            if len(known_spans) == len(spans):
                rows.append(_labelled(ids, known_spans))
            else:
                rows.append(self._encode_by_places(chat, chat_turns[spans.index(None)].number))
        return rows

    def _prefix_span(self, ids: list[int], prompt_ids: list[int], end_ids: list[int]) -> Span | None:
        """Return the tokens of a turn in those of the whole chat, or None if its two parts are not the beginning of the chat."""
        end = _common_prefix(ids, end_ids)
        closes_chat = self._special_ids.issuperset(end_ids[end:])  # some templates write EOS after the last turn
        if ids[: len(prompt_ids)] != prompt_ids or end < len(prompt_ids) or not closes_chat:
            return None
        return len(prompt_ids), end

    def _encode_by_places(self, chat: Chat, number: int) -> TokenRow:
        """Return the row of a chat whose message ``number`` is written in another way when others follow."""
        found = find_turns(self._writer, chat) if self._tokenizer.is_fast else None
        if found is None:
            raise RequestError(_not_a_prefix(chat, number))
        text, spans = found
        self._placed.append(chat.place)
        encoded = self._tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        offsets = encoded["offset_mapping"]
        whole_tokens = [(start, max((end for _, end in offsets if end <= last), default=start)) for start, last in spans]
        return _labelled_by_characters(encoded["input_ids"], offsets, whole_tokens)

    def _turns(self, chat: Chat) -> list[_Turn]:
        """Return the assistant's turns of a chat. Raise RequestError if the chat begins with one, which has no prompt."""
        turns = []
        for index, message in enumerate(chat.messages):
            if message["role"] != ASSISTANT or message.get(WEIGHT, 1) == 0:
                continue
            if index == 0:
                raise RequestError(
                    f"{chat.place} begins with a turn of the assistant, which has no prompt; put a message of the user before "
                    'it, give the turn "weight": 0, or learn all tokens with --loss-on all'
                )
            prompt = self._writer.write(chat, index, adds_prompt=True)
            turns.append(_Turn(index + 1, prompt, self._writer.write(chat, index + 1)))
        return turns

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without the special tokens that the tokenizer adds."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return ids

    def _check_end(self, row: TokenRow, place: str) -> None:
        """Tell the user once if a turn ends without a special token, because then the model does not learn to stop."""
        if self._has_checked_end or row.labels is None or not (row.labels != IGNORED).any():
            return
        self._has_checked_end = True
        added_ids = {*self._tokenizer.get_added_vocab().values(), *self._special_ids}
        for token in reversed(row.labels[row.labels != IGNORED].tolist()):
            if token in added_ids:
                return
            if self._tokenizer.decode([token]).strip():
                break
        say_once(
            f"{place}: the chat template writes no special token at the end of the assistant's turn, so the model does not learn "
            "to stop there"
        )


def _refuse_weights(chats: Sequence[Chat]) -> None:
    """Raise RequestError for a turn of weight 0 if all tokens are learned."""
    for chat in chats:
        if any(message.get(WEIGHT) == 0 for message in chat.messages):
            raise RequestError(
                f"{chat.place} has a turn of weight 0, and --loss-on all learns all turns; leave one of the two out"
            )


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens at the beginning of two lists are the same."""
    for index, (token, other) in enumerate(zip(first, second, strict=False)):
        if token != other:
            return index
    return min(len(first), len(second))


def _labelled(ids: Sequence[int], spans: Sequence[Span]) -> TokenRow:
    """Return a row whose tokens in the spans are learned."""
    tokens = np.array(ids, np.int64)
    labels = np.full(len(tokens), IGNORED, np.int64)
    for start, end in spans:
        labels[start:end] = tokens[start:end]
    return TokenRow(tokens, labels)


def _labelled_by_characters(ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> TokenRow:
    """Return a row whose tokens are learned if they have a character of a span."""
    tokens = np.array(ids, np.int64)
    characters: NDArray[np.int64] = np.array(offsets, np.int64).reshape(len(tokens), 2)
    is_learned = np.zeros(len(tokens), bool)
    for start, end in spans:
        is_learned |= (characters[:, 1] > start) & (characters[:, 0] < end)
    return TokenRow(tokens, np.where(is_learned, tokens, IGNORED))


def _not_a_prefix(chat: Chat, number: int) -> str:
    return (
        f"{chat.place}: the chat template writes message {number} in another way when others follow, and its content cannot "
        "be found there; use a chat template that marks them ({% generation %}), write the row as a prompt and a "
        'completion of messages, give the earlier turns of the assistant "weight": 0, or learn all tokens with --loss-on all'
    )
