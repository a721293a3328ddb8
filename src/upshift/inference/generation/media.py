"""Turn prompts with images into token ids and the model's other inputs, by the model's own processor."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from upshift.errors import MissingExtra, RequestError
from upshift.inference.resumable_output import is_text
from upshift.loading.media_files import read_image_file
from upshift.models.source import ModelSource
from upshift.models.tasks import inputs_of
from upshift.text import one_line

IMAGE = "image"
CACHED_BYTES = 256 * 2**20  # of processed images
FORM = (
    '{"prompt": "...", "images": ["a.png"]}, or {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, '
    '{"type": "text", "text": "..."}]}]}'
)


class MediaPrompt(list[int]):
    """The token ids of a prompt, and the model's other inputs for it, such as the pixels of its images."""

    def __init__(self, ids: Sequence[int], inputs: Mapping[str, Any]) -> None:
        super().__init__(ids)
        self.inputs = inputs

    @property
    def input_bytes(self) -> int:
        """Return the bytes of the other inputs."""
        return sum(getattr(tensor, "nbytes", 0) for tensor in self.inputs.values())


def other_inputs(prompts: Sequence[Sequence[int]]) -> Mapping[str, Any]:
    """Return the other inputs of prompts that are computed in one pass. A prompt that has some is the only one."""
    inputs = [prompt.inputs for prompt in prompts if isinstance(prompt, MediaPrompt)]
    assert not inputs or len(prompts) == 1, "a prompt with other inputs is computed alone"
    return inputs[0] if inputs else {}


class ProcessedPrompts:
    """The prompts with images that were processed last, at most ``max_bytes`` of them. Others are processed again."""

    def __init__(self, max_bytes: int = CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[str, list[int]] = OrderedDict()

    def find_or_process(self, key: str, process: Callable[[], list[int]]) -> list[int]:
        """Return the prompt of a key. Without one, ``process`` makes it. The key may be as large as the files of the images."""
        key = hashlib.sha256(key.encode()).hexdigest()
        prompt = self._prompts.pop(key, None) or process()
        self._prompts[key] = prompt
        while sum(kept.input_bytes for kept in self._prompts.values() if isinstance(kept, MediaPrompt)) > self._max_bytes:
            self._prompts.popitem(last=False)
        return prompt


def has_media(prompt: Any) -> bool:
    """Return whether a prompt has images: under "images", or as parts of its messages."""
    if isinstance(prompt, Mapping):
        return "images" in prompt or has_media(prompt.get("messages"))
    return isinstance(prompt, list | tuple) and any(True for _ in media_parts(prompt))


def media_parts(messages: Sequence[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of messages that are images."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            if isinstance(part, Mapping) and part.get("type") == IMAGE:
                yield part


class MediaPrompts:
    """The processor of a model that reads images beside text."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._processed = ProcessedPrompts()

    @cached_property
    def processor(self) -> Any:
        """Return the model's processor. Raise RequestError if the model reads no images, or has no processor that loads."""
        from transformers import AutoProcessor

        from upshift.models.build import find_architecture

        reference = self._source.reference
        inputs = inputs_of(find_architecture(self._source.hf_config, reference).model_class)
        if IMAGE not in inputs:
            raise RequestError(f"{reference!r} reads {' and '.join(inputs)}, and the prompts have images; leave the images out")
        try:
            processor = AutoProcessor.from_pretrained(self._source.directory)
        except ImportError as error:
            if find_spec("PIL") is None:
                raise MissingExtra(library="pillow", extra="images", purpose="a prompt with images") from None
            raise RequestError(f"the processor of {reference!r} does not load: {one_line(error)}") from None
        except (OSError, ValueError) as error:
            raise RequestError(f"{reference!r} has no processor that loads ({error}); save one beside the model") from None
        return processor

    def use_template(self, template: str) -> bool:
        """Write chats with images by this template, if the model reads them. Return whether the processor has one of its own."""
        try:
            has_own = bool(getattr(self.processor, "chat_template", None))
        except RequestError:  # there is no processor, which a prompt with images says
            return False
        self.processor.chat_template = template
        return has_own

    def tokenize(self, prompt: Any, name: str, *, chat: bool) -> list[int]:
        """Return the token ids of a prompt with images, and the model's inputs for them. ``name`` names the prompt.

        ``chat``: a prompt that is a text is the message of a user. Raise RequestError for a prompt of another form, or for an
        image that cannot be read."""
        fields: Mapping[str, Any] = prompt if isinstance(prompt, Mapping) else {"messages": prompt}
        paths = fields.get("images", ())
        if not isinstance(paths, list | tuple) or not all(map(is_text, paths)) or ("prompt" in fields) == ("messages" in fields):
            raise RequestError(f"{name} has images, and is not of the form {FORM}")
        key = json.dumps([chat, fields, [_file_state(path) for path in (*paths, *_paths_of_parts(fields))]], default=repr)
        return self._processed.find_or_process(key, lambda: self._process(fields, paths, name, chat=chat))

    def _process(self, fields: Mapping[str, Any], paths: Sequence[str], name: str, *, chat: bool) -> MediaPrompt:
        """Return the token ids and the inputs of a prompt with the images of ``paths``."""
        processor = self.processor
        if "prompt" in fields and not chat:
            inputs = self._process_text(fields["prompt"], [read_image(path, name) for path in paths], name)
        else:
            messages = fields.get("messages") or [{"role": "user", "content": fields["prompt"]}]
            if not getattr(processor, "chat_template", None):
                raise RequestError(
                    f"{self._source.reference!r} has no chat template; give a text with its marks of images instead"
                )
            return self.apply_template(_place_images(messages, list(paths), name), add_generation_prompt=True)
        return _media_prompt(inputs)

    def apply_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> MediaPrompt:
        """Return the token ids and the inputs of messages whose parts hold the images. ``options`` are those of transformers'
        ``apply_chat_template``."""
        inputs = self.processor.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_tensors="pt", **options
        )
        return _media_prompt(inputs)

    def _process_text(self, text: str, images: Sequence[Any], name: str) -> Mapping[str, Any]:
        """Return the model's inputs for a text that marks the places of its images. Raise RequestError if it marks others."""
        mark = getattr(self.processor, "image_token", None)
        if mark is not None and text.count(mark) != len(images):
            raise RequestError(
                f"{name} has {len(images)} images and {text.count(mark)} marks {mark!r} of them in its text; write one for each, "
                "or use --chat, where the chat template writes them"
            )
        inputs: Mapping[str, Any] = self.processor(text=[text], images=list(images), return_tensors="pt")
        return inputs


def _media_prompt(inputs: Mapping[str, Any]) -> MediaPrompt:
    tensors = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
    return MediaPrompt(inputs["input_ids"][0].tolist(), tensors)


def _paths_of_parts(fields: Mapping[str, Any]) -> list[str]:
    """Return the paths of images in the parts of messages."""
    contents = [message.get("content") for message in fields.get("messages") or () if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return [part["path"] for part in parts if isinstance(part, Mapping) and is_text(part.get("path"))]


def _file_state(path: str) -> tuple[str, int, int] | None:
    """Return what changes when a file is written, or None if there is no such file."""
    try:
        state = Path(path).stat()
    except (OSError, ValueError):
        return None
    return path, state.st_mtime_ns, state.st_size


def read_image(path: str, name: str) -> Any:
    """Return the image of a file, in RGB. Raise RequestError if it cannot be read. ``name`` names its prompt."""
    try:
        return read_image_file(path, purpose="a prompt with images")
    except OSError as error:
        reason = error.strerror or "no image that pillow knows"
        raise RequestError(f"{name} has the image {path!r}, which cannot be read ({reason}); give the path of an image") from None


def _place_images(messages: Sequence[Mapping[str, Any]], paths: list[str], name: str) -> list[dict[str, Any]]:
    """Return messages whose parts hold the images themselves.

    A part without a path takes the next path of ``paths``. If no part is an image, those of ``paths`` stand before the text of
    the first message of a user."""
    chat = [{**message, "content": _parts(message.get("content"), name)} for message in messages]
    places = [part for message in chat for part in message["content"] if part["type"] == IMAGE]
    open_places = [part for part in places if "path" not in part]
    if not places:
        open_places = [{"type": IMAGE} for _ in paths]
        first = next((message for message in chat if message["role"] == "user"), None)
        if first is None:
            raise RequestError(f"{name} has images, and no message of a user to show them in")
        first["content"] = [*open_places, *first["content"]]
    if len(open_places) != len(paths):
        raise RequestError(f"{name} has {len(paths)} images, and {len(open_places)} places for them in its messages")
    for part, path in zip(open_places, paths, strict=True):
        part["path"] = path
    for message in chat:
        for part in message["content"]:
            if part["type"] == IMAGE:
                part["image"] = read_image(part.pop("path"), name)
    return chat


def _parts(content: Any, name: str) -> list[dict[str, Any]]:
    """Return a message's content as new parts. Raise RequestError for a part that is neither text nor an image."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    parts = [dict(part) for part in content or () if isinstance(part, Mapping)]
    for part in parts:
        is_part = {"text": set(part) == {"type", "text"}, IMAGE: set(part) <= {"type", "path"}}.get(str(part.get("type")), False)
        if not is_part or not is_text(part.get("text", part.get("path", "x"))):
            raise RequestError(f"{name} has a part {part!r:.60} in a content; write {FORM}")
    return parts
