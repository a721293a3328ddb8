"""Training of detectors on images with boxes: the losses of a plain loop, new labels, and bad rows by name."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from detectors import save_detector
from plain_loop import plain_losses
from task_runs import RATE, STEPS, train

from upshift.errors import RequestError

pytestmark = [
    pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images"),
    pytest.mark.skipif(find_spec("scipy") is None, reason="scipy is not installed: it matches the boxes of a detector's loss"),
]
BOXES = (([[4, 5, 10, 12], [20, 2, 8, 8]], ["cat", "dog"]), ([[0, 0, 30.5, 36]], ["dog"]), ([], []))


def make_rows(folder: Path, *rows: Any) -> Path:
    """A file of rows beside their images, one of 40 x 36 pixels for each."""
    from PIL import Image

    for number in range(len(rows)):
        Image.linear_gradient("L").resize((40, 36)).convert("RGB").rotate(90 * number).save(folder / f"{number}.png")
    file = folder / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"image": f"{number}.png", **row}) for number, row in enumerate(rows)))
    return file


def objects(boxes: Any, categories: Any, **more: Any) -> dict[str, Any]:
    return {"objects": {"bbox": boxes, "category": categories, **more}}


@pytest.mark.parametrize("kind", ["yolos", "detr"])
def test_losses_of_a_detector_are_those_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    from PIL import Image

    folder = save_detector(tmp_path / "model", kind, "cat", "dog")
    data = make_rows(tmp_path, *(objects(*boxes) for boxes in BOXES))
    annotations = [
        {"image_id": 0, "annotations": [
            {"bbox": box, "category_id": ["cat", "dog"].index(name), "area": box[2] * box[3], "iscrowd": 0}
            for box, name in zip(boxes, names, strict=True)
        ]}
        for boxes, names in BOXES
    ]  # fmt: skip
    images = [Image.open(tmp_path / f"{number}.png") for number in range(len(BOXES))]
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    inputs = dict(processor(images=images, annotations=annotations, return_tensors="pt"))
    model = transformers.AutoModelForObjectDetection.from_pretrained(folder)
    expected = plain_losses(model, inputs, steps=STEPS, rate=RATE)
    assert expected[-1] < expected[0]
    assert train(folder, data, tmp_path / "out", rows=3) == pytest.approx(expected, rel=2e-4)
    saved = transformers.AutoModelForObjectDetection.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert saved(**inputs).loss.item() == pytest.approx(model.eval()(**inputs).loss.item(), rel=1e-3)


def test_a_detector_gets_a_head_for_other_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_detector(tmp_path / "model", "yolos", "cat", "dog")
    row = objects([[1, 2, 3, 4]] * 3, [])
    row["objects"]["categories"] = ["ant", "bee", "cow"]  # as datasets' pages name them
    del row["objects"]["category"]
    train(folder, make_rows(tmp_path, row), tmp_path / "out", rows=1)
    assert "object detection, the boxes of 'objects' (3 labels: ant, bee, cow)" in caplog.text
    saved = transformers.AutoModelForObjectDetection.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == {0: "ant", 1: "bee", 2: "cow"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "rows.jsonl:2 has no column 'objects'"),
        ({"objects": "cat"}, "rows.jsonl:2 has objects 'cat'"),
        (objects([[1, 2, 3]], ["cat"]), r"rows.jsonl:2 has the box \[1, 2, 3\]"),
        (objects([[1, 2, 0, 4]], ["cat"]), r"rows.jsonl:2 has the box \[1, 2, 0, 4\]"),
        (objects([[30, 2, 38, 4]], ["cat"]), "rows.jsonl:2 .* outside of its image of 40 x 36 pixels"),
        (objects([[1, 2, 3, 4]], []), "1 of bbox, 0 of category"),
        (objects([[1, 2, 3, 4]], [None]), "rows.jsonl:2 has the label None"),
        ({"objects": {"bbox": [[1, 2, 3, 4]]}}, "rows.jsonl:2 has a box without a category"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = save_detector(tmp_path / "model", "yolos", "cat", "dog")
    data = make_rows(tmp_path, objects(*BOXES[0]), row)
    with pytest.raises(RequestError, match=words):
        train(folder, data, tmp_path / "out", rows=2)
