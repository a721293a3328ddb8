"""Write chats by a model's chat template, with the pictures of their messages, and find out which variables of a request the
template uses."""

from __future__ import annotations

import base64
import binascii
import inspect
import io
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError, meta

from upshift.errors import RequestError, UpshiftError
from upshift.inference.generation.media import IMAGE, MediaPrompts, has_media, media_parts
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.generation.prompts import Prompts
from upshift.internals.transformers_names import COMPILE_TEMPLATE
from upshift.loading.media_files import read_image_file
from upshift.serving.messages import PromptEnding, TemplateOptions
from upshift.training.data.chat_template import check_chat_template

logger = logging.getLogger(__name__)

QUESTION = {"role": "user", "content": "zqx_question"}  # of the made-up chats that show what a template writes
ANSWER = {"role": "assistant", "content": "zqx_answer"}
SWITCHES = ("enable_thinking", "thinking")  # variables of templates that let a model reason, or not
EFFORT = "reasoning_effort"
MAX_PIXELS = 2**25  # of one picture: a small file can have more than fit into memory
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError)  # that a template raises for messages that it does not take


class GivenTemplate(NamedTuple):
    """A chat template of the user. ``replaces``: the model has one of its own, which is not used.

    The model may not know how the template ends a turn. So an answer ends with the token ``end_id``, or before ``end_text``."""

    replaces: bool = False
    end_id: int | None = None
    end_text: str | None = None

    def end_answer(self, options: GenerationOptions) -> GenerationOptions:
        """Return the options of an answer in a chat, which ends where the template ends a turn."""
        ids = options.eos_token_id if self.end_id is None else (*options.eos_token_id, self.end_id)
        stops = options.stop_strings if self.end_text is None else (*options.stop_strings, self.end_text)
        return options.changed(eos_token_id=tuple(dict.fromkeys(ids)), stop_strings=tuple(dict.fromkeys(stops)))


def use_template(prompts: Prompts, template: str | None) -> GivenTemplate:
    """Write chats by a template of the user, if there is one. Raise RequestError if it writes no chat."""
    if template is None:
        return GivenTemplate()
    replaces = prompts.use_template(template)
    check_chat_template(prompts.tokenizer)
    end = find_turn_end(ChatTemplate(prompts.tokenizer))
    end_id = prompts.tokenizer.get_vocab().get(end) if end else None
    return GivenTemplate(replaces, end_id, end if end and end_id is None else None)


def find_turn_end(template: ChatTemplate) -> str:
    """Return the text with which the template ends the turn of an answer, without the white space around it.

    It is empty if the template writes none. What stands only behind the last turn is no such text."""
    text = template.try_write([QUESTION, ANSWER], answers=True)
    continued_text = template.try_write([QUESTION, ANSWER, QUESTION])
    if text is None:
        return ""
    end = text.rpartition(ANSWER["content"])[2].strip()
    is_last_only = continued_text is not None and not continued_text.rpartition(ANSWER["content"])[2].lstrip().startswith(end)
    return "" if is_last_only else end


class ChatTemplate:
    """The chat template of a tokenizer. ``media`` has the processor of a model that reads pictures."""

    def __init__(self, tokenizer: Any, media: MediaPrompts | None = None) -> None:
        self._tokenizer = tokenizer
        self._media = media

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Return the ids of the tokenizer's special tokens by their text."""
        tokenizer = self._tokenizer
        return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))

    @cached_property
    def source(self) -> str:
        """Return the text of the template, or an empty text without a template."""
        tokenizer = self._tokenizer
        return str(tokenizer.get_chat_template()) if tokenizer.chat_template else ""

    @cached_property
    def variables(self) -> frozenset[str]:
        """Return the names that a request may set: those that the template reads, without what transformers gives it itself."""
        if not self.source:
            return frozenset()
        environment = COMPILE_TEMPLATE.get()(self.source).environment
        names = meta.find_undeclared_variables(environment.parse(self.source))
        own_names = {"messages", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        return frozenset(names - own_names - set(self._tokenizer.special_tokens_map) - set(environment.globals))

    def read_variables(self, options: TemplateOptions, *, reasons: bool) -> dict[str, Any]:
        """Return the variables that a request sets. Raise RequestError if the template uses one of them nowhere.

        The effort is the exception: clients send it to every model, so one that has no place for it is only logged, as in vLLM.
        ``reasons`` says that the model writes its reasoning apart. Otherwise a request without reasoning needs no variable."""
        variables: dict[str, Any] = json.loads(options.variables)
        unknown_names = sorted(set(variables) - self.variables)
        if unknown_names:
            name = unknown_names[0]
            raise RequestError(f"chat_template_kwargs.{name} is not used by the chat template of the model; {self._valid_names}")
        switch = next((name for name in SWITCHES if name in self.variables), None)
        wants_reasoning = options.thinking
        if options.effort is not None:
            if EFFORT in self.variables and (options.effort != "none" or switch is None):
                variables.setdefault(EFFORT, options.effort)
            elif wants_reasoning is None:
                wants_reasoning = options.effort != "none"
        if wants_reasoning is None or (switch is None and not wants_reasoning and not reasons):
            return variables
        if switch is None and options.thinking is None:
            logger.warning("%s has no place in the chat template of the model, and changes nothing", EFFORT)
            return variables
        if switch is None:
            raise RequestError(f"enable_thinking has no place in the chat template of the model; {self._valid_names}")
        variables.setdefault(switch, wants_reasoning)
        return variables

    @property
    def _valid_names(self) -> str:
        valid_names = ", ".join(sorted(name for name in self.variables if not name.startswith("_")))
        return f"leave it out, or set one of {valid_names}" if valid_names else "leave it out"

    def decoder(self, tokenizer: Any, markers: str) -> Callable[[Sequence[int]], str]:
        """Return a function that decodes tokens by a copy of the tokenizer, for another thread.

        It writes the special tokens that ``markers`` contains, and leaves out the others."""
        hidden_ids = frozenset(id for token, id in self.special_ids.items() if token not in markers)

        def decode(tokens: Sequence[int]) -> str:
            shown_tokens = [token for token in tokens if token not in hidden_ids]
            text: str = tokenizer.decode(shown_tokens, skip_special_tokens=False)
            return text

        return decode

    @cached_property
    def takes_parts(self) -> bool:
        """Return whether the template writes the texts of parts alone, and would lose a content that is one text."""
        if not self.source:
            return False
        texts = [self._write_probe([QUESTION]), self._write_probe(write_parts([QUESTION]))]
        return [QUESTION["content"] in text for text in texts] == [False, True]

    def _write_probe(self, messages: list[Any]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False)
        except TEMPLATE_ERRORS:
            return ""
        return text

    def write_tokens(self, messages: list[Any]) -> list[int]:
        """Return the token ids of a chat that an answer follows. Raise RequestError if the template takes no such chat."""
        ids: list[int] = self._apply(messages, None, tokenize=True, ending="answer")
        return ids

    def try_write(self, messages: list[Any], tools: list[Any] | None = None, *, answers: bool = False) -> str | None:
        """Return the text of a chat, or None if the template takes no such chat. ``answers`` says that the last message is the
        answer."""
        try:
            text: str = self._apply(messages, tools, tokenize=False, ending="nothing" if answers else "answer")
        except RequestError:
            return None
        return text

    def _apply(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        *,
        tokenize: bool,
        ending: PromptEnding,
        variables: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return what the template makes of a chat, as text or as token ids. Raise RequestError if it takes no such chat.

        Pictures whose parts have no data are not read: the chat has only the tokens that the template writes for them."""
        if self.takes_parts:
            messages = write_parts(messages)
        options: dict[str, Any] = {
            "tools": tools or None,
            "add_generation_prompt": ending == "answer",
            "continue_final_message": ending == "open",
            **(variables or {}),
        }
        try:
            if self._media is not None and has_media(messages):
                if any("data" in part for part in media_parts(messages)):
                    return self._media.apply_template(read_pictures(messages), **options)
                text = self._media.processor.apply_chat_template(messages, tokenize=False, **options)
                return self._tokenizer(text, add_special_tokens=False).input_ids
            return self._tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=False, **options)
        except UpshiftError:
            raise
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the chat is not what the chat template of the model takes ({error}); give messages that it takes"
            ) from None


def write_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose contents are all parts."""
    return [{**message, "content": _parts_of(message.get("content"))} for message in messages]


def _parts_of(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def read_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose parts hold the pictures themselves in place of their bytes in base64."""
    return [
        {**message, "content": [_read_part(part, f"messages.{number}") for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for number, message in enumerate(messages)
    ]


def _read_part(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    if part["type"] != IMAGE:
        return dict(part)
    try:
        data = io.BytesIO(base64.b64decode(part["data"], validate=True))
        picture = read_image_file(data, purpose="a message with a picture", max_pixels=MAX_PIXELS)
    except (OSError, binascii.Error) as error:
        reason = str(error) if "pixels" in str(error) else "it is no picture that pillow knows"
        raise RequestError(f"the picture in {place} cannot be read ({reason}); send a PNG or JPEG file in base64") from None
    return {"type": IMAGE, "image": picture}
