"""LoRA and the head that a task needs: a new head and a trained one are trained whole, saved with labels, merged and used."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import peft
import pytest
import torch
import transformers
from command import Command
from plain_loop import plain_losses
from safetensors.torch import load_file
from test_text_tasks import NOWHERE, ROMES, STEPS, TAGS, train, word_rows, write_rows
from text_models import SIZES, named, save_text_model
from transformers import AutoTokenizer

from upshift.errors import RequestError
from upshift.models.source import ADAPTER_WEIGHTS, find_model

RATE = 0.02
SEED = 42  # the default of a run
TEXTS = ("anna lives in rome", "bob is bad", "paris is good", "annas")
LABELS = ("bad", "good", "place")
ANSWERS = [{"text": text, "label": label} for text, label in zip(TEXTS, ("place", "bad", "good", "place"), strict=True)]
OTHER = [{"text": "anna", "label": "new"}, {"text": "bob", "label": "newer"}]
SIDE = 16


class Case(NamedTuple):
    """A model, its data, the class with a head, and the modules that are trained whole."""

    base: str
    rows: list[dict[str, Any]]
    headed: str
    whole: tuple[str, ...]
    labels: tuple[str, ...] = LABELS
    options: Mapping[str, Any] = MappingProxyType({})
    has_head: bool = False  # whether the model has the head for the labels


CASES = {
    "texts, a pooler": Case(
        "BertForMaskedLM", ANSWERS, "BertForSequenceClassification", ("bert.pooler", "classifier"),
        options={"objective": "sequence-classification"},
    ),
    "texts, two layers": Case(
        "DistilBertForMaskedLM", ANSWERS, "DistilBertForSequenceClassification", ("pre_classifier", "classifier"),
        options={"objective": "sequence-classification"},
    ),
    "texts, other labels": Case("BertForSequenceClassification", ANSWERS, "BertForSequenceClassification", ("classifier",)),
    "words": Case("BertForMaskedLM", word_rows("ner_tags"), "BertForTokenClassification", ("classifier",), TAGS),
    "answers": Case(
        "BertForMaskedLM", [ROMES, NOWHERE], "BertForQuestionAnswering", ("qa_outputs",), ("LABEL_0", "LABEL_1"),
        {"sequence_length": 30},
    ),
    "texts, its own head": Case(
        "DistilBertForSequenceClassification", ANSWERS, "DistilBertForSequenceClassification", ("pre_classifier", "classifier"),
        has_head=True,
    ),
    "words, its own head": Case(
        "BertForTokenClassification", word_rows("ner_tags"), "BertForTokenClassification", ("classifier",), TAGS, has_head=True
    ),
    "answers, its own head": Case(
        "DistilBertForQuestionAnswering", [ROMES, NOWHERE], "DistilBertForQuestionAnswering", ("qa_outputs",),
        ("LABEL_0", "LABEL_1"), {"sequence_length": 30}, has_head=True,
    ),
    "images": Case("ViTModel", [], "ViTForImageClassification", ("classifier",), ("dark", "light")),
}  # fmt: skip


def save_images(folder: Path) -> tuple[Path, Path]:
    """A model of images without a head, and a table of four images with labels."""
    Image = pytest.importorskip("PIL.Image", reason="Pillow, which reads images, is not installed")
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    config = transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=SIDE, patch_size=8)
    transformers.ViTModel(config).save_pretrained(folder / "model")
    transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}).save_pretrained(folder / "model")
    rows = []
    for number in range(4):
        file = folder / f"{number}.png"
        Image.fromarray(np.full((SIDE, SIDE, 3), 60 * number, dtype=np.uint8)).save(file)
        rows.append({"image": str(file), "label": "dark" if number < 2 else "light"})
    return folder / "model", write_rows(folder / "rows.jsonl", *rows)


def save_case(case: Case, folder: Path) -> tuple[Path, Path]:
    if case.base == "ViTModel":
        return save_images(folder)
    labels = named(*case.labels) if case.has_head else {}
    return save_text_model(folder / "model", case.base, **labels), write_rows(folder / "rows.jsonl", *case.rows)


def headed_by_transformers(model: Path, case: Case) -> Any:
    torch.manual_seed(SEED)
    loader = getattr(transformers, case.headed)
    return loader.from_pretrained(model, **named(*case.labels), ignore_mismatched_sizes=True).eval()


def outputs(model: Any, folder: Path) -> torch.Tensor:
    """The numbers that a model gives for some input."""
    with torch.no_grad():
        if model.main_input_name == "pixel_values":
            return model(pixel_values=torch.linspace(-1, 1, 3 * SIDE * SIDE).reshape(1, 3, SIDE, SIDE))[0]
        return model(**AutoTokenizer.from_pretrained(folder)(TEXTS[0], return_tensors="pt"))[0]


@pytest.mark.parametrize("name", CASES)
def test_a_head_is_trained_whole_and_saved_beside_lora(name: str, tmp_path: Path, upshift: Command) -> None:
    case = CASES[name]
    model, data = save_case(case, tmp_path)
    train(model, data, tmp_path / "adapter", rows=4, rate=RATE, lora_rank=4, **case.options)
    reference = headed_by_transformers(model, case)
    before = {key: weight.clone() for key, weight in reference.state_dict().items()}
    saved = peft.LoraConfig.from_pretrained(tmp_path / "adapter")
    assert set(case.whole) <= set(saved.modules_to_save)
    stored = load_file(tmp_path / "adapter" / ADAPTER_WEIGHTS)
    for module in case.whole:  # no two of them are zero or as they were drawn, and none has LoRA within
        weights = {key: weight for key, weight in stored.items() if key.startswith(f"base_model.model.{module}.")}
        assert weights and not any("lora_" in key for key in weights)
        assert all(not torch.equal(weight, before[key.removeprefix("base_model.model.")]) for key, weight in weights.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(reference, tmp_path / "adapter").merge_and_unload().eval()
    answer = upshift("merge", tmp_path / "adapter", "--output", tmp_path / "merged")
    assert answer.code == 0, answer.err
    merged = getattr(transformers, case.headed).from_pretrained(tmp_path / "merged").eval()
    assert merged.config.architectures == [case.headed]
    assert tuple(merged.config.id2label[number] for number in range(len(case.labels))) == case.labels
    assert merged.config.label2id == {label: number for number, label in enumerate(case.labels)}
    expected = outputs(adapted, model)
    torch.testing.assert_close(outputs(merged, model), expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(outputs(headed_by_transformers(model, case), model), expected, atol=1e-3)
    source = find_model(str(tmp_path / "adapter"))
    assert source.config["architectures"] == [case.headed]
    assert source.hf_config.id2label == dict(enumerate(case.labels))


def test_losses_are_those_of_pefts_own_loop_and_go_on_from_the_adapter(tmp_path: Path, upshift: Command) -> None:
    case = CASES["texts, a pooler"]
    model, data = save_case(case, tmp_path)
    losses = train(model, data, tmp_path / "adapter", rows=4, lora_rank=4, **case.options)
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "modules_to_save": ["pooler"], "task_type": "SEQ_CLS"}
    adapted = peft.get_peft_model(headed_by_transformers(model, case), peft.LoraConfig(**options))
    inputs = AutoTokenizer.from_pretrained(model)(list(TEXTS), padding=True, return_tensors="pt")
    inputs["labels"] = torch.tensor([LABELS.index(row["label"]) for row in ANSWERS])
    assert losses == pytest.approx(plain_losses(adapted, inputs, steps=STEPS, rate=1e-3), rel=2e-4)
    with torch.no_grad():
        trained = adapted(**inputs).loss.item()
    first, *_ = train(tmp_path / "adapter", data, tmp_path / "more", rows=4)
    assert first == pytest.approx(trained, rel=2e-4)
    assert upshift("merge", tmp_path / "more", "--output", tmp_path / "merged").code == 0
    with pytest.raises(RequestError, match="need a new head, and .*adapter' has one for its own labels; give the model"):
        train(tmp_path / "adapter", write_rows(tmp_path / "other.jsonl", *OTHER), tmp_path / "other", rows=2)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    answer = upshift("encode", tmp_path / "merged", "--input", texts, "--output", tmp_path / "rows.npy", "--engine", "torch")
    assert answer.code == 0, answer.err
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    inputs.pop("labels")
    with torch.no_grad():
        expected = merged(**inputs).logits.numpy()
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), expected, atol=1e-4)


def test_an_adapter_with_a_head_goes_on_from_a_model_whose_config_names_no_class(tmp_path: Path, upshift: Command) -> None:
    case = CASES["texts, a pooler"]
    model, data = save_case(case, tmp_path)
    config = json.loads((model / "config.json").read_text())
    del config["architectures"]
    (model / "config.json").write_text(json.dumps(config))
    losses = train(model, data, tmp_path / "adapter", rows=4, lora_rank=4, **case.options)
    more = train(tmp_path / "adapter", data, tmp_path / "more", rows=4)
    assert more[0] < losses[0] and more[0] == pytest.approx(losses[-1], rel=0.05)
    answer = upshift("merge", tmp_path / "more", "--output", tmp_path / "merged")
    assert answer.code == 0, answer.err
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert merged.config.label2id == {label: number for number, label in enumerate(case.labels)}


def test_a_module_that_the_model_with_its_new_head_lacks_is_named(tmp_path: Path) -> None:
    case = CASES["words"]
    model, data = save_case(case, tmp_path)
    with pytest.raises(RequestError, match="--lora-modules-to-save scorer: .* has no such module; it has .*classifier"):
        train(model, data, tmp_path / "out", rows=3, lora_rank=4, lora_modules_to_save="scorer")


@pytest.mark.parametrize("name", ["words", "words, its own head", "answers, its own head"])
def test_lora_that_the_user_wants_in_a_head_is_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, data = save_case(case, tmp_path)
    (head,) = case.whole
    query = "query" if case.base.startswith("Bert") else "q_lin"
    with pytest.raises(
        RequestError, match=f"--lora-target {head} is in the head {head}, which is trained whole beside LoRA; leave {head} out"
    ):
        train(model, data, tmp_path / "out", rows=2, lora_rank=4, lora_target=f"{query},{head}", **case.options)
