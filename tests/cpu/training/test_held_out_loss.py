"""The held-out loss of a task is that of one batch of all rows, whatever the size of the batches in which it is computed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import write_jsonl
from detectors import save_detector
from image_models import save_chat_model
from segmenters import make_pictures, save_segmenter, write_masks
from speech_models import save_speech_model, spoken_rows
from text_models import named, save_text_model

import upshift
from upshift.errors import JobFailed, RequestError
from upshift.models.source import find_model
from upshift.training.data.data_options import DataOptions
from upshift.training.tasks.metrics.trainer import TaskTrainer
from upshift.training.tasks.prepare import find_task_model, prepare_task

ROWS = 5
NO_LABEL = 255
needs_pillow = pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images")


def words_case(folder: Path) -> tuple[Path, Path]:
    """Write a model and words with tags. The rows have different numbers of words."""
    model = save_text_model(folder / "model", "BertForTokenClassification", **named("A", "B"))
    rows = [
        {"tokens": ["rome", "is", "good", "and", "bad"][:number], "tags": list("ABBAB")[:number]} for number in (1, 5, 2, 4, 1)
    ]
    return model, write_jsonl(folder / "rows.jsonl", rows)


def answers_case(folder: Path) -> tuple[Path, Path]:
    """Write a model and questions with answers. The loss of a batch is a mean over its rows."""
    context = "bob lives in rome and paris"
    texts = ("rome", "paris", "bob", "lives", "rome")
    rows = [{"question": "where is bob", "context": context, "answers": answer_of(text, context)} for text in texts]
    return save_text_model(folder / "model", "BertForQuestionAnswering"), write_jsonl(folder / "rows.jsonl", rows)


def answer_of(text: str, context: str) -> dict[str, Any]:
    return {"text": [text], "answer_start": [context.index(text)]}


def speech_case(folder: Path) -> tuple[Path, Path]:
    """Write a CTC head and sounds with texts. The loss of a batch is a mean over its rows."""
    return save_speech_model(folder / "model", ctc_loss_reduction="mean"), spoken_rows(folder, ROWS)


def summed_speech_case(folder: Path) -> tuple[Path, Path]:
    """Write a CTC head as Wav2Vec2 is by default. The loss of a batch is the sum of the losses of its rows."""
    return save_speech_model(folder / "model", ctc_loss_reduction="sum"), spoken_rows(folder, ROWS)


def boxes_case(folder: Path) -> tuple[Path, Path]:
    """Write a detector and images with different numbers of boxes."""
    make_pictures(folder, *[(32, 32)] * ROWS)
    boxes = [[1, 2, 10, 12], [20, 4, 9, 20], [3, 3, 20, 20], [0, 12, 12, 12]]
    of_rows = [{"bbox": boxes[:number], "category": ["cat", "dog", "dog", "cat"][:number]} for number in (1, 4, 2, 1, 3)]
    rows = [{"image": f"{number}.png", "objects": each} for number, each in enumerate(of_rows)]
    return save_detector(folder / "model", "yolos", "cat", "dog"), write_jsonl(folder / "rows.jsonl", rows)


def lone_pixel(side: int) -> np.ndarray:
    """Return a label image with the label of one pixel, which half of the size does not have."""
    label_image = np.full((side, side), NO_LABEL, dtype=np.uint8)
    label_image[0, 0] = 1
    return label_image


def pixels_case(folder: Path) -> tuple[Path, Path]:
    """Write a segmenter and label images. One has no label at the size that the model takes, and one has few."""
    label_images = make_pictures(folder, (32, 32), (64, 64), *[(32, 32)] * 3)
    label_images[1] = lone_pixel(64)
    label_images[2][4:] = NO_LABEL
    return save_segmenter(folder / "model", "segformer", "sky", "road", "car"), write_masks(folder, label_images)


def held_out_loss(model: Path, rows: Path, output: Path, *, size: int, held_out: Path | None = None, fixed: Any = ()) -> float:
    """Return the loss of the model with its weights hardly changed, computed with ``size`` rows at once."""
    record = upshift.train(
        str(model), str(rows), output=output, overwrite=True, global_batch=4, eval_data=str(held_out or rows), trial_seconds=0,
        fixed=(f"per_device_train_batch_size={size}", *fixed), arguments={"max_steps": 1, "learning_rate": 1e-7},
    )  # fmt: skip
    assert record is not None and record.measured is not None and record.measured.evaluation_loss is not None
    return record.measured.evaluation_loss


@pytest.mark.parametrize(
    "make", [words_case, answers_case, speech_case, summed_speech_case, pytest.param(pixels_case, marks=needs_pillow)]
)
def test_the_loss_is_that_of_one_batch(make: Any, tmp_path: Path) -> None:
    model, rows = make(tmp_path)
    fixed = ("precision=fp32", "torch_compile=off") if make in (words_case, answers_case) else ()  # less is planned
    one, four = (held_out_loss(model, rows, tmp_path / "out", size=size, fixed=fixed) for size in (1, 4))
    assert one == pytest.approx(four, rel=1e-5)


@needs_pillow
def test_the_loss_of_boxes_is_the_mean_of_its_batches_over_their_rows(tmp_path: Path) -> None:
    """The loss divides its classes by another number than its boxes, so that it depends on the size of the batches."""
    from transformers import AutoModelForObjectDetection

    model, rows = boxes_case(tmp_path)
    source, options = find_model(model), DataOptions(eval_size=0)
    task = find_task_model(source, str(rows), options)
    assert task is not None
    data = prepare_task(source, task, str(rows), options)
    loaded = AutoModelForObjectDetection.from_pretrained(model).eval()
    total = 0.0
    for start in range(0, ROWS, 2):
        batch = [data.training[number] for number in range(start, min(start + 2, ROWS))]
        with torch.no_grad():
            total += float(loaded(**data.collate(batch)).loss) * len(batch)
    assert held_out_loss(model, rows, tmp_path / "out", size=2) == pytest.approx(total / ROWS, rel=1e-4)


@needs_pillow
def test_the_loss_of_label_images_is_that_of_the_model(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForSemanticSegmentation

    model, rows = pixels_case(tmp_path)
    processor = AutoImageProcessor.from_pretrained(model)
    images, masks = ([Image.open(tmp_path / f"{n}{end}.png") for n in range(ROWS)] for end in ("", "-mask"))
    pixels = processor(images=[image.convert("RGB") for image in images], return_tensors="pt").pixel_values
    size = tuple(pixels.shape[-1:-3:-1])
    labels = torch.from_numpy(np.stack([np.asarray(mask.resize(size, Image.Resampling.NEAREST)) for mask in masks])).long()
    with torch.no_grad():
        whole = AutoModelForSemanticSegmentation.from_pretrained(model).eval()(pixel_values=pixels, labels=labels).loss
    assert held_out_loss(model, rows, tmp_path / "out", size=2) == pytest.approx(float(whole), rel=1e-4)


@needs_pillow
def test_held_out_rows_without_labels_are_no_loss(tmp_path: Path) -> None:
    label_images = make_pictures(tmp_path, *[(32, 32)] * 4)
    rows = write_masks(tmp_path, label_images)
    make_pictures(tmp_path / "other", (64, 64))
    model = save_segmenter(tmp_path / "model", "segformer", "sky", "road", "car")
    nothing = np.full((64, 64), NO_LABEL, dtype=np.uint8)
    for label_image, error, words in (
        (lone_pixel(64), RequestError, "no held-out row has a label"),
        (nothing, RequestError, "nothing is learned of any held-out row"),
    ):
        held_out = write_masks(tmp_path / "other", [label_image])
        with pytest.raises(error, match=words):
            held_out_loss(model, rows, tmp_path / "out", size=1, held_out=held_out)


def test_a_model_is_saved_before_an_evaluation_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        raise JobFailed("a disk is gone")

    model, rows = words_case(tmp_path)
    monkeypatch.setattr(TaskTrainer, "evaluate", fail)
    with pytest.raises(JobFailed, match="a disk is gone"):
        held_out_loss(model, rows, tmp_path / "out", size=4, fixed=("precision=fp32", "torch_compile=off"))
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out" / "tokenizer.json").is_file()


def prepared(model: Path, rows: list[Any], **options: Any) -> Any:
    """Return the data of a task. ``eval_size`` is the default unless it is given."""
    data = write_jsonl(model.parent / "some-rows.jsonl", rows)
    sequence_length = options.pop("sequence_length", None)
    source, read = find_model(model), DataOptions(**options)
    task = find_task_model(source, str(data), read)
    assert task is not None
    return prepare_task(source, task, str(data), read, sequence_length=sequence_length)


def lengths(data: Any) -> tuple[int, int]:
    return len(data.training), len(data.evaluation or ())


def test_rows_are_held_out_of_those_that_are_learned(tmp_path: Path) -> None:
    """A row has no text, which may be the one that is held out. A user who asked for held-out rows is told."""
    model = save_text_model(tmp_path / "model", "BertForSequenceClassification", **named("good", "bad"))
    full, empty = {"text": "bob lives", "label": "good"}, {"text": "", "label": "bad"}
    for rows in ([full, empty], [empty, full]):
        assert lengths(prepared(model, rows)) == (1, 0)
    errors = []
    for place in range(3):
        rows = [empty if number == place else full for number in range(3)]
        assert lengths(prepared(model, rows)) == (1, 1)
        try:
            prepared(model, rows, eval_size=1)
        except RequestError as error:
            errors.append(str(error))
    assert len(errors) == 1 and "nothing is learned of any held-out row" in errors[0]


def test_held_out_questions_are_those_that_are_learned(tmp_path: Path) -> None:
    model, _ = answers_case(tmp_path)
    context = "bob lives in rome and paris"
    row = {"question": "where is bob", "context": context, "answers": answer_of("rome", context)}
    data = prepared(model, [row, row, {**row, "question": ""}])
    assert lengths(data) == (1, 1) and data.metrics is not None
    logits = np.zeros((2, 1, len(data.evaluation[0].ids)))
    assert data.metrics.compute(tuple(logits), [data.evaluation[0]])  # of as many questions


@needs_pillow
def test_chats_are_held_out_of_those_that_are_learned(tmp_path: Path) -> None:
    from PIL import Image

    model = save_chat_model(tmp_path / "model", "llava")
    Image.new("RGB", (40, 36)).save(tmp_path / "0.png")

    def chat(answer: str) -> dict[str, Any]:
        turns = [{"role": "user", "content": "color"}, {"role": "assistant", "content": answer}]
        return {"messages": turns, "images": ["0.png"]}

    rows = [chat("red"), chat("blue"), chat("red and blue " * 40)]
    options: dict[str, Any] = {"sequence_length": 60, "long_rows": "drop"}
    assert lengths(prepared(model, rows, **options)) == (1, 1)
    assert lengths(prepared(model, rows[1:], **options)) == (1, 0)
    with pytest.raises(RequestError, match="nothing is learned of any held-out row"):
        prepared(model, rows, eval_size=1, **options)
