"""The metrics of evaluations: those of scikit-learn and of cases by hand, of the best checkpoint, and at the command's door."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command
from speech_models import make_sounds, save_wav2vec2
from task_runs import write_rows
from test_detection_train import BOXES, make_rows, objects, save_detector
from test_media_labels import samples_of, save_whisper
from text_models import named, save_text_model
from transformers import AutoTokenizer

import upshift
from upshift.errors import RequestError
from upshift.training.tasks.metrics.answers import compare_answers
from upshift.training.tasks.metrics.boxes import ImageBoxes, mean_average_precision
from upshift.training.tasks.metrics.entities import read_entities, tag_metrics
from upshift.training.tasks.metrics.pixels import LABEL_IMAGES, pixel_metrics
from upshift.training.tasks.metrics.trainer import LabelTrainer
from upshift.training.tasks.metrics.words import word_error_rate
from upshift.training.tasks.texts import TextExample

TEXTS = ("anna lives in rome", "bob is good .", "who is bad", "paris and rome", "where", "anna and bob", "good . bad .")
LABELS = ("no", "yes", "yes", "maybe", "no", "no", "yes")
NAMES = ("maybe", "no", "yes")
RATE = 1e-2


def evaluated(model: Path, rows: Path, held_out: Path, output: Path, *, steps: int = 2, **arguments: Any) -> Any:
    """The record of a run that evaluates rows of its own."""
    given = {"max_steps": steps, "learning_rate": RATE, **arguments}
    options = {"global_batch": 4, "eval_data": str(held_out), "trial_seconds": 0}
    record = upshift.train(str(model), str(rows), output=output, arguments=given, **options)
    assert record is not None
    return record


def logits_of(folder: Path, texts: Any, auto_class: Any) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = auto_class.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]


def test_classes_are_scored_as_scikit_learn_does(tmp_path: Path) -> None:
    scores = pytest.importorskip("sklearn.metrics")
    folder = save_text_model(tmp_path / "model", "DistilBertForSequenceClassification", **named(*NAMES))
    rows = write_rows(
        tmp_path / "rows.jsonl", *({"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True))
    )
    record = evaluated(folder, rows, rows, tmp_path / "out")
    logits = logits_of(tmp_path / "out", TEXTS, transformers.AutoModelForSequenceClassification)
    predicted = [NAMES[int(row.argmax())] for row in logits]
    expected = {
        "accuracy": scores.accuracy_score(LABELS, predicted),
        "f1_macro": scores.f1_score(LABELS, predicted, average="macro"),
    }
    assert record.details["metrics"] == pytest.approx(expected) and 0 < expected["accuracy"] < 1


def test_several_labels_and_numbers_are_scored_as_scikit_learn_does(tmp_path: Path) -> None:
    scores = pytest.importorskip("sklearn.metrics")
    multi = save_text_model(
        tmp_path / "multi", "DistilBertForSequenceClassification", **named(*NAMES), problem_type="multi_label_classification"
    )
    targets = [[number % 2, number % 3 == 0, number > 4] for number in range(len(TEXTS))]
    rows = write_rows(
        tmp_path / "rows.jsonl",
        *({"text": text, "label": list(map(int, target))} for text, target in zip(TEXTS, targets, strict=True)),
    )
    record = evaluated(multi, rows, rows, tmp_path / "out")
    logits = logits_of(tmp_path / "out", TEXTS, transformers.AutoModelForSequenceClassification)
    predicted = [(row > 0).tolist() for row in logits]
    expected = {
        "accuracy": scores.accuracy_score(np.array(targets), np.array(predicted)),
        "f1_micro": scores.f1_score(np.array(targets), np.array(predicted), average="micro"),
    }
    assert record.details["metrics"] == pytest.approx(expected) and 0 < expected["f1_micro"] < 1

    regression = save_text_model(tmp_path / "regression", "DistilBertForSequenceClassification", **named("LABEL_0"))
    numbers = [0.5, 2.0, -1.0, 0.0, 1.5, 3.0, 0.25]
    rows = write_rows(
        tmp_path / "numbers.jsonl", *({"text": text, "label": number} for text, number in zip(TEXTS, numbers, strict=True))
    )
    record = evaluated(regression, rows, rows, tmp_path / "regressed")
    found = [float(row) for row in logits_of(tmp_path / "regressed", TEXTS, transformers.AutoModelForSequenceClassification)]
    assert record.details["metrics"] == pytest.approx(
        {"mae": scores.mean_absolute_error(numbers, found), "pearson": np.corrcoef(numbers, found)[0, 1]}, abs=1e-3
    )


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("B-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),
        ("B-PER B-PER I-LOC I-LOC", [("PER", 0, 0), ("PER", 1, 1), ("LOC", 2, 3)]),
        ("I-PER I-PER O I-PER", [("PER", 0, 1), ("PER", 3, 3)]),  # IOB1
        ("B-PER I-PER E-PER S-PER S-LOC", [("PER", 0, 2), ("PER", 3, 3), ("LOC", 4, 4)]),  # IOBES
        ("B-PER L-PER U-PER U-PER O", [("PER", 0, 1), ("PER", 2, 2), ("PER", 3, 3)]),  # BILOU
        ("O O", []),
    ],
)
def test_entities_are_read_from_tags(tags: str, entities: list[Any]) -> None:
    assert list(read_entities(tags.split())) == entities


def test_entities_are_scored_by_hand() -> None:
    names = ("O", "B-PER", "I-PER", "B-LOC")
    examples = [
        TextExample(np.zeros(6), None, np.array([-100, 1, 2, -100, 0, 3])),  # PER 0-1, LOC 3
        TextExample(np.zeros(3), None, np.array([-100, 1, 0])),  # PER 0
    ]
    predicted = np.array([[-100, 1, 0, -100, 0, 3], [-100, 1, 1, -100, -100, -100]])  # PER 0, LOC 3; PER 0, PER 1
    scores = tag_metrics(names).compute(predicted, examples)
    assert scores == pytest.approx({"precision": 2 / 4, "recall": 2 / 3, "f1": 4 / 7, "accuracy": 4 / 6})
    assert set(tag_metrics(("NOUN", "VERB")).larger_is_better) == {"accuracy"}  # they name no entities


def test_answers_are_compared_as_squad_compares_them() -> None:
    assert compare_answers("The  Eiffel-Tower!", ["eiffeltower"]) == (1.0, 1.0)
    assert compare_answers("in old Rome", ["Paris", "Rome itself"]) == (0.0, pytest.approx(0.4))
    assert compare_answers("", []) == (1.0, 1.0)
    assert compare_answers("rome", []) == (0.0, 0.0)


CONTEXTS = (
    ("where is anna", "bob lives in paris and anna lives in rome . annas", ["rome", "in rome"]),
    ("who is good", "bob lives in paris .", []),
    ("who lives in paris", "bob lives in paris .", ["bob"]),
)


def test_answers_are_those_of_the_likeliest_span(tmp_path: Path) -> None:
    """The reference tries all spans of each row of a context."""
    folder = save_text_model(tmp_path / "model", "BertForQuestionAnswering")
    rows = write_rows(
        tmp_path / "rows.jsonl",
        *(
            {"question": question, "context": context,
             "answers": {"text": answers, "answer_start": [context.index(answer) for answer in answers]}}
            for question, context, answers in CONTEXTS
        ),
    )  # fmt: skip
    given = {"max_steps": 12, "learning_rate": RATE}
    record = upshift.train(
        str(folder), str(rows), output=tmp_path / "out", arguments=given, global_batch=4, eval_data=str(rows), sequence_length=14
    )
    assert record is not None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out").eval()
    scores = []
    for question, context, answers in CONTEXTS:
        inputs = tokenizer(
            question, context, truncation="only_second", max_length=14, stride=4, return_overflowing_tokens=True,
            return_offsets_mapping=True, padding="max_length", return_tensors="pt",
        )  # fmt: skip
        offsets = inputs.pop("offset_mapping").tolist()
        inputs.pop("overflow_to_sample_mapping")
        with torch.no_grad():
            outputs = model(**inputs)
        spans = [(float(outputs.start_logits[row, 0] + outputs.end_logits[row, 0]), row, 0, 0) for row in range(len(offsets))]
        empty = min(spans)
        spans = [
            (float(outputs.start_logits[row, start] + outputs.end_logits[row, end]), row, start, end)
            for row in range(len(offsets))
            for start in range(14)
            for end in range(start, 14)
            if inputs.sequence_ids(row)[start] == 1 and inputs.sequence_ids(row)[end] == 1
        ]
        score, row, start, end = max(spans)
        text = "" if empty[0] > score else context[offsets[row][start][0] : offsets[row][end][1]]
        scores.append(compare_answers(text, answers))
    exact, f1 = np.mean(scores, axis=0)
    assert record.details["metrics"] == pytest.approx({"exact_match": exact, "f1": f1}) and exact > 0


def boxes(*entries: tuple[list[float], int, Any], are_real: bool = False) -> ImageBoxes:
    corners, categories, scores = ([entry[part] for entry in entries] for part in range(3))
    kind = bool if are_real else float
    return ImageBoxes(np.array(corners, float).reshape(-1, 4), np.array(categories, int), np.array(scores, kind))


def test_precision_of_boxes_by_hand() -> None:
    real = [
        boxes(([0, 0, 10, 10], 0, False), ([20, 0, 30, 10], 0, False), are_real=True),
        boxes(([0, 0, 10, 10], 0, True), are_real=True),
    ]
    whole = [boxes(([0, 0, 10, 10], 0, 0.9), ([20, 0, 30, 10], 0, 0.8)), boxes(([0, 0, 5, 5], 0, 0.95))]
    perfect = {"map": 1.0, "map_50": 1.0, "map_75": 1.0}  # what is found in a crowd does not count
    assert mean_average_precision(whole, real) == pytest.approx(perfect)
    # A wrong box has the highest score, then one of two is found: precision 1/2 up to a recall of 1/2, of 51 of 101 recalls.
    # Its overlap is 8/10, enough for 7 of 10 overlaps.
    part = [boxes(([50, 50, 60, 60], 0, 0.9), ([0, 0, 10, 8], 0, 0.8)), boxes()]
    half = 0.5 * 51 / 101
    assert mean_average_precision(part, real) == pytest.approx({"map": 0.7 * half, "map_50": half, "map_75": half})
    # A second box of an object that is found is wrong; a category that is never found halves the mean.
    twice = [boxes(([0, 0, 10, 10], 0, 0.9), ([0, 0, 10, 9.9], 0, 0.8), ([20, 0, 30, 10], 0, 0.7)), boxes()]
    never = ([5, 5, 9, 9], 1, False)
    others = [boxes(([0, 0, 10, 10], 0, False), ([20, 0, 30, 10], 0, False), never, are_real=True), real[1]]
    precision = (51 * 1 + 50 * 2 / 3) / 101 / 2
    assert mean_average_precision(twice, others) == pytest.approx(dict.fromkeys(perfect, precision))


def test_word_errors_by_hand() -> None:
    assert word_error_rate(["one two four", "", "a b"], ["one two three", "five", "b"]) == pytest.approx(3 / 5)
    assert word_error_rate(["a b c"], ["x"]) == 3.0


def test_the_best_checkpoint_is_that_of_the_metric(tmp_path: Path, upshift: Command) -> None:
    folder = save_text_model(tmp_path / "model", "DistilBertForSequenceClassification", **named(*NAMES))
    rows = write_rows(
        tmp_path / "rows.jsonl", *({"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True))
    )
    options = ("--eval-data", rows, "--eval-steps", 1, "--learning-rate", 0.1, "--global-batch", 7, "--trial-seconds", 0)
    best = ("--load-best", "--metric-for-best-model", "eval_accuracy")
    answer = upshift("train", folder, "--data", rows, "--max-steps", 6, *options, *best, "--output", tmp_path / "out", "--json")
    assert answer.code == 0, answer.err
    details = json.loads(answer.out)["details"]
    accuracies = [metrics["accuracy"] for _, metrics in details["evaluation_metrics"]]
    assert len(accuracies) == 6 and len(set(accuracies)) > 1
    assert details["model_step"] == 1 + accuracies.index(max(accuracies))
    assert details["metrics"]["accuracy"] == max(accuracies)
    shown = upshift("train", folder, "--data", rows, "--max-steps", 1, *options, "--output", tmp_path / "shown")
    assert "· accuracy 0." in shown.err and ", accuracy 0." in shown.out, shown.err
    for given, words in (
        (("--load-best", "--metric-for-best-model", "wer"), "wer is not measured for text-classification; use loss or accuracy"),
        (("--metric-for-best-model", "accuracy"), "chooses no checkpoint without --load-best or --early-stopping-patience"),
    ):
        refused = upshift("train", folder, "--data", rows, *options, *given, "--output", tmp_path / "refused")
        assert refused.code == 2 and words in refused.err and refused.err.strip().count("\n") == 0


def test_text_has_the_loss_alone(tmp_path: Path) -> None:
    folder = save_text_model(tmp_path / "model", "BertForMaskedLM")
    (tmp_path / "a.txt").write_text("anna lives in rome . " * 40)
    with pytest.raises(RequestError, match="accuracy is not measured for text; use loss"):
        evaluated(
            folder, tmp_path / "a.txt", tmp_path / "a.txt", tmp_path / "out", eval_steps=1, load_best=True,
            metric_for_best_model="accuracy",
        )  # fmt: skip


@pytest.mark.skipif(find_spec("scipy") is None, reason="scipy is not installed: it matches the boxes of a detector's loss")
@pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images")
def test_a_detector_is_scored_by_its_processor(tmp_path: Path) -> None:
    folder = save_detector(tmp_path / "model", "yolos", "cat", "dog")
    rows = make_rows(tmp_path, *(objects(*entry) for entry in BOXES))
    record = evaluated(folder, rows, rows, tmp_path / "out", steps=1)
    assert set(record.details["metrics"]) == {"map", "map_50", "map_75"}
    from PIL import Image

    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    model = transformers.AutoModelForObjectDetection.from_pretrained(tmp_path / "out").eval()
    found, real = [], []
    for number, (corners, categories) in enumerate(BOXES):
        with torch.no_grad():
            outputs = model(**processor(images=Image.open(tmp_path / f"{number}.png"), return_tensors="pt"))
        (image,) = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[(36, 40)])
        found.append(ImageBoxes(*(image[name].numpy() for name in ("boxes", "labels", "scores"))))
        real.append(boxes(*(
            ([x, y, x + width, y + height], ("cat", "dog").index(name), False)
            for (x, y, width, height), name in zip(corners, categories, strict=True)
        ), are_real=True))  # fmt: skip
    assert record.details["metrics"] == pytest.approx(mean_average_precision(found, real), rel=1e-3)


@pytest.mark.parametrize("make", [save_whisper, save_wav2vec2])
def test_what_a_model_writes_down_is_scored(make: Any, tmp_path: Path) -> None:
    model, tokenizer, extractor = make(tmp_path / "model")
    for part in (model, tokenizer, extractor):
        part.save_pretrained(tmp_path / "model")
    files = make_sounds(tmp_path / "sounds")
    texts = ("one", "two three")
    rows = write_rows(
        tmp_path / "rows.jsonl", *({"audio": str(file), "text": text} for file, text in zip(files, texts, strict=True))
    )
    record = evaluated(tmp_path / "model", rows, rows, tmp_path / "out", steps=1)
    trained = type(model).from_pretrained(tmp_path / "out").eval()
    options = {} if make is save_whisper else {"padding": True}
    inputs = extractor([samples_of(file) for file in files], sampling_rate=16_000, return_tensors="pt", **options)
    with torch.no_grad():
        if make is save_whisper:
            longest = max(len(tokenizer(text).input_ids) for text in texts)
            tokens = trained.generate(**inputs, max_length=2 * longest + 8)
        else:
            tokens = trained(**inputs).logits.argmax(-1)
    written = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
    assert record.details["metrics"] == pytest.approx({"wer": word_error_rate(written, texts)})


@pytest.mark.parametrize("name", ["MaskFormer", "Mask2Former", "OneFormer"])
def test_images_of_a_batch_are_scored_as_single_ones(name: str, tmp_path: Path) -> None:
    """A batch fills its images up to one size. The masks are as local as averages of pixels."""
    options: dict[str, Any] = {"size": {"shortest_edge": 32, "longest_edge": 64}, "do_normalize": False}
    if name == "OneFormer":
        (tmp_path / "names.json").write_text(json.dumps({number: {"isthing": 1, "name": str(number)} for number in range(3)}))
        options |= {"repo_path": None, "class_info_file": str(tmp_path / "names.json"), "num_text": 4}
    processor = getattr(transformers, f"{name}ImageProcessorPil")(**options)
    draws = np.random.default_rng(0)
    blocks = [draws.integers(0, 256, (height // 8, width // 8, 3)) for width, height in ((64, 32), (32, 64), (40, 32))]
    images = [np.kron(block, np.ones((8, 8, 1))).astype(np.uint8) for block in blocks]
    real = [torch.from_numpy(image.argmax(-1) + 1) for image in images]
    metrics = pixel_metrics(processor, 3)

    def counts(*numbers: int) -> torch.Tensor:
        more = {"task_inputs": ["semantic"] * len(numbers)} if name == "OneFormer" else {}
        inputs = dict(processor([images[number] for number in numbers], return_tensors="pt", **more))
        outputs = SimpleNamespace(
            class_queries_logits=20 * torch.eye(3, 4).expand(len(numbers), 3, 4),
            masks_queries_logits=torch.nn.functional.avg_pool2d(20 * inputs["pixel_values"] - 10, 4),
        )
        counted = metrics.predict(torch.nn.Module(), {**inputs, LABEL_IMAGES: [real[number] for number in numbers]}, outputs)
        assert isinstance(counted, torch.Tensor)
        return counted

    batch, single = counts(0, 1, 2), torch.cat([counts(number) for number in range(3)])
    assert torch.equal(batch, single)
    assert batch[..., 0].sum() > 0.8 * batch[..., 2].sum()


def test_a_batch_whose_labels_vanish_moves_nothing(tmp_path: Path) -> None:
    """A label image may lose its labels when it is resized. The model's own mean of none is NaN."""
    save_text_model(tmp_path, "BertForTokenClassification", **named("a", "b"))
    model = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    arguments = transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = LabelTrainer(model=model, args=arguments, metrics=None, early_stopping=None)
    inputs = {"input_ids": torch.ones(2, 4, dtype=torch.long), "labels": torch.full((2, 4), -100)}
    assert model(**inputs).loss.isnan()
    for loss in (
        trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(3)),
        trainer.compute_loss(model, inputs, return_outputs=True)[0],
    ):
        loss.backward()
        assert loss == 0 and all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
