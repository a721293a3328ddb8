"""Make batches of chats with images, by the model's own processor, and label the assistant's turns.

The chat template writes a mark for each image, and the processor replaces a mark by the places of the image. The tokens between
the marks stay, so their labels are those of the text with its marks, which the reader of text chats makes. Places of images have
no label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from upshift.errors import RequestError
from upshift.models.source import ModelSource
from upshift.text import one_line
from upshift.training.data.chat_rows import ASSISTANT, Chat, decode_json, read_chat
from upshift.training.data.chat_template import TemplateWriter, check_chat_template
from upshift.training.data.chat_tokens import ChatEncoder
from upshift.training.data.data_files import say_once
from upshift.training.data.data_options import DataOptions
from upshift.training.data.row_formats import find_format
from upshift.training.data.rows.token_rows import IGNORED
from upshift.training.tasks.contents import RowImage, image_of
from upshift.training.tasks.rows import (
    IMAGE_COLUMNS,
    IMAGE_PARTS,
    Examples,
    Preprocessors,
    TaskData,
    TaskInputs,
    TaskRow,
    hold_out_learned,
    is_given,
    join_places,
    load_processor,
    read_splits,
)

PLACE = "\ue000"  # stands for an image in a text while a row is read: a character for private use, which no text has
TEXT_MARK = "<image>"  # as LLaMA-Factory writes the place of an image
Ids = list[int]


@dataclass(frozen=True)
class ChatExample:
    """A chat as the template writes it, its images, and the labels of its tokens before the images get their places."""

    place: str
    text: str
    images: tuple[RowImage, ...]
    ids: Ids
    labels: Ids


class ChatReader:
    """Reads rows as chats, and makes examples and batches of them."""

    def __init__(self, source: ModelSource, options: DataOptions) -> None:
        self._reference = source.base_reference
        self.processor = load_processor(source, "AutoProcessor")
        tokenizer = getattr(self.processor, "tokenizer", None)
        if tokenizer is None:
            raise RequestError(f"{self._reference!r} has a processor without a tokenizer; save that of the model beside it")
        template = options.chat_template or getattr(self.processor, "chat_template", None) or tokenizer.chat_template
        if not template:
            raise RequestError(f"{self._reference!r} has no chat template; add --chat-template with a file")
        if not tokenizer.is_fast:
            raise RequestError(f"the tokenizer of {self._reference!r} has no tokenizer.json, by which turns are found; save one")
        self.tokenizer = tokenizer
        tokenizer.chat_template = template
        if options.chat_template is not None:
            check_chat_template(tokenizer)
            self.processor.chat_template = template
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self._options = options
        self._writer = TemplateWriter(tokenizer)
        self._encoder = ChatEncoder(tokenizer, options.loss_on or "assistant")
        self._marks = self._find_marks()

    def _find_marks(self) -> frozenset[int]:
        """Return the special tokens that the template writes for an image. Raise RequestError if it writes none."""
        parts: list[Any] = [{"type": "text", "text": "a"}]
        texts = []
        for content in (parts, [{"type": "image"}, *parts]):
            chat = Chat(place="the chat template", messages=[{"role": "user", "content": content}])
            texts.append(self.tokenizer(self._writer.write(chat), add_special_tokens=False)["input_ids"])
        written = Counter(texts[1]) - Counter(texts[0])
        marks = frozenset(written) & {*self.tokenizer.get_added_vocab().values(), *self.tokenizer.all_special_ids}
        if not marks:
            raise RequestError(
                f"the chat template of {self._reference!r} writes no mark for an image; add --chat-template with one that does"
            )
        self._marks_of_image = {token: written[token] for token in marks}
        return marks

    def read(self, row: TaskRow) -> ChatExample | None:
        """Return the example of a row, or None if nothing can be learned of it. Raise RequestError for a row of another form."""
        chat, images = read_image_chat(row, self._options)
        if chat is None or not chat.has_answer:
            return None
        prepared = self._writer.prepare(chat)
        (tokens,) = self._encoder.encode([chat])
        labels = tokens.ids if tokens.labels is None else tokens.labels
        ids = tokens.ids.tolist()
        for token, number in self._marks_of_image.items():
            if ids.count(token) != number * len(images):
                raise RequestError(
                    f"{row.place} has {len(images)} images, and {ids.count(token) / number:g} marks of images in its text "
                    f"({self.tokenizer.decode([token])!r}); write one place for each image, and no mark in a text"
                )
        example_labels = [
            label if token not in self._marks else IGNORED for token, label in zip(ids, labels.tolist(), strict=True)
        ]
        if all(label == IGNORED for label in example_labels[1:]):
            return None
        for image in images:
            image.read(header_only=True)
        return ChatExample(row.place, self._writer.write(prepared), images, ids, example_labels)

    def collate(self, examples: Sequence[ChatExample]) -> dict[str, Any]:
        """Return the model's inputs for some chats, as its processor makes them, and the labels [rows, tokens]."""
        images = [[image.read() for image in example.images] for example in examples]
        options: dict[str, Any] = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
        bos = self.tokenizer.bos_token
        if bos is not None and examples[0].text.startswith(bos):  # as apply_chat_template does
            options["add_special_tokens"] = False
        places = join_places([example.place for example in examples])
        try:
            inputs = dict(
                self.processor(text=[example.text for example in examples], images=images if any(images) else None, **options)
            )
        except RequestError:
            raise
        except (ValueError, TypeError, IndexError, RuntimeError, KeyError) as error:  # of a processor, for rows of any kind
            raise RequestError(
                f"{places}: the processor of {self._reference!r} rejects the row ({one_line(error, limit=200)}); change it, or "
                "leave it out"
            ) from None
        labels = torch.full_like(inputs["input_ids"], IGNORED)
        for number, example in enumerate(examples):
            is_real = inputs["attention_mask"][number].bool()
            ids = inputs["input_ids"][number][is_real].tolist()
            found = place_labels(ids, example, self._marks)
            if found is None:
                raise RequestError(
                    f"{example.place}: the processor of {self._reference!r} writes other tokens than its chat template, so the "
                    "turns cannot be found; leave the row out, or train with transformers"
                )
            labels[number][is_real] = torch.tensor(found)
        return {**inputs, "labels": labels}

    def describe(self, example: ChatExample) -> list[tuple[str, bool]]:
        """Return the parts of a chat, and whether each is learned."""
        parts = []
        members = zip(example.ids, example.labels, strict=True)
        for is_learned, group in groupby(members, key=lambda member: member[1] != IGNORED):
            text = self.tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
            parts.append((str(text), is_learned))
        return parts

    def report(self) -> None:
        self._encoder.report()


def place_labels(ids: Ids, example: ChatExample, marks: frozenset[int]) -> Ids | None:
    """Return the labels of the tokens ``ids``, in which the images of an example have their places, or None if they differ.

    The last texts are placed first, each as far to the right as possible. Before a text that follows an image there is at least
    one place of it."""
    labels = [IGNORED] * len(ids)
    end = len(ids)
    members = zip(example.ids, example.labels, strict=True)
    pieces = [list(group) for is_mark, group in groupby(members, key=lambda member: member[0] in marks) if not is_mark]
    for piece in reversed(pieces):
        tokens = [token for token, _ in piece]
        starts = range(end - len(tokens), -1, -1)
        start = next((start for start in starts if ids[start : start + len(tokens)] == tokens), None)
        if start is None:
            return None
        labels[start : start + len(tokens)] = [label for _, label in piece]
        end = start - 1
    return labels


def prepare_chats(inputs: TaskInputs) -> TaskData:
    """Return the examples of chats. Raise RequestError with the place of a row that cannot be used."""
    rows = inputs.rows
    sequence_length = inputs.sequence_length
    reader = ChatReader(inputs.source, inputs.options)
    read, held_out = read_splits(rows, reader.read, inputs.progress)
    reader.report()
    training, evaluation = (_of_length(split, reader, sequence_length, inputs.options) for split in (read, held_out))
    num_long = len(read) + len(held_out) - len(training) - len(evaluation)
    if num_long:
        say_once(f"{rows.origin}: {num_long} rows longer than {sequence_length} tokens are left out")
    training, evaluation = hold_out_learned(rows, (training, evaluation))
    if not training:
        raise RequestError(f"{rows.origin}: all rows are longer than {sequence_length} tokens; give a longer --sequence-length")
    of_each_kind = [
        next((example for example in training if bool(example.images) == has_images), None) for has_images in (True, False)
    ]
    reader.collate([example for example in of_each_kind if example is not None])  # a processor may not take both in one batch
    return TaskData(
        training=Examples(training),
        evaluation=Examples(evaluation) if evaluation else None,
        collate=reader.collate,
        preprocessors=Preprocessors((reader.processor,)),
        describe=reader.describe,
    )


def _of_length(
    examples: list[ChatExample], reader: ChatReader, sequence_length: int | None, options: DataOptions
) -> list[ChatExample]:
    """Return the examples of at most ``sequence_length`` tokens, places of images included. Raise RequestError for others."""
    if sequence_length is None:
        return examples
    kept = []
    for example in examples:
        length = reader.collate([example])["input_ids"].shape[1]
        if length <= sequence_length:
            kept.append(example)
        elif options.long_rows is None:
            raise RequestError(
                f"{example.place} has {length} tokens with its images, more than --sequence-length {sequence_length}; give "
                "a longer one, or add --long-rows drop"
            )
    return kept


def read_image_chat(row: TaskRow, options: DataOptions) -> tuple[Chat | None, tuple[RowImage, ...]]:
    """Return the chat of a row, with parts where its images stand, and the images in their order. The chat of an empty row is
    None."""
    fields = {name: value for name, value in row.fields.items() if name not in IMAGE_COLUMNS}
    column = _column_images(row)
    found: list[Any] = []
    marked = {name: _mark_places(value, found, has_column=bool(column)) for name, value in fields.items()}
    empty = [name for name, value in marked.items() if value is None]
    columns = find_format(marked, text_column=None, data_format=options.data_format, empty=empty, origin=row.place, sample=marked)
    columns = replace(columns, writes_turns=options.chat_template is not None)
    if not columns.is_chat or columns.format == "segments":
        raise RequestError(
            f"{row.place} holds {columns.name!r}, and a model of images and texts is trained on chats; write messages, "
            "conversations, prompt and completion, or instruction and output"
        )
    chat = read_chat(marked, columns, row.place)
    if chat is not None and not isinstance(chat, Chat):
        raise RequestError(
            f"{row.place} holds a prompt and a completion of plain text; write both as lists of messages, or add "
            "--chat-template, which writes them as turns"
        )
    if chat is None:
        return None, ()
    if not found and column:
        chat = _with_places(chat, len(column))
        found = [None] * len(column)
    if found.count(None) != len(column):
        raise RequestError(
            f"{row.place} has {len(column)} images in its column, and {found.count(None)} places for them in its messages; write "
            "as many places as images"
        )
    waiting = iter(column)
    images = tuple(image_of(next(waiting) if value is None else value, row) for value in found)
    return replace(chat, messages=[_in_parts(message, row.place) for message in chat.messages]), images


def _column_images(row: TaskRow) -> list[Any]:
    """Return the images of the columns ``images`` or ``image``."""
    values = [decode_json(row.fields[name]) for name in IMAGE_COLUMNS if is_given(row.fields.get(name))]
    if len(values) > 1:
        raise RequestError(f"{row.place} has the columns images and image; give one of the two")
    value = values[0] if values else []
    return list(value) if isinstance(value, list | tuple) else [value]


def _mark_places(value: Any, found: list[Any], *, has_column: bool) -> Any:
    """Return a column with PLACE where an image stands, and append what stands there to ``found``: None for the next image of
    the row's column."""
    decoded = decode_json(value)
    if isinstance(decoded, str):
        if has_column and TEXT_MARK in decoded:
            found += [None] * decoded.count(TEXT_MARK)
            return decoded.replace(TEXT_MARK, PLACE)
        return decoded
    if isinstance(decoded, list):
        return [_mark_places(entry, found, has_column=has_column) for entry in decoded]
    if not isinstance(decoded, dict):
        return decoded
    if decoded.get("type") in IMAGE_PARTS:
        names = (*IMAGE_PARTS, "path", "url", "bytes")
        found.append(next((decoded[name] for name in names if decoded.get(name) is not None), None))
        return {"type": "text", "text": PLACE}
    contents = ("content", "value", "text")  # other fields, such as tool calls, hold no places
    return {
        name: _mark_places(entry, found, has_column=has_column) if name in contents else entry for name, entry in decoded.items()
    }


def _with_places(chat: Chat, number: int) -> Chat:
    """Return the chat with the places of its images before the text of the first message of a user."""
    messages = list(chat.messages)
    index = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        raise RequestError(f"{chat.place} has images, and no message of a user to show them in; add one")
    messages[index] = {**messages[index], "content": PLACE * number + (messages[index].get("content") or "")}
    return replace(chat, messages=messages)


def _in_parts(message: dict[str, Any], place: str) -> dict[str, Any]:
    """Return a message whose content has parts, if an image stands in it."""
    content = message.get("content")
    if not isinstance(content, str) or PLACE not in content:
        return message
    if message["role"] == ASSISTANT:
        raise RequestError(f"{place} has an image in a turn of the assistant, and models of images and texts write text alone")
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(PLACE)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return {**message, "content": parts}
