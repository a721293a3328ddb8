"""Training on images with labels and on sounds with texts: the losses of a plain loop, new labels, and bad rows by name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import Command
from plain_loop import plain_losses
from speech_models import make_sounds, save_wav2vec2
from task_runs import RATE, STEPS, train, write_rows

from upshift.errors import RequestError
from upshift.training.data.tokenizer import train_byte_level_bpe

SIZE = {"height": 32, "width": 32}
VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {**VISION, "intermediate_size": 48},
    "Dinov2ForImageClassification": VISION,
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
}
COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
needs_pillow = pytest.mark.skipif(find_spec("PIL") is None, reason="pillow is not installed: it reads the images")


def save_classifier(folder: Path, name: str, **changes: Any) -> Path:
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(COLORS)), "label2id": {color: number for number, color in enumerate(COLORS)}}
    model_class(model_class.config_class(**{**CLASSIFIERS[name], **labels, **changes})).save_pretrained(folder)
    transformers.ViTImageProcessor(size=SIZE).save_pretrained(folder)
    return folder


def make_images(folder: Path, split: str = "") -> list[Path]:
    """An image of each color, in a folder of its name."""
    from PIL import Image

    files = [folder / split / color / "1.png" for color in COLORS]
    for file, color in zip(files, COLORS.values(), strict=True):
        file.parent.mkdir(parents=True)
        Image.new("RGB", (40, 36), color).save(file)
    return files


@needs_pillow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_losses_of_a_classifier_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    from PIL import Image

    folder = save_classifier(tmp_path / "model", name)
    files = make_images(tmp_path / "images")
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    inputs = dict(processor(images=[Image.open(file) for file in files], return_tensors="pt"))
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    expected = plain_losses(model, {**inputs, "labels": torch.arange(3)}, steps=STEPS, rate=RATE)
    assert train(folder, tmp_path / "images", tmp_path / "out", rows=3) == pytest.approx(expected, rel=1e-4)
    saved = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == dict(enumerate(COLORS))


@needs_pillow
def test_new_labels_get_a_new_head(tmp_path: Path, upshift: Command) -> None:
    folder = save_classifier(tmp_path / "model", "ViTForImageClassification")
    backbone = tmp_path / "backbone"
    transformers.ViTModel.from_pretrained(folder).save_pretrained(backbone)
    transformers.ViTImageProcessor(size=SIZE).save_pretrained(backbone)
    files = make_images(tmp_path / "images", "train")
    table = tmp_path / "rows.csv"
    table.write_text("file_name,label\n" + "".join(f"{file},{file.parent.name[:1]}\n" for file in files))
    for model in (folder, backbone):
        output = tmp_path / f"out of {model.name}"
        options = ("--output", output, "--max-steps", 1, "--global-batch", 3, "--eval-data", table)
        answer = upshift("train", model, "--data", table, *options)
        assert answer.code == 0, answer.err
        assert "Held-out loss" in answer.out
        saved = transformers.AutoModelForImageClassification.from_pretrained(output)
        assert saved.config.id2label == {0: "b", 1: "g", 2: "r"}
    shown = upshift("data", "show", folder, "--data", tmp_path / "images")
    assert "red/1.png[[ red]]" in shown.out.replace("\n", "")


@needs_pillow
def test_a_table_beside_the_images_has_their_labels(tmp_path: Path, upshift: Command) -> None:
    """As the image folders of ``datasets``: one table for each split."""
    folder = save_classifier(tmp_path / "model", "ViTForImageClassification")
    for split in ("train", "validation"):
        files = make_images(tmp_path / "images", split)
        rows = ({"file_name": f"{file.parent.name}/1.png", "label": "red"} for file in files)
        write_rows(tmp_path / "images" / split / "metadata.jsonl", *rows, {"file_name": "blue/1.png", "label": "blue"})
    shown = upshift("data", "show", folder, "--data", tmp_path / "images")
    assert "4 rows to train on, 4 to evaluate on" in shown.out and "train/green/1.png[[ red]]" in shown.out.replace("\n", "")
    assert "not trained on" not in shown.err
    encoded = upshift("encode", folder, "--input", tmp_path / "images", "--output", tmp_path / "rows.npy")
    assert encoded.code == 0 and np.load(tmp_path / "rows.npy").shape[0] == 6, encoded.err


@needs_pillow
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"image": "none.png", "label": "red"}], "rows.jsonl:1 has the image .*none.png"),
        ([{"image": "red/1.png"}], "rows.jsonl:1 has no column 'label'"),
        ([{"picture": "red/1.png", "label": "red"}], "rows.jsonl:1 has no column 'image'"),
        ([{"image": "red/1.png", "label": "red"}, {"image": "red/1.png", "label": 1}], "labels are names .'red'. and numbers .1"),
        ([{"image": "red/1.png", "label": "pink"}], "all rows have the label pink"),
        ([{"image": "red/1.png", "label": None}], "rows.jsonl:1 has the label None"),
    ],
)
def test_bad_labels_are_named(rows: list[Any], words: str, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", "ViTForImageClassification")
    make_images(tmp_path)
    with pytest.raises(RequestError, match=words):
        train(folder, write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "out", rows=1)


@needs_pillow
def test_options_of_texts_are_refused(tmp_path: Path, upshift: Command) -> None:
    folder = save_classifier(tmp_path / "model", "ViTForImageClassification")
    make_images(tmp_path / "images")
    for options in (["--objective", "dpo"], ["--sequence-length", 32], ["--nproc", 2], ["--heal"], ["--chat-template", "chatml"]):
        answer = upshift("train", folder, "--data", tmp_path / "images", "--output", tmp_path / "out", *options)
        assert answer.code == 2 and answer.err.strip().count("\n") == 0, answer.err
        assert "image-classification" in answer.err


def samples_of(file: Path) -> np.ndarray:
    return (np.frombuffer(file.read_bytes()[44:], "<i2") / 2**15).astype(np.float32)


def padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[-100] * (width - len(row))] for row in rows])


def save_whisper(folder: Path) -> tuple[Any, Any, Any]:
    tokenizer = train_byte_level_bpe(["one two three"], 260)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    layers = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, **dict.fromkeys(layers, 1)}
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**sizes, **ids, vocab_size=len(tokenizer), decoder_start_token_id=5)
    model = transformers.WhisperForConditionalGeneration(config)
    return model, tokenizer, transformers.WhisperFeatureExtractor()


@pytest.mark.parametrize("make", [save_whisper, save_wav2vec2])
def test_losses_of_speech_are_those_of_a_plain_loop(make: Any, tmp_path: Path, upshift: Command) -> None:
    model, tokenizer, extractor = make(tmp_path / "model")
    for part in (model, tokenizer, extractor):
        part.save_pretrained(tmp_path / "model")
    files = make_sounds(tmp_path / "sounds")
    texts = ["one", "two three"]
    data = write_rows(
        tmp_path / "rows.jsonl",
        *({"audio": f"sounds/{file.name}", "text": text} for file, text in zip(files, texts, strict=True)),
    )
    options = {"return_attention_mask": True} if make is save_whisper else {"padding": True}
    inputs = extractor([samples_of(file) for file in files], sampling_rate=16_000, return_tensors="pt", **options)
    labels = padded([tokenizer(text).input_ids for text in texts])
    expected = plain_losses(model, {**inputs, "labels": labels}, steps=STEPS, rate=RATE)
    assert train(tmp_path / "model", data, tmp_path / "out", rows=2) == pytest.approx(expected, rel=1e-4)
    written = upshift("generate", tmp_path / "out", "--prompts", tmp_path / "sounds", "--output", tmp_path / "texts.jsonl")
    assert written.code == 0, written.err


def test_losses_of_sounds_with_labels_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    model, _, extractor = save_wav2vec2(tmp_path / "speech")
    model.config.id2label = {0: "high", 1: "low"}
    model = transformers.Wav2Vec2ForSequenceClassification(model.config)
    for part in (model, extractor):
        part.save_pretrained(tmp_path / "model")
    files = make_sounds(tmp_path / "sounds")
    for file, label in zip(files, ("low", "high"), strict=True):
        (tmp_path / "labels" / label).mkdir(parents=True)
        file.rename(tmp_path / "labels" / label / file.name)
    read = [samples_of(next((tmp_path / "labels" / label).iterdir())) for label in ("high", "low")]
    inputs = extractor(read, sampling_rate=16_000, return_tensors="pt", padding=True)
    expected = plain_losses(model, {**inputs, "labels": torch.arange(2)}, steps=STEPS, rate=RATE)
    assert train(tmp_path / "model", tmp_path / "labels", tmp_path / "out", rows=2) == pytest.approx(expected, rel=1e-4)


def test_a_model_of_sounds_without_a_head_gets_one(tmp_path: Path) -> None:
    model, _, extractor = save_wav2vec2(tmp_path / "speech")
    for part in (transformers.Wav2Vec2ForPreTraining(model.config), extractor):
        part.save_pretrained(tmp_path / "model")
    rows = [
        {"audio": f"sounds/{file.name}", "label": label}
        for file, label in zip(make_sounds(tmp_path / "sounds"), "ab", strict=True)
    ]
    train(tmp_path / "model", write_rows(tmp_path / "rows.jsonl", *rows), tmp_path / "out", rows=2)
    saved = transformers.AutoModelForAudioClassification.from_pretrained(tmp_path / "out")
    assert saved.config.id2label == {0: "a", 1: "b"}


def test_bad_sounds_are_named(tmp_path: Path) -> None:
    for part in save_wav2vec2(tmp_path / "model"):
        part.save_pretrained(tmp_path / "model")
    make_sounds(tmp_path / "sounds")
    for row, words in (
        ({"audio": "none.wav", "text": "one"}, "rows.jsonl:1: .*none.wav does not exist"),
        ({"audio": "sounds/0.wav"}, "rows.jsonl:1 has not the columns 'audio' and 'text'"),
        ({"audio": "sounds/0.wav", "text": "one two " * 9}, "a text of 72 letters for a sound of 25 places"),
        ({"audio": "sounds/0.wav", "text": 3}, "rows.jsonl:1 has the text 3"),
        ({"audio": "sounds/0.wav", "text": " "}, "has no row of which something is learned"),
    ):
        with pytest.raises(RequestError, match=words):
            train(tmp_path / "model", write_rows(tmp_path / "rows.jsonl", row), tmp_path / "out", rows=1)
