"""Two ranks of torchrun train for a task: the losses and the metrics are those of one process with all rows of a step."""

from __future__ import annotations

import json
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from chat_models import write_jsonl
from detectors import save_detector
from image_models import COLORS, save_chat_model
from segmenters import SEMANTIC, make_pictures, save_segmenter, write_masks
from speech_models import save_speech_model, spoken_rows
from text_models import named, save_text_model
from warm_processes import WarmProcesses

import upshift

pytestmark = pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images")
STEPS = 3
RATE = 1e-3
ROWS = 4
UNEVEN = (5, 7)  # held-out rows, of which two ranks take two each at once
HELPER = Path(__file__).parents[1] / "helpers" / "task_ranks.py"
TIMEOUT_SECONDS = 240


SIZES = [(40, 36), (32, 32), (30, 50), (24, 24), (48, 20)]


def pixels_case(folder: Path) -> list[str]:
    """A model, data, and data to evaluate on. The label images of the ranks have other numbers of pixels with a label."""
    segmenter = save_segmenter(folder / "tipsv2", "tipsv2", "sky", "road", "car")
    label_images = make_pictures(folder / "pictures", *SIZES)
    label_images[0][:20] = label_images[2][:, :8] = 255
    held_out = write_masks(folder / "pictures", label_images).rename(folder / "pictures" / "held_out.jsonl")
    return [str(segmenter), str(write_masks(folder / "pictures", label_images[:4])), str(held_out)]


def parts_case(folder: Path) -> list[str]:
    """A model that finds parts, and label images with as many parts in each: the loss of classes is a mean of a rank's own."""
    finder = save_segmenter(folder / "maskformer", "maskformer", "sky", "road", "car")
    label_images = make_pictures(folder / "parts", *SIZES[:4])
    for label_image in label_images:
        label_image[:8] = 2
        label_image[-8:] = 1
        label_image[12:16] = 0
    return [str(finder), str(write_masks(folder / "parts", label_images))]


def detection_cases(folder: Path) -> list[list[str]]:
    """Write a detector, and images with two boxes each. In the last batch, one rank has one row of its own, or none."""
    make_pictures(folder / "boxes", *[(40, 36)] * max(UNEVEN))
    boxes = {"bbox": [[1, 2, 10, 12], [20, 4, 9, 30]], "category": ["cat", "dog"]}
    files = {number: folder / "boxes" / f"{number}.jsonl" for number in (ROWS, *UNEVEN)}
    for number, file in files.items():
        write_jsonl(file, [{"image": f"{index}.png", "objects": boxes} for index in range(number)])
    detector = save_detector(folder / "yolos", "yolos", "cat", "dog")
    return [[str(detector), str(files[ROWS]), str(files[number])] for number in UNEVEN]


def row_cases(folder: Path) -> list[list[str]]:
    """Write models whose loss is a mean over rows: one that answers questions, and one that recognizes speech."""
    context = "bob lives in rome and paris"
    rows = [
        {"question": "where is bob", "context": context, "answers": {"text": [text], "answer_start": [context.index(text)]}}
        for text in ("rome", "paris", "bob", "lives", "rome", "and", "in")
    ]
    cases = []
    asker = save_text_model(folder / "asker", "BertForQuestionAnswering")
    cases += [[str(asker), str(write_jsonl(folder / "asked.jsonl", rows[:ROWS]))] for _ in UNEVEN]
    for case, number in zip(cases, UNEVEN, strict=True):
        case.append(str(write_jsonl(folder / f"asked-{number}.jsonl", rows[:number])))
    spoken = [spoken_rows(folder / f"spoken-{number}", number) for number in (ROWS, min(UNEVEN))]
    cases.append([str(save_speech_model(folder / "speech", ctc_loss_reduction="mean")), *map(str, spoken)])
    return cases


def test_two_ranks_have_the_losses_of_one_process(tmp_path: Path, warm_processes: WarmProcesses) -> None:
    from PIL import Image

    tagger = save_text_model(tmp_path / "tagger", "BertForTokenClassification", **named("A", "B"))
    chatter = save_chat_model(tmp_path / "llava", "llava")
    for name, color in COLORS.items():
        Image.new("RGB", (40, 36), color).save(tmp_path / f"{name}.png")
    words = [{"tokens": ["rome"] * number, "tags": ["A", "B", "B", "A", "A"][:number]} for number in (1, 5, 2, 3)]
    turns = [("color", "red"), ("say it", "red and blue"), ("this", "blue"), ("now", "blue")]  # of different lengths
    chats = [
        {
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            "images": [f"{color}.png"],
        }
        for (question, answer), color in zip(turns, [*COLORS, *COLORS], strict=True)
    ]
    cases = []
    for model, rows in ((tagger, words), (chatter, chats)):
        file = tmp_path / f"{model.name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        cases.append([str(model), str(file)])
    held_out = tmp_path / "held_out.jsonl"  # a rank has a row less than the other
    held_out.write_text(
        "\n".join(json.dumps({"tokens": ["who", "is"], "tags": [*tags]}) for tags in ("AB", "BB", "AA", "BA", "AB"))
    )
    cases[0].append(str(held_out))
    cases += detection_cases(tmp_path)
    cases += row_cases(tmp_path)
    cases.append(parts_case(tmp_path))
    if "tipsv2" in SEMANTIC:
        cases.append(pixels_case(tmp_path))
    else:
        warnings.warn("left out: labels of pixels, because this transformers has no Tipsv2", stacklevel=1)
    ended = warm_processes.run(HELPER, tmp_path, json.dumps([cases, STEPS, RATE, ROWS]), timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    of_ranks = json.loads((tmp_path / "numbers.json").read_text())
    assert len(of_ranks) == len(cases)
    for (losses, metrics), (model, data, *eval_data) in zip(of_ranks, cases, strict=True):
        arguments = {"max_steps": STEPS, "learning_rate": RATE, "lr_scheduler_type": "constant"}
        options = {"output": tmp_path / "alone", "overwrite": True, "global_batch": ROWS}
        options |= {"eval_data": eval_data[0]} if eval_data else {"eval_size": 0}
        record = upshift.train(model, data, arguments=arguments, **options)
        assert record is not None
        expected = [loss for _, loss in record.details["loss_curve"]]
        assert losses == pytest.approx(expected, rel=2e-4)
        if eval_data:
            assert record.measured is not None and record.details["metrics"]
            alone = record.details["metrics"] | {"held-out loss": record.measured.evaluation_loss}
            assert metrics == pytest.approx(alone, rel=2e-4)
    for number in range(len(cases)):
        assert (tmp_path / f"out-{number}" / "model.safetensors").is_file()
