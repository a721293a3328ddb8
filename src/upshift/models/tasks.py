"""List what models are for, as transformers' own tables of classes say: the one table that every command asks.

Each row joins a task of the Hub to the Auto class of its models, the class of its preprocessor, and the loss that Upshift trains.
The model's class says which inputs it reads and what it writes, because models of one task differ: see ``input_modalities``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from upshift.internals.transformers_names import CLASS_NAMES
from upshift.models.profile import Objective

Output = Literal["text", "token scores", "label", "token labels", "span", "vector", "boxes", "mask", "depth", "similarity"]
HEAD_OUTPUTS: tuple[Output, ...] = ("label", "token labels", "span", "boxes", "mask")  # of a head that is trained for the task
Preprocessor = Literal["AutoTokenizer", "AutoImageProcessor", "AutoFeatureExtractor", "AutoVideoProcessor", "AutoProcessor"]


class ModelTask(NamedTuple):
    """A task, and what transformers has for it."""

    name: str  # as the Hub and transformers' pipelines name it
    auto_class: str
    table: str  # the name of transformers' table from model types to classes
    preprocessor: Preprocessor
    output: Output
    objective: Objective | None = None  # the loss that Upshift trains; None: it trains none
    peft_type: str = ""  # peft's name of the task
    predicts: Literal["", "own labels", "given labels"] = ""  # whether `upshift encode` gives the results of its pipeline
    trained_on: str = ""  # what `upshift train` trains its models on without a plan of its own; empty: on nothing

    @property
    def class_names(self) -> frozenset[str]:
        """Return the names of all classes that transformers lists for the task."""
        return class_names(self.table)

    def classes_of(self, model_type: str) -> tuple[str, ...]:
        """Return the names of the classes that transformers lists for a model type."""
        return names_in(self.table, model_type)


FEATURES = ModelTask(  # the class without a head
    "feature-extraction", "AutoModel", "MODEL_MAPPING_NAMES", "AutoProcessor", "vector", peft_type="FEATURE_EXTRACTION"
)
# In the order in which they are tried for a class that several tables list, and for a config that names no class.
TASKS = (
    ModelTask(
        "text2text-generation",
        "AutoModelForSeq2SeqLM",
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
        "AutoTokenizer",
        "text",
        "seq2seq-lm",
        "SEQ_2_SEQ_LM",
    ),
    ModelTask(
        "fill-mask", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoTokenizer", "token scores", "masked-lm"
    ),
    ModelTask(
        "text-generation",
        "AutoModelForCausalLM",
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "AutoTokenizer",
        "text",
        "causal-lm",
        "CAUSAL_LM",
    ),
    ModelTask(
        "image-classification",
        "AutoModelForImageClassification",
        "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "AutoImageProcessor",
        "label",
        "image-classification",
        predicts="own labels",
    ),
    ModelTask(
        "text-classification",
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "AutoTokenizer",
        "label",
        "sequence-classification",
        "SEQ_CLS",
    ),
    ModelTask(
        "token-classification",
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
        "AutoTokenizer",
        "token labels",
        "token-classification",
        "TOKEN_CLS",
    ),
    ModelTask(
        "question-answering",
        "AutoModelForQuestionAnswering",
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
        "AutoTokenizer",
        "span",
        "question-answering",
        "QUESTION_ANS",
    ),
    ModelTask(
        "multiple-choice", "AutoModelForMultipleChoice", "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES", "AutoTokenizer", "label"
    ),
    ModelTask(
        "image-text-to-text",
        "AutoModelForImageTextToText",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
        "AutoProcessor",
        "text",
        trained_on="chats with images",
    ),
    ModelTask(
        "automatic-speech-recognition",
        "AutoModelForSpeechSeq2Seq",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "AutoProcessor",
        "text",
        trained_on="sounds with texts",
    ),
    ModelTask("any-to-any", "AutoModelForMultimodalLM", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "AutoProcessor", "text"),
    ModelTask(
        "automatic-speech-recognition",
        "AutoModelForCTC",
        "MODEL_FOR_CTC_MAPPING_NAMES",
        "AutoProcessor",
        "token scores",
        trained_on="sounds with texts",
    ),
    ModelTask(
        "audio-classification",
        "AutoModelForAudioClassification",
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
        "AutoFeatureExtractor",
        "label",
        trained_on="sounds with labels",
        predicts="own labels",
    ),
    ModelTask(
        "video-classification",
        "AutoModelForVideoClassification",
        "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
        "AutoVideoProcessor",
        "label",
    ),
    ModelTask(
        "object-detection",
        "AutoModelForObjectDetection",
        "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
        "AutoImageProcessor",
        "boxes",
        trained_on="images with boxes",
        predicts="own labels",
    ),
    ModelTask(
        "zero-shot-object-detection",
        "AutoModelForZeroShotObjectDetection",
        "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES",
        "AutoProcessor",
        "boxes",
        predicts="given labels",
    ),
    ModelTask(
        "image-segmentation",
        "AutoModelForSemanticSegmentation",
        "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
        "AutoImageProcessor",
        "mask",
        trained_on="images with label images",
        predicts="own labels",
    ),
    ModelTask(
        "image-segmentation",
        "AutoModelForUniversalSegmentation",
        "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
        "AutoImageProcessor",
        "mask",
        trained_on="images with label images",
        predicts="own labels",
    ),
    ModelTask(
        "mask-generation", "AutoModelForMaskGeneration", "MODEL_FOR_MASK_GENERATION_MAPPING_NAMES", "AutoProcessor", "mask"
    ),
    ModelTask(
        "depth-estimation",
        "AutoModelForDepthEstimation",
        "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
        "AutoImageProcessor",
        "depth",
        predicts="own labels",
    ),
    ModelTask(
        "zero-shot-image-classification",
        "AutoModelForZeroShotImageClassification",
        "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "AutoProcessor",
        "similarity",
        predicts="given labels",
    ),
    ModelTask(
        "document-question-answering",
        "AutoModelForDocumentQuestionAnswering",
        "MODEL_FOR_DOCUMENT_QUESTION_ANSWERING_MAPPING_NAMES",
        "AutoProcessor",
        "span",
    ),
    ModelTask(
        "visual-question-answering",
        "AutoModelForVisualQuestionAnswering",
        "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES",
        "AutoProcessor",
        "label",
    ),
    ModelTask(
        "table-question-answering",
        "AutoModelForTableQuestionAnswering",
        "MODEL_FOR_TABLE_QUESTION_ANSWERING_MAPPING_NAMES",
        "AutoTokenizer",
        "span",
    ),
    ModelTask("image-feature-extraction", "AutoModel", "MODEL_FOR_IMAGE_MAPPING_NAMES", "AutoImageProcessor", "vector"),
    FEATURES,
)
TRAINED = tuple(task for task in TASKS if task.objective is not None)


def tasks_of(class_name: str) -> tuple[ModelTask, ...]:
    """Return the tasks for which transformers lists a class, in the order of TASKS."""
    return tuple(task for task in TASKS if class_name in task.class_names)


def find_task(class_name: str, *, has_encoder: bool) -> ModelTask | None:
    """Return the task of a class, or None if no table of TASKS lists it.

    ``has_encoder``: the model is an encoder with a decoder. Without one it has no encoder's loss, whatever table lists it."""
    fitting = (task for task in tasks_of(class_name) if has_encoder or task.objective != "seq2seq-lm")
    return next(fitting, None)


def writes_text(model_class: Any) -> bool:
    """Return whether a class writes text: it generates, and transformers lists it for a task whose output is text."""
    is_listed = any(task.output == "text" for task in tasks_of(model_class.__name__))
    return is_listed and model_class.can_generate() and "text" in _names(model_class.output_modalities)


def inputs_of(model_class: Any) -> tuple[str, ...]:
    """Return what a model reads, as its class says: some of "text", "image", "audio" and "video"."""
    return _names(model_class.input_modalities)


def _names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names or ())


@cache
def names_in(table: str, model_type: str) -> tuple[str, ...]:
    """Return the class names in one of transformers' tables for one model type. An older transformers may lack the table."""
    return _names(getattr(CLASS_NAMES.get(), table, {}).get(model_type))


@cache
def class_names(table: str) -> frozenset[str]:
    """Return all class names in one of transformers' tables. An older transformers may lack the table."""
    entries = getattr(CLASS_NAMES.get(), table, {})
    return frozenset(name for model_type in entries for name in names_in(table, model_type))
