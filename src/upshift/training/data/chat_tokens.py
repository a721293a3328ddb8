"""Tokenize chats, and prompts with completions, and label the tokens that are learned.

A chat is written by the tokenizer's chat template, which writes BOS and the end of each turn. The turns of the assistant are
learned. They are those that the template marks with ``{% generation %}``. A template without marks writes two parts for each
turn: up to the turn (the prompt from which the model is to write it), and up to its end. If both parts are the beginning of the
whole chat, their ends say where the turn is. Only special tokens at the end of the second part may differ: some templates write
EOS after the last turn alone. In other chats the place of the content says it (``chat_turns``), or else the row is rejected.
The whole chat alone is tokenized. A tokenizer in Python does not say to which characters a token belongs, so it tokenizes the
parts, too.

If a row is a prompt with a completion, everything is learned from the first token that the prompt alone does not have, as in TRL
(trl/trainer/sft_trainer.py, completion_only_loss).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from upshift.errors import RequestError
from upshift.training.data.chat_rows import ASSISTANT, WEIGHT, Chat, PreferencePair, PromptCompletion
from upshift.training.data.chat_template import RowCount, Span, TemplateWriter, learned_turns
from upshift.training.data.chat_turns import find_turn, num_shared
from upshift.training.data.corpus import Document, content_of
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import LossOn
from upshift.training.data.rows.segment_tokens import SegmentEncoder
from upshift.training.data.rows.segments import SegmentRow
from upshift.training.data.rows.token_rows import IGNORED, TokenRow
from upshift.training.data.rows.turn_contents import content_tokens, find_contents
from upshift.training.data.special_tokens import UnknownTokens, ids_around_document, with_special_tokens
from upshift.training.data.text_files import check_text

Characters = NDArray[np.int64]  # two columns, a row for each token

BATCH_CHARACTERS = 2**20  # of rows that are tokenized at once
LabelledRow = Chat | PromptCompletion | PreferencePair | SegmentRow


def encode_rows(documents: Iterable[Document], tokenizer: Any, loss_on: LossOn, unknown: UnknownTokens) -> Iterator[Document]:
    """Yield the documents, with chats, and prompts with completions, as token rows. Other documents stay as they are.

    ``unknown`` counts the tokens of these rows. A pair of answers becomes two rows: the chosen one, then the rejected one. If
    answers are learned each for itself, the first one is good and the second one bad, as TRL's unpair_preference_dataset. Rows
    without an answer, and pairs of which nothing can be learned, are left out, and the user is told how many.
    """
    encoder: ChatEncoder | None = None
    left_out = _LeftOutRows()
    batch: list[LabelledRow] = []
    num_characters = 0
    for document in documents:
        if not isinstance(document, LabelledRow):
            yield document
            continue
        if left_out.add_if_useless(document):
            continue
        encoder = encoder or ChatEncoder(tokenizer, loss_on)
        rows = _rated_answers(document)
        if batch and (num_characters >= BATCH_CHARACTERS or _kind_of(batch[0]) != _kind_of(rows[0])):
            yield from unknown.counted(encoder.encode(batch))
            batch = []
            num_characters = 0
        batch += rows
        num_characters += document.num_characters
    if encoder is not None:
        yield from unknown.counted(encoder.encode(batch))
        encoder.report()
    left_out.report()


def _rated_answers(row: LabelledRow) -> list[LabelledRow]:
    """Return the two answers of a pair that is unpaired, each with its rating, or else the row itself."""
    if not isinstance(row, PreferencePair) or not row.is_unpaired:
        return [row]
    assert not isinstance(row.chosen, SegmentRow) and not isinstance(row.rejected, SegmentRow)
    return [replace(row.chosen, rating=True), replace(row.rejected, rating=False)]


class _LeftOutRows:
    """Counts the rows of which nothing can be learned."""

    def __init__(self) -> None:
        self._unanswered = RowCount()
        self._useless_pairs: defaultdict[str, RowCount] = defaultdict(RowCount)  # by what is wrong with them

    def add_if_useless(self, row: LabelledRow) -> bool:
        """Count the row and return True if nothing can be learned of it."""
        if isinstance(row, PreferencePair):
            if row.problem is not None:
                self._useless_pairs[row.problem].add(row.place)
            return row.problem is not None
        if not row.has_answer:
            self._unanswered.add(row.place)
        return not row.has_answer

    def report(self) -> None:
        if self._unanswered.number:
            say_once(f"{self._unanswered.number} rows without an answer are left out; the first is {self._unanswered.first}")
        for problem, count in self._useless_pairs.items():
            say_once(f"{count.number} pairs are left out, because {problem}; the first is {count.first}")


def _kind_of(row: LabelledRow) -> tuple[str, LossOn | None]:
    """Return what the rows of one batch have in common."""
    return content_of(row), None if isinstance(row, PreferencePair) else row.loss_on


class ChatEncoder:
    """Turns rows into token ids and labels."""

    def __init__(self, tokenizer: Any, loss_on: LossOn) -> None:
        if tokenizer is None:
            raise RequestError("the data is chats and there is no tokenizer; give one, or data with a column input_ids")
        self._tokenizer = tokenizer
        self._loss_on = loss_on
        self._writer = TemplateWriter(tokenizer)
        self._around = ids_around_document(tokenizer)
        self._segments = SegmentEncoder(tokenizer, self._tokenize, self._around)
        self._diverging = RowCount()  # prompts that end with other tokens than the same text in the whole row
        self._placed = RowCount()  # chats whose turns are written in another way when others follow
        self._without_prompt = RowCount()  # chats that begin with a turn of the assistant
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._special_tokens = sorted(filter(None, map(str, tokenizer.all_special_tokens)), key=len, reverse=True)
        self._has_checked_end = False
        self._first_preference: PreferencePair | None = None

    def encode(self, batch: Sequence[LabelledRow]) -> Iterator[TokenRow]:
        """Yield the token rows of a batch of one kind. Raise RequestError, with its place, for a row that cannot be written."""
        ratings = [row.rating if isinstance(row, Chat | PromptCompletion) else None for row in batch]
        if any(rating is not None for rating in ratings):  # such a row becomes one token row
            for row, rating in zip(self._encode(batch), ratings, strict=True):
                yield row._replace(rating=rating)
        else:
            yield from self._encode(batch)

    def _encode(self, batch: Sequence[LabelledRow]) -> Iterator[TokenRow]:
        preferences = [row for row in batch if isinstance(row, PreferencePair)]
        if preferences:
            yield from self._encode_preferences(preferences)
            return
        segment_rows = [row for row in batch if isinstance(row, SegmentRow)]
        pairs = [row for row in batch if isinstance(row, PromptCompletion)]
        chats = [self._writer.prepare(row) for row in batch if isinstance(row, Chat)]
        first = batch[0] if batch else None
        loss_on = self._loss_on
        if isinstance(first, Chat | PromptCompletion | SegmentRow):
            loss_on = first.loss_on or loss_on
        if segment_rows:
            yield from self._encode_segments(segment_rows, loss_on)
        elif pairs:
            yield from self._encode_pairs(pairs, loss_on)
        elif loss_on == "all":
            _refuse_weights(chats)
            wholes = self._tokenize([self._writer.write_whole(chat) for chat in chats])
            yield from (_all_learned(ids, chat.loss_on) for chat, ids in zip(chats, wholes, strict=True))
        elif chats and chats[0].num_prompt_messages is not None:
            yield from self._encode_prompted(chats)
        elif loss_on == "assistant":
            yield from self._encode_chats(chats)
        else:
            yield from self._encode_contents(chats, loss_on)

    def report(self) -> None:
        """Tell the user about prompts that do not end at a token, and about fields that the chat template does not use."""
        self._writer.report()
        if self._placed.number:
            say_once(
                f"{self._placed}: the chat template writes earlier turns in another way than the last one, for example without "
                "thoughts; the model learns each turn as it stands in the whole chat"
            )
        if self._without_prompt.number:
            say_once(
                f"{self._without_prompt}: the chat begins with a turn of the assistant, which has no prompt; the model reads it, "
                "and does not learn it"
            )
        if self._diverging.number:
            say_once(
                f"{self._diverging}: the tokens at the end of the prompt are others when the completion follows; what is learned "
                "begins at the first token that differs"
            )

    def _encode_segments(self, rows: Sequence[SegmentRow], loss_on: LossOn = "assistant") -> Iterator[TokenRow]:
        for ids, labels in self._segments.encode(rows, learns_all=loss_on in ("all", "content")):
            yield TokenRow(np.array(ids, np.int64), np.array(labels, np.int64))

    def _encode_pairs(self, pairs: Sequence[PromptCompletion], loss_on: LossOn) -> Iterator[TokenRow]:
        wholes = self._tokenize_texts(pairs)
        if loss_on in ("all", "content"):
            yield from (_all_learned(ids, pair.loss_on) for pair, ids in zip(pairs, wholes, strict=True))
            return
        prompts = self._tokenize_prompts_of_texts(pairs)
        for pair, ids, prompt_ids in zip(pairs, wholes, prompts, strict=True):
            yield self._completion_row(ids, prompt_ids, pair.place)

    def _tokenize_texts(self, pairs: Sequence[PromptCompletion]) -> list[list[int]]:
        """Return the ids of each prompt with its completion, with the special tokens around it."""
        for pair in pairs:
            check_text(pair.prompt + pair.completion, pair.place)
        before, after = self._around
        wholes = self._tokenize([pair.prompt + pair.completion for pair in pairs])
        return [with_special_tokens(ids, before, after) for ids in wholes]

    def _tokenize_prompts_of_texts(self, pairs: Sequence[PromptCompletion]) -> list[list[int]]:
        """Return the ids of each prompt, with the special tokens before it."""
        before, _ = self._around
        return [with_special_tokens(ids, before, []) for ids in self._tokenize([pair.prompt for pair in pairs])]

    def _tokenize_prompted(self, chats: Sequence[Chat]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids of each chat, and those of its prompt."""
        wholes = self._tokenize([self._writer.write_whole(chat) for chat in chats])
        prompts = [
            self._writer.write(chat, chat.num_prompt_messages, adds_prompt=True) if chat.num_prompt_messages else ""
            for chat in chats
        ]
        return wholes, self._tokenize(prompts)

    def _encode_prompted(self, chats: Sequence[Chat]) -> Iterator[TokenRow]:
        """Yield the rows of chats whose messages after the prompt are learned."""
        wholes, prompts = self._tokenize_prompted(chats)
        for chat, ids, prompt_ids in zip(chats, wholes, prompts, strict=True):
            row = self._completion_row(ids, prompt_ids, chat.place)
            self._check_end(row, chat.place)
            yield row

    def _encode_preferences(self, preferences: Sequence[PreferencePair]) -> Iterator[TokenRow]:
        """Yield two rows for each pair. Their answers begin at one place, as in TRL (trl/trainer/dpo_trainer.py, tokenize_fn)."""
        self._check_margins(preferences)
        answers = [answer for preference in preferences for answer in (preference.chosen, preference.rejected)]
        segment_rows = [answer for answer in answers if isinstance(answer, SegmentRow)]
        if segment_rows:
            margins = (preference.margin for preference in preferences for _ in range(2))
            for row, margin in zip(self._encode_segments(segment_rows), margins, strict=True):
                yield row._replace(margin=margin)
            return
        texts = [answer for answer in answers if isinstance(answer, PromptCompletion)]
        texts += [self._write_texts(answer) for answer in answers if isinstance(answer, Chat) and answer.ends_with_eos]
        if texts:
            wholes = self._tokenize_texts(texts)
            prompts = self._tokenize_prompts_of_texts(texts)
        else:
            chats = [self._writer.prepare(answer) for answer in answers if isinstance(answer, Chat)]
            wholes, prompts = self._tokenize_prompted(chats)
        for number, preference in enumerate(preferences):
            pair = wholes[2 * number : 2 * number + 2]
            prompt_ids = prompts[2 * number]
            start = min(num_shared(ids, prompt_ids) for ids in pair)
            if start < len(prompt_ids):
                self._diverging.add(preference.place)
            for ids in pair:
                row = _labelled(ids, [(start, len(ids))])._replace(margin=preference.margin)
                if not texts:
                    self._check_end(row, preference.place)
                yield row

    def _write_texts(self, chat: Chat) -> PromptCompletion:
        """Return the texts of a prompt and an answer, without white space at the end."""
        chat = self._writer.prepare(chat)
        has_prompt = bool(chat.num_prompt_messages)
        prompt = self._writer.write(chat, chat.num_prompt_messages, adds_prompt=True) if has_prompt else ""
        whole = self._writer.write_whole(chat)
        if not whole.startswith(prompt):
            raise RequestError(
                f"{chat.place}: the chat template writes the prompt in another way when an answer follows; remove answer_ends"
            )
        return PromptCompletion(place=chat.place, prompt=prompt, completion=whole.removeprefix(prompt).rstrip())

    def _check_margins(self, preferences: Sequence[PreferencePair]) -> None:
        """Raise RequestError if one row has a margin, and another one has none."""
        for preference in preferences:
            first = self._first_preference = self._first_preference or preference
            if (preference.margin is None) != (first.margin is None):
                raise RequestError(
                    f"{preference.place} has {_describe_margin(preference)}, and {first.place} has {_describe_margin(first)}; "
                    "give a margin in every row, or in none"
                )

    def _completion_row(self, ids: list[int], prompt_ids: list[int], place: str) -> TokenRow:
        start = num_shared(ids, prompt_ids)
        if start < len(prompt_ids):
            self._diverging.add(place)
        return _labelled(ids, [(start, len(ids))])

    def _encode_chats(self, chats: Sequence[Chat]) -> Iterator[TokenRow]:
        """Yield the rows of chats whose assistant's turns are learned."""
        rows = self._encode_by_characters(chats) if self._tokenizer.is_fast else map(self._encode_by_prefixes, chats)
        for chat, row in zip(chats, rows, strict=True):
            self._check_end(row, chat.place)
            yield row

    def _encode_contents(self, chats: Sequence[Chat], loss_on: LossOn) -> Iterator[TokenRow]:
        """Yield the rows of chats of which the contents of turns are learned, and EOS after each."""
        if not self._tokenizer.is_fast:
            raise RequestError(
                f"--loss-on {loss_on} needs a tokenizer that says to which characters a token belongs (tokenizer.json); use "
                "--loss-on assistant"
            )
        texts = [self._writer.write_whole(chat) for chat in chats]
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        for chat, text, ids, offsets in zip(chats, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            contents = find_contents(self._writer, chat, text, loss_on)
            end_ids = ({self._tokenizer.eos_token_id}, self._ids_of_ends(chat.learned_contents.end_tokens))
            yield _labelled(ids, content_tokens(ids, offsets, contents, end_ids, chat.learned_contents.ends))

    def _ids_of_ends(self, end_tokens: tuple[str, ...]) -> set[int]:
        """Return the ids of tokens that end a turn. Raise RequestError for a text that is not one token."""
        ids = self._tokenize(end_tokens)
        wrong = next((token for token, of_token in zip(end_tokens, ids, strict=True) if len(of_token) != 1), None)
        if wrong is not None:
            raise RequestError(f"turn_ends: {wrong!r} is not one token of this tokenizer; give its own token that ends a turn")
        return {of_token[0] for of_token in ids}

    def _encode_by_characters(self, chats: Sequence[Chat]) -> Iterator[TokenRow]:
        """Yield the rows of chats. The tokenizer says which characters each token is made from."""
        if not chats:
            return
        texts = []
        marked_spans: list[list[Span] | None] = []
        for chat in chats:
            has_marks = self._writer.has_marks(chat)
            text, spans = self._writer.write_marked(chat) if has_marks else (self._writer.write_whole(chat), None)
            texts.append(text)
            marked_spans.append(spans)
        encoded = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        encodings = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for chat, text, spans, (ids, offsets) in zip(chats, texts, marked_spans, encodings, strict=True):
            characters = _characters_of(offsets, text)
            if spans is None:
                spans = self._find_spans(chat, text, characters)
            yield _labelled_by_characters(ids, characters, spans)

    def _find_spans(self, chat: Chat, text: str, characters: Characters) -> list[Span]:
        """Return the characters of the turns that are learned, up to the end of a token."""
        self._count_first_turn(chat)
        spans = []
        is_placed = False
        for index in learned_turns(chat):
            span = self._find_span(chat, index, text)
            if span is None:
                is_placed = True
                span = find_turn(self._writer, chat, index, text)
            if span is None:
                raise RequestError(_not_a_prefix(chat, index + 1))
            spans.append(span)
        if is_placed:
            self._placed.add(chat.place)
        return [(start, _token_border(characters, end)) for start, end in spans]

    def _find_span(self, chat: Chat, index: int, text: str) -> Span | None:
        """Return the characters of a turn, or None if its two parts are not the beginning of the chat."""
        prompt = self._writer.write(chat, index, adds_prompt=True)
        start = num_shared(prompt, text)
        if start < len(prompt) and not self._is_closing(prompt[start:], frozenset()):
            return None
        up_to_end = self._writer.write(chat, index + 1)
        end = self._find_end(up_to_end, num_shared(up_to_end, text))
        return None if end is None or end < start else (start, end)

    def _find_end(self, part: str, num_equal: int) -> int | None:
        """Return where a turn ends whose chat ends with it, or None if it is another one in the whole chat.

        The first ``num_equal`` characters are those of the whole chat. Special tokens alone may follow: some templates write EOS
        after the last turn. It may begin with characters of the next turn.
        """
        end = len(part)
        while end > num_equal:
            ends_with = (token for token in self._special_tokens if part.endswith(token, 0, end))
            token = next(ends_with, part[end - 1] if part[end - 1].isspace() else "")
            if not token:
                return None
            end -= len(token)
        return min(end, num_equal) if self._is_closing(part[end:], self._special_ids) or end == len(part) else None

    def _is_closing(self, rest: str, allowed_ids: frozenset[int]) -> bool:
        """Return whether the end of a text has no other tokens than those that are allowed."""
        return allowed_ids.issuperset(self._tokenize([rest])[0])

    def _encode_by_prefixes(self, chat: Chat) -> TokenRow:
        """Return the row of a chat. One text after another is tokenized, because together they may be long."""
        self._count_first_turn(chat)
        ids = self._tokenize([self._writer.write_whole(chat)])[0]
        spans = []
        for index in learned_turns(chat):
            prompt_ids = self._tokenize([self._writer.write(chat, index, adds_prompt=True)])[0]
            end_ids = self._tokenize([self._writer.write(chat, index + 1)])[0]
            end = num_shared(ids, end_ids)
            closes_chat = self._special_ids.issuperset(end_ids[end:])
            if ids[: len(prompt_ids)] != prompt_ids or end < len(prompt_ids) or not closes_chat:
                raise RequestError(_not_a_prefix(chat, index + 1))
            spans.append((len(prompt_ids), end))
        return _labelled(ids, spans)

    def _count_first_turn(self, chat: Chat) -> None:
        if chat.messages[0]["role"] == ASSISTANT and chat.messages[0].get(WEIGHT, 1) != 0:
            self._without_prompt.add(chat.place)

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of texts, without the special tokens that the tokenizer adds."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]
        return ids

    def _check_end(self, row: TokenRow, place: str) -> None:
        """Tell the user once if the model does not learn to stop by a special token at the end of a turn."""
        if self._has_checked_end or row.labels is None or not (row.labels != IGNORED).any():
            return
        self._has_checked_end = True
        added_ids = {*self._tokenizer.get_added_vocab().values(), *self._special_ids}
        learned = row.labels[row.labels != IGNORED].tolist()
        for token in reversed(learned):
            if token in added_ids:
                return
            if self._tokenizer.decode([token]).strip():
                break
        say_once(f"{place}: {self._describe_end(learned)}")

    def _describe_end(self, learned: list[int]) -> str:
        """Return what ends a turn that no special token ends, and what to do. ``learned``: the tokens that are learned."""
        end = self._writer.write_end()
        eos = self._tokenizer.eos_token
        advice = "give a --chat-template that ends each turn with a special token" + (f", such as {eos}" if eos else "")
        unlearned = "so the model does not learn to stop there"
        if not end:
            return f"the chat template writes nothing after the assistant's turn, {unlearned}; {advice}"
        if not self._tokenizer.decode(learned).rstrip().endswith(end):
            return (
                f"the chat template writes {end!r} after the assistant's turn, and its marks ({{% generation %}}) leave it out, "
                f"{unlearned}; put it within the marks"
            )
        (ids,) = self._tokenize([end])
        return (
            f"the chat template ends the assistant's turn with {end!r}, which is no special token of this tokenizer, but "
            f"{len(ids)} ordinary tokens. The model learns to write it, and does not stop there by itself: add --stop '{end}' to "
            f'upshift generate, and "stop" to a request to upshift serve; or {advice}'
        )


def _refuse_weights(chats: Sequence[Chat]) -> None:
    """Raise RequestError for a turn of weight 0 if all tokens are learned."""
    for chat in chats:
        if any(message.get(WEIGHT) == 0 for message in chat.messages):
            raise RequestError(
                f"{chat.place} has a turn of weight 0, and --loss-on all learns all turns; leave one of the two out"
            )


def _all_learned(ids: list[int], loss_on: LossOn | None) -> TokenRow:
    """Return a row that is learned as a whole. Beside rows of which a part is learned, it says so of each token."""
    tokens = np.array(ids, np.int64)
    return TokenRow(tokens) if loss_on is None else TokenRow(tokens, tokens)


def _describe_margin(preference: PreferencePair) -> str:
    return "no margin" if preference.margin is None else f"margin {preference.margin:g}"


def _labelled(ids: Sequence[int], spans: Sequence[Span]) -> TokenRow:
    """Return a row whose tokens in the spans are learned."""
    tokens = np.array(ids, np.int64)
    labels = np.full(len(tokens), IGNORED, np.int64)
    for start, end in spans:
        labels[start:end] = tokens[start:end]
    return TokenRow(tokens, labels)


def _characters_of(offsets: Sequence[Span], text: str) -> Characters:
    """Return the first character of each token, and the one behind its last.

    Some tokenizers (``trim_offsets``) leave the space out that a token begins with. A token that is a space alone then has no
    characters, and gets the space before it back.
    """
    characters: Characters = np.array(offsets, np.int64).reshape(len(offsets), 2)
    for index in np.flatnonzero((characters[:, 0] == characters[:, 1]) & (characters[:, 0] > 0)):
        if text[characters[index, 0] - 1].isspace():
            characters[index, 0] -= 1
    return characters


def _token_border(characters: Characters, end: int) -> int:
    """Return the end of the last token that ends at a character or before it."""
    ends = characters[:, 1]
    return int(ends[ends <= end].max(initial=0))


def _labelled_by_characters(ids: Sequence[int], characters: Characters, spans: Sequence[Span]) -> TokenRow:
    """Return a row whose tokens are learned if they have a character of a span."""
    tokens = np.array(ids, np.int64)
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
