"""Batches that cannot be taken apart: the rows that stand in for them, and a script's own loss under a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn.functional import logsigmoid
from transformers import BertConfig, BertForSequenceClassification, BertModel, LlamaConfig, LlamaForCausalLM, TrainingArguments

import upshift
from upshift.errors import JobFailed, NothingFits, RequestError, UpshiftError
from upshift.planning.plan import Plan
from upshift.training.batches.model_calls import ModelCall, StepCalls, record_calls
from upshift.training.batches.stand_ins import WholeRows, find_rows, make_stand_ins, stand_ins_of_calls
from upshift.training.batches.user_batches import InseparableRows
from upshift.training.hf_trainer import plan_mixin
from upshift.training.hf_trainer.choose_plan import whole_batch_fields
from upshift.training.hf_trainer.monitor import plan_lines

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 99}
PLANNED = {"fixed": ("precision=fp32", "torch_compile=off"), "trial_seconds": 0}


def causal() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def classifier(num_labels: int) -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=num_labels))


def tokens(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).view(shape) % 90 + 1


def test_rows_stand_in_for_texts_end_to_end() -> None:
    """They keep the positions, which say where a text begins, and leave out what no row has."""
    batch = {"input_ids": tokens(1, 7), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1]]), "max_length_q": 3,
             "cu_seq_lens_q": torch.tensor([0, 3, 5, 7]), "names": ["a", "b", "c"], "labels": tokens(1, 7)}  # fmt: skip
    (rows,) = make_stand_ins([batch], causal())
    assert rows.keys() == {"input_ids", "position_ids", "labels"} and torch.equal(rows["position_ids"], batch["position_ids"])


def test_texts_end_to_end_that_are_longer_than_the_positions_become_several_rows() -> None:
    """The positions begin again at each text, so such a row is legal. A trace of the model has one text in each row."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=8))
    positions = torch.cat([torch.arange(5), torch.arange(8), torch.arange(6)])[None]
    batch = {"input_ids": tokens(1, 19), "position_ids": positions, "labels": tokens(1, 19)}
    (rows,) = make_stand_ins([batch], model)
    assert all(value.shape == (3, 7) for value in rows.values())
    assert rows["input_ids"].flatten()[:19].tolist() == batch["input_ids"][0].tolist()
    assert rows["labels"].flatten()[19:].tolist() == [-100, -100] and int(rows["position_ids"].max()) == 7
    with pytest.raises(InseparableRows, match="rows of 19 tokens are longer than the model's 8 positions"):
        make_stand_ins([batch | {"labels": torch.tensor([1])}], model)


def test_rows_stand_in_for_pairs_in_entries_of_their_own() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = {"query_input_ids": tokens(2, 3), "query_attention_mask": mask, "answer_input_ids": tokens(2, 5),
             "answer_attention_mask": torch.ones(2, 5, dtype=torch.long), "label": torch.tensor([0.5, 1.0])}  # fmt: skip
    (rows,) = make_stand_ins([batch], causal())
    assert rows["input_ids"].shape == rows["labels"].shape == (4, 5)
    assert rows["attention_mask"].sum(1).tolist() == [2, 3, 5, 5]
    assert torch.equal(rows["labels"] != -100, rows["attention_mask"].bool())


@pytest.mark.parametrize("num_labels", [1, 3])
def test_rows_that_stand_in_have_labels_that_the_models_loss_reads(num_labels: int) -> None:
    batch = {"input_ids": tokens(4, 3), "attention_mask": torch.ones(4, 3, dtype=torch.long), "margin": torch.ones(2)}
    model = classifier(num_labels)
    (rows,) = make_stand_ins([batch], model)
    assert model(**rows).loss.isfinite()


def test_batches_smaller_than_the_first_are_left_out() -> None:
    batches = [{"input_ids": tokens(rows, 3)} for rows in (4, 4, 1)]
    assert [len(rows["input_ids"]) for rows in make_stand_ins(batches, causal())] == [4, 4]


@pytest.mark.parametrize("batch", [{"pixel_values": torch.zeros(2, 3)}, {"input_ids": [[1, 2]]}, [{"prompt": "a"}]])
def test_batches_without_tokens_have_no_stand_ins(batch: Any) -> None:
    with pytest.raises(InseparableRows):
        make_stand_ins([batch], causal())


def test_a_model_that_is_not_of_transformers_has_no_stand_ins() -> None:
    with pytest.raises(InseparableRows, match="Embedding is no transformers model"):
        make_stand_ins([{"input_ids": tokens(2, 3)}], torch.nn.Embedding(99, 4))


class TextEncoder(torch.nn.Module):
    """An encoder of transformers inside a module of a script, which computes a loss of whole batches."""

    def __init__(self, *encoders: Any, around: int = 4) -> None:
        super().__init__()
        self.encoders = torch.nn.ModuleList(encoders)
        self.scale = torch.nn.Linear(around, 1)

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        first, second = self.encoders[0](input_ids=input_ids).last_hidden_state[:, 0].chunk(2)
        return {"loss": torch.nn.functional.cross_entropy(first @ second.T, torch.arange(len(first)))}


def bare_encoder() -> Any:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES))


def test_calls_say_what_is_trained_and_what_is_in_memory_at_once() -> None:
    model = bare_encoder()

    def compute() -> torch.Tensor:
        """Two calls whose activations stay, one without gradients, and two in the backward pass, as losses with a cache make."""
        with torch.no_grad():
            model(input_ids=tokens(7, 3))
        stay = model(tokens(2, 3)).last_hidden_state.sum() + model.forward(input_ids=tokens(1, 5)).last_hidden_state.sum()

        def call_again(gradient: torch.Tensor) -> None:
            with torch.enable_grad():
                for rows in (3, 4):
                    model(input_ids=tokens(rows, 6)).last_hidden_state.sum().backward()

        stay.register_hook(call_again)
        return stay

    record = record_calls(model, compute)
    assert (record.num_trained, record.num_untrained, record.num_at_once) == (2 + 1 + 3 + 4, 7, 2 + 1 + 4)
    assert "forward" not in vars(model)
    assert all(call.has_padding_alone for call in record.calls)
    (rows,) = stand_ins_of_calls([record], model)
    assert rows["input_ids"].shape == (10, 6) and rows["labels"].shape == (10,)


def test_rows_are_those_of_the_entries_if_each_is_learned_once_and_of_the_calls_otherwise() -> None:
    model = TextEncoder(bare_encoder())
    batch = {"first_input_ids": tokens(2, 3), "second_input_ids": tokens(2, 5)}

    def rows_of(*calls: int) -> WholeRows:
        steps = StepCalls([ModelCall({"input_ids": tokens(rows, 4)}, True, True) for rows in calls])
        return find_rows([batch], model, lambda batch: steps)

    assert rows_of(2, 2).batches[0]["input_ids"].shape == (4, 5)
    assert rows_of(2, 2, 2).batches[0]["input_ids"].shape == (6, 4)
    assert (rows_of(2, 2, 2).num_at_once, rows_of(2, 2, 1).num_parts) == (2, 3)
    with pytest.raises(InseparableRows, match="no rows of tokens that it learns from"):
        find_rows([batch], model, lambda batch: StepCalls())


def test_a_text_that_the_loss_leaves_out_is_no_row() -> None:
    """As in ORPO: a prompt has entries of its own beside two answers that begin with it."""
    model = causal()
    batch = {"prompt_input_ids": tokens(2, 3), "chosen_input_ids": tokens(2, 5), "rejected_input_ids": tokens(2, 6)}

    def unreadable(batch: Any) -> StepCalls:
        raise InseparableRows("the calls could not be counted")

    learned = StepCalls([ModelCall({"input_ids": tokens(4, 6)}, True, False)])
    rows = find_rows([batch], model, lambda batch: learned)
    assert rows.batches[0]["input_ids"].shape == (4, 6) and (rows.num_at_once, rows.frees_attention) == (4, False)
    assert find_rows([batch], model, unreadable).num_rows == 6
    assert find_rows([{"input_ids": tokens(2, 6)} | batch], model, unreadable).num_rows == 2


def test_the_model_keeps_its_attention_if_it_reads_more_than_padding() -> None:
    model = bare_encoder()
    mask = torch.ones(2, 3, dtype=torch.long)
    for more, expected in (
        ({"attention_mask": mask, "token_type_ids": mask, "return_dict": True}, True),
        ({"attention_mask": mask[:, None, None, :].bool().expand(2, 1, 3, 3)}, False),
        ({"position_ids": torch.tensor([[0, 1, 0], [0, 1, 2]])}, False),
    ):
        inputs = {"input_ids": tokens(2, 3), **more}
        record = record_calls(model, lambda inputs=inputs: model(**inputs).last_hidden_state.sum())  # type: ignore[misc]
        rows = find_rows([{"input_ids": tokens(2, 3)}], TextEncoder(model), lambda batch, record=record: record)  # type: ignore[misc]
        assert rows.frees_attention is expected


def no_calls(batch: Any) -> StepCalls:
    raise AssertionError("nothing is computed for a model that gets no plan")


@pytest.mark.parametrize(("encoders", "around", "problem"), [
    (0, 4, "TextEncoder is no transformers model"), (2, 4, "TextEncoder is no transformers model"),
    (1, 10**6, "BertModel has .* of the trained weights of TextEncoder"),
])  # fmt: skip
def test_a_module_around_no_or_several_models_or_with_most_weights_has_no_rows(encoders: int, around: int, problem: str) -> None:
    model = TextEncoder(*(bare_encoder() for _ in range(encoders)), around=around)
    with pytest.raises(InseparableRows, match=problem):
        find_rows([{"input_ids": tokens(2, 3)}], model, no_calls)


def test_a_module_around_a_model_gets_a_plan_for_whole_batches(tmp_path: Path) -> None:
    losses = []
    for library in (transformers, upshift):
        trainer = library.Trainer(
            model=TextEncoder(bare_encoder()),
            args=TrainingArguments(
                str(tmp_path / library.__name__), max_steps=6, logging_steps=1, report_to="none", save_strategy="no",
                use_cpu=True, disable_tqdm=True, seed=7, per_device_train_batch_size=4,
            ),
            train_dataset=[{"input_ids": (tokens(16) + number).tolist(), "labels": 0} for number in range(16)],
            data_collator=transformers.default_data_collator,
            **(PLANNED if library is upshift else {}),
        )  # fmt: skip
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    choice = trainer.upshift_choice
    assert choice.planning is not None and choice.plan.per_device_train_batch_size == 4 and choice.plan.loss_chunk_tokens == 0


def pairs(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    """A loss over pairs of rows."""
    first, second = model(**inputs).logits[:, 0].view(-1, 2).unbind(1)
    return -logsigmoid(first - second).mean()


def counted(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
    """A training step that must be called once for each batch."""
    self.batches_seen = getattr(self, "batches_seen", 0) + 1
    return super(type(self), self).training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize(("methods", "accumulation"), [({"compute_loss": pairs}, 1), ({"training_step": counted}, 2)])
def test_a_script_whose_batches_stay_whole_gets_a_plan(methods: dict[str, Any], accumulation: int, tmp_path: Path) -> None:
    losses = []
    rows = [{"input_ids": (tokens(16) + number).tolist(), "labels": number % 3} for number in range(16)]
    for library in (transformers, upshift):
        trainer = type("Script", (library.Trainer,), methods)(
            model=classifier(3),
            args=TrainingArguments(
                str(tmp_path / library.__name__), max_steps=6, logging_steps=1, report_to="none", save_strategy="no",
                use_cpu=True, disable_tqdm=True, seed=7, per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
            ),
            train_dataset=rows,
            data_collator=transformers.default_data_collator,
            **(PLANNED if library is upshift else {}),
        )  # fmt: skip
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if accumulation == 2:
            assert trainer.batches_seen == 12
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert any("only the training of the model" in line for line in plan_lines(trainer.upshift_choice))
    assert trainer.upshift_choice.planning is not None and trainer.upshift_choice.plan.per_device_train_batch_size == 4


def rows_apart(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
    """A loss of the script that splits over rows."""
    return model(**inputs).logits.square().mean()


def train_script(methods: dict[str, Any], folder: Path, **options: Any) -> Any:
    """Return the trainer of a short training under ``options`` of Upshift."""
    rows = [{"input_ids": (tokens(16) + number).tolist(), "labels": number % 3} for number in range(16)]
    trainer = type("Script", (upshift.Trainer,), methods)(
        model=classifier(3),
        args=TrainingArguments(
            str(folder), max_steps=2, report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
            per_device_train_batch_size=4,
        ),
        train_dataset=rows,
        data_collator=transformers.default_data_collator,
        **options,
    )  # fmt: skip
    trainer.train()
    return trainer


@pytest.fixture(params=[NothingFits, JobFailed], ids=["predicted", "tried"])
def problem(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[UpshiftError]:
    """Let no plan fit, by the prediction or in the trials, and plan even the shortest run. Tracing a model would take longer."""
    kind: type[UpshiftError] = request.param

    def choose(*arguments: Any, **named: Any) -> Any:
        raise kind("nothing fits")

    monkeypatch.setattr(plan_mixin, "choose", choose)
    monkeypatch.setattr(plan_mixin, "SHORT_RUN_SECONDS", 0.0)
    return kind


@pytest.mark.parametrize("loss", [pairs, rows_apart])
def test_a_prediction_of_another_loss_than_the_runs_does_not_end_the_run(
    loss: Any, problem: type[UpshiftError], tmp_path: Path
) -> None:
    """The script's loss may need less memory than the model's own, with which a plan is predicted and tried."""
    trainer = train_script({"compute_loss": loss}, tmp_path)
    assert trainer.state.global_step == 2 and trainer.upshift_choice.planning is None
    assert "no plan: nothing fits" in trainer.upshift_choice.reason
    with pytest.raises(problem):
        train_script({"compute_loss": loss}, tmp_path, **PLANNED)


def test_a_run_whose_own_loss_does_not_fit_ends_before_it_starts(problem: type[UpshiftError], tmp_path: Path) -> None:
    with pytest.raises(problem):
        train_script({}, tmp_path)


GIVEN = Plan(
    device="cpu", host="", model="", sequence_length=16, per_device_train_batch_size=4, optim="adamw_torch",
)  # fmt: skip


def test_a_given_plan_runs_whole_batches_if_it_needs_no_others(tmp_path: Path) -> None:
    trainer = train_script({"compute_loss": pairs}, tmp_path, plan=GIVEN)
    assert trainer.state.global_step == 2 and trainer.upshift_choice.plan == GIVEN


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("per_device_train_batch_size", 2),
        ("gradient_accumulation_steps", 2),
        ("activation_checkpointing", 1),
        ("torch_compile", "model"),
        ("loss_chunk_tokens", 1024),
    ],
)
def test_a_given_plan_that_needs_other_batches_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    name = {"activation_checkpointing": "activation checkpointing", "torch_compile": "compiled"}.get(field, f"{field}={value}")
    with pytest.raises(RequestError, match=name):
        train_script({"compute_loss": pairs}, tmp_path, plan=GIVEN.changed(**{field: value}))


@pytest.mark.parametrize("loss", [pairs, rows_apart])
def test_chunks_of_a_loss_are_refused_where_the_script_computes_it(loss: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="loss_chunk_tokens=1024 is not possible: the script's own loss may read all logits"):
        train_script({"compute_loss": loss}, tmp_path, fixed="loss_chunk_tokens=1024")


def test_a_field_that_the_scripts_own_step_would_not_see_is_refused_by_name() -> None:
    batches: dict[str, Any] = {"num_rows": 4, "accumulation": 2, "reason": "of it"}
    for field in ("activation_offload=True", "loss_chunk_tokens=1024"):
        with pytest.raises(RequestError, match=f"{field} is not possible: batches of 4 rows stay whole"):
            whole_batch_fields((field,), own_step=True, **batches)
        assert "packing=False" in whole_batch_fields((field,), own_step=False, **batches)
    assert "loss_chunk_tokens=0" in whole_batch_fields((), own_step=True, **batches)
