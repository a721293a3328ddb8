"""Find which inputs a model reads and which rows it gives. Load it, and make its inputs from images, sounds and texts with its
own processors.

The model's class decides the kind of row: the features of an image, a sound or a text if it has a method for them (CLIP, SigLIP,
CLAP), the scores of a classifier, the pooled output of an encoder, or else the mean over its outputs."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from upshift.errors import RequestError
from upshift.inference.media.files import MODALITIES
from upshift.inference.weights import stored_for
from upshift.loading.fill_model import Run, check_files
from upshift.loading.load import build_empty_model, load_source
from upshift.loading.media_files import MediaItem, Modality, read_image, read_sound_at
from upshift.models.build import find_architecture
from upshift.models.source import ModelSource
from upshift.models.tasks import FEATURES, inputs_of, tasks_of
from upshift.text import one_line
from upshift.value import Value

Kind = Literal["features", "class scores", "pooled output"]
SAMPLE_SIDE = 64  # pixels
CLASSIFICATION_TASKS = ("image-classification", "audio-classification")
METHODS: dict[Modality, str] = {"image": "get_image_features", "audio": "get_audio_features", "text": "get_text_features"}
PROCESSORS: dict[Modality, str] = {"image": "AutoImageProcessor", "audio": "AutoFeatureExtractor", "text": "AutoProcessor"}


class MediaConfig(Value):
    """Hold the kinds of input that a model reads, and the kind of its rows."""

    kind: Kind
    modalities: tuple[Modality, ...]


def encodes_media(source: ModelSource) -> bool:
    """Return whether MediaEncoder computes a model: it reads no texts, or it compares texts with images or sounds."""
    model_class = find_architecture(source.hf_config, source.reference).model_class
    names = inputs_of(model_class)
    has_methods = sum(hasattr(model_class, method) for method in METHODS.values()) > 1
    return bool(names) and ("text" not in names or (has_methods and not model_class.can_generate()))


def read_media_config(source: ModelSource) -> MediaConfig:
    """Return which inputs the model reads, and the kind of its rows. Raise RequestError if it encodes neither images nor
    sounds."""
    model_class = find_architecture(source.hf_config, source.reference).model_class
    names = inputs_of(model_class)
    modalities = tuple(modality for modality in MODALITIES if modality in names)
    if set(modalities) <= {"text"}:
        raise RequestError(
            f"{source.reference!r} is a {model_class.__name__}, which reads {' and '.join(names) or 'nothing known'}; images and "
            "sounds need a model that reads them, such as CLIP, DINOv2 or wav2vec2"
        )
    methods = tuple(modality for modality in modalities if hasattr(model_class, METHODS[modality]))
    if len(methods) > 1 and not model_class.can_generate():
        return MediaConfig(kind="features", modalities=methods)
    encoded = tuple(modality for modality in modalities if modality != "text")
    if methods and model_class.can_generate():
        raise RequestError(f"{source.reference!r} is a {model_class.__name__}, which writes text; use upshift generate")
    if any(task.name in CLASSIFICATION_TASKS for task in tasks_of(model_class.__name__)):
        return MediaConfig(kind="class scores", modalities=encoded)
    return MediaConfig(kind="pooled output", modalities=encoded)


def _is_bare(model: Any) -> bool:
    """Return whether a model's class has no head: AutoModel would take it."""
    return type(model).__name__ in FEATURES.class_names


def load_model(source: ModelSource, run: Run | None = None) -> Any:
    """Return the model of its own class in fp32, or as it is quantized.

    Raise RequestError if the files lack a weight that the answer of ``run`` depends on. None: that is any weight."""
    model_class = find_architecture(source.hf_config, source.reference).model_class
    dtype: Any = torch.float32 if stored_for(source) is None else "auto"
    return load_source(source, dtype=dtype, model_class=model_class, run=run).eval()


def load_tokenizer(source: ModelSource) -> Any:
    """Return the tokenizer beside a model. Raise RequestError if none loads.

    That of a CTC head has no tokenizer.json, because only Python's code puts its texts together."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.directory)
    except (OSError, ValueError, ImportError) as error:
        raise RequestError(
            f"{source.reference!r} has no tokenizer that loads ({one_line(error, limit=200)}); save one beside the model"
        ) from None


def load_encoder(source: ModelSource, config: MediaConfig) -> Any:
    """Return the model. Raise RequestError if the files lack a weight that its rows depend on."""
    return load_model(source, partial(_encode_samples, config, MediaInputs(source)))


def check_weights(source: ModelSource, config: MediaConfig) -> None:
    """Raise RequestError if the files lack a weight that the rows depend on. Only the headers of the files are read."""
    if stored_for(source) is None:  # other weights have a format that only one engine reads
        check_files(source, build_empty_model(source), run=partial(_encode_samples, config, MediaInputs(source)))


def _encode_samples(config: MediaConfig, inputs: MediaInputs, model: torch.nn.Module) -> torch.Tensor:
    """Return the sum of the rows of an empty item of each modality that the model reads."""
    sums = []
    for modality in config.modalities:
        arrays = inputs.sample(modality)
        tensors = [torch.from_numpy(array).to(next(model.parameters()).device) for array in arrays.values()]
        sums.append(MediaForward(model, config, modality, tuple(arrays)).eval()(*tensors).sum())
    return torch.stack(sums).sum()


class MediaForward(torch.nn.Module):
    """A module from the inputs of one modality, in the order of their names, to rows [B, H]."""

    def __init__(self, model: Any, config: MediaConfig, modality: Modality, names: tuple[str, ...]) -> None:
        super().__init__()
        self.kind = config.kind
        self.names = names
        self.method = METHODS[modality] if config.kind == "features" else "forward"
        self.model = model
        if config.kind == "pooled output":
            encoder = model if _is_bare(model) else model.base_model
            self.model = encoder.get_encoder() if encoder.config.is_encoder_decoder else encoder

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        output: Any = getattr(self.model, self.method)(**dict(zip(self.names, inputs, strict=True)))
        if self.kind == "class scores":
            scores: torch.Tensor = output.logits
            return scores
        if isinstance(output, torch.Tensor):  # the methods return it before transformers 5
            return output
        for name in ("image_embeds", "pooler_output"):
            pooled = getattr(output, name, None)
            if pooled is not None:
                rows: torch.Tensor = pooled.flatten(1)  # a convolutional model gives [B, C, 1, 1]
                return rows
        states: torch.Tensor = output.last_hidden_state
        return states.mean(1) if states.dim() == 3 else states.flatten(2).mean(2)


class MediaInputs:
    """The model's own processors, each loaded when it is first used."""

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._processors: dict[Modality, Any] = {}

    def processor(self, modality: Modality) -> Any:
        """Return a processor. Raise RequestError if the model's files have none."""
        if modality not in self._processors:
            import transformers

            loader = getattr(transformers, PROCESSORS[modality])
            try:
                self._processors[modality] = loader.from_pretrained(self.source.directory)
            except (OSError, ValueError, ImportError) as error:
                reason = one_line(error, limit=200)
                raise RequestError(
                    f"{self.source.reference!r} has no {PROCESSORS[modality]} that loads ({reason}); save one beside the model"
                ) from None
        return self._processors[modality]

    def sound_limits(self) -> tuple[int, float | None]:
        """Return the samples a second that the model takes, and the longest sound that its processor does not cut."""
        processor = self.processor("audio")
        longest = getattr(processor, "chunk_length", None) or getattr(processor, "max_length_s", None)
        return processor.sampling_rate, None if longest is None else float(longest)

    def arrays(self, item: MediaItem) -> dict[str, np.ndarray]:
        """Return the model's inputs for one item, each [1, ...]. Raise RequestError if its file cannot be read."""
        if item.modality == "image":
            return self._arrays("image", read_image(item))
        if item.modality == "audio":
            return self._arrays("audio", read_sound_at(item, self.processor("audio").sampling_rate).samples)
        return self._arrays("text", item.content)

    def sample(self, modality: Modality) -> dict[str, np.ndarray]:
        """Return the model's inputs for a black image, a second of silence, or a text of one letter, each [1, ...]."""
        if modality == "image":
            return self._arrays("image", np.zeros((SAMPLE_SIDE, SAMPLE_SIDE, 3), dtype=np.uint8))
        if modality == "audio":
            return self._arrays("audio", np.zeros(self.processor("audio").sampling_rate, dtype=np.float32))
        return self._arrays("text", "a")

    def _arrays(self, modality: Modality, content: Any) -> dict[str, np.ndarray]:
        processor = self.processor(modality)
        if modality == "image":
            inputs = processor(images=[content], return_tensors="np")
        elif modality == "audio":
            inputs = processor([content], sampling_rate=processor.sampling_rate, return_tensors="np")
        else:
            inputs = processor(text=[content], return_tensors="np", truncation=True)
        return {name: np.asarray(value) for name, value in inputs.items()}
