"""Write down what is said in sounds, with transformers' own generate(): Whisper and its kin, and models with a CTC head.

A sound is computed as transformers computes it alone. Sounds whose inputs have one size share a batch, without padding between
them. Whisper reads a sound that is longer than its window in transformers' long form, piece by piece."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch

from upshift.errors import RequestError
from upshift.inference.computing_device import computing_host
from upshift.inference.media.model import MediaInputs, load_model, load_tokenizer
from upshift.inference.weights import find_weights, stored_for
from upshift.loading.media_files import MediaItem, check_media, check_sounds, read_sound_at, sound_header
from upshift.models.build import find_architecture
from upshift.models.tasks import tasks_of

TASK = "automatic-speech-recognition"
BATCH = 8  # sounds whose inputs have one size


class Transcript(NamedTuple):
    """The text of a sound, the token ids that the model wrote for it without their end, and the seconds of the sound."""

    text: str
    tokens: list[int]
    seconds: float


class Transcriber:
    """Turn sounds into texts with a model of speech recognition, in fp32, or as the model is quantized.

    Args:
        model: directory or hub id.
        max_new_tokens: the longest text of a sound, or of each piece of a long one, in tokens. None: the model's own.

    Raises:
        RequestError: the model writes no text from sounds, or its files have no feature extractor or tokenizer.
    """

    def __init__(self, model: str, *, max_new_tokens: int | None = None) -> None:
        self.source = find_weights(model)
        architecture = find_architecture(self.source.hf_config, self.source.reference)
        model_class: Any = architecture.model_class
        if not any(task.name == TASK for task in tasks_of(model_class.__name__)):
            own = "transformers lists it for no task" if architecture.task is None else f"its task is {architecture.task.name}"
            instead = (
                'write {"prompt": "...", "images": ["a.png"]} on each line'
                if model_class.can_generate()
                else (
                    f"give a model whose task is {TASK}, such as Whisper or wav2vec2 with a CTC head, or run this one with "
                    "transformers.pipeline()"
                )
            )
            raise RequestError(
                f"{self.source.reference!r} is a {model_class.__name__}, which writes no text from sounds or images alone "
                f"({own}); {instead}"
            )
        self._writes = bool(model_class.can_generate())
        if max_new_tokens is not None and not self._writes:
            raise RequestError(
                f"--max-new-tokens {max_new_tokens} is for models that write token by token, and {model_class.__name__} scores "
                "all moments of a sound at once; leave it out"
            )
        self.max_new_tokens = max_new_tokens
        self.host = computing_host(stored_for(self.source))
        self._has_long_form = self._writes and "return_timestamps" in inspect.signature(model_class.generate).parameters
        self._inputs = MediaInputs(self.source)
        self._extractor = self._inputs.processor("audio")
        self._window_seconds = self._inputs.sound_limits()[1]
        self.tokenizer = load_tokenizer(self.source)
        self._model: Any = None

    def check(self, items: Sequence[MediaItem]) -> None:
        """Raise RequestError with the first item that is no sound, cannot be read, or is longer than the model reads."""
        other = next((item for item in items if item.modality != "audio"), None)
        if other is not None:
            raise RequestError(f'{other.origin} is no sound; write {{"audio": "a.wav"}} on each line')
        check_media(items)
        longest = None if self._has_long_form else self._window_seconds
        check_sounds(items, rate=self._extractor.sampling_rate, longest_seconds=longest)

    def transcribe(self, items: Sequence[MediaItem]) -> Iterator[Transcript]:
        """Yield the transcript of each sound, in order."""
        if self._model is None:
            model = load_model(self.source, None if self._writes else self._score_sample)
            self._model = model.to("cpu" if self.host.gpu is None else "cuda")
        read = ((item, self._features(item)) for item in items)
        for _, group in groupby(read, key=lambda pair: _sizes(pair[1])):
            while batch := list(islice(group, BATCH)):
                rows = self._run({name: torch.cat([inputs[name] for _, inputs in batch]) for name in batch[0][1]})
                for (item, _), tokens in zip(batch, rows, strict=True):
                    text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                    yield Transcript(str(text).strip(), tokens, sound_header(item)[1])

    def write_down(self, items: Sequence[MediaItem]) -> list[Transcript]:
        """Return the transcript of each sound, in order."""
        return list(self.transcribe(items))

    def _score_sample(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the scores of a second of silence."""
        arrays = self._inputs.sample("audio")
        device = next(model.parameters()).device
        scores: torch.Tensor = model(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()}).logits
        return scores

    def _features(self, item: MediaItem) -> dict[str, torch.Tensor]:
        """Return the model's inputs for a sound, each [1, ...]. Those of a sound beyond the window are not cut."""
        sound = read_sound_at(item, self._extractor.sampling_rate)
        arguments: dict[str, Any] = {"sampling_rate": sound.rate, "return_tensors": "pt"}
        if self._writes:
            arguments["return_attention_mask"] = True
        if self._is_long(len(sound.samples) / sound.rate):
            arguments |= {"truncation": False, "padding": "longest"}
        return dict(self._extractor([sound.samples], **arguments))

    def _is_long(self, seconds: float) -> bool:
        return self._has_long_form and self._window_seconds is not None and seconds > self._window_seconds

    @torch.inference_mode()
    def _run(self, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
        """Return the token ids of each row: those that the model writes, or the likeliest of each moment for a CTC head."""
        inputs = {name: value.to(self._model.device) for name, value in inputs.items()}
        if not self._writes:
            rows: list[list[int]] = self._model(**inputs).logits.argmax(-1).tolist()
            return rows
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens} if self.max_new_tokens is not None else {}
        if self._has_long_form and inputs[self._model.main_input_name].shape[-1] > self._window_frames():
            options["return_timestamps"] = True  # by which the long form finds the next piece
        written: list[list[int]] = self._model.generate(**inputs, **options).tolist()
        return [self._without_end(row) for row in written]

    def _without_end(self, row: list[int]) -> list[int]:
        """Return a row without its end and the padding behind it, which depends on the other rows of the batch."""
        config = self._model.generation_config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        length = len(row)
        while length and row[length - 1] in (*ends, config.pad_token_id):
            length -= 1
        return row[:length]

    def _window_frames(self) -> int:
        return int(getattr(self._extractor, "nb_max_frames", 0) or 2**62)


def _sizes(inputs: dict[str, torch.Tensor]) -> tuple[tuple[str, torch.Size], ...]:
    return tuple((name, value.shape) for name, value in inputs.items())
