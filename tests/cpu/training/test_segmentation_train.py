"""Training on images with label images: losses and metrics of a plain loop, all forms of label images, and bad rows by name."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command
from plain_loop import plain_losses
from segmenters import OF_PARTS, SEMANTIC, make_pictures, save_segmenter, write_masks
from task_runs import RATE, STEPS, losses_of, run

from upshift.errors import RequestError
from upshift.training.data.corpus import rows_of_files
from upshift.training.data.data_options import DataOptions
from upshift.training.tasks.images.folders import has_pairs, paired_folder
from upshift.training.tasks.rows import read_task_rows

pytestmark = [
    pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images"),
    pytest.mark.skipif(find_spec("scipy") is None, reason="scipy is not installed: it matches the parts of a segmenter's loss"),
]
NAMES = ("sky", "road", "car")
SIZES = ((40, 36), (32, 32), (30, 50))


def run_as_a_plain_loop(loader: Any, folder: Path, data: Path, inputs: Any, output: Path) -> tuple[Any, Any]:
    """Compare the losses of a run with those of a plain loop on the same batch. Return the record and the saved model."""
    expected = plain_losses(loader.from_pretrained(folder), inputs, steps=STEPS, rate=RATE)
    record = run(folder, data, output, rows=3, eval_data=str(data))
    assert losses_of(record) == pytest.approx(expected, rel=2e-4)
    return record, loader.from_pretrained(output).eval()


def open_images(folder: Path, number: int) -> list[Any]:
    from PIL import Image

    return [Image.open(folder / f"{index}.png").convert("RGB") for index in range(number)]


def metrics_by_hand(found: list[np.ndarray], real: list[np.ndarray], classes: int) -> dict[str, float]:
    """The metrics, counted pixel by pixel over all images. 255 is no label."""
    right, predicted, labelled = np.zeros(classes), np.zeros(classes), np.zeros(classes)
    for one, other in zip(found, real, strict=True):
        for guess, label in zip(one.ravel().tolist(), other.ravel().tolist(), strict=True):
            if label != 255:
                predicted[guess] += 1
                labelled[label] += 1
                right[label] += guess == label
    with np.errstate(invalid="ignore"):
        return {
            "mean_iou": float(np.nanmean(right / (predicted + labelled - right))),
            "mean_accuracy": float(np.nanmean(right / labelled)),
            "pixel_accuracy": float(right.sum() / labelled.sum()),
        }


@pytest.mark.parametrize("kind", SEMANTIC)
def test_losses_and_metrics_of_semantic_segmentation_are_those_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    from PIL import Image

    folder = save_segmenter(tmp_path / "model", kind, *NAMES)
    label_images = make_pictures(tmp_path / "data", *SIZES)
    label_images[0][:9] = 255
    data = write_masks(tmp_path / "data", label_images)
    images = open_images(tmp_path / "data", len(SIZES))
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    labels = processor(images, segmentation_maps=[*map(np.copy, label_images)], resample=Image.Resampling.NEAREST)["labels"]
    inputs = {**processor(images, return_tensors="pt"), "labels": torch.from_numpy(np.stack(labels))}
    assert set(inputs["labels"].unique().tolist()) <= {0, 1, 2, 255}
    loader = transformers.AutoModelForSemanticSegmentation
    record, saved = run_as_a_plain_loop(loader, folder, data, inputs, tmp_path / "out")
    with torch.no_grad():
        logits = saved(pixel_values=inputs["pixel_values"]).logits
    found = [
        torch.nn.functional.interpolate(row[None], size=label_image.shape, mode="bilinear")[0].argmax(0).numpy()
        for row, label_image in zip(logits, label_images, strict=True)
    ]
    assert record.details["metrics"] == pytest.approx(metrics_by_hand(found, label_images, 3))


def objects_of(label_image: np.ndarray) -> np.ndarray:
    """A label image of objects: red is the class, green the object. Each class has two."""
    objects = label_image * 2 + 1
    objects[: len(objects) // 2] += 1
    return np.stack([label_image, objects, np.zeros_like(objects)], axis=-1)


@pytest.mark.parametrize("kind", OF_PARTS)
def test_losses_and_metrics_of_parts_are_those_of_a_plain_loop(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_segmenter(tmp_path / "model", kind, *NAMES)
    label_images = make_pictures(tmp_path / "data", *SIZES)
    colours = [objects_of(label_image) for label_image in label_images]
    data = write_masks(tmp_path / "data", colours)
    images = open_images(tmp_path / "data", len(SIZES))
    reads_tasks = kind == "oneformer"
    loader = transformers.AutoProcessor if reads_tasks else transformers.AutoImageProcessor
    processor = loader.from_pretrained(folder)
    first = int(kind == "eomt")  # its processor takes 1 off the numbers, because it adds 0 at the edges
    classes = [{int(part): int(part - 1) // 2 + first for part in np.unique(colour[..., 1])} for colour in colours]
    inputs = dict(
        processor(
            images, segmentation_maps=[colour[..., 1] for colour in colours], instance_id_to_semantic_id=classes,
            return_tensors="pt", **({"ignore_index": 255} if first else {}),
            **({"task_inputs": ["panoptic"] * len(images)} if reads_tasks else {}),
        )
    )  # fmt: skip
    assert [len(each) for each in inputs["class_labels"]] == [len(each) for each in classes]
    monkeypatch.setattr(torch, "rand", lambda *sizes, **options: torch.full(sizes, 0.4, device=options.get("device")))  # points
    model_loader = transformers.AutoModelForUniversalSegmentation
    record, saved = run_as_a_plain_loop(model_loader, folder, data, inputs, tmp_path / "out")
    with torch.no_grad():
        outputs = saved(**inputs)
    sizes = [label_image.shape for label_image in label_images]
    found = [each.numpy() for each in processor.post_process_semantic_segmentation(outputs, target_sizes=sizes)]
    assert record.details["metrics"] == pytest.approx(metrics_by_hand(found, label_images, 3))


def panoptic(label_images: list[np.ndarray], *, as_names: bool) -> tuple[list[np.ndarray], list[Any]]:
    """COCO's form of label images: colours that make the number of a part, whose category a column has."""
    images, columns = [], []
    for label_image in label_images:
        number = label_image.astype(np.int64) * 70_000 + 300
        number[label_image == 255] = 0
        images.append(np.stack([number % 256, number // 256 % 256, number // 65536], axis=-1).astype(np.uint8))
        classes = [value for value in np.unique(label_image).tolist() if value != 255]
        entries = [{"id": 70_000 * value + 300, "category_id": NAMES[value] if as_names else value} for value in classes]
        columns.append(entries)
    return images, columns


def in_folders(folder: Path, label_images: list[np.ndarray]) -> Path:
    from PIL import Image

    for name in ("images", "masks"):
        (folder / "tree" / "train" / name).mkdir(parents=True)
    for number, label_image in enumerate(label_images):
        (folder / f"{number}.png").rename(folder / "tree" / "train" / "images" / f"{number}.png")
        Image.fromarray(label_image).save(folder / "tree" / "train" / "masks" / f"{number}.png")
    return folder / "tree"


def as_dataset(folder: Path, label_images: list[np.ndarray]) -> Path:
    datasets = pytest.importorskip("datasets")
    from PIL import Image

    columns = {
        "pixel_values": open_images(folder, len(label_images)),
        "label": [Image.fromarray(label_image) for label_image in label_images],
    }
    features = datasets.Features({name: datasets.Image() for name in columns})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder / "saved")
    return folder / "saved"


FORMS = ("numbers", "reduced", "palette", "gray colours", "panoptic", "panoptic names", "folders", "saved")


def write_form(form: str, folder: Path, label_images: list[np.ndarray]) -> Path:
    """Write the same labels in a form, and return its path."""
    from PIL import Image

    if form == "folders":
        return in_folders(folder, label_images)
    if form == "saved":
        return as_dataset(folder, label_images)
    if form.startswith("panoptic"):
        images, columns = panoptic(label_images, as_names=form == "panoptic names")
        return write_masks(folder, images, segments_info=columns)
    if form == "reduced":
        return write_masks(folder, [np.where(array == 255, 0, array + 1).astype(np.uint8) for array in label_images])
    if form == "gray colours":
        return write_masks(folder, [np.stack([array] * 3, axis=-1) for array in label_images])
    file = write_masks(folder, label_images)
    if form == "palette":
        for number, label_image in enumerate(label_images):
            image = Image.fromarray(label_image, mode="P")
            image.putpalette([90, 10, 200, 4, 5, 6] * 128)
            image.save(folder / f"{number}-mask.png")
    return file


def test_all_forms_of_label_images_are_read_alike(tmp_path: Path) -> None:
    curves = {}
    for form in FORMS:
        folder = tmp_path / form
        model = save_segmenter(folder / "model", "segformer", *NAMES, do_reduce_labels=form == "reduced")
        label_images = make_pictures(folder / "data", *SIZES)
        label_images[1][:9] = 255
        record = run(model, write_form(form, folder / "data", label_images), folder / "out", rows=3)
        curves[form] = losses_of(record)
    first, *others = curves.values()
    assert all(other == pytest.approx(first, rel=1e-5) for other in others), curves


def test_a_table_beside_folders_of_images_is_read(tmp_path: Path) -> None:
    """The table has the categories of the parts, which the names of the files do not tell."""
    label_images = make_pictures(tmp_path, *SIZES)
    label_images, entries = panoptic(label_images, as_names=False)
    folder = in_folders(tmp_path, label_images)
    assert has_pairs(folder)
    rows = [
        {"file_name": f"images/{number}.png", "mask": f"masks/{number}.png", "segments_info": each}
        for number, each in enumerate(entries)
    ]
    (folder / "train" / "metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert not has_pairs(folder)
    read = read_task_rows(str(folder), DataOptions(eval_size=0), read_folder=paired_folder).training
    assert [row.fields["segments_info"] for row in read] == entries


@pytest.mark.parametrize(
    "table",
    ["id,name\n0,sky\n1,road\n", "image,preview\nimages/0.png,images/1.png\n", "file_name,label\nimages/0.png,street\n"],
)
@pytest.mark.parametrize("place", ["notes.csv", "train/metadata.csv"])
def test_a_table_without_label_images_beside_folders_is_not_read(
    place: str, table: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = in_folders(tmp_path, make_pictures(tmp_path, *SIZES))
    read = read_task_rows(str(folder), DataOptions(eval_size=0), read_folder=paired_folder).training
    (folder / place).write_text(table)
    assert has_pairs(folder)
    assert read_task_rows(str(folder), DataOptions(eval_size=0), read_folder=paired_folder).training == read
    assert f"{place} names no label images, and is not read" in caplog.text


def test_a_table_with_another_label_beside_label_images_is_read(tmp_path: Path) -> None:
    folder = in_folders(tmp_path, make_pictures(tmp_path, *SIZES))
    lines = [f"images/{number}.png,masks/{number}.png,street\n" for number in range(2)]
    (folder / "train" / "metadata.csv").write_text("image,mask,label\n" + "".join(lines))
    assert not has_pairs(folder)
    assert len(read_task_rows(str(folder), DataOptions(eval_size=0), read_folder=paired_folder).training) == 2


def test_files_without_rows_beside_folders_are_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of each image, as LabelMe writes it, is not opened: there may be thousands."""
    folder = in_folders(tmp_path, make_pictures(tmp_path, *SIZES))
    (folder / "classes.json").write_text(json.dumps(["sky", "road"]))
    for number in range(len(SIZES)):
        (folder / "train" / "images" / f"{number}.json").write_text(json.dumps({"shapes": [], "imagePath": f"{number}.png"}))
    opened: list[str] = []

    def read(files: tuple[Path, ...], *others: Any) -> Any:
        opened.extend(file.name for file in files)
        return rows_of_files(files, *others)

    monkeypatch.setattr("upshift.training.tasks.images.folders.rows_of_files", read)
    assert has_pairs(folder) and opened == ["classes.json"]
    assert len(read_task_rows(str(folder), DataOptions(eval_size=0), read_folder=paired_folder).training) == len(SIZES)


def test_a_broken_table_beside_folders_is_not_passed_over(tmp_path: Path) -> None:
    folder = in_folders(tmp_path, make_pictures(tmp_path, *SIZES))
    (folder / "train" / "metadata.jsonl").write_text('{"image": "images/0.png", "mask": ')
    assert not has_pairs(folder)


def test_a_table_of_parts_beside_folders_is_not_passed_over(tmp_path: Path) -> None:
    """The numbers in its label images are not those of classes."""
    folder = in_folders(tmp_path, make_pictures(tmp_path, *SIZES))
    (folder / "coco.json").write_text(json.dumps({"images": [{"id": 1}], "annotations": [{"image_id": 1, "segments_info": []}]}))
    assert not has_pairs(folder)


def test_a_folder_for_each_label_is_not_searched_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have millions of them, on a network."""
    for name in ("train/masks/cat", "train/dog"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "1.png").touch()

    def refuse(path: Path) -> bool:
        raise AssertionError(f"{path} was looked at")

    monkeypatch.setattr(Path, "is_file", refuse)
    assert not has_pairs(tmp_path)


def test_a_new_head_has_the_names_beside_the_data_and_encode_finds_them(
    tmp_path: Path, upshift: Command, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_segmenter(tmp_path / "model", "segformer", "a", "b")
    label_images = make_pictures(tmp_path / "data", *SIZES)
    data = write_masks(tmp_path / "data", label_images)
    (tmp_path / "data" / "id2label.json").write_text(json.dumps(dict(enumerate(NAMES))))
    run(folder, data, tmp_path / "out", rows=3)
    assert "segmentation (3 labels: sky, road, car)" in caplog.text
    lines = tmp_path / "images.jsonl"
    lines.write_text("\n".join(json.dumps({"image": str(tmp_path / "data" / f"{number}.png")}) for number in range(3)))
    result = upshift("encode", tmp_path / "out", "--input", lines, "--output", tmp_path / "found.jsonl")
    assert result.code == 0, result.err
    for line in (tmp_path / "found.jsonl").read_text().splitlines():
        found = json.loads(line)["result"]
        assert found and {part["label"] for part in found} <= set(NAMES)
    shown = upshift("data", "show", tmp_path / "out", "--data", data)
    assert shown.code == 0 and "0.png [[sky 34%; road 50%; car 16%]]" in shown.out


def test_a_classifier_of_images_gets_a_head_for_label_images(tmp_path: Path) -> None:
    folder = save_segmenter(tmp_path / "segmenter", "segformer", *NAMES)
    config = transformers.AutoConfig.from_pretrained(folder)
    transformers.SegformerForImageClassification(config).save_pretrained(tmp_path / "model")
    transformers.AutoImageProcessor.from_pretrained(folder).save_pretrained(tmp_path / "model")
    data = write_masks(tmp_path / "data", make_pictures(tmp_path / "data", *SIZES))
    run(tmp_path / "model", data, tmp_path / "out", rows=3)
    saved = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert saved.architectures == ["SegformerForSemanticSegmentation"] and saved.num_labels == 3


def small(value: int) -> np.ndarray:
    return np.full((36, 40), value, dtype=np.uint8)


@pytest.mark.parametrize(
    ("array", "columns", "words"),
    [
        (small(1)[:20], {}, "rows.jsonl:2 has an image of 40 x 36 pixels and in 'mask' a label image of 40 x 20"),
        (np.random.default_rng(0).integers(0, 9, (36, 40, 3), dtype=np.uint8), {}, "rows.jsonl:2 has a label image of colours"),
        (small(1).astype(np.float32), {}, "rows.jsonl:2 has a label image of fractions"),
        (small(7), {"segments_info": [{"id": 5, "category_id": 1}]}, "the part 7, which segments_info does not have"),
        (small(7), {"segments_info": [{"id": 7}]}, "a part without a category"),
        (small(7), {"segments_info": "car"}, "rows.jsonl:2 has segments_info 'car'"),
        (small(1), {"mask": 3}, "rows.jsonl:2 has no column with one label image"),
        (small(1), {"mask": "no.png"}, "rows.jsonl:2 has the image .* cannot be read"),
    ],
)
def test_bad_rows_are_named(array: np.ndarray, columns: dict[str, Any], words: str, tmp_path: Path) -> None:
    from PIL import Image

    folder = save_segmenter(tmp_path / "model", "segformer", *NAMES)
    label_images = make_pictures(tmp_path / "data", (40, 36), (40, 36))
    data = write_masks(tmp_path / "data", label_images)
    first, second = map(json.loads, data.read_text().splitlines())
    Image.fromarray(array).save(tmp_path / "data" / "bad.tiff")
    data.write_text("\n".join(map(json.dumps, (first, {**second, "mask": "bad.tiff", **columns}))))
    with pytest.raises(RequestError, match=words):
        run(folder, data, tmp_path / "out", rows=2)


def test_label_images_that_teach_nothing_are_refused(tmp_path: Path) -> None:
    folder = save_segmenter(tmp_path / "model", "segformer", *NAMES)
    label_images = make_pictures(tmp_path / "data", (40, 36), classes=2)
    with pytest.raises(RequestError, match="have the label 0 or none: 255 is no label"):
        run(folder, write_masks(tmp_path / "data", [label_images[0] * 255]), tmp_path / "out", rows=1)
    with pytest.raises(RequestError, match="no label image with a label"):
        run(folder, write_masks(tmp_path / "data", [label_images[0] * 0 + 255]), tmp_path / "out", rows=1)
    tree = in_folders(tmp_path / "data", label_images)
    (tree / "train" / "masks" / "0.png").unlink()
    (tree / "train" / "masks" / "1.png").write_bytes(b"")
    with pytest.raises(RequestError, match=r"no label image for train/images/0.png"):
        run(folder, tree, tmp_path / "out", rows=1)
