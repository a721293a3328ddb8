"""Run transformers' own generate(), and choose its tokens: for models whose state between two tokens only transformers knows.

generate() runs in a thread. After each pass it hands the logits to a logits processor, which waits for the tokens that Upshift
chooses. So every model that transformers generates with has transformers' own tokens here, whatever it keeps between two tokens.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from upshift.inference.generation.engines.base import DecoderBuild, NoExtension
from upshift.inference.generation.media import other_inputs
from upshift.inference.generation.model import load_model, on_model, weight_bytes
from upshift.inference.generation.options import GenerationOptions
from upshift.inference.tokenizer import padded_rows
from upshift.inference.torch_settings import inference_settings
from upshift.models.config import padding_of

UNLIMITED = 1 << 30  # tokens; the caller ends a text


class _Stopped(Exception):
    """The caller needs no more tokens of these rows."""


class GenerateLoop(LogitsProcessor):
    """A call of generate() that runs in a thread, one pass for each call of ``next``."""

    def __init__(self) -> None:
        self._logits: queue.Queue[np.ndarray | BaseException] = queue.Queue()
        self._tokens: queue.Queue[np.ndarray | None] = queue.Queue()

    def start(self, generate: Any) -> np.ndarray:
        """Begin ``generate``, which gets this processor. Return the logits [R, V] fp32 of the first tokens."""
        self._thread = threading.Thread(target=self._run, args=(generate,), daemon=True)
        self._thread.start()
        return self._receive()

    def next(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits [R, V] fp32 after ``tokens`` [R]."""
        self._tokens.put(tokens)
        return self._receive()

    def stop(self) -> None:
        """End the call, and wait for its end."""
        self._tokens.put(None)
        self._thread.join()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Return scores [R, V] whose largest are at the tokens that the caller chose. generate() calls it after each pass."""
        self._logits.put(scores.float().cpu().numpy())
        tokens = self._tokens.get()
        if tokens is None:
            raise _Stopped
        chosen = torch.full_like(scores, -torch.inf)
        chosen[torch.arange(len(tokens)), torch.from_numpy(tokens)] = 0.0
        return chosen  # type: ignore[return-value]

    def _run(self, generate: Any) -> None:
        try:
            generate(self)
        except _Stopped:
            pass
        except BaseException as error:  # it belongs to the caller's thread
            self._logits.put(error)

    def _receive(self) -> np.ndarray:
        answer = self._logits.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer


class TransformersDecoder(NoExtension):
    """A model that generates by transformers' generate(). Its rows begin together."""

    joins = False

    def __init__(self, build: DecoderBuild) -> None:
        self.setup = build.setup
        self.model = build.model
        if self.model is None:
            self.model = load_model(build.source, build.setup.precision, build.setup.device, where=build.where)
        self.weight_bytes = weight_bytes(build.source, self.model)
        self._pad = padding_of(self.model.config.get_text_config(decoder=True)) or 0  # some models find padding by its id
        self._options = _plain_options(self.model, self._pad)
        self._loop: GenerateLoop | None = None
        self._rows: list[int] = []  # the rows of generate() that the caller keeps
        self._width = 0  # generate()'s rows

    def admit(self, prompts: Sequence[Sequence[int]]) -> np.ndarray:
        """Add rows to an engine that has none. A prompt with other inputs is the only row."""
        is_decoder = not self.model.config.is_encoder_decoder
        ids, mask = padded_rows(prompts, pad=self._pad, left=is_decoder)
        arguments = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask), **other_inputs(prompts)}

        def generate(loop: GenerateLoop) -> None:
            with inference_settings(self.setup):
                on_device = {name: on_model(self.model, tensor) for name, tensor in arguments.items()}
                self.model.generate(**on_device, generation_config=self._options, logits_processor=LogitsProcessorList([loop]))

        self._loop = GenerateLoop()
        self._width = len(prompts)
        self._rows = list(range(len(prompts)))
        return self._loop.start(generate)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        assert self._loop is not None, "there is no row"
        all_tokens = np.zeros(self._width, dtype=np.int64)  # a row that has ended goes on with any token, and nobody reads it
        all_tokens[self._rows] = tokens
        return self._loop.next(all_tokens)[self._rows]

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        if not rows and self._loop is not None:
            self._loop.stop()
            self._loop = None


def _plain_options(model: Any, pad: int) -> GenerationConfig:
    """Return the model's options of generate() without those that Upshift applies itself: generate() changes no logits with
    them, and ends no text. They become the model's, because generate() completes options from there."""
    options: GenerationConfig = copy.deepcopy(model.generation_config)
    for name in GenerationOptions.model_fields:
        if hasattr(options, name):
            setattr(options, name, None)
    options.update(pad_token_id=pad, use_cache=True, max_new_tokens=UNLIMITED, do_sample=False, num_beams=1)
    model.generation_config = options
    return options
