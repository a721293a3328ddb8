"""Turn the prompts of requests into token ids, and answer requests for token ids and for their text. A long answer has several
messages, because a line has a maximum length."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from functools import cached_property
from typing import Any, NamedTuple

from upshift.errors import RequestError
from upshift.inference.generation.media import has_media
from upshift.inference.generation.prompts import Prompts
from upshift.inference.tokenizer import as_exception, panics_as_errors
from upshift.serving.engine.plain_text import read_as_text
from upshift.serving.engine.reasoning import (
    END_TOKENS,
    ReasoningForm,
    begins_reasoning,
    find_reasoning_form,
    template_reasoning,
)
from upshift.serving.engine.tool_calls import ToolTemplate
from upshift.serving.messages import (
    DecodedText,
    DescribeTokenizer,
    Detokenize,
    Generate,
    Refused,
    TemplateOptions,
    Tokenize,
    Tokens,
)
from upshift.value import Value

TOKENS_PER_MESSAGE = 2048
CHARACTERS_PER_MESSAGE = 2**15
FILL_MARKS = (  # control tokens before a text, before its suffix, and before what comes between them
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
LONG_CHARACTERS = 2**15  # of a prompt: a tokenizer reads 1.3 MB of text in a second, which is 25 ms


class PromptReader:
    """Turn prompts into token ids by a tokenizer and its chat template. Two threads need a reader each, with its own tokenizer.

    ``allow_special``: control tokens in the texts of messages stay control tokens."""

    def __init__(self, prompts: Prompts, *, allow_special: bool) -> None:
        self._prompts = prompts
        self._allow_special = allow_special
        self.template = ToolTemplate(prompts.tokenizer, prompts.media)

    @cached_property
    def reasoning_form(self) -> ReasoningForm | None:
        """Return how the chat template marks reasoning, or None if it shows no such form."""
        return find_reasoning_form(self.template)

    def begins_reasoning(self, prompt: list[int]) -> bool | None:
        """Return what the function ``begins_reasoning`` says about the token ids of a chat."""
        form = self.reasoning_form
        if form is None:
            return None
        end = prompt[-(len(form.markers.encode()) + END_TOKENS) :]
        return begins_reasoning(form, self._prompts.tokenizer.decode(end, skip_special_tokens=False))

    def read(self, prompt: Any, tools: str | None, template: TemplateOptions, suffix: str | None = None) -> list[int]:
        """Return the token ids of a text or a chat. Raise RequestError for a prompt that is not possible.

        With ``suffix``, the answer comes between the text and the suffix."""
        with panics_as_errors():
            return self._read(prompt if suffix is None else self._fill_in(prompt, suffix), tools, template)

    def _fill_in(self, text: str, suffix: str) -> str:
        """Return the text whose answer comes between a text and a suffix, in the order that all of these tokenizers share."""
        known_tokens = {str(token) for token in self._prompts.tokenizer.added_tokens_decoder.values()}
        marks = next((marks for marks in FILL_MARKS if known_tokens.issuperset(marks)), None)
        if marks is None:
            raise RequestError(
                "suffix needs control tokens for filling in the middle, such as <|fim_prefix|>, and the tokenizer of the model "
                "has none; leave it out"
            )
        before, after, middle = marks
        return f"{before}{text}{after}{suffix}{middle}"

    def _read(self, prompt: Any, tools: str | None, template: TemplateOptions) -> list[int]:
        if isinstance(prompt, str):
            return self._prompts.tokenize([prompt])[0]
        tokenizer = self._prompts.tokenizer
        if not tokenizer.chat_template:
            raise RequestError(
                "the model has no chat template; give a text to /v1/completions, or start the server with --chat-template"
            )
        form = self.reasoning_form
        variables = self.template.read_variables(template, reasons=form is not None)
        messages = template_reasoning(prompt, form)
        has_parts = self.template.takes_parts or has_media(messages)

        def read(chat: list[dict[str, Any]], offered: Any, variables: dict[str, Any]) -> list[int]:
            uses_tools = any(set(message) - {"role", "content"} for message in chat)
            if offered is None and not (uses_tools or variables or has_parts) and template.ending == "answer":
                return self._prompts.tokenize([chat])[0]
            return self.template.tokenize(chat, offered, variables, ending=template.ending)

        offered = None if tools is None else json.loads(tools)
        if self._allow_special:
            return read(messages, offered, variables)
        return read_as_text(messages, offered, tokenizer, read, variables)


def token_replies(
    request: Tokenize | Detokenize | DescribeTokenizer,
    tokenizer: Any,
    read_chat: Callable[[Tokenize], list[int]],
    vocabulary: int | None,
) -> list[Value]:
    """Return the messages that answer a request, or its refusal. ``read_chat`` returns the token ids of a chat."""
    try:
        with panics_as_errors():
            return _token_replies(request, tokenizer, read_chat, vocabulary)
    except Exception as error:  # from the tokenizer, or from its template, at this request
        return [Refused.from_error(request.id, error)]


def _token_replies(
    request: Tokenize | Detokenize | DescribeTokenizer,
    tokenizer: Any,
    read_chat: Callable[[Tokenize], list[int]],
    vocabulary: int | None,
) -> list[Value]:
    if isinstance(request, DescribeTokenizer):
        return _text_replies(request.id, json.dumps(describe_tokenizer(tokenizer)))
    if isinstance(request, Detokenize):
        check_token_ids(request.tokens, vocabulary)
        return _text_replies(request.id, tokenizer.decode(list(request.tokens), skip_special_tokens=False))
    if isinstance(request.prompt, str):
        ids: Sequence[int] = tokenizer(request.prompt, add_special_tokens=request.add_special_tokens).input_ids
    else:
        ids = read_chat(request)
    texts = tokenizer.convert_ids_to_tokens(ids) if request.with_texts else []
    return [
        Tokens(id=request.id, ids=tuple(ids[start:end]), texts=tuple(texts[start:end]), last=end >= len(ids))
        for start, end in _spans(len(ids), TOKENS_PER_MESSAGE)
    ]


def _text_replies(id: int, text: str) -> list[Value]:
    return [
        DecodedText(id=id, text=text[start:end], last=end >= len(text))
        for start, end in _spans(len(text), CHARACTERS_PER_MESSAGE)
    ]


def describe_tokenizer(tokenizer: Any) -> dict[str, Any]:
    """Return the settings of a tokenizer as its file tokenizer_config.json has them, without paths, in vLLM's form."""
    paths = ("vocab_file", "merges_file", "name_or_path", "tokenizer_file")
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name not in paths}
    template = {"chat_template": tokenizer.get_chat_template()} if tokenizer.chat_template else {}
    described = {**settings, **tokenizer.special_tokens_map, "tokenizer_class": type(tokenizer).__name__, **template}
    simple: dict[str, Any] = _without_objects(described)
    return simple


def _without_objects(value: Any) -> Any:
    """Return a value whose tokens are texts, and which JSON can hold."""
    if isinstance(value, Mapping):
        return {str(name): _without_objects(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_objects(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "content", str(value))


def cut_prompt(request: Generate, ids: list[int], positions: int | None, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt, cut as the request says. ``positions`` are those of the model, None if unknown.

    Raise RequestError if that is not possible."""
    count = request.max_prompt_tokens
    if count == -1:
        count = len(ids) if positions is None else positions - 1
    if count is None or len(ids) <= count:
        return ids
    if count < 1 or has_media(request.prompt):
        raise RequestError(
            "truncate_prompt_tokens leaves nothing of the prompt, or would cut a picture; give more, or leave it out"
        )
    side = request.truncation_side or tokenizer.truncation_side
    return ids[-count:] if side == "left" else ids[:count]


def check_token_ids(ids: Iterable[int], vocabulary: int | None) -> None:
    """Raise RequestError if a token id is not below ``vocabulary``. With None, the size is unknown, and nothing is checked.

    An engine fails at an id without a vector, or reads memory that is not its own."""
    largest = max(ids, default=0)
    if vocabulary is not None and largest >= vocabulary:
        raise RequestError(f"token {largest} is not one of the model's {vocabulary:,}; leave out what it stands for")


def _spans(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the starts and ends of parts of at most ``size``. There is at least one part."""
    for start in range(0, max(length, 1), size):
        yield start, start + size


def is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and not is_token_ids(prompt)


def is_token_ids(prompt: Any) -> bool:
    return not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)


class ReadPrompt(NamedTuple):
    """A request whose prompt was read in ``seconds``. ``read`` has the token ids, the answer to the request, or an error."""

    request: Generate | Tokenize
    read: list[Any] | Exception
    seconds: float


class PromptThread:
    """Reads prompts in a thread, one after the other, while the engine computes the running answers.

    Every wanted request gets an answer, whatever ends its reading."""

    def __init__(
        self,
        read: Callable[[Generate | Tokenize], list[Any]],
        put: Callable[[ReadPrompt], None],
        is_wanted: Callable[[int], bool],
    ) -> None:
        """``read`` returns the token ids of a prompt, or the messages that answer a request. ``put`` takes each read prompt.
        ``is_wanted`` says whether the client of a request, by its id, still waits. The thread calls all three."""
        self._read = read
        self._put = put
        self._is_wanted = is_wanted
        self._requests: queue.SimpleQueue[Generate | Tokenize] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="prompts", daemon=True).start()

    def begin(self, request: Generate | Tokenize) -> None:
        """Read the prompt of a request after those before it."""
        self._requests.put(request)

    def _run(self) -> None:
        while True:
            request = self._requests.get()
            if not self._is_wanted(request.id):
                continue
            start = time.perf_counter()
            read: list[Any] | Exception
            try:
                read = self._read(request)
            except BaseException as error:  # of any type: without an answer, this client and those behind it wait for ever
                read = as_exception(error)
            self._put(ReadPrompt(request, read, time.perf_counter() - start))


def start_prompt_thread(
    prompts: Prompts,
    read: Callable[[Generate | Tokenize, PromptReader], list[int]],
    put: Callable[[ReadPrompt], None],
    is_wanted: Callable[[int], bool],
    *,
    allow_special: bool,
    vocabulary: int | None,
) -> PromptThread:
    """Start a thread that reads prompts with a tokenizer of its own, because two threads may not use one.

    The copy of a tokenizer with 150,000 tokens takes 0.3 s, so call this before the engine has requests. ``read`` returns the
    token ids of a request's prompt by a reader. ``put`` and ``is_wanted`` are those of ``PromptThread``."""
    prompts = copy(prompts)
    prompts.tokenizer = deepcopy(prompts.tokenizer)
    reader = PromptReader(prompts, allow_special=allow_special)

    def answer(request: Generate | Tokenize) -> list[Any]:
        if isinstance(request, Tokenize):
            return token_replies(request, prompts.tokenizer, lambda chat: read(chat, reader), vocabulary)
        return read(request, reader)

    return PromptThread(answer, put, is_wanted)


def takes_long(request: Generate | Tokenize) -> bool:
    """Return whether the prompt of a request takes so long to read that it is read in a thread."""
    if has_media(request.prompt):
        return True
    prompt = request.prompt
    if isinstance(prompt, str):
        suffix = request.suffix if isinstance(request, Generate) else None
        return len(prompt) + len(suffix or "") > LONG_CHARACTERS
    characters = len(request.tools or "") + len(request.template.variables)
    for message in prompt:
        if isinstance(message, dict):
            characters += sum(len(str(value)) for value in message.values())
    return characters > LONG_CHARACTERS
