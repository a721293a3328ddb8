"""The results of tasks are those of transformers' pipelines: masks, depth, boxes, and scores of labels that the user names."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from command import Command
from test_encode import MINILM
from test_media import SPEECH, TEXT, VISION, write_files
from text_models import named, save_text_model
from transformers import AutoTokenizer

from upshift.inference.media import predict
from upshift.loading.media_files import read_image

SIDE = {"height": 32, "width": 32}
LABELS = ("a cat", "a dog", "two birds")
SEGFORMER = {
    "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "num_encoder_blocks": 2, "sr_ratios": [2, 1],
    "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, **named("sky", "road", "tree"),
}  # fmt: skip
DPT = {
    **VISION, "intermediate_size": 48, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
    "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "is_hybrid": False, "reassemble_factors": [4, 2, 1, 0.5],
}  # fmt: skip
SWIN = {
    "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 2, "image_size": 32, "patch_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip
QUERIES = {
    "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 16, "dim_feedforward": 16,
    "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": 4, **named("sky", "road", "tree"),
}  # fmt: skip
YOLOS = {**VISION, "image_size": [32, 32], "intermediate_size": 48, "num_detection_tokens": 5, **named("cat", "dog")}


class Case(NamedTuple):
    """A model and its pipeline. ``options``: those of the command, and of the pipeline."""

    class_name: str
    sizes: dict[str, Any]
    processor: Any
    task: str
    modality: str = "image"
    options: tuple[str, ...] = ()
    arguments: dict[str, Any] = {}  # noqa: RUF012


GIVEN = ("--labels", ",".join(LABELS))
NAMED = {"candidate_labels": list(LABELS)}
CASES = {
    "semantic": Case(
        "SegformerForSemanticSegmentation", SEGFORMER, lambda: transformers.SegformerImageProcessor(size=SIDE),
        "image-segmentation",
    ),
    "panoptic": Case(
        "Mask2FormerForUniversalSegmentation", {**QUERIES, "backbone_config": {"model_type": "swin", **SWIN}},
        lambda: transformers.Mask2FormerImageProcessor(size={"height": 64, "width": 64}), "image-segmentation",
    ),
    "depth": Case("DPTForDepthEstimation", DPT, lambda: transformers.DPTImageProcessor(size=SIDE), "depth-estimation"),
    "boxes": Case("YolosForObjectDetection", YOLOS, lambda: transformers.YolosImageProcessor(size=SIDE), "object-detection"),
    "classes": Case(
        "ViTForImageClassification", {**VISION, "intermediate_size": 48, **named(*"abc")},
        lambda: transformers.ViTImageProcessor(size=SIDE), "image-classification",
    ),
    "sounds": Case(
        "Wav2Vec2ForSequenceClassification", {**SPEECH, **named(*"abc")}, transformers.Wav2Vec2FeatureExtractor,
        "audio-classification", "audio",
    ),
    "clip": Case(
        "CLIPModel", {"text_config": {**TEXT, "eos_token_id": 102}, "vision_config": VISION, "projection_dim": 16},
        lambda: transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SIDE), "zero-shot-image-classification",
        options=(*GIVEN, "--label-template", "I see {} here"), arguments={**NAMED, "hypothesis_template": "I see {} here"},
    ),
    "siglip": Case(
        "SiglipModel", {"text_config": TEXT, "vision_config": VISION}, lambda: transformers.SiglipImageProcessor(size=SIDE),
        "zero-shot-image-classification", options=GIVEN, arguments=NAMED,
    ),
}  # fmt: skip


def save(case: Case, folder: Path) -> Path:
    if case.modality == "image":
        pytest.importorskip("PIL", reason="Pillow, which reads images, is not installed")
    model_class = getattr(transformers, case.class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**case.sizes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # so that images have different results
        if case.task == "object-detection":
            model.class_labels_classifier.layers[-1].bias.copy_(torch.tensor([2.0, 1.0, -2.0]))  # the last one is of no object
        if case.class_name.startswith("Mask2Former"):
            model.class_predictor.bias.copy_(torch.tensor([4.0, 0.0, 0.0, -4.0]))
    model.save_pretrained(folder)
    case.processor().save_pretrained(folder)
    if case.options:
        AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    return folder


def content_of(file: Path) -> Any:
    """What the pipeline takes: a sound as samples, because it reads sound files with another program."""
    if file.suffix != ".wav":
        return str(file)
    with wave.open(str(file)) as sound:
        samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype="<i2") / np.float32(2**15)
    return {"raw": samples, "sampling_rate": 16_000}


def same(ours: Any, theirs: Any, folder: Path) -> None:
    """Compare a result of a line with that of the pipeline. A file in ours is an image or a tensor in theirs."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            same(ours[key], value, folder)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other, folder)
    elif isinstance(theirs, torch.Tensor):
        np.testing.assert_allclose(np.load(folder / ours), theirs.numpy(), atol=1e-5)
    elif hasattr(theirs, "getdata"):
        from PIL import Image

        with Image.open(folder / ours) as image:
            assert (image.mode, image.size) == (theirs.mode, theirs.size)
            assert np.abs(np.asarray(image).astype(int) - np.asarray(theirs).astype(int)).max() <= 1
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-5)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_pipeline(name: str, tmp_path: Path, upshift: Command) -> None:
    case = CASES[name]
    model = save(case, tmp_path / "model")
    files = write_files(tmp_path / "items", case.modality)
    output = tmp_path / "results.jsonl"
    answer = upshift("encode", model, "--input", tmp_path / "items", "--output", output, *case.options)
    assert answer.code == 0, answer.err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["item"] for line in lines] == list(map(str, files))
    parts = {"tokenizer": AutoTokenizer.from_pretrained(model)} if case.options else {}
    kind = "feature_extractor" if case.modality == "audio" else "image_processor"
    loader = transformers.AutoFeatureExtractor if case.modality == "audio" else transformers.AutoImageProcessor
    parts[kind] = loader.from_pretrained(model)
    by_transformers = getattr(transformers, case.class_name).from_pretrained(model)
    pipeline = transformers.pipeline(case.task, model=by_transformers, device="cpu", **parts)
    expected = [pipeline(content_of(file), **case.arguments) for file in files]
    assert all(expected)
    with pytest.raises(AssertionError):  # the items have different results
        same(lines[0]["result"], expected[1], tmp_path)
    for line, result in zip(lines, expected, strict=True):
        same(line["result"], result, tmp_path)


def save_nli(folder: Path, *labels: str) -> Path:
    save_text_model(folder, "BertForSequenceClassification", **named(*labels))
    with torch.no_grad():
        model = transformers.BertForSequenceClassification.from_pretrained(folder)
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        (["good, bad,rome"], ["good", "bad", "rome"]),
        (["good, or fair", "bad"], ["good, or fair", "bad"]),
        (["labels.txt"], ["good, or fair", "bad", "rome"]),
    ],
)
def test_texts_are_scored_for_labels_by_a_model_of_entailment(
    options: list[str], labels: list[str], tmp_path: Path, upshift: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("labels.txt").write_text("good, or fair\r\nbad\n\nrome")
    given = [word for option in options for word in ("--labels", option)]
    model = save_nli(tmp_path / "model", "contradiction", "neutral", "ENTAILMENT")
    texts = ["anna lives in rome", "bob is bad .", "paris"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    output = tmp_path / "results.jsonl"
    answer = upshift("encode", model, "--input", tmp_path / "texts.txt", "--output", output, *given)
    assert answer.code == 0, answer.err
    pipeline = transformers.pipeline("zero-shot-classification", model=str(model), device="cpu")
    for line, text in zip(output.read_text().splitlines(), texts, strict=True):
        expected = pipeline(text, candidate_labels=labels)
        same(json.loads(line)["result"], expected, tmp_path)
    assert len({tuple(json.loads(line)["result"]["scores"]) for line in output.read_text().splitlines()}) == 3


def test_a_stopped_run_goes_on_with_its_files(tmp_path: Path, upshift: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(CASES["semantic"], tmp_path / "model")
    files = write_files(tmp_path / "items", "image")
    command = ("encode", model, "--input", tmp_path / "items", "--output")
    assert upshift(*command, tmp_path / "whole.jsonl").code == 0
    computed: list[str] = []

    def read_two(item: Any) -> Any:
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append(item.content)
        return read_image(item)

    with monkeypatch.context() as patch:
        patch.setattr(predict, "read_image", read_two)
        assert upshift(*command, tmp_path / "part.jsonl").code != 0
    again = json.loads(upshift(*command, tmp_path / "part.jsonl", "--json").out)
    assert (again["items"], again["encoded"]) == (len(files), len(files) - 2)
    whole, part = ((tmp_path / f"{name}.jsonl").read_text() for name in ("whole", "part"))
    assert part.replace("part_files/", "whole_files/") == whole
    stored = [{file.name: file.read_bytes() for file in (tmp_path / f"{name}_files").iterdir()} for name in ("whole", "part")]
    assert stored[0] == stored[1]
    refused = upshift(*command, tmp_path / "part.jsonl")
    assert refused.code == 2 and "exists" in refused.err
    (tmp_path / "part_files" / "mine.txt").write_text("mine")
    assert upshift(*command, tmp_path / "part.jsonl", "--overwrite").code == 0
    assert (tmp_path / "part_files" / "mine.txt").read_text() == "mine"


def test_an_older_output_keeps_its_files_until_the_new_one_is_there(
    tmp_path: Path, upshift: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save(CASES["semantic"], tmp_path / "model")
    write_files(tmp_path / "items", "image")
    command = ("encode", model, "--input", tmp_path / "items", "--output", tmp_path / "out.jsonl")
    assert upshift(*command).code == 0
    before = {file: file.read_bytes() for file in (tmp_path / "out.jsonl", *(tmp_path / "out_files").iterdir())}
    assert len(before) > 2

    def stop(item: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(predict, "read_image", stop)
        assert upshift(*command, "--overwrite").code != 0
    assert {file: file.read_bytes() for file in before} == before
    assert {path.name for path in tmp_path.iterdir()} == {"model", "items", "out.jsonl", "out_files"}
    stale = tmp_path / "out_files" / "000001-7-mask.png"  # of a line that the new output does not have
    stale.write_bytes(b"mask")
    (tmp_path / "out.jsonl").write_text('{"item": "a", "result": [{"mask": "out_files/000001-7-mask.png"}]}\n')
    (tmp_path / "out_files" / "000001-mine.png").write_bytes(b"mine")
    assert upshift(*command, "--overwrite").code == 0
    assert not stale.exists() and (tmp_path / "out_files" / "000001-mine.png").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["the folder", "a folder in it", "around it", "a line"])
def test_images_of_results_never_go_to_the_input(kind: str, tmp_path: Path, upshift: Command) -> None:
    """With --overwrite, numbered images of the input had been deleted before they were read."""
    places = {"the folder": ("out_files", "out"), "a folder in it": ("items", "items/out"), "around it": ("out_files/a", "out")}
    items, output = (tmp_path / place for place in places.get(kind, ("out_files", "out")))
    items.mkdir(parents=True)
    files = [file.rename(file.with_name(f"000001-{file.name}")) for file in write_files(items, "image")]
    contents = [file.read_bytes() for file in files]
    given = items
    if kind == "a line":
        given = tmp_path / "items.jsonl"
        given.write_text("".join(json.dumps({"image": str(file)}) + "\n" for file in files))
    model = save(CASES["semantic"], tmp_path / "model")
    answer = upshift("encode", model, "--input", given, "--output", f"{output}.jsonl", "--overwrite")
    assert answer.code == 2 and "give an output elsewhere" in " ".join(answer.err.split()), answer.err
    assert [file.read_bytes() for file in files] == contents


def test_an_empty_text_is_named(tmp_path: Path, upshift: Command) -> None:
    model = save_nli(tmp_path / "model", "contradiction", "neutral", "entailment")
    (tmp_path / "texts.txt").write_text("anna\n\nbob\n")
    answer = upshift("encode", model, "--input", tmp_path / "texts.txt", "--output", tmp_path / "out.jsonl", "--labels", "a,b")
    assert answer.code == 2 and "texts.txt line 2 is an empty text" in " ".join(answer.err.split()), answer.err


REFUSED: list[tuple[str, list[str], str]] = [
    ("clip", [], "is a CLIPModel, which finds the best of labels that you name (zero-shot-image-classification); add them: --l"),
    ("classes", ["--labels", "a,b"], "is a ViTForImageClassification (image-classification), which has labels of its own; leave"),
    ("clip", ["--labels", "a,,b"], "--labels 'a,,b' has an empty label"),
    ("clip", ["--labels", "a,b,a"], "--labels 'a,b,a' has 'a' twice"),
    ("clip", ["--labels", "none.txt"], "--labels none.txt does not exist"),
    ("clip", ["--labels", "a", "--labels", "b.txt"], "--labels b.txt is a file, and another --labels is given"),
    ("clip", ["--labels", "a,b", "--label-template", "a photo"], "--label-template 'a photo' must have one {}"),
    ("clip", ["--labels", "a,b", "--label-template", "{} {}"], "must have one {} in the place of the label"),
    ("clip", ["--labels", "a,b", "--label-template", "{{}}"], "must have one {} in the place of the label"),
    ("clip", ["--labels", "a,b", "--label-template", "{ {}"], "must have one {} in the place of the label"),
    ("clip", ["--labels", "a,b", "--label-template", "{:d}"], "must have one {} in the place of the label"),
    ("clip", ["--label-template", "{}"], "--label-template '{}' is for --labels; add them"),
    ("clip", ["--labels", "a,b", "--quality", "0.99"], "--quality 0.99 is for rows of numbers"),
    ("clip", ["--labels", "a,b", "--engine", "openvino"], "--engine openvino is for rows of numbers"),
    ("clip", ["--labels", "a,b", "--race-seconds", "3"], "--race-seconds 3.0 is for rows of numbers"),
    ("clip", ["--labels", "a,b", "--query", "a"], "--query a is for vectors and scores of texts"),
    ("clip", ["--labels", "a,b", "--output", "rows.npy"], "--output rows.npy must end with .jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "words"), REFUSED)
def test_what_does_not_fit_is_refused_in_words(
    name: str, options: list[str], words: str, tmp_path: Path, upshift: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = save(CASES[name]._replace(options=()), tmp_path / "model")
    write_files(tmp_path / "items", "image")
    output = [] if "--output" in options else ["--output", "out.jsonl"]
    answer = upshift("encode", model, "--input", "items", *output, *options)
    assert answer.code == 2 and words in " ".join(answer.err.split()), answer.err


def test_a_model_without_such_results_is_refused_by_its_task(tmp_path: Path, upshift: Command) -> None:
    write_files(tmp_path / "items", "image")
    plain = Case("ViTModel", {**VISION, "intermediate_size": 48}, CASES["classes"].processor, "")
    model = save(plain, tmp_path / "model")
    answer = upshift("encode", model, "--input", tmp_path / "items", "--output", tmp_path / "out.jsonl")
    assert answer.code == 2 and "is a ViTModel (image-feature-extraction" in answer.err
    (tmp_path / "texts.txt").write_text("anna")
    model = save_nli(tmp_path / "nli", "no", "yes")
    answer = upshift("encode", model, "--input", tmp_path / "texts.txt", "--output", tmp_path / "out.jsonl", "--labels", "a,b")
    assert answer.code == 2 and "with the labels no, yes, and --labels needs one that begins with 'entail'" in answer.err
    wrong = save(CASES["depth"]._replace(processor=CASES["classes"].processor), tmp_path / "depth")
    answer = upshift("encode", wrong, "--input", tmp_path / "items", "--output", tmp_path / "out.jsonl")
    assert answer.code == 2 and "which has no post_process_depth_estimation" in answer.err
