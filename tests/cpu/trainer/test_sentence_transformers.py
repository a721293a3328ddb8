"""Sentence Transformers' trainers with plans: the library's own losses and files. Skipped where the library is not installed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_models import byte_level_tokenizer, words
from transformers import BertConfig, BertModel

import upshift
import upshift.sentence_transformers as planned
from upshift.errors import MissingExtra, RequestError

library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed, so it cannot be compared")
datasets = pytest.importorskip("datasets", reason="datasets is not installed, which the trainers need")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

PLANNED = {"fixed": ("precision=fp32", "torch_compile=off"), "trial_seconds": 0}
STEPS = 30
SIZE = 8  # examples of a batch, two texts each
Loss = Callable[[Any], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder with dropout, and its tokenizer."""
    path = tmp_path_factory.mktemp("encoder")
    tokenizer = byte_level_tokenizer()
    tokenizer.model_max_length = 64
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id)
    BertModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def encoder(folder: Path) -> Any:
    torch.manual_seed(0)
    return library.SentenceTransformer(modules=[modules.Transformer(str(folder)), modules.Pooling(32)], device="cpu")


def with_adapter(folder: Path) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed, so no adapter can be trained")
    model = encoder(folder)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="FEATURE_EXTRACTION"))
    return model


def pairs(make_label: Callable[[int], Any] | None = None) -> Any:
    draws = random.Random(3)
    rows = [{"anchor": words(draws, draws.randint(2, 6)), "positive": words(draws, draws.randint(2, 6))} for _ in range(64)]
    labels = [{} if make_label is None else {"label": make_label(number)} for number in range(64)]
    return datasets.Dataset.from_list([row | label for row, label in zip(rows, labels, strict=True)])


def ranking(model: Any) -> Any:
    return losses.MultipleNegativesRankingLoss(model)


def cached_ranking(model: Any) -> Any:
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)


def several_sizes(model: Any) -> Any:
    """A loss that replaces the model's forward while it computes."""
    return losses.MatryoshkaLoss(model, ranking(model), [32, 16])


def with_classifier(model: Any) -> Any:
    """A loss that has weights of its own, which are trained, too."""
    torch.manual_seed(1)
    return losses.SoftmaxLoss(model, 32, 3)


def by_data(model: Any) -> dict[str, Any]:
    return {"pairs": ranking(model), "scores": losses.CoSENTLoss(model)}


def several_data_sets() -> Any:
    return datasets.DatasetDict({"pairs": pairs(), "scores": pairs(lambda number: number % 2 / 2)})


# A name: the model, the data, the loss, the rows that it computes at once, and how many times for each batch.
CASES: dict[str, tuple[Callable[[Path], Any], Callable[[], Any], Loss, tuple[int, int]]] = {
    "ranking": (encoder, pairs, ranking, (16, 1)),
    "cached": (encoder, pairs, cached_ranking, (3, 6)),
    "several sizes": (encoder, pairs, several_sizes, (16, 1)),
    "weights of the loss": (encoder, lambda: pairs(lambda number: number % 3), with_classifier, (16, 1)),
    "several data sets": (encoder, several_data_sets, by_data, (16, 1)),
    "adapter": (with_adapter, pairs, ranking, (16, 1)),
}


def make_trainer(
    kind: type, case: str, folder: Path, output: Path, *, of_upshift: dict[str, Any] | None = None, **options: Any
) -> Any:
    make_model, data, loss, _ = CASES[case]
    model = make_model(folder)
    arguments = library.SentenceTransformerTrainingArguments(
        **{"output_dir": str(output), "report_to": "none", "use_cpu": True, "max_steps": STEPS, "logging_steps": 1, "seed": 7,
           "save_strategy": "no", "disable_tqdm": True, "per_device_train_batch_size": SIZE, **options}
    )  # fmt: skip
    return kind(model=model, args=arguments, train_dataset=data(), loss=loss(model), **(of_upshift or {}))


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("case", CASES)
def test_losses_are_the_librarys_own_under_a_plan(case: str, folder: Path, tmp_path: Path) -> None:
    theirs = make_trainer(library.SentenceTransformerTrainer, case, folder, tmp_path / "theirs")
    theirs.train()
    ours = make_trainer(planned.SentenceTransformerTrainer, case, folder, tmp_path / "ours", of_upshift=PLANNED)
    ours.train()
    np.testing.assert_allclose(losses_of(ours), losses_of(theirs), rtol=1e-5, atol=1e-5)
    assert len(losses_of(ours)) == STEPS and losses_of(ours)[0] != losses_of(ours)[-1]
    choice = ours.upshift_choice
    assert choice.planning is not None and choice.reason.startswith("the batches stay whole: ")
    assert (choice.plan.per_device_train_batch_size, choice.plan.gradient_accumulation_steps) == CASES[case][3]
    assert choice.planning.default.plan.per_device_train_batch_size == CASES[case][3][0]  # the plain Trainer computes as many
    assert ("16 texts of a batch that it computes without gradients" in choice.covers) == (case == "cached")


def loss_of_rows(trainer: Any, batch: dict[str, Any], rows: slice) -> float:
    inputs = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    trainer.model.eval()
    with torch.no_grad():
        return float(trainer.compute_loss(trainer.model, inputs))


@pytest.mark.parametrize("case", ["ranking", "cached"])
def test_a_batch_whose_rows_are_compared_stays_whole(case: str, folder: Path, tmp_path: Path) -> None:
    """The mean loss of two halves is another loss, and under a plan the loss sees all rows of each batch."""
    trainer = make_trainer(planned.SentenceTransformerTrainer, case, folder, tmp_path, of_upshift=PLANNED, max_steps=4)
    batch = next(iter(trainer.get_train_dataloader()))
    halves = [loss_of_rows(trainer, batch, rows) for rows in (slice(SIZE // 2), slice(SIZE // 2, SIZE))]
    assert abs(loss_of_rows(trainer, batch, slice(SIZE)) - sum(halves) / 2) > 0.1
    seen: list[int] = []
    forward = trainer.loss.forward

    def counted(features: Any, labels: Any) -> Any:
        features = list(features)
        seen.extend(len(texts["input_ids"]) for texts in features)
        return forward(features, labels)

    trainer.loss.forward = counted
    trainer.train()
    assert set(seen) == {SIZE} and trainer.upshift_choice.planning is not None


@pytest.mark.parametrize(("fixed", "problem"), [
    ("per_device_train_batch_size=8", "batches of 16 rows stay whole, because the loss of SentenceTransformer may compare"),
    ("packing=True", "batches of 16 rows stay whole"),
    ("loss_chunk_tokens=1024", "the script's own loss may read all logits"),
])  # fmt: skip
def test_a_field_that_needs_other_batches_is_refused_by_name(fixed: str, problem: str, folder: Path, tmp_path: Path) -> None:
    options = {"fixed": fixed}
    trainer = make_trainer(planned.SentenceTransformerTrainer, "ranking", folder, tmp_path, of_upshift=options)
    with pytest.raises(RequestError, match=f"{fixed} is not possible: {problem}"):
        trainer.train()


def test_an_optimizer_that_would_leave_out_the_losss_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    options = {"fixed": "optim=muon", "allow": "muon", "trial_seconds": 0}
    trainer = make_trainer(planned.SentenceTransformerTrainer, "weights of the loss", folder, tmp_path, of_upshift=options)
    with pytest.raises(RequestError, match="optim=muon has the model's weights alone"):
        trainer.train()


def test_checkpoints_and_files_are_the_librarys(folder: Path, tmp_path: Path) -> None:
    """A run ends with the library's files, resumes from the middle, and the library loads what it saved."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    theirs = make_trainer(library.SentenceTransformerTrainer, "cached", folder, tmp_path / "theirs", **options)
    theirs.train()
    whole = make_trainer(planned.SentenceTransformerTrainer, "cached", folder, tmp_path / "ours", of_upshift=PLANNED, **options)
    whole.train()

    def files(output: Path) -> set[str]:
        return {str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()}

    pickles = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    missing = files(tmp_path / "theirs") - files(tmp_path / "ours")
    assert {Path(name).name for name in missing} <= pickles, missing
    resumed = make_trainer(planned.SentenceTransformerTrainer, "cached", folder, tmp_path / "ours", of_upshift=PLANNED, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert losses_of(resumed) == losses_of(whole) and len(losses_of(whole)) == 6
    resumed.save_model(str(tmp_path / "saved"))
    for saved in (tmp_path / "saved", tmp_path / "ours" / "checkpoint-6"):
        loaded = library.SentenceTransformer(str(saved), device="cpu").state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in whole.model.state_dict().items())


def test_a_cross_encoder_whose_batches_are_strings_gets_a_plan(folder: Path, tmp_path: Path) -> None:
    """Its loss tokenizes the texts, so their number is known from the calls of the model alone."""
    from sentence_transformers.cross_encoder.losses import CachedMultipleNegativesRankingLoss

    trainers = []
    for kind, options in ((library.CrossEncoderTrainer, {}), (planned.CrossEncoderTrainer, PLANNED)):
        torch.manual_seed(0)
        model = library.CrossEncoder(str(folder), num_labels=1, device="cpu")
        arguments = library.CrossEncoderTrainingArguments(
            str(tmp_path / kind.__module__), report_to="none", use_cpu=True, max_steps=8, logging_steps=1, seed=7,
            save_strategy="no", disable_tqdm=True, per_device_train_batch_size=4,
        )  # fmt: skip
        loss = CachedMultipleNegativesRankingLoss(model, num_negatives=3, mini_batch_size=8)
        trainers.append(kind(model=model, args=arguments, train_dataset=pairs(), loss=loss, **options))
        trainers[-1].train()
    np.testing.assert_allclose(losses_of(trainers[1]), losses_of(trainers[0]), rtol=1e-5, atol=1e-5)
    plan = trainers[1].upshift_choice.plan
    assert (plan.per_device_train_batch_size, plan.gradient_accumulation_steps) == (8, 2)  # of 4 x (1 + 3) pairs of texts


def test_names() -> None:
    assert {"CrossEncoderTrainer", "SentenceTransformerTrainer", "SparseEncoderTrainer"} <= set(dir(planned))
    first = planned.SentenceTransformerTrainer
    assert planned.SentenceTransformerTrainer is first
    assert issubclass(first, library.SentenceTransformerTrainer) and issubclass(first, upshift.Trainer)
    with pytest.raises(AttributeError, match="SentenceTransformer'; it has .*SentenceTransformerTrainer"):
        _ = planned.SentenceTransformer


def test_without_the_library_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("upshift.tuning.library_trainers.find_spec", lambda name: None)
    line = "upshift.sentence_transformers needs sentence-transformers: run  pip install '.[sentence-transformers]'"
    with pytest.raises(MissingExtra, match=re.escape(line)):
        _ = planned.MultiVectorEncoderTrainer
