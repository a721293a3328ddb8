"""Decide whether a server answers chats with pictures: its engine must compute them as transformers does."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np

from upshift.errors import RequestError, UpshiftError
from upshift.inference.generation.engines.base import DecoderBuild
from upshift.inference.generation.engines.torch_decoder import TorchStatesDecoder
from upshift.inference.generation.engines.torch_generate import TransformersDecoder
from upshift.inference.generation.generator import Generator
from upshift.inference.generation.media import IMAGE, has_media
from upshift.inference.race.types import cosines
from upshift.models.build import find_architecture
from upshift.models.tasks import inputs_of
from upshift.serving.engine.chat_template import ChatTemplate
from upshift.serving.messages import Generate, Tokenize, cut_error

PROOF_STEPS = 3
PROOF_COSINE = 0.999  # of logits; an engine that counts positions otherwise is far below it
PROOF_SIZE = (96, 64)
MAX_FILE_BYTES = 2**26


class PictureReader:
    """Decide whether a server's model can be asked about pictures."""

    def __init__(self, generator: Generator, template: ChatTemplate, folder: str | None = None) -> None:
        """``folder`` holds the pictures that messages may name by file: URLs. None allows no such picture."""
        self._generator = generator
        self._template = template
        self._folder = None if folder is None else Path(folder).resolve()
        self._problem: str | None = "the engine has not started"

    @property
    def takes_some(self) -> bool:
        """Return whether some pictures are possible."""
        return self._problem is None

    def prove(self, decoder: Any) -> None:
        """Compute a made-up picture by an engine without rows, and find out why it takes no pictures, if it does not.

        ``decoder`` is None for an engine that takes whole requests."""
        source = self._generator.source
        if IMAGE not in inputs_of(find_architecture(source.hf_config, source.reference).model_class):
            self._problem = "the model reads text alone; leave the picture out"
            return
        if not isinstance(decoder, TorchStatesDecoder | TransformersDecoder):
            self._problem = "the engine computes text alone here; serve the model with --engine torch, and without adapters"
            return
        try:
            prompt = self._template.write_tokens([_made_message()])
        except UpshiftError as error:
            self._problem = f"the model's own processor takes no picture ({error})"
            return
        assert self._generator.race is not None
        build = DecoderBuild(source, self._generator.race.chosen, Path())
        computes = computes_pictures(decoder, build, prompt)
        self._problem = None if computes else "the engine computes pictures of this model otherwise than transformers does"

    def check(self, request: Generate | Tokenize) -> None:
        """Raise RequestError if a request has pictures that are not possible."""
        if not has_media(request.prompt):
            return
        if self._problem is not None:
            raise RequestError(f"a message has a picture, and {self._problem}")
        if isinstance(request, Generate) and request.prompt_top is not None:
            raise RequestError("the tokens of a picture have no log-probabilities; leave out prompt_logprobs, or the picture")

    def read_files(self, prompt: Any) -> Any:
        """Return a prompt whose pictures are all in base64. Raise RequestError for a file that the server may not read."""
        if not has_media(prompt):
            return prompt
        return tuple(
            {**message, "content": [self._read_file(part) for part in message["content"]]}
            if isinstance(message["content"], list)
            else message
            for message in prompt
        )

    def _read_file(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        if "url" not in part:
            return part
        url = part["url"]
        if self._folder is None:
            raise RequestError(f"{cut_error(url)!r} is a file, and this server reads none; start it with --image-folder")
        try:
            path = Path(url2pathname(urlsplit(url).path)).resolve(strict=True)  # without links and ..
            is_allowed = path.is_relative_to(self._folder) and path.is_file()
        except (OSError, ValueError, RuntimeError):  # no such file, a zero in its name, or links in a circle
            is_allowed = False
        if not is_allowed:
            raise RequestError(f"{cut_error(url)!r} is no file within the folder of --image-folder; correct the path")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RequestError(f"{cut_error(url)!r} has more than {MAX_FILE_BYTES:,} bytes; give a smaller picture")
        return {"type": IMAGE, "data": base64.b64encode(path.read_bytes()).decode()}


def _made_message() -> dict[str, Any]:
    """Return a message with a made-up picture, whose areas differ."""
    from PIL import Image

    file = io.BytesIO()
    Image.linear_gradient("L").resize(PROOF_SIZE).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"role": "user", "content": [{"type": IMAGE, "data": data}, {"type": "text", "text": "What is it?"}]}


def computes_pictures(decoder: TorchStatesDecoder | TransformersDecoder, build: DecoderBuild, prompt: list[int]) -> bool:
    """Return whether a decoder without rows computes a prompt with a picture, beside another row, as transformers does alone.

    ``build`` has the parts of the decoder. ``decoder`` has no rows afterwards."""
    if isinstance(decoder, TransformersDecoder):
        return True
    alone = TransformersDecoder(build._replace(model=decoder.model))
    expected = [alone.admit([prompt])[0]]
    for _ in range(PROOF_STEPS):
        expected.append(alone.step(np.array([expected[-1].argmax()]))[0])
    alone.keep([])
    decoder.admit([prompt[-2:]])
    found = [decoder.admit([prompt])[0]]
    found += [decoder.step(np.full(2, logits.argmax()))[1] for logits in expected[:-1]]
    decoder.keep([])
    return all(_agree(one, other) for one, other in zip(expected, found, strict=True))


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two rows of logits [V] point in the same direction, without those that are not finite."""
    finite = np.isfinite(one) & np.isfinite(other)
    rows = [logits[None, finite].astype(np.float64) for logits in (one, other)]
    return bool(cosines(rows[0], rows[1])[0] >= PROOF_COSINE)
