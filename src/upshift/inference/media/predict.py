"""Compute the results of a model's task in the form of transformers' pipelines: masks, depth, boxes, or scores of labels.

transformers' pipeline computes each item alone, with the model that Upshift loads. The table of tasks says which models have
such results. A classifier of texts that knows entailment gives the scores of labels that the user names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from upshift.errors import RequestError
from upshift.importing import quiet_logger
from upshift.inference.computing_device import computing_host
from upshift.inference.media.files import GivenLabels
from upshift.inference.media.model import MediaInputs, load_model, load_tokenizer
from upshift.inference.tokenizer import tokenizer_files
from upshift.inference.weights import find_weights, stored_for
from upshift.loading.media_files import MediaItem, Modality, check_media, check_sounds, read_image, read_sound_at
from upshift.models.build import find_architecture
from upshift.models.config import label_names
from upshift.models.source import ModelSource
from upshift.models.tasks import TASKS, tasks_of

TEXTS = "zero-shot-classification"  # transformers' pipeline for labels that a classifier of texts was not trained for
ENTAILMENT = "entail"  # the label with which that pipeline's classifiers say that a sentence follows from a text begins so
OF_LABELS = (*(task.name for task in TASKS if task.predicts == "given labels"), TEXTS)
TEMPLATED = ("zero-shot-image-classification", TEXTS)  # pipelines that put a label into a sentence
POST_PROCESSING: Mapping[str, tuple[str, ...]] = {  # methods of an image processor, of which a pipeline needs one
    "image-segmentation": tuple(f"post_process_{kind}_segmentation" for kind in ("panoptic", "instance", "semantic")),
    "depth-estimation": ("post_process_depth_estimation",),
    "object-detection": ("post_process_object_detection",),
}


class Predictor:
    """Compute the results of a model's task with transformers' pipeline, in fp32, or as the model is quantized.

    Args:
        model: directory or hub id.
        given: the labels that the user names. None: there are none.

    Raises:
        RequestError: the model's task has no such results, or needs labels, or takes none.
    """

    def __init__(self, model: str, given: GivenLabels | None) -> None:
        self.source = find_weights(model)
        self.given = given
        self.task = _find_task(self.source, given)
        self.modality = _modality_of(self.task)
        self.host = computing_host(stored_for(self.source))
        self._inputs = MediaInputs(self.source)
        if self.modality != "text":
            self._check_post_processing(self._inputs.processor(self.modality))
        self._tokenizer = load_tokenizer(self.source) if given is not None or tokenizer_files(self.source) else None
        self._pipeline: Any = None

    @property
    def settings(self) -> str:
        """Return what the results depend on beside the model and the items."""
        return repr((self.task, self.given))

    def _check_post_processing(self, processor: Any) -> None:
        methods = POST_PROCESSING.get(self.task, ())
        if methods and not any(hasattr(processor, method) for method in methods):
            raise RequestError(
                f"the image processor of {self.source.reference!r} is a {type(processor).__name__}, which has no "
                f"{' or '.join(methods)}; save the processor that belongs to the model beside it"
            )

    def check(self, items: Sequence[MediaItem]) -> None:
        """Raise RequestError with the first item that cannot be read, or that the task does not take."""
        other = next((item for item in items if item.modality != self.modality), None)
        if other is not None:
            raise RequestError(f"{other.origin} is of kind {other.modality}, and {self.task} takes items of kind {self.modality}")
        empty = next((item for item in items if not item.content), None)
        if empty is not None:
            raise RequestError(f"{empty.origin} is an empty text, and {self.task} needs one with words; leave it out")
        check_media(items)
        if self.modality == "audio":
            rate, longest_seconds = self._inputs.sound_limits()
            check_sounds(items, rate=rate, longest_seconds=longest_seconds)

    def predict(self, items: Sequence[MediaItem]) -> Iterator[Any]:
        """Yield the pipeline's result for each item: a list or a dictionary, with images of Pillow and tensors in it."""
        if self._pipeline is None:
            self._pipeline = self._load_pipeline()
        arguments: dict[str, Any] = {}
        if self.given is not None:
            arguments["candidate_labels"] = list(self.given.names)
            if self.given.template is not None:
                arguments["hypothesis_template"] = self.given.template
        for item in items:
            yield self._pipeline(self._content(item), **arguments)

    def _content(self, item: MediaItem) -> Any:
        if item.modality == "image":
            return read_image(item)
        if item.modality == "audio":
            sound = read_sound_at(item, self._inputs.sound_limits()[0])
            return {"raw": sound.samples, "sampling_rate": sound.rate}
        return item.content

    def _load_pipeline(self) -> Any:
        from transformers import pipeline

        parts = {"image": "image_processor", "audio": "feature_extractor"}
        processors = {} if self.modality == "text" else {parts[self.modality]: self._inputs.processor(self.modality)}
        with quiet_logger("transformers"):
            make: Any = pipeline  # its annotations list the names of tasks
            return make(
                self.task,
                model=load_model(self.source),
                tokenizer=self._tokenizer,
                device="cpu" if self.host.gpu is None else "cuda",
                **processors,
            )


def _find_task(source: ModelSource, given: GivenLabels | None) -> str:
    """Return the name of the pipeline. Raise RequestError if the model has none, or does not suit the labels."""
    model_class = find_architecture(source.hf_config, source.reference).model_class
    model = f"{source.reference!r} is a {model_class.__name__}"
    tasks = tasks_of(model_class.__name__)
    if given is not None and any(task.name == "text-classification" for task in tasks):
        labels = label_names(source.hf_config)
        if not any(label.lower().startswith(ENTAILMENT) for label in labels):
            raise RequestError(
                f"{model} with the labels {', '.join(labels)}, and --labels needs one that begins with {ENTAILMENT!r}: give a "
                "model trained on natural language inference (NLI), or name its labels in config.json"
            )
        return TEXTS
    task = next((task for task in tasks if task.predicts), None)
    own = ", ".join(dict.fromkeys(task.name for task in tasks)) or "transformers lists it for no task"
    if task is None:
        names = ", ".join(dict.fromkeys(task.name for task in TASKS if task.predicts))
        raise RequestError(
            f"{model} ({own}), which has no results in the form of a pipeline here; the tasks that have are {names}, and "
            f"{TEXTS}. For a row of numbers give --output that ends with .npy or .parquet, and no --labels"
        )
    if given is None and task.predicts == "given labels":
        raise RequestError(
            f"{model}, which finds the best of labels that you name ({task.name}); add them: --labels cat,dog. For the "
            "features of images give --output that ends with .npy or .parquet"
        )
    if given is not None and task.predicts != "given labels":
        raise RequestError(
            f"{model} ({task.name}), which has labels of its own; leave --labels out, or give a model for "
            f"{' or '.join(OF_LABELS)}"
        )
    if given is not None and given.template is not None and task.name not in TEMPLATED:
        raise RequestError(f"--label-template is not for {task.name}; leave it out")
    return task.name


def _modality_of(task: str) -> Modality:
    if task == TEXTS:
        return "text"
    return "audio" if task.startswith("audio") else "image"
