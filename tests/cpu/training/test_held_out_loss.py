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
from segmenters import make_pictures, save_segmenter, write_masks
from text_models import named, save_text_model

import upshift
from upshift.errors import JobFailed, RequestError

ROWS = 5
NO_LABEL = 255
needs_pillow = pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images")


def words_case(folder: Path) -> tuple[Path, Path]:
    """Words with tags. Rows have other numbers of them."""
    model = save_text_model(folder / "model", "BertForTokenClassification", **named("A", "B"))
    rows = [
        {"tokens": ["rome", "is", "good", "and", "bad"][:number], "tags": list("ABBAB")[:number]} for number in (1, 5, 2, 4, 1)
    ]
    return model, write_jsonl(folder / "rows.jsonl", rows)


def boxes_case(folder: Path) -> tuple[Path, Path]:
    """Images with two boxes each: the loss of a batch is a mean over its rows."""
    make_pictures(folder, *[(32, 32)] * ROWS)
    boxes = {"bbox": [[1, 2, 10, 12], [20, 4, 9, 20]], "category": ["cat", "dog"]}
    rows = [{"image": f"{number}.png", "objects": boxes} for number in range(ROWS)]
    return save_detector(folder / "model", "yolos", "cat", "dog"), write_jsonl(folder / "rows.jsonl", rows)


def lone_pixel(side: int) -> np.ndarray:
    """Return a label image with the label of one pixel, which half of the size does not have."""
    label_image = np.full((side, side), NO_LABEL, dtype=np.uint8)
    label_image[0, 0] = 1
    return label_image


def pixels_case(folder: Path) -> tuple[Path, Path]:
    """Label images, of which one has no label at the size that the model takes, and one has few."""
    label_images = make_pictures(folder, (32, 32), (64, 64), *[(32, 32)] * 3)
    label_images[1] = lone_pixel(64)
    label_images[2][4:] = NO_LABEL
    return save_segmenter(folder / "model", "segformer", "sky", "road", "car"), write_masks(folder, label_images)


def held_out_loss(model: Path, rows: Path, output: Path, *, size: int, held_out: Path | None = None, fixed: Any = ()) -> float:
    """The loss of the model with its weights hardly changed, computed with ``size`` rows at once."""
    record = upshift.train(
        str(model), str(rows), output=output, overwrite=True, global_batch=4, eval_data=str(held_out or rows), trial_seconds=0,
        fixed=(f"per_device_train_batch_size={size}", *fixed), arguments={"max_steps": 1, "learning_rate": 1e-7},
    )  # fmt: skip
    assert record is not None and record.measured is not None and record.measured.evaluation_loss is not None
    return record.measured.evaluation_loss


@pytest.mark.parametrize("make", [words_case, *(pytest.param(make, marks=needs_pillow) for make in (pixels_case, boxes_case))])
def test_the_loss_is_that_of_one_batch(make: Any, tmp_path: Path) -> None:
    model, rows = make(tmp_path)
    fixed = ("precision=fp32", "torch_compile=off") if make is words_case else ()  # less is planned
    one, four = (held_out_loss(model, rows, tmp_path / "out", size=size, fixed=fixed) for size in (1, 4))
    assert one == pytest.approx(four, rel=1e-5)


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
        (lone_pixel(64), JobFailed, "no held-out row has a label"),
        (nothing, RequestError, "nothing is learned of any held-out row"),
    ):
        held_out = write_masks(tmp_path / "other", [label_image])
        with pytest.raises(error, match=words):
            held_out_loss(model, rows, tmp_path / "out", size=1, held_out=held_out)
